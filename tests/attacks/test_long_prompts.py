"""Many long prompts of one caller do not hold up the short one of another."""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

from tests.attacks.conftest import (
    OTHER,
    UNLIMITED,
    Attacked,
    bearer,
    generate,
    request,
)
from tests.process_tree import engine_held
from tests.waiting import HANG_SECONDS, wait_until

LONG = "word " * 400
MANY = 6


def test_a_short_prompt_is_answered_before_many_long_ones(attacked: Attacked) -> None:
    seen: dict[str | None, list[str]] = defaultdict(list)

    def follow(name: str, token: str, prompt: str) -> None:
        asked = request(prompt, tokens=1)
        stub = attacked.stub(channel)
        for response in stub.Generate(asked, timeout=HANG_SECONDS, metadata=bearer(token)):
            seen[response.WhichOneof("event")].append(name)

    with (
        attacked.target.channel() as channel,
        ThreadPoolExecutor(MANY + 1) as pool,
    ):
        assert generate(channel, OTHER, request())
        with engine_held(attacked.target.process.pid):
            for number in range(MANY):
                pool.submit(follow, "long", UNLIMITED, f"{number} {LONG}")
            wait_until(lambda: len(seen["started"]) == MANY, "all long ones are submitted")
            pool.submit(follow, "short", OTHER, "Once upon a time")
            wait_until(lambda: len(seen["started"]) == MANY + 1, "the short one comes last")
    assert len(seen["tokens"]) == MANY + 1
    # What had come before the engine stood still may be read first.
    assert seen["tokens"].index("short") <= 2, seen
