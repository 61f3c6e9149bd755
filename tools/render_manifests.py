"""Builds every overlay with kubectl, and keeps what comes out for the tests.

Before that, alert rules become an object of the Prometheus operator, which knows no plain files.

    python -m tools.render_manifests

The tests look at manifests also where there is no kubectl; the digest of the sources in the first
line tells them whether they look at what would be applied.
"""

import hashlib
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
RENDERED = ROOT / "tests" / "deploy" / "rendered"
ALERTS = DEPLOY / "observability" / "alerts.yaml"
RULES = DEPLOY / "components" / "service-monitor" / "rules.yaml"


def overlays() -> list[str]:
    return sorted(each.parent.name for each in DEPLOY.glob("overlays/*/kustomization.yaml"))


def sources() -> list[Path]:
    folders = ("base", "components", "overlays")
    return sorted(file for folder in folders for file in (DEPLOY / folder).rglob("*.yaml"))


def digest() -> str:
    """The digest of all sources, names included."""
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


def rules(alerts: str) -> str:
    """Rules of a file of Prometheus, for its operator."""
    head = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "ssd"},
        "spec": yaml.safe_load(alerts),
    }
    text: str = yaml.safe_dump(head, sort_keys=False, width=96, allow_unicode=True)
    return f"# Written by make manifests from deploy/observability/alerts.yaml.\n{text}"


def rendered(overlay: str) -> Path:
    return RENDERED / f"{overlay}.yaml"


def main() -> None:
    RENDERED.mkdir(exist_ok=True)
    if ALERTS.exists():
        RULES.write_text(rules(ALERTS.read_text()))
    for old in RENDERED.glob("*.yaml"):
        old.unlink()
    first = f"# Written by make manifests from sources with the digest {digest()}.\n"
    for overlay in overlays():
        rendered(overlay).write_text(first + build(overlay))
        print(f"{rendered(overlay).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
