"""One forward, every layer of it, each operation held against plain torch on the same input."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ssd_engine.batch import Chunk, Part, TreeRows
from ssd_engine.kv_cache import LayerCache
from ssd_engine.runner import ModelRunner
from ssd_engine.self_check.expected import Expected, PlainTorch
from ssd_engine.self_check.findings import Findings, Place
from ssd_engine.self_check.operations import Operations
from ssd_engine.self_check.workload import Sight, sights_of, slots_of

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
    """What a check must know of the rows of a forward, those that pad it left out."""

    tokens: Tensor  # [rows]
    positions: Tensor
    slots: Tensor
    sights: list[Sight]
    chosen: Tensor  # those that are looked at

    @classmethod
    def of(cls, parts: Sequence[Part], block_size: int, device: torch.device) -> "Rows":
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

        sights = sights_of(parts, block_size, attended, device)
        chosen = upload(spread_out(len(tokens), MOST_ROWS))
        return cls(upload(tokens), upload(positions), upload(slots), sights, chosen)


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
    """Of one forward, whose rows are those of ``parts``."""

    def __init__(
        self,
        runner: ModelRunner,
        operations: Operations,
        parts: Sequence[Part],
        findings: Findings,
        use: str,
        remedy: str,
    ) -> None:
        self._model, self._kv, self._operations = runner.model, runner.kv, operations
        self._plain = PlainTorch(runner.model.weights.norm.dtype)
        self._findings, self._use, self._remedy = findings, use, remedy
        self._rows = Rows.of(parts, runner.options.block_size, runner.device)
        self._layer: int | None = None

    def run(self) -> None:
        operations, chosen = self._operations, self._rows.chosen
        operations.embed()
        expected = self._model.weights.embedding[self._rows.tokens[chosen]]
        self._findings.compare_bits(self._place(EMBEDDING), operations.hidden[chosen], expected)
        for i in range(len(self._kv.layers)):
            self._layer = i
            self._attention(i)
            self._mlp(i)
        self._layer = None
        self._head()

    def _place(self, operation: str) -> Place:
        rows = len(self._rows.tokens)
        return Place(self._use, rows, self._layer, operation, self._remedy)

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
        model, plain, rows = self._model, self._plain, self._rows
        heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.config.head_dim
        count = len(rows.tokens)
        x = projected[:count].view(count, heads + 2 * kv_heads, dim)
        cosine, sine = model.rope.at(rows.positions)
        turned = plain.rotated(
            x[:, : heads + kv_heads], qk_norm, model.config.qk_norm_eps, cosine, sine
        )
        keys, values = (t.view(-1, kv_heads, dim) for t in (kept.key, kept.value))
        key = Expected(turned.value[:, heads:], turned.spread[:, heads:])
        self._findings.compare(self._place(WRITE), keys[rows.slots], key)
        value = x[:, heads + kv_heads :]
        self._findings.compare_bits(self._place(WRITE), values[rows.slots], value)
        # Kernels compute with queries of the model's dtype.
        query = turned.value[:, :heads].to(projected.dtype)
        for sight in rows.sights:
            seen_keys, seen_values = keys[sight.slots], values[sight.slots]
            expected = plain.attention(query[sight.rows], seen_keys, seen_values, sight.visible)
            self._findings.compare(self._place(ATTENTION), attended[sight.rows], expected)

    def _head(self) -> None:
        weights, eps = self._model.weights, self._model.config.rms_norm_eps
        some = self._rows.chosen[-HEAD_ROWS:]
        x = self._plain.normalised(self._operations.hidden[some], weights.norm, eps)
        got = self._operations.score(some)
        self._findings.compare(self._place(HEAD), got, self._plain.product(x, weights.head))
