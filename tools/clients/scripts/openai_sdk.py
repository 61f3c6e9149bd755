"""openai for Python, synchronous and asynchronous."""

import json
from typing import Any

import openai
import scenarios
from scenarios import KEY, MODEL, STORY, TOO_LONG, TOOL, check, check_weather, raises, scenario
from trip import Trip

ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": STORY}]}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
client = openai.OpenAI(base_url=scenarios.URL, api_key=KEY)


@scenario("models")
def models() -> None:
    check({each.id for each in client.models.list()} >= {MODEL}, client.models.list())
    check(client.models.retrieve(MODEL).id == MODEL, MODEL)


@scenario("chat")
def chat() -> None:
    answer = client.chat.completions.create(**ASK)
    choice = answer.choices[0]
    check(choice.message.content and choice.finish_reason in ("stop", "length"), answer)
    check(answer.usage and answer.usage.completion_tokens > 0, answer)


@scenario("chat, streamed")
def streamed() -> None:
    chunks = list(client.chat.completions.create(**ASK, stream=True))
    check("".join(each.choices[0].delta.content or "" for each in chunks), chunks)
    check(chunks[-1].choices[0].finish_reason in ("stop", "length"), chunks[-1])


@scenario("chat, streamed with usage")
def usage() -> None:
    options: Any = {"include_usage": True}
    *_, last = client.chat.completions.create(**ASK, stream=True, stream_options=options)
    check(last.choices == [] and last.usage and last.usage.completion_tokens > 0, last)


@scenario("chat, streamed by the helper")
def helper() -> None:
    with client.chat.completions.stream(**ASK) as stream:
        kinds = {event.type for event in stream}
    check({"chunk", "content.delta", "content.done"} <= kinds, kinds)
    check(stream.get_final_completion().choices[0].message.content, kinds)


@scenario("chat, asynchronous")
async def asynchronous() -> None:
    async with openai.AsyncOpenAI(base_url=scenarios.URL, api_key=KEY) as aio:
        answer = await aio.chat.completions.create(**ASK, max_completion_tokens=20)
        check(answer.choices[0].message.content, answer)
        stream = await aio.chat.completions.create(**ASK, stream=True, max_completion_tokens=20)
        check([chunk async for chunk in stream], "no chunk")


@scenario("completion")
def completion() -> None:
    answer = client.completions.create(model=MODEL, prompt="Once upon a time")
    check(answer.choices[0].text, answer)
    chunks = list(client.completions.create(model=MODEL, prompt="Once upon a time", stream=True))
    check("".join(each.choices[0].text for each in chunks), chunks)


@scenario("tool, named")
def named() -> None:
    answer = client.chat.completions.create(**ASK, tools=[TOOL], tool_choice=NAMED)
    message = answer.choices[0].message
    check(len(message.tool_calls or ()) == 1 and not message.content, answer)
    check_weather(message.tool_calls[0].function.arguments)  # type: ignore[index,union-attr]


@scenario("tool, required")
def required() -> None:
    answer = client.chat.completions.create(
        **ASK, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    check_weather(call.function.arguments)  # type: ignore[union-attr]
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [*ASK["messages"], answer.choices[0].message, result]
    told = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
    check(told.choices[0].finish_reason, told)


@scenario("tool, streamed")
def tool_streamed() -> None:
    with client.chat.completions.stream(**ASK, tools=[TOOL], tool_choice=NAMED) as stream:
        done = [each for each in stream if each.type == "tool_calls.function.arguments.done"]
    check(len(done) == 1 and done[0].name == "get_weather", done)
    check_weather(done[0].arguments)


@scenario("structure, parsed")
def parsed() -> None:
    answer = client.chat.completions.parse(**ASK, response_format=Trip)
    check(isinstance(answer.choices[0].message.parsed, Trip), answer)


@scenario("structure, parsed from a stream")
def parsed_stream() -> None:
    with client.chat.completions.stream(**ASK, response_format=Trip) as stream:
        for _ in stream:
            pass
    message = stream.get_final_completion().choices[0].message
    check(isinstance(message.parsed, Trip), message)


@scenario("structure, parsed arguments of a tool")
def parsed_tool() -> None:
    tool = openai.pydantic_function_tool(Trip, name="book")
    choice: Any = {"type": "function", "function": {"name": "book"}}
    answer = client.chat.completions.parse(**ASK, tools=[tool], tool_choice=choice)
    (call,) = answer.choices[0].message.tool_calls or ()
    check(isinstance(call.function.parsed_arguments, Trip), answer)


@scenario("structure, a schema by hand")
def schema() -> None:
    wanted: Any = {
        "type": "json_schema",
        "json_schema": {"name": "weather", "schema": scenarios.WEATHER},
    }
    answer = client.chat.completions.create(**ASK, response_format=wanted)
    check_weather(json.loads(answer.choices[0].message.content or ""))


@scenario("too long")
def too_long() -> None:
    messages: Any = [{"role": "user", "content": TOO_LONG}]
    for more in ({}, {"stream": True}):
        error = raises(
            openai.BadRequestError,
            lambda more=more: client.chat.completions.create(
                model=MODEL, messages=messages, **more
            ),
        )
        check(error.code == "context_length_exceeded", error.body)
        check(error.param == "messages" and error.type == "invalid_request_error", error.body)


@scenario("no such model")
def no_model() -> None:
    error = raises(
        openai.NotFoundError,
        lambda: client.chat.completions.create(**{**ASK, "model": "gpt-5"}),
    )
    check(error.code == "model_not_found", error.body)


@scenario("left in the middle")
def left() -> None:
    with client.chat.completions.create(**ASK, stream=True) as stream:
        for _ in stream:
            break
    check(client.chat.completions.create(**ASK, max_tokens=4).choices[0].message, "no answer")


if __name__ == "__main__":
    scenarios.main()
