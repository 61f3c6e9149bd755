"""Texts that are far longer than any prompt that their sender may have."""

import asyncio
import gzip
import re
import threading
from collections.abc import Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from ssd.v1 import target_pb2 as pb
from ssd_engine.errors import InputError
from ssd_engine.sampling.params import MAX_LOGIT_BIAS_ENTRIES
from ssd_serving.heap import give_back
from ssd_serving.rpc.status import ServerFull
from ssd_serving.security.allowances import Allowance, Identity, IdentityAccount
from ssd_target.front import parsing
from ssd_target.front.chat_prompts import (
    MAX_CHAT_MESSAGES,
    MAX_JSON_SYNTAX_BYTES,
    MAX_ROLE_BYTES,
    MAX_TEMPLATE_KWARGS_BYTES,
)
from ssd_target.front.parsing import INLINE_BYTES, Parser
from ssd_target.front.requests import (
    BYTES_OF_TOKEN,
    MAX_CACHE_SALT_BYTES,
    MAX_REQUEST_ID_BYTES,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SPARE_BYTES,
    ParsedRequest,
    RequestLimits,
    largest_request,
    parse_prompt,
)
from tests.attacks.conftest import ATTACKER, OTHER, Attacked, bearer, generate, request
from tests.waiting import HANG_SECONDS
from tests.wire.raw import RawConnection, framed, headers

MIB = 1 << 20
MANY = 60
REFUSED = (
    (20_000, "100 tokens are allowed", grpc.StatusCode.INVALID_ARGUMENT),
    (1_000_000, "maximum context length", grpc.StatusCode.INVALID_ARGUMENT),
    (8 * MIB, "larger than max", grpc.StatusCode.RESOURCE_EXHAUSTED),
)
LIMITS = RequestLimits(vocab_size=300, max_model_len=100_000, kv_tokens=100_000, eos_token_ids=())


def peak_bytes(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return 1024 * int(found[1])


def test_what_is_too_long_for_its_sender_is_refused_unread(attacked: Attacked) -> None:
    pid = attacked.target.process.pid
    with attacked.target.channel() as channel:
        expected = generate(channel, OTHER, request())
        before = peak_bytes(pid)
        for size, why, code in REFUSED:
            call = attacked.stub(channel).Generate(
                request("word " * (size // 5)), timeout=HANG_SECONDS, metadata=bearer(ATTACKER)
            )
            with pytest.raises(grpc.RpcError, match=why) as caught:
                next(call)
            assert caught.value.code() is code
        assert peak_bytes(pid) - before < 40 * MIB
        assert generate(channel, OTHER, request()) == expected


GENERATE = "/ssd.v1.TargetService/Generate"


def codes_of(attacked: Attacked, message: bytes) -> list[grpc.StatusCode]:
    """Many calls are made at once, each on a connection of its own."""
    with ExitStack() as stack:
        channels = [stack.enter_context(attacked.target.channel()) for _ in range(MANY)]
        calls = [
            channel.unary_unary(GENERATE).future(
                message, timeout=HANG_SECONDS, metadata=bearer(ATTACKER)
            )
            for channel in channels
        ]
        return [call.code() for call in calls]


def test_many_at_once_are_not_all_kept_in_memory(attacked: Attacked) -> None:
    """Neither as they are, nor compressed: that would be a few bytes for each kilobyte of ours."""
    pid = attacked.target.process.pid
    message = pb.GenerateRequest(text="\0" * 15 * MIB).SerializeToString()
    before = peak_bytes(pid)
    assert codes_of(attacked, message) == MANY * [grpc.StatusCode.RESOURCE_EXHAUSTED]
    small = framed(gzip.compress(message), 1)
    assert len(small) < 20_000
    head = headers(GENERATE, [("grpc-encoding", "gzip"), *bearer(ATTACKER)])
    with ExitStack() as stack:
        address = attacked.target.address
        clients = [stack.enter_context(RawConnection(address)) for _ in range(MANY)]
        calls = [(client, client.call(head, small)) for client in clients]
        statuses = {client.until_ended(call).status for client, call in calls}
    assert statuses == {(12, "Compression algorithm 'gzip' is disabled.")}
    assert peak_bytes(pid) - before < 3 * MANY * largest_request(2048)
    with attacked.target.channel() as channel:
        assert generate(channel, OTHER, request())


@pytest.mark.parametrize("length", [512, 131_072])
@pytest.mark.parametrize("kind", ["text", "chat", "json"])
def test_no_message_is_larger_than_the_longest_request(length: int, kind: str) -> None:
    """Which uses all that it may at once."""
    size = BYTES_OF_TOKEN * (length - 1) + SPARE_BYTES
    message = pb.GenerateRequest(
        request_id="r" * MAX_REQUEST_ID_BYTES,
        cache_salt="s" * MAX_CACHE_SALT_BYTES,
        generated_token_ids=b"\xff" * 4 * length,
    )
    if kind == "json":
        message.chat.messages_json = b"j" * (size + MAX_JSON_SYNTAX_BYTES)
    elif kind == "chat":
        share = size // MAX_CHAT_MESSAGES
        for _ in range(MAX_CHAT_MESSAGES):
            message.chat.messages.add(role="r" * MAX_ROLE_BYTES, content="c" * share)
    else:
        message.text = "t" * size
    if kind != "text":
        message.chat.template_kwargs.update({"x": "k" * (MAX_TEMPLATE_KWARGS_BYTES - 20)})
    message.stop.strings.extend(MAX_STOP_STRINGS * ["s" * (MAX_STOP_BYTES // MAX_STOP_STRINGS)])
    message.stop.token_ids.extend(MAX_STOP_TOKEN_IDS * [2**32 - 1])
    message.sampling.logit_bias.update({2**32 - 1 - i: 1.5 for i in range(MAX_LOGIT_BIAS_ENTRIES)})
    message.speculation.endpoints.extend(16 * ["e" * 300])
    assert message.ByteSize() < largest_request(length)


class Bytes:
    """A tokenizer that takes its time: until it is let go on."""

    def __init__(self) -> None:
        self.token_bytes = [b"x"] * 300
        self.reading: list[str] = []
        self.go_on = threading.Event()

    def encode(self, text: str) -> list[int]:
        self.reading.append(text[0])
        assert self.go_on.wait(HANG_SECONDS)
        return [1, 2, 3]

    def fewest_tokens(self, size: int) -> int:
        return 1


def account(name: str) -> IdentityAccount:
    return IdentityAccount(Identity(name), Allowance(), 0.0)


def long_request(letter: str) -> bytes:
    return pb.GenerateRequest(text=letter * (INLINE_BYTES + 1)).SerializeToString()


def parse(
    parser: Parser, text: str, tokenizer: "Bytes", account: IdentityAccount
) -> Coroutine[Any, Any, ParsedRequest]:
    return parser.parse(
        long_request(text), *about(tokenizer), account, holder=account.identity.name
    )


class TestWhatIsBeingRead:
    def test_texts_that_wait_have_a_bound_in_bytes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those of an identity, and those of all; it is free again when they were read."""
        size = len(long_request("a"))
        monkeypatch.setattr(parsing, "MAX_HELD_OF_ONE", 2 * size)
        monkeypatch.setattr(parsing, "MAX_HELD", 3 * size)

        async def scenario() -> None:
            tokenizer, parser = Bytes(), Parser()
            accounts = [account(name) for name in ("one", "one", "one", "two", "two")]
            reads = [parse(parser, "a", tokenizer, each) for each in accounts]
            tasks = [asyncio.ensure_future(each) for each in reads]
            await until(lambda: sum(task.done() for task in tasks) == 2)
            assert [task.done() for task in tasks] == [False, False, True, False, True]
            for task, most in ((tasks[2], 2 * size), (tasks[4], 3 * size)):
                with pytest.raises(ServerFull, match=f"at most {most} may"):
                    await task
            tokenizer.go_on.set()
            await asyncio.gather(*(task for task in tasks if not task.done()))
            assert not parser._held
            again = await parse(parser, "a", tokenizer, accounts[0])
            assert again.prompt == [1, 2, 3]

        asyncio.run(scenario())

    def test_a_text_that_is_longer_than_the_bound_is_read_alone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(parsing, "MAX_HELD_OF_ONE", 1)

        async def scenario() -> None:
            tokenizer, parser = Bytes(), Parser()
            tokenizer.go_on.set()
            assert await parse(parser, "a", tokenizer, account("one"))

        asyncio.run(scenario())

    def test_memory_of_long_texts_is_given_back_once_for_many(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given: list[None] = []
        monkeypatch.setattr(parsing, "LONG_BYTES", INLINE_BYTES)
        monkeypatch.setattr(parsing, "GIVE_BACK_SECONDS", 0.05)
        monkeypatch.setattr(parsing, "give_back", lambda: given.append(None))

        async def scenario() -> None:
            tokenizer, parser = Bytes(), Parser()
            tokenizer.go_on.set()
            await asyncio.gather(*(parse(parser, x, tokenizer, account(x)) for x in "abc"))
            assert parser._gives_back
            await until(lambda: bool(given))
            assert not parser._gives_back

        asyncio.run(scenario())
        give_back()  # the real one harms nothing

    def test_one_text_of_an_identity_at_a_time_others_beside_it(self) -> None:
        async def scenario() -> None:
            tokenizer, parser, mine = Bytes(), Parser(), account("mine")
            reads = [parse(parser, x, tokenizer, mine) for x in "ab"]
            reads.append(parse(parser, "c", tokenizer, account("other")))
            tasks = [asyncio.ensure_future(each) for each in reads]
            await until(lambda: len(tokenizer.reading) == 2)
            assert sorted(tokenizer.reading) == ["a", "c"]
            tokenizer.go_on.set()
            parsed = await asyncio.gather(*tasks)
            assert [each.prompt for each in parsed] == 3 * [[1, 2, 3]]
            assert mine.running == 0

        asyncio.run(scenario())

    def test_what_is_cancelled_before_its_turn_is_never_read(self) -> None:
        async def scenario() -> None:
            tokenizer, parser, mine = Bytes(), Parser(), account("mine")
            first, second = (asyncio.ensure_future(parse(parser, x, tokenizer, mine)) for x in "ab")
            await until(lambda: tokenizer.reading == ["a"])
            assert mine.running == 2
            second.cancel()
            await asyncio.wait([second])
            await until(lambda: mine.running == 1)
            tokenizer.go_on.set()
            await first
            assert tokenizer.reading == ["a"]

        asyncio.run(scenario())

    def test_who_leaves_keeps_the_place_until_the_text_was_read(self) -> None:
        async def scenario() -> None:
            tokenizer, parser, mine = Bytes(), Parser(), account("mine")
            task = asyncio.ensure_future(parse(parser, "a", tokenizer, mine))
            await until(lambda: tokenizer.reading == ["a"])
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            assert mine.running == 1
            assert mine.turn.locked()
            tokenizer.go_on.set()
            await until(lambda: mine.running == 0)
            assert not mine.turn.locked()

        asyncio.run(scenario())


def about(tokenizer: Bytes) -> tuple[Any, RequestLimits]:
    return tokenizer, LIMITS


async def until(reached: Any) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        while not reached():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("most", [None, 10])
@pytest.mark.parametrize("chat", [False, True])
def test_no_tokenizer_sees_more_bytes_than_the_tokens_allow(most: int | None, chat: bool) -> None:
    tokenizer: Any = Bytes()
    tokenizer.go_on.set()
    tokenizer.encode_chat = lambda messages, *_: tokenizer.encode(messages[0]["content"])
    allowed = most or LIMITS.max_model_len - 1
    for more in (0, 1):
        text = "x" * (BYTES_OF_TOKEN * allowed + SPARE_BYTES + more)
        message = pb.GenerateRequest() if chat else pb.GenerateRequest(text=text)
        if chat:
            message.chat.messages.add(role="user", content=text)
        if more:
            with pytest.raises(InputError, match=f"{allowed} tokens are allowed"):
                parse_prompt(message, tokenizer, LIMITS, most)
        else:
            assert parse_prompt(message, tokenizer, LIMITS, most) == [1, 2, 3]
    assert len(tokenizer.reading) == 1
