"""A stand-in for a connection pooler in transaction mode, as far as a client can notice one.

It passes bytes on, but tells the client another backend pid than the server's: poolers give each
client a number of their own, and that difference is how rowlock recognises them.
"""

from __future__ import annotations

import socket
import struct
import threading
from types import TracebackType
from typing import Self

from psycopg.conninfo import conninfo_to_dict, make_conninfo

_READY = b"Z"
_BACKEND_KEY = b"K"
PRETENDED_PID = 4_194_305  # larger than any pid of Linux


class Pooler:
    """Listens on a port of its own and connects each client to the server of a connection string."""

    def __init__(self, dsn: str) -> None:
        """Listen; use `with` to stop."""
        target = conninfo_to_dict(dsn)
        self._target = (str(target["host"]), int(str(target["port"])))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        host, port = self._listener.getsockname()
        self.dsn = make_conninfo(dsn, host=host, port=port, sslmode="disable", gssencmode="disable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # shutdown, unlike close, wakes the threads that read.
        for one in (self._listener, *self._sockets):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self._thread.join()
        for one in (self._listener, *self._sockets):
            one.close()

    def _accept(self) -> None:
        pumps: list[threading.Thread] = []
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                break
            server = socket.create_connection(self._target)
            self._sockets += [client, server]
            for pump, source, sink in (
                (_pass, client, server),
                (_pass_with_new_pid, server, client),
            ):
                pumps.append(threading.Thread(target=pump, args=(source, sink), daemon=True))
                pumps[-1].start()
        for pump_thread in pumps:
            pump_thread.join()


def _pass(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def _pass_with_new_pid(server: socket.socket, client: socket.socket) -> None:
    """Pass messages of the log-in one by one, then everything as it comes."""
    try:
        kind = b""
        while kind != _READY:
            head = _exactly(server, 5)
            kind, (length,) = head[:1], struct.unpack("!i", head[1:])
            body = _exactly(server, length - 4)
            if kind == _BACKEND_KEY:
                body = struct.pack("!i", PRETENDED_PID) + body[4:]
            client.sendall(head + body)
    except (OSError, EOFError):
        return
    _pass(server, client)


def _exactly(source: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = source.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data
