"""Translates a sample's request and reply to and from SGLang's format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlgraph.errors import RunError
from rlgraph.ops.interfaces import Generation, Request, Sampling
from rlgraph.runtime.engines.servers.calls import Ask
from rlgraph.runtime.engines.servers.samples import limit


def body(request: Request, seed: int, sampling: Sampling, stops: Sequence[int]) -> dict[str, Any]:
    """Return the body of ``/generate``: one sample, with a log-prob for each token."""
    settings = {
        "max_new_tokens": limit(request, sampling),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": list(stops),
        "sampling_seed": seed & 0x7FFFFFFF,
    }
    return {"input_ids": list(request.prompt), "sampling_params": settings, "return_logprob": True}


def generation(ask: Ask, reply: dict[str, Any] | None) -> Generation:
    """Return a reply as a generation; None was aborted before it was sent.

    Raises:
        RunError: its tokens are of other weights than they may be, or the server aborted it by itself.
    """
    if reply is None:
        return Generation([], [], "abort")
    meta = reply["meta_info"]
    parts = meta["weight_versions"]
    if not {part["version"] for part in parts} <= {str(version) for version in ask.versions}:
        law = f"an SGLang server generated with weights {', '.join(part['version'] for part in parts)}"
        raise RunError(f"{law}; promised were {', '.join(map(str, sorted(ask.versions)))}")
    finish, tokens = meta["finish_reason"]["type"], reply["output_ids"]
    if finish == "abort" and not ask.aborted:
        raise RunError(f"an SGLang server aborted a request: {meta['finish_reason'].get('message')}")
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    versions = [int(part["version"]) for part in parts for _ in range(part["start"], part["end"])]
    assert len(tokens) == len(logprobs) == len(versions), (len(tokens), len(logprobs), len(versions))
    return Generation(tokens, logprobs, finish, versions)
