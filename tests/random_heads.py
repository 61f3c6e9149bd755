"""EAGLE-3 heads with dense random weights, made by the speculators package, in both formats."""

import json
import shutil
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

sys.path.append(str(Path(sys.prefix) / "oracle"))  # where the Makefile puts it
# What it reads texts with that heads are trained on: imported by its models, and used by none.
if find_spec("datasets") is None:
    sys.modules["datasets"] = Mock(__spec__=ModuleSpec("datasets", None))

from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig

from ssd_engine.checkpoints.model_store import resolve_model

SHAPE: dict[str, Any] = dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=1,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    # Wide enough that neighbouring logits are well apart: near-ties would test nothing.
    initializer_range=0.15,
)
EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True)
class HeadKind:
    layers: type[PretrainedConfig]
    num_layers: int = 1
    draft_vocab_size: int = 200
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


KINDS = {
    "llama": HeadKind(LlamaConfig),
    "llama-norm-before-residual": HeadKind(LlamaConfig, norm_before_residual=True),
    "llama-two-layers": HeadKind(LlamaConfig, num_layers=2),
    "llama-norm-output": HeadKind(LlamaConfig, norm_output=True),
    "llama-norm-of-each-feature": HeadKind(LlamaConfig, fc_norm=True),
    "llama-norm-of-all-features": HeadKind(LlamaConfig, norm_before_fc=True),
    "llama-whole-vocabulary": HeadKind(LlamaConfig, draft_vocab_size=512),
    "qwen3": HeadKind(Qwen3Config),
    "qwen3-norm-before-residual": HeadKind(Qwen3Config, norm_before_residual=True),
    "qwen3-all-norms": HeadKind(
        Qwen3Config, num_layers=2, norm_before_residual=True, fc_norm=True, norm_output=True
    ),
}


def make_head(kind: HeadKind, directory: Path, **changes: Any) -> Eagle3DraftModel:
    """Save a random head in the format of speculators, its embedding left out; returns theirs."""
    torch.manual_seed(len(str(kind)))
    extra = {"head_dim": 16} if kind.layers is Qwen3Config else {}
    layers = kind.layers(**{**SHAPE, **extra, "num_hidden_layers": kind.num_layers, **changes})
    layers._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=kind.draft_vocab_size,
        norm_before_residual=kind.norm_before_residual,
        norm_before_fc=kind.norm_before_fc,
        fc_norm=kind.fc_norm,
        norm_output=kind.norm_output,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="a-target", architectures=["LlamaForCausalLM"]),
        ),
    )
    model = Eagle3DraftModel(config).float().eval()
    _fill(model)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    kept = {n: t for n, t in weights.items() if not n.startswith("verifier_") and n != EMBEDDING}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(kept, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config.to_diff_dict()))
    return model


def _fill(model: Eagle3DraftModel) -> None:
    """Dense random weights, and a draft vocabulary that is spread over the target's."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            wide = "norm" not in name
            parameter.copy_(torch.randn_like(parameter) * (0.15 if wide else 0.2) + (not wide))
    if model.d2t is not None and model.t2d is not None:
        size = model.verifier_vocab_size
        used = torch.randperm(size)[: model.draft_vocab_size].sort().values
        model.d2t.copy_(used - torch.arange(len(used)))
        model.t2d.copy_(torch.zeros(size, dtype=torch.bool).index_fill_(0, used, True))


def write_flat(source: Path, directory: Path) -> None:
    """The same head in the flat format, as most are published."""
    directory.mkdir(parents=True, exist_ok=True)
    raw = json.loads((source / "config.json").read_text())
    layers = raw.pop("transformer_layer_config")
    own = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    ids = [boundary - 1 for boundary in raw["eagle_aux_hidden_state_layer_ids"]]
    flat = {
        **layers,
        **{name: raw[name] for name in own if name in raw},
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
    }
    (directory / "config.json").write_text(json.dumps(flat))
    weights = load_file(source / "model.safetensors")
    first = "layers.0."
    renamed = {
        "midlayer." + name.removeprefix(first) if name.startswith(first) else name: tensor
        for name, tensor in weights.items()
    }
    save_file(renamed, directory / "model.safetensors")


def make_head_for_stories(directory: Path) -> Path:
    """A head for the shipped target; it names its boundaries, and brings no tokenizer."""
    like_stories = dict(vocab_size=4096, hidden_size=256, intermediate_size=512)
    make_head(HeadKind(LlamaConfig, draft_vocab_size=1000), directory, **like_stories)
    return directory


def with_another_tokenizer(head: Path, directory: Path) -> Path:
    """A copy of a head, with two tokens of the shipped target's exchanged."""
    shutil.copytree(head, directory)
    content = json.loads((resolve_model("stories-target") / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = [*vocabulary][300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return directory
