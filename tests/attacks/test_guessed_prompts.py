"""Nobody finds out what another identity has asked, by what is cached of it."""

from types import SimpleNamespace
from typing import Any

import grpc

from ssd.v1 import target_pb2 as pb
from ssd_engine.text.token_ids import pack_tokens
from ssd_target.front.requests import RequestLimits, parse_request
from ssd_target.records.speculation_options import SpeculationRequest
from tests.attacks.conftest import ATTACKER, OTHER, Attacked, answer, request

SECRET = "Tell nobody that the little fox has hidden its honey under the old oak tree by the lake. "


def cached(channel: grpc.Channel, token: str, salt: str = "") -> int:
    """Prompt tokens that the server says it has found."""
    message = request(SECRET)
    message.cache_salt = salt
    return int(answer(channel, token, message).finish.usage.cached_prompt_tokens)


def test_a_prompt_of_another_identity_is_not_found_in_the_cache(attacked: Attacked) -> None:
    with attacked.target.channel() as channel:
        for token in (OTHER, ATTACKER):
            assert cached(channel, token) == 0
            assert cached(channel, token) >= 16


def test_a_salt_keeps_prompts_of_one_identity_apart(attacked: Attacked) -> None:
    with attacked.target.channel() as channel:
        assert cached(channel, OTHER, "tenant 1") == 0
        assert cached(channel, OTHER, "tenant 2") == 0
        assert cached(channel, OTHER, "tenant 1") >= 16
        # One that looks like another identity's scope is none.
        assert cached(channel, ATTACKER, "\0tenant 1") == 0


def test_an_operator_may_let_identities_share() -> None:
    prompt = pb.GenerateRequest(token_ids=pack_tokens([1]), cache_salt="s")
    tokenizer: Any = SimpleNamespace(token_bytes=[b"x"] * 300)
    parsed = parse_request(prompt, tokenizer, LIMITS)
    alone, shared = (
        [parsed.submit(1, SpeculationRequest(), owner, share).scope for owner in ("a", "b")]
        for share in (False, True)
    )
    assert shared[0] == shared[1]
    assert len({*alone, *shared}) == 3


LIMITS = RequestLimits(vocab_size=300, max_model_len=100, kv_tokens=100, eos_token_ids=())
