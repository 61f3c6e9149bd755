"""Llama 2 and 3.x."""

from ssd_engine.checkpoints.families.family import Family, LayerTraits
from ssd_engine.checkpoints.files.model_files import Fields


def read_traits(fields: Fields) -> LayerTraits:
    biased = fields.flag("attention_bias")
    return LayerTraits(qkv_bias=biased, o_bias=biased, mlp_bias=fields.flag("mlp_bias"))


LLAMA = Family("LlamaForCausalLM", "llama", read_traits)
