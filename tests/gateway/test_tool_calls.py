"""Tools as applications use them: with the openai SDK, against a real gateway and a scripted model
that writes calls in every format, byte by byte."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from ssd.v1 import target_pb2 as pb
from tests.client.scripted_target import Script, ScriptedTarget, serve
from tests.gateway.callers import sdk_of
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
        return CONTENT[form] + "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    return "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in CALLS)


def says(form: str, request: pb.GenerateRequest) -> str:
    """Calls, where the template was told of tools, until their results are there."""
    has_results = json.loads(request.chat.messages_json)[-1]["role"] == "tool"
    called = bool(request.chat.tools_json) and not has_results
    return written(form) if called else "It is sunny, and noon."


def script(form: str, **more: Any) -> Script:
    return Script(says=partial(says, form), chat_format=pb.ChatFormat(tools=form), **more)


def ask(client: openai.OpenAI, **content: Any) -> Any:
    asked = {"model": "scripted", "messages": [USER], "tools": TOOLS, **content}
    return client.chat.completions.create(**asked)


@contextmanager
def sdk(folder: Path, *flags: str, targets: list[ScriptedTarget]) -> Iterator[openai.OpenAI]:
    addresses = [each.address for each in targets]
    with gateway(folder, *flags, targets=addresses) as front, sdk_of(front) as client:
        yield client


Pair = tuple[ScriptedTarget, openai.OpenAI]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    """For each format a model, and a client of a gateway before it."""
    with ExitStack() as stack:
        made = {}
        for form in FORMATS:
            model = stack.enter_context(serve(script(form)))
            folder = tmp_path_factory.mktemp(form)
            made[form] = model, stack.enter_context(sdk(folder, targets=[model]))
        yield made


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
def test_two_calls_whole_and_streamed(pairs: dict[str, Pair], form: str, choice: Any) -> None:
    model, client = pairs[form]
    whole = ask(client, tool_choice=choice).choices[0]
    request = model.requests[-1]
    assert json.loads(request.chat.tools_json) == TOOLS
    assert bool(request.grammar.context_free) == (choice != "auto")
    expected = CALLS if isinstance(choice, str) else CALLS[:1]  # the script obeys no grammar
    assert calls_of(whole.message) == expected
    assert whole.finish_reason == "tool_calls"
    assert len({call.id for call in whole.message.tool_calls}) == len(expected)
    (said,) = gathered(ask(client, tool_choice=choice, stream=True)).values()
    assert [tuple(call[1:]) for call in said["calls"]] == expected
    assert all(call[0].startswith("call_") for call in said["calls"])
    content = CONTENT[form] if choice == "auto" else ""  # there is none where calls are forced
    assert (said["content"], said["finish"]) == (content, "tool_calls")
    assert whole.message.content == (content or None)


@pytest.mark.parametrize("form", FORMATS)
def test_results_go_back_to_the_template(pairs: dict[str, Pair], form: str) -> None:
    model, client = pairs[form]
    first = ask(client).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "Sun"} for call in first.tool_calls
    ]
    messages = [USER, first.model_dump(exclude_none=True), *results]
    second = ask(client, messages=messages).choices[0]
    assert (second.message.content, second.message.tool_calls) == ("It is sunny, and noon.", None)
    assert second.finish_reason == "stop"
    user, assistant, *told = json.loads(model.requests[-1].chat.messages_json)
    assert [user, *told] == [USER, *results]
    sent = [(call["id"], call["function"]["arguments"]) for call in assistant["tool_calls"]]
    assert sent == [
        (call.id, json.loads(text)) for call, (_, text) in zip(first.tool_calls, CALLS, strict=True)
    ]
    without = ask(client, tool_choice="none").choices[0]
    assert model.requests[-1].chat.tools_json == b""
    assert (without.message.content, without.finish_reason) == ("It is sunny, and noon.", "stop")


def test_usage_choices_and_log_probabilities_stay(pairs: dict[str, Pair]) -> None:
    more: Any = {"n": 2, "logprobs": True, "stream_options": {"include_usage": True}}
    chunks = list(ask(pairs["hermes"][1], **more, stream=True))
    for said in gathered(chunks).values():
        assert [tuple(call[1:]) for call in said["calls"]] == CALLS
    text = written("hermes").encode()
    assert chunks[-1].usage.completion_tokens == 2 * len(text)
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.logprobs]
    entries = [each for choice in choices if choice.index == 0 for each in choice.logprobs.content]
    assert b"".join(bytes(each.bytes) for each in entries) == text


@pytest.mark.parametrize("form", FORMATS)
def test_a_stream_whose_target_is_lost_goes_on_in_the_call(form: str, tmp_path: Path) -> None:
    with (
        serve(script(form, abort_resumed=False)) as first,
        serve(script(form, abort_resumed=False)) as second,
        sdk(tmp_path, targets=[first, second]) as client,
    ):
        for count in range(5, len(written(form).encode()), 23):
            lost = (count, grpc.StatusCode.UNAVAILABLE, "Socket closed")
            first.script.abort_after = second.script.abort_after = lost
            (said,) = gathered(ask(client, stream=True)).values()
            assert [tuple(call[1:]) for call in said["calls"]] == CALLS
            assert (said["content"], said["finish"]) == (CONTENT[form], "tool_calls")
        assert any(each.generated_token_ids for each in [*first.requests, *second.requests])


def test_thoughts_are_told_beside_content_and_calls(tmp_path: Path) -> None:
    own = pb.ChatFormat(tools="hermes", thinks=True, begins_thinking=True)
    text = f"\nHm – a <tool_call>?\n</think>\n\n{written('hermes')}"
    with (
        serve(Script(says=lambda _: text, chat_format=own)) as model,
        sdk(tmp_path, targets=[model]) as client,
    ):
        message = ask(client).choices[0].message
        assert message.model_extra["reasoning_content"] == "Hm – a <tool_call>?"
        assert (message.content, calls_of(message)) == (CONTENT["hermes"], CALLS)
        (said,) = gathered(ask(client, stream=True)).values()
        assert said["reasoning"] == "Hm – a <tool_call>?"
        assert said["content"] == CONTENT["hermes"]
        quiet = model.script
        quiet.says, quiet.prompt = lambda _: "Yes.", "<think>\n\n</think>\n\n"
        names = {"chat_template_kwargs": {"enable_thinking": False}}
        assert ask(client, extra_body=names).choices[0].message.content == "Yes."
