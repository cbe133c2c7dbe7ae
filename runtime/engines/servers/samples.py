"""Samples asked of several servers, in any engine's form: one call for each seed of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlgraph.nodes.rollout.stop_text import cut_at_text
from rlgraph.ops.interfaces import Enough, Generation, Request, Sampling, Tokenizer
from rlgraph.runtime.engines.servers.asks import Ask
from rlgraph.runtime.engines.servers.calls import Calls

Read = Callable[[Ask, Sequence[dict[str, Any]]], Generation]


def check_lengths(requests: Sequence[Request], sampling: Sampling, context: int | None) -> None:
    """Check that every prompt has a token, and fits the model's context with its new tokens.

    Raises:
        ValueError: one does not.
    """
    for index, request in enumerate(requests):
        total = len(request.prompt) + request.limits(sampling)[1]
        if not request.prompt:
            raise ValueError(f"request {index}: 0 prompt tokens; it must be at least 1")
        if context is not None and total > context:
            law = f"request {index}: {total} tokens are more than the model's context of {context}"
            raise ValueError(law)


@dataclass
class InHand:
    """A sample that a call asks for: its request, and what of it was drawn before that and told already."""

    ask: Ask
    # what requests that were aborted have drawn, and nobody was told
    before: Generation = field(default_factory=Generation)
    told: int = 0  # tokens that earlier calls have returned

    def made(self, read: Read, pieces: Sequence[dict[str, Any]]) -> Generation:
        """Return what of it is new, by what is known of the reply to its request."""
        generation, returned = read(self.ask, pieces), self.told
        if self.before.tokens:
            generation = self.before.followed(generation)
        if returned:
            generation = Generation(
                generation.tokens[returned:],
                generation.logprobs[returned:],
                generation.finish,
                generation.versions[returned:],
            )
        return generation


def generate(
    calls: Calls,
    requests: Sequence[Request],
    sampling: Sampling,
    version: int,
    body: Callable[[Request, int], dict[str, Any]],
    read: Read,
    enough: Enough | None = None,
    stays: bool = False,
) -> list[list[Generation]]:
    """Continue each request's prompt once for each of its seeds; the order is that of the requests.

    Samples of one prompt go to one server, as far as all servers get as many: it reads the prompt once.

    Args:
        calls: to the servers.
        requests: what to continue.
        sampling: how.
        version: of the weights that tokens have to be of.
        body: makes the call of one sample, from its request and its seed.
        read: makes the sample of the reply to a request, or of the pieces that are known of it.
        enough: told of which requests samples are here; once it says so the others are aborted, or go on.
        stays: whether they go on, and the next such call takes them up: see ``ServeEngine``.

    Raises:
        RunError: a server refused, or ``read`` refused its answer.
        ServerLostError: no server is left.
    """
    requested = [number for number, request in enumerate(requests) for _ in request.seeds]
    share = -(-len(requested) // len(calls.clients))  # a server's share, where all get as many
    batch, unfinished = next(calls.begun), calls.left if stays else {}

    def new(request: Request, seed: int, conversation: Hashable, before: Generation) -> InHand:
        def behind(tokens: Sequence[int]) -> dict[str, Any]:
            return body(request.behind(tokens, sampling), seed)

        ask = Ask(body(request, seed), conversation, {version}, behind=behind)
        ask.is_cut = sampling.regex is None and sampling.json_schema is None
        return InHand(ask, before)

    def sample(number: int, place: int, seed: int) -> InHand:
        request = requests[number]
        conversation = request.conversation or (batch, number, place // share)
        if waiting := unfinished.get((*request.prompt,)):
            same: InHand = waiting.pop()
            task = calls.staying[same.ask]
            if not same.ask.aborted:
                return same
            before = same.made(read, task.result()) if task.done() else Generation()
            if before.finish != "abort":
                return same
            return new(request.behind(before.tokens, sampling), seed, conversation, before)
        return new(request, seed, conversation, Generation())

    samples = [
        sample(n, place, seed) for n, one in enumerate(requests) for place, seed in enumerate(one.seeds)
    ]
    known = calls.run([sample.ask for sample in samples], enough, requested, stays)
    made = [one.made(read, pieces) for one, pieces in zip(samples, known, strict=True)]
    if stays:
        calls.left = {}
        for number, one, part in zip(requested, samples, made, strict=True):
            one.told += len(part.tokens)
            if part.finish == "abort":
                calls.left.setdefault((*requests[number].prompt, *part.tokens), []).append(one)
    parts = iter(made)
    return [[next(parts) for _ in request.seeds] for request in requests]


def cut(
    tokenizer: Tokenizer, generations: list[list[Generation]], sampling: Sampling
) -> list[list[Generation]]:
    """Return samples cut where a stop text is whole, whatever a server has seen of it."""
    texts = sampling.stop
    return (
        [[cut_at_text(tokenizer, generation, texts) for generation in many] for many in generations]
        if texts
        else generations
    )
