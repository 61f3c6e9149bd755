"""Where compiled kernels are kept from one start to the next."""

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

# Libraries that compile at run time, and the variable that tells each its place.
VARIABLES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
OWN = "SSD_KERNEL_CACHE"
SEED = "SSD_KERNEL_SEED"  # names a folder of kernels compiled for an image, laid out as the cache


def use_kernel_cache(directory: Path | None) -> None:
    """To be called before any of them is imported. None leaves each its own place in the home."""
    if directory is None:
        return
    if os.environ.get(SEED):
        _copy_seed(Path(os.environ[SEED]), directory)
    for variable, folder in VARIABLES.items():
        os.environ.setdefault(variable, str(directory / folder))
    os.environ[OWN] = str(directory)


def _copy_seed(seed: Path, directory: Path) -> None:
    """Copies what the cache lacks; each file at once, as other starts may be reading."""
    try:
        for file in (each for each in seed.rglob("*") if each.is_file()):
            place = directory / file.relative_to(seed)
            if place.exists():
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as other:
                other.write(file.read_bytes())
            shutil.copymode(file, other.name)
            Path(other.name).replace(place)
    except OSError as error:
        log.warning("kernels of %s cannot be put into %s: %s", seed, directory, error)


def kept_binary(name: str, key: str, make: Callable[[], bytes]) -> bytes:
    """What ``make`` gave the last time for this key, or gives now."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(os.environ.get(OWN) or Path(home) / "ssd-serve") / "kernels"
    file = folder / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    try:
        return file.read_bytes()
    except OSError:
        binary = make()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as other:
            other.write(binary)
        Path(other.name).replace(file)  # at once: another start may be reading
    except OSError as error:
        log.debug("compiled kernels cannot be kept in %s: %s", folder, error)
    return binary
