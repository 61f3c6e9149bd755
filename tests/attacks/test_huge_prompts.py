"""Texts that are far longer than any prompt that their sender may have."""

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from ssd.v1 import target_pb2 as pb
from ssd_engine.errors import InputError
from ssd_engine.serving.allowances import Account, Allowance, Identity
from ssd_target.parsing import INLINE_BYTES, Parser
from ssd_target.requests import BYTES_OF_TOKEN, SPARE_BYTES, Limits, parse_prompt
from tests.attacks.conftest import ATTACKER, OTHER, Attacked, bearer, generate, request
from tests.waiting import HANG_SECONDS

MIB = 1 << 20
LIMITS = Limits(vocab_size=300, max_model_len=100_000, kv_tokens=100_000, eos_token_ids=())


def peak_bytes(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return 1024 * int(found[1])


def test_what_is_too_long_for_its_sender_is_refused_unread(attacked: Attacked) -> None:
    pid = attacked.target.process.pid
    with attacked.target.channel() as channel:
        expected = generate(channel, OTHER, request())
        before = peak_bytes(pid)
        for size, why in ((20_000, "100 tokens are allowed"), (8 * MIB, "beyond the context")):
            call = attacked.stub(channel).Generate(
                request("word " * (size // 5)), timeout=HANG_SECONDS, metadata=bearer(ATTACKER)
            )
            with pytest.raises(grpc.RpcError, match=why) as caught:
                next(call)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert peak_bytes(pid) - before < 150 * MIB  # the message itself, a few times
        assert generate(channel, OTHER, request()) == expected


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


def account(name: str) -> Account:
    return Account(Identity(name), Allowance(), 0.0)


def long_request(letter: str) -> bytes:
    return pb.GenerateRequest(text=letter * (INLINE_BYTES + 1)).SerializeToString()


class TestWhatIsBeingRead:
    def test_one_text_of_an_identity_at_a_time_others_beside_it(self) -> None:
        async def scenario() -> None:
            tokenizer, parser, mine = Bytes(), Parser(), account("mine")
            reads = [parser.parse(long_request(x), *about(tokenizer), mine) for x in "ab"]
            reads.append(parser.parse(long_request("c"), *about(tokenizer), account("other")))
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
            first, second = (
                asyncio.ensure_future(parser.parse(long_request(x), *about(tokenizer), mine))
                for x in "ab"
            )
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
            task = asyncio.ensure_future(parser.parse(long_request("a"), *about(tokenizer), mine))
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


def about(tokenizer: Bytes) -> tuple[Any, Limits]:
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
    tokenizer.encode_chat = lambda messages, kwargs: tokenizer.encode(messages[0]["content"])
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
