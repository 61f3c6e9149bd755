"""Qwen2 and 2.5: queries, keys and values have a bias."""

from ssd_engine.checkpoints.families.family import Family, LayerTraits

QWEN2 = Family("Qwen2ForCausalLM", "qwen2", lambda fields: LayerTraits(qkv_bias=True))
