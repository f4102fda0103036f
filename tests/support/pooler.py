"""A stand-in for a connection pooler in transaction mode, as far as a client can notice one.

It passes everything on, but tells the client another backend pid than the server's: poolers give
each client a number of their own, and that difference is how rowlock recognises them.
"""

from __future__ import annotations

import struct
from typing import Final

from tests.support.pgproxy import PgProxy

_BACKEND_KEY: Final = b"K"
PRETENDED_PID: Final = 4_194_305  # larger than any pid of Linux


class Pooler(PgProxy):
    """A proxy whose clients get the wrong pid."""

    def answer(self, message: bytes) -> bytes:
        """What a client gets for a message of the server."""
        if message[:1] != _BACKEND_KEY:
            return message
        return message[:5] + struct.pack("!i", PRETENDED_PID) + message[9:]
