"""The engine's process: no gRPC, no tokenizer, no interpreter lock shared with I/O."""

import time
from multiprocessing.connection import Connection

from ssd_draft.config import DraftEngineOptions
from ssd_draft.core import make_core
from ssd_draft.records import decode_to_engine
from ssd_engine.ranks import RankedRunner
from ssd_engine.serving.engine_loop import PipeInbox, run_engine, serve_records, warm_up
from ssd_engine.serving.records import Ready, encode


def engine_main(pipe: Connection, options: DraftEngineOptions) -> None:
    run_engine(pipe, "draft", options.log_level, lambda: _serve(pipe, options), options.log_format)


def _serve(pipe: Connection, options: DraftEngineOptions) -> None:
    started = time.monotonic()
    runner = _load(options)
    core = make_core(options, runner)
    num_blocks = 0 if runner is None else runner.num_blocks
    pipe.send_bytes(encode(Ready(num_blocks, time.monotonic() - started)))
    check = core.check_integrity if options.check_integrity else None
    serve_records(PipeInbox(pipe, decode_to_engine), core, check)


def _load(options: DraftEngineOptions) -> RankedRunner | None:
    if options.model is None or options.runner is None:
        return None
    runner = RankedRunner(
        options.model,
        options.runner,
        options.tp,
        role="draft",
        log_level=options.log_level,
        log_format=options.log_format,
    )
    warm_up(runner)
    return runner
