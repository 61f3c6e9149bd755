"""NCCL on one GPU: ranks and planes share it as they would use several.

NCCL before 2.30 lets no two ranks share a GPU. --nccl, or SSD_BENCH_NCCL, names a newer library
than torch's, which every process here then takes first. Each part is a process of its own and has a
limit: one that fails or hangs takes no other along.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tools.gpu.report import FAILED, Rows
from tools.gpu.serving import mps

PRELOAD = "LD_PRELOAD"
SECTION_SECONDS = 440.0  # for all parts: a command on a borrowed machine has not much longer
LEAST_SECONDS = 15.0  # with less, a part is not begun


@dataclass(frozen=True)
class Part:
    name: str  # of nccl_parts.PARTS
    seconds: float  # at most
    under_mps: bool = True


PARTS = (
    Part("models", 60, under_mps=False),
    Part("all-reduce", 60),
    Part("float32", 100),
    Part("2 ranks", 90),
    Part("4 ranks", 100),
    Part("plane", 90),
    Part("features", 100),
)


def nccl(library: Path | None, clock: Callable[[], float] = time.monotonic) -> Rows:
    """All parts in turn, as far as the section's time goes. Without ``library``: the NCCL of torch,
    which has to be new enough."""
    if library is not None and not library.is_file():
        return [{"part": "models", FAILED: f"--nccl: there is no file {library}"}]
    rows: Rows = []
    until = clock() + SECTION_SECONDS
    with tempfile.TemporaryDirectory() as folder:
        for part in PARTS:
            seconds = min(part.seconds, until - clock())
            if seconds < LEAST_SECONDS:
                rows.append({"part": part.name, FAILED: f"{part.name}: no time is left for it"})
                continue
            part = replace(part, seconds=seconds)
            command = [sys.executable, "-m", "tools.gpu.nccl_parts", part.name, folder]
            with mps() if part.under_mps else contextlib.nullcontext():
                rows += run_part(part, command, Path(folder), preloaded(library))
            if part.name == "models" and rows[-1].get(FAILED):
                break  # nothing below can work
    return rows


def preloaded(library: Path | None) -> Mapping[str, str]:
    """The environment of a process that takes this library before torch's."""
    if library is None:
        return os.environ
    others = [each for each in os.environ.get(PRELOAD, "").split(":") if each]
    return {**os.environ, PRELOAD: ":".join([str(library.resolve()), *others])}


def run_part(
    part: Part, command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> Rows:
    """The rows that it has written until it ended, or until its time was up."""
    child = subprocess.Popen(command, env=dict(environment), start_new_session=True)
    with _group_ended(child):
        try:
            code = child.wait(part.seconds)
            problem = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            problem = f"not done after {part.seconds:g} s"
    file = folder / f"{part.name}.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    rows: Rows = [{"part": part.name, **json.loads(line)} for line in lines]
    if problem:
        rows.append({"part": part.name, FAILED: f"{part.name}: {problem}"})
    return rows


@contextlib.contextmanager
def _group_ended(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """What it has started ends with it: services, their engines and ranks."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
