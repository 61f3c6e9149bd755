"""What a section of the benchmark leaves behind, and the table that joins them."""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "transformers", "flashinfer-python", "grpcio", "numpy")
Rows = list[dict[str, Any]]
FAILED = "failed"  # of a row: why the whole section has failed. Other rows do not have it


def commit() -> str:
    """The commit that is measured, with a + where files were changed since."""
    try:
        name = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.stdout.strip()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def run_section(name: str, section: Callable[[], Rows], folder: Path, of: str) -> bool:
    """Whether it has passed."""
    begin = time.monotonic()
    rows = section()
    result = {
        "section": name,
        "commit": of,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": versions(),
        "command": " ".join(["python -m tools.gpu.bench", *sys.argv[1:]]),
        "seconds": round(time.monotonic() - begin, 1),
        "rows": rows,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{name} ({result['seconds']} s, commit {of})\n{table(rows)}", flush=True)
    failures = [row[FAILED] for row in rows if row.get(FAILED)]
    for failure in failures:
        print(f"{name} failed: {failure}", flush=True)
    return not failures


def table(rows: Rows) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(key, "")) for key in columns) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


def join(folder: Path, out: Path) -> None:
    """All sections as one page. Each says of which commit it is."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not results:
        raise SystemExit(f"no sections in {folder}")
    first = results[0]
    about = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    page = [
        f"# {first['device']}",
        f"{about}. Made by `tools/gpu/bench.py`: one section after the other, bf16.",
    ]
    for result in results:
        command = f"`{result['command']}` ({result['commit']}, {result['seconds']:.0f} s)"
        page += [f"## {result['section']}", command, table(result["rows"])]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n\n".join(page) + "\n")
    print(f"{out}: {len(results)} sections")
