"""Attention of a few rows per sequence over its paged cache: decode, verify and tree steps.

A *run* is the rows of one sequence. A row sees the positions up to its own limit, through the
sequence's block table, and, in a tree, the tokens of its own branch, which lie in scratch slots:
one row of slots for each depth, one slot in it for each branch. So every key is read once for all
rows of a run, and there is no mask in memory.

Keys are dealt out to programs at fixed positions, whatever the length is, and what a row does not
see adds exactly nothing. So a row's result depends on its own limit and on nothing else: not on
other rows, other runs, or how far its run reaches beyond it.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

NEAR = 16  # programs with one tile each; those beyond have more, to keep their number in bounds
MOST_FAR = 48


@dataclass(frozen=True)
class Division:
    """How keys are dealt out; the same for a server's life."""

    tile: int  # keys that are read at a time, and by one program as long as there are few
    far: int  # keys of a program beyond the near ones
    most_parts: int

    @classmethod
    def of(cls, max_positions: int, most_scratch: int) -> "Division":
        """Where there are trees, many rows share a program: fewer programs write fewer sums."""
        tile = 128 if most_scratch else 64
        beyond = max(0, max_positions - NEAR * tile)
        far = max(256, triton.next_power_of_2(-(-beyond // MOST_FAR)))
        near = min(NEAR, -(-max_positions // tile))
        return cls(tile, far, near + -(-beyond // far) + -(-most_scratch // tile))

    def constants(self) -> dict[str, int]:
        parts = self.most_parts
        return {"TILE": self.tile, "NEAR": NEAR, "FAR": self.far, "MOST_PARTS": parts}


@triton.jit
def _parts(end, FAR: tl.constexpr, TILE: tl.constexpr, NEAR: tl.constexpr):
    """Programs that share the positions before ``end``."""
    return tl.minimum(tl.cdiv(end, TILE), NEAR) + tl.cdiv(tl.maximum(end - NEAR * TILE, 0), FAR)


@triton.jit
def _attend(q, k, v, valid, scale, m, total, acc):
    """One tile of keys k, v [TILE, DIM] under the online softmax of rows q [ROWS, DIM]."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    score = tl.where(valid, score, float("-inf"))
    highest = tl.maximum(m, tl.max(score, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)  # 0: seen nothing yet
    weight = tl.exp2(score - base[:, None])
    keep = tl.exp2(m - base)
    total = total * keep + tl.sum(weight, 1)
    acc = acc * keep[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
    return highest, total, acc


@triton.jit
def _read(key, value, slot, inside, kv_head, KV_HEADS: tl.constexpr, DIM: tl.constexpr):
    """Keys and values of one head in slots [TILE]: [TILE, DIM] each, zeros where not inside."""
    dim = tl.arange(0, DIM)
    at = (slot.to(tl.int64) * KV_HEADS + kv_head)[:, None] * DIM + dim[None, :]
    k = tl.load(key + at, mask=inside[:, None], other=0.0)
    v = tl.load(value + at, mask=inside[:, None], other=0.0)
    return k, v


@triton.jit
def paged_attention_kernel(
    query,  # [rows, HEADS, DIM]
    key,  # [blocks, BLOCK, KV_HEADS, DIM]
    value,
    out,  # [rows, HEADS, DIM]
    run_begin,  # [runs] first row
    run_rows,  # [runs]
    run_end,  # [runs] positions of the sequence that are in the cache; 0: an empty run
    limits,  # [rows] the last position that a row sees
    tables,  # [runs, table_width] blocks
    branches,  # [rows] the branch of a row, -1: none
    run_branches,  # [runs] how many there are
    run_depths,  # [runs] how many rows of scratch slots are filled
    scratch,  # [runs, scratch_width] slots
    partial,  # out [runs, KV_HEADS, MOST_PARTS, ROWS, DIM] float32: sums of weighted values
    peaks,  # out [runs, KV_HEADS, MOST_PARTS, ROWS, 2]: the highest score, the sum of weights
    scale,
    table_width,
    scratch_width,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a run times heads of a group, at least; a power of 2
    FAR: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    TILE: tl.constexpr,
    NEAR: tl.constexpr,
    TREE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    part, kv_head, run = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    # What is read before the wait was written before the first kernel of this step.
    end = tl.load(run_end + run)
    shared_parts = _parts(end, FAR, TILE, NEAR)
    parts = shared_parts
    if TREE:
        num_branches = tl.load(run_branches + run)
        tail = num_branches * tl.load(run_depths + run)
        parts += tl.cdiv(tail, TILE)
    if part < parts:
        begin, count = tl.load(run_begin + run), tl.load(run_rows + run)
        lane = tl.arange(0, ROWS)
        row, head = lane // GROUP, kv_head * GROUP + lane % GROUP
        real = row < count
        row = begin + tl.minimum(row, count - 1)
        limit = tl.load(limits + row)
        dim = tl.arange(0, DIM)
        where = (row * HEADS + head)[:, None] * DIM + dim[None, :]
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        q = tl.load(query + where)
        m = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, DIM), tl.float32)
        if part < shared_parts:
            first = tl.where(part < NEAR, part * TILE, NEAR * TILE + (part - NEAR) * FAR)
            last = tl.minimum(first + tl.where(part < NEAR, TILE, FAR), end)
            for start in range(first, last, TILE):
                position = start + tl.arange(0, TILE)
                inside = position < end
                block = tl.load(
                    tables + run * table_width + position // BLOCK, mask=inside, other=0
                )
                slot = block * BLOCK + position % BLOCK
                k, v = _read(key, value, slot, inside, kv_head, KV_HEADS, DIM)
                valid = (position[None, :] <= limit[:, None]) & inside[None, :]
                m, total, acc = _attend(q, k, v, valid, scale, m, total, acc)
        else:
            if TREE:
                branch = tl.load(branches + row)
                index = (part - shared_parts) * TILE + tl.arange(0, TILE)
                inside = index < tail
                slot = tl.load(scratch + run * scratch_width + index, mask=inside, other=0)
                k, v = _read(key, value, slot, inside, kv_head, KV_HEADS, DIM)
                own = (index % num_branches)[None, :] == branch[:, None]
                m, total, acc = _attend(q, k, v, own & inside[None, :], scale, m, total, acc)
        if parts == 1:
            tl.store(
                out + where, (acc / total[:, None]).to(out.dtype.element_ty), mask=real[:, None]
            )
        else:
            mine = ((run * KV_HEADS + kv_head) * MOST_PARTS + part).to(tl.int64) * ROWS
            tl.store(partial + (mine + lane)[:, None] * DIM + dim[None, :], acc)
            tl.store(peaks + (mine + lane) * 2, m)
            tl.store(peaks + (mine + lane) * 2 + 1, total)


@triton.jit
def merge_parts_kernel(
    partial,
    peaks,
    out,
    run_begin,
    run_rows,
    run_end,
    run_branches,
    run_depths,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    FAR: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    TILE: tl.constexpr,
    NEAR: tl.constexpr,
    AT_ONCE: tl.constexpr,  # a power of 2
    TREE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The parts of one row and head, added in their order."""
    lane, kv_head, run = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    parts = _parts(tl.load(run_end + run), FAR, TILE, NEAR)
    if TREE:
        parts += tl.cdiv(tl.load(run_branches + run) * tl.load(run_depths + run), TILE)
    if OVERLAP:  # also where there is nothing to add: what comes next waits for this kernel alone
        tl.extra.cuda.gdc_wait()
    if (parts > 1) & (lane < tl.load(run_rows + run) * GROUP):
        dim = tl.arange(0, DIM)
        first = ((run * KV_HEADS + kv_head) * MOST_PARTS).to(tl.int64) * ROWS + lane
        highest = float("-inf")
        for begin in range(0, parts, AT_ONCE):
            part = begin + tl.arange(0, AT_ONCE)
            m = tl.load(peaks + (first + part * ROWS) * 2, mask=part < parts, other=float("-inf"))
            highest = tl.maximum(highest, tl.max(m, 0))
        total = 0.0
        acc = tl.zeros((DIM,), tl.float32)
        for begin in range(0, parts, AT_ONCE):
            part = begin + tl.arange(0, AT_ONCE)
            there = part < parts
            at = first + part * ROWS
            m = tl.load(peaks + at * 2, mask=there, other=float("-inf"))
            weight = tl.exp2(m - highest)
            total += tl.sum(weight * tl.load(peaks + at * 2 + 1, mask=there, other=0.0), 0)
            each = tl.load(
                partial + at[:, None] * DIM + dim[None, :], mask=there[:, None], other=0.0
            )
            acc += tl.sum(weight[:, None] * each, 0)
        row = tl.load(run_begin + run) + lane // GROUP
        head = kv_head * GROUP + lane % GROUP
        tl.store(out + (row * HEADS + head) * DIM + dim, (acc / total).to(out.dtype.element_ty))


@triton.jit
def rotate_and_write_kernel(
    qkv,  # [rows, HEADS + 2 * KV_HEADS, DIM]
    norm,  # [HEADS + KV_HEADS, DIM], where NORM
    cosine,  # [positions, DIM]
    sine,  # [positions, DIM], negated in its first half
    positions,  # [rows]
    slots,  # [rows]
    query,  # out [rows, HEADS, DIM]
    key,  # out [blocks * BLOCK, KV_HEADS, DIM]
    value,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Applies QK-norm and rotary embedding, and writes new keys and values to their slots."""
    row, head = tl.program_id(0), tl.program_id(1)
    dim = tl.arange(0, DIM)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    here = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * DIM
    x = tl.load(here + dim)
    slot = tl.load(slots + row).to(tl.int64)
    if head >= HEADS + KV_HEADS:
        tl.store(value + (slot * KV_HEADS + head - HEADS - KV_HEADS) * DIM + dim, x)
    else:
        across = (dim + DIM // 2) % DIM
        straight, swapped = x.to(tl.float32), tl.load(here + across).to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(straight * straight, 0) / DIM + eps)
            straight *= scale * tl.load(norm + head * DIM + dim).to(tl.float32)
            swapped *= scale * tl.load(norm + head * DIM + across).to(tl.float32)
        position = tl.load(positions + row).to(tl.int64)
        cos = tl.load(cosine + position * DIM + dim).to(tl.float32)
        sin = tl.load(sine + position * DIM + dim).to(tl.float32)
        turned = (straight * cos + swapped * sin).to(query.dtype.element_ty)
        if head < HEADS:
            tl.store(query + (row * HEADS + head) * DIM + dim, turned)
        else:
            tl.store(key + (slot * KV_HEADS + head - HEADS) * DIM + dim, turned)
