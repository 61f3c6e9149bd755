"""Which NCCL answers in a process, and whether ranks may share a GPU by it."""

import os
import subprocess
import sys
from pathlib import Path

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


def test_the_library_that_is_loaded_tells_its_version(tmp_path: Path) -> None:
    old, new = library(tmp_path / "old", 22_809), library(tmp_path / "new", 23_203)
    assert ask(new) == ("(2, 32, 3)", "None", "1")
    assert ask(old, first=new)[0] == "(2, 32, 3)"  # whichever torch was built with
    assert ask(new, first=old)[0] == "(2, 28, 9)"


def test_an_old_library_is_named_and_not_asked(tmp_path: Path) -> None:
    old = library(tmp_path / "old", 22_809)
    missing = "NCCL 2.28.9 does not allow that, 2.30 and later do"
    assert ask(old) == ("(2, 28, 9)", missing, "None")


def test_without_a_library_nothing_is_asked() -> None:
    assert ask() == ("None", "no libnccl.so.2 is loaded", "None")


def test_an_operator_who_forbids_it_is_heard(tmp_path: Path) -> None:
    new = library(tmp_path / "new", 23_007)
    forbidden = "NCCL_MULTI_RANK_GPU_ENABLE is '0', not 1"
    assert ask(new, multi_rank="0") == ("(2, 30, 7)", forbidden, "0")
