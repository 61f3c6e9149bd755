"""A small Llama for training, with the parameter names of transformers' ``LlamaForCausalLM``.

transformers' own class has no residual dropout, which a corpus this small needs, and compiles to
slower attention. ``export.py`` writes these weights as a Hugging Face directory.
"""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig

MAX_POSITIONS = 2048


def llama_config(hidden: int, layers: int, heads: int, kv_heads: int, mlp: int) -> LlamaConfig:
    """The family both models belong to; the token ids are those of ``tokenizer.py``."""
    return LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=32,
        intermediate_size=mlp,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )


def compute_dtype(device: torch.device) -> torch.dtype:
    """bf16 on a GPU; a CPU, where only trials run, may emulate bf16 at a crawl."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Cache:
    """Keys and values of a batch whose rows all have the same length."""

    def __init__(self, config: LlamaConfig, rows: int, room: int, like: Tensor) -> None:
        shape = (config.num_hidden_layers, rows, config.num_key_value_heads, room, config.head_dim)
        self.keys = torch.empty(shape, dtype=compute_dtype(like.device), device=like.device)
        self.values = torch.empty_like(self.keys)
        self.length = 0

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [rows, kv heads, new, head_dim]; return everything of this layer so far."""
        end = self.length + keys.shape[2]
        self.keys[layer, :, :, self.length : end] = keys
        self.values[layer, :, :, self.length : end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


def rotary_table(config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [positions, head_dim]."""
    theta = config.rope_parameters["rope_theta"]
    powers = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, theta**-powers).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split convention of Hugging Face checkpoints."""
    left, right = x.float().chunk(2, dim=-1)
    return (x * cos + torch.cat((-right, left), dim=-1) * sin).to(x.dtype)


def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of a whole text, or of one new token that may see everything.

    queries [rows, heads, n, head_dim]; keys and values have fewer heads. For a single token the
    heads that share keys are put side by side as queries of one head, which reads them once.
    """
    if queries.shape[2] > 1:
        return F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=True
        )
    shared = queries.reshape(len(queries), keys.shape[1], -1, queries.shape[3])
    return F.scaled_dot_product_attention(shared, keys, values).reshape(queries.shape)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None) -> Tensor:
        queries = rotate(self._heads(self.q_proj(x)), cos, sin)
        keys = rotate(self._heads(self.k_proj(x)), cos, sin)
        values = self._heads(self.v_proj(x))
        if cache is not None:
            keys, values = cache.append(self.layer, keys, values)
        mixed = attend(queries, keys, values)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin, cache))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Trunk(nn.Module):
    """Everything below the output projection: tokens [rows, n] to states [rows, n, hidden]."""

    def __init__(self, config: LlamaConfig, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, layer, dropout) for layer in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.dropout = nn.Dropout(dropout)
        cos, sin = rotary_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        start = 0 if cache is None else cache.length
        end = start + tokens.shape[1]
        x = self.dropout(self.embed_tokens(tokens))
        for layer in self.layers:
            x = layer(x, self.cos[start:end], self.sin[start:end], cache)
        if cache is not None:
            cache.length = end
        return self.norm(x)


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config, dropout)
        self._initialise()

    def _initialise(self) -> None:
        """Normal weights; the projections into the residual stream shrink with depth."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            shrink = math.sqrt(2 * self.config.num_hidden_layers) if into_residual else 1.0
            nn.init.normal_(parameter, std=0.02 / shrink)

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(states, self.model.embed_tokens.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [rows, n, vocabulary] of tokens [rows, n]."""
        return self.logits(self.model(tokens))


def load(directory: Path) -> Llama:
    """Read a directory written by ``export.py``; the weights become fp32."""
    model = Llama(LlamaConfig.from_pretrained(directory))
    weights = load_file(directory / "model.safetensors")
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model
