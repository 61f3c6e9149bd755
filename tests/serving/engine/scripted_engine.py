"""An engine that says what its test lays down, and nothing else: no model, no torch."""

import os
import signal
import struct
from multiprocessing.connection import Connection

from ssd_serving.engine.records import encode

CLOSED = "closed"  # the pipe is, and the engine lives


def engine_main(pipe: Connection, script: list[tuple[str, int]]) -> None:
    """Each line of ``script`` is a word, and how many bytes of it wait for the front's next one.

    A line that waits goes out in one piece with the whole ones before it.
    """
    ready = b""
    for word, held in script:
        if word == CLOSED:
            pipe.close()
            signal.pause()
        message = encode(word)
        ready += struct.pack("!i", len(message)) + message
        if held:
            os.write(pipe.fileno(), ready[:-held])
            pipe.recv_bytes()
            ready = ready[-held:]
    os.write(pipe.fileno(), ready)
    pipe.recv_bytes()  # until the front is gone
