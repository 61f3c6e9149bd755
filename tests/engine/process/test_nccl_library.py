"""Which NCCL answers in a process, and whether ranks may share a GPU by it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ssd_engine.process import nccl_library
from tests.suite.tools import needs_tool, tool

COMPILERS = ("cc", "gcc", "clang")
ASK = """
import ctypes, os, sys
from ssd_engine.process.nccl_library import MULTI_RANK, loaded_version, share_gpus

libraries = [ctypes.CDLL(path) for path in sys.argv[1:]]  # as an extension module has its own
print(loaded_version(), share_gpus(), os.environ.get(MULTI_RANK), sep="|")
print(os.environ.get("NCCL_MAX_CTAS"))
"""

pytestmark = needs_tool("a C compiler", *COMPILERS)


def library(folder: Path, version: int) -> Path:
    """A library that knows nothing but its version."""
    folder.mkdir(parents=True)
    source, made = folder / "nccl.c", folder / "libnccl.so.2"
    source.write_text(f"int ncclGetVersion(int *version) {{ *version = {version}; return 0; }}")
    command = [tool(*COMPILERS), "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", made, source]
    subprocess.run(command, check=True)
    return made


def ask(
    *loaded: Path, first: Path | None = None, multi_rank: str | None = None
) -> tuple[str, str, str]:
    """What a process says that has these libraries: its version, what is in the way, the variable.

    ``first``: a library that it was told to take before all others.
    """
    environment = {name: value for name, value in os.environ.items() if "NCCL" not in name}
    if first is not None:
        environment["LD_PRELOAD"] = str(first)
    if multi_rank is not None:
        environment[nccl_library.MULTI_RANK] = multi_rank
    command = [sys.executable, "-c", ASK, *map(str, loaded)]
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    answer, blocks = said.stdout.splitlines()
    version, missing, variable = answer.split("|")
    assert (missing == "None") == (blocks != "None"), "room is left where ranks share a GPU"
    return version, missing, variable


TOO_OLD = "NCCL 2.28.9 does not allow that, 2.30 and later do"
FORBIDDEN = "NCCL_MULTI_RANK_GPU_ENABLE is '0', not 1"


@pytest.mark.parametrize(
    ("loaded", "first", "multi_rank", "answer"),
    [
        (23_203, None, None, ("(2, 32, 3)", "None", "1")),
        # whichever torch was built with
        (22_809, 23_203, None, ("(2, 32, 3)", "None", "1")),
        (23_203, 22_809, None, ("(2, 28, 9)", TOO_OLD, "None")),
        # an old library is named, and not asked; without one nothing is
        (22_809, None, None, ("(2, 28, 9)", TOO_OLD, "None")),
        (None, None, None, ("None", "no libnccl.so.2 is loaded", "None")),
        # an operator who forbids it is heard
        (23_007, None, "0", ("(2, 30, 7)", FORBIDDEN, "0")),
    ],
)
def test_the_library_that_is_loaded_tells_whether_ranks_may_share_a_gpu(
    loaded: int | None,
    first: int | None,
    multi_rank: str | None,
    answer: tuple[str, str, str],
    tmp_path: Path,
) -> None:
    libraries = [] if loaded is None else [library(tmp_path / "loaded", loaded)]
    before = None if first is None else library(tmp_path / "first", first)
    assert ask(*libraries, first=before, multi_rank=multi_rank) == answer
