"""The shape of a model, read from a Hugging Face ``config.json``. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ssd_engine.checkpoints.families.family import Family, LayerTraits
from ssd_engine.checkpoints.families.registry import FAMILIES
from ssd_engine.checkpoints.files.model_files import (
    Fields,
    is_integer,
    is_there,
    named,
    read_object,
    shown,
)
from ssd_engine.checkpoints.tokenizer_files import count_tokens
from ssd_engine.errors import ConfigError

# Far beyond every model there is. What is within can be held against the weights at once.
MAX_WIDTH = 1 << 24  # sizes of hidden states, MLPs and heads
MAX_LAYERS = 4096
MAX_VOCABULARY = 1 << 24
MIN_POSITIONS, MAX_POSITIONS = 8, 1 << 24
MAX_NUMBER = 1e30
MIN_EPS = 1e-30  # less is none in float32: a row of zeros would become NaN
MIN_THETA = MIN_FACTOR = 1.0  # with less, positions turn faster than one can tell them apart
MIN_FREQ_FACTOR = 1e-3
DTYPES = ("float32", "bfloat16", "float16")  # of weights


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretching of the slow RoPE frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class RopeConfig:
    theta: float
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None


@dataclass(frozen=True)
class ModelConfig:
    architecture: str
    vocab_size: int  # the tokens there are
    head_rows: int  # rows of the head that are sampled over: tokens, and those that growth adds
    embedding_rows: int  # rows of the embedding and the head, those that only pad included
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    qk_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    traits: LayerTraits
    dtype: str
    eos_token_ids: tuple[int, ...]

    def kv_heads_per_rank(self, ranks: int) -> int:
        """With more ranks than KV heads, neighbouring ranks hold the same one."""
        return max(1, self.num_kv_heads // ranks)


def check_tensor_parallel(config: ModelConfig, ranks: int) -> None:
    """Heads and MLP units are dealt out whole; KV heads may be repeated."""
    if config.num_heads % ranks or config.intermediate_size % ranks:
        raise ConfigError(
            f"--tp {ranks} must divide {config.num_heads} attention heads and "
            f"{config.intermediate_size} MLP units"
        )
    if config.num_kv_heads % ranks and ranks % config.num_kv_heads:
        raise ConfigError(
            f"--tp {ranks} and {config.num_kv_heads} KV heads: one must divide the other"
        )


def load_model_config(directory: Path) -> ModelConfig:
    file = directory / "config.json"
    config = parse_model_config(read_object(file), file)
    generation = directory / "generation_config.json"
    if is_there(generation):
        eos = _eos_tokens(Fields(generation, read_object(generation)), config.vocab_size)
        config = config if eos is None else replace(config, eos_token_ids=eos)
    tokens = count_tokens(directory)
    if tokens is None or tokens >= config.vocab_size:
        return config
    tokens = max(tokens, *(token + 1 for token in config.eos_token_ids), 1)
    return replace(config, vocab_size=tokens, head_rows=tokens)


def parse_model_config(raw: Mapping[str, Any], source: object = "config.json") -> ModelConfig:
    """Accept what the engine computes exactly; refuse every variant that it would get wrong."""
    fields = Fields(source, raw)
    family = _family(fields)
    _refuse_unsupported(fields)
    hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
    heads = fields.integer("num_attention_heads", 1, MAX_WIDTH)
    vocab = fields.integer("vocab_size", 1, MAX_VOCABULARY)
    eps = fields.number("rms_norm_eps", 1, 1e-6, MIN_EPS)
    return ModelConfig(
        architecture=family.model_type,
        vocab_size=vocab,
        head_rows=vocab,
        embedding_rows=vocab,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH),
        num_layers=fields.integer("num_hidden_layers", 1, MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=_kv_heads(fields, heads),
        head_dim=_head_dim(fields, hidden, heads),
        rms_norm_eps=eps,
        qk_norm_eps=eps,
        rope=_parse_rope(fields),
        max_position_embeddings=fields.integer(
            "max_position_embeddings", MIN_POSITIONS, MAX_POSITIONS
        ),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        traits=family.read_traits(fields),
        dtype=_dtype(fields),
        eos_token_ids=_eos_tokens(fields, vocab) or (),
    )


def _family(fields: Fields) -> Family:
    name = (fields.items("architectures") or ["(none)"])[0]
    if not isinstance(name, str):
        raise fields.problem("architectures", f"a list of names is needed, not of {shown(name)}")
    family = FAMILIES.get(name)
    if family is None:
        known = ", ".join(FAMILIES)
        raise fields.problem("architectures", f"{named(name)} is not supported, only {known}")
    kind = fields.text("model_type", family.model_type)
    if kind != family.model_type:
        needed = f"{family.model_type} is needed for {name}"
        raise fields.problem("model_type", f"{needed}, got {shown(kind)}")
    return family


def _refuse_unsupported(fields: Fields) -> None:
    if fields.get("quantization_config"):
        raise fields.problem("quantization_config", "quantised weights are not supported")
    if fields.get("use_sliding_window"):
        raise fields.problem("use_sliding_window", "sliding windows are not supported")
    if any(kind != "full_attention" for kind in fields.items("layer_types")):
        raise fields.problem("layer_types", "only full_attention is supported")
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise fields.problem("hidden_act", f"{named(activation)} is not supported, only silu")


def _dtype(fields: Fields) -> str:
    """Both spellings: ``dtype`` (new) and ``torch_dtype`` (old)."""
    for key in ("dtype", "torch_dtype"):
        name = fields.text(key, DTYPES[0])
        if name not in DTYPES:
            kinds = ", ".join(DTYPES)
            fix = "get the model in one of these, or name the one that its weights have"
            raise fields.problem(key, f"{named(name)} is not supported, only {kinds}: {fix}")
    return fields.text("dtype", fields.text("torch_dtype", DTYPES[0]))


def _kv_heads(fields: Fields, heads: int) -> int:
    kv_heads = fields.integer("num_key_value_heads", 1, MAX_WIDTH, heads)
    if heads % kv_heads:
        raise fields.problem(
            "num_key_value_heads", f"a divisor of the {heads} heads is needed, got {kv_heads}"
        )
    return kv_heads


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    if fields.get("head_dim") is None and hidden % heads:
        raise fields.problem(
            "num_attention_heads", f"a divisor of hidden_size {hidden} is needed, got {heads}"
        )
    head_dim = fields.integer("head_dim", 2, MAX_WIDTH, hidden // heads)
    if head_dim % 2:
        raise fields.problem("head_dim", f"an even number is needed, got {head_dim}")
    return head_dim


def _parse_rope(fields: Fields) -> RopeConfig:
    """Both spellings: ``rope_parameters`` (new) and ``rope_theta`` with ``rope_scaling`` (old)."""
    old, new = fields.nested("rope_scaling"), fields.nested("rope_parameters")
    rope = Fields(new.source if new.values else old.source, {**old.values, **new.values})
    theta = fields.number("rope_theta", MAX_NUMBER, 10000.0, MIN_THETA)
    theta = rope.number("rope_theta", MAX_NUMBER, theta, MIN_THETA)
    for each in (fields, rope):
        if each.number("partial_rotary_factor", MAX_NUMBER, 1.0) != 1.0:
            raise each.problem("partial_rotary_factor", "only 1.0 is supported")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, linear_factor=rope.number("factor", MAX_NUMBER, least=MIN_FACTOR))
    if kind == "llama3":
        return RopeConfig(theta, llama3=_llama3_scaling(rope))
    raise rope.problem(
        "rope_type", f"{named(kind)} is not supported, only default, linear and llama3"
    )


def _llama3_scaling(rope: Fields) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=rope.number("factor", MAX_NUMBER, least=MIN_FACTOR),
        low_freq_factor=rope.number("low_freq_factor", MAX_NUMBER, least=MIN_FREQ_FACTOR),
        high_freq_factor=rope.number("high_freq_factor", MAX_NUMBER, least=MIN_FREQ_FACTOR),
        original_max_position_embeddings=rope.integer(
            "original_max_position_embeddings", 1, MAX_POSITIONS
        ),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise rope.wrong("high_freq_factor", f"more than low_freq_factor {scaling.low_freq_factor}")
    return scaling


def _eos_tokens(fields: Fields, vocab_size: int) -> tuple[int, ...] | None:
    """None where the file does not say."""
    value = fields.get("eos_token_id")
    if value is None:
        return None
    tokens = value if isinstance(value, list) else [value]
    for token in tokens:
        if not is_integer(token):
            raise fields.problem(
                "eos_token_id", f"a token id, or a list of some, is needed, got {shown(token)}"
            )
        if not 0 <= token < vocab_size:
            raise fields.problem(
                "eos_token_id", f"{shown(token)} is not in the vocabulary of {vocab_size} tokens"
            )
    return tuple(tokens)
