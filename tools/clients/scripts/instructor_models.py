"""instructor: models of pydantic, by calls, its default, and by a schema."""

from typing import Any, get_args

import instructor
import openai
import scenarios
from instructor.core import InstructorRetryException
from scenarios import KEY, MODEL, STORY, TOO_LONG, URL, check, raises, scenario
from trip import City, Trip

ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": STORY}]}


def client(mode: instructor.Mode | None = None) -> Any:
    modes = {} if mode is None else {"mode": mode}
    return instructor.from_openai(openai.OpenAI(base_url=URL, api_key=KEY), **modes)


@scenario("structure, by its default")
def default() -> None:
    check(isinstance(client().create(response_model=Trip, **ASK), Trip), "no trip")


@scenario("structure, by a provider's name")
def provider() -> None:
    named = instructor.from_provider(f"openai/{MODEL}", base_url=URL, api_key=KEY)
    found: Any = named.create(response_model=Trip, messages=ASK["messages"])
    check(isinstance(found, Trip), found)


@scenario("structure, by a schema")
def by_schema() -> None:
    found = client(instructor.Mode.JSON_SCHEMA).create(response_model=Trip, **ASK)
    check(isinstance(found, Trip), found)


@scenario("structure, with the answer beside it")
def with_completion() -> None:
    found, answer = client().create_with_completion(response_model=Trip, **ASK)
    check(isinstance(found, Trip) and answer.usage.completion_tokens > 0, answer)


@scenario("structure, streamed by a call")
def partial() -> None:
    *_, last = client().create_partial(response_model=Trip, **ASK)
    check(last.city in get_args(City), last)


@scenario("structure, streamed by a schema")
def partial_by_schema() -> None:
    *_, last = client(instructor.Mode.JSON_SCHEMA).create_partial(response_model=Trip, **ASK)
    check(last.city in get_args(City), last)


@scenario("structure, asynchronous")
async def asynchronous() -> None:
    aio: Any = instructor.from_openai(openai.AsyncOpenAI(base_url=URL, api_key=KEY))
    check(isinstance(await aio.create(response_model=Trip, **ASK), Trip), "no trip")


@scenario("a list, left in the middle")
def listed() -> None:
    for found in client(instructor.Mode.JSON_SCHEMA).create_iterable(response_model=Trip, **ASK):
        check(isinstance(found, Trip), found)
        break


@scenario("text")
def text() -> None:
    answer = client().create(response_model=None, **ASK)
    check(answer.choices[0].message.content, answer)


@scenario("too long")
def too_long() -> None:
    messages = [{"role": "user", "content": TOO_LONG}]
    error = raises(
        (openai.BadRequestError, InstructorRetryException),
        lambda: client().create(response_model=Trip, model=MODEL, messages=messages),
    )
    check("maximum context length" in str(error), error)


if __name__ == "__main__":
    scenarios.main()
