"""One forward, every layer of it, each operation held against plain torch on the same input."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ssd_engine.execution.runner import ModelRunner
from ssd_engine.forward.batch import Chunk, Part, TreeRows
from ssd_engine.kvcache.cache import LayerCache
from ssd_engine.models.linear import look_up
from ssd_engine.self_check.expected import Expected, PlainTorch
from ssd_engine.self_check.findings import CheckedOperation, Findings
from ssd_engine.self_check.operations import Operations
from ssd_engine.self_check.workload import VisibleKeys, slots_of, visible_keys

MOST_ROWS = 64  # that are looked at
MOST_RUNS = 4  # whose attention is looked at
MOST_ATTENDED = 48  # likewise, of a run's attention
HEAD_ROWS = 16  # likewise, of the head, which is as large as many layers

EMBEDDING = "embedding"
PROJECTION = "norm and QKV product"
WRITE = "rotary embedding and KV write"
ATTENTION = "attention"
OUTPUT = "output product"
GATE = "norm and gate-up product"
DOWN = "down product"
SUM = "sum over ranks and residual"
HEAD = "norm and head product"


@dataclass(frozen=True)
class Rows:
    """The rows of a forward, and which of them are looked at."""

    tokens: Tensor  # [rows], without those that pad it; likewise positions and slots
    positions: Tensor
    slots: Tensor
    seen: list[VisibleKeys]
    real: Tensor  # some that do not pad
    chosen: Tensor  # some of all: products are computed for rows that pad, too

    @classmethod
    def of(
        cls,
        parts: Sequence[Part],
        block_size: int,
        device: torch.device,
        num_rows: int | None = None,
    ) -> "Rows":
        """``num_rows``: with those that pad; None: there are none."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        attended: list[int] = []
        looked_at = _begins(parts)
        for part in parts:
            if not isinstance(part, Chunk | TreeRows):
                continue
            if isinstance(part, Chunk):
                positions += range(part.start, part.end)
                slots += slots_of(part, block_size)
            else:
                positions += part.positions
                slots += part.slots
            if len(tokens) in looked_at:
                attended += [len(tokens) + r for r in spread_out(len(part.tokens), MOST_ATTENDED)]
            tokens += part.tokens

        def upload(values: list[int]) -> Tensor:
            return torch.tensor(values, device=device)

        seen = visible_keys(parts, block_size, attended, device)
        real = upload(spread_out(len(tokens), MOST_ROWS))
        chosen = upload(spread_out(num_rows or len(tokens), MOST_ROWS))
        return cls(upload(tokens), upload(positions), upload(slots), seen, real, chosen)


def _begins(parts: Sequence[Part]) -> set[int]:
    """First rows of some runs: the more of them, the longer it takes."""
    begins = [0, *accumulate(len(part.tokens) for part in parts if part.tokens)][:-1]
    return {begins[i] for i in spread_out(len(begins), MOST_RUNS)}


def spread_out(count: int, most: int) -> list[int]:
    """Up to ``most`` of so many, the first and the last included."""
    if count <= most:
        return list(range(count))
    return sorted({i * (count - 1) // (most - 1) for i in range(most)})


class LayerCheck:
    """One forward, whose rows are those of ``parts``."""

    def __init__(
        self,
        runner: ModelRunner,
        operations: Operations,
        parts: Sequence[Part],
        findings: Findings,
        use: str,
        remedy: str,
        num_rows: int | None = None,
    ) -> None:
        """``num_rows``: of the forward, where some pad it."""
        self._model, self._kv, self._operations = runner.model, runner.kv, operations
        self._plain = PlainTorch(runner.model.weights.norm.dtype)
        self._findings, self._use, self._remedy = findings, use, remedy
        self._rows = Rows.of(parts, runner.options.block_size, runner.device, num_rows)
        self._layer: int | None = None

    def run(self) -> None:
        operations, real = self._operations, self._rows.real
        operations.embed()
        expected = look_up(self._model.weights.embedding, self._rows.tokens[real])
        expected = expected.to(self._plain.dtype)
        self._findings.compare_bits(self._place(EMBEDDING), operations.hidden[real], expected)
        for i in range(len(self._kv.layers)):
            self._layer = i
            self._attention(i)
            self._mlp(i)
        self._layer = None
        self._head()

    def _place(self, operation: str) -> CheckedOperation:
        rows = len(self._rows.tokens)
        return CheckedOperation(self._use, rows, self._layer, operation, self._remedy)

    def _compare(self, operation: str, got: Tensor, expected: Expected) -> None:
        self._findings.compare(self._place(operation), got[self._rows.chosen], expected)

    def _attention(self, i: int) -> None:
        plain, operations = self._plain, self._operations
        layer, eps = self._model.weights.layers[i], self._model.config.rms_norm_eps
        before = operations.hidden.clone()
        x = plain.normalised(before[self._rows.chosen], layer.input_norm, eps)
        projected = operations.project(i)
        self._compare(PROJECTION, projected, plain.product(x, layer.qkv, layer.qkv_bias))
        kept = self._kv.layers[i]
        attended = operations.attend(i)
        self._written_and_attended(projected, layer.qk_norm, kept, attended)
        part = plain.product(attended[self._rows.chosen], layer.o)
        got = operations.multiply_o(i)
        if got is not None:
            self._compare(OUTPUT, got, part)
        operations.add_o(i)
        self._compare_sum(OUTPUT, got is None, before, part, layer.o_bias)

    def _mlp(self, i: int) -> None:
        plain, operations = self._plain, self._operations
        layer, eps = self._model.weights.layers[i], self._model.config.rms_norm_eps
        before = operations.hidden.clone()
        x = plain.normalised(before[self._rows.chosen], layer.post_norm, eps)
        gated = operations.gate(i)
        both = plain.product(x, layer.gate_up, layer.gate_up_bias)
        self._compare(GATE, gated, plain.gated(both))
        part = plain.product(gated[self._rows.chosen], layer.down)
        got = operations.multiply_down(i)
        if got is not None:
            self._compare(DOWN, got, part)
        operations.add_down(i)
        self._compare_sum(DOWN, got is None, before, part, layer.down_bias)

    def _compare_sum(
        self, operation: str, fused: bool, before: Tensor, part: Expected, bias: Tensor | None
    ) -> None:
        """Onto the hidden states. All ranks take part, as sums need all of them."""
        tp = self._model.tp
        whole = Expected(tp.all_reduce(part.value.clone()), tp.all_reduce(part.spread.clone()))
        if bias is not None:
            whole = whole.plus(bias.to(self._plain.wide))
        whole = whole.plus(before[self._rows.chosen].to(self._plain.wide))
        self._compare(operation if fused else SUM, self._operations.hidden, whole)

    def _written_and_attended(
        self, projected: Tensor, qk_norm: Tensor | None, kept: LayerCache, attended: Tensor
    ) -> None:
        model, rows = self._model, self._rows
        heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.config.head_dim
        x = projected.view(-1, heads + 2 * kv_heads, dim)
        keys, values = (t.view(-1, kv_heads, dim) for t in (kept.key, kept.value))
        slots = rows.slots[rows.real]
        key = self._rotated(x, qk_norm, rows.real, slice(heads, heads + kv_heads))
        self._findings.compare(self._place(WRITE), keys[slots], key)
        value = x[rows.real, heads + kv_heads :]
        self._findings.compare_bits(self._place(WRITE), values[slots], value)
        for seen in rows.seen:
            # Kernels compute with queries of the model's dtype.
            query = self._rotated(x, qk_norm, seen.rows, slice(heads)).value.to(x.dtype)
            pages = keys[seen.slots], values[seen.slots]
            expected = self._plain.attention(query, *pages, seen.visible)
            self._findings.compare(self._place(ATTENTION), attended[seen.rows], expected)

    def _rotated(self, x: Tensor, qk_norm: Tensor | None, rows: Tensor, heads: slice) -> Expected:
        """Some heads of some rows of a projection."""
        norm = None if qk_norm is None else qk_norm[heads]
        places = self._model.rope.at(self._rows.positions[rows])
        return self._plain.rotated(x[rows, heads], norm, self._model.config.qk_norm_eps, *places)

    def _head(self) -> None:
        weights, eps = self._model.weights, self._model.config.rms_norm_eps
        chosen = self._rows.chosen
        some = chosen[spread_out(len(chosen), HEAD_ROWS)]
        x = self._plain.normalised(self._operations.hidden[some], weights.norm, eps)
        got = self._operations.score(some)
        self._findings.compare(self._place(HEAD), got, self._plain.product(x, weights.head))
