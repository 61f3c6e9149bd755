"""No hop on a hit: tokens/s against the delay of the link between target and draft.

    python -m tools.bench_delay [--tokens 96] [--prompts 2] [--repeats 3]

``ssd`` speculates while the target verifies. ``blocking`` is the same endpoint asked to prepare
nothing: every round tells its outcome, waits for the speculation, then verifies. The target is
pinned to one core, the draft to another; the target is grown until a forward takes 60 ms.
"""

import argparse
import contextlib
import math
import statistics
from collections import defaultdict

from ssd_client.bench.measure.delay_proxy import DelayProxy
from tools.bench_kit import (
    Client,
    Generated,
    bootstrap,
    service,
    setting,
    story_prompts,
)

DELAYS_MS = (0, 1, 2, 5, 10, 20)
SHAPE = "hidden=1280,ff=5120,layers=8"
COMMON = ("--threads", "1", "--no-adapt-depth", "--no-auto-off")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--shape", default=SHAPE)
    args = parser.parse_args()
    print(setting())
    print(f"target stories-target grown to {args.shape}, K = {args.depth}, greedy, batch 1\n")
    with contextlib.ExitStack() as stack:
        clients, proxies = start(stack, args.shape, args.depth)
        measured = measure(clients, proxies, args)
    table(measured)


def start(
    stack: contextlib.ExitStack, shape: str, depth: int
) -> tuple[dict[str, Client], dict[str, DelayProxy]]:
    clients, proxies = {}, {}
    draft_flags = {"ssd": (), "blocking": ("--fan-out", "0", "--fan-out-miss", "0")}
    target_flags = {"ssd": (), "blocking": ("--backup", "jit", "--wait", "10000")}
    for way in ("ssd", "blocking"):
        draft = stack.enter_context(
            service("ssd_draft", "stories-draft", "--threads", "1", *draft_flags[way], core=1)
        )
        proxies[way] = DelayProxy()
        address = proxies[way].to(draft)
        flags = ("--draft", address, "--depth", str(depth), "--expand-to", shape)
        target = stack.enter_context(
            service("ssd_target", "stories-target", *COMMON, *flags, *target_flags[way], core=0)
        )
        clients[way] = Client(target)
        clients[way].wait_for_links(1)
    return clients, proxies


def measure(
    clients: dict[str, Client], proxies: dict[str, DelayProxy], args: argparse.Namespace
) -> dict[tuple[str, int], list[Generated]]:
    """Delays and ways interleaved; the same prompts for all."""
    prompts = story_prompts(args.prompts, seed=3)
    measured: dict[tuple[str, int], list[Generated]] = defaultdict(list)
    for way, client in clients.items():
        client.generate(prompts[0], "ssd", 24)  # warm, and the clocks of both sides know the other
        texts = client.generate(prompts[0], "off", 24).tokens
        if client.generate(prompts[0], "ssd", 24).tokens != texts:
            raise SystemExit(f"{way}: the text changed")
    for _ in range(args.repeats):
        for delay in DELAYS_MS:
            for way, client in clients.items():
                proxies[way].delay_s = delay / 1000
                for prompt in prompts:
                    measured[way, delay].append(client.generate(prompt, "ssd", args.tokens))
    return measured


def table(measured: dict[tuple[str, int], list[Generated]]) -> None:
    print("one-way   ssd                                                   blocking")
    print("delay     hit round  growth  95 % interval   other   hits  tokens/s   round  tokens/s")
    base = hit_rounds(measured["ssd", 0])
    for delay in DELAYS_MS:
        ssd, blocking = measured["ssd", delay], measured["blocking", delay]
        rounds = hit_rounds(ssd)
        # Of generations that have hit with and without the delay: a short one may not.
        growth = [r / b - 1 for r, b in zip(rounds, base, strict=True) if r and b] or [math.nan]
        low, high = bootstrap(growth)
        hits = sum(g.stats.cache_rounds for g in ssd) / sum(g.stats.rounds for g in ssd)
        middle = statistics.median(rounds)
        print(
            f"{delay:4d} ms   {middle:6.1f} ms  {statistics.median(growth):+6.1%}"
            f"  {low:+6.1%} to {high:+5.1%}  {other_round(ssd):5.1f} ms  {hits:4.0%}"
            f"  {rate(ssd):7.1f}   {other_round(blocking):6.1f} ms {rate(blocking):6.1f}"
        )


def hit_rounds(generated: list[Generated]) -> list[float]:
    """Milliseconds of a round that hit, one value for each generation."""
    return [g.stats.cache_round_micros / max(1, g.stats.cache_rounds) / 1e3 for g in generated]


def other_round(generated: list[Generated]) -> float:
    micros = sum(g.stats.other_round_micros for g in generated)
    rounds = sum(g.stats.rounds - g.stats.cache_rounds for g in generated)
    return micros / max(1, rounds) / 1e3


def rate(generated: list[Generated]) -> float:
    return statistics.median(g.rate for g in generated)


if __name__ == "__main__":
    main()
