"""A slow, dead or malicious draft costs a bounded wait and never a request, nor a letter of it."""

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from ssd.v1 import speculation_pb2
from ssd.v1 import target_pb2 as pb
from ssd_target.links.link_report import MAX_LOGGED
from tests.processes import TargetProcess, target
from tests.speculation.generations import (
    METRICS,
    OFF,
    SSD,
    SYNC,
    Generations,
    Pair,
    endpoint,
    from_endpoints,
    generate,
    is_up,
    looked_up,
    request,
    resident_mib,
    wait_until_up,
)
from tests.speculation.hostile_draft import (
    SCRIPTS,
    HostileDraft,
    Port,
    Reply,
    Visit,
    begins_round,
    branches,
)
from tests.suite.scale import full_only
from tests.waiting import HANG_SECONDS, wait_until

STORIES = [request(seed, 40) for seed in range(4)]
LONG = 150  # tokens, of a generation that outlasts a link's timeout
BACK_SECONDS = 5.0  # after which speculation is back
MOST_MIB = 250.0  # that an attack may cost; a flood in a queue would be gigabytes


@pytest.fixture(scope="module")
def ordinary(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A target that waits as targets do, beside the patient one of the pair, on the same draft."""
    flags = (*METRICS, "--draft", pair.draft.address, "--allow-draft", "127.0.0.1:*")
    options = ("--no-auto-off", "--link-timeout", "0.3")
    with target(tmp_path_factory.mktemp("ordinary"), *flags, *options) as process:
        wait_until_up(process, pair.draft.address)
        yield Pair(process, pair.draft, pair.plain)


class TestDeathsAndPauses:
    """Of the operator's own draft, in the middle of generations."""

    def test_while_a_draft_stands_still_all_texts_end(self, ordinary: Pair) -> None:
        """Those that it held, those that come later, and those after it was given up."""
        plain = ordinary.plain.of(STORIES)
        stalls = ordinary.target.metrics().get(FAILED("stalled"), 0)
        with Generations(ordinary.target, STORIES) as before:
            before.until_each_has(10)
            with ordinary.draft.standing_still():
                before.until_ended()
                while ordinary.target.metrics().get(FAILED("stalled"), 0) == stalls:
                    assert texts(ordinary.target, STORIES) == plain
                wait_until(lambda: not is_up(ordinary.target, ordinary.draft.address))
                assert texts(ordinary.target, STORIES) == plain
        assert before.texts() == plain
        wait_until_up(ordinary.target, ordinary.draft.address)
        self.assert_back(ordinary)

    def test_a_wait_for_a_draft_ends_with_the_draft(self, pair: Pair) -> None:
        """It is killed while a patient target waits for it, and started again on its port."""
        plain = pair.plain.of(STORIES)
        with pair.draft.standing_still(), Generations(pair.target, STORIES) as running:
            running.until_each_has(1)
            assert running.running == len(STORIES)
            pair.draft.process.kill()
        assert running.texts() == plain
        assert all(stats.fallbacks["disconnected"] for stats in running.stats())
        pair.draft.start()
        assert texts(pair.target, STORIES) == plain
        pair.draft.wait_until_ready()
        wait_until_up(pair.target, pair.draft.address)
        pair.generate_from_cache(STORIES)

    def test_it_moves_on_from_an_endpoint_that_turns_hostile(self, pair: Pair) -> None:
        """Its sequence goes to the honest one in the middle of the text, and is sped up there."""
        opened, turns = threading.Event(), threading.Event()

        def script(visit: Visit) -> Iterator[Reply]:
            """Silent, so that it is waited for; then no message at all."""
            yield visit.welcome()
            next(visit.frames())
            opened.set()
            turns.wait(HANG_SECONDS)
            yield b"\xff\x00garbage"

        with HostileDraft(script) as hostile:
            generate(pair.target, self.named(1, hostile.address))  # over before the link is up
            wait_until_up(pair.target, hostile.address)
            asked = self.named(60, hostile.address, pair.draft.address)
            # The honest one has a sequence already: the next one goes where there is none.
            with (
                pair.draft.standing_still(),
                Generations(pair.target, [self.named(30, pair.draft.address)]) as other,
            ):
                other.until_each_has(1)
                with Generations(pair.target, [asked]) as running:
                    assert opened.wait(HANG_SECONDS)
                    pair.draft.go_on()
                    turns.set()
        assert running.texts() == pair.plain.of([asked])
        broke = "is down: the endpoint broke the protocol"
        wait_until(lambda: broke in log_of(pair, hostile.address)[-1], pair.target.log)
        assert from_endpoints(running.stats()) > 0

    def named(self, length: int, *addresses: str) -> pb.GenerateRequest:
        return request(0, length, speculation={"mode": SSD, "endpoints": addresses})

    @pytest.mark.full
    def test_speculation_is_back_within_seconds(self, ordinary: Pair) -> None:
        with ordinary.draft.standing_still():
            time.sleep(BACK_SECONDS)
        begin = time.monotonic()
        self.assert_back(ordinary)
        assert time.monotonic() - begin < BACK_SECONDS

    def assert_back(self, pair: Pair) -> None:
        """A sequence that runs is held at the draft again, and it speculates."""
        tokens = "ssd_draft_branch_tokens_total"
        before = pair.draft.process.metrics().get(tokens, 0)

        def speculates() -> bool:
            generate(pair.target, request(99))
            return pair.draft.process.metrics().get(tokens, 0) > before

        wait_until(speculates)


def texts(
    server: TargetProcess, messages: Sequence[pb.GenerateRequest]
) -> list[tuple[str, list[int]]]:
    with Generations(server, messages) as running:
        pass
    return running.texts()


def log_of(pair: Pair, address: str, told: int = 0) -> list[str]:
    """Of its link, after so many characters: others may have had the port before."""
    log = pair.target.log()[told:]
    return [line for line in log.splitlines() if f"link to {address} " in line]


def reason_of(line: str) -> str:
    return line.partition(" is down: ")[2]


def wait_until_down(pair: Pair, address: str, told: int) -> None:
    """As its log says."""
    wait_until(lambda: any(map(reason_of, log_of(pair, address, told))), pair.target.log)


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
ALL = NO_LINK | BROKEN_LINK | FLOODS | USELESS_LINK


class TestHostileEndpoints:
    def test_every_script_is_tried(self) -> None:
        assert SCRIPTS.keys() == ALL.keys()

    @pytest.mark.parametrize(
        "group", [NO_LINK, BROKEN_LINK, USELESS_LINK], ids=["no link", "broken", "useless"]
    )
    def test_one_for_each_of_many_generations(self, ordinary: Pair, group: dict[str, str]) -> None:
        self.attack(ordinary, group)

    @pytest.mark.full
    @pytest.mark.parametrize("name", ALL)
    def test_alone(self, ordinary: Pair, name: str) -> None:
        """Of floods also that they are found out, for which the machine must be fast enough."""
        begin = time.monotonic()
        draft = self.attack(ordinary, {name: ALL[name]})[0]
        assert len(draft.visits) <= 6 + (time.monotonic() - begin) / 1.5

    @pytest.mark.parametrize("name", ["floods", *map(full_only, list(FLOODS)[1:])])
    def test_beside_a_flood_texts_are_the_same(self, ordinary: Pair, name: str) -> None:
        """And memory is bounded. Who floods is found out: see test_link_bounds.py."""
        mib = resident_mib(ordinary.target.process.pid)
        with HostileDraft(SCRIPTS[name]) as draft:
            options = {"mode": SSD, "endpoints": [draft.address]}
            messages = [request(seed, 30, speculation=options) for seed in range(2)]
            plain = ordinary.plain.of(messages)
            while not log_of(ordinary, draft.address):  # until it is up at least
                assert texts(ordinary.target, messages) == plain
            assert texts(ordinary.target, messages) == plain
        assert resident_mib(ordinary.target.process.pid) - mib < MOST_MIB
        assert "Traceback" not in ordinary.target.log()

    def attack(self, pair: Pair, group: dict[str, str]) -> list[HostileDraft]:
        """Each generation has an endpoint of its own, until all were found out."""
        before, told = pair.target.metrics(), len(pair.target.log())
        mib = resident_mib(pair.target.process.pid)
        expected = Counter(group.values())
        with contextlib.ExitStack() as stack:
            drafts = [stack.enter_context(HostileDraft(SCRIPTS[name])) for name in group]
            # A stall is noticed while a sequence runs.
            lengths = [LONG if name == "never answers a round" else 30 for name in group]
            messages = [
                request(seed, length, speculation={"mode": SSD, "endpoints": [draft.address]})
                for seed, (draft, length) in enumerate(zip(drafts, lengths, strict=True))
            ]
            plain = pair.plain.of(messages)

            def found_out() -> bool:
                outputs = zip(group, texts(pair.target, messages), plain, strict=True)
                assert not [name for name, text, expected_text in outputs if text != expected_text]
                after = pair.target.metrics()
                risen = {name: after.get(name, 0) - before.get(name, 0) for name in expected}
                return all(risen[name] >= count for name, count in expected.items())

            wait_until(found_out, pair.target.log)
            for name, draft in zip(group, drafts, strict=True):
                assert draft.visits, name
                if name not in USELESS_LINK:
                    wait_until_down(pair, draft.address, told)
                self.check_log(log_of(pair, draft.address, told), name)
        assert resident_mib(pair.target.process.pid) - mib < MOST_MIB
        assert "Traceback" not in pair.target.log()
        return drafts

    def check_log(self, lines: list[str], name: str) -> None:
        """Until a link is up for good, each failure is said once, and few of them."""
        assert name not in NO_LINK or not any("is up" in line for line in lines), name
        said: list[str] = []
        for line in lines:
            if reason_of(line):
                said.append(reason_of(line))
                assert len(set(said)) == len(said) <= MAX_LOGGED, lines
            else:
                said.clear()

    def test_wrong_guesses_were_verified_and_rejected(self, pair: Pair) -> None:
        """Equality by never speculating would be no result."""

        def script(visit: Visit) -> Iterator[Reply]:
            """After each outcome a guess that is never right; the target waits for it."""
            yield visit.welcome()
            wrong = [visit.hello.vocab_size - 1] * 8
            for frame in visit.frames():
                if frame.HasField("outcome"):
                    ended = frame.outcome
                    guess = speculation_pb2.Branch(
                        accepted=ended.accepted, token=ended.token, tokens=wrong
                    )
                    yield visit.say(branches(frame, guess))
                elif begins_round(frame):
                    yield visit.say(branches(frame))  # a sign of life

        with HostileDraft(script) as draft:
            message = request(0, 40, speculation={"mode": SSD, "endpoints": [draft.address]})
            generate(pair.target, message)
            wait_until_up(pair.target, draft.address)
            out = generate(pair.target, message)
        assert [(out.text, out.tokens)] == pair.plain.of([message])
        stats = out.finish.speculation
        assert stats.rejected_rounds > 30
        assert stats.accepted_tokens == 0

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
        self, ordinary: Pair, treat: Callable[[socket.socket], None]
    ) -> None:
        with Port(treat=treat) as port:
            message = request(4, 30, speculation={"mode": SSD, "endpoints": [port.address]})
            plain = ordinary.plain.of([message])
            while not log_of(ordinary, port.address):
                assert texts(ordinary.target, [message]) == plain
            assert texts(ordinary.target, [message]) == plain
            assert port.visits
            lines = log_of(ordinary, port.address)
            assert len(set(map(reason_of, lines))) == len(lines) <= MAX_LOGGED

    def test_an_endpoint_cannot_write_the_log(self, ordinary: Pair) -> None:
        def script(visit: Visit) -> Iterator[Reply]:
            yield visit.welcome(draft_name="x\n12:00 ERROR forged \x1b[31m\u202e" + "y" * 1000)
            visit.stay()

        with HostileDraft(script) as draft:
            message = request(5, 10, speculation={"mode": SSD, "endpoints": [draft.address]})
            generate(ordinary.target, message)
            wait_until(lambda: log_of(ordinary, draft.address))
        lines = ordinary.target.log().splitlines()
        assert not any(line.startswith("12:00 ERROR forged") for line in lines)
        assert max(map(len, log_of(ordinary, draft.address))) < 500
        assert not {"\x1b", "\u202e"} & set(ordinary.target.log())


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
        with Port("127.9.0.1") as port:
            address = port.address
            assert "is not allowed here" in self.refused(pair, address, mode=mode)
            assert "is not allowed here" in self.refused(
                pair, pair.draft.address, address, mode=mode
            )
            dial_another(pair)
            assert port.visits == []
        assert endpoint(pair.target, address) is None

    def test_schemes_paths_and_garbage(self, pair: Pair, tmp_path: Path) -> None:
        with Port() as port, socket.socket(socket.AF_UNIX) as unix:
            unix.bind(str(tmp_path / "socket"))
            unix.listen()
            unix.setblocking(False)
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
            dial_another(pair)
            assert port.visits == []
            with pytest.raises(BlockingIOError):
                unix.accept()

    def test_too_many(self, pair: Pair) -> None:
        assert "at most" in self.refused(pair, *[pair.draft.address] * 17)

    def test_one_that_is_allowed_by_name_is_used(self, pair: Pair) -> None:
        message = request(2, speculation={"endpoints": [pair.draft.address]})
        wait_until_up(pair.target, pair.draft.address)
        out = generate(pair.target, message)
        assert out.finish.speculation.mode == SSD
        assert looked_up(out.finish.speculation) > 0
        assert from_endpoints([out.finish.speculation]) > 0

    def test_one_that_is_allowed_by_pattern_is_dialled_once(self, pair: Pair) -> None:
        with HostileDraft(SCRIPTS["refuses everything"]) as draft:
            message = request(3, 20, speculation={"endpoints": [draft.address]})
            generate(pair.target, message)
            wait_until_up(pair.target, draft.address)
            generate(pair.target, message)
            dial_another(pair)
            assert len(draft.visits) == 1

    @pytest.mark.parametrize("mode", [OFF, SYNC])
    def test_other_modes_dial_nothing(self, pair: Pair, mode: int) -> None:
        with Port() as port:
            message = request(1, 4, speculation={"mode": mode, "endpoints": [port.address]})
            generate(pair.target, message)
            dial_another(pair)
            assert port.visits == []

    def test_named_by_one_request_it_serves_no_other(self, ordinary: Pair) -> None:
        def use(**options: Sequence[str]) -> int:
            message = request(6, 20, speculation={"mode": SSD, **options})
            return generate(ordinary.target, message).finish.speculation.fallbacks["lost"]

        with HostileDraft(SCRIPTS["all is lost"]) as draft:
            wait_until(lambda: use(endpoints=[draft.address]))
            assert not use()


def dial_another(pair: Pair) -> None:
    """One that is allowed, after those that are not: had they been dialled, they had come first."""
    with Port() as port:
        generate(pair.target, request(1, 2, speculation={"endpoints": [port.address]}))
        wait_until(lambda: port.visits)
