"""Several targets behind one gateway: by model, by beginning, and without those that leave."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest

from tests.processes import TargetProcess, gateway, target
from tests.waiting import wait_until

Fleet = tuple[openai.OpenAI, dict[str, TargetProcess]]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two that serve the same, and one that serves it under another name."""
    folder = tmp_path_factory.mktemp("fleet")
    with ExitStack() as stack:
        serving = [
            stack.enter_context(target(folder / str(i), "--name", name, ready=False))
            for i, name in enumerate(("twin", "twin", "other"))
        ]
        addresses = [each.address for each in serving]
        front = stack.enter_context(gateway(folder / "gateway", targets=addresses, ready=False))
        wait_until(lambda: front.log().count("is ready") == 3, front.log)
        sdk = openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0)
        yield stack.enter_context(sdk), {each.address: each for each in serving}


def served_by(sdk: openai.OpenAI, prompt: str, model: str = "twin") -> str:
    answer: Any = sdk.completions.create(model=model, prompt=prompt, max_tokens=1)
    return str(answer.model_extra["metrics"]["ssd"]["target"])


def test_a_model_is_asked_of_those_who_serve_it(fleet: Fleet) -> None:
    sdk, targets = fleet
    assert {model.id for model in sdk.models.list().data} == {"twin", "other"}
    other = list(targets)[2]
    assert {served_by(sdk, f"Story {i}", "other") for i in range(6)} == {other}
    assert {served_by(sdk, f"Story {i}") for i in range(12)} == set(targets) - {other}


def test_the_same_beginning_goes_to_the_same_target(fleet: Fleet) -> None:
    sdk, _ = fleet
    for i in range(4):
        assert len({served_by(sdk, f"Beginning {i}") for _ in range(3)}) == 1


def test_a_target_that_drains_gets_no_more(fleet: Fleet) -> None:
    sdk, targets = fleet
    first = served_by(sdk, "Of a target that leaves")
    targets[first].terminate()
    others = {served_by(sdk, "Of a target that leaves") for _ in range(4)}
    assert first not in others
    assert len(others) == 1
