"""What one GPU gives: correctness first, then times, section by section.

    python -m tools.gpu.bench all --out DIR
    python -m tools.gpu.bench join --out DIR

Each section is a matter of minutes, and leaves a JSON file with its commit and versions; join makes
one page of all sections. Sections that check something fail: the exit code is 1 then,
after all have run.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tools.gpu import (
    as_it_comes,
    check,
    dense,
    features,
    gateway,
    grammars,
    guesses,
    head_comes,
    heads,
    memory,
    nccl,
    options,
    product_times,
    projection,
    report,
    sections,
    serving,
)
from tools.gpu.check import PARTS
from tools.gpu.report import Rows
from tools.gpu.shapes import SHAPES

PAGE = Path("docs/benchmarks/h200.md")


def attention(args: argparse.Namespace) -> Rows:
    return sections.attention(args.cases)


SECTIONS = {
    "check": lambda args: check.check(args.shapes, args.parts),
    "attention": attention,
    "memcheck": lambda args: sections.memcheck(),
    "products": lambda args: product_times.products(),
    "plain": lambda args: sections.plain(),
    "as-it-comes": lambda args: as_it_comes.as_it_comes(),
    "gap": lambda args: sections.gap(),
    "tree": lambda args: sections.tree(),
    "prefill": lambda args: sections.prefill(),
    "features": lambda args: features.features(),
    "head-comes": lambda args: head_comes.head_comes(),
    "growth": lambda args: sections.growth(),
    "transformers": lambda args: sections.against_transformers(args.prompts),
    "exact": lambda args: serving.exact(args.prompts, args.tokens, 0.0),
    "exact-sampled": lambda args: serving.exact(args.prompts, args.tokens, 1.0),
    "exact-shares": lambda args: serving.exact_shares(args.prompts, args.tokens),
    "dense": lambda args: dense.dense(args.prompts, args.tokens),
    "options": lambda args: options.options(args.prompts),
    "guesses": lambda args: guesses.guesses(args.prompts),
    "rejection": lambda args: options.rejection(args.prompts),
    "memory": lambda args: memory.memory(),
    "nccl": lambda args: nccl.nccl(args.nccl),
    "modes": lambda args: serving.modes(args.prompts, args.tokens),
    "gateway": lambda args: gateway.gateway(),
    "heads": lambda args: heads.heads(),
    "grammars": lambda args: grammars.grammars(),
    "shares": lambda args: serving.shares(args.prompts),
    "projection": lambda args: projection.project(args.prompts),
    "modes-cpu-draft": lambda args: serving.modes_with_draft_on_cpu(args.prompts, args.tokens),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sections", nargs="+", choices=[*SECTIONS, "all", "join"])
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--commit", default=None, help="where git does not know it")
    parser.add_argument("--cases", type=int, default=12, help="of attention, for each use")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    percent = "of an H200's multiprocessors, for check"
    parser.add_argument(
        "--parts", nargs="+", type=int, choices=PARTS, default=list(PARTS), help=percent
    )
    library = "libnccl.so.2 to take before torch's, for nccl (or SSD_BENCH_NCCL)"
    given = os.environ.get("SSD_BENCH_NCCL")
    parser.add_argument("--nccl", type=Path, default=given and Path(given), help=library)
    args = parser.parse_args()
    if args.sections == ["join"]:
        report.join(args.out, PAGE)
        return
    names = list(SECTIONS) if "all" in args.sections else args.sections
    if len(names) > 1:
        passed = _run_each(names)
    else:
        section, commit = partial(SECTIONS[names[0]], args), args.commit or report.commit()
        passed = report.run_section(names[0], section, args.out, commit)
    sys.exit(not passed)


def _run_each(names: Sequence[str]) -> bool:
    """Each in a process of its own: what one leaves on the device is not the next one's."""
    rest = [word for word in sys.argv[1:] if word not in [*SECTIONS, "all"]]
    commands = [[sys.executable, "-m", "tools.gpu.bench", name, *rest] for name in names]
    codes = [subprocess.run(command, check=False).returncode for command in commands]
    return not any(codes)


if __name__ == "__main__":
    main()
