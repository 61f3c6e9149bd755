"""NVIDIA's MPS: two processes that use one GPU at the same time, instead of in turns."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

from ssd_client.errors import ClientError
from ssd_client.local.service import signals_as_exit
from ssd_client.printable import printable

PROGRAM = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
LOGS = "CUDA_MPS_LOG_DIRECTORY"
SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"

# Percent of the multiprocessors. Without parts of their own, a draft's short kernels queue up
# behind the target's long ones: measured, a tree is late in most rounds then. A smaller part makes
# the draft late, a larger one the target slow.
DRAFT_SHARE = 30

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LIMIT_S = 10.0  # for one call of the program


@contextlib.contextmanager
def mps_daemon() -> Iterator[dict[str, str]]:
    """Yields what a process needs in its environment, on top of ours, to use the daemon.

    A daemon that our environment names is used and left alone; else one is started, and stopped at
    the end of the block, SIGTERM and SIGHUP included. It is no child of ours: kill -9 leaves it.
    """
    if os.environ.get(PIPES):
        yield {}
        return
    program = shutil.which(PROGRAM)
    if program is None:
        raise ClientError(
            f"--local-mps needs {PROGRAM} on PATH: install it with NVIDIA's driver, "
            "or leave --local-mps out"
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals_as_exit())
        folder = tempfile.TemporaryDirectory(prefix="ssd-mps-", ignore_cleanup_errors=True)
        name = stack.enter_context(folder)
        variables = {PIPES: name, LOGS: name}
        stack.callback(_quit, program, variables)  # also after a start that was cut short
        _start(program, variables)
        yield {**variables, **_renumbered(os.environ.get(_VISIBLE, ""))}


def share_variables(percent: int) -> dict[str, str]:
    """Limit the process that has them to this part of the GPU's multiprocessors; 100: no limit."""
    return {} if percent == 100 else {SHARE: str(percent)}


def _start(program: str, variables: dict[str, str]) -> None:
    with tempfile.TemporaryFile() as stderr:  # no pipe: the daemon may hold it open
        try:
            done = subprocess.run(
                [program, "-d"],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C is ours
                timeout=_LIMIT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _not_started(str(error)) from None
        if done.returncode != 0:
            stderr.seek(0)
            lines = stderr.read().decode(errors="replace").strip().splitlines()
            raise _not_started(lines[0] if lines else f"status {done.returncode}")


def _not_started(reason: str) -> ClientError:
    return ClientError(f"--local-mps: the MPS daemon did not start: {printable(reason)}")


def _quit(program: str, variables: dict[str, str]) -> None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [program],
            env={**os.environ, **variables},
            input=b"quit\n",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            timeout=_LIMIT_S,
        )


def _renumbered(visible: str) -> dict[str, str]:
    """The daemon shows its visible devices under new numbers, from 0 on; UUIDs stay as they are.

    https://docs.nvidia.com/deploy/mps/latest/appendix-environment-variables.html
    """
    devices = visible.split(",")
    if not all(each.strip().isdigit() for each in devices):
        return {}
    return {_VISIBLE: ",".join(str(number) for number in range(len(devices)))}
