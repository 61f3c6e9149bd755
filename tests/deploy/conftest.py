"""Two pairs of services, each shared by several tests."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.deploy.collector import collecting
from tests.deploy.watched import Bereft, Pair, start_pair, wait_for_links
from tests.processes import gateway
from tests.suite.dealing import shared_services
from tests.suite.scale import FULL
from tests.waiting import wait_until

METRICS = ("--metrics-listen", "127.0.0.1:0")


@shared_services
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """JSON at debug level, metrics, and traces to a collector that is here; a gateway before it."""
    with ExitStack() as stack:
        collector = stack.enter_context(collecting())
        flags = (*METRICS, "--log-format", "json", "--log-level", "debug")
        flags += ("--otlp-endpoint", collector.url)
        ranks = ("--tp", "2") if FULL else ()
        pair = start_pair(stack, tmp_path_factory.mktemp("watched"), flags, *ranks)
        pair.collector = collector
        folder = tmp_path_factory.mktemp("gateway")
        pair.gateway = stack.enter_context(gateway(folder, targets=[pair.target.address]))
        yield pair


@shared_services
def bereft(tmp_path_factory: pytest.TempPathFactory) -> Bereft:
    """Prompts are logged, in lines for people; the collector of its traces is not there."""
    with ExitStack() as stack:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
        flags = (*METRICS, "--log-prompts", "--otlp-endpoint", nobody)
        pair = start_pair(stack, tmp_path_factory.mktemp("bereft"), flags)
        metrics = pair.target.metrics
        before, output, after = metrics(), pair.generate(), metrics()
        wait_until(lambda: "ended: length, 64" in pair.target.log(), pair.target.log)
        logs = pair.logs()
        pair.draft.kill()
        wait_for_links(pair.target, "waiting")
        alone, orphan, later = metrics(), pair.generate(), metrics()
    return Bereft(output, logs, [before, after], [alone, later], orphan)
