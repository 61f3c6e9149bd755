"""Tells which test made a line run, in whichever process: one byte for each fault and test.

Two files are shared by all processes: the number of the test that each worker runs, and the bytes.
"""

import mmap
import os
from functools import cache
from pathlib import Path

FOLDER = "SSD_MUTANTS"  # the variable that names where the files are
WORKERS, NUMBER = 64, 4  # bytes of a test's number


def prepare(folder: Path, faults: int, tests: int) -> None:
    (folder / "running").write_bytes(bytes(WORKERS * NUMBER))
    (folder / "ran").write_bytes(bytes(faults * tests))


@cache
def _map(name: str) -> mmap.mmap:
    with Path(os.environ[FOLDER], name).open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def begins(test: int) -> None:
    """Called by a worker: tests are counted from 1."""
    at = int(os.environ["SSD_TEST_WORKER"]) % WORKERS * NUMBER
    _map("running")[at : at + NUMBER] = test.to_bytes(NUMBER, "little")


def ran(fault: int) -> None:
    """Called where the fault would be."""
    worker = os.environ.get("SSD_TEST_WORKER")
    if FOLDER not in os.environ or worker is None:
        return  # tests are being collected
    at = int(worker) % WORKERS * NUMBER
    try:
        running, seen = _map("running"), _map("ran")
    except OSError:
        return  # a process that may open no files
    test = int.from_bytes(running[at : at + NUMBER], "little")
    if test:
        tests = len(seen) // int(os.environ["SSD_MUTANTS_FAULTS"])
        seen[fault * tests + test - 1] = 1


def tests_of(folder: Path, fault: int, faults: int) -> list[int]:
    """Those that ran it, counted from 0."""
    seen = (folder / "ran").read_bytes()
    tests = len(seen) // faults
    return [test for test in range(tests) if seen[fault * tests + test]]
