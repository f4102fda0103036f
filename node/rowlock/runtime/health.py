"""/metrics, /livez and /readyz of a node or an exporter, and nothing on any other path."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from rowlock.errors import UsageError

Check = Callable[[], str | None]
"""None when all is well, else what is wrong, in one line."""
Render = Callable[[str], tuple[bytes, str]]
"""The page of /metrics for an Accept header, and its content type."""

_REQUEST_SECONDS_MAX: Final = 5


class HealthServer:
    """A small HTTP server, in threads of its own."""

    def __init__(self, port: int, *, render: Render, livez: Check, readyz: Check) -> None:
        """Listen on all addresses; port 0 lets the system choose.

        :raises UsageError: the port cannot be bound.
        """

        class Handler(BaseHTTPRequestHandler):
            timeout = _REQUEST_SECONDS_MAX

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    body, content_type = render(self.headers.get("Accept", ""))
                    self._answer(200, body, content_type)
                elif path in {"/livez", "/readyz"}:
                    problem = (livez if path == "/livez" else readyz)()
                    body = f"{problem or 'ok'}\n".encode()
                    self._answer(200 if problem is None else 503, body, "text/plain")
                else:
                    self._answer(404, b"try /metrics, /livez or /readyz\n", "text/plain")

            def _answer(self, status: int, body: bytes, content_type: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name there
                pass  # a probe every second is no news

        try:
            self._server = ThreadingHTTPServer(("", port), Handler)
        except OSError as error:
            raise UsageError(
                f"--http {port}: cannot listen there ({error}); choose another"
            ) from error
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        """The port that is listened on."""
        threading.Thread(target=self._server.serve_forever, name="http", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
