"""Compile every Triton kernel for an H100, here: what the interpreter forgives is found.

The compiler needs no GPU. A kernel that was compiled before, by the same compiler and from the same
sources, is passed over: what it was made from is noted in build/check.
"""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from ssd_engine.kernels import elementwise, paged_attention
from ssd_engine.kernels.products import triton_kernels as triton_products
from ssd_engine.kernels.sampling import (
    adjusting,
    candidates,
    digit_search,
    drawing,
    filtering,
    guessing,
    rejecting,
    reporting,
)

HALF, INTS, LONGS, FLOATS, DOUBLES = "*bf16", "*i32", "*i64", "*fp32", "*fp64"
ABOUT = {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "ROWS": 32, "OVERLAP": True}
DIVISION = {"TILE": 64, "NEAR": 16, "FAR": 256, "MOST_PARTS": 20}

FILTERED = {"FILTERED": True, "CUT": filtering.CUT, "CUT_PIECES": 128}
PIECES = {"PIECE": 1024, "OVERLAP": True}
SIZES = ["i32", "i32", "i32"]
CANDIDATES = {name: getattr(candidates, name) for name in ("SUMS", "NUMBERS", "MOST")}
DIGITS = [INTS, LONGS, LONGS, LONGS]
TRAIL = [INTS, INTS, "i32"]
ADJUSTED = [FLOATS, FLOATS, INTS, DOUBLES, *[INTS] * 5, *TRAIL, "i32", "i32", "i32"]
GUESSED = [LONGS, FLOATS, INTS, INTS, DOUBLES, FLOATS, INTS, FLOATS]
# What the kernels of rejection read, and what they have in common.
REJECTED = [FLOATS, FLOATS, INTS, LONGS, INTS, LONGS]
REJECTION = {"PIECE": 1024, "KIND": tl.bfloat16, **FILTERED}
PRODUCT = {"EVEN": False, "BIAS": True, "ADD": True}

KERNELS: list[tuple[Any, list[str], dict[str, Any]]] = [
    (
        paged_attention.paged_attention_kernel,
        [HALF] * 4 + [INTS] * 9 + [FLOATS, FLOATS, "fp32", "i32", "i32"],
        {**ABOUT, **DIVISION, "BLOCK": 16, "TREE": True},
    ),
    (
        paged_attention.merge_parts_kernel,
        [FLOATS, FLOATS, HALF] + [INTS] * 5,
        {**ABOUT, **DIVISION, "AT_ONCE": 8, "TREE": True},
    ),
    (
        paged_attention.rotate_and_write_kernel,
        [HALF] * 4 + [INTS, INTS] + [HALF] * 3 + ["fp32"],
        {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "NORM": True, "OVERLAP": True},
    ),
    (
        drawing.best_of_piece_kernel,
        [FLOATS, LONGS, FLOATS, INTS, DOUBLES, INTS, INTS, "i32", "i32", "i32", LONGS, INTS],
        {"PIECE": 1024, **FILTERED, "OVERLAP": True},
    ),
    (
        drawing.verdict_kernel,
        [INTS, INTS, INTS, DOUBLES, INTS, INTS, INTS, INTS, "i32", "i32"],
        {"ROWS": 8, "PIECES": 256, "OVERLAP": True},
    ),
    (
        reporting.rank_kernel,
        [FLOATS, FLOATS, INTS, INTS, *SIZES],
        {"RANKS": 20, "WIDTH": 32, "LEAF": 128, "LEAVES": 2048, "OVERLAP": True},
    ),
    (
        guessing.leaf_kernel,
        [FLOATS] * 5 + [*SIZES, "i32"],
        {**PIECES, "LEAF": 128},
    ),
    (
        guessing.best_leaves_kernel,
        [FLOATS, INTS, "i32", "i32"],
        {"MOST": 64, "LEAVES": 2048, "OVERLAP": True},
    ),
    (
        guessing.likeliest_kernel,
        [FLOATS, INTS, INTS, *SIZES],
        {"MOST": 64, "LEAF": 128, "OVERLAP": True},
    ),
    (
        guessing.guess_kernel,
        [FLOATS, INTS, FLOATS, FLOATS, *GUESSED, INTS, INTS, *SIZES, "fp32"],
        {"RANKS": 17, "WIDTH": 32, "MOST": 64, "PIECES": 128, "STREAM": 1, "OVERLAP": True},
    ),
    (
        filtering.prepare_kernel,
        [FLOATS, FLOATS, FLOATS, INTS, LONGS, INTS, *SIZES],
        {**PIECES, "COUNTS": candidates.BINS.value, "SUMS": candidates.SUMS},
    ),
    (
        candidates.bin_kernel,
        [FLOATS, FLOATS, INTS, DOUBLES, FLOATS, INTS, LONGS, *SIZES],
        {**PIECES, "PIECES": 128, "SUMS": candidates.SUMS},
    ),
    (
        candidates.collect_kernel,
        [FLOATS, FLOATS, INTS, DOUBLES, FLOATS, INTS, LONGS, INTS, INTS, INTS, LONGS, *SIZES],
        {**PIECES, "PIECES": 128, **CANDIDATES},
    ),
    (
        candidates.cut_kernel,
        [INTS, DOUBLES, FLOATS, FLOATS, LONGS, INTS, INTS, LONGS, INTS, LONGS, INTS, LONGS, "i32"],
        {
            **CANDIDATES,
            "PIECES": 128,
            "PAIRS": candidates.PAIRS,
            "PAIRED": candidates.PAIRED,
            "CUT": filtering.CUT,
            "COUNTS": 1024,
            "MASSES": 128,
            "OVERLAP": True,
        },
    ),
    (
        digit_search.count_kernel,
        [FLOATS, FLOATS, INTS, FLOATS, INTS, INTS, LONGS, *SIZES, "i32"],
        {**PIECES, "BITS": 8},
    ),
    (
        digit_search.mass_kernel,
        [FLOATS, FLOATS, INTS, DOUBLES, FLOATS, INTS, *DIGITS, *SIZES, "i32"],
        {**PIECES, "COUNT_BITS": 8, "BITS": 4, "PIECES": 128},
    ),
    (
        filtering.tie_kernel,
        [FLOATS, FLOATS, INTS, DOUBLES, FLOATS, FLOATS, INTS, *DIGITS, LONGS, INTS, *SIZES],
        {**PIECES, "COUNT_BITS": 8, "MASS_BITS": 4, "PIECES": 128, "CUT": filtering.CUT},
    ),
    (
        adjusting.add_kernel,
        [INTS, INTS, INTS, INTS, "i32", INTS, *TRAIL, "i32"],
        {"MOST": 64, "TRAIL": 15, "OVERLAP": True},
    ),
    (adjusting.penalise_kernel, ADJUSTED, {**PIECES, "PATH": 0, "TRAIL": 0}),
    (adjusting.penalise_kernel, ADJUSTED, {**PIECES, "PATH": 15, "TRAIL": 15}),
    (
        adjusting.bias_kernel,
        [*ADJUSTED, INTS, FLOATS, INTS, INTS],
        {"ENTRIES": adjusting.ENTRIES, "PATH": 15, "TRAIL": 15, "OVERLAP": True},
    ),
    (
        reporting.survey_kernel,
        [FLOATS, FLOATS, FLOATS, *SIZES, "i32"],
        {**PIECES, "LEAF": 128},
    ),
    (
        reporting.total_kernel,
        [FLOATS, FLOATS, LONGS, *SIZES],
        {**PIECES, "PIECES": 128},
    ),
    (
        reporting.report_kernel,
        [FLOATS, DOUBLES, INTS, FLOATS, LONGS, INTS, INTS, INTS, *SIZES],
        {"RANKS": 20, "WIDTH": 32, "PIECES": 128, "OVERLAP": True},
    ),
    (rejecting.weigh_rows_kernel, [*REJECTED, DOUBLES, DOUBLES, DOUBLES, *SIZES], REJECTION),
    (
        rejecting.judge_kernel,
        [*REJECTED, LONGS] + [DOUBLES] * 6 + [INTS, *SIZES],
        {**REJECTION, "LINES": 8},
    ),
    (
        rejecting.draw_rest_kernel,
        [*REJECTED, LONGS] + [DOUBLES] * 3 + [INTS, FLOATS, FLOATS, LONGS, *SIZES, "i32"],
        {**REJECTION, "LINES": 8, "REPORTED": True},
    ),
    (drawing.follow_kernel, [INTS, INTS, "i32"], {"ROWS": 32}),
    (
        elementwise.norm_kernel,
        [HALF, HALF, HALF, "fp32"],
        {"WIDTH": 5120, "PADDED": 8192, "OVERLAP": False},
    ),
    (elementwise.ordered_sum_kernel, [HALF, HALF, "i32"], {"RANKS": 4, "PIECE": 1024}),
    (elementwise.gate_kernel, [HALF, HALF, "i32"], {"PIECE": 1024, "OVERLAP": False}),
    (elementwise.tap_kernel, [HALF, HALF, "i32", "i32"], {"PIECE": 1024, "OVERLAP": True}),
    (
        elementwise.states_before_kernel,
        [HALF, HALF, INTS, HALF, *[INTS] * 7, "i32"],
        {"TABLE": 32, "SCRATCH": 64, "BLOCK": 16, "PIECE": 1024, "OVERLAP": False},
    ),
    (
        elementwise.weigh_kernel,
        [HALF, HALF, HALF, FLOATS, "i32", "i32"],
        {"PIECE": 1024, "PANEL": 64, "OVERLAP": True},
    ),
    (
        triton_products.product_kernel,
        [HALF, HALF, HALF, FLOATS] + ["i32"] * 7,
        {**PRODUCT, "ROWS": 64, "COLUMNS": 64, "DEPTH": 128},
    ),
    (
        triton_products.product_kernel,
        [HALF] * 4 + ["i32"] * 7,
        {**PRODUCT, "ROWS": 128, "COLUMNS": 128, "DEPTH": 64},
    ),
    (
        triton_products.add_parts_kernel,
        [FLOATS, HALF, HALF] + ["i32"] * 3,
        {"PARTS": 4, "PIECE": 1024, "BIAS": True, "ADD": True},
    ),
    (
        elementwise.move_kernel,
        [HALF, INTS, INTS, INTS, "i32"],
        {"WIDTH": 1024, "PADDED": 1024, "OVERLAP": False},
    ),
]

UNFUSED = {adjusting.penalise_kernel, adjusting.bias_kernel}


def compile_kernel(kernel: Any, types: list[str], constants: dict[str, Any]) -> None:
    names = kernel.arg_names
    given = iter(types)
    signature = {name: "constexpr" if name in constants else next(given) for name in names}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    compiled = compile(
        ASTSource(kernel, signature, fixed),
        target=GPUTarget("cuda", 90, 32),
        options={"enable_fp_fusion": kernel not in UNFUSED},
    )
    if kernel in UNFUSED and "fma." in compiled.asm["ptx"]:
        raise RuntimeError(f"{kernel.__name__} has products that are not rounded")


def key_of(kernel: Any, types: list[str], constants: dict[str, Any]) -> str:
    """A digest of all that a compiled kernel follows from: any file of the kernels may have a
    function that it calls."""
    made_from = f"{triton.__version__} {kernel.__name__} {types} {constants}"
    return hashlib.sha256(made_from.encode() + _sources()).hexdigest()


def _sources() -> bytes:
    folder = Path(elementwise.__file__).parent
    files = [Path(__file__), *sorted(folder.rglob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).digest()


def compile_all(noted: Path) -> Iterator[str]:
    """Compiles what is not noted, and yields its name."""
    known = set(noted.read_text().split()) if noted.exists() else set()
    keys = {key_of(*each): each for each in KERNELS}
    for key, each in keys.items():
        if key not in known:
            compile_kernel(*each)
            yield each[0].__name__
    noted.parent.mkdir(parents=True, exist_ok=True)
    noted.write_text("\n".join(keys) + "\n")


if __name__ == "__main__":
    compiled = list(compile_all(Path(sys.argv[1])))
    print(f"{len(compiled)} of {len(KERNELS)} kernels compiled, the others were before")
