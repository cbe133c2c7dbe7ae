"""A server that runs programs for verl's sandbox_fusion, by the protocol of SandboxFusion's ``/run_code``.

Its requests and answers are those of sandbox/server/sandbox_api.py of
https://github.com/bytedance/SandboxFusion; programs of Python really run, in processes of their own. Nothing
isolates them: tests alone may use it, with programs that they wrote.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

from quiet_server import QuietServer


def ran(request: dict[str, Any]) -> dict[str, Any]:
    """Return what the server answers: how the program ended, and what it wrote."""
    command = [sys.executable, "-I", "-c", request["code"]]
    options: dict[str, Any] = {"input": request.get("stdin") or "", "capture_output": True, "text": True}
    since = time.monotonic()
    try:
        done = subprocess.run(command, **options, timeout=request["run_timeout"], check=False)
    except subprocess.TimeoutExpired:
        result = {"status": "TimeLimitExceeded", "return_code": None, "stdout": "", "stderr": ""}
    else:
        result = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout}
        result["stderr"] = done.stderr
    succeeded = result["status"] == "Finished" and result["return_code"] == 0
    return {
        "status": "Success" if succeeded else "Failed",
        "message": "",
        "compile_result": None,
        "run_result": {**result, "execution_time": time.monotonic() - since},
        "executor_pod_name": None,
        "files": {},
    }


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/run_code" or request["language"] != "python":
            self.send_error(404)
            return
        answer = json.dumps(ran(request)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@contextlib.contextmanager
def sandbox_server() -> Iterator[str]:
    """Serve while the block runs; gives the address."""
    server = QuietServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/run_code"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
