"""Which kernels serve follows from facts about the device, and the log says where they are slower;
what does not compile leaves nothing behind."""

import ctypes
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ssd_engine.kernels import driver
from ssd_engine.kernels.driver import CompileError, compile_source
from ssd_engine.kernels.kernel_set import choose_kernels


@pytest.mark.parametrize(
    ("capability", "option", "hopper", "says"),
    [
        ((9, 0), "auto", True, ""),
        ((10, 0), "auto", False, "this GPU is an sm_100, and our CUDA sources are for sm_90 alone"),
        ((12, 1), "auto", False, "this GPU is an sm_121"),
        ((10, 0), "triton", False, ""),  # as it was asked for
    ],
)
def test_a_gpu_that_our_sources_are_not_for_is_said_to_be_one(
    capability: tuple[int, int],
    option: str,
    hopper: bool,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    about = SimpleNamespace(
        major=capability[0],
        minor=capability[1],
        multi_processor_count=148,
        shared_memory_per_block_optin=1 << 17,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    with caplog.at_level(logging.INFO):
        chosen = choose_kernels(option, torch.device("cuda", 0), steady=True)
    assert chosen.hopper is hopper
    assert [record.getMessage()[: len(says)] for record in caplog.records] == [says] * bool(says)


class Compiler:
    """NVRTC, as far as it is asked for."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.alive = fails, 0

    def nvrtcCreateProgram(self, *_: Any) -> None:
        self.alive += 1

    def nvrtcDestroyProgram(self, *_: Any) -> None:
        self.alive -= 1

    def nvrtcCompileProgram(self, *_: Any) -> int:
        return int(self.fails)

    def _size(self, program: Any, size: Any) -> None:
        ctypes.cast(size, ctypes.POINTER(ctypes.c_size_t))[0] = 8

    nvrtcGetProgramLogSize = nvrtcGetCUBINSize = _size

    def _write(self, program: Any, text: Any) -> None:
        text.value = b"a cubin"

    nvrtcGetProgramLog = nvrtcGetCUBIN = _write


def test_a_program_is_freed_whether_it_compiles_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    works, fails = Compiler(fails=False), Compiler(fails=True)
    monkeypatch.setattr(driver, "_nvrtc", lambda: works)
    assert compile_source("", {}, "sm_90a").startswith(b"a cubin")
    monkeypatch.setattr(driver, "_nvrtc", lambda: fails)
    with pytest.raises(CompileError):
        compile_source("", {}, "sm_90a")
    assert works.alive == fails.alive == 0
