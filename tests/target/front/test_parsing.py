"""Chats whose templates take long are read last, and hold nobody up."""

import asyncio
from pathlib import Path

import pytest

from ssd.v1 import target_pb2 as pb
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.text.tokenizer import ChatTemplate, Tokenizer
from ssd_serving.security.allowances import Allowance, Identity, IdentityAccount
from ssd_target.front.parsing import Parser
from ssd_target.front.requests import ParsedRequest, RequestLimits
from tests.event_loop import on_event_loop
from tests.waiting import HANG_SECONDS

LONG = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATE = "{{ messages[0].content }}{% if messages[0].content == 'long' %}" + LONG + "{% endif %}"
LIMITS = RequestLimits(vocab_size=4096, max_model_len=512, kv_tokens=512, eos_token_ids=())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    shipped = resolve_model("stories-target")
    template = ChatTemplate(Path("chats.jinja"), TEMPLATE)
    tokenizer = Tokenizer(shipped, load_model_config(shipped), template)
    tokenizer.check_template()
    return tokenizer


class Chats:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._parser = tokenizer, Parser()
        self._accounts: dict[str, IdentityAccount] = {}

    def send(self, name: str, text: str) -> "asyncio.Task[ParsedRequest]":
        account = self._accounts.setdefault(name, IdentityAccount(Identity(name), Allowance(), 0.0))
        chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=text)])
        data = pb.GenerateRequest(chat=chat).SerializeToString()
        return asyncio.ensure_future(
            self._parser.parse(data, self._tokenizer, LIMITS, account, name)
        )


@pytest.mark.parametrize("who", ["hog-0", "other"])
@on_event_loop
async def test_short_chats_pass_long_ones_of_anybody(who: str, tokenizer: Tokenizer) -> None:
    chats = Chats(tokenizer)
    long = [chats.send(f"hog-{i % 4}", "long") for i in range(8)]
    await asyncio.sleep(0)
    async with asyncio.timeout(HANG_SECONDS):
        for _ in range(3):
            assert (await chats.send(who, "short")).prompt
    assert not any(each.done() for each in long)
