"""The daemon by which target and draft of --local share a GPU; a script stands in for it."""

import os

import pytest

from ssd_client.errors import ClientError
from ssd_client.local.mps import mps_daemon, share_variables


def test_it_runs_exactly_as_long_as_the_block(mps):
    with mps_daemon() as environment:  # it begins though the daemon keeps its stderr open
        (call,) = mps.calls()
        assert os.path.isdir(call.pipes)
        assert os.stat(call.pipes).st_mode & 0o077 == 0  # nobody else's
        os.kill(mps.pid(), 0)
    folder = mps.check_started_and_stopped()
    assert environment == {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_it_ends_with_a_block_that_fails(mps, error):
    with pytest.raises(error), mps_daemon():
        raise error
    mps.check_started_and_stopped()


def test_a_daemon_that_runs_already_is_left_alone(mps, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with mps_daemon() as environment:
        assert environment == {}  # what is inherited names it
    assert mps.calls() == []
    assert tmp_path.is_dir()


def test_without_the_program(mps, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    words = "--local-mps needs nvidia-cuda-mps-control on PATH: install it with NVIDIA's driver"
    with pytest.raises(ClientError, match=words), mps_daemon():
        pass


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [("no permission\x1b[2J\nmore\n", "no permission�[2J"), ("", "status 1")],
)
def test_a_daemon_that_does_not_start(mps, stderr, reason):
    mps.fail_with(stderr)
    with pytest.raises(ClientError) as caught, mps_daemon():
        pass
    assert str(caught.value) == f"--local-mps: the MPS daemon did not start: {reason}"
    assert not os.path.exists(mps.calls()[0].pipes)


def test_a_program_that_cannot_be_run(mps):
    (mps.folder / "nvidia-cuda-mps-control").write_bytes(b"\0")
    with (
        pytest.raises(ClientError, match=r"the MPS daemon did not start: .*Exec format"),
        mps_daemon(),
    ):
        pass


@pytest.mark.parametrize(
    ("visible", "seen"), [("3", "0"), ("2, 5", "0,1"), ("GPU-1c", None), ("", None), ("-1", None)]
)
def test_visible_devices_are_numbered_as_the_daemon_shows_them(mps, monkeypatch, visible, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with mps_daemon() as environment:
        assert environment.get("CUDA_VISIBLE_DEVICES") == seen


def test_the_share_of_a_process():
    assert share_variables(30) == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30"}
    assert share_variables(100) == {}
