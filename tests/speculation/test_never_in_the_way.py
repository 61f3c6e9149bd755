"""A slow, dead or malicious draft costs a bounded wait and never a request, nor a letter of it."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from ssd.v1 import target_pb2 as pb
from ssd_target.links.link_errors import LinkBroken
from ssd_target.links.link_report import MAX_LOGGED, LinkReport
from tests.processes import TargetProcess, target
from tests.speculation.generations import (
    METRICS,
    OFF,
    SSD,
    SYNC,
    Generations,
    Pair,
    endpoint,
    generate,
    is_up,
    request,
    resident_mib,
    violation,
    wait_until_up,
)
from tests.speculation.hostile_draft import (
    SCRIPTS,
    HostileDraft,
    Port,
)
from tests.waiting import wait_until

STORIES = [request(seed, 40) for seed in range(4)]
LONG = 150  # tokens, of a generation that outlasts a link's timeout
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


class TestHostileEndpoints:
    @pytest.mark.parametrize(
        "group", [NO_LINK, BROKEN_LINK, USELESS_LINK], ids=["no link", "broken", "useless"]
    )
    def test_one_for_each_of_many_generations(self, ordinary: Pair, group: dict[str, str]) -> None:
        """Each generation has an endpoint of its own, until all were found out."""
        before, told = ordinary.target.metrics(), len(ordinary.target.log())
        mib = resident_mib(ordinary.target.process.pid)
        expected = Counter(group.values())
        with contextlib.ExitStack() as stack:
            drafts = [stack.enter_context(HostileDraft(SCRIPTS[name])) for name in group]
            # A stall is noticed while a sequence runs.
            lengths = [LONG if name == "never answers a round" else 30 for name in group]
            messages = [
                request(seed, length, speculation={"mode": SSD, "endpoints": [draft.address]})
                for seed, (draft, length) in enumerate(zip(drafts, lengths, strict=True))
            ]
            plain = ordinary.plain.of(messages)

            def found_out() -> bool:
                outputs = zip(group, texts(ordinary.target, messages), plain, strict=True)
                assert not [name for name, text, expected_text in outputs if text != expected_text]
                after = ordinary.target.metrics()
                risen = {name: after.get(name, 0) - before.get(name, 0) for name in expected}
                return all(risen[name] >= count for name, count in expected.items())

            wait_until(found_out, ordinary.target.log)
            for name, draft in zip(group, drafts, strict=True):
                assert draft.visits, name
                if name not in USELESS_LINK:
                    wait_until_down(ordinary, draft.address, told)
                self.check_log(log_of(ordinary, draft.address, told), name)
        assert resident_mib(ordinary.target.process.pid) - mib < MOST_MIB
        assert "Traceback" not in ordinary.target.log()

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

    def test_an_endpoint_cannot_write_the_log(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO")
        forged = "x\n12:00 ERROR forged \x1b[31m\u202e" + "y" * 1000
        report = LinkReport(1, "127.0.0.1:1")
        report.up(forged, "model")
        report.down(LinkBroken("protocol", forged))
        assert len(caplog.messages) == 2
        assert all(said.isprintable() and len(said) < 500 for said in caplog.messages)


class TestRequestsThatNameEndpoints:
    """A client cannot make a target dial anything that its operator did not allow."""

    def refused(self, pair: Pair, *addresses: str, mode: int = SSD) -> str:
        message = request(1, 4, speculation={"mode": mode, "endpoints": addresses})
        found = violation(pair.target, message)
        assert found.field == "speculation.endpoints"
        return found.description

    @pytest.mark.parametrize("mode", [SSD, pb.SPECULATION_MODE_UNSPECIFIED])
    def test_one_that_is_not_allowed_is_not_dialled(self, pair: Pair, mode: int) -> None:
        with Port("127.9.0.1") as port:
            address = port.address
            assert "is not allowed here" in self.refused(pair, address, mode=mode)
            assert "is not allowed here" in self.refused(
                pair, pair.draft.address, address, mode=mode
            )
            dial_another(pair)
            assert not port.was_dialled()
        assert endpoint(pair.target, address) is None

    @pytest.mark.parametrize("mode", [OFF, SYNC])
    def test_other_modes_dial_nothing(self, pair: Pair, mode: int) -> None:
        with Port() as port:
            message = request(1, 4, speculation={"mode": mode, "endpoints": [port.address]})
            generate(pair.target, message)
            dial_another(pair)
            assert not port.was_dialled()

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
        wait_until(port.was_dialled)
