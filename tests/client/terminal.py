"""The client at the other end of a pseudo-terminal, as a person uses it."""

import contextlib
import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import termios
from collections.abc import Iterator

from tests.waiting import HANG_SECONDS, wait_until

CLIENT = [sys.executable, "-m", "ssd_client"]


class Terminal:
    """A chat, and what of its screen was not looked for yet."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200"}
        environment.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            [*CLIENT, "chat", *arguments],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # it controls the session
            env=environment,
        )  # fmt: skip
        os.close(slave)
        self.screen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, pattern: str) -> str:
        """Until it is on the screen; what came up to it is taken away."""

        def found() -> re.Match[str] | None:
            self.look(0.0)
            return re.search(pattern, self.screen)

        end = wait_until(found, lambda: f"{pattern!r}: {self.screen!r}").end()
        before, self.screen = self.screen[:end], self.screen[end:]
        return before

    def look(self, silence: float) -> None:
        """At what comes, until nothing has come for so many seconds."""
        while select.select([self._master], [], [], silence)[0]:
            try:
                self.screen += os.read(self._master, 65536).decode("utf-8", "replace")
            except OSError:  # the client has ended
                return

    def say(self, line: str, reply: str = r"tokens/s · (stop|length)") -> str:
        """At the prompt; what came up to the end of the reply."""
        self.wait_for("> ")
        self.type(f"{line}\r")
        return self.wait_for(reply)

    def leave(self, key: str = "/quit\r") -> None:
        self.wait_for("> ")
        self.type(key)
        assert self.process.wait(HANG_SECONDS) == 0

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@contextlib.contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    with contextlib.closing(Terminal(*arguments)) as found:
        yield found
