"""Never in the way: endpoints that always guess wrong, or always answer late, against none.

    python -m tools.bench_useless [--tokens 1000] [--repeats 6] [--temperature 1.0]

``wrong`` is a draft model with shuffled weights, ``late`` a good one behind a link of 400 ms. Both
are found out by measuring, and left; probes are part of the figure. Target and drafts run on
different cores; modes are interleaved. Greedy texts of this length repeat themselves, so that the
look-up of n-grams, which needs no endpoint, makes them faster than ``off``: hence a temperature.
"""

import argparse
import contextlib
import shutil
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ssd_client.bench.measure.delay_proxy import DelayProxy
from ssd_engine.checkpoints.model_store import resolve_model
from tools.bench_kit import (
    Client,
    Generated,
    bootstrap,
    service,
    setting,
    story_prompts,
)

LATE_SECONDS = 0.4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    print(setting())
    print(f"stories-target, {args.streams} streams of {args.tokens} tokens, ", end="")
    print(f"temperature {args.temperature}\n")
    measured: dict[str, list[float]] = defaultdict(list)
    runs: dict[str, list[Generated]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        clients = start(stack)
        for repeat in range(args.repeats):
            prompts = story_prompts(args.streams, seed=50 + repeat)
            for way, client in clients.items():
                # A prompt that is cached has its blocks apart from what follows: in both or none.
                client.together(prompts, "off", 2)
                for mode in ("off", "ssd") if repeat % 2 else ("ssd", "off"):
                    done = client.together(prompts, mode, args.tokens, args.temperature)
                    name = f"{way} {mode}"
                    tokens = sum(len(g.tokens) for g in done)
                    measured[name].append(tokens / max(g.seconds for g in done))
                    runs[name] += done
    table(measured, runs)


def start(stack: contextlib.ExitStack) -> dict[str, Client]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    shuffled = shuffle(Path(resolve_model("stories-draft")), folder / "shuffled")
    wrong = stack.enter_context(service("ssd_draft", str(shuffled), "--threads", "1", core=1))
    good = stack.enter_context(service("ssd_draft", "stories-draft", "--threads", "1", core=1))
    proxy = DelayProxy()
    clients = {}
    for way, address in (("wrong", wrong), ("late", proxy.to(good))):
        flags = ("--threads", "1", "--draft", address)
        target = stack.enter_context(service("ssd_target", "stories-target", *flags, core=0))
        clients[way] = Client(target)
        clients[way].wait_for_links(1)
    proxy.delay_s = LATE_SECONDS
    return clients


def shuffle(model: Path, out: Path) -> Path:
    """The same model, every weight matrix with its rows in another order."""
    shutil.copytree(model, out)
    file = out / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    weights = load_file(file)
    for name, weight in weights.items():
        if weight.dim() == 2:
            order = torch.randperm(weight.shape[0], generator=generator)
            weights[name] = weight[order].contiguous()
    save_file(weights, file)
    return out


def table(measured: dict[str, list[float]], runs: dict[str, list[Generated]]) -> None:
    print("endpoint  off tokens/s  with it  ratio  95 % interval   drafted  accepted  left for")
    for way in ("wrong", "late"):
        off, on = measured[f"{way} off"], measured[f"{way} ssd"]
        ratios = [a / b for a, b in zip(on, off, strict=True)]
        low, high = bootstrap(ratios)
        stats = [g.stats for g in runs[f"{way} ssd"]]
        if [g.tokens for g in runs[f"{way} ssd"]] != [g.tokens for g in runs[f"{way} off"]]:
            raise SystemExit(f"{way}: the text changed")
        left = sum(s.fallbacks["does not pay"] for s in stats) / sum(s.rounds for s in stats)
        print(
            f"{way:8s}  {statistics.median(off):10.1f}  {statistics.median(on):8.1f}  "
            f"{statistics.median(ratios):5.3f}  {low:.3f} to {high:.3f}  "
            f"{sum(s.drafted_tokens for s in stats):7d}  "
            f"{sum(s.accepted_tokens for s in stats):7d}  {left:7.0%} of rounds"
        )


if __name__ == "__main__":
    main()
