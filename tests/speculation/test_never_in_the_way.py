"""A slow, dead or malicious draft costs a bounded wait and never a request, nor a letter of it."""

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from ssd.v1 import target_pb2 as pb
from tests.processes import wait_until_ready
from tests.scale import FULL
from tests.speculation.generations import (
    OFF,
    SSD,
    SYNC,
    Generations,
    Pair,
    endpoint,
    generate,
    is_up,
    looked_up,
    request,
    resident_mib,
    wait_for,
)
from tests.speculation.hostile_draft import SCRIPTS, HostileDraft, Port, Reply, Visit

pytestmark = pytest.mark.services

MANY = 8
PAUSE = 10.0 if FULL else 4.0
LONG = 500  # tokens, of a generation that takes seconds
BACK_SECONDS = 5.0  # after which speculation is back
MOST_MIB = 250.0  # that an attack may cost; a flood in a queue would be gigabytes


def stories(**options: object) -> list[pb.GenerateRequest]:
    return [request(seed, speculation={"mode": SSD, **options}) for seed in range(MANY)]


class TestDeathsAndPauses:
    """Of the operator's own draft, in the middle of eight generations."""

    def test_a_draft_that_stands_still_and_goes_on(self, pair: Pair) -> None:
        messages = stories()
        lasting = [*messages, request(99, LONG)]  # the last one beyond --link-timeout
        with Generations(pair.target, lasting) as before:
            before.until_each_has(10)
            with pair.draft.standing_still():
                assert before.running
                begin = time.monotonic()
                with Generations(pair.target, messages) as meanwhile:
                    pass
                time.sleep(max(0.0, begin + PAUSE - time.monotonic()))
        self.assert_back(pair)
        with Generations(pair.target, messages) as after:
            pass
        assert before.texts() == pair.plain.of(lasting)
        assert meanwhile.texts() == after.texts() == pair.plain.of(messages)
        assert before.stats()[-1].fallbacks["stalled"] > 0
        assert sum(stats.cache_rounds for stats in after.stats()) > 0

    def test_kill_and_restart_on_the_same_port(self, pair: Pair) -> None:
        messages = stories()
        with Generations(pair.target, messages) as running:
            running.until_each_has(10)
            assert running.running
            pair.draft.process.kill()
        runs = [running]
        assert sum(stats.fallbacks["disconnected"] for stats in running.stats()) > 0
        pair.draft.start()
        while not self.is_ready(pair):
            with Generations(pair.target, messages) as running:
                pass
            runs.append(running)
        self.assert_back(pair)
        with Generations(pair.target, messages) as running:
            pass
        runs.append(running)
        for run in runs:
            assert run.texts() == pair.plain.of(messages)
        assert sum(stats.cache_rounds for stats in running.stats()) > 0

    def test_it_moves_on_from_an_endpoint_that_turns_hostile(self, pair: Pair) -> None:
        """Sequences of the hostile endpoint go to the honest one, in the middle of their text."""
        with HostileDraft(SCRIPTS["garbage later"]) as hostile:
            messages = stories(endpoints=[pair.draft.address, hostile.address])
            wait_for(lambda: self.seen_up(pair, messages[0], hostile.address))
            with Generations(pair.target, messages) as running:
                pass
        assert running.texts() == pair.plain.of(messages)
        stats = running.stats()
        moved = [each for each in stats if each.fallbacks["disconnected"]]
        assert moved
        assert all(looked_up(each) for each in moved)
        assert sum(each.cache_tokens for each in stats) > 0

    def is_ready(self, pair: Pair) -> bool:
        with contextlib.suppress(grpc.RpcError):
            return pair.draft.process.health("readiness") == 1
        return False

    def seen_up(self, pair: Pair, message: pb.GenerateRequest, address: str) -> bool:
        generate(pair.target, message)
        return is_up(pair.target, address) or "down" in log_of(pair, address)[-1]

    def assert_back(self, pair: Pair) -> None:
        """Within seconds a sequence that runs is held at the draft again, and it speculates."""
        wait_until_ready(pair.draft.process)
        ready = time.monotonic()
        tokens = "ssd_draft_branch_tokens_total"
        before = pair.draft.process.metrics().get(tokens, 0)
        with Generations(pair.target, [request(99, LONG)]):
            wait_for(lambda: pair.draft.process.metrics().get(tokens, 0) > before)
            assert time.monotonic() - ready < BACK_SECONDS


def log_of(pair: Pair, address: str) -> list[str]:
    return [line for line in pair.target.log().splitlines() if f"link to {address} " in line]


def reason_of(line: str) -> str:
    return line.partition(" is down: ")[2]


# What each hostile endpoint must be found out for: a counter, and whether its link was ever up.
FAILED = 'ssd_link_failures_total{{reason="{}"}}'.format
FELL_BACK = 'ssd_fallback_rounds_total{{reason="{}"}}'.format
DROPPED = "ssd_link_dropped_frames_total"
NO_LINK = {
    "another protocol": FAILED("misfit"),
    "no room at all": FAILED("misfit"),
    "another epoch": FAILED("protocol"),
    "frames before welcome": FAILED("protocol"),
    "nothing for hello": FAILED("protocol"),
    "garbage for hello": FAILED("protocol"),
    "never answers hello": FAILED("silent"),
    "another vocabulary": FAILED("misfit"),
    "a new excuse each time": FAILED("unavailable"),
}
BROKEN_LINK = {
    "closes after welcome": FAILED("ended"),
    "welcomes twice": FAILED("protocol"),
    "an empty message": FAILED("protocol"),
    "garbage later": FAILED("protocol"),
    "a huge message": FAILED("resource_exhausted"),
    "too many frames": FAILED("protocol"),
    "a frame without a body": FAILED("protocol"),
    "never answers a round": FAILED("stalled"),
}
FLOODS = {
    "floods": FAILED("flood"),
    "floods with empty branches": FAILED("flood"),
    "floods with empty messages": FAILED("flood"),
}
USELESS_LINK = {
    "wrong rounds": DROPPED,
    "unknown sequences": DROPPED,
    "foreign tokens": DROPPED,
    "wrong guesses": "ssd_spec_decode_num_drafts_total",
    "duplicates and gaps": DROPPED,
    "an unknown notice": "ssd_link_unknown_frames_total",
    "all is lost": FELL_BACK("lost"),
    "always busy": FELL_BACK("busy"),
    "refuses everything": FELL_BACK("refused"),
    "always leaving": FELL_BACK("leaving"),
}
ALONE = [*FLOODS, *(NO_LINK | BROKEN_LINK | USELESS_LINK if FULL else ())]


class TestHostileEndpoints:
    def test_every_script_is_tried(self) -> None:
        assert SCRIPTS.keys() == (NO_LINK | BROKEN_LINK | FLOODS | USELESS_LINK).keys()

    @pytest.mark.parametrize("group", [NO_LINK, BROKEN_LINK, USELESS_LINK])
    def test_one_for_each_of_many_generations(self, pair: Pair, group: dict[str, str]) -> None:
        self.attack(pair, group)

    @pytest.mark.parametrize("name", ALONE)
    def test_alone(self, pair: Pair, name: str) -> None:
        self.attack(pair, {name: (NO_LINK | BROKEN_LINK | FLOODS | USELESS_LINK)[name]})

    def attack(self, pair: Pair, group: dict[str, str]) -> None:
        """Each generation has an endpoint of its own, until all were found out."""
        before = pair.target.metrics()
        mib = resident_mib(pair.target.process.pid)
        expected = Counter(group.values())
        with contextlib.ExitStack() as stack:
            drafts = [stack.enter_context(HostileDraft(SCRIPTS[name])) for name in group]
            lengths = [LONG if name == "never answers a round" else 30 for name in group]
            messages = [
                request(seed, length, speculation={"mode": SSD, "endpoints": [draft.address]})
                for seed, (draft, length) in enumerate(zip(drafts, lengths, strict=True))
            ]
            plain = pair.plain.of(messages)
            begin = time.monotonic()
            while True:
                with Generations(pair.target, messages) as running:
                    pass
                wrong = [n for n, a, b in zip(group, running.texts(), plain, strict=True) if a != b]
                assert not wrong
                after = pair.target.metrics()
                risen = {name: after.get(name, 0) - before.get(name, 0) for name in expected}
                if all(risen[name] >= count for name, count in expected.items()):
                    break
                assert time.monotonic() - begin < 60, (risen, expected)
            seconds = time.monotonic() - begin
            for name, draft in zip(group, drafts, strict=True):
                self.check_bounds(pair, name, draft, seconds)
        assert resident_mib(pair.target.process.pid) - mib < MOST_MIB
        assert "Traceback" not in pair.target.log()

    def check_bounds(self, pair: Pair, name: str, draft: HostileDraft, seconds: float) -> None:
        """Few visits, however inviting the endpoint; one line for a failure, one for a link."""
        assert draft.visits, name
        assert len(draft.visits) <= 6 + seconds / 1.5, name
        lines = log_of(pair, draft.address)
        ups, downs = (sum(word in line for line in lines) for word in ("is up", "is down"))
        assert ups <= (name not in NO_LINK), name
        assert downs <= {"a new excuse each time": 8, "a huge message": 2}.get(name, 1), lines
        assert downs or name in USELESS_LINK, name

    def test_wrong_guesses_were_verified_and_rejected(self, pair: Pair) -> None:
        """Equality by never speculating would be no result."""
        with HostileDraft(SCRIPTS["wrong guesses"]) as draft:
            message = request(0, 40, speculation={"mode": SSD, "endpoints": [draft.address]})
            wait_for(lambda: generate(pair.target, message).finish.speculation.rejected_rounds > 3)
            out = generate(pair.target, message)
        assert [(out.text, out.tokens)] == pair.plain.of([message])

    @pytest.mark.parametrize(
        "treat",
        [
            lambda peer: None,
            lambda peer: peer.close(),
            lambda peer: peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n" * 1000),
            lambda peer: peer.sendall(b"\x00\xff" * 100_000),
        ],
        ids=["silent", "closes", "another protocol", "garbage"],
    )
    def test_a_port_that_speaks_no_grpc(
        self, pair: Pair, treat: Callable[[socket.socket], None]
    ) -> None:
        with Port(treat) as port:
            message = request(4, 30, speculation={"mode": SSD, "endpoints": [port.address]})
            begin = time.monotonic()
            while not log_of(pair, port.address):
                out = generate(pair.target, message)
                assert [(out.text, out.tokens)] == pair.plain.of([message])
                assert time.monotonic() - begin < 60
            seconds = time.monotonic() - begin
            assert 1 <= len(port.visits) <= 6 + 2 * seconds
            lines = log_of(pair, port.address)
            assert len(set(map(reason_of, lines))) == len(lines) <= 3

    def test_an_endpoint_cannot_write_the_log(self, pair: Pair) -> None:
        def script(visit: Visit) -> Iterator[Reply]:
            yield visit.welcome(draft_name="x\n12:00 ERROR forged \x1b[31m" + "y" * 1000)
            visit.stay()

        with HostileDraft(script) as draft:
            message = request(5, 10, speculation={"mode": SSD, "endpoints": [draft.address]})
            generate(pair.target, message)
            wait_for(lambda: log_of(pair, draft.address))
        lines = pair.target.log().splitlines()
        assert not any(line.startswith("12:00 ERROR forged") for line in lines)
        assert max(map(len, log_of(pair, draft.address))) < 500
        assert "\x1b" not in pair.target.log()


class TestRequestsThatNameEndpoints:
    """A client cannot make a target dial anything that its operator did not allow."""

    def refused(self, pair: Pair, *addresses: str, mode: int = SSD) -> str:
        message = request(1, 4, speculation={"mode": mode, "endpoints": addresses})
        with pytest.raises(grpc.RpcError) as caught:
            generate(pair.target, message)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        status = rpc_status.from_call(caught.value)
        detail = error_details_pb2.BadRequest()
        assert status.details[0].Unpack(detail)
        assert [violation.field for violation in detail.field_violations] == [
            "speculation.endpoints"
        ]
        return str(detail.field_violations[0].description)

    @pytest.mark.parametrize("mode", [SSD, pb.SPECULATION_MODE_UNSPECIFIED])
    def test_one_that_is_not_allowed_is_not_dialled(self, pair: Pair, mode: int) -> None:
        with Port() as port:
            address = port.address.replace("127.0.0.1", "localhost")
            assert "is not allowed here" in self.refused(pair, address, mode=mode)
            assert "is not allowed here" in self.refused(
                pair, pair.draft.address, address, mode=mode
            )
            time.sleep(0.3)
            assert port.visits == []
        assert endpoint(pair.target, address) is None

    def test_schemes_paths_and_garbage(self, pair: Pair, tmp_path: Path) -> None:
        with Port() as port, socket.socket(socket.AF_UNIX) as unix:
            unix.bind(str(tmp_path / "socket"))
            unix.listen()
            unix.settimeout(0.3)
            number = port.address.rpartition(":")[2]
            for address in (
                f"unix:{tmp_path}/socket",
                f"unix://{tmp_path}/socket",
                f"unix:{number}",
                "unix-abstract:name",
                f"dns:///{port.address}",
                f"dns:{port.address}",
                f"ipv4:{port.address}",
                f"xds:///{port.address}",
                f"http://{port.address}",
                f"user@{port.address}",
                f"{port.address}/path",
                f"{port.address}?query",
                f"127.0.0.1%2F:{number}",
                f"127.0.0.1, {port.address}",
                f" {port.address}",
                f"{port.address}\n",
                "127.0.0.1",
                "127.0.0.1:",
                "127.0.0.1:0x50",
                "127.0.0.1:99999",
                "127.0.0.1:٧٤٢٠",
                f":{number}",
                "",
                "\x00",
                "a" * 5000 + ":1",
            ):
                self.refused(pair, address)
            assert port.visits == []
            with pytest.raises(TimeoutError):
                unix.accept()

    def test_too_many(self, pair: Pair) -> None:
        assert "at most" in self.refused(pair, *[pair.draft.address] * 17)

    def test_one_that_is_allowed_by_name_is_used(self, pair: Pair) -> None:
        message = request(2, speculation={"endpoints": [pair.draft.address]})
        wait_for(lambda: is_up(pair.target, pair.draft.address))
        out = generate(pair.target, message)
        assert out.finish.speculation.mode == SSD
        assert looked_up(out.finish.speculation) > 0

    def test_one_that_is_allowed_by_pattern_is_dialled_once(self, pair: Pair) -> None:
        with HostileDraft(SCRIPTS["wrong guesses"]) as draft:
            message = request(3, 20, speculation={"endpoints": [draft.address]})
            for _ in range(3):
                generate(pair.target, message)
            wait_for(lambda: is_up(pair.target, draft.address))
            assert len(draft.visits) == 1

    @pytest.mark.parametrize("mode", [OFF, SYNC])
    def test_other_modes_dial_nothing(self, pair: Pair, mode: int) -> None:
        with Port() as port:
            message = request(1, 4, speculation={"mode": mode, "endpoints": [port.address]})
            generate(pair.target, message)
            time.sleep(0.2)
            assert port.visits == []

    def test_named_by_one_request_it_serves_no_other(self, pair: Pair) -> None:
        def use(draft: HostileDraft, **options: Sequence[str]) -> int:
            message = request(6, 20, speculation={"mode": SSD, **options})
            return generate(pair.target, message).finish.speculation.fallbacks["lost"]

        with HostileDraft(SCRIPTS["all is lost"]) as draft:
            wait_for(lambda: use(draft, endpoints=[draft.address]))
            assert not use(draft)
