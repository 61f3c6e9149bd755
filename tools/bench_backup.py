"""What a row does that missed: tokens/s of each backup, for one stream and for eight.

    python -m tools.bench_backup [--tokens 96] [--repeats 3]

Target and draft are pinned to a core each; backups are interleaved. ``auto`` should be as fast as
the fastest of the others at each batch size.
"""

import argparse
import contextlib
import statistics
from collections import defaultdict

from tools.bench_kit import Client, bootstrap, service, setting, story_prompts

BACKUPS = ("jit", "ngram", "none", "auto")
BATCHES = (1, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shape", default="hidden=512,ff=2048,layers=8")
    args = parser.parse_args()
    print(setting())
    print(f"target stories-target grown to {args.shape}, greedy\n")
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    sources: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    with contextlib.ExitStack() as stack:
        draft = stack.enter_context(service("ssd_draft", "stories-draft", "--threads", "1", core=1))
        clients = {}
        for backup in BACKUPS:
            flags = ("--threads", "1", "--draft", draft, "--no-auto-off", "--backup", backup)
            grown = ("--expand-to", args.shape)
            target = service("ssd_target", "stories-target", *flags, *grown, core=0)
            clients[backup] = Client(stack.enter_context(target))
            clients[backup].wait_for_links(1)
        for repeat in range(-1, args.repeats):
            for batch in BATCHES:
                prompts = story_prompts(batch, seed=100 * batch + repeat)
                for backup, client in clients.items():
                    one_run(client, prompts, args.tokens, rates[backup, batch], sources, backup)
                    if repeat < 0:
                        rates[backup, batch].clear()  # warm
    table(rates, sources)


def one_run(
    client: Client,
    prompts: list[str],
    tokens: int,
    rates: list[float],
    sources: dict[tuple[str, int], list[int]],
    backup: str,
) -> None:
    done = client.together(prompts, "ssd", tokens)
    rates.append(sum(len(g.tokens) for g in done) / max(g.seconds for g in done))
    counts = sources[backup, len(prompts)]
    for g in done:
        s = g.stats
        for i, n in enumerate(
            (s.cache_rounds, s.just_in_time_rounds, s.ngram_rounds, s.plain_rounds)
        ):
            counts[i] += n


def table(
    rates: dict[tuple[str, int], list[float]], sources: dict[tuple[str, int], list[int]]
) -> None:
    print("batch  backup  tokens/s  95 % interval      cache   jit  ngram  plain rounds")
    for batch in BATCHES:
        for backup in BACKUPS:
            low, high = bootstrap(rates[backup, batch])
            counts = sources[backup, batch]
            shares = "  ".join(f"{n / max(1, sum(counts)):5.0%}" for n in counts)
            print(
                f"{batch:5d}  {backup:6s}  {statistics.median(rates[backup, batch]):7.1f}   "
                f"{low:6.1f} to {high:6.1f}   {shares}"
            )


if __name__ == "__main__":
    main()
