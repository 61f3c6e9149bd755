"""Lead every attack against real services, and print what others notice.

    python -m tools.attack [NAME ...]

The attackers come from 127.0.0.2. Before, during, and five seconds after each attack: the first
tokens of somebody else, in milliseconds (median, and the worst but for one in twenty), the memory
and the open files of the service. Exit code 0: none is beyond twice what it was, or 100 ms, nothing
takes 300 MiB more, and all is back at rest.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.attack import scenes
from tools.attack.frozen import TIMEOUT, freezes
from tools.attack.gateway_scenes import on_gateway
from tools.attack.watch import Row
from tools.bench_kit import setting

WATCHED: dict[str, Callable[[Path], Row]] = {
    "cancel_storm": scenes.simple("cancel_storm"),
    "huge_prompts": scenes.simple("huge_prompts", *scenes.LONG_CONTEXT),
    "revocation": scenes.revocation,
    "idle_connections": scenes.simple("idle_connections"),
    "idle_health": scenes.on_health_port("idle_connections"),
    "long_prompts": scenes.simple("long_prompts"),
    "guessed_prompts": scenes.guessed_prompts,
    "silent_health_calls": scenes.on_health_port("silent_health_calls"),
    "long_look_ups": scenes.long_look_ups,
    "idle_http_connections": on_gateway("idle_http_connections"),
    "large_bodies": on_gateway("large_bodies"),
}
TOLD: dict[str, Callable[[Path], str]] = {
    "rotten_weights": scenes.rotten_weights,
    "strangers": scenes.strangers,
}
FROZEN = "frozen"
HEAD = ("attack", "before", "during", "after", "MiB", "most", "after", "files", "most", "after")
LINE = "{:<34} {:>14} {:>14} {:>14} {:>6} {:>6} {:>6} {:>6} {:>6} {:>6}"


def main() -> int:
    names = [*WATCHED, *TOLD, FROZEN]
    parser = argparse.ArgumentParser(
        prog="python -m tools.attack", description=__doc__.splitlines()[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    chosen = parser.parse_args().names or names
    if unknown := set(chosen) - set(names):
        parser.error(f"no such attack: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    print(setting())
    print(LINE.format(*HEAD), flush=True)
    problems = [problem for name in chosen for problem in lead(name)]
    for problem in problems:
        print(f"PROBLEM: {problem}")
    print("attack: " + ("others noticed it" if problems else "nobody else noticed"))
    return 1 if problems else 0


def lead(name: str) -> Iterator[str]:
    """Print what there is to say; yield what is not as it should be."""
    with tempfile.TemporaryDirectory() as folder:
        if name in WATCHED:
            row = WATCHED[name](Path(folder))
            show(row)
            yield from (f"{row.attack}: {problem}" for problem in row.problems)
            return
        if name == FROZEN:
            print(f"frozen, with --engine-timeout {TIMEOUT:g}:", flush=True)
        told = map(str, freezes(Path(folder))) if name == FROZEN else [TOLD[name](Path(folder))]
        for line in told:
            print(f"{name}: {line}" if name != FROZEN else f"  {line}", flush=True)
            if line.startswith("PROBLEM"):
                yield f"{name}: {line}"


def show(row: Row) -> None:
    phases = (row.before, row.during, row.after)
    columns = [phase.told() for phase in phases]
    columns += [f"{max(phase.mib):.0f}" for phase in phases]
    columns += [str(max(phase.files)) for phase in phases]
    print(LINE.format(row.attack, *columns))
    if row.note:
        print(f"  {row.note}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
