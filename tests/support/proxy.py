"""A TCP proxy for an API server that can stall, delay or close connections. TLS is unchanged."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


class Proxy:
    """``async with Proxy(server) as proxy``: then ``proxy.server`` is where clients go.

    ``silent``: connections stay open and no data passes. ``delay_seconds``: the delay of each piece
    of a response.
    """

    def __init__(self, server: str) -> None:
        parts = urlsplit(server)
        self._scheme, self._host, self._port = (
            parts.scheme,
            parts.hostname or "127.0.0.1",
            parts.port or 443,
        )
        self._listener: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._open.set()
        self.delay_seconds = 0.0
        self.server = ""

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.server = f"{self._scheme}://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._listener is not None:
            self._listener.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def fall_silent(self) -> None:
        """From here on no data passes, and the connections stay open."""
        self._open.clear()

    def speak(self) -> None:
        """Everything passes again, what was held up too."""
        self._open.set()

    def cut(self) -> None:
        """Ends all connections; new ones are taken."""
        for writer in list(self._writers):
            writer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, far_writer}
        for source, target, held in ((reader, far_writer, False), (far_reader, writer, True)):
            task = asyncio.ensure_future(self._pump(source, target, held))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, held: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await self._open.wait()
                if held and self.delay_seconds:
                    await asyncio.sleep(self.delay_seconds)
                target.write(data)
                await target.drain()
        target.close()
        self._writers.discard(target)
