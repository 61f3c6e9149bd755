"""What waits is passed on as one chunk, and nothing of it is lost."""

from typing import Any

import pytest

from ssd.v1 import target_pb2 as pb
from ssd_gateway.chat_formats.chat_reading import ChatReading
from ssd_gateway.chat_formats.registry import TOOL_FORMATS
from ssd_gateway.openai.choice import Choice, pieces_of
from ssd_gateway.openai.shapes import ChatShape, CompletionShape
from ssd_gateway.openai.translation import Wanted, pack


def tokens(*pieces: str) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        tokens=pb.GenerateTokens(
            token_ids=range(len(pieces)),
            text="".join(pieces),
            text_lengths=[len(piece.encode()) for piece in pieces],
            origins=[pb.TOKEN_ORIGIN_CACHE] * len(pieces),
        )
    )


def started(prompt_tokens: int = 3) -> pb.GenerateResponse:
    return pb.GenerateResponse(started=pb.GenerateStarted(prompt_tokens=prompt_tokens))


def finish() -> pb.GenerateResponse:
    return pb.GenerateResponse(finish=pb.GenerateFinish(reason=pb.FINISH_REASON_STOP))


def after(*responses: pb.GenerateResponse, wanted: Wanted | None = None, **more: Any) -> Choice:
    choice = Choice(0, wanted or Wanted(), **more)
    for response in (started(), *responses):
        choice.take(response)
    return choice


def test_messages_that_wait_become_one_delta() -> None:
    wanted = Wanted(token_ids=True, origins=True)
    choice = after(tokens("a", "b"), tokens("ç"), tokens("d"), finish(), wanted=wanted)
    delta = choice.pass_on()
    assert (delta.text, delta.token_ids) == ("abçd", [0, 1, 0, 0])
    assert [entry.text for entry in delta.entries] == ["a", "b", "ç", "d"]
    assert {entry.origin for entry in delta.entries} == {"cache"}
    assert (choice.finish_told, choice.has_news) == (True, False)


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
READING = ChatReading(tools=TOOL_FORMATS["hermes"], names={"f"})


@pytest.mark.parametrize(
    ("text", "end", "reason"),
    [
        (CALL, {"reason": pb.FINISH_REASON_STOP}, "tool_calls"),
        (CALL, {"reason": pb.FINISH_REASON_LENGTH}, "length"),
        (CALL, {"reason": pb.FINISH_REASON_STOP, "stop_string": "x"}, "tool_calls"),
        (CALL[:-15], {"reason": pb.FINISH_REASON_STOP, "stop_string": "}"}, "stop"),
        (CALL[:20], {"reason": pb.FINISH_REASON_STOP}, "stop"),
        ("Hi", {"reason": pb.FINISH_REASON_STOP}, "stop"),
    ],
)
def test_a_text_that_ends_with_calls_ends_for_them(
    text: str, end: dict[str, Any], reason: str
) -> None:
    choice = after(tokens(*text), reading=READING)
    assert choice.finish_reason is None
    choice.take(pb.GenerateResponse(finish=pb.GenerateFinish(**end)))
    assert choice.finish_reason == reason


@pytest.mark.parametrize("shape", [ChatShape(), CompletionShape()])
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ({"stop_string": "x"}, "x"),
        ({"stop_token_id": 5}, 5),
        ({"stop_token_id": 1}, None),  # the model's own end
        ({"reason": pb.FINISH_REASON_LENGTH}, None),
    ],
)
def test_a_stop_is_told_where_the_caller_has_named_it(
    shape: ChatShape | CompletionShape, end: dict[str, Any], reason: str | int | None
) -> None:
    ended = pb.GenerateResponse(finish=pb.GenerateFinish(**end))
    choice = after(ended, wanted=Wanted(stop_token_ids=frozenset([5])))
    assert shape.whole_choice(choice, choice.pass_on())["stop_reason"] == reason


def test_a_chunk_that_would_say_nothing_is_empty() -> None:
    choice = after(tokens("Hi <to"), reading=READING)
    assert choice.pass_on().message.content == "Hi "
    choice.take(tokens("ol_c"))
    assert choice.pass_on().is_empty
    choice.take(finish())
    assert choice.pass_on().message.content == "<tool_c"


def test_an_end_that_comes_alone_is_news() -> None:
    choice = after(tokens("a"))
    assert choice.pass_on().first
    assert not choice.has_news
    choice.take(finish())
    assert choice.has_news
    assert choice.pass_on().is_empty


def test_a_start_before_any_token_begins_the_prompt_anew() -> None:
    prompt = pb.GenerateResponse(
        prompt=pb.GeneratePrompt(token_ids=pack([1]), text="Once", text_lengths=[4])
    )
    choice = after(prompt, started(), prompt, tokens(" more"), wanted=Wanted(echo=True))
    assert choice.pass_on().text == "Once more"


def test_pieces_are_cut_by_bytes() -> None:
    assert pieces_of("aé🙂", [1, 2, 0, 4]) == ["a", "é", "", "🙂"]
