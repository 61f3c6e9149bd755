"""The file of a benchmark: written after every run, so that an interrupted one can go on."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ssd_client.bench.measure.metrics import Metrics, interval
from ssd_client.bench.measure.settings import RunKey, Settings
from ssd_client.errors import BadInputError, ClientError

_FORMAT = 1
_KEPT = ("theory", "timelines", "delay_curve")  # kept from an earlier part of the same benchmark
_NEEDED = ("complete", "command", "client", "target", "drafts", "prompts", "settings", "summary",
           "runs")  # fmt: skip


class Results:
    def __init__(self, settings: Settings, about: dict[str, Any]) -> None:
        """``about``: command, versions, hardware, models."""
        self.settings = settings
        self.about = about
        self.runs: dict[RunKey, dict[str, Any]] = {}
        self.more: dict[str, Any] = {}  # theory, equality

    def add(
        self,
        key: RunKey,
        metrics: Metrics,
        requests: list[dict[str, Any]],
        rounds: dict[str, Any] | None = None,
    ) -> None:
        self.runs[key] = {"metrics": metrics, "requests": requests, "rounds": rounds}

    @property
    def failed(self) -> list[str]:
        """Why requests failed."""
        return [
            request["error"]
            for run in self.runs.values()
            for request in run["requests"]
            if request["error"] is not None
        ]

    @property
    def complete(self) -> bool:
        return set(self.settings.runs()) <= set(self.runs)

    def metrics(self, load: float, kind: str) -> list[Metrics]:
        """The metrics of all repeats so far."""
        return [
            run["metrics"]
            for key, run in sorted(self.runs.items())
            if (key.load, key.mode) == (load, kind)
        ]

    def summary(self) -> list[dict[str, Any]]:
        """For every load and mode: the median of each figure over repeats, and its interval."""
        return [
            {"load": load, "mode": kind, **_summed_up(found)}
            for load in self.settings.loads
            for kind in self.settings.kinds
            if (found := self.metrics(load, kind))
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "complete": self.complete,
            **self.about,
            "settings": asdict(self.settings),
            "summary": self.summary(),
            **self.more,
            "runs": [{**asdict(key), **run} for key, run in sorted(self.runs.items())],
        }

    def save(self, path: Path) -> None:
        """Saves it whole or not at all: what was there stays until the new one is written."""
        write_whole(path, json.dumps(self.as_json(), ensure_ascii=False) + "\n")

    def save_csv(self, path: Path) -> None:
        rows = [
            {"repeat": key.repeat, "load": key.load, "mode": key.mode, **_flat(run["metrics"])}
            for key, run in sorted(self.runs.items())
        ]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        try:
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, columns)
                writer.writeheader()
                writer.writerows(rows)
        except OSError as error:
            raise ClientError(f"cannot write {path}: {error.strerror}") from error

    def resume(self, path: Path) -> int:
        """Takes over the runs of a file with the same settings; returns how many."""
        content = read_results(path)
        before, now = content["settings"], json.loads(json.dumps(asdict(self.settings)))
        if before != now:
            raise BadInputError(
                f"--resume {path}: it was run with another {_different(before, now)}"
            )
        for name in ("target", "drafts"):
            if _identity(content.get(name)) != _identity(self.about.get(name)):
                raise BadInputError(f"--resume {path}: it was run with another {name}")
        for run in content["runs"]:
            key = RunKey(run["repeat"], run["load"], run["mode"])
            self.add(key, run["metrics"], run["requests"], run["rounds"])
        self.more |= {name: content[name] for name in _KEPT if name in content}
        return len(self.runs)


def _identity(about: Any) -> Any:
    """What makes a service another one: its model, not its place or its load."""
    if isinstance(about, list):
        return [_identity(each) for each in about]
    if isinstance(about, dict):
        return {name: about.get(name) for name in ("name", "fingerprint", "dtype", "device")}
    return about


def _different(before: dict[str, Any], now: dict[str, Any]) -> str:
    names = [name for name in now if before.get(name) != now[name]]
    return ", ".join(f"{name} ({before.get(name)}, not {now[name]})" for name in names)


def read_results(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise BadInputError(f"{path}: not the JSON of a benchmark ({error})") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise BadInputError(f"{path}: not the result of this version's bench")
    missing = [name for name in _NEEDED if name not in content]
    if missing:
        raise BadInputError(f"{path}: not the result of a bench, {missing[0]!r} is missing")
    return content


def check_extra(name: str, module: str) -> None:
    """Raises before a long run, not after it."""
    if importlib.util.find_spec(module) is None:
        raise ClientError(f'--{name} needs the {name} extra: pip install "ssd-serve[{name}]"')


def check_output(flag: str, path: Path) -> None:
    """Raises before a long run, not after it."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise BadInputError(f"{flag} {path}: its folder does not exist")
    if path.is_dir():
        raise BadInputError(f"{flag} {path}: a file is needed, this is a folder")
    if not os.access(folder, os.W_OK):
        raise BadInputError(f"{flag} {path}: its folder cannot be written to")


def write_whole(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ClientError(f"cannot write {path}: {error.strerror}") from error


def _summed_up(found: Sequence[Metrics]) -> dict[str, Any]:
    names = list(dict.fromkeys(name for metrics in found for name in metrics))
    columns = {name: [metrics.get(name) for metrics in found] for name in names}
    numbers = {
        name: [value for value in column if isinstance(value, int | float)]
        for name, column in columns.items()
    }
    return {name: asdict(interval(values)) for name, values in numbers.items() if values}


def _flat(metrics: Metrics) -> dict[str, Any]:
    return {
        name: " ".join(f"{each:.4f}" for each in value) if isinstance(value, list) else value
        for name, value in metrics.items()
    }
