"""pydantic-ai: agents that answer in text, by a call or by a schema, and take a longer model."""

from typing import Any

import scenarios
from pydantic_ai import Agent, ModelContextWindowExceededError, NativeOutput
from pydantic_ai.models.fallback import FallbackModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from scenarios import KEY, MODEL, SHORT_MODEL, STORY, TOO_LONG, URL, check, raises, scenario
from trip import Trip, get_weather


def model(name: str = MODEL) -> OpenAIChatModel:
    return OpenAIChatModel(name, provider=OpenAIProvider(base_url=URL, api_key=KEY))


@scenario("chat")
def chat() -> None:
    run = Agent(model(), instructions="Be brief.").run_sync(STORY)
    check(run.output and run.usage.output_tokens > 0, run)
    again = Agent(model()).run_sync(STORY, message_history=run.all_messages())
    check(isinstance(again.output, str), again)


@scenario("chat, streamed with usage")
async def streamed() -> None:
    async with Agent(model()).run_stream(STORY) as run:
        texts = [text async for text in run.stream_text(delta=True)]
    check("".join(texts) and run.usage.output_tokens > 0, run)


@scenario("structure, by a call")
def by_call() -> None:
    run = Agent(model(), output_type=Trip).run_sync(STORY)
    check(isinstance(run.output, Trip), run)


@scenario("structure, by a schema")
def by_schema() -> None:
    run = Agent(model(), output_type=NativeOutput(Trip)).run_sync(STORY)
    check(isinstance(run.output, Trip), run)


@scenario("structure, streamed by a call")
async def streamed_call() -> None:
    async with Agent(model(), output_type=Trip).run_stream(STORY) as run:
        check(isinstance(await run.get_output(), Trip), run)


@scenario("structure, streamed by a schema")
async def streamed_schema() -> None:
    async with Agent(model(), output_type=NativeOutput(Trip)).run_stream(STORY) as run:
        *_, last = [each async for each in run.stream_output()]
    check(isinstance(last, Trip), last)


@scenario("tools, called until the output comes")
def tools() -> None:
    agent = Agent(model(), output_type=Trip, tools=[get_weather])
    check(isinstance(agent.run_sync(STORY).output, Trip), "no trip")


@scenario("too long")
def too_long() -> None:
    raises(ModelContextWindowExceededError, lambda: Agent(model()).run_sync(TOO_LONG))


@scenario("too long: another model takes it")
def fallback() -> None:
    both = FallbackModel(model(SHORT_MODEL), model())
    run: Any = Agent(both).run_sync(scenarios.TOO_LONG_FOR_SHORT)
    check(run.all_messages()[-1].model_name == MODEL, run)


@scenario("left in the middle")
async def left() -> None:
    async with Agent(model()).run_stream(STORY) as run:
        async for _ in run.stream_text(delta=True):
            break


if __name__ == "__main__":
    scenarios.main()
