"""Which kernels serve follows from facts about the device; the log says where they are slower."""

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

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


@pytest.mark.parametrize(("code", "ends"), [(0, nullcontext()), (1, pytest.raises(CompileError))])
def test_a_program_is_freed_whether_it_compiles_or_not(
    code: int, ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvrtc = Mock(nvrtcCompileProgram=Mock(return_value=code))
    monkeypatch.setattr(driver, "_nvrtc", lambda: nvrtc)
    with ends:
        compile_source("", {}, "sm_90a")
    assert nvrtc.nvrtcCreateProgram.call_count == nvrtc.nvrtcDestroyProgram.call_count == 1
