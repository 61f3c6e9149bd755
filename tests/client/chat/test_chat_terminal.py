"""A chat in a terminal with a scripted target: Ctrl-C, and a target that is started anew."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.client.scripted_target import Script, ScriptedTarget, serve
from tests.client.terminal import terminal
from tests.waiting import HANG_SECONDS, wait_until


def test_ctrl_c_stops_a_reply_and_not_the_chat(start: Callable[..., ScriptedTarget]) -> None:
    server = start(hang_after=6)
    with terminal("--target", server.address, "--metrics", "--show-origin") as chat:
        chat.wait_for("from the cache")  # the colours, and what they stand for
        chat.say("Tell me a very long story about two bears.", r"\x1b\[3[0-9]m\d+é ")
        chat.type("\x03")
        chat.wait_for(r"tokens.* · stopped")
        assert server.cancelled.wait(HANG_SECONDS)
        chat.wait_for("> ")

        # At the prompt it says how to leave. A signal in the very moment in which a prompt appears
        # may be heard with the next key only: that is readline's.
        def says_how_to_leave() -> bool:
            chat.type("\x03")
            chat.look(1.0)
            return "Ctrl-D ends the chat" in chat.screen

        wait_until(says_how_to_leave, lambda: chat.screen)
        chat.leave()


def test_a_target_that_is_started_anew_between_two_turns_is_survived(nobody: str) -> None:
    first = ExitStack()
    first.enter_context(serve(Script(), nobody))
    with terminal("--target", nobody, "--metrics") as chat:
        with first:
            chat.say("Tell me a story.")
        chat.say("And then?", "And then")
        with serve(Script(), nobody) as second:
            chat.wait_for(r"tokens/s · (stop|length)")
            assert len(second.requests) == 1
            chat.leave()


def test_pasted_lines_are_one_message_and_the_last_chats_can_be_called_back(
    start: Callable[..., ScriptedTarget], tmp_path: Path
) -> None:
    server, history = start(), tmp_path / "state" / "history"
    flags = ("--target", server.address, "--metrics", "--history", str(history))
    pasted = "Continue this:\nOnce there was a bear.\nIt was shy."
    with terminal(*flags) as chat:
        chat.wait_for("> ")
        chat.type(f"\x1b[200~{pasted}\x1b[201~")
        chat.look(0.5)
        assert not server.requests
        chat.type("\r")
        chat.wait_for(r"tokens/s · (stop|length)")
        chat.say("Hello, bear.")
        chat.leave()
    assert "It was shy." in history.read_text()
    assert history.stat().st_mode & 0o077 == 0
    with terminal(*flags) as chat:
        chat.say("\x1b[A\x1b[A")  # arrow up, until the line is back
        chat.leave()
    asked = [request.chat.messages[-1].content for request in server.requests]
    assert asked == [pasted, "Hello, bear.", "Hello, bear."]
