"""A client below gRPC's own: it breaks its rules, and grants a server no more than it likes."""

import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.settings import SettingCodes, Settings

from tests.waiting import wait_until

Headers = list[tuple[str, str]]
PLENTY = 2**30
FRAME = 16_384  # bytes, at most


def framed(message: bytes, flag: int = 0, length: int | None = None) -> bytes:
    """A message with gRPC's prefix, which may lie."""
    size = len(message) if length is None else length
    return bytes([flag]) + size.to_bytes(4, "big") + message


def headers(path: str, changes: Iterable[tuple[str, str]] = (), without: str = "") -> Headers:
    usual = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "test",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    changes = list(changes)
    changed = {name for name, _ in changes} | {without}
    kept = [pair for pair in usual.items() if pair[0] not in changed]
    pseudo = [pair for pair in changes if pair[0].startswith(":")]
    return pseudo + kept + [pair for pair in changes if pair not in pseudo]


@dataclass
class RawStream:
    """What a server said on one stream."""

    number: int
    data: bytes = b""
    trailers: dict[str, str] = field(default_factory=dict)
    ended: bool = False

    @property
    def status(self) -> tuple[int, str]:
        """-1: the stream was reset, and there is none."""
        return int(self.trailers.get("grpc-status", -1)), self.trailers.get("grpc-message", "")

    def messages(self) -> list[bytes]:
        """All that are complete."""
        found, at = [], 0
        while len(self.data) >= at + 5:
            size = int.from_bytes(self.data[at + 1 : at + 5], "big")
            if len(self.data) < at + 5 + size:
                break
            found.append(self.data[at + 5 : at + 5 + size])
            at += 5 + size
        return found


class RawConnection:
    def __init__(self, address: str, window: int | None = None, source: str = "") -> None:
        """``window``: bytes that a stream may send before it is granted more; None: plenty.
        ``source``: the own address."""
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), source_address=(source, 0))
        self._wire = H2Connection(
            H2Configuration(
                header_encoding="utf-8",
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
                validate_inbound_headers=False,
            )
        )
        size = {SettingCodes.INITIAL_WINDOW_SIZE: PLENTY if window is None else window}
        self._wire.local_settings = Settings(client=True, initial_values=size)
        self._wire.initiate_connection()
        self._wire.increment_flow_control_window(PLENTY)
        self._streams: dict[int, RawStream] = {}
        self.gone = False
        self._flush()

    def __enter__(self) -> "RawConnection":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def call(self, head: Headers, data: bytes, end: bool = True) -> RawStream:
        stream = RawStream(self._wire.get_next_available_stream_id())
        self._streams[stream.number] = stream
        self._wire.send_headers(stream.number, head)
        for begin in range(0, len(data), FRAME):
            self._wire.send_data(stream.number, data[begin : begin + FRAME])
        if end:
            self._wire.end_stream(stream.number)
        self._flush()
        return stream

    def reset(self, stream: RawStream) -> None:
        self._wire.reset_stream(stream.number)
        self._flush()

    def grant(self, stream: RawStream, size: int) -> None:
        """Let the server send so many bytes more on a stream."""
        if not stream.ended:
            self._wire.increment_flow_control_window(size, stream.number)
            self._flush()

    def listen(self, seconds: float) -> None:
        """Take what comes within this time."""
        end = time.monotonic() + seconds
        while not self.gone and (left := end - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                data = self._socket.recv(65536)
            except TimeoutError:
                return
            except OSError:
                data = b""
            self.gone = self.gone or not data
            for event in self._wire.receive_data(data) if data else []:
                self._note(event)
            self._flush()
            if all(stream.ended for stream in self._streams.values()):
                return

    def until_ended(self, stream: RawStream) -> RawStream:
        wait_until(lambda: self.listen(0.2) or stream.ended or self.gone, stream)
        return stream

    def _note(self, event: Event) -> None:
        if isinstance(event, ConnectionTerminated):
            self.gone = True
        number = getattr(event, "stream_id", None)
        stream = self._streams.get(number) if number else None
        if stream is None:
            return
        if isinstance(event, DataReceived):
            stream.data += event.data or b""
        elif isinstance(event, ResponseReceived | TrailersReceived):
            stream.trailers.update(event.headers or ())  # type: ignore[arg-type]
        elif isinstance(event, StreamEnded | StreamReset):
            stream.ended = True

    def _flush(self) -> None:
        try:
            self._socket.sendall(self._wire.data_to_send())
        except OSError:
            self.gone = True
