"""A proxy that delays all bytes between two services by a given time."""

from __future__ import annotations

import asyncio
import threading


class DelayProxy:
    """Forwards both ways, from a thread of its own; order is kept."""

    def __init__(self) -> None:
        self.delay_s = 0.0  # one way; may be changed at any time
        self._address = ""
        self._ready = threading.Event()

    def to(self, upstream: str) -> str:
        """The address that leads to ``upstream``."""
        host, _, port = upstream.rpartition(":")
        threading.Thread(target=self._run, args=(host, int(port)), daemon=True).start()
        self._ready.wait()
        return self._address

    def _run(self, host: str, port: int) -> None:
        asyncio.run(self._serve(host, port))

    async def _serve(self, host: str, port: int) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            up_reader, up_writer = await asyncio.open_connection(host, port)
            await asyncio.gather(self._pump(reader, up_writer), self._pump(up_reader, writer))

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self._address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await server.serve_forever()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Every piece goes through the timer, so that none overtakes another one."""
        loop = asyncio.get_running_loop()
        try:
            while data := await reader.read(65536):
                loop.call_later(self.delay_s, _write, writer, data)
        except OSError:
            pass  # a service has gone
        writer.close()


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    if not writer.is_closing():
        writer.write(data)
