"""Small kernels between matrix products, for row counts that the fused products do not cover."""

import triton
import triton.language as tl


def overlapping(overlap: bool) -> dict[str, bool]:
    """Options of a kernel that may begin while the one before it ends."""
    return {"OVERLAP": True, "launch_pdl": True} if overlap else {"OVERLAP": False}


@triton.jit
def norm_kernel(
    x,  # [rows, WIDTH]
    weight,  # [WIDTH]
    out,  # [rows, WIDTH]
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,  # WIDTH as a power of 2
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    tl.store(out + row * WIDTH + column, (value * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def ordered_sum_kernel(
    parts,  # [RANKS, count]
    out,  # [count]
    count,
    RANKS: tl.constexpr,
    PIECE: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    inside = at < count
    total = tl.load(parts + at, mask=inside, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, RANKS):
        parts += count
        total += tl.load(parts + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def square_sums_kernel(
    projected,  # [rows, width]: queries, keys, values
    sums,  # [rows, 2]
    width,
    QUERY: tl.constexpr,  # entries of a row's queries; likewise of its keys
    KEY: tl.constexpr,
    PADDED: tl.constexpr,  # QUERY as a power of 2
):
    row, is_key = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, PADDED)
    inside = column < tl.where(is_key == 1, KEY, QUERY)
    at = projected + row * width + is_key * QUERY + column
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + row * 2 + is_key, tl.sum(value * value, 0))


@triton.jit
def scale_qk_kernel(
    projected,
    norm,  # [QUERY + KEY]
    sums,
    width,
    query_width,  # entries in a sum
    key_width,
    eps,
    QUERY: tl.constexpr,
    KEY: tl.constexpr,
    PADDED: tl.constexpr,
):
    row, is_key = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, PADDED)
    inside = column < tl.where(is_key == 1, KEY, QUERY)
    mean = tl.load(sums + row * 2 + is_key) / tl.where(is_key == 1, key_width, query_width)
    scale = tl.rsqrt(mean + eps) * tl.load(norm + is_key * QUERY + column, mask=inside, other=0.0)
    at = projected + row * width + is_key * QUERY + column
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (value * scale).to(projected.dtype.element_ty), mask=inside)


@triton.jit
def gate_kernel(
    x,  # [rows, 2 * width]: gates, then what they gate
    out,  # [rows, width]
    width,
    PIECE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    inside = column < width
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * value
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def move_kernel(
    cache,  # [layers * 2, slots, WIDTH]
    sources,  # [most] slots
    targets,  # [most]
    count,  # [1]
    slots,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Copies keys and values of computed tokens to other slots, in all layers; none is both."""
    which = tl.program_id(0)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if which < tl.load(count):
        layer = cache + tl.program_id(1).to(tl.int64) * slots * WIDTH
        column = tl.arange(0, PADDED)
        source = tl.load(sources + which).to(tl.int64) * WIDTH + column
        target = tl.load(targets + which).to(tl.int64) * WIDTH + column
        tl.store(layer + target, tl.load(layer + source, mask=column < WIDTH), mask=column < WIDTH)


@triton.jit
def tap_kernel(
    hidden,  # [rows, width]
    out,  # [rows, stride]: the rows of one boundary, beside those of others
    width,
    stride,
    PIECE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    inside = column < width
    if OVERLAP:
        # In this order: what comes next may rely on all that was before this kernel.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(hidden + row * width + column, mask=inside, other=0.0)
    tl.store(out + row * stride + column, value, mask=inside)


@triton.jit
def states_before_kernel(
    states,  # [slots, width]
    given,  # [rows, width]: where the target has told them
    is_given,  # [rows]
    out,  # [rows, width]
    run_begin,  # of a step's inputs, as all that follow
    run_rows,
    run_depths,
    run_branches,
    limits,
    tables,  # [runs, TABLE]
    scratch,  # [runs, SCRATCH]
    width,
    TABLE: tl.constexpr,
    SCRATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """What each row of a step goes on from: the state of the row before it, in its sequence or in
    its branch. The first row of a text reads its own slot."""
    run, at = tl.program_id(2), tl.program_id(1)
    column = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    inside = column < width
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if at < tl.load(run_rows + run):
        row = (tl.load(run_begin + run) + at).to(tl.int64)
        depth = tl.load(run_depths + run)
        if tl.load(is_given + row) != 0:
            value = tl.load(given + row * width + column, mask=inside, other=0.0)
        else:
            if depth > 1:  # of a branch, whose own slot is its last one
                before = (depth - 2) * tl.load(run_branches + run) + at
                slot = tl.load(scratch + run * SCRATCH + before)
            else:
                limit = tl.load(limits + row)
                place = tl.where(depth == 1, limit, tl.maximum(limit - 1, 0))
                slot = tl.load(tables + run * TABLE + place // BLOCK) * BLOCK + place % BLOCK
            value = tl.load(states + slot.to(tl.int64) * width + column, mask=inside, other=0.0)
        tl.store(out + row * width + column, value, mask=inside)


@triton.jit
def weigh_kernel(
    hidden,  # [rows, width]
    norm,  # [width]
    x,  # [rows, width]
    squares,  # [width / PANEL, all_rows]
    width,
    all_rows,
    PIECE: tl.constexpr,
    PANEL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    first, row = tl.program_id(0) * PIECE, tl.program_id(1)
    column = first + tl.arange(0, PIECE)
    inside = column < width
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = row.to(tl.int64) * width + column
    value = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + at, (value * scale).to(x.dtype.element_ty), mask=inside)
    sums = tl.sum(tl.reshape(value * value, (PIECE // PANEL, PANEL)), 1)
    panel = first // PANEL + tl.arange(0, PIECE // PANEL)
    tl.store(squares + panel * all_rows + row, sums, mask=panel * PANEL < width)
