"""OLMo 2: norms come after attention and after the MLP, and one over all queries, one over all
keys."""

from ssd_engine.checkpoints.families.family import Family, LayerTraits, QKNorm
from ssd_engine.checkpoints.files.model_files import Fields


def read_traits(fields: Fields) -> LayerTraits:
    biased = fields.flag("attention_bias")
    return LayerTraits(
        qkv_bias=biased, o_bias=biased, qk_norm=QKNorm.PROJECTION, norms_outputs=True
    )


OLMO2 = Family("Olmo2ForCausalLM", "olmo2", read_traits)
