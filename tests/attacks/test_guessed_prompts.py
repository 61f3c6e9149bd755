"""Nobody finds out what another identity has asked, by what is cached of it."""

import grpc

from ssd.v1 import target_pb2 as pb
from ssd_target.front.requests import RequestLimits, parse_request
from tests.attacks.conftest import ATTACKER, OTHER, Attacked, bearer, request
from tests.processes import collect
from tests.waiting import HANG_SECONDS

SECRET = "Tell nobody that the little fox has hidden its honey under the old oak tree by the lake. "


def cached(attacked: Attacked, channel: grpc.Channel, token: str, salt: str = "") -> int:
    """Prompt tokens that the server says it has found."""
    message = request(SECRET)
    message.cache_salt = salt
    call = attacked.stub(channel).Generate(message, timeout=HANG_SECONDS, metadata=bearer(token))
    return int(collect(call).finish.usage.cached_prompt_tokens)


def test_a_prompt_of_another_identity_is_not_found_in_the_cache(attacked: Attacked) -> None:
    with attacked.target.channel() as channel:
        assert cached(attacked, channel, OTHER) == 0
        assert cached(attacked, channel, OTHER) >= 16
        assert cached(attacked, channel, ATTACKER) == 0
        assert cached(attacked, channel, ATTACKER) >= 16


def test_a_salt_keeps_prompts_of_one_identity_apart(attacked: Attacked) -> None:
    with attacked.target.channel() as channel:
        assert cached(attacked, channel, OTHER, "tenant 1") == 0
        assert cached(attacked, channel, OTHER, "tenant 2") == 0
        assert cached(attacked, channel, OTHER, "tenant 1") >= 16
        # One that looks like another identity's scope is none.
        assert cached(attacked, channel, ATTACKER, "\0tenant 1") == 0


def test_an_operator_may_let_identities_share() -> None:
    class Words:
        token_bytes = [b"x"] * 300

        def encode(self, text: str) -> list[int]:
            return list(text.encode())

        def fewest_tokens(self, size: int) -> int:
            return 1

    parsed = parse_request(pb.GenerateRequest(text="a", cache_salt="s"), Words(), LIMITS)  # type: ignore[arg-type]
    scopes = {
        (owner, shared): parsed.submit(1, None, owner, shared).scope  # type: ignore[arg-type]
        for owner in ("a", "b")
        for shared in (False, True)
    }
    assert scopes["a", True] == scopes["b", True]
    assert len(set(scopes.values())) == 3


LIMITS = RequestLimits(vocab_size=300, max_model_len=100, kv_tokens=100, eos_token_ids=())
