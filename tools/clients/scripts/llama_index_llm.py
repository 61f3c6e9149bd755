"""llama-index: OpenAILike, as a model of completions, its default, and of chats and calls."""

from typing import Any

import openai
import scenarios
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from scenarios import KEY, MODEL, STORY, TOO_LONG, URL, check, check_weather, raises, scenario
from trip import Trip, get_weather

plain = OpenAILike(model=MODEL, api_base=URL, api_key=KEY)
KINDS: Any = {"is_chat_model": True, "is_function_calling_model": True}
chats = OpenAILike(model=MODEL, api_base=URL, api_key=KEY, **KINDS)
by_schema = OpenAILike(
    model=MODEL, api_base=URL, api_key=KEY, should_use_structured_outputs=True, **KINDS
)
ASKED = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=STORY)]


weather = FunctionTool.from_defaults(get_weather)


@scenario("completion")
def completion() -> None:
    check(plain.complete("Once upon a time").text, "nothing")
    *_, last = plain.stream_complete("Once upon a time")
    check(last.text, last)


@scenario("chat")
def chat() -> None:
    check(chats.chat(ASKED).message.content, "nothing")
    check(chats.complete(STORY).text, "nothing")


@scenario("chat, streamed")
def streamed() -> None:
    *_, last = chats.stream_chat(ASKED)
    check(last.message.content, last)


@scenario("chat, asynchronous")
async def asynchronous() -> None:
    fresh = OpenAILike(model=MODEL, api_base=URL, api_key=KEY, max_tokens=20, **KINDS)
    check((await fresh.achat(ASKED)).message.content, "nothing")
    check([each async for each in await fresh.astream_chat(ASKED)], "no chunk")


@scenario("tool, named")
def named() -> None:
    answer = chats.chat_with_tools([weather], user_msg=STORY, tool_choice="get_weather")
    (call,) = chats.get_tool_calls_from_response(answer)
    check_weather(call.tool_kwargs)


@scenario("tool, required")
def required() -> None:
    answer = chats.chat_with_tools([weather], user_msg=STORY, tool_required=True)
    (call,) = chats.get_tool_calls_from_response(answer)
    check_weather(call.tool_kwargs)


@scenario("tool, streamed")
def tool_streamed() -> None:
    *_, last = chats.stream_chat_with_tools([weather], user_msg=STORY, tool_required=True)
    (call,) = chats.get_tool_calls_from_response(last)
    check_weather(call.tool_kwargs)


@scenario("tool, called and its result told")
def called() -> None:
    check("sunny" in str(chats.predict_and_call([weather], user_msg=STORY, tool_required=True)), "")


@scenario("structure, by a call")
def structure() -> None:
    found = chats.structured_predict(Trip, PromptTemplate(STORY))
    check(isinstance(found, Trip), found)


@scenario("structure, by a schema")
def structure_by_schema() -> None:
    found = by_schema.structured_predict(Trip, PromptTemplate(STORY))
    check(isinstance(found, Trip), found)
    check(isinstance(by_schema.as_structured_llm(Trip).chat(ASKED).raw, Trip), "no trip")


@scenario("structure, streamed")
def structure_streamed() -> None:
    *_, last = by_schema.stream_structured_predict(Trip, PromptTemplate(STORY))
    check(last.city in ("Bern", "Basel", "Chur"), last)  # type: ignore[union-attr]


@scenario("too long")
def too_long() -> None:
    asked = [ChatMessage(role="user", content=TOO_LONG)]
    for run in (lambda: chats.chat(asked), lambda: list(chats.stream_chat(asked))):
        error = raises(openai.BadRequestError, run)
        check(error.code == "context_length_exceeded", error.body)


@scenario("left in the middle")
def left() -> None:
    stream = chats.stream_chat(ASKED)
    next(stream)
    stream.close()


if __name__ == "__main__":
    scenarios.main()
