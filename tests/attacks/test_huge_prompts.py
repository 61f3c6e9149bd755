"""Texts that are far longer than any prompt that their sender may have."""

import asyncio
import functools
import gzip
import re
import threading
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

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
    RequestLimits,
    largest_request,
    parse_prompt,
)
from tests.attacks.conftest import ATTACKER, OTHER, Attacked, bearer, generate, request
from tests.waiting import HANG_SECONDS, wait_until_async
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
            with pytest.raises(grpc.RpcError, match=why) as caught:
                generate(channel, ATTACKER, request("word " * (size // 5)))
            assert caught.value.code() is code
        assert peak_bytes(pid) - before < 40 * MIB
        assert generate(channel, OTHER, request()) == expected


GENERATE = "/ssd.v1.TargetService/Generate"


def test_many_at_once_are_not_all_kept_in_memory(attacked: Attacked) -> None:
    """Neither as they are, nor compressed: that would be a few bytes for each kilobyte of ours."""
    pid, address = attacked.target.process.pid, attacked.target.address
    message = pb.GenerateRequest(text="\0" * 15 * MIB).SerializeToString()
    small = framed(gzip.compress(message), 1)
    assert len(small) < 20_000
    before = peak_bytes(pid)
    about = {"timeout": HANG_SECONDS, "metadata": bearer(ATTACKER)}
    head = headers(GENERATE, [("grpc-encoding", "gzip"), *bearer(ATTACKER)])
    with ExitStack() as stack:  # each has a connection of its own
        channels = [stack.enter_context(attacked.target.channel()) for _ in range(MANY)]
        whole = [each.unary_unary(GENERATE).future(message, **about) for each in channels]
        assert {call.code() for call in whole} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        clients = [stack.enter_context(RawConnection(address)) for _ in range(MANY)]
        calls = [(client, client.call(head, small)) for client in clients]
        statuses = {client.until_ended(call).status for client, call in calls}
        assert statuses == {(12, "Compression algorithm 'gzip' is disabled.")}
        assert peak_bytes(pid) - before < 3 * MANY * largest_request(2048)
        assert generate(channels[0], OTHER, request())


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
    share = size // MAX_CHAT_MESSAGES
    one = {"role": "r" * MAX_ROLE_BYTES, "content": "c" * share}
    kinds: dict[str, Any] = {
        "text": {"text": "t" * size},
        "chat": {"chat": {"messages": MAX_CHAT_MESSAGES * [one]}},
        "json": {"chat": {"messages_json": b"j" * (size + MAX_JSON_SYNTAX_BYTES)}},
    }
    message.MergeFrom(pb.GenerateRequest(**kinds[kind]))
    if kind != "text":
        message.chat.template_kwargs.update({"x": "k" * (MAX_TEMPLATE_KWARGS_BYTES - 20)})
    message.stop.strings.extend(MAX_STOP_STRINGS * ["s" * (MAX_STOP_BYTES // MAX_STOP_STRINGS)])
    message.stop.token_ids.extend(MAX_STOP_TOKEN_IDS * [2**32 - 1])
    message.sampling.logit_bias.update({2**32 - 1 - i: 1.5 for i in range(MAX_LOGIT_BIAS_ENTRIES)})
    message.speculation.endpoints.extend(16 * ["e" * 300])
    assert message.ByteSize() < largest_request(length)


SIZE = len(pb.GenerateRequest(text="a" * (INLINE_BYTES + 1)).SerializeToString())


class Reader:
    """Reads texts when it is let go on, and knows which it has begun."""

    def __init__(self) -> None:
        self._parser, self.go_on = Parser(), threading.Event()
        self.begun: list[str] = []

    def read(self, letter: str, account: IdentityAccount) -> "asyncio.Task[str]":
        """Of a text of this letter."""

        def work(message: pb.GenerateRequest) -> str:
            self.begun.append(message.text[0])
            assert self.go_on.wait(HANG_SECONDS)
            return message.text[0]

        data = pb.GenerateRequest(text=letter * (INLINE_BYTES + 1)).SerializeToString()
        name = account.identity.name
        return asyncio.ensure_future(
            self._parser.read(pb.GenerateRequest, data, work, account, name)
        )


def account(name: str) -> IdentityAccount:
    return IdentityAccount(Identity(name), Allowance(), 0.0)


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        asyncio.run(test(*arguments, **fixtures))

    return run


class TestWhatIsBeingRead:
    @on_a_loop
    async def test_texts_that_wait_have_a_bound_in_bytes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Those of an identity, and those of all; it is free again when they were read, and one
        that is longer than the bound is read alone."""
        monkeypatch.setattr(parsing, "MAX_HELD_OF_ONE", 2 * SIZE)
        monkeypatch.setattr(parsing, "MAX_HELD", 3 * SIZE)
        reader = Reader()
        accounts = [account(name) for name in ("one", "one", "one", "two", "two")]
        tasks = [reader.read("a", each) for each in accounts]
        await wait_until_async(lambda: sum(task.done() for task in tasks) == 2)
        for task, most in ((tasks[2], 2 * SIZE), (tasks[4], 3 * SIZE)):
            with pytest.raises(ServerFull, match=f"at most {most} may"):
                await task
        reader.go_on.set()
        assert await asyncio.gather(*(tasks[i] for i in (0, 1, 3))) == ["a", "a", "a"]
        monkeypatch.setattr(parsing, "MAX_HELD_OF_ONE", 1)
        assert await reader.read("b", accounts[0]) == "b"

    @on_a_loop
    async def test_memory_of_long_texts_is_given_back_once_for_many(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given: list[str] = []
        monkeypatch.setattr(parsing, "LONG_BYTES", INLINE_BYTES)
        monkeypatch.setattr(parsing, "GIVE_BACK_SECONDS", 0.05)
        monkeypatch.setattr(parsing, "give_back", lambda: given.append("memory"))
        reader = Reader()
        reader.go_on.set()
        await asyncio.gather(*(reader.read(x, account(x)) for x in "abc"))
        await wait_until_async(lambda: given)
        await reader.read("d", account("d"))
        await wait_until_async(lambda: len(given) == 2)
        give_back()  # the real one harms nothing

    @on_a_loop
    async def test_one_text_of_an_identity_at_a_time_others_beside_it(self) -> None:
        """What is cancelled before its turn is never read; who leaves later keeps the place until
        the text was read."""
        reader, mine = Reader(), account("mine")
        tasks = [reader.read(x, mine) for x in "abc"]
        tasks.append(reader.read("d", account("other")))
        await wait_until_async(lambda: len(reader.begun) == 2)
        assert sorted(reader.begun) == ["a", "d"]
        tasks[1].cancel()
        await wait_until_async(lambda: mine.running == 2)
        tasks[0].cancel()
        await asyncio.wait(tasks[:2])
        assert (mine.running, mine.turn.locked(), len(reader.begun)) == (2, True, 2)
        reader.go_on.set()
        assert await asyncio.gather(*tasks[2:]) == ["c", "d"]
        assert (mine.running, mine.turn.locked()) == (0, False)
        assert sorted(reader.begun) == ["a", "c", "d"]


@pytest.mark.parametrize("most", [None, 10])
@pytest.mark.parametrize("chat", [False, True])
def test_no_tokenizer_sees_more_bytes_than_the_tokens_allow(most: int | None, chat: bool) -> None:
    answers = {"encode": [1, 2, 3], "encode_chat": [1, 2, 3], "fewest_tokens": 1}
    tokenizer = Mock(**{f"{name}.return_value": answer for name, answer in answers.items()})
    tokenizer.token_bytes = [b"x"] * 300
    allowed = most or LIMITS.max_model_len - 1
    longest, longer = (
        pb.ChatMessage(role="user", content="x" * (BYTES_OF_TOKEN * allowed + SPARE_BYTES + more))
        for more in (0, 1)
    )

    def parse(said: pb.ChatMessage) -> list[int]:
        about: Any = {"chat": {"messages": [said]}} if chat else {"text": said.content}
        return parse_prompt(pb.GenerateRequest(**about), tokenizer, LIMITS, most)

    assert parse(longest) == [1, 2, 3]
    with pytest.raises(InputError, match=f"{allowed} tokens are allowed"):
        parse(longer)
    assert tokenizer.encode.call_count + tokenizer.encode_chat.call_count == 1
