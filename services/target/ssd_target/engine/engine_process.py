"""The engine's process: no gRPC, no tokenizer, no interpreter lock shared with I/O."""

import time
from collections import deque
from functools import partial
from multiprocessing.connection import Connection

import torch

from ssd_engine.checkpoints.heads.head_checkpoint import open_head
from ssd_engine.grammar.compiler import GrammarCompiler
from ssd_engine.parallel.ranked_runner import RankedRunner
from ssd_engine.process.children import settle_memory
from ssd_engine.process.fork_server import ForkServer
from ssd_engine.self_check.heads import load_checked_head
from ssd_engine.speculation.frames import TargetFrame
from ssd_engine.tensor_plane.distributions import draft_distributions
from ssd_engine.tensor_plane.host_rows import host_copies
from ssd_engine.tensor_plane.plane import local_offer
from ssd_engine.text.detokenizer import spelled_out
from ssd_engine.tracing.events import make_trace
from ssd_serving.engine.loop import run_engine, serve_records, warm_up
from ssd_serving.engine.pipe_poll import PipePoll
from ssd_serving.engine.records import Ready, encode
from ssd_target.config import EngineOptions, HeadOptions
from ssd_target.engine.core import EngineCore
from ssd_target.engine.synthetic_verifier import SyntheticVerifier
from ssd_target.records.engine_records import (
    Cancel,
    GiveBackWaiting,
    LinkRecord,
    LinkSend,
    LinkStalled,
    PlaneAbility,
    Submit,
    Vocabulary,
    decode_to_engine,
)
from ssd_target.scheduling.kept_kv import KeptOptions
from ssd_target.scheduling.verifier import verify
from ssd_target.speculation.coordinator import SpeculationCoordinator
from ssd_target.speculation.endpoints.feature_feed import FeatureFeed
from ssd_target.speculation.endpoints.planes import open_features, open_plane
from ssd_target.speculation.head_drafter import HeadDrafter
from ssd_target.speculation.sync_drafter import Drafter, SyncDrafter

READ_AT_ONCE = 1024  # records: whoever sends without end holds up no step


def engine_main(pipe: Connection, options: EngineOptions) -> None:
    forks = ForkServer() if options.tp > 1 else None  # before there are threads
    run_engine(
        pipe, "target", options.log_level, lambda: _serve(pipe, options, forks), options.log_format
    )


def _serve(pipe: Connection, options: EngineOptions, forks: ForkServer | None) -> None:
    started = time.monotonic()
    drafter = _load_drafter(options)  # first: the target takes what memory is left
    runner = RankedRunner(
        options.model,
        options.runner,
        options.tp,
        role="target",
        log_level=options.log_level,
        log_format=options.log_format,
        cluster=options.cluster,
        forks=forks,
    )
    warm_up(runner)
    vocabulary = decode_to_engine(pipe.recv_bytes())
    if not isinstance(vocabulary, Vocabulary):
        raise RuntimeError(f"the vocabulary comes first, got {type(vocabulary).__name__}")
    inbox, trace = EngineInbox(pipe), make_trace(options.trace_events > 0)
    speculator = SpeculationCoordinator(
        options.speculation,
        options.model.vocab_size,
        send=inbox.send_frames,
        receive=inbox.receive_frames,
        stalled=inbox.send_stalled,
        drafter=drafter,
        open_plane=partial(open_plane, options),
        trace=trace,
        open_features=partial(open_features, options),
        feed=_make_feed(options),
    )
    rate = options.synthetic_acceptance
    core = EngineCore(
        runner,
        vocabulary.token_bytes,
        options.runner.block_size,
        options.runner.max_num_seqs,
        options.prefill_chunk,
        speculator,
        # Where the bits of a row depend on the shape of its forward, shapes are kept apart.
        replay_rows=options.runner.step_rows if runner.asynchronous and options.runner.exact else 0,
        trace=trace,
        verify=verify if rate is None else SyntheticVerifier(rate, speculator),
        kept=_kept(runner, options),
        spelled_bytes=spelled_out(vocabulary.token_bytes, vocabulary.control_spellings),
        grammars=GrammarCompiler(
            vocabulary.tokenizer, options.model.vocab_size, options.model.eos_token_ids
        ),
    )
    inbox.core = core
    settle_memory()
    distributions = draft_distributions(options.model.vocab_size, options.speculation.depth)
    device = torch.device(options.runner.device)
    offer = local_offer(device, distributions, allowed=options.plane_kinds)
    pipe.send_bytes(encode(PlaneAbility(offer, tells_features=True)))
    pipe.send_bytes(encode(Ready(runner.num_blocks, time.monotonic() - started)))
    serve_records(inbox, core, core.check_integrity if options.check_integrity else None)


def _make_feed(options: EngineOptions) -> FeatureFeed:
    inside = options.head.config.boundaries if options.head is not None else None
    return FeatureFeed(
        options.features, inside or (), host_copies(torch.device(options.runner.device))
    )


def _kept(runner: RankedRunner, options: EngineOptions) -> KeptOptions | None:
    blocks = int(options.swap_gib * 2**30) // runner.block_bytes
    if not blocks:
        return None
    runner.allocate_host_blocks(blocks)
    return KeptOptions(blocks, runner.seconds_of_a_swap())


def _load_drafter(options: EngineOptions) -> Drafter | None:
    if options.head is not None:
        return _load_head(options, options.head)
    draft, how = options.draft_model, options.draft_runner
    if draft is None or how is None:
        return None
    runner = RankedRunner(draft, how, 1, role="target", log_level=options.log_level)
    warm_up(runner)
    return SyncDrafter(
        runner, how.block_size, how.max_model_len, options.speculation.depth, options.prefill_chunk
    )


def _load_head(options: EngineOptions, head: HeadOptions) -> HeadDrafter:
    how = head.runner
    checkpoint = open_head(how.directory, head.config, head.target)
    runner = load_checked_head(head.config, checkpoint, how, options.model.vocab_size)
    warm_up(runner)
    return HeadDrafter(
        runner,
        how.block_size,
        how.max_model_len,
        options.speculation.depth,
        options.prefill_chunk,
        head.kept_bytes,
    )


class EngineInbox:
    """The engine's end of the pipe.

    What has come is read at once, so that a cancel overtakes what it cancels: nothing is done for a
    request that had not begun. What links say comes before all else; while a forward is held back
    for branches it is heard at once, and all other records wait for the end of the step.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._has_data = PipePoll(pipe)
        self._links: deque[LinkRecord] = deque()
        self._requests: deque[Submit | Cancel | GiveBackWaiting] = deque()
        self._waiting: set[int] = set()  # sequences whose submits are among these
        self._in_vain: set[int] = set()  # those of them that were cancelled since
        self.core: EngineCore | None = None

    def poll(self, seconds: float | None) -> bool:
        self._read_all()
        if not self._links and not self._requests and seconds != 0 and self._has_data(seconds):
            self._read_all()
        return bool(self._links or self._requests)

    def receive(self) -> Submit | Cancel | GiveBackWaiting | LinkRecord:
        return self._links.popleft() if self._links else self._next_request()

    def send(self, data: bytes) -> None:
        self._pipe.send_bytes(data)

    def receive_frames(self, seconds: float) -> bool:
        """Handle one record of a link if one comes in time."""
        end = time.monotonic() + seconds
        while not self._links and self._has_data(max(0.0, end - time.monotonic())):
            self._read()
        if not self._links or self.core is None:
            return False
        self.core.handle_link(self._links.popleft())
        return True

    def send_frames(self, link: int, epoch: int, frames: list[TargetFrame]) -> None:
        self._pipe.send_bytes(encode(LinkSend(link, epoch, frames)))

    def send_stalled(self, link: int, epoch: int, reason: str) -> None:
        self._pipe.send_bytes(encode(LinkStalled(link, epoch, reason)))

    def _read_all(self) -> None:
        for _ in range(READ_AT_ONCE):
            if not self._has_data(0):
                return
            self._read()

    def _read(self) -> None:
        record = decode_to_engine(self._pipe.recv_bytes())
        match record:
            case Vocabulary():
                raise RuntimeError("the vocabulary comes once")
            case Submit():
                self._waiting.add(record.sequence)
                self._requests.append(record)
            case Cancel():
                if record.sequence in self._waiting:
                    self._in_vain.add(record.sequence)
                self._requests.append(record)
            case GiveBackWaiting():
                self._requests.append(record)
            case _:
                self._links.append(record)

    def _next_request(self) -> Submit | Cancel | GiveBackWaiting:
        while isinstance(record := self._requests.popleft(), Submit):
            self._waiting.discard(record.sequence)
            if record.sequence not in self._in_vain:
                break
            self._in_vain.discard(record.sequence)  # its cancel follows
        return record
