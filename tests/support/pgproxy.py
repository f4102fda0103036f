"""A proxy in front of PostgreSQL that a test can break in the ways a network breaks.

    with PgProxy(database.dsn_as("rowlock_node")) as proxy:
        one = fleet.node("one", ROWLOCK_DSN=proxy.dsn)
        cut = proxy.cut(b"rowlock.complete", after=True)
        ...

It reads the messages of the protocol, so it can tell one request from another. It does not encrypt.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.support.waiting import wait_until

T = TypeVar("T")

_QUERY, _PARSE, _BIND, _SYNC = b"Q", b"P", b"B", b"S"  # of a client
_READY: Final = b"Z"  # of the server: a request is answered
_IDLE: Final = b"I"  # in it: no transaction is open
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST, not FIN
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # of Linux; the socket module does not know them
_NO_PACKET: Final = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # BPF: ret 0


@dataclass(slots=True)
class Cut:
    """Requests of one kind that cost their connection."""

    request: bytes
    """Some bytes of the SQL text or of a parameter."""
    after: bool
    """Whether the server carries it out first, and only its answer is lost."""
    times: int
    """How many more will be cut."""
    count: int = 0
    """How many were."""

    def wait(self, count: int = 1) -> None:
        """Wait until so many were cut."""
        what = f"{self.request!r} is cut {count} times"
        wait_until(lambda: self.count >= count, seconds=40, what=what)


class PgProxy:
    """Listens on a port of its own; each client gets a connection to the server. Use `with`."""

    def __init__(self, dsn: str, *, host: str = "127.0.0.1") -> None:
        """Stand in for a server.

        Args:
            dsn: Its connection string.
            host: The address to listen on.
        """
        self._target = _address(dsn)
        self._sessions: set[_Session] = set()
        self._cuts: list[Cut] = []
        self._delay_seconds = 0.0
        self._refusing = False
        self._silent_at = b""
        self.arrivals: list[float] = []
        """When clients connected, in monotonic seconds."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = self._ask(self._start(host))
        self.dsn = make_conninfo(
            dsn, host=host, port=self.port, sslmode="disable", gssencmode="disable"
        )
        """It leads through the proxy."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Reset every connection and listen no more."""
        self._ask(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- what tests do -------------------------------------------------------------------------

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._sessions)

    def pass_on(self) -> None:
        """Be a good network again: what was held back goes on, clients are let in."""
        self._do(self._pass_on)

    def delay(self, seconds: float) -> None:
        """Hold up everything that clients send by so many seconds, until told another number."""
        self._delay_seconds = seconds

    def reset(self) -> None:
        """Reset every connection (RST), once; clients may connect again."""
        self._do(self._reset)

    def refuse(self) -> None:
        """Reset every connection, and each new one, until `pass_on`."""
        self._refusing = True
        self.reset()

    def blackhole(self, *, at: bytes = b"") -> None:
        """Let nothing through, in neither direction: no data, no end, no answer to new clients.

        Until `pass_on`. Packets are still acknowledged, as by a server whose processes are frozen;
        the server sees no client leave.

        Args:
            at: Only from the next request on that has these bytes; empty is at once.
        """
        self._silent_at = at
        if not at:
            self._do(self._open.clear)

    def drop(self) -> None:
        """Lose every packet of clients, without a word, and send none, until `pass_on`.

        As a firewall does, or a machine that is gone: nothing is acknowledged, so the client's system
        notices in its own time.
        """

        def act() -> None:
            self._open.clear()
            for one in self._sockets():
                program = struct.pack("HP", 1, ctypes.addressof(_NO_PACKET))
                one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)

        self._do(act)

    def cut(self, request: bytes, *, after: bool, times: int = 1) -> Cut:
        """Let requests of one kind cost their connection.

        Args:
            request: Some bytes of the SQL text, of a parameter, or of the start-up message.
            after: False: the server never sees it. True: the server carries it out, but the client
                gets no answer.
            times: How many of them; those that come later pass.
        """
        cut = Cut(request, after, times)
        self._do(lambda: self._cuts.append(cut))
        return cut

    def retarget(self, dsn: str) -> None:
        """Connect new clients to another server; those that are connected stay where they are."""
        self._target = _address(dsn)

    # -- the loop's thread ---------------------------------------------------------------------

    async def _start(self, host: str) -> int:
        self._open = asyncio.Event()
        self._open.set()
        self._server = await asyncio.start_server(self._serve, host, 0, family=socket.AF_INET)
        return int(self._server.sockets[0].getsockname()[1])

    async def _stop(self) -> None:
        self._pass_on()
        self._server.close()
        self._reset()
        while self._sessions:
            await asyncio.sleep(0.001)

    def _sockets(self) -> list[Any]:  # Any: asyncio's stand-ins for sockets
        clients = [session.to_client for session in self._sessions]
        open_ = [client.get_extra_info("socket") for client in clients if not client.is_closing()]
        return [*self._server.sockets, *open_]

    def _pass_on(self) -> None:
        self._refusing = False
        for one in self._sockets():
            # Of a socket without a filter it is an error.
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        self._open.set()

    def _reset(self) -> None:
        for session in self._sessions:
            session.reset()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.arrivals.append(time.monotonic())
        session = _Session(self, reader, writer)
        self._sessions.add(session)
        try:
            if self._refusing:
                session.reset()
            else:
                await session.run(*self._target)
        finally:
            self._sessions.discard(session)

    async def fall_silent_at(self, text: bytes) -> None:
        """Let nothing through from this request on, if it is the one. Called by sessions."""
        if self._silent_at and self._silent_at in text:
            self._silent_at = b""
            self._open.clear()
        await self._open.wait()

    async def hold(self) -> None:
        """Wait while nothing goes through. Called by sessions."""
        await self._open.wait()

    async def hold_up(self) -> None:
        """The same, and the delay. Called by sessions."""
        await asyncio.sleep(self._delay_seconds)
        await self._open.wait()

    def cut_of(self, text: bytes) -> Cut | None:
        """The cut that a request is due, counted as done. Called by sessions."""
        for cut in self._cuts:
            if cut.times and cut.request in text:
                cut.times -= 1
                return cut
        return None

    def answer(self, message: bytes) -> bytes:
        """What a client gets for a message of the server. For other kinds of proxies."""
        return message

    def _ask(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def _do(self, act: Callable[[], object]) -> None:
        async def done() -> None:
            act()

        self._ask(done())


@dataclass(eq=False, slots=True)
class _Session:
    """A client, and its connection to the server."""

    proxy: PgProxy
    from_client: asyncio.StreamReader
    to_client: asyncio.StreamWriter
    to_server: asyncio.StreamWriter | None = None
    statements: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    """The text of prepared statements."""
    asked: int = 0
    """Requests that the client has sent to the end, the log-in among them."""
    answered: int = 0
    doomed: tuple[int, Cut] | None = None
    """The request whose answer is lost, by number."""

    async def run(self, host: str, port: int) -> None:
        """Pass messages on until one side is gone."""
        try:
            from_server, self.to_server = await asyncio.open_connection(host, port)
        except OSError:
            self.reset()
            return
        pumps = [
            asyncio.create_task(self._pass_requests(self.to_server)),
            asyncio.create_task(self._pass_answers(from_server)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for writer in (self.to_client, self.to_server):
                writer.close()

    def reset(self) -> None:
        """End both connections with RST."""
        for writer in (self.to_client, self.to_server):
            if writer is not None and not writer.is_closing():
                connection = writer.get_extra_info("socket")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                writer.transport.abort()

    async def _pass_requests(self, server: asyncio.StreamWriter) -> None:
        messages = _Messages(started=False)
        while data := await self.from_client.read(65536):
            await self.proxy.hold_up()
            for message in messages.put(data):
                text = self._text(message)
                await self.proxy.fall_silent_at(text)
                cut = self.proxy.cut_of(text)
                if cut is not None and not cut.after:
                    cut.count += 1
                    return
                if cut is not None:
                    self.doomed = (self.asked + 1, cut)
                if message[:1] in {_QUERY, _SYNC} or not self.asked:
                    self.asked += 1
                server.write(message)
            await server.drain()
        await self.proxy.hold()

    async def _pass_answers(self, server: asyncio.StreamReader) -> None:
        messages = _Messages(started=True)
        while data := await server.read(65536):
            await self.proxy.hold()
            for message in messages.put(data):
                number = self.answered + 1
                self.answered += message[:1] == _READY
                if self.doomed is None or number < self.doomed[0]:
                    self.to_client.write(self.proxy.answer(message))
                elif message[:1] == _READY and message[5:6] == _IDLE:
                    self.doomed[1].count += 1
                    return
            await self.to_client.drain()
        await self.proxy.hold()

    def _text(self, message: bytes) -> bytes:
        """The SQL text and the parameters of what a client sends; all of its start-up message."""
        kind, body = message[:1], message[5:]
        if kind == _PARSE:
            name, text = body.split(b"\0", 2)[:2]
            self.statements[name] = text
        elif kind == _BIND:
            return self.statements.get(body.split(b"\0", 2)[1], b"") + body
        return message


class _Messages:
    """Puts the messages of one direction together."""

    def __init__(self, *, started: bool) -> None:
        self._started = started  # the first message of a client has no letter
        self._data = b""

    def put(self, data: bytes) -> Iterator[bytes]:
        """The messages that these bytes complete."""
        self._data += data
        while True:
            letter = int(self._started)
            if len(self._data) < letter + 4:
                return
            (length,) = struct.unpack_from("!i", self._data, letter)
            if len(self._data) < letter + length:
                return
            message, self._data = self._data[: letter + length], self._data[letter + length :]
            self._started = True
            yield message


def _address(dsn: str) -> tuple[str, int]:
    parts = conninfo_to_dict(dsn)
    return str(parts["host"]), int(str(parts["port"]))
