"""The engine's side of its pipe: read what has come, step, say what came of it."""

import logging
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from ssd_engine.errors import ConfigError, ModelError, SSDError
from ssd_engine.execution.head_runner import HeadRunner
from ssd_engine.forward.batch import Chunk
from ssd_engine.parallel.ranked_runner import RankedRunner
from ssd_engine.process.log import end_process, setup_logging
from ssd_serving.engine.records import Beat, Fatal, encode

log = logging.getLogger(__name__)

HANDLE_SECONDS = 0.01  # for handling records, between two steps
BEAT_SECONDS = 0.5


class Core(Protocol):
    @property
    def has_work(self) -> bool: ...

    def handle(self, record: Any) -> None: ...

    def step(self) -> Any:
        """The step's output; None where nobody has to hear of it."""


def run_engine(
    pipe: Connection,
    role: str,
    log_level: str,
    serve: Callable[[], None],
    log_format: str = "text",
) -> None:
    """Whatever ends ``serve`` is told to the front."""
    setup_logging(role, log_level, rank=0, log_format=log_format)
    log.debug("the engine begins, process %d", os.getpid())
    try:
        serve()
    except (EOFError, ConnectionError):
        # The front is gone, and with it everybody who could be served. Killed with records unread,
        # it leaves a connection that was reset.
        end_process(0)
    except Exception as error:
        if not isinstance(error, SSDError):
            log.exception("the engine failed")
        pipe.send_bytes(encode(Fatal(_reason(error), isinstance(error, ConfigError | ModelError))))
        end_process(1)


def _reason(error: Exception) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return f"out of memory: {text}"
    return text


def warm_up(runner: RankedRunner | HeadRunner) -> None:
    """First calls allocate and choose kernels; a user's request should not pay for it. Raises
    ModelError where the model's logits are none: every request would fail."""
    for chunk in (Chunk([0, 0], 0, [0], 1), Chunk([0], 2, [0], 1)):
        logits = runner.forward([chunk])
        # A row that holds NaN or +inf has a maximum that is not finite.
        if logits is not None and not bool(logits.amax(dim=-1).isfinite().all()):
            raise ModelError(
                "the model gives logits that are NaN or infinite, for two tokens of a prompt: its "
                "weights are wrong, or overflow in this --dtype (bfloat16 and float32 hold more "
                "than float16)"
            )


class FrontPipe(Protocol):
    """The pipe to the front: its records come in, and outputs go back."""

    def poll(self, seconds: float | None) -> bool:
        """Whether a record is there, or comes within so many seconds; None waits for one."""

    def receive(self) -> Any: ...

    def send(self, data: bytes) -> None: ...


def serve_records(inbox: FrontPipe, core: Core, check_integrity: Callable[[], None] | None) -> None:
    """Whatever is done, or not done, the front hears of it at least every BEAT_SECONDS, by this
    loop itself: so it knows that the engine goes on."""
    changed, beat = False, encode(Beat())
    said_at = time.monotonic()
    while True:
        begin = time.monotonic()
        while inbox.poll(0 if core.has_work or changed else BEAT_SECONDS):
            core.handle(inbox.receive())
            changed = True
            if core.has_work and time.monotonic() - begin > HANDLE_SECONDS:
                break  # whoever sends without end holds up no step
        # With nothing left to compute, one more output carries the books after what was handled.
        output = core.step() if changed or core.has_work else None
        if output is not None:
            inbox.send(encode(output))
            said_at = time.monotonic()
        elif time.monotonic() - said_at >= BEAT_SECONDS:
            inbox.send(beat)
            said_at = time.monotonic()
        changed = False
        if check_integrity is not None:
            check_integrity()
