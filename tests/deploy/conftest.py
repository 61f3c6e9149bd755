"""Secrets as an operator who tries it out would make them."""

import subprocess
from pathlib import Path

import pytest

from tests.deploy.manifests import parse

ROOT = Path(__file__).resolve().parents[2]
Secrets = dict[str, dict[str, str]]  # name, key, content


@pytest.fixture(scope="session")
def secrets() -> Secrets:
    """From deploy/make-secrets.sh; needs openssl."""
    script = ROOT / "deploy" / "make-secrets.sh"
    done = subprocess.run([script], capture_output=True, text=True, timeout=120, check=True)
    return {each["metadata"]["name"]: each["stringData"] for each in parse(done.stdout)}


@pytest.fixture(scope="session")
def secret_folder(secrets: Secrets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FOLDER/SECRET/KEY."""
    folder = tmp_path_factory.mktemp("secrets")
    for name, keys in secrets.items():
        (folder / name).mkdir()
        for key, content in keys.items():
            (folder / name / key).write_text(content)
    return folder
