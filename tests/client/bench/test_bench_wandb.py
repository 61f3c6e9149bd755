"""--wandb: the real library, offline. It is an extra, so it may not be there."""

from __future__ import annotations

from pathlib import Path

import pytest

from ssd_client.bench.report import results, wandb_log
from ssd_client.errors import ClientError


def content() -> dict:
    metrics = {"output_throughput": 12.5, "rates": [0.5], "hit_rate": None}
    return {
        "command": "ssd-client bench",
        "client": {"cores": 2},
        "target": {"name": "stories-target"},
        "drafts": [],
        "prompts": {"name": "stories"},
        "settings": {"repeats": 1},
        "complete": True,
        "summary": [{"mode": "ssd", "load": 1.0, "output_throughput": {"median": 12.5}}],
        "runs": [{"repeat": 0, "load": 1.0, "mode": "ssd", "metrics": metrics}],
    }


def test_every_run_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    wandb_log.log_results(content(), "ssd-test")
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    logged = b"".join(file.read_bytes() for file in folder.glob("*.wandb"))
    assert b"ssd/output_throughput" in logged
    assert b"stories-target" in logged
    assert b"median/ssd/1/output_throughput" in logged
    assert b"rates" not in logged  # what is no number is no curve


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ClientError, match=r"ssd-serve\[wandb\]"):
        results.check_extra("wandb", "wandb")
