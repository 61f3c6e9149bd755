"""litellm: its functions, and its router with a fallback to a longer context."""

from typing import Any

import litellm
import scenarios
from scenarios import (
    KEY,
    MODEL,
    SHORT_MODEL,
    STORY,
    TOO_LONG,
    TOO_LONG_FOR_SHORT,
    TOOL,
    URL,
    check,
    check_weather,
    raises,
    scenario,
)
from trip import Trip

LONG: Any = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY}
SHORT: Any = {**LONG, "model": f"openai/{SHORT_MODEL}"}
ASK: Any = {**LONG, "messages": [{"role": "user", "content": STORY}]}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


def asking(text: str) -> Any:
    return [{"role": "user", "content": text}]


def router() -> litellm.Router:
    models = {"short": SHORT, "long": LONG}
    return litellm.Router(
        model_list=[
            {"model_name": name, "litellm_params": params} for name, params in models.items()
        ],
        context_window_fallbacks=[{"short": ["long"]}],
    )


@scenario("models")
def models() -> None:
    found = litellm.get_valid_models(
        check_provider_endpoint=True, custom_llm_provider="openai", api_base=URL, api_key=KEY
    )
    check(any(MODEL in name for name in found), found)


@scenario("chat")
def chat() -> None:
    answer: Any = litellm.completion(**ASK)
    check(answer.choices[0].message.content, answer)
    check(answer.usage.completion_tokens > 0, answer)


@scenario("chat, streamed")
def streamed() -> None:
    chunks: Any = list(litellm.completion(**ASK, stream=True))
    check("".join(each.choices[0].delta.content or "" for each in chunks), chunks)
    check(chunks[-1].choices[0].finish_reason in ("stop", "length"), chunks[-1])


@scenario("chat, streamed with usage")
def usage() -> None:
    chunks: Any = list(
        litellm.completion(**ASK, stream=True, stream_options={"include_usage": True})
    )
    check(chunks[-1].usage.completion_tokens > 0, chunks[-1])
    whole: Any = litellm.stream_chunk_builder(chunks)
    check(whole.choices[0].message.content, whole)


@scenario("chat, asynchronous")
async def asynchronous() -> None:
    answer: Any = await litellm.acompletion(**ASK, max_tokens=20)
    check(answer.choices[0].message.content, answer)
    stream: Any = await litellm.acompletion(**ASK, max_tokens=20, stream=True)
    check([chunk async for chunk in stream], "no chunk")


@scenario("completion")
def completion() -> None:
    ask: Any = {**LONG, "model": f"text-completion-openai/{MODEL}", "prompt": "Once upon a time"}
    answer: Any = litellm.text_completion(**ask)
    check(answer.choices[0].text, answer)
    check(list(litellm.text_completion(**ask, stream=True)), "no chunk")


@scenario("tool, named")
def named() -> None:
    answer: Any = litellm.completion(**ASK, tools=[TOOL], tool_choice=NAMED)
    (call,) = answer.choices[0].message.tool_calls
    check_weather(call.function.arguments)


@scenario("tool, required, and its result")
def required() -> None:
    answer: Any = litellm.completion(
        **ASK, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    message = answer.choices[0].message
    (call,) = message.tool_calls
    check_weather(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    told: Any = litellm.completion(
        **{**ASK, "messages": [*ASK["messages"], message, result]}, tools=[TOOL]
    )
    check(told.choices[0].finish_reason, told)


@scenario("tool, streamed")
def tool_streamed() -> None:
    chunks: Any = litellm.completion(**ASK, tools=[TOOL], tool_choice=NAMED, stream=True)
    whole: Any = litellm.stream_chunk_builder(list(chunks))
    (call,) = whole.choices[0].message.tool_calls
    check_weather(call.function.arguments)


@scenario("structure")
def structure() -> None:
    answer: Any = litellm.completion(**ASK, response_format=Trip)
    Trip.model_validate_json(answer.choices[0].message.content)


@scenario("structure, streamed")
def structure_streamed() -> None:
    chunks: Any = litellm.completion(**ASK, response_format=Trip, stream=True)
    Trip.model_validate_json("".join(each.choices[0].delta.content or "" for each in chunks))


@scenario("too long")
def too_long() -> None:
    for more in ({}, {"stream": True}):
        raises(
            litellm.ContextWindowExceededError,
            lambda more=more: litellm.completion(**LONG, messages=asking(TOO_LONG), **more),
        )


@scenario("too long: the router falls back")
def falls_back() -> None:
    answer: Any = router().completion(model="short", messages=asking(TOO_LONG_FOR_SHORT))
    check(MODEL in answer.model and answer.choices[0].message, answer)


@scenario("too long: the router falls back, streamed")
async def falls_back_streamed() -> None:
    stream: Any = await router().acompletion(
        model="short", messages=asking(TOO_LONG_FOR_SHORT), stream=True
    )
    chunks = [chunk async for chunk in stream]
    check(chunks[-1].choices[0].finish_reason and MODEL in chunks[0].model, chunks[:2])


@scenario("too long: a function falls back")
def function_falls_back() -> None:
    answer: Any = litellm.completion(
        **SHORT,
        messages=asking(TOO_LONG_FOR_SHORT),
        context_window_fallback_dict={f"openai/{SHORT_MODEL}": f"openai/{MODEL}"},
    )
    check(MODEL in answer.model, answer)


@scenario("left in the middle")
def left() -> None:
    stream: Any = litellm.completion(**ASK, stream=True)
    next(stream)
    stream.completion_stream.close()


if __name__ == "__main__":
    scenarios.main()
