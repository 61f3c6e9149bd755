"""A rank other than the first: it computes what rank 0 tells it to."""

import logging

from ssd_engine.execution.runner import ModelRunner
from ssd_engine.forward.batch import decode_parts
from ssd_engine.kvcache.swap import Swap
from ssd_engine.parallel.cluster.store import NodeStore
from ssd_engine.parallel.ranks.failures import await_failure_report
from ssd_engine.parallel.ranks.group import check_devices, configure_threads, dial_store, join_group
from ssd_engine.parallel.ranks.rank_start import RankStart, StoreLink
from ssd_engine.parallel.ranks.step_channel import StepReader
from ssd_engine.process.log import setup_logging, uncaught_logged
from ssd_engine.self_check.check import load_checked

log = logging.getLogger(__name__)

FORWARD, STEP, SWAP, ALLOCATE, PREPARE, WATCH = range(6)  # the first number of what rank 0 says


def rank_main(rank: int, start: RankStart, steps: StepReader, link: StoreLink) -> None:
    setup_logging(start.role, start.log_level, rank, start.log_format)
    with uncaught_logged():
        _serve_rank(rank, start, steps, link)


def _serve_rank(rank: int, start: RankStart, steps: StepReader, link: StoreLink) -> None:
    place = start.place
    check_devices(start.options, place.here)
    configure_threads(start.options, place.here)
    store = NodeStore(link) if not isinstance(link, int) else dial_store(link)
    with await_failure_report():
        group = join_group(rank, place, store, start.options)
        runner = load_checked(start.config, start.options, group)
        log.info("ready")
        if isinstance(store, NodeStore):
            store.tell_ready()
        _follow(runner, steps)


def _follow(runner: ModelRunner, steps: StepReader) -> None:
    while True:
        kind, *_ = values = steps.receive()
        if kind == SWAP:
            runner.swap(Swap.decode(values[1:].tolist()))
        elif kind == ALLOCATE:
            runner.host_copies.allocate(int(values[1]))
        elif kind == PREPARE:
            runner.prepare_watch(values[1:].tolist())
        elif kind == WATCH:
            runner.watch(values[1:].tolist())
        elif kind == STEP:
            parts = decode_parts(values[1:])
            runner.step(parts, [None] * sum(part.num_logits for part in parts)).result()
        else:
            runner.forward(decode_parts(values[1:]))
