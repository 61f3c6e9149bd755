"""Chats whose templates take long are read last, and hold nobody up."""

import asyncio
import json
import shutil

import pytest

from ssd.v1 import target_pb2 as pb
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.text.tokenizer import Tokenizer
from ssd_serving.security.allowances import Allowance, Identity, IdentityAccount
from ssd_target.front.parsing import Parser
from ssd_target.front.requests import ParsedRequest, RequestLimits
from tests.waiting import HANG_SECONDS

LONG = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATE = "{{ messages[0].content }}{% if messages[0].content == 'long' %}" + LONG + "{% endif %}"
LIMITS = RequestLimits(vocab_size=4096, max_model_len=512, kv_tokens=512, eos_token_ids=())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    shipped = resolve_model("stories-target")
    folder = tmp_path_factory.mktemp("chats")
    for file in shipped.glob("*.json"):
        shutil.copy(file, folder / file.name)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    changed = json.dumps({**config, "chat_template": TEMPLATE})
    (folder / "tokenizer_config.json").write_text(changed)
    tokenizer = Tokenizer(folder, load_model_config(shipped))
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
def test_short_chats_pass_long_ones_of_anybody(who: str, tokenizer: Tokenizer) -> None:
    async def work() -> None:
        chats = Chats(tokenizer)
        long = [chats.send(f"hog-{i % 4}", "long") for i in range(8)]
        await asyncio.sleep(0)
        async with asyncio.timeout(HANG_SECONDS):
            for _ in range(3):
                assert (await chats.send(who, "short")).prompt
        assert not any(each.done() for each in long)

    asyncio.run(work())
