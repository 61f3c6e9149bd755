"""Qwen3: queries and keys of each head have a norm."""

from ssd_engine.checkpoints.families.family import Family, LayerTraits, QKNorm
from ssd_engine.checkpoints.files.model_files import Fields


def read_traits(fields: Fields) -> LayerTraits:
    biased = fields.flag("attention_bias")
    return LayerTraits(qkv_bias=biased, o_bias=biased, qk_norm=QKNorm.HEAD)


QWEN3 = Family("Qwen3ForCausalLM", "qwen3", read_traits)
