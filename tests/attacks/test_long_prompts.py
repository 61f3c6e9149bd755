"""Many long prompts of one caller do not hold up the short one of another."""

import threading

from tests.attacks.conftest import (
    ATTACKER,
    OTHER,
    TOKEN_FILE,
    Attacked,
    bearer,
    generate,
    request,
)
from tests.process_tree import engine_held
from tests.security.certificates import replace
from tests.waiting import HANG_SECONDS, wait_until

LONG = "word " * 1200


def test_a_short_prompt_is_answered_before_twenty_long_ones(attacked: Attacked) -> None:
    unlimited = TOKEN_FILE.replace("limit_requests = 1\nlimit_prompt_tokens = 100\n", "")
    replace(attacked.token_file, unlimited.encode())
    submitted: list[str] = []
    answered: list[str] = []

    def follow(name: str, token: str, prompt: str) -> threading.Thread:
        def work() -> None:
            stub = attacked.stub(channel)
            call = stub.Generate(
                request(prompt, tokens=1), timeout=HANG_SECONDS, metadata=bearer(token)
            )
            for response in call:
                if response.WhichOneof("event") == "started":
                    submitted.append(name)
                elif response.WhichOneof("event") == "tokens":
                    answered.append(name)

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    with attacked.target.channel() as channel:
        assert generate(channel, OTHER, request())
        with engine_held(attacked.target.process.pid):
            threads = [follow("long", ATTACKER, f"{i} {LONG}") for i in range(20)]
            wait_until(lambda: len(submitted) == 20, "all long ones are submitted")
            threads.append(follow("short", OTHER, "Once upon a time"))
            wait_until(lambda: len(submitted) == 21, "the short one comes last")
        for thread in threads:
            thread.join(HANG_SECONDS)
    replace(attacked.token_file, TOKEN_FILE.encode())
    assert len(answered) == 21
    # What had come before the engine stood still may be read first.
    assert answered.index("short") <= 2, answered
