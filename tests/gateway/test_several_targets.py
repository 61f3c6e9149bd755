"""Several targets behind one gateway: by model, by beginning, and without those that leave."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest

from tests.client.scripted_target import Script, ScriptedTarget, leaving, serve
from tests.gateway.callers import sdk_of
from tests.processes import gateway
from tests.waiting import wait_until

Fleet = tuple[openai.OpenAI, dict[str, ScriptedTarget]]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two that serve the same, and one that serves it under another name."""
    with ExitStack() as stack:
        made = [
            stack.enter_context(serve(Script(name=n, speculation={"rounds": 1})))
            for n in ("twin", "twin", "other")
        ]
        targets = {each.address: each for each in made}
        folder = tmp_path_factory.mktemp("fleet")
        front = stack.enter_context(gateway(folder, targets=list(targets)))
        wait_until(lambda: front.log().count("is ready") == 3, front.log)
        yield stack.enter_context(sdk_of(front)), targets


def served_by(sdk: openai.OpenAI, prompt: str, model: str = "twin") -> str:
    answer: Any = sdk.completions.create(model=model, prompt=prompt, max_tokens=1)
    return str(answer.model_extra["metrics"]["ssd"]["target"])


def test_a_model_is_asked_of_those_who_serve_it(fleet: Fleet) -> None:
    sdk, targets = fleet
    assert {model.id for model in sdk.models.list().data} == {"twin", "other"}
    other = list(targets)[2]
    assert {served_by(sdk, f"Story {i}", "other") for i in range(6)} == {other}
    assert {served_by(sdk, f"Story {i}") for i in range(24)} == set(targets) - {other}


def test_the_same_beginning_goes_to_the_same_target_until_that_drains(fleet: Fleet) -> None:
    sdk, targets = fleet
    (first,) = {served_by(sdk, "Of a target that leaves") for _ in range(4)}
    targets[first].script.refuse = leaving("it drains", 30.0)
    (second,) = {served_by(sdk, "Of a target that leaves") for _ in range(4)}
    assert second != first
