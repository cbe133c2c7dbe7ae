"""The serve engine ``openai``: any OpenAI-compatible completions endpoint, for frozen models.

Covers judges, teachers and rollouts of frozen models: token ids in, token ids and log-probs out, over servers
that someone else started. Of an aborted sample nothing comes back: its request ends with its connection.

Not covered: weights. They are the server's own, so nothing is synced, put to sleep or scored. Whether seeds
are followed, and whether log-probs are of the distribution at the temperature, is the server's to decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlgraph.errors import RunError
from rlgraph.ops.interfaces import Enough, Generation, Request, Sampling
from rlgraph.runtime.engines.model_files import ModelFiles, context_of
from rlgraph.runtime.engines.openai.completions import FORMS, Completions, body, generation, model_of
from rlgraph.runtime.engines.servers.calls import Calls
from rlgraph.runtime.engines.servers.endpoint import UnknownError
from rlgraph.runtime.engines.servers.groups import in_turn
from rlgraph.runtime.engines.servers.sample_request import SampleRequest
from rlgraph.runtime.engines.servers.samples import check_lengths, cut, generate
from rlgraph.runtime.messages.errors import ServerLostError

if TYPE_CHECKING:
    from rlgraph.runtime.engines.contract import HostedServeEngine

PATIENCE = 60.0  # seconds in which one of several servers has to be back
PROBE = 120.0  # seconds in which the first token has to come


class OpenAIEngine:
    """Generates with servers that run already and have weights of their own.

    Example:
        engine = OpenAIEngine("Qwen/Qwen2.5-0.5B-Instruct", addresses=["http://localhost:8000"])
        engine.generate([Request(prompt=[9707], seeds=[0, 1])], Sampling(max_new_tokens=16))

    Args:
        path: a model directory or a hub name; configuration and tokenizer are read from it.
        addresses: of the servers, as ``http://host:8000``; their key is in ``OPENAI_API_KEY``.
        max_rows: samples of this engine in flight on a server at a time; the others wait here.
        requests: ``request_timeout`` and ``request_retries``, as ``models.NAME.serve``.
        options: fields of a request's own, such as ``{"model": "judge"}``; they go with every one.
        config, trust_remote_code: as ``models.NAME``; the servers have their own.
        pool: the process group of all who send requests to these servers, each beginning at another one.

    Raises:
        RunError: a server has no such model, or does not return token ids and log-probs.
        ServerLostError: a server does not answer.
    """

    overlaps = True
    version = 0
    notes: Sequence[str] = ()  # nothing of it differs from the plan

    def __init__(
        self,
        path: str,
        *,
        addresses: Sequence[str],
        max_rows: int = 1024,
        options: Mapping[str, Any] | None = None,
        pool: dist.ProcessGroup | None = None,
        config: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        **requests: Any,
    ) -> None:
        self.path = path
        files = ModelFiles(path, config or {}, trust_remote_code)
        self.tokenizer = files.tokenizer()
        text = files.config().get_text_config()
        self.context = context_of(text)
        self.stops = files.stop_ids(text, self.tokenizer)
        servers = Completions.of_addresses(addresses)
        self.request_fields = dict(options or {})
        self.request_fields["model"] = self.request_fields.get("model") or model_of(servers[0], path)
        self.request_fields |= self._form(servers)
        servers = in_turn(pool.rank() if pool else 0, servers)
        self.calls = Calls(servers, max_rows, PATIENCE, lambda: 0, None, **requests)

    def _form(self, servers: Sequence[Completions]) -> dict[str, Any]:
        """Return the form in which the first server returns token ids, once all have returned one in it."""
        errors = []
        for form in FORMS:
            try:
                for server in servers:
                    _probe(server, {**self.request_fields, **form})
                return form
            except (ServerLostError, UnknownError):
                raise
            except RunError as error:
                errors.append(str(error))
        raise RunError("\n".join(errors))

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        enough: Enough | None = None,
        stays: bool = False,
    ) -> list[list[Generation]]:
        """Continue each request's prompt once for each of its seeds; the order is that of the requests.

        Of what ``stays`` in flight no token is known before it ends.

        Raises:
            ValueError: an empty prompt, or one that with ``max_new_tokens`` exceeds the model's context.
            RunError: a server refused, or answered without token ids or log-probs.
            ServerLostError: no server is left.
        """
        check_lengths(requests, sampling, self.context)
        make_body = partial(body, sampling=sampling, stops=self.stops, asked=self.request_fields)
        generations = generate(self.calls, requests, sampling, 0, make_body, generation, enough, stays)
        return cut(self.tokenizer, generations, sampling)

    def abort(self) -> None:
        """End what is in flight; ``generate`` gives back what there is of it."""
        self.calls.abort()

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Refuse weights: those of the servers are their own.

        Raises:
            RuntimeError: always.
        """
        self._refuse("load_weights")

    def sleep(self, components: Sequence[str]) -> None:
        """Refuse to free memory, which is the servers'.

        Raises:
            RuntimeError: always.
        """
        self._refuse("sleep")

    def wake(self, components: Sequence[str]) -> None:
        """Refuse to take memory, which is the servers'.

        Raises:
            RuntimeError: always.
        """
        self._refuse("wake")

    def _refuse(self, call: str) -> None:
        urls = ", ".join(client.url for client in self.calls.clients)
        law = f"the servers at {urls} run already, with weights of their own"
        raise RuntimeError(f"{self.path}: no {call}: {law}; serve the model with another engine for that")

    def settle(self, call: str) -> None:
        """End what stays in flight between calls."""
        self.calls.abort(staying=True)

    def close(self) -> None:
        """End the connections."""
        self.calls.close()


def _probe(server: Completions, asked: Mapping[str, Any]) -> None:
    """Ask a server for one token, and check that it returns the token's id and log-prob."""
    # SGLang takes a prompt of zeros for none
    call = body(Request([1], [0]), 0, sampling=Sampling(1, 0.0), stops=[], asked=asked)
    generation(SampleRequest(call, None), [server.post(server.generates, call, PROBE)])


if TYPE_CHECKING:  # mypy: it has every member that a worker calls
    ENGINE: type[HostedServeEngine] = OpenAIEngine
