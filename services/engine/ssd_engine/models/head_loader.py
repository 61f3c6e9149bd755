"""From a head's checkpoint to its weights."""

import torch
from torch import Tensor

from ssd_engine.checkpoints.checkpoint import Checkpoint
from ssd_engine.checkpoints.expanded_weights import ExpandingReader, WeightReader
from ssd_engine.checkpoints.heads.expanded_head import head_growth
from ssd_engine.checkpoints.heads.head_checkpoint import EMBEDDING, OFFSETS, HeadCheckpoint
from ssd_engine.checkpoints.heads.head_config import FeatureNorm, HeadConfig
from ssd_engine.errors import ModelError
from ssd_engine.kernels.cpu.panels import PanelKernel
from ssd_engine.models.decoder import DecoderWeights
from ssd_engine.models.eagle_head import HeadWeights
from ssd_engine.models.loader import CheckpointReader, RankLoader
from ssd_engine.models.tensor_parallel import SingleRank


def load_head(
    head: HeadConfig,
    checkpoint: HeadCheckpoint,
    dtype: torch.dtype,
    device: torch.device,
    panels: PanelKernel | None = None,
    num_tokens: int = 0,
) -> HeadWeights:
    """``head``: the checkpoint's, or what it is grown to. Heads are small: each rank of a target,
    and a draft, has all of one. Raises ModelError if its weights are no numbers. ``num_tokens``:
    of the target, padding left out, where that is known."""
    entries = {**checkpoint.weights.entries, EMBEDDING: checkpoint.embedding}
    own = checkpoint.config
    keeps_bfloat16 = panels is not None and panels.keeps_bfloat16 and head == own
    used = {EMBEDDING: num_tokens or own.layers.vocab_size}
    files = CheckpointReader(Checkpoint(entries), dtype, device, keeps_bfloat16, used)
    reader: WeightReader = files
    if head != own:
        reader = ExpandingReader(files, head_growth(own, head), 0, dtype, device)
    rank = RankLoader(head.layers, SingleRank(), reader, panels)
    weights = HeadWeights(
        decoder=DecoderWeights(
            embedding=reader.read(EMBEDDING),
            layers=[rank.layer(f"layers.{i}.") for i in range(head.layers.num_layers)],
            norm=reader.read("norm.weight"),
            head=rank.matrix([reader.read("lm_head.weight")]),
        ),
        fc=rank.matrix([reader.read("fc.weight")]),
        feature_norms=[reader.read(name) for name in _feature_norms(head)],
        state_norm=reader.read("layers.0.hidden_norm.weight"),
        target_tokens=_target_tokens(checkpoint, files, device),
    )
    files.finite.require(SingleRank())
    return weights


def _feature_norms(head: HeadConfig) -> list[str]:
    if head.feature_norm is FeatureNorm.NONE:
        return []
    if head.feature_norm is FeatureNorm.WHOLE:
        return ["input_norm.weight"]
    return [f"fc_norm.{i}.weight" for i in range(head.num_features)]


def _target_tokens(
    checkpoint: HeadCheckpoint, reader: CheckpointReader, device: torch.device
) -> Tensor | None:
    """[draft tokens]: the target's token of each. Raises ModelError for what is none, or twice."""
    head, entry = checkpoint.config, checkpoint.weights.entries.get(OFFSETS)
    if entry is None:
        return None
    tokens = torch.arange(head.draft_vocab_size) + reader.read_as_it_is(OFFSETS)
    if int(tokens.min()) < 0 or int(tokens.max()) >= head.layers.embedding_rows:
        raise ModelError(f"{entry.file}: {OFFSETS} leads to tokens that the target does not have")
    if len(tokens.unique()) < len(tokens):
        raise ModelError(f"{entry.file}: {OFFSETS} leads to one token twice")
    return tokens.to(device)
