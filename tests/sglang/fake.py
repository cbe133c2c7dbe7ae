"""A server that keeps SGLang's rules and computes nothing: for tests of who calls what when.

What it refuses, the real one refuses; where the real one would end itself, this one does (``dead``).
`test_states.py` runs on both.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from quiet_server import QuietServer
from rlgraph.runtime.engines.sglang.client import FIRST, Client

KEY, STEP = "a key", 0.002  # the API key, and the seconds that a token takes


class Fake:
    """A server in a thread of this process."""

    def __init__(self, dies_after: int = 1 << 30, unknown: Collection[str] = (), port: int = 0) -> None:
        """Up.

        Args:
            dies_after: requests to generate after which it is gone without an answer.
            unknown: calls that its version does not have.
            port: that it answers on; 0: any.
        """
        self.unknown = unknown
        self.changed = threading.Condition()
        self.version, self.session, self.paused, self.dead = FIRST, False, False, ""
        self.away: set[str] = set()
        self.adapters: list[str] = []
        self.running: dict[str, dict[str, Any]] = {}
        self.gone: set[str] = set()  # asked to end before they ran: who sent them hangs up
        self.served, self.dies_after = 0, dies_after
        self.prompts: list[list[int]] = []  # of all requests, in order
        self.most = 0  # requests that ran at a time
        self.info: dict[str, Any] = {"tp_size": 1, "dp_size": 1, "pp_size": 1}
        self.calls: list[tuple[str, dict[str, Any]]] = []  # but for looks, in order
        self.server = QuietServer(("127.0.0.1", port), type("Handler", (_Handler,), {"fake": self}))
        self.server.daemon_threads = True
        self.client = Client(f"http://127.0.0.1:{self.server.server_port}", KEY)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Gone; what waits for it is cut off."""
        with self.changed:
            self.dead = self.dead or "closed"
            self.changed.notify_all()
        self.server.shutdown()
        self.server.server_close()

    def answer(self, call: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and content of the reply to a call."""
        call = call.replace("/", "_")
        with self.changed:
            known = call not in self.unknown and hasattr(self, f"_{call}")
            if body:
                self.calls.append((call, body))
            made = getattr(self, f"_{call}")(body) if known else (404, {"detail": "Not Found"})
            self.changed.notify_all()
            return made if isinstance(made, tuple) else (200, made)

    def _model_info(self, body: dict[str, Any]) -> Any:
        return {"weight_version": self.version}

    def _server_info(self, body: dict[str, Any]) -> Any:
        return self.info

    def _health(self, body: dict[str, Any]) -> Any:
        return "" if not self.away else self._die("generates while parts are released")

    def _generate(self, body: dict[str, Any]) -> Any:
        self.served += 1
        self.prompts.append(body["input_ids"])
        if self.served > self.dies_after:
            return self._die("as it was told")
        if self.away:
            return self._die("generates while parts are released")
        if (adapter := body.get("lora_path")) and adapter not in self.adapters:
            return 400, {"error": {"message": f"Got LoRA adapter that has never been loaded: {adapter}"}}
        self.changed.wait_for(lambda: not self.paused or self.dead)
        made: dict[str, Any] = {"versions": [], "aborted": body["rid"] in self.gone}
        self.running[body["rid"]] = made
        self.most = max(self.most, len(self.running))
        longest = body["sampling_params"]["max_new_tokens"]
        while len(made["versions"]) < longest and not made["aborted"] and not self.dead:
            if not self.paused:
                made["versions"].append(self.version)
            self.changed.wait(STEP)
        del self.running[body["rid"]]
        return self._reply(made)

    def _reply(self, made: dict[str, Any]) -> Any:
        versions, spans = made["versions"], []
        for version in dict.fromkeys(versions):
            start = versions.index(version)
            spans.append({"version": version, "start": start, "end": start + versions.count(version)})
        meta = {
            "finish_reason": {"type": "abort" if made["aborted"] else "length"},
            "output_token_logprobs": [[-1.0, 7, None]] * len(versions),
            "weight_version": versions[-1] if versions else self.version,
            "weight_versions": spans,
        }
        return {"output_ids": [7] * len(versions), "meta_info": meta}

    def _abort_request(self, body: dict[str, Any]) -> Any:
        if "rid" in body and body["rid"] not in self.running:
            self.gone.add(body["rid"])
        for rid, made in self.running.items():
            made["aborted"] |= body.get("abort_all", False) or rid == body.get("rid")
        return ""

    def _pause_generation(self, body: dict[str, Any]) -> Any:
        self.paused = True
        if body["mode"] == "abort":
            self._abort_request({"abort_all": True})
            self.changed.wait_for(lambda: not self.running or self.dead)
        return {"status": "ok"}

    def _continue_generation(self, body: dict[str, Any]) -> Any:
        self.paused = False
        return {"status": "ok"}

    def _idle(self) -> bool:
        return self.paused or not self.running

    def _flush_cache(self, body: dict[str, Any]) -> Any:
        longest = body.get("timeout", 0.0)  # a flush that waits does so for what is paused too
        idle = (
            self.changed.wait_for(lambda: not self.running or self.dead, longest) if longest else self._idle()
        )
        return "Cache flushed." if idle else (400, "Flush cache failed.")

    def _begin_weight_update(self, body: dict[str, Any]) -> Any:
        if self.session:
            return 400, {"success": False, "message": "a weight-update session is already open"}
        self.changed.wait_for(lambda: self._idle() or self.dead)  # as for a writer's lock
        self.session = True
        return {"success": True, "message": "Success"}

    def _end_weight_update(self, body: dict[str, Any]) -> Any:
        if not self.session:
            return 400, {"success": False, "message": "no weight-update session is open"}
        self.session = False
        return {"success": True, "message": "Success"}

    def _update_weights_from_tensor(self, body: dict[str, Any]) -> Any:
        if not self.session:
            return 400, {"success": False, "message": "must run between begin and end_weight_update()"}
        return self._update_weights_from_disk(body)

    def _update_weights_from_disk(self, body: dict[str, Any]) -> Any:
        if "weights" in self.away:
            return self._die("updated while its weights are released")
        self.version = body["weight_version"]
        return {"success": True, "message": "Success"}

    def _v1_models(self, body: dict[str, Any]) -> Any:
        return {"data": [{"id": "base"}, *({"id": name, "parent": "base"} for name in self.adapters)]}

    def _load_lora_adapter_from_tensors(self, body: dict[str, Any]) -> Any:
        if body["lora_name"] in self.adapters:
            return 400, {"success": False, "error_message": "it is already loaded"}
        self.adapters.append(body["lora_name"])
        return {"success": True}

    def _unload_lora_adapter(self, body: dict[str, Any]) -> Any:
        if body["lora_name"] not in self.adapters:
            return 400, {"success": False, "error_message": "does not exist"}
        self.adapters.remove(body["lora_name"])
        return {"success": True}

    def _update_weight_version(self, body: dict[str, Any]) -> Any:
        self.version = body["new_version"]
        return {"success": True}

    def _release_memory_occupation(self, body: dict[str, Any]) -> Any:
        if not self._idle():
            return self._die("released while it generates")
        self.away |= {*body["tags"]}
        return None

    def _resume_memory_occupation(self, body: dict[str, Any]) -> Any:
        if not {*body["tags"]} <= self.away:
            return self._die("resumes what is not released")
        self.away -= {*body["tags"]}
        return None

    def _die(self, why: str) -> None:
        self.dead = self.dead or why
        threading.Thread(target=self.close, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    fake: Fake
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._do({})

    def do_POST(self) -> None:
        self._do(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _do(self, body: dict[str, Any]) -> None:
        parsed = urlsplit(self.path)
        if self.headers.get("Authorization") != f"Bearer {KEY}":
            return self._say(401, {"error": "Unauthorized"})
        if parsed.query:
            name, _, value = parsed.query.partition("=")
            body[name] = float(value)
        status, content = self.fake.answer(parsed.path.strip("/"), body)
        if self.fake.dead:
            self.close_connection = True  # without a reply
            return None
        return self._say(status, content)

    def _say(self, status: int, content: Any) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: Any) -> None:
        """Nothing is logged."""
