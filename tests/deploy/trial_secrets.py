"""Secrets as an operator who tries it out would make them."""

import functools
import subprocess
from pathlib import Path

from tests.deploy.manifests import parse

ROOT = Path(__file__).resolve().parents[2]
Secrets = dict[str, dict[str, str]]  # name, key, content


@functools.cache
def trial_secrets() -> Secrets:
    """From deploy/make-secrets.sh; needs openssl."""
    script = ROOT / "deploy" / "make-secrets.sh"
    done = subprocess.run([script], capture_output=True, text=True, timeout=120, check=True)
    return {each["metadata"]["name"]: each["stringData"] for each in parse(done.stdout)}


def write_secrets(folder: Path) -> Path:
    """FOLDER/SECRET/KEY."""
    for name, keys in trial_secrets().items():
        (folder / name).mkdir()
        for key, content in keys.items():
            (folder / name / key).write_text(content)
            (folder / name / key).chmod(0o440)
    return folder
