"""Connections of the live page's server: the cookie is shown in time, and what is sent is read in
time.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

STRANGERS = 128
"""connections without the cookie; one more closes the oldest"""
INTRODUCTION = 60.0
"""seconds in which a connection shows the cookie"""
READING = 60.0
"""seconds in which a page reads what was sent"""
LATE = 1.0
"""seconds by which the server may come late to its own clock; if later, what was sent to it may be
unread
"""


class Strangers:
    """Connections that have not shown the cookie. Each is closed after a while, the oldest where
    there are too many.
    """

    def __init__(self) -> None:
        self._waiting: dict[Any, tuple[asyncio.WriteTransport, asyncio.TimerHandle]] = {}

    def came(self, transport: asyncio.WriteTransport) -> None:
        """Count a new connection as a stranger's."""
        name = transport.get_extra_info("peername")
        # an earlier connection from this port, which was refused a socket
        self.forget(name)
        if len(self._waiting) >= STRANGERS:
            self._close(next(iter(self._waiting)))
        self._wait(name, transport)

    def forget(self, name: Any) -> None:
        """Count a connection no more, because it is known or has gone; its name is host and port of
        the other end.
        """
        if name in self._waiting:
            self._waiting.pop(name)[1].cancel()

    def _wait(self, name: Any, transport: asyncio.WriteTransport) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(INTRODUCTION, self._expire, name, loop.time() + INTRODUCTION)
        self._waiting[name] = transport, timer

    def _expire(self, name: Any, due: float) -> None:
        # who waits for a server that was kept from its work has the time again: the owner may be
        # among them
        if asyncio.get_running_loop().time() > due + LATE:
            self._wait(name, self._waiting[name][0])
        else:
            self._close(name)

    def _close(self, name: Any) -> None:
        transport = self._waiting[name][0]
        self.forget(name)
        # what is half sent and half read is of no use
        transport.abort()


class _Read(asyncio.Protocol):
    """A connection that is cut off when its other end does not read. Only so a server hears of one
    that sleeps.
    """

    transport: asyncio.Transport
    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # writing pauses as soon as the system's own buffer is full, and until all has gone into it
        transport.set_write_buffer_limits(high=0)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit = asyncio.get_running_loop().call_later(READING, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._limit is not None:
            self._limit.cancel()


class PageConnection(_Read, WebSocketsSansIOProtocol):
    """The socket of a page."""


def http_connection(strangers: Strangers) -> type[asyncio.Protocol]:
    """The class of connections that are strangers' until they are known."""

    class Connection(_Read, H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            strangers.came(transport)

        def connection_lost(self, exc: Exception | None) -> None:
            strangers.forget(self.transport.get_extra_info("peername"))
            super().connection_lost(exc)

    return Connection
