"""Builds every overlay with kubectl, and keeps what comes out for the tests.

    python -m tools.render_manifests

The tests look at manifests also where there is no kubectl; the digest of the sources in the first
line tells them whether they look at what would be applied.
"""

import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
RENDERED = ROOT / "tests" / "deploy" / "rendered"


def overlays() -> list[str]:
    return sorted(each.parent.name for each in DEPLOY.glob("overlays/*/kustomization.yaml"))


def sources() -> list[Path]:
    folders = ("base", "components", "overlays")
    return sorted(file for folder in folders for file in (DEPLOY / folder).rglob("*.yaml"))


def digest() -> str:
    """Of all sources, names included."""
    sums = hashlib.sha256()
    for file in sources():
        sums.update(f"{file.relative_to(DEPLOY).as_posix()}\n".encode() + file.read_bytes())
    return sums.hexdigest()


def build(overlay: str, kubectl: str = "kubectl") -> str:
    command = [kubectl, "kustomize", str(DEPLOY / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{overlay}: {done.stderr.strip()}")
    return done.stdout


def rendered(overlay: str) -> Path:
    return RENDERED / f"{overlay}.yaml"


def main() -> None:
    RENDERED.mkdir(exist_ok=True)
    for old in RENDERED.glob("*.yaml"):
        old.unlink()
    first = f"# Written by make manifests from sources with the digest {digest()}.\n"
    for overlay in overlays():
        rendered(overlay).write_text(first + build(overlay))
        print(f"{rendered(overlay).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
