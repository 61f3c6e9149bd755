"""The engine's process: no gRPC, no tokenizer, no interpreter lock shared with I/O."""

import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from ssd_draft.config import DraftEngineOptions, DraftHead
from ssd_draft.engine.core import DraftCore, make_core
from ssd_draft.engine.waking_inbox import WakingInbox
from ssd_draft.records import DraftOutput, ToEngine, decode_to_engine
from ssd_engine.checkpoints.heads.head_checkpoint import open_head
from ssd_engine.execution.head_runner import HeadRunner
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.parallel.ranked_runner import RankedRunner
from ssd_engine.parallel.ranks.group import check_devices, configure_threads
from ssd_engine.process.children import settle_memory
from ssd_engine.process.fork_server import ForkServer
from ssd_engine.self_check.heads import load_checked_head
from ssd_engine.tensor_plane.transports.connection import Wake
from ssd_engine.tracing.events import TraceEvent
from ssd_serving.engine.loop import run_engine, serve_records, warm_up
from ssd_serving.engine.records import Ready, encode

SILENCE_SECONDS = 0.05  # an engine that works sends an output at least so often


def engine_main(pipe: Connection, options: DraftEngineOptions) -> None:
    forks = ForkServer() if options.tp > 1 else None  # before there are threads
    run_engine(
        pipe, "draft", options.log_level, lambda: _serve(pipe, options, forks), options.log_format
    )


def _serve(pipe: Connection, options: DraftEngineOptions, forks: ForkServer | None) -> None:
    started = time.monotonic()
    runner, wake = _load(options, forks), Wake()
    core = make_core(options, runner, wake.ring)
    num_blocks = 0 if runner is None else runner.num_blocks
    settle_memory()
    pipe.send_bytes(encode(Ready(num_blocks, time.monotonic() - started)))
    check = core.check_integrity if options.check_integrity else None
    serve_records(WakingInbox(pipe, decode_to_engine, wake), OutputCoalescer(core), check)


class OutputCoalescer:
    """The engine's core, without outputs that have nothing for a link: between two depths of a tree
    every message takes time. Statistics and traces come with the next output, or soon."""

    def __init__(self, core: DraftCore, clock: Callable[[], float] = time.monotonic) -> None:
        self._core, self._now = core, clock
        self._sent_at = clock()
        self._trace: list[TraceEvent] = []

    @property
    def has_work(self) -> bool:
        return self._core.has_work

    def handle(self, record: ToEngine) -> None:
        self._core.handle(record)

    def step(self) -> DraftOutput | None:
        output, now = self._core.step(), self._now()
        self._trace += output.trace
        if not output.links and self.has_work and now - self._sent_at < SILENCE_SECONDS:
            return None
        trace, self._trace, self._sent_at = self._trace, [], now
        return DraftOutput(output.links, output.load, output.stats, trace)


def _load(
    options: DraftEngineOptions, forks: ForkServer | None
) -> RankedRunner | HeadRunner | None:
    if options.model is None or options.runner is None:
        return None
    if options.head is not None:
        return _load_head(options.head, options.runner, options.model.vocab_size)
    runner = RankedRunner(
        options.model,
        options.runner,
        options.tp,
        role="draft",
        log_level=options.log_level,
        log_format=options.log_format,
        forks=forks,
    )
    warm_up(runner)
    return runner


def _load_head(head: DraftHead, how: RunnerOptions, num_tokens: int) -> HeadRunner:
    check_devices(how, 1)
    configure_threads(how, 1)
    checkpoint = open_head(how.directory, head.config, head.target)
    runner = load_checked_head(head.config, checkpoint, how, num_tokens)
    warm_up(runner)
    return runner
