"""The names and shapes of the weights of a model. No torch here."""

from ssd_engine.checkpoints.families.family import LayerTraits, QKNorm
from ssd_engine.checkpoints.model_config import ModelConfig


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight that a checkpoint of this config holds."""
    d, v = config.hidden_size, config.embedding_rows
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (v, d),
        "model.norm.weight": (d,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (v, d)
    for layer in range(config.num_layers):
        for name, shape in layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The weights of one layer, by their names within it."""
    d, ff, hd = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv, traits = config.num_heads * hd, config.num_kv_heads * hd, config.traits
    shapes: dict[str, tuple[int, ...]] = {
        **{f"{norm}.weight": (d,) for norm in norm_names(traits)},
        "self_attn.q_proj.weight": (q, d),
        "self_attn.k_proj.weight": (kv, d),
        "self_attn.v_proj.weight": (kv, d),
        "self_attn.o_proj.weight": (d, q),
        "mlp.gate_proj.weight": (ff, d),
        "mlp.up_proj.weight": (ff, d),
        "mlp.down_proj.weight": (d, ff),
    }
    if traits.qkv_bias:
        shapes |= {f"self_attn.{p}_proj.bias": (n,) for p, n in (("q", q), ("k", kv), ("v", kv))}
    if traits.o_bias:
        shapes["self_attn.o_proj.bias"] = (d,)
    if traits.mlp_bias:
        shapes |= {f"mlp.{p}_proj.bias": (n,) for p, n in (("gate", ff), ("up", ff), ("down", d))}
    if traits.qk_norm is not QKNorm.NONE:
        whole = traits.qk_norm is QKNorm.PROJECTION
        shapes |= {
            "self_attn.q_norm.weight": (q if whole else hd,),
            "self_attn.k_norm.weight": (kv if whole else hd,),
        }
    return shapes


def norm_names(traits: LayerTraits) -> tuple[str, str]:
    """A layer's norms of hidden states: of attention, and of the MLP."""
    if traits.norms_outputs:
        return "post_attention_layernorm", "post_feedforward_layernorm"
    return "input_layernorm", "post_attention_layernorm"
