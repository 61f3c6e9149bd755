"""A chat in a terminal with a scripted target: Ctrl-C, and a target that is started anew."""

from __future__ import annotations

from collections.abc import Callable

from scripted_target import Running, Script, full_text, serve
from terminal import terminal

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
    with terminal("--target", nobody, "--metrics") as chat:
        with serve(Script(), nobody):
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
