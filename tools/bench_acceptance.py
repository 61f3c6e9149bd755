"""Never slower than plain decoding, however good the draft is: acceptance that is made up.

    python -m tools.bench_acceptance [--rates 0.05 0.3 0.6 0.9] [--tokens 400] [--repeats 5]

One target for each rate of acceptance, a draft beside it on the other core and one inside it, flags
as they come: what does not pay is found out by measuring, and left. Probes are part of the figure.
Modes are interleaved, each repeat with its own prompt.
"""

import argparse
import contextlib
import statistics
from collections import defaultdict

from tools.bench_kit import Client, Generated, bootstrap, service, setting, story_prompts

RATES = (0.05, 0.3, 0.6, 0.9)
MODES = ("off", "sync", "ssd")
TARGET_SHAPE = "hidden=768,ff=3072,layers=8"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shape", default=TARGET_SHAPE)
    args = parser.parse_args()
    print(setting())
    print(f"stories-target at {args.shape}, stories-draft; {args.repeats} x {args.tokens} tokens\n")
    print("accepted  mode  tokens/s  of off  95 % interval   tokens/round  left for plain rounds")
    for rate in args.rates:
        with contextlib.ExitStack() as stack:
            client = start(stack, rate, args.shape)
            show(rate, measure(client, args.tokens, args.repeats))


def start(stack: contextlib.ExitStack, rate: float, shape: str) -> Client:
    draft = stack.enter_context(service("ssd_draft", "stories-draft", "--threads", "1", core=1))
    flags = ["stories-target", "--expand-to", shape, "--threads", "1", "--draft", draft]
    flags += ["--draft-model", "stories-draft", "--synthetic-acceptance", str(rate)]
    client = Client(stack.enter_context(service("ssd_target", *flags, core=0)))
    client.wait_for_links(1)
    return client


def measure(client: Client, tokens: int, repeats: int) -> dict[str, list[Generated]]:
    done: dict[str, list[Generated]] = defaultdict(list)
    for repeat, prompt in enumerate(story_prompts(repeats + 1, seed=60)):
        for mode in MODES if repeat % 2 else reversed(MODES):
            one = client.generate(prompt, mode, tokens, temperature=1.0, seed=repeat)
            if repeat:  # the first is to warm up
                done[mode].append(one)
    return done


def show(rate: float, done: dict[str, list[Generated]]) -> None:
    for mode in MODES:
        ratios = [a.rate / b.rate for a, b in zip(done[mode], done["off"], strict=True)]
        low, high = bootstrap(ratios)
        stats = [one.stats for one in done[mode]]
        rounds = max(1, sum(s.rounds for s in stats))
        each = sum(len(one.tokens) - 1 for one in done[mode]) / rounds
        left = sum(s.fallbacks["does not pay"] for s in stats) / rounds
        print(
            f"{rate:8g}  {mode:4s}  {statistics.median(one.rate for one in done[mode]):8.1f}  "
            f"{statistics.median(ratios):6.3f}  {low:.3f} to {high:.3f}  {each:12.2f}  {left:7.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
