"""Serves the newest metrics of a run over HTTP, for Prometheus to scrape (text format 0.0.4).

# TYPE rlgraph_reward_mean gauge
rlgraph_reward_mean{graph="grpo",name="reward/mean"} 0.53
"""

import json
import re
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from rlgraph.errors import RunError
from rlgraph.runtime.messages.address import host_port
from rlgraph.runtime.rundir.trackers import SampleRow, Values

TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsServer(ThreadingHTTPServer):
    """Answers each request in a thread of its own."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of who hangs up before the answer: the terminal is the run's."""


class MetricsEndpoint:
    """A tracker that answers ``GET /metrics`` while the run goes on."""

    def __init__(self, address: str, graph: str) -> None:
        """Listen at ``[HOST:]PORT``: by default of this machine alone; port 0 is any that is free.

        Raises:
            RunError: nothing can listen there.
        """
        self.graph = graph
        self.text = ""
        self.evaluated = dict[str, float]()
        host, _, port = address.rpartition(":")
        try:
            self.server = MetricsServer((host or "127.0.0.1", int(port)), self._handler())
        except (OSError, ValueError, OverflowError) as error:
            law = f"--metrics-port {address}: nothing can listen there: {error}"
            raise RunError(f"{law}\n  name another: 9464, or 0.0.0.0:9464 for other hosts to ask") from None
        self.url = f"http://{host_port(str(self.server.server_address[0]), self.server.server_port)}/metrics"
        Thread(target=self.server.serve_forever, daemon=True).start()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        endpoint = self

        class MetricsHandler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_there = self.path.partition("?")[0] == "/metrics"
                body = endpoint.text.encode() if is_there else b"not found\n"
                self.send_response(200 if is_there else 404)
                self.send_header("Content-Type", TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing: the terminal is the run's."""

        return MetricsHandler

    def log(self, values: Values, step: int) -> None:
        """Serve these numbers from now on, with the iteration and the time at which they came.

        An evaluation's are served until the next: who asks once per minute may miss its iteration.
        """
        self.evaluated |= {name: value for name, value in values.items() if name.startswith("eval/")}
        newest = {"step": step, "timestamp_seconds": time.time(), **self.evaluated, **values}
        self.text = exposition(newest, self.graph)

    def samples(self, name: str, rows: Sequence[SampleRow], step: int) -> None:
        """Serve nothing of what the model wrote."""

    def close(self, failed: bool = False) -> None:
        """Answer no longer."""
        self.server.shutdown()
        self.server.server_close()


def exposition(values: Values, graph: str) -> str:
    """Return gauges in Prometheus's text format; ``name`` has a metric's own name.

    Example:
        >>> print(exposition({"eval/pass@8": 0.5}, "grpo"), end="")
        # TYPE rlgraph_eval_pass_8 gauge
        rlgraph_eval_pass_8{graph="grpo",name="eval/pass@8"} 0.5
    """
    families: dict[str, list[str]] = {}
    for name, value in values.items():
        family = "rlgraph_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
        of_graph, own = (json.dumps(text, ensure_ascii=False) for text in (graph, name))
        labels = f"graph={of_graph},name={own}"
        families.setdefault(family, []).append(f"{family}{{{labels}}} {float(value)!r}\n")
    return "".join(f"# TYPE {name} gauge\n{''.join(lines)}" for name, lines in families.items())
