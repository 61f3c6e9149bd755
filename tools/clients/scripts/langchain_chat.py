"""langchain-openai: chats, chains of tools, and structure in its three ways."""

from typing import Any

import scenarios
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from scenarios import KEY, MODEL, STORY, TOO_LONG, URL, check, check_weather, raises, scenario
from trip import Trip, Weather, get_weather

model = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY)


weather_tool = tool(args_schema=Weather)(get_weather)
# Strict, as LangChain leaves out else that a model of pydantic forbids further fields.
named_tool = model.bind_tools([weather_tool], tool_choice="get_weather", strict=True)
required_tool = model.bind_tools(
    [weather_tool], tool_choice="any", strict=True, parallel_tool_calls=False
)


@scenario("chat")
def chat() -> None:
    answer = model.invoke(STORY)
    check(answer.content, answer)
    check(answer.usage_metadata and answer.usage_metadata["output_tokens"] > 0, answer)
    check(answer.response_metadata["finish_reason"] in ("stop", "length"), answer)


@scenario("chat, streamed")
def streamed() -> None:
    chunks = list(model.stream([("system", "Be brief."), ("user", STORY)]))
    check("".join(each.text for each in chunks), chunks)


@scenario("chat, streamed with usage")
def usage() -> None:
    whole: Any = None
    for chunk in ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, stream_usage=True).stream(
        STORY
    ):
        whole = chunk if whole is None else whole + chunk
    check(whole.usage_metadata and whole.usage_metadata["output_tokens"] > 0, whole)


@scenario("chat, asynchronous")
async def asynchronous() -> None:
    fresh = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, max_tokens=20)
    check((await fresh.ainvoke(STORY)).content, "nothing")
    check([chunk async for chunk in fresh.astream(STORY)], "no chunk")
    check(len(await fresh.abatch([STORY, STORY])) == 2, "no batch")


@scenario("completion")
def completion() -> None:
    fresh = OpenAI(model=MODEL, base_url=URL, api_key=KEY)
    check(fresh.invoke("Once upon a time"), "nothing")
    check("".join(fresh.stream("Once upon a time")), "nothing streamed")


@scenario("tool, named")
def named() -> None:
    answer = named_tool.invoke(STORY)
    (call,) = answer.tool_calls
    check_weather(call["args"])


@scenario("tool, required, and its result")
def required() -> None:
    answer = required_tool.invoke(STORY)
    check(isinstance(answer, AIMessage) and len(answer.tool_calls) == 1, answer)
    (call,) = answer.tool_calls
    result = weather_tool.invoke(call)
    check(isinstance(result, ToolMessage), result)
    told = model.bind_tools([weather_tool]).invoke([HumanMessage(STORY), answer, result])
    check(isinstance(told, AIMessage), told)


@scenario("tool, streamed")
def tool_streamed() -> None:
    whole: Any = None
    for chunk in named_tool.stream(STORY):
        whole = chunk if whole is None else whole + chunk
    (call,) = whole.tool_calls
    check_weather(call["args"])


@scenario("structure, by its default")
def structure() -> None:
    found = model.with_structured_output(Trip).invoke(STORY)
    check(isinstance(found, Trip), found)


@scenario("structure, by a call")
def structure_by_call() -> None:
    found = model.with_structured_output(Trip, method="function_calling").invoke(STORY)
    check(isinstance(found, Trip), found)


@scenario("structure, streamed")
def structure_streamed() -> None:
    *_, last = model.with_structured_output(Trip).stream(STORY)
    check(isinstance(last, Trip), last)


@scenario("structure, with the answer beside it")
def structure_raw() -> None:
    found: Any = model.with_structured_output(Trip, include_raw=True).invoke(STORY)
    check(isinstance(found["parsed"], Trip) and found["parsing_error"] is None, found)


@scenario("too long")
def too_long() -> None:
    raises(ContextOverflowError, lambda: model.invoke(TOO_LONG))
    raises(ContextOverflowError, lambda: list(model.stream(TOO_LONG)))


@scenario("too long: another model takes it")
def fallback() -> None:
    short = ChatOpenAI(model=scenarios.SHORT_MODEL, base_url=URL, api_key=KEY)
    both = short.with_fallbacks([model], exceptions_to_handle=(ContextOverflowError,))
    answer = both.invoke(scenarios.TOO_LONG_FOR_SHORT)
    check(answer.response_metadata["model_name"] == MODEL, answer)


@scenario("left in the middle")
def left() -> None:
    stream = model.stream(STORY)
    next(stream)
    stream.close()


if __name__ == "__main__":
    scenarios.main()
