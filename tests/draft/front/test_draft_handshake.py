"""Two peers fit, or are told why they do not."""

import contextlib
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status

from ssd.v1 import speculation_pb2 as pb
from ssd_draft.front import service
from ssd_draft.records import TargetLinkUp
from tests.draft.scripted_draft import (
    EPOCH,
    Draft,
    frames,
    hello,
    opening,
    scripted,
    status,
    try_write,
)
from tests.waiting import wait_until_async
from tools.attack.afar import forwarded

Code = grpc.StatusCode


async def refusal(draft: Draft, message: pb.SpeculateRequest | bytes | None) -> tuple[Code, str]:
    """None: the stream ends without one."""
    async with draft.stream() as call:
        await (call.done_writing() if message is None else try_write(call, message))
        return await status(call)


async def test_a_fitting_target_is_welcomed() -> None:
    async with scripted() as draft, draft.stream() as call:
        await call.write(hello(max_depth=6, target_name="Ada"))
        assert (await call.read()).welcome == pb.Welcome(
            protocol_version=1,
            epoch=EPOCH,
            draft_name="scripted",
            speculator="SPECULATOR_KIND_MODEL",
            max_sequences=5,
            max_context=64,
            max_depth=8,
        )
        (up,) = draft.engine.said
        assert isinstance(up, TargetLinkUp)
        assert up.max_depth == 6
        assert draft.sample("ssd_draft_links", state="up") == 1


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        (
            {"protocol_version": 9, "oldest_protocol_version": 5},
            "protocol",
            ["protocol_version", "5 to 9", "1 to 1", "upgrade the draft"],
        ),
        (
            {"protocol_version": 0, "oldest_protocol_version": 0},
            "protocol",
            ["protocol_version", "0 to 0", "upgrade the target"],
        ),
        (
            {"tokenizer_fingerprint": "xyz"},
            "tokenizer",
            ["tokenizer_fingerprint", "'xyz'", "'abc'", "--speculator ngram"],
        ),
        ({"vocab_size": 1001}, "vocabulary", ["vocab_size", "1001", "1000", "--speculator ngram"]),
        ({"vocab_size": 0}, "vocabulary", ["vocab_size", "0"]),
        ({"max_depth": 0}, "depth", ["max_depth", "0"]),
        ({"max_depth": 5000}, "depth", ["max_depth", "5000"]),
        ({"target_name": "x" * 257}, "name", ["target_name", "257"]),
    ],
)
async def test_a_misfit_is_refused_with_field_values_and_fix(
    changes: dict[str, Any], reason: str, words: list[str]
) -> None:
    async with scripted() as draft:
        code, text = await refusal(draft, hello(**changes))
        assert code == Code.FAILED_PRECONDITION
        assert all(word in text for word in words), text
        assert draft.engine.said == []
        name = "ssd_draft_handshake_failures_total"
        await wait_until_async(lambda: draft.sample(name, reason=reason) == 1)


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        (frames(opening(1)), Code.FAILED_PRECONDITION, "hello: must be the first"),
        (pb.SpeculateRequest(), Code.FAILED_PRECONDITION, "hello: must be the first"),
        (None, Code.FAILED_PRECONDITION, "hello"),
        (b"\xff\xff", Code.INVALID_ARGUMENT, "is not a SpeculateRequest"),
        (
            hello(target_name="MARK").SerializeToString().replace(b"MARK", b"M\xffRK"),
            Code.INVALID_ARGUMENT,
            "a string in it is not UTF-8",
        ),
    ],
)
async def test_what_is_no_hello_is_refused(
    message: pb.SpeculateRequest | bytes | None, code: Code, words: str
) -> None:
    async with scripted() as draft:
        found, text = await refusal(draft, message)
        assert found == code
        assert words in text
        assert draft.engine.said == []


async def test_a_silent_peer_does_not_hold_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "HELLO_SECONDS", 0.2)
    async with scripted() as draft, draft.stream() as call:
        code, text = await status(call)
        assert code == Code.DEADLINE_EXCEEDED
        assert "hello" in text
        await wait_until_async(lambda: draft.sample("ssd_draft_links", state="greeting") == 0)


async def test_hello_comes_once() -> None:
    async with scripted() as draft, draft.link() as (call, _):
        await call.write(hello())
        code, text = await status(call)
        assert code == Code.INVALID_ARGUMENT
        assert text.startswith("hello: comes once")


async def test_one_link_too_many_is_refused_until_one_ends() -> None:
    async with scripted(max_links=1) as draft:
        async with draft.link():
            async with draft.stream() as call:
                await try_write(call, hello())
                code, text = await status(call)
                told = dict(await call.trailing_metadata())["grpc-status-details-bin"]
            assert code == Code.RESOURCE_EXHAUSTED
            assert "--max-links" in text
            retry = error_details_pb2.RetryInfo()
            assert Status.FromString(told).details[0].Unpack(retry)
            assert retry.retry_delay.ToMilliseconds() > 0
        await wait_until_async(lambda: draft.engine.num_up == 0)
        async with draft.link():
            pass


async def test_whoever_has_most_links_gives_its_idlest_to_others() -> None:
    async with scripted(max_links=4) as draft, contextlib.AsyncExitStack() as links:
        hog = [await links.enter_async_context(draft.link()) for _ in range(4)]
        for call, link in (hog[0], hog[2], hog[3]):
            await call.write(frames(opening(1)))
            await wait_until_async(lambda link=link: draft.engine.num_frames(link) == 1)
        afar = forwarded(draft.address)
        _, first = await links.enter_async_context(draft.link(by=afar))
        assert draft.engine.downs() == [hog[1][1]]
        code, text = await status(hog[1][0])
        assert (code, "gives way" in text) == (Code.RESOURCE_EXHAUSTED, True)
        assert draft.sample("ssd_draft_links_ended_total", how="full") == 1
        # Its next hello takes nobody's place, and that of one who has as many neither.
        assert (await refusal(draft, hello()))[0] == Code.RESOURCE_EXHAUSTED
        _, second = await links.enter_async_context(draft.link(by=afar))
        assert draft.engine.downs() == [hog[1][1], hog[0][1]]
        async with draft.stream(afar) as call:
            await try_write(call, hello())
            assert (await status(call))[0] == Code.RESOURCE_EXHAUSTED
        assert draft.engine.ups()[-2:] == [first, second]
        assert draft.engine.num_up == 4


async def test_a_hello_that_does_not_fit_ends_nobodys_link() -> None:
    async with scripted(max_links=2) as draft, draft.link(), draft.link():
        async with draft.stream(forwarded(draft.address)) as call:
            await try_write(call, hello(tokenizer_fingerprint="another"))
            assert (await status(call))[0] == Code.FAILED_PRECONDITION
        assert draft.engine.downs() == []


async def test_while_loading_nobody_is_served() -> None:
    async with scripted(serving=False) as draft:
        code, text = await refusal(draft, hello())
        assert code == Code.UNAVAILABLE
        assert "loading" in text
