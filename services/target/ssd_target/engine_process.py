"""The engine's process: no gRPC, no tokenizer, no interpreter lock shared with I/O."""

import logging
import os
import time
from multiprocessing.connection import Connection

import torch

from ssd_engine.batch import Chunk
from ssd_engine.errors import ConfigError, ModelError, SSDError
from ssd_engine.log import setup_logging
from ssd_engine.processes import exit_with_parent
from ssd_engine.ranks import RankedRunner
from ssd_target.config import EngineOptions
from ssd_target.core import EngineCore
from ssd_target.records import Fatal, Ready, Vocabulary, decode_to_engine, encode

log = logging.getLogger(__name__)


def engine_main(pipe: Connection, options: EngineOptions) -> None:
    setup_logging("target", options.log_level, rank=0)
    exit_with_parent()
    try:
        _serve(pipe, options)
    except (EOFError, BrokenPipeError):
        os._exit(0)  # the front is gone, and with it everybody who could be served
    except Exception as error:
        if not isinstance(error, SSDError):
            log.exception("the engine failed")
        pipe.send_bytes(encode(Fatal(_reason(error), isinstance(error, ConfigError | ModelError))))
        os._exit(1)


def _reason(error: Exception) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return f"out of memory: {text}"
    return text


def _serve(pipe: Connection, options: EngineOptions) -> None:
    started = time.monotonic()
    runner = RankedRunner(
        options.model, options.runner, options.tp, role="target", log_level=options.log_level
    )
    _warm_up(runner)
    vocabulary = decode_to_engine(pipe.recv_bytes())
    if not isinstance(vocabulary, Vocabulary):
        raise RuntimeError(f"the vocabulary comes first, got {type(vocabulary).__name__}")
    core = EngineCore(
        runner,
        vocabulary.token_bytes,
        options.runner.block_size,
        options.runner.max_num_seqs,
        options.prefill_chunk,
    )
    pipe.send_bytes(encode(Ready(runner.num_blocks, time.monotonic() - started)))
    _loop(pipe, core, options.check_integrity)


def _warm_up(runner: RankedRunner) -> None:
    """First calls allocate and choose kernels; a user's request should not pay for it."""
    runner.forward([Chunk([0, 0], 0, [0], 1)])
    runner.forward([Chunk([0], 2, [0], 1)])


def _loop(pipe: Connection, core: EngineCore, check_integrity: bool) -> None:
    changed = False
    while True:
        while pipe.poll(0 if core.has_work or changed else None):
            record = decode_to_engine(pipe.recv_bytes())
            if isinstance(record, Vocabulary):
                raise RuntimeError("the vocabulary comes once")
            core.handle(record)
            changed = True
        # With nothing left to compute, one more output carries the books after a cancellation.
        pipe.send_bytes(encode(core.step()))
        changed = False
        if check_integrity:
            core.scheduler.check_integrity()
