"""A chat in a terminal with a scripted target: Ctrl-C, and a target that is started anew."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.client.scripted_target import Running, Script, full_text, serve
from tests.client.terminal import terminal
from tests.waiting import HANG_SECONDS, wait_until


def test_ctrl_c_stops_a_reply_and_not_the_chat(start: Callable[..., Running]) -> None:
    server = start(hang_after=6)
    with terminal("--target", server.address, "--metrics") as chat:
        chat.wait_for("> ")
        chat.type("Tell me a very long story about two bears.\r")
        chat.wait_for(full_text(5).rstrip())
        chat.type("\x03")
        chat.wait_for(r"tokens.* · stopped")
        assert server.target.cancelled.wait(HANG_SECONDS)
        chat.wait_for("> ")

        # At the prompt it says how to leave. A signal in the very moment in which a prompt appears
        # may be heard with the next key only: that is readline's.
        def says_how_to_leave() -> bool:
            chat.type("\x03")
            chat.look(1.0)
            return "Ctrl-D ends the chat" in chat.screen

        wait_until(says_how_to_leave, lambda: chat.screen)
        chat.type("/quit\r")
        assert chat.wait_for_exit() == 0


def test_a_target_that_is_started_anew_between_two_turns_is_survived(nobody: str) -> None:
    first = ExitStack()
    first.enter_context(serve(Script(), nobody))
    with terminal("--target", nobody, "--metrics") as chat:
        with first:
            chat.wait_for("> ")
            chat.type("Tell me a story.\r")
            chat.wait_for(r"tokens/s · (stop|length)")
            chat.wait_for("> ")
        chat.type("And then?\r")
        chat.wait_for("And then")
        with serve(Script(), nobody) as second:
            chat.wait_for(r"tokens/s · (stop|length)")
            assert len(second.requests) == 1
            chat.type("/quit\r")
            assert chat.wait_for_exit() == 0


def test_a_pasted_text_of_several_lines_is_one_message(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    server, history = start(), tmp_path / "state" / "history"
    with terminal("--target", server.address, "--metrics", "--history", str(history)) as chat:
        chat.wait_for("> ")
        chat.type("\x1b[200~Continue this:\nOnce there was a bear.\nIt was shy.\x1b[201~")
        chat.look(0.5)
        assert not server.requests
        chat.type("\r")
        chat.wait_for(r"tokens/s · (stop|length)")
        (request,) = server.requests
        said = request.chat.messages[-1].content
        assert said == "Continue this:\nOnce there was a bear.\nIt was shy."
        chat.wait_for("> ")
        chat.type("/quit\r")
        assert chat.wait_for_exit() == 0
    assert "It was shy." in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_lines_of_the_last_chat_can_be_called_back(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    server, history = start(), tmp_path / "history"
    for typed in ("Hello, bear.\r", "\x1b[A\r"):  # the second time: arrow up, until a line is back
        with terminal("--target", server.address, "--metrics", "--history", str(history)) as chat:
            chat.wait_for("> ")
            chat.type(typed if typed.startswith("Hello") else "\x1b[A" + typed)
            chat.wait_for(r"tokens/s · (stop|length)")
            chat.wait_for("> ")
            chat.type("/quit\r")
            assert chat.wait_for_exit() == 0
    assert [r.chat.messages[-1].content for r in server.requests] == ["Hello, bear."] * 2
