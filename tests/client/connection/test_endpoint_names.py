"""Targets behind a name: all of them are used, and it is looked up again when they are gone."""

import socket
import time

import pytest
from click.testing import CliRunner

from ssd_client.cli import cli
from ssd_client.connection import endpoints as endpoints_module
from ssd_client.connection.endpoints import check_target, connect, connect_one
from ssd_client.connection.failover import RetryPolicy
from ssd_client.generate.events import Moved
from ssd_client.generate.request import TextPrompt, build_request
from ssd_client.generate.request_options import RequestOptions
from ssd_client.generate.result import GenerationResult, Timing
from ssd_client.generate.stream import generate
from tests.client.scripted_target import DRAWN_SEED, full_tokens, leaving

REQUEST = build_request(TextPrompt("Once"), RequestOptions())
QUICK = RetryPolicy(lost_wait_s=0.05)


@pytest.fixture
def zone(monkeypatch):
    """What the resolver answers."""
    answers: dict[str, list[str]] = {}

    def resolve(host, port):
        if host not in answers:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return list(answers[host])

    monkeypatch.setattr(endpoints_module, "resolve_host", resolve)
    return answers


def run(endpoints, policy=QUICK):
    result = GenerationResult(Timing(sent=time.monotonic()))
    events = list(generate(endpoints, REQUEST, policy=policy))
    for event in events:
        result.add(event, time.monotonic())
    moves = [(each.to, each.leaving, each.wait_s) for each in events if isinstance(each, Moved)]
    assert result.token_ids == full_tokens(12, DRAWN_SEED)
    return result.endpoints, moves


def test_all_addresses_behind_a_name_are_tried_and_the_name_is_kept(zone, nobody, start):
    server = start()
    zone["targets.test"] = [nobody, server.address]
    seen = set()
    while len(seen) < 2:  # the first choice is spread
        with connect(["dns:///targets.test:7410"]) as endpoints:
            assert {each.server_name for each in endpoints} == {"targets.test"}
            seen.add(endpoints[0].address)
    with connect(["dns:///targets.test:7410"]) as endpoints:
        run(endpoints)


def test_when_all_are_lost_the_name_is_looked_up_again(zone, nobody, start):
    first, second = start(end_after=3), start()
    zone["targets.test"] = [first.address]
    with connect(["dns:///targets.test:7410"]) as endpoints:
        zone["targets.test"] = [nobody, second.address]
        served_by, _ = run(endpoints)
    assert (served_by[0], served_by[-1]) == (first.address, second.address)
    assert len(second.requests[0].generated_token_ids) == 4 * 3


def test_a_name_without_an_answer_is_one_clear_line(zone, start):
    result = CliRunner().invoke(cli, ["info", "--target", "dns:///nobody.test:7410"])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "cannot look it up: Name" in result.stderr
    server = start()
    with connect(["dns:///nobody.test:7410", server.address]) as endpoints:  # another is left
        run(endpoints)


def test_commands_take_names(start):
    server = start()
    port = server.address.rpartition(":")[2]
    name = f"dns:///localhost:{port}"  # the system's own resolver
    with connect_one(f"dns:///127.0.0.1:{port}") as endpoint:
        assert endpoint.address == server.address
    result = CliRunner().invoke(cli, ["status", "--target", name, "--json"])
    assert server.address in result.stdout


@pytest.mark.parametrize("text", ["dns:///a", "dns:a:1", "dns:///a:0", "dns:////a:1", "http://a:1"])
def test_what_is_no_target_is_refused(text):
    with pytest.raises(ValueError, match="is not HOST:PORT or dns:///NAME:PORT"):
        check_target(text)


def test_one_that_starts_or_stops_is_waited_for_over_a_new_connection(start):
    """Behind its address there may be another by then: no retry is used up."""
    server = start(refuse=leaving("draining", 0.05, times=3))
    with connect([server.address]) as endpoints:
        _, moves = run(endpoints, RetryPolicy(retries=0))
        assert endpoints[0].generation == 4
    assert [leaving for _, leaving, _ in moves] == [True] * 3


def test_one_that_leaves_is_left_for_another_at_once(start):
    first, second = start(refuse=leaving("draining", 30.0)), start()
    with connect([first.address, second.address]) as endpoints:
        _, moves = run(endpoints, RetryPolicy(retries=0))
    assert moves == [(second.address, True, 0.0)]
