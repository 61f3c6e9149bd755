"""From a checkpoint to the weights of one tensor-parallel rank."""

from collections.abc import Iterator, Mapping

import torch
from safetensors import safe_open
from torch import Tensor

from ssd_engine.checkpoints.checkpoint import Checkpoint
from ssd_engine.checkpoints.expanded_weights import (
    ExpandingReader,
    WeightReader,
    model_growth,
)
from ssd_engine.checkpoints.families.family import QKNorm
from ssd_engine.checkpoints.model_config import ModelConfig
from ssd_engine.checkpoints.weight_shapes import norm_names
from ssd_engine.kernels.cpu.panels import PackedWeight, PanelKernel
from ssd_engine.models.decoder import DecoderWeights, LayerWeights
from ssd_engine.models.finite_weights import FiniteWeights
from ssd_engine.models.linear import Matrix
from ssd_engine.models.tensor_parallel import TensorParallel
from ssd_engine.process.progress import tracked

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ALL_ROWS: Mapping[str, int] = {}


class CheckpointReader:
    """Reads slices of weights and puts them on the device in the wanted dtype."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        keeps_bfloat16: bool = False,
        num_rows: Mapping[str, int] = ALL_ROWS,
    ) -> None:
        """``keeps_bfloat16``: matrices of bfloat16 are left as they are. ``num_rows``: of weights
        whose further rows only pad."""
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._keeps_bfloat16 = keeps_bfloat16
        self._device = device
        self.finite = FiniteWeights(checkpoint, dtype, num_rows)
        self._files = {
            file: safe_open(file, framework="pt")
            for file in {entry.file for entry in checkpoint.entries.values()}
        }

    def read(
        self, name: str, begin: int | None = None, end: int | None = None, dim: int = 0
    ) -> Tensor:
        """The weight, or its part from begin to end along dim."""
        entry = self._checkpoint.entries[name]
        part = self._files[entry.file].get_slice(entry.name)
        tensor: Tensor = part[:, begin:end] if dim == 1 else part[begin:end]
        keeps = self._keeps_bfloat16 and tensor.dim() == 2 and tensor.dtype == torch.bfloat16
        tensor = tensor.to(self._device, tensor.dtype if keeps else self._dtype)
        self.finite.look_at(name, tensor, 0 if dim else begin or 0)
        return tensor

    def read_as_it_is(self, name: str) -> Tensor:
        """What is no weight of a product, in its own dtype and on the host."""
        entry = self._checkpoint.entries[name]
        tensor: Tensor = self._files[entry.file].get_tensor(entry.name)
        return tensor


class RankLoader:
    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        reader: WeightReader,
        panels: PanelKernel | None = None,
    ) -> None:
        """``panels``: for which matrices are packed, each as soon as it is read."""
        self.config = config
        self.reader = reader
        self.panels = panels
        self.tp = tp
        hd, ff = config.head_dim, config.intermediate_size
        heads, kv_heads = config.num_heads // tp.size, config.kv_heads_per_rank(tp.size)
        # With more ranks than KV heads, neighbouring ranks hold the same one.
        first_kv = tp.rank * config.num_kv_heads // tp.size
        self.q_rows = (tp.rank * heads * hd, (tp.rank + 1) * heads * hd)
        self.kv_rows = (first_kv * hd, (first_kv + kv_heads) * hd)
        self.ff_rows = (tp.rank * ff // tp.size, (tp.rank + 1) * ff // tp.size)
        self.heads, self.kv_heads = heads, kv_heads

    def load(self) -> DecoderWeights:
        embedding = self.reader.read(EMBEDDING)
        if self.config.tie_word_embeddings:
            embedding = self.matrix([embedding])
        return DecoderWeights(
            embedding=embedding,
            layers=[self.layer(f"model.layers.{i}.") for i in self._counted_layers()],
            norm=self.reader.read("model.norm.weight"),
            head=self._head(embedding),
        )

    def _counted_layers(self) -> Iterator[int]:
        count = self.config.num_layers
        return tracked("loading weights", range(count), count, "layers", quiet=self.tp.rank > 0)

    def _head(self, embedding: Matrix) -> Matrix:
        """Rows are dealt out evenly; the last rank pads with zeros, which are cut off later."""
        per_rank = -(-self.config.embedding_rows // self.tp.size)
        begin, end = self.tp.rank * per_rank, (self.tp.rank + 1) * per_rank
        if isinstance(embedding, PackedWeight):
            return embedding.part(begin, end)
        tied = self.config.tie_word_embeddings
        head = embedding[begin:end] if tied else self.reader.read(HEAD, begin, end)
        padding = per_rank - head.shape[0]
        return self.matrix([head, head.new_zeros(padding, head.shape[1])] if padding else [head])

    def matrix(self, parts: list[Tensor]) -> Matrix:
        """Parts that follow each other, as one matrix."""
        if self.panels is not None:
            return PackedWeight.of(self.panels, parts)
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def layer(self, prefix: str) -> LayerWeights:
        traits, read = self.config.traits, self.reader.read
        attention_norm, mlp_norm = (read(f"{prefix}{name}.weight") for name in norm_names(traits))
        after = traits.norms_outputs
        return LayerWeights(
            attention_norm=None if after else attention_norm,
            qkv=self.matrix(self._qkv(prefix, "weight")),
            qkv_bias=torch.cat(self._qkv(prefix, "bias")) if traits.qkv_bias else None,
            qk_norm=self._qk_norm(prefix) if traits.qk_norm is QKNorm.HEAD else None,
            projection_norm=(
                self._projection_norm(prefix) if traits.qk_norm is QKNorm.PROJECTION else None
            ),
            o=self.matrix([read(prefix + "self_attn.o_proj.weight", *self.q_rows, dim=1)]),
            o_bias=read(prefix + "self_attn.o_proj.bias") if traits.o_bias else None,
            attention_output_norm=attention_norm if after else None,
            mlp_norm=None if after else mlp_norm,
            gate_up=self.matrix(self._gate_up(prefix, "weight")),
            gate_up_bias=torch.cat(self._gate_up(prefix, "bias")) if traits.mlp_bias else None,
            down=self.matrix([read(prefix + "mlp.down_proj.weight", *self.ff_rows, dim=1)]),
            down_bias=read(prefix + "mlp.down_proj.bias") if traits.mlp_bias else None,
            mlp_output_norm=mlp_norm if after else None,
        )

    def _qkv(self, prefix: str, kind: str) -> list[Tensor]:
        rows = {"q": self.q_rows, "k": self.kv_rows, "v": self.kv_rows}
        return [self.reader.read(f"{prefix}self_attn.{p}_proj.{kind}", *r) for p, r in rows.items()]

    def _gate_up(self, prefix: str, kind: str) -> list[Tensor]:
        both = (f"{prefix}mlp.{p}_proj.{kind}" for p in ("gate", "up"))
        return [self.reader.read(name, *self.ff_rows) for name in both]

    def _qk_norm(self, prefix: str) -> Tensor:
        """[heads + kv_heads, head_dim]: each head's own norm weight, q heads first."""
        q = self.reader.read(prefix + "self_attn.q_norm.weight").expand(self.heads, -1)
        k = self.reader.read(prefix + "self_attn.k_norm.weight").expand(self.kv_heads, -1)
        return torch.cat((q, k))

    def _projection_norm(self, prefix: str) -> Tensor:
        rows = {"q": self.q_rows, "k": self.kv_rows}
        names = {p: f"{prefix}self_attn.{p}_norm.weight" for p in rows}
        return torch.cat([self.reader.read(names[p], *rows[p]) for p in rows])


def load_weights(
    config: ModelConfig,
    grown: ModelConfig,
    checkpoint: Checkpoint,
    tp: TensorParallel,
    dtype: torch.dtype,
    device: torch.device,
    panels: PanelKernel | None = None,
) -> DecoderWeights:
    """The weights of ``grown`` from a checkpoint of ``config``; often the two are the same. Raises
    ModelError if they are no numbers.

    A grown weight is scaled, and so in general no number of bfloat16.
    """
    keeps_bfloat16 = panels is not None and panels.keeps_bfloat16 and grown == config
    used = dict.fromkeys((EMBEDDING, HEAD), config.vocab_size)
    files = CheckpointReader(checkpoint, dtype, device, keeps_bfloat16, used)
    reader: WeightReader = files
    if grown != config:
        reader = ExpandingReader(reader, model_growth(config, grown), tp.rank, dtype, device)
    weights = RankLoader(grown, tp, reader, panels).load()
    files.finite.require(tp)
    return weights
