"""A benchmark in Weights & Biases, for those who keep theirs there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssd_client.errors import ClientError


def log_results(content: Mapping[str, Any], project: str) -> None:
    """One step for each run, and the medians as the summary."""
    import wandb

    try:
        _log(wandb, content, project)
    except (wandb.errors.Error, OSError) as error:
        raise ClientError(f"--wandb: {error}") from error


def _log(wandb: Any, content: Mapping[str, Any], project: str) -> None:
    names = ("command", "client", "target", "drafts", "prompts", "settings")
    run = wandb.init(project=project, config={name: content[name] for name in names})
    try:
        for step, each in enumerate(content["runs"]):
            figures = {
                f"{each['mode']}/{name}": value
                for name, value in each["metrics"].items()
                if isinstance(value, int | float)
            }
            run.log({"repeat": each["repeat"], "load": each["load"], **figures}, step=step)
        for row in content["summary"]:
            for name, value in row.items():
                if isinstance(value, dict):
                    key = f"median/{row['mode']}/{row['load']:g}/{name}"
                    run.summary[key] = value["median"]
        run.summary["complete"] = content["complete"]
    finally:
        run.finish()
