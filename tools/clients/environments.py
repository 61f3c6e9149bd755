"""An environment for each client, kept between runs: of Python, or of Node."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

from tools.clients.table import Client

STAMP = "installed.json"  # what an environment was made of, written last


class NotInstalled(Exception):
    """A client could not be installed; says why."""


def install(client: Client, folder: Path) -> Path:
    """The client's environment below ``folder``, made anew where its packages are others now."""
    place = folder / client.name
    wanted = json.dumps(client.packages)
    stamp = place / STAMP
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        (_install_python if client.is_python else _install_node)(client, place)
        stamp.write_text(wanted)
    return place


def _install_python(client: Client, place: Path) -> None:
    _run([sys.executable, "-m", "venv", str(place)], place)
    pip = [str(place / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install"]
    _run([*pip, "--quiet", "--no-compile", *client.packages], place)


def _install_node(client: Client, place: Path) -> None:
    """Node looks for packages beside a script and above: the scripts are copied there."""
    (place / "package.json").write_text('{"private": true, "type": "module"}')
    _run(["npm", "install", "--no-audit", "--no-fund", "--silent", *client.packages], place)


def _run(command: Sequence[str], place: Path) -> None:
    try:
        done = subprocess.run(command, cwd=place, capture_output=True, text=True)
    except FileNotFoundError:
        raise NotInstalled(f"{command[0]} is not installed") from None
    if done.returncode:
        raise NotInstalled(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[-2000:]}")


def version_of(client: Client, place: Path) -> str:
    """The version of the package that is tried."""
    name = package_name(client.packages[0])
    if not client.is_python:
        about = place / "node_modules" / name / "package.json"
        return str(json.loads(about.read_text())["version"])
    asked = f"from importlib.metadata import version; print(version({name!r}))"
    command = [str(place / "bin/python"), "-c", asked]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def package_name(package: str) -> str:
    """``openai>=3,<4`` is of Python, ``@ai-sdk/openai-compatible@>=3 <4`` of Node."""
    at = package.rfind("@")
    return package[:at] if at > 0 else Requirement(package).name


def command_of(client: Client, place: Path) -> list[str]:
    if client.is_python:
        return [str(place / "bin/python"), str(client.path)]
    for script in client.path.parent.glob("*.mjs"):
        shutil.copy(script, place)
    return ["node", str(place / client.script)]


def variables_of(url: str, tokenizer: Path) -> dict[str, str]:
    """Nothing is downloaded beside the packages, and nothing told to anybody."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")},
        "SSD_URL": f"{url}/v1",
        "SSD_TOKENIZER": str(tokenizer),
        "HF_HUB_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it is read from its repository
        "LANGSMITH_TRACING": "false",
        "PYTHONDONTWRITEBYTECODE": "",
    }
