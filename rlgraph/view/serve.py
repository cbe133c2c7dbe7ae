"""Serves a page on this machine. Each request renders it again, so that it follows a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlgraph.errors import RlgraphError
from rlgraph.view.page import page

CONTENTS = "/contents.json"
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # which the page itself can't say
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
}
PageReply = tuple[int, str, str]  # status, type, text


def server(make: Callable[[], dict[str, Any]], port: int, follow: bool) -> ThreadingHTTPServer:
    """Return a server that only this machine can reach; port 0 is any free port.

    ``make`` returns the contents of this moment. ``follow``: the page asks for newer ones by itself.
    """

    class PageHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # a page of another site may reach this address under a name of its own, and read what is here
            host = self.headers.get("Host", "").partition(":")[0]
            local = host in ("localhost", "127.0.0.1")
            try:
                status, kind, text = _answer(self.path, make, follow) if local else (403, "text/plain", "")
            except (RlgraphError, ValueError, KeyError) as error:  # a file that is being written, say
                status, kind, text = 503, "text/plain", f"it can't be shown now: {error}"
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            for name, value in HEADERS.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: the terminal shows the address alone."""

    return ThreadingHTTPServer(("127.0.0.1", port), PageHandler)


def _answer(path: str, make: Callable[[], dict[str, Any]], follow: bool) -> PageReply:
    if path == CONTENTS:
        return 200, "application/json", json.dumps({**make(), "follow": CONTENTS})
    if path == "/":
        return 200, "text/html", page(make(), CONTENTS if follow else "")
    return 404, "text/plain", "not found"
