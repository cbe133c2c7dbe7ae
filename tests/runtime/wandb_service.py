"""What `wandb sweep` and `wandb agent` ask the service of Weights & Biases, answered on this machine.

Only the service is stood in for, by four queries of its API (GraphQL over HTTP); who asks is the package.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from quiet_server import QuietServer

OPEN = "a" * 40  # the form of a key; nobody checks it here


class SweepService:
    """One sweep: the configuration that was sent, and runs for an agent, one after the other."""

    def __init__(self, runs: dict[str, dict[str, Any]], stops: dict[str, Path]) -> None:
        """Hand out ``runs``, names with values of the sweep's parameters.

        A run in ``stops`` is stopped once there is the file that it maps to.
        """
        self.waiting, self.stops = [*runs.items()], dict(stops)
        self.config = ""
        self.started: list[str] = []

    def answer(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        """Return the data of a query's answer."""
        if "agentHeartbeat" in query:
            commands = self._commands(json.loads(given["runState"]))
            return {"agentHeartbeat": {"agent": {"id": "agent"}, "commands": json.dumps(commands)}}
        if "createAgent" in query:
            return {"createAgent": {"agent": {"id": "agent"}}}
        if "upsertSweep" in query:
            self.config = given["config"]
            project = {"name": given["projectName"], "entity": {"name": "team"}}
            sweep = {"name": "sweep1", "project": project}
            return {"upsertSweep": {"sweep": sweep, "configValidationWarnings": []}}
        if "sweepName" in query:
            return {"project": {"sweep": {"name": "sweep1", "config": self.config, "runs": {"edges": []}}}}
        if "viewer" in query:
            return {"viewer": {"id": "me", "entity": "team", "username": "me", "flags": "{}", "teams": None}}
        raise AssertionError(f"nobody has told what this is answered: {query}")

    def _commands(self, running: dict[str, bool]) -> Sequence[dict[str, Any]]:
        """Return what the agent does next: stop its run, wait for it, start another, or exit."""
        stopped = [name for name in running if name in self.stops and self.stops[name].exists()]
        if running:
            return [{"type": "stop", "run_id": name} for name in stopped]
        if not self.waiting:
            return [{"type": "exit"}]
        name, values = self.waiting.pop(0)
        self.started.append(name)
        arguments = {key: {"value": value} for key, value in values.items()}
        return [{"type": "run", "run_id": name, "program": "", "args": arguments}]


@contextlib.contextmanager
def serving(service: SweepService) -> Iterator[str]:
    """Answer at the URL that is given to the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            data = {}
            if self.path == "/graphql":  # else telemetry
                asked = json.loads(body)
                data = service.answer(asked["query"], asked.get("variables", {}))
            reply = json.dumps({"data": data}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = QuietServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
