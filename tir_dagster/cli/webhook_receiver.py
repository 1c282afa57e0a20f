"""The HTTP receiver of `tir webhooks listen`: accepts small events from callers that know the secret path."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tir_dagster.tableau.webhooks import BadEventError, WebhookEvent, read_event

LARGEST_BODY = 64 * 1024
# This much of a too large body is read and discarded; otherwise the sender would miss the answer.
_DRAINED = 1024 * 1024
_TIMEOUT_SECONDS = 10.0
_TEXT = "text/plain; charset=utf-8"


class Receiver(ThreadingHTTPServer):
    """HTTP server; calls `note` with each refresh event, and `say` with the result of each call."""

    daemon_threads = True

    def __init__(
        self,
        address: tuple[str, int],
        secret: str,
        *,
        note: Callable[[WebhookEvent], str],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(address, _Handler)
        self.secret = secret
        self.note = note
        self.say = say

    def knows(self, path: str) -> bool:
        """Return whether the path ends with the secret; a proxy may add a prefix."""
        last = path.partition("?")[0].rpartition("/")[2]
        return hmac.compare_digest(last.encode("utf-8", "replace"), self.secret.encode())

    def answer(self, body: bytes) -> tuple[int, str]:
        """Return status and text; 200 also for irrelevant events, because Tableau disables webhooks that fail."""
        try:
            event = read_event(body)
        except BadEventError as error:
            return 400, str(error)
        if event is None:
            return 200, "nothing to note"
        try:
            return 200, self.note(event)
        except Exception as error:
            # Tableau sends the event again; Dagster's history may be reachable then.
            return 500, f"{event.kind} of {event.name!r} could not be noted ({type(error).__name__})"

    def handle_error(self, *_: object) -> None:
        """Print one line instead of a traceback when a caller hangs up."""
        self.say("a call was interrupted")


class _Handler(BaseHTTPRequestHandler):
    server: Receiver
    timeout = _TIMEOUT_SECONDS
    server_version, sys_version = "tir_dagster", ""

    def do_POST(self) -> None:
        length = self._length()
        if not self.server.knows(self.path):
            self._end(404, "nothing here", drain=length or 0)
        elif length is None:
            self._end(400, "the call has no Content-Length")
        elif length > LARGEST_BODY:
            self._end(413, f"the body has more than {LARGEST_BODY} bytes", drain=length)
        else:
            self._end(*self.server.answer(self.rfile.read(length)))

    def do_GET(self) -> None:
        self._end(404, "nothing here")

    def _length(self) -> int | None:
        text = self.headers.get("Content-Length", "")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None

    def _end(self, status: int, text: str, *, drain: int = 0) -> None:
        if drain:
            self.rfile.read(min(drain, _DRAINED))
        self.server.say(f"{status} {text}")
        # Without details: the caller need not know which extracts exist.
        body = b"ok\n" if status == 200 else f"{text}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", _TEXT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Suppress the usual log line: it would show the path, which contains the secret."""
