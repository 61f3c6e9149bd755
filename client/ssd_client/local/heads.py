"""Whether a draft is an EAGLE-3 head, which lacks its target's embedding and tokenizer."""

from __future__ import annotations

import json

from ssd_client.local.fit import folder_of

# Fields of a head's config that no model has.
SIGNS = ("speculators_model_type", "draft_vocab_size", "eagle_config")


def is_head(model: str) -> bool:
    """False where there is no telling: a folder is looked into, and what the hub's cache has."""
    folder = folder_of(model)
    try:
        config = {} if folder is None else json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False  # the service will say what is wrong with it
    return isinstance(config, dict) and any(sign in config for sign in SIGNS)
