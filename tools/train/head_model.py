"""An EAGLE-3 head for training (arXiv 2503.01840), with the names of the speculators package.

Row j reads token j + 1 and g_j, which combines the target's hidden states at j, and tells token
j + 2. In training a row goes on as a chain does when it drafts: at step k it reads token j + 1 + k
and what it said at step k - 1, sees what rows up to j saw of the target, and its own steps.
"""

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig

from tools.train.model import Llama, Mlp, rotary_table, rotate

TRAINED_STEPS = 5  # tokens that it drafts in a row
Seen = list[tuple[Tensor, Tensor]]  # keys and values of each step so far


class HeadAttention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.shared_by = config.num_attention_heads // config.num_key_value_heads
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Seen) -> Tensor:
        """x [rows, n, 2 d]; this step's keys and values are added to ``seen``."""
        queries = rotate(self._heads(self.q_proj(x)), cos, sin)
        keys = rotate(self._heads(self.k_proj(x)), cos, sin).repeat_interleave(self.shared_by, 1)
        values = self._heads(self.v_proj(x)).repeat_interleave(self.shared_by, 1)
        seen.append((keys, values))
        mixed = _attend(queries, seen)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def _attend(queries: Tensor, seen: Seen) -> Tensor:
    """Row j sees the first step's rows up to j, and of each later step its own."""
    first_keys, first_values = seen[0]
    if len(seen) == 1:
        return F.scaled_dot_product_attention(queries, first_keys, first_values, is_causal=True)
    n = queries.shape[2]
    scores = queries @ first_keys.mT
    sees = torch.ones(n, first_keys.shape[2], dtype=torch.bool, device=queries.device).tril()
    scores = scores.masked_fill(~sees, float("-inf"))
    own = [(queries * keys[:, :, :n]).sum(-1, keepdim=True) for keys, _ in seen[1:]]
    scores = torch.cat([scores, *own], dim=-1) / math.sqrt(queries.shape[-1])
    shares = scores.float().softmax(-1).to(queries.dtype)
    mixed = shares[..., : first_keys.shape[2]] @ first_values
    for i, (_, values) in enumerate(seen[1:]):
        share = shares[..., first_keys.shape[2] + i, None]
        mixed = mixed + share * values[:, :, :n]
    return mixed


class HeadLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = HeadAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, embedded: Tensor, g: Tensor, cos: Tensor, sin: Tensor, seen: Seen) -> Tensor:
        x = torch.cat((self.input_layernorm(embedded), self.hidden_norm(g)), dim=-1)
        y = g + self.self_attn(x, cos, sin, seen)
        return y + self.mlp(self.post_attention_layernorm(y))


class Head(nn.Module):
    def __init__(self, target: LlamaConfig, boundaries: tuple[int, ...]) -> None:
        super().__init__()
        self.config, self.boundaries = target, boundaries
        d = target.hidden_size
        self.fc = nn.Linear(len(boundaries) * d, d, bias=False)
        self.layers = nn.ModuleList([HeadLayer(target)])
        self.norm = nn.RMSNorm(d, target.rms_norm_eps)
        self.lm_head = nn.Linear(d, target.vocab_size, bias=False)
        cos, sin = rotary_table(target)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def begin_as(self, target: Llama) -> None:
        """Small weights, and the target's own head."""
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.data /= 2.0
        self.lm_head.weight.data.copy_(target.model.embed_tokens.weight)

    def forward(self, embedded: Tensor, features: Tensor, steps: int) -> list[Tensor]:
        """Logits [rows, n - k, vocabulary] of steps k = 0, 1, … ``embedded`` [rows, n, d]: tokens 1
        to n; ``features`` [rows, n, boundaries * d]: of tokens 0 to n - 1."""
        g, seen, logits = self.fc(features), Seen(), []
        n = embedded.shape[1]
        for k in range(steps):
            places = slice(k, n)
            g = self.layers[0](
                embedded[:, k:], g[:, : n - k], self.cos[places], self.sin[places], seen
            )
            logits.append(self.lm_head(self.norm(g)))
        return logits


def watched(target: Llama, tokens: Tensor, boundaries: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The target's hidden states at these boundaries, side by side, and its logits."""
    trunk, found = target.model, {}
    x, n = trunk.embed_tokens(tokens), tokens.shape[1]
    for i, layer in enumerate(trunk.layers):
        found[i] = x
        x = layer(x, trunk.cos[:n], trunk.sin[:n], None)
    found[len(trunk.layers)] = x
    features = torch.cat([found[each] for each in boundaries], dim=-1)
    return features, target.logits(trunk.norm(x))


def widened(head: Head, boundaries: tuple[int, ...]) -> Head:
    """The head on these boundaries: what it has not read so far counts for nothing at first."""
    wide, d = Head(head.config, boundaries), head.config.hidden_size
    weights = head.state_dict()
    known = dict(zip(head.boundaries, weights["fc.weight"].split(d, dim=1), strict=True))
    parts = [known.get(each, torch.zeros(d, d)) for each in boundaries]
    wide.load_state_dict({**weights, "fc.weight": torch.cat(parts, dim=1)})
    return wide


def export_head(head: Head, out: Path, verifier: str) -> None:
    """In the format of speculators, which names the target; in bf16, without the embedding, which
    is the target's."""
    out.mkdir(parents=True, exist_ok=True)
    config = json.dumps(_speculators_config(head, verifier), indent=2)
    (out / "config.json").write_text(config + "\n")
    weights = {name: weight.to(torch.bfloat16).cpu() for name, weight in head.state_dict().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def _speculators_config(head: Head, verifier: str) -> dict[str, object]:
    config = head.config.to_dict()
    kept = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "hidden_act", "attention_bias", "mlp_bias"),
        *("max_position_embeddings", "rms_norm_eps", "rope_parameters"),
    )
    method = {"proposal_type": "greedy", "speculative_tokens": TRAINED_STEPS}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": head.config.vocab_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "eagle_aux_hidden_state_layer_ids": list(head.boundaries),
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "num_hidden_layers": 1,
            **{name: config[name] for name in kept},
            "tie_word_embeddings": False,
        },
        "dtype": "bfloat16",
    }


def load_trained_head(directory: Path, target: LlamaConfig) -> Head:
    """What ``export_head`` has written; the weights become fp32."""
    config = json.loads((directory / "config.json").read_text())
    head = Head(target, tuple(config["eagle_aux_hidden_state_layer_ids"]))
    weights = load_file(directory / "model.safetensors")
    head.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return head
