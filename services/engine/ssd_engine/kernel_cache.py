"""Where compiled kernels are kept from one start to the next."""

import hashlib
import logging
import os
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


def use_kernel_cache(directory: Path | None) -> None:
    """Before any of them is imported. None leaves each its own place, somewhere in the home."""
    if directory is None:
        return
    for variable, folder in VARIABLES.items():
        os.environ.setdefault(variable, str(directory / folder))
    os.environ[OWN] = str(directory)


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
