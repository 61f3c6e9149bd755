"""Tools as applications use them: with the openai SDK, against a real gateway and a scripted model
that writes calls in every format, byte by byte."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from ssd.v1 import target_pb2 as pb
from tests.gateway.scripted_model import ScriptedModel, serving
from tests.processes import gateway

CALLS = [
    ("get_weather", '{"city": "Zürich 🙂", "days": [1, 2], "note": "a \\"b\\" </tool_call> {"}'),
    ("get_time", '{"zone": null}'),
]
CONTENT = {"hermes": "I will look – both.\n", "llama3": ""}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Tells the {name}.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    for name, _ in CALLS
]
USER = {"role": "user", "content": "Weather and time in Zürich?"}
FORMATS = sorted(CONTENT)


def written(form: str) -> str:
    if form == "hermes":
        objects = [f'{{"name": "{name}", "arguments": {text}}}' for name, text in CALLS]
        tagged = [f"<tool_call>\n{each}\n</tool_call>" for each in objects]
        return CONTENT[form] + "\n".join(tagged)
    return "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in CALLS)


def says(form: str, request: pb.GenerateRequest) -> str:
    """Calls, where the template was told of tools, until their results are there."""
    has_results = json.loads(request.chat.messages_json)[-1]["role"] == "tool"
    called = bool(request.chat.tools_json) and not has_results
    return written(form) if called else "It is sunny, and noon."


class Fleet:
    """A gateway before one scripted model for each format."""

    def __init__(self, models: dict[str, ScriptedModel], clients: dict[str, openai.OpenAI]) -> None:
        self.models, self._clients = models, clients

    def ask(self, form: str, **content: Any) -> Any:
        ask = {"model": "scripted", "messages": [USER], "tools": TOOLS, **content}
        return self._clients[form].chat.completions.create(**ask)

    def last(self, form: str) -> pb.GenerateRequest:
        return self.models[form].requests[-1]


@contextmanager
def sdk(folder: Path, *models: ScriptedModel, flags: tuple[str, ...] = ()) -> Iterator[Any]:
    addresses = [each.address for each in models]
    with (
        gateway(folder, *flags, targets=addresses) as front,
        openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        models, clients = {}, {}
        for form in FORMATS:
            model = ScriptedModel(pb.ChatFormat(tools=form), lambda asked, f=form: says(f, asked))
            models[form] = stack.enter_context(serving(model))
            folder = tmp_path_factory.mktemp(form)
            clients[form] = stack.enter_context(sdk(folder, models[form]))
        yield Fleet(models, clients)


def gathered(chunks: Any) -> dict[int, dict[str, Any]]:
    """What each choice of a stream has said: its message, as one would put it together."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            said = choices.setdefault(
                choice.index, {"reasoning": "", "content": "", "calls": [], "finish": None}
            )
            said["content"] += choice.delta.content or ""
            said["reasoning"] += (choice.delta.model_extra or {}).get("reasoning_content", "")
            for call in choice.delta.tool_calls or []:
                if call.id is not None:
                    assert call.index == len(said["calls"])
                    said["calls"].append([call.id, call.function.name, ""])
                said["calls"][call.index][2] += call.function.arguments
            said["finish"] = choice.finish_reason or said["finish"]
    return choices


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "choice",
    ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}],
    ids=["auto", "required", "named"],
)
def test_two_calls_whole_and_streamed(fleet: Fleet, form: str, choice: Any) -> None:
    whole = fleet.ask(form, tool_choice=choice).choices[0]
    request = fleet.last(form)
    assert json.loads(request.chat.tools_json) == TOOLS
    assert bool(request.grammar.context_free) == (choice != "auto")
    expected = CALLS if isinstance(choice, str) else CALLS[:1]  # the script obeys no grammar
    assert calls_of(whole.message) == expected
    assert whole.finish_reason == "tool_calls"
    ids = [call.id for call in whole.message.tool_calls]
    assert len(set(ids)) == len(ids)
    assert all(each.startswith("call_") for each in ids)
    (said,) = gathered(fleet.ask(form, tool_choice=choice, stream=True)).values()
    assert [tuple(call[1:]) for call in said["calls"]] == expected
    assert said["content"] == (whole.message.content or "")
    assert said["finish"] == "tool_calls"
    content = CONTENT[form] if choice == "auto" else ""  # there is none where calls are forced
    assert whole.message.content == (content or None)


@pytest.mark.parametrize("form", FORMATS)
def test_results_go_back_to_the_template(fleet: Fleet, form: str) -> None:
    first = fleet.ask(form).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"result {i}"}
        for i, call in enumerate(first.tool_calls)
    ]
    messages = [USER, first.model_dump(exclude_none=True), *results]
    second = fleet.ask(form, messages=messages).choices[0]
    assert (second.message.content, second.message.tool_calls) == ("It is sunny, and noon.", None)
    assert second.finish_reason == "stop"
    chat = fleet.last(form).chat
    assert json.loads(chat.tools_json) == TOOLS
    user, assistant, *told = json.loads(chat.messages_json)
    assert user == USER
    assert assistant["role"] == "assistant"
    assert [call["id"] for call in assistant["tool_calls"]] == [c.id for c in first.tool_calls]
    assert [
        (call["function"]["name"], call["function"]["arguments"])
        for call in assistant["tool_calls"]
    ] == [(name, json.loads(text)) for name, text in CALLS]
    assert told == results


@pytest.mark.parametrize("form", FORMATS)
def test_without_tools_nothing_is_a_call(fleet: Fleet, form: str) -> None:
    answer = fleet.ask(form, tool_choice="none").choices[0]
    assert fleet.last(form).chat.tools_json == b""
    assert (answer.message.content, answer.finish_reason) == ("It is sunny, and noon.", "stop")


def test_usage_choices_and_log_probabilities_stay(fleet: Fleet) -> None:
    ask: Any = {"n": 2, "logprobs": True, "stream_options": {"include_usage": True}}
    chunks = list(fleet.ask("hermes", **ask, stream=True))
    for said in gathered(chunks).values():
        assert [tuple(call[1:]) for call in said["calls"]] == CALLS
    size = len(written("hermes").encode())
    assert chunks[-1].usage.completion_tokens == 2 * size
    entries = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.index == 0 and choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert b"".join(bytes(each.bytes) for each in entries).decode() == written("hermes")


@pytest.mark.parametrize("form", FORMATS)
def test_a_stream_whose_target_is_lost_goes_on_in_the_call(form: str, tmp_path: Path) -> None:
    own = pb.ChatFormat(tools=form)
    models = [ScriptedModel(own, lambda asked: says(form, asked)) for _ in range(2)]
    with (
        serving(models[0]) as first,
        serving(models[1]) as second,
        sdk(tmp_path, first, second) as client,
    ):
        for lost_after in range(5, len(written(form).encode()), 23):
            first.dies_after = second.dies_after = lost_after
            chunks = client.chat.completions.create(
                model="scripted", messages=[USER], tools=TOOLS, stream=True
            )
            (said,) = gathered(chunks).values()
            assert [tuple(call[1:]) for call in said["calls"]] == CALLS
            assert (said["content"], said["finish"]) == (CONTENT[form], "tool_calls")
        assert any(each.generated_token_ids for each in [*first.requests, *second.requests])


def test_thoughts_are_told_beside_content_and_calls(tmp_path: Path) -> None:
    own = pb.ChatFormat(tools="hermes", thinks=True, begins_thinking=True)
    text = f"\nHm – a <tool_call>?\n</think>\n\n{written('hermes')}"
    with serving(ScriptedModel(own, lambda _: text)) as model, sdk(tmp_path, model) as client:
        ask: Any = {"model": "scripted", "messages": [USER], "tools": TOOLS}
        message = client.chat.completions.create(**ask).choices[0].message
        assert message.model_extra["reasoning_content"] == "Hm – a <tool_call>?"
        assert (message.content, calls_of(message)) == (CONTENT["hermes"], CALLS)
        (said,) = gathered(client.chat.completions.create(**ask, stream=True)).values()
        assert said["reasoning"] == "Hm – a <tool_call>?"
        assert said["content"] == CONTENT["hermes"]
        model.says, model.prompt = lambda _: "Yes.", "<think>\n\n</think>\n\n"
        quiet = {"chat_template_kwargs": {"enable_thinking": False}}
        answer = client.chat.completions.create(**ask, extra_body=quiet).choices[0]
        assert answer.message.content == "Yes."


def test_the_operator_names_the_format_of_a_model_that_does_not_tell(tmp_path: Path) -> None:
    ask: Any = {"model": "scripted", "messages": [USER], "tools": TOOLS}
    model = ScriptedModel(pb.ChatFormat(), lambda asked: says("llama3", asked))
    with serving(model), sdk(tmp_path / "auto", model) as client:
        with pytest.raises(openai.BadRequestError, match="--tool-parser") as caught:
            client.chat.completions.create(**ask)
        assert caught.value.param == "tools"
        flags = ("--tool-parser", "llama3")
        with sdk(tmp_path / "named", model, flags=flags) as told:
            message = told.chat.completions.create(**ask).choices[0].message
            assert calls_of(message) == CALLS
