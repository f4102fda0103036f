"""Messages over the socket between a supervisor and one executor.

A frame is a 4-byte big-endian length and the JSON of one message. The executor's side blocks
(`Channel`); the supervisor's side never does (`PolledChannel`), because one stuck executor must not
stop the loop that serves the others. A `Run` and its `Completed` cost the supervisor 7 to 15 µs of
CPU together, depending on how many share a system call (measured).
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from typing import Final

from rowlock.runtime import messages
from rowlock.runtime.messages import Message

FRAME_BYTES_MAX: Final = 4 * 1024 * 1024
"""The largest message. Every payload in one is bounded far below it, so a larger one is a bug."""

FEED_BYTES_MAX: Final = 1024 * 1024
"""How much one `PolledChannel.feed` reads, so that a chatty executor cannot starve the others."""

_READ_BYTES: Final = 64 * 1024
_LENGTH: Final = struct.Struct(">I")


class BrokenChannel(ConnectionError):
    """The peer sent something that is no message. Nothing after it can be read: end the peer."""


def frame(message: Message) -> bytes:
    """The bytes of a message on the wire.

    Raises:
        ValueError: The message is larger than `FRAME_BYTES_MAX`.
    """
    body = messages.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise ValueError(
            f"a {type(message).__name__} message of {len(body):,} bytes exceeds the limit of"
            f" {FRAME_BYTES_MAX:,}: send it in parts"
        )
    return _LENGTH.pack(len(body)) + body


class Deframer:
    """Turns bytes, cut anywhere, back into messages."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that these bytes complete, in order.

        Raises:
            BrokenChannel: A frame is longer than the limit, or holds no message.
        """
        buffer = self._buffer
        buffer += data
        found: list[Message] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > FRAME_BYTES_MAX:
                raise BrokenChannel(
                    f"a frame announces {length:,} bytes, the limit is {FRAME_BYTES_MAX:,}"
                )
            body = start + _LENGTH.size
            end = body + length
            if len(buffer) < end:
                break
            found.append(_decoded(bytes(buffer[body:end])))
            start = end
        del buffer[:start]
        return found


def _decoded(body: bytes) -> Message:
    try:
        return messages.decode(body)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BrokenChannel(f"a frame holds no message: {body[:80]!r}") from error


class Channel:
    """The executor's side: every call waits. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over the socket; it is put into blocking mode."""
        sock.setblocking(True)
        self._socket = sock
        self._sending = threading.Lock()
        self._deframer = Deframer()
        self._received: deque[Message] = deque()

    def send(self, message: Message) -> None:
        """Send a message whole, whatever other threads send.

        Raises:
            ConnectionError: The supervisor is gone.
            ValueError: The message is larger than `FRAME_BYTES_MAX`.
        """
        data = frame(message)
        with self._sending:
            self._socket.sendall(data)

    def receive(self) -> Message | None:
        """Wait for the next message; None when the supervisor is gone.

        Raises:
            BrokenChannel: The bytes received are no message.
        """
        while not self._received:
            try:
                data = self._socket.recv(_READ_BYTES)
            except ConnectionError:  # reset: it died with answers of ours unread
                return None
            if not data:
                return None
            self._received += self._deframer.feed(data)
        return self._received.popleft()

    def close(self) -> None:
        """Close the socket; the supervisor sees the end of the stream."""
        self._socket.close()


class PolledChannel:
    """The supervisor's side, for a selector: no call waits.

    Register `fileno()` for reading always, and for writing while `unsent` is not zero.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Take over the socket; it is put into non-blocking mode."""
        sock.setblocking(False)
        self._socket = sock
        self._deframer = Deframer()
        self._outbox = bytearray()

    def fileno(self) -> int:
        """The descriptor to select on."""
        return self._socket.fileno()

    @property
    def unsent(self) -> int:
        """Bytes queued that the socket has not taken yet."""
        return len(self._outbox)

    def queue(self, message: Message) -> None:
        """Add a message to what the next `flush` sends; many small ones share a system call.

        Raises:
            ValueError: The message is larger than `FRAME_BYTES_MAX`.
        """
        self._outbox += frame(message)

    def flush(self) -> bool:
        """Send what the socket takes; True when nothing is left.

        Raises:
            ConnectionError: The executor is gone.
        """
        while self._outbox:
            try:
                sent = self._socket.send(self._outbox)
            except BlockingIOError:
                return False
            del self._outbox[:sent]
        return True

    def feed(self) -> list[Message]:
        """All messages that have arrived, up to `FEED_BYTES_MAX` bytes of them; maybe none.

        What arrived before the end of the stream is returned first; the next call raises.

        Raises:
            EOFError: The executor has closed its side.
            ConnectionError: The connection broke, or (`BrokenChannel`) it carries no messages.
        """
        found: list[Message] = []
        left = FEED_BYTES_MAX
        while left > 0:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                if found:
                    break
                raise EOFError("the executor has closed its side of the channel")
            found += self._deframer.feed(data)
            left -= len(data)
            if len(data) < _READ_BYTES:  # the socket is empty: spare the call that says so
                break
        return found

    def close(self) -> None:
        """Close the socket; the executor sees the end of the stream."""
        self._socket.close()
