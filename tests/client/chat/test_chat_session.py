"""A conversation without a server: commands, history, statistics."""

import json
from pathlib import Path

import pytest

from ssd_client.chat.session import Quit, Session
from ssd_client.generate.events import Started, Tokens
from ssd_client.generate.request_options import RequestOptions
from ssd_client.generate.result import GenerationResult, Timing


def reply(text: str, *origins: str) -> GenerationResult:
    result = GenerationResult(Timing(sent=0.0))
    result.add(Started("here:1", "r", 7, 3, "f"), 0.1)
    for i, origin in enumerate(origins):
        result.add(Tokens((i,), text if not i else "", origins=(origin,), pieces=(text,)), 0.2 + i)
    return result


def test_the_history_goes_along() -> None:
    session = Session(RequestOptions(), system="Be kind.")
    session.replied("Hello", reply("Hi!", "target", "cache", "cache"))
    assert session.prompt("And you?").messages == (
        ("system", "Be kind."),
        ("user", "Hello"),
        ("assistant", "Hi!"),
        ("user", "And you?"),
    )
    session.obey("/reset")
    assert session.prompt("Again").messages == (("system", "Be kind."), ("user", "Again"))


def test_commands_change_the_next_replies() -> None:
    session = Session(RequestOptions(temperature=1.0, seed=5))
    for line, said in {
        "/temp 0.25": "temperature: 0.25",
        "/seed 9": "seed: 9",
        "/mode sync": "mode: sync",
        "/system  Speak like a pirate.": "system: Speak like a pirate.",
    }.items():
        assert session.obey(line) == said
    assert session.options == RequestOptions(temperature=0.25, seed=9, mode="sync")
    assert session.system == "Speak like a pirate."
    for line in ("/seed", "/mode auto", "/system"):
        session.obey(line)
    assert (session.options["seed"], session.options["mode"], session.system) == (None, None, None)
    with pytest.raises(Quit):
        session.obey("/quit")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/temp hot", "is not a finite number"),
        ("/temp -1", "0 or more"),
        ("/seed x", "whole number"),
        ("/mode fast", "ssd, sync, off or auto"),
        ("/what", r"/what is not known[\s\S]*/reset"),
    ],
)
def test_a_wrong_command_changes_nothing_and_says_why(line: str, message: str) -> None:
    session = Session(RequestOptions(temperature=0.5))
    with pytest.raises(ValueError, match=message):
        session.obey(line)
    assert session.options == RequestOptions(temperature=0.5)


def test_statistics_count_where_tokens_came_from() -> None:
    session = Session(RequestOptions())
    session.replied("a", reply("x", "target", "cache", "cache", "ngram"))
    session.replied("b", reply("y", "target", "just_in_time"))
    assert session.obey("/stats") == (
        "2 replies · 6 tokens · 1.0 tokens/s · 2 by the target alone · 2 from the cache · "
        "1 just in time · 1 by n-gram"
    )


def test_what_was_said_is_saved_as_messages(tmp_path: Path) -> None:
    session, file = Session(RequestOptions(), "Be kind."), tmp_path / "chat.json"
    session.replied("Hello", reply("Hi!", "target"))
    assert session.obey(f"/save {file}") == f"saved: {file}, 3 messages"
    assert json.loads(file.read_text()) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!"},
    ]
    with pytest.raises(ValueError, match=r"/save .*chat\.json: File exists"):
        session.obey(f"/save {file}")
    with pytest.raises(ValueError, match="the name of a file is needed"):
        session.obey("/save")
