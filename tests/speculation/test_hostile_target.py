"""A hostile or greedy target harms nobody but itself at a draft that it shares with others."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import grpc
import pytest

from ssd.v1 import speculation_pb2 as pb
from ssd.v1 import target_pb2
from ssd_engine.text.token_ids import pack_tokens
from tests.processes import DraftProcess
from tests.speculation.generations import (
    SSD,
    Generations,
    Pair,
    draft_info,
    from_endpoints,
    is_empty,
    looked_up,
    request,
)
from tests.waiting import wait_until

Code = grpc.StatusCode
EPOCH = 1
RECEIVED = "ssd_draft_frames_received_total"
METHOD = "/ssd.v1.SpeculationService/Speculate"
FRAMES = 2000  # of an attack, at least

# Each of them has ended a service, or would.
HOSTILE_GRAMMARS = [
    "start: a\na: %json " + '{"items": ' * 200 + "{}" + "}" * 200,
    "start: a0\n" + "".join(f'a{i}: "x" a{i + 1}\n' for i in range(11_500)) + 'a11500: "x"',
    'start: %json {"type": "integer", "multipleOf": 999983}',
]


class RawTarget:
    """One link, by hand; a message may be any bytes."""

    def __init__(self, server: DraftProcess) -> None:
        self.info = draft_info(server)
        self._outbox: queue.Queue[bytes | None] = queue.Queue(64)
        self._channel = server.channel()
        speculate = self._channel.stream_stream(
            METHOD, response_deserializer=pb.SpeculateResponse.FromString
        )
        self.call = speculate(iter(self._outbox.get, None), timeout=120)
        hello = pb.Hello(
            protocol_version=1,
            oldest_protocol_version=1,
            epoch=EPOCH,
            target_name="hostile",
            tokenizer_fingerprint=self.info.tokenizer_fingerprint,
            vocab_size=self.info.vocab_size,
            max_depth=8,
        )
        self.write(pb.SpeculateRequest(hello=hello).SerializeToString())
        assert next(self.call).HasField("welcome")

    def __enter__(self) -> "RawTarget":
        return self

    def __exit__(self, *_: object) -> None:
        self.call.cancel()
        self._channel.close()

    def write(self, data: bytes) -> None:
        self._outbox.put(data, timeout=60)

    def send(self, *frames: pb.TargetFrame) -> None:
        message = pb.SpeculateRequest(frames=pb.TargetFrames(epoch=EPOCH, frames=frames))
        self.write(message.SerializeToString())

    def try_send(self, *frames: pb.TargetFrame) -> None:
        """What finds no place is dropped: whoever floods does not wait."""
        message = pb.SpeculateRequest(frames=pb.TargetFrames(epoch=EPOCH, frames=frames))
        with contextlib.suppress(queue.Full):
            self._outbox.put(message.SerializeToString(), timeout=0.01)

    def heard(self) -> Iterator[pb.DraftFrame]:
        for response in self.call:
            yield from response.frames.frames

    def status(self) -> tuple[grpc.StatusCode, str]:
        """Of a link that the draft ends."""
        with pytest.raises(grpc.RpcError):
            for _ in self.call:
                pass
        return self.call.code(), self.call.details()


def opening(sequence: int, prompt: Sequence[int] = (1, 2, 3), **changes: object) -> pb.TargetFrame:
    fields: dict[str, object] = {
        "prompt": pack_tokens(list(prompt)),
        "max_tokens": len(prompt) + 100,
        "sampling": target_pb2.SamplingOptions(seed=1),
        "verification": target_pb2.VERIFICATION_MODE_COUPLED,
        "depth": 8,
    }
    body = pb.Open(**{**fields, **changes})  # type: ignore[arg-type]
    return pb.TargetFrame(sequence=sequence, open=body)


def closing(sequence: int) -> pb.TargetFrame:
    return pb.TargetFrame(sequence=sequence, close=pb.Close())


class TestBesideAnHonestTarget:
    """Eight generations of a real target, whose sequences are numbered from 1 on."""

    def speculated_beside(
        self, pair: Pair, attack: Callable[[RawTarget, int], None]
    ) -> list[target_pb2.SpeculationStats]:
        """``attack`` is called again and again while they run."""
        messages = [request(seed, 40) for seed in range(8)]
        plain = pair.plain.of(messages)
        stop = threading.Event()
        failures: list[BaseException] = []

        def work() -> None:
            number = 0
            try:
                while not stop.is_set():
                    attack(hostile, number)
                    number += 1
            except BaseException as error:
                failures.append(error)

        stats: list[target_pb2.SpeculationStats] = []
        received = pair.draft.process.metrics()[RECEIVED]
        with RawTarget(pair.draft.process) as hostile:
            attacker = threading.Thread(target=work)
            reader = threading.Thread(target=self.read, args=(hostile,))
            attacker.start()
            reader.start()

            def attacked() -> bool:
                with Generations(pair.target, messages) as running:
                    pass
                assert running.texts() == plain
                stats.extend(running.stats())
                # An honest sequence of 60 tokens has at most 60 rounds, of two frames each.
                own = 122 * len(stats)
                return pair.draft.process.metrics()[RECEIVED] - received - own > FRAMES

            wait_until(lambda: attacked() or failures)
            stop.set()
            attacker.join()
            assert not failures
            assert hostile.call.is_active()
        reader.join()
        wait_until(lambda: is_empty(pair.draft.process))
        return stats

    def read(self, hostile: RawTarget) -> None:
        try:
            for _ in hostile.call:
                pass
        except grpc.RpcError:
            return

    def assert_followed(self, stats: list[target_pb2.SpeculationStats]) -> None:
        """The draft holds every sequence and follows its rounds, be it late or not."""
        for each in stats:
            assert not each.fallbacks.keys() & {"lost", "busy", "refused"}
            assert looked_up(each) > 0.5 * each.rounds

    def assert_untouched(self, stats: list[target_pb2.SpeculationStats]) -> None:
        self.assert_followed(stats)
        assert from_endpoints(stats) > 0

    def test_it_cannot_close_or_replace_what_it_guesses_the_name_of(self, pair: Pair) -> None:
        def attack(hostile: RawTarget, number: int) -> None:
            names = range(1 + number % 200 * 20, 21 + number % 200 * 20)
            hostile.try_send(*(opening(name) for name in names if name % 20 < 4))
            hostile.try_send(*(closing(name) for name in names))

        self.assert_followed(self.speculated_beside(pair, attack))

    def test_it_cannot_end_the_rounds_of_another(self, pair: Pair) -> None:
        def attack(hostile: RawTarget, number: int) -> None:
            name = 1 + number % 4000
            for at in range(4):
                outcome = pb.Outcome(accepted=0, token=5)
                launch = pb.Launch(source=pb.SPECULATION_SOURCE_NONE, depth=8)
                hostile.try_send(
                    pb.TargetFrame(sequence=name, round=at, outcome=outcome),
                    pb.TargetFrame(sequence=name, round=at + 1, launch=launch),
                )

        self.assert_untouched(self.speculated_beside(pair, attack))

    def test_it_cannot_take_all_places(self, pair: Pair) -> None:
        """The draft holds 16 sequences; the hostile link wants them all, as long as can be."""
        longest = 2000

        def attack(hostile: RawTarget, number: int) -> None:
            hostile.try_send(opening(number % 40, [7] * 50, max_tokens=longest))

        stats = self.speculated_beside(pair, attack)
        # A place may be taken while it is free; it is given back when it is asked for. What the
        # hostile link opens is work as any other, and half of the draft's time is its own: on a
        # small machine the draft is late in nearly every round.
        self.assert_followed(stats)

    def test_it_cannot_outshout_another(self, pair: Pair) -> None:
        flood = [closing(10**6 + i) for i in range(1000)]

        def attack(hostile: RawTarget, number: int) -> None:
            hostile.try_send(*flood)

        self.assert_untouched(self.speculated_beside(pair, attack))


class TestWhatItGetsToHear:
    @pytest.mark.parametrize(
        ("frame", "field"),
        [
            (pb.TargetFrame(sequence=1), "frames.frames[0].body"),
            (opening(1, []), "frames.frames[0].open.prompt"),
            (opening(1, [1] * 3000), "frames.frames[0].open.prompt"),
            (opening(1, [2**31]), "frames.frames[0].open.prompt[0]"),
            (opening(1, prompt=(1, 2, 3), output=b"\x00"), "frames.frames[0].open.output"),
            (opening(1, max_tokens=1), "frames.frames[0].open.max_tokens"),
            (opening(1, depth=1000), "frames.frames[0].open.depth"),
            (opening(1, speculation=[1] * 9), "frames.frames[0].open.speculation"),
            (opening(1, sampling=target_pb2.SamplingOptions()), "frames.frames[0].open.sampling"),
            (
                opening(1, sampling=target_pb2.SamplingOptions(seed=1, temperature=-1)),
                "frames.frames[0].open.sampling.temperature",
            ),
            (
                pb.TargetFrame(sequence=1, outcome=pb.Outcome(accepted=9)),
                "frames.frames[0].outcome.accepted",
            ),
            (
                pb.TargetFrame(sequence=1, launch=pb.Launch()),
                "frames.frames[0].launch.source",
            ),
        ],
    )
    def test_a_malformed_frame_names_its_field(
        self, pair: Pair, frame: pb.TargetFrame, field: str
    ) -> None:
        with RawTarget(pair.draft.process) as good, RawTarget(pair.draft.process) as bad:
            bad.send(opening(1))
            bad.send(frame)
            code, text = bad.status()
            assert code is Code.INVALID_ARGUMENT
            assert text.startswith(field)
            good.send(opening(1))
            assert next(good.heard()).HasField("branches")

    @pytest.mark.parametrize(
        ("data", "code"),
        [
            (b"\xff\xff\xff", Code.INVALID_ARGUMENT),
            (b"", Code.INVALID_ARGUMENT),
            (b"\x00" * (17 * 2**20), Code.RESOURCE_EXHAUSTED),
            (
                pb.SpeculateRequest(
                    frames=pb.TargetFrames(epoch=EPOCH, frames=[closing(1)] * 1025)
                ).SerializeToString(),
                Code.INVALID_ARGUMENT,
            ),
            (pb.SpeculateRequest(hello=pb.Hello()).SerializeToString(), Code.INVALID_ARGUMENT),
        ],
        ids=["garbage", "nothing", "too large", "too many frames", "a second hello"],
    )
    def test_what_is_no_message_ends_the_link(
        self, pair: Pair, data: bytes, code: grpc.StatusCode
    ) -> None:
        with RawTarget(pair.draft.process) as bad:
            bad.send(opening(1), opening(2))
            bad.write(data)
            assert bad.status()[0] is code
        wait_until(lambda: is_empty(pair.draft.process))

    @pytest.mark.parametrize("source", HOSTILE_GRAMMARS, ids=["deep", "long", "large"])
    def test_a_grammar_that_cannot_be_compiled_is_left_out(self, pair: Pair, source: str) -> None:
        said = pair.draft.process.log().count("Drafting without a grammar")
        with RawTarget(pair.draft.process) as bad, RawTarget(pair.draft.process) as good:
            bad.send(opening(1, grammar=target_pb2.Grammar(context_free=source)))
            assert next(bad.heard()).HasField("branches")
            wait_until(
                lambda: pair.draft.process.log().count("Drafting without a grammar") == said + 1
            )
            good.send(opening(1))
            assert next(good.heard()).HasField("branches")
            assert bad.call.is_active()

    def test_a_frame_that_does_not_fit_loses_its_own_sequence(self, pair: Pair) -> None:
        with RawTarget(pair.draft.process) as target:
            target.send(opening(1), opening(2))
            target.send(pb.TargetFrame(sequence=1, round=7, outcome=pb.Outcome(token=1)))
            notices = (frame for frame in target.heard() if frame.HasField("notice"))
            lost = next(notices)
            assert (lost.sequence, lost.notice.kind) == (1, pb.NOTICE_KIND_LOST)
            wait_until(lambda: pair.draft.process.metrics()["ssd_sequences_active"] == 1)

    def test_beyond_its_share_it_is_told_that_there_is_no_room(self, pair: Pair) -> None:
        with RawTarget(pair.draft.process) as target:
            target.send(*(opening(name) for name in range(17)))
            notice = next(frame for frame in target.heard() if frame.HasField("notice"))
            assert (notice.sequence, notice.notice.kind) == (16, pb.NOTICE_KIND_BUSY)
        wait_until(lambda: is_empty(pair.draft.process))


class TestPrefixes:
    """What one link has had computed is not to be noticed on another."""

    def rows(self, pair: Pair, link: RawTarget, sequence: int, prompt: list[int]) -> float:
        """Token rows that the draft computes to open a sequence and prepare one token."""
        name = "ssd_draft_engine_rows_total"
        process = pair.draft.process
        before = process.metrics().get(name, 0.0)
        link.send(opening(sequence, prompt, max_tokens=len(prompt) + 2, depth=1))
        next(frame for frame in link.heard() if frame.sequence == sequence)
        link.send(closing(sequence))
        wait_until(lambda: is_empty(process))
        return process.metrics()[name] - before

    def test_they_are_cached_for_their_own_link_alone(self, pair: Pair) -> None:
        wait_until(lambda: is_empty(pair.draft.process))
        prompt = [5 + i % 700 for i in range(400)]
        with RawTarget(pair.draft.process) as one, RawTarget(pair.draft.process) as other:
            first = self.rows(pair, one, 1, prompt)
            again = self.rows(pair, one, 2, prompt)
            elsewhere = self.rows(pair, other, 1, prompt)
        assert first >= 400
        assert again < 100
        assert elsewhere >= 400


def test_one_that_opens_and_says_no_more_is_no_burden(pair: Pair) -> None:
    messages = [request(seed) for seed in range(4)]
    hostile = RawTarget(pair.draft.process)
    try:
        hostile.send(*(opening(name) for name in range(8)))
        wait_until(lambda: pair.draft.process.metrics()["ssd_sequences_active"] == 8)
        with Generations(pair.target, messages) as running:
            pass
        assert running.texts() == pair.plain.of(messages)
        assert from_endpoints(running.stats()) > 0
        assert all(each.mode == SSD for each in running.stats())
    finally:
        hostile.__exit__()
    wait_until(lambda: is_empty(pair.draft.process))
