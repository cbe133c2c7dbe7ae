"""Samples asked of several servers, in any engine's form: one call for each seed of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlgraph.nodes.rollout.stop_text import cut_at_text
from rlgraph.ops.interfaces import Enough, Generation, Request, Sampling, Tokenizer
from rlgraph.runtime.engines.servers.calls import Ask, Calls


def check_lengths(requests: Sequence[Request], sampling: Sampling, context: int | None) -> None:
    """Check that every prompt has a token, and fits the model's context with its new tokens.

    Raises:
        ValueError: one does not.
    """
    for index, request in enumerate(requests):
        whole = len(request.prompt) + request.limits(sampling)[1]
        if not request.prompt:
            raise ValueError(f"request {index}: 0 prompt tokens; it must be at least 1")
        if context is not None and whole > context:
            law = f"request {index}: {whole} tokens are more than the model's context of {context}"
            raise ValueError(law)


def generate(
    calls: Calls,
    requests: Sequence[Request],
    version: int,
    body: Callable[[Request, int], dict[str, Any]],
    read: Callable[[Ask, dict[str, Any] | None], Generation],
    enough: Enough | None = None,
) -> list[list[Generation]]:
    """Continue each request's prompt once for each of its seeds; the order is that of the requests.

    Samples of one prompt go to one server, as far as all servers get as many: it reads the prompt once.

    Args:
        calls: to the servers.
        requests: what to continue.
        version: of the weights that tokens have to be of.
        body: makes the call of one sample, from its request and its seed.
        read: makes the sample of an answer; of None where it was aborted before it was sent.
        enough: told of which requests samples are here; once it says so the others are aborted.

    Raises:
        RunError: a server refused, or ``read`` refused its answer.
        ServerLostError: no server is left.
    """
    requested = [number for number, request in enumerate(requests) for _ in request.seeds]
    share = -(-len(requested) // len(calls.clients))  # a server's share, where all get as many
    begun = next(calls.begun)
    asks = [
        Ask(body(request, seed), request.conversation or (begun, number, place // share), {version})
        for number, request in enumerate(requests)
        for place, seed in enumerate(request.seeds)
    ]
    samples = map(read, asks, calls.run(asks, enough, requested))
    return [[next(samples) for _ in request.seeds] for request in requests]


def cut(tokenizer: Tokenizer, made: list[list[Generation]], sampling: Sampling) -> list[list[Generation]]:
    """Return samples cut where a stop text is whole, whatever a server has seen of it."""
    texts = sampling.stop
    return [[cut_at_text(tokenizer, one, texts) for one in many] for many in made] if texts else made
