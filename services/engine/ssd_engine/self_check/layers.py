"""One forward, every layer of it, each operation held against plain torch on the same input."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ssd_engine.execution.runner import ModelRunner
from ssd_engine.forward.batch import KVCopy, Part, slots_of
from ssd_engine.kvcache.cache import LayerCache
from ssd_engine.models.layers import Layers
from ssd_engine.models.linear import look_up
from ssd_engine.self_check.expected import Expected, PlainTorch
from ssd_engine.self_check.findings import CheckedOperation, Findings
from ssd_engine.self_check.workload import VisibleKeys, visible_keys

MOST_ROWS = 64  # at most so many are looked at
MOST_RUNS = 4  # whose attention is looked at
MOST_ATTENDED = 48  # likewise, of a run's attention
HEAD_ROWS = 16  # likewise, of the head, which is as large as many layers

EMBEDDING = "embedding"
PROJECTION = "norm and QKV product"
QK_NORM = "norm of queries and keys"
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
        """``num_rows`` counts those that pad, too; None where there are none."""
        runs = [part for part in parts if not isinstance(part, KVCopy)]
        tokens = [token for run in runs for token in run.tokens]
        positions = [position for run in runs for position in run.positions]
        slots = [slot for run in runs for slot in slots_of(run, block_size)]

        def upload(values: list[int]) -> Tensor:
            return torch.tensor(values, device=device)

        seen = visible_keys(runs, block_size, _attended([len(run.tokens) for run in runs]), device)
        real = upload(spread_out(len(tokens), MOST_ROWS))
        chosen = upload(spread_out(num_rows or len(tokens), MOST_ROWS))
        return cls(upload(tokens), upload(positions), upload(slots), seen, real, chosen)


def _attended(lengths: Sequence[int]) -> list[int]:
    """Rows whose attention is looked at, in some of the runs of these lengths: the more of them,
    the longer it takes."""
    begins = [0, *accumulate(lengths)]
    chosen = spread_out(len(lengths), MOST_RUNS)
    return [begins[i] + row for i in chosen for row in spread_out(lengths[i], MOST_ATTENDED)]


def spread_out(count: int, most: int) -> list[int]:
    """Up to ``most`` of so many, the first and the last included."""
    if count <= most:
        return list(range(count))
    return sorted({i * (count - 1) // (most - 1) for i in range(most)})


class LayerCheck:
    """One forward, whose rows are those of ``parts``."""

    _layer: int | None = None

    def __init__(
        self,
        runner: ModelRunner,
        layers: Layers,
        score: Callable[[Tensor], Tensor],
        parts: Sequence[Part],
        findings: Findings,
        use: str,
        remedy: str,
        num_rows: int | None = None,
    ) -> None:
        """``score``: the logits of some rows, of this rank's tokens. ``num_rows``: of the forward,
        where some pad it."""
        self._model, self._kv, self._layers, self._score = runner.model, runner.kv, layers, score
        self._plain = PlainTorch(runner.model.weights.norm.dtype)
        self._findings, self._use, self._remedy = findings, use, remedy
        self._rows = Rows.of(parts, runner.options.block_size, runner.device, num_rows)
        self._eps = runner.model.config.rms_norm_eps

    def run(self) -> None:
        layers, real = self._layers, self._rows.real
        layers.embed()
        expected = look_up(self._model.weights.embedding, self._rows.tokens[real])
        expected = expected.to(self._plain.dtype)
        self._findings.compare_bits(self._place(EMBEDDING), layers.hidden[real], expected)
        for i in range(len(self._kv.layers)):
            self._layer = i
            self._attention(i)
            self._mlp(i)
        self._layer = None
        self._head()

    def _place(self, operation: str) -> CheckedOperation:
        return CheckedOperation(
            self._use, len(self._rows.tokens), self._layer, operation, self._remedy
        )

    def _compare(self, operation: str, got: Tensor, expected: Expected) -> None:
        self._findings.compare(self._place(operation), got[self._rows.chosen], expected)

    def _attention(self, i: int) -> None:
        plain, layers, layer = self._plain, self._layers, self._model.weights.layers[i]
        before = layers.hidden.clone()
        x = self._normalised(before, layer.attention_norm)
        layers.project(i)
        self._compare(PROJECTION, layers.projected, plain.product(x, layer.qkv, layer.qkv_bias))
        self._qk_norm(i, layer.projection_norm)
        layers.attend(i)
        self._written_and_attended(layers.projected, layer.qk_norm, self._kv.layers[i])
        part = plain.product(layers.attended[self._rows.chosen], layer.o)
        layers.multiply_o(i)
        operation = self._compare_part(OUTPUT, part)
        layers.add_o(i)
        self._compare_sum(operation, before, part, layer.o_bias, layer.attention_output_norm)

    def _mlp(self, i: int) -> None:
        plain, layers, layer = self._plain, self._layers, self._model.weights.layers[i]
        before = layers.hidden.clone()
        x = self._normalised(before, layer.mlp_norm)
        layers.gate(i)
        both = plain.product(x, layer.gate_up, layer.gate_up_bias)
        self._compare(GATE, layers.gated, plain.gated(both))
        part = plain.product(layers.gated[self._rows.chosen], layer.down)
        layers.multiply_down(i)
        operation = self._compare_part(DOWN, part)
        layers.add_down(i)
        self._compare_sum(operation, before, part, layer.down_bias, layer.mlp_output_norm)

    def _normalised(self, hidden: Tensor, norm: Tensor | None) -> Tensor:
        x = hidden[self._rows.chosen]
        return x if norm is None else self._plain.normalised(x, norm, self._eps)

    def _compare_part(self, operation: str, expected: Expected) -> str:
        """The operation that the hidden states come from: the product itself, where it has been
        added to them already, and is compared there."""
        if self._layers.part is None:
            return operation
        self._compare(operation, self._layers.part, expected)
        return SUM

    def _qk_norm(self, i: int, norm: Tensor | None) -> None:
        """By all heads of all ranks, where the model has such a norm."""
        if norm is None:
            return
        before = self._layers.projected[self._rows.chosen].to(self._plain.wide)
        self._layers.normalise_qk(i)
        model, dim = self._model, self._model.config.head_dim
        heads = model.num_heads, model.num_kv_heads
        parts = before.split([heads[0] * dim, heads[1] * dim, heads[1] * dim], -1)[:2]
        weights = norm.to(self._plain.wide).split([part.shape[1] for part in parts])
        sums = model.tp.all_reduce(torch.stack([x.square().sum(-1) for x in parts]))
        scales = [
            torch.rsqrt(total / (count * model.tp.size * dim) + model.config.qk_norm_eps)
            for total, count in zip(sums, heads, strict=True)
        ]
        value = torch.cat([parts[k] * scales[k][:, None] * weights[k] for k in range(2)], -1)
        got = self._layers.projected[:, : value.shape[1]]
        self._compare(QK_NORM, got, Expected(value, 2 * value.abs()))

    def _compare_sum(
        self,
        operation: str,
        before: Tensor,
        part: Expected,
        bias: Tensor | None,
        norm: Tensor | None,
    ) -> None:
        """Compares the hidden states after a sum. All ranks take part, as sums need all of them."""
        tp = self._model.tp
        whole = Expected(tp.all_reduce(part.value.clone()), tp.all_reduce(part.spread.clone()))
        if bias is not None:
            whole = whole.plus(bias.to(self._plain.wide))
        if norm is not None:
            whole = self._plain.normed(whole, norm, self._eps)
        whole = whole.plus(before[self._rows.chosen].to(self._plain.wide))
        self._compare(operation, self._layers.hidden, whole)

    def _written_and_attended(
        self, projected: Tensor, qk_norm: Tensor | None, kept: LayerCache
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
            self._findings.compare(
                self._place(ATTENTION), self._layers.attended[seen.rows], expected
            )

    def _rotated(self, x: Tensor, qk_norm: Tensor | None, rows: Tensor, heads: slice) -> Expected:
        """Some heads of some rows of a projection."""
        norm = None if qk_norm is None else qk_norm[heads]
        places = self._model.rope.at(self._rows.positions[rows])
        return self._plain.rotated(x[rows, heads], norm, self._model.config.qk_norm_eps, *places)

    def _head(self) -> None:
        weights, chosen = self._model.weights, self._rows.chosen
        some = chosen[spread_out(len(chosen), HEAD_ROWS)]
        x = self._plain.normalised(self._layers.hidden[some], weights.norm, self._eps)
        got = self._score(some)
        self._findings.compare(self._place(HEAD), got, self._plain.product(x, weights.head))
