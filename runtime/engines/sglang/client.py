"""Calls to an SGLang server over HTTP, and the requests and replies of samples in its format."""

from __future__ import annotations

import json
import socket
import urllib.parse
from base64 import b64decode
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlgraph.errors import RunError
from rlgraph.ops.interfaces import Generation, Request, Sampling
from rlgraph.runtime.engines.routing import OWN
from rlgraph.runtime.engines.servers.endpoint import GLANCE, REPLY, Endpoint, UnknownError
from rlgraph.runtime.engines.servers.sample_request import SampleRequest
from rlgraph.runtime.messages.errors import ServerLostError

PARTS = {"weights": ["weights"], "kv": ["kv_cache", "cuda_graph"]}  # ours -> SGLang's tags
FIRST = "default"  # SGLang's name for the weights that a server starts with
STREAMED = 32  # tokens that are streamed together


class Client(Endpoint):
    """An SGLang server."""

    title = "SGLang server"
    variable = "SGLANG_API_KEY"
    generates = "generate"

    def post(self, call: str, body: dict[str, Any], timeout: float = REPLY) -> Any:
        """Make a call, as of any server; SGLang may refuse one in its answer too."""
        answer = super().post(call, body, timeout)
        if isinstance(answer, dict) and answer.get("success") is False:
            law = f"the SGLang server at {self.url} refused {call}"
            raise RunError(f"{law}: {answer.get('message', answer)}")
        return answer

    def version(self) -> str | None:
        info = self.look("model_info")
        return str(info["weight_version"]) if info else None

    def adapters(self) -> list[str]:
        """Return the names of the adapters that it holds.

        Raises:
            ServerLostError: it does not answer.
        """
        models = self.look("v1/models")
        if models is None:
            raise ServerLostError(f"the SGLang server at {self.url} does not answer")
        return [card["id"] for card in models["data"] if card.get("parent")]

    def own_weights(self, answer: dict[str, Any]) -> str | None:
        refused = "meta_info" not in answer
        return FIRST if refused or answer["meta_info"]["weight_version"] == FIRST else None

    def lacks_weights(self, text: str) -> bool:
        """Return whether it refused a sample since it has yet to be brought its adapter."""
        return "LoRA adapter that has never been loaded" in text

    def request_body(self, request: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of a sample's call, with the name that ``abortion`` ends it by."""
        return {"rid": request, **body}

    def tokens(self, chunk: dict[str, Any]) -> Sequence[int]:
        ids: Sequence[int] = chunk["output_ids"]
        return ids

    def joined(self, earlier: Sequence[dict[str, Any]], event: dict[str, Any]) -> dict[str, Any]:
        """Return what is known of a sample: events have new tokens, or all (incremental_streaming_output)."""
        meta = event["meta_info"]
        if not earlier or len(event["output_ids"]) >= meta["completion_tokens"]:
            return event
        (known,) = earlier
        logprobs = known["meta_info"]["output_token_logprobs"] + meta["output_token_logprobs"]
        ids = [*known["output_ids"], *event["output_ids"]]
        return {"output_ids": ids, "meta_info": meta | {"output_token_logprobs": logprobs}}

    def is_left(self, sample_request: SampleRequest) -> bool:
        """Return whether a sample has more to come; its last reply is then as of a server that is lost."""
        meta = sample_request.chunks[-1]["meta_info"]
        if meta["finish_reason"]["type"] != "abort":
            return False
        meta["finish_reason"] = None
        return generation(sample_request, sample_request.chunks).finish == "abort"

    def abortion(self, request: str) -> tuple[str, dict[str, Any]]:
        """Return the call that ends a request, which then comes back as far as it is."""
        return "abort_request", {"rid": request}

    def release(self, components: Iterable[str]) -> None:
        """Release the memory of components, the cache first; nothing may run."""
        for component in sorted(components):
            self.flush()
            self.post("release_memory_occupation", {"tags": PARTS[component]})

    def retake(self, components: Iterable[str]) -> None:
        """Take the memory of components again, the weights first, so that they can be synced."""
        for component in sorted(components, reverse=True):
            self.post("resume_memory_occupation", {"tags": PARTS[component]})

    def flush(self) -> None:
        """Forget cached keys and values, once nothing runs: what was answered is there for a moment more."""
        self.post("flush_cache?timeout=60", {})

    def hold(self) -> None:
        """Stop generating; what runs comes back as far as it is, what comes waits."""
        self.post("pause_generation", {"mode": "abort"})

    def resume(self) -> None:
        """Generate again."""
        self.post("continue_generation", {})

    def begin_update(self) -> None:
        """Open a session of weight updates; one that another left open is closed first.

        A version of SGLang without sessions needs none. A draft model keeps its own weights: it would take
        those of the model for its own, where they have the same names.
        """
        target = {"selector": "target"}
        try:
            self.post("begin_weight_update", target)
        except UnknownError:
            return
        except ServerLostError:
            raise
        except RunError:
            self.end_update()
            self.post("begin_weight_update", target)

    def end_update(self) -> None:
        """Close the session."""
        with suppress(UnknownError):
            self.post("end_weight_update", {})

    def local_address(self) -> str:
        """Return the address of this host on the way to the server."""
        parsed = urllib.parse.urlsplit(self.url)
        try:
            with socket.create_connection((parsed.hostname or "", parsed.port or 80), GLANCE) as way:
                return str(way.getsockname()[0])
        except OSError as error:
            raise ServerLostError(f"the SGLang server at {self.url} can't be reached: {error}") from error


@dataclass(frozen=True)
class Mixture:
    """The layers of a model that are mixtures, the number of all layers, and the experts per token."""

    mixtures: Sequence[int]
    layers: int
    k: int

    def chosen(self, sample_request: SampleRequest, meta: Mapping[str, Any], new: int) -> torch.Tensor:
        """Return the experts that a reply tells: int16 ``[prompt and new tokens, mixtures, k]``.

        SGLang 0.5.23 tells all layers of all tokens but the last, as int32 in base64; and nothing where a
        request was aborted.

        Raises:
            RunError: it tells nothing.
        """
        out = torch.full((len(sample_request.body["input_ids"]) + new, len(self.mixtures), self.k), OWN)
        encoded = meta.get("routed_experts")
        if encoded is None and new and not sample_request.aborted:
            law = "an SGLang server does not tell the experts that it chose"
            raise RunError(f"{law}\n  start it with --enable-return-routed-experts")
        if encoded is not None:
            routed = torch.frombuffer(bytearray(b64decode(encoded)), dtype=torch.int32)
            routed = routed.view(-1, self.layers, self.k)[: len(out) - 1]
            out[: len(routed)] = routed[:, self.mixtures]
        return out.to(torch.int16)


def body(
    request: Request,
    seed: int,
    sampling: Sampling,
    stops: Sequence[int],
    adapter: str = "",
    streamed: bool = False,
) -> dict[str, Any]:
    """Return the body of ``/generate``: one sample, with a log-prob for each token, by an adapter or none."""
    least, most = request.limits(sampling)
    settings = {
        "min_new_tokens": least,
        "max_new_tokens": most,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop),
        "stop_token_ids": [*stops, *sampling.stop_token_ids],
        "sampling_seed": seed & 0x7FFFFFFF,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "regex": sampling.regex,
        "json_schema": None,
    }
    if sampling.json_schema is not None:
        settings["json_schema"] = json.dumps(sampling.json_schema)
    request_body: dict[str, Any] = {"input_ids": list(request.prompt), "sampling_params": settings}
    if adapter:
        request_body["lora_path"] = adapter
    if streamed:
        settings["stream_interval"] = STREAMED
        request_body["stream"] = True
    request_body["return_logprob"] = True
    if sampling.routing:
        request_body["return_routed_experts"] = True
    return request_body


def generation(
    sample_request: SampleRequest, chunks: Sequence[dict[str, Any]], mixture: Mixture | None = None
) -> Generation:
    """Return the sample of a reply, or what is known of it; it is empty where nothing was sent.

    With a ``mixture`` it has the experts that were chosen.

    Raises:
        RunError: its tokens are of other weights than they may be, or the server aborted it by itself, or
            does not tell experts.
    """
    sample = Generation()
    for reply in chunks:
        sample = sample.followed(_generation_of(sample_request, reply))
    if sample.finish == "abort" and sample.tokens:  # it may be with its last token
        settings = sample_request.body["sampling_params"]
        if sample.tokens[-1] in settings["stop_token_ids"]:
            sample = replace(sample, finish="stop")
        elif len(sample.tokens) >= settings["max_new_tokens"]:
            sample = replace(sample, finish="length")
    meta = chunks[-1]["meta_info"] if chunks else {}
    if mixture is None:
        return sample
    return replace(sample, routing=mixture.chosen(sample_request, meta, len(sample.tokens)))


def _generation_of(sample_request: SampleRequest, reply: dict[str, Any]) -> Generation:
    """Return what a reply has, or what is streamed of one that goes on: that is of one version."""
    meta = reply["meta_info"]
    tokens = reply["output_ids"]
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    one_version = {"version": meta["weight_version"], "start": 0, "end": len(tokens)}
    stretches = meta.get("weight_versions") or [one_version]
    promised = sorted(sample_request.versions)
    if not {stretch["version"] for stretch in stretches} <= {*map(str, promised)}:
        versions_told = ", ".join(stretch["version"] for stretch in stretches)
        law = f"an SGLang server generated with weights {versions_told}"
        raise RunError(f"{law}; promised were {', '.join(map(str, promised))}")
    reason = meta["finish_reason"]
    finish = "abort"  # of a sample that goes on
    if reason:
        finish = "text" if isinstance(reason.get("matched"), str) else reason["type"]
        if finish == "abort" and not sample_request.aborted:
            raise RunError(f"an SGLang server aborted a request: {reason.get('message')}")
    versions = list[int]()
    for stretch in stretches:
        versions += [int(stretch["version"])] * (stretch["end"] - stretch["start"])
    assert len(tokens) == len(logprobs) == len(versions), (len(tokens), len(logprobs), len(versions))
    return Generation(tokens, logprobs, finish, versions)
