"""Mistral 7B from v0.3 on: Llama's layers, where no window limits how far back a token sees."""

from ssd_engine.checkpoints.families.family import Family, LayerTraits
from ssd_engine.checkpoints.files.model_files import Fields, is_integer, shown

DEFAULT_WINDOW = 4096  # the family's own, where a config.json does not say


def read_traits(fields: Fields) -> LayerTraits:
    """A window of at least as many tokens as there may be limits nothing."""
    window = fields.values.get("sliding_window", DEFAULT_WINDOW)
    positions = fields.get("max_position_embeddings")
    if window is not None and not (is_integer(window) and window >= positions):
        raise fields.problem(
            "sliding_window",
            f"sliding windows are not supported: null, or max_position_embeddings ({positions}) "
            f"or more, is needed, got {shown(window)}",
        )
    return LayerTraits()


MISTRAL = Family("MistralForCausalLM", "mistral", read_traits)
