"""Where models come from: shipped with the package, a directory, or a hub id."""

import os
from pathlib import Path

from ssd_engine.checkpoints.files.model_files import reason_of
from ssd_engine.errors import ModelError

SHIPPED = Path(__file__).parents[1] / "shipped"
NEEDED_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model")


def shipped_models() -> list[str]:
    return sorted(p.name for p in SHIPPED.iterdir() if (p / "config.json").is_file())


def resolve_model(name: str) -> Path:
    """The directory of ``name``: a path wins over a shipped name, a shipped name over a hub id."""
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return Path(path)
    if name in shipped_models():
        return SHIPPED / name
    if os.path.lexists(path):
        raise ModelError(
            f"{path} is no directory: that of a model, with its config.json, is needed"
        )
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and " " not in name:
        return _download(name)
    shipped = ", ".join(shipped_models())
    raise ModelError(f"model {name!r} is neither a directory nor a shipped model ({shipped})")


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(NEEDED_FILES)))
    except Exception as error:  # the hub client raises many kinds; the user needs the first line
        raise ModelError(
            f"model {hub_id!r} is not a directory and could not be had from the hub: "
            f"{reason_of(error)}"
        ) from error
