"""Samples from several servers, in any engine's form: one request for each seed of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlgraph.nodes.rollout.stop_text import cut_at_text
from rlgraph.ops.interfaces import Enough, Generation, Request, Sampling, Tokenizer
from rlgraph.runtime.engines.servers.calls import Calls
from rlgraph.runtime.engines.servers.sample_request import SampleRequest

Read = Callable[[SampleRequest, Sequence[dict[str, Any]]], Generation]


def check_lengths(requests: Sequence[Request], sampling: Sampling, context: int | None) -> None:
    """Check that every prompt has a token, and fits the model's context with its new tokens.

    Raises:
        ValueError: one does not.
    """
    for index, request in enumerate(requests):
        _, new_tokens = request.limits(sampling)
        total = len(request.prompt) + new_tokens
        if not request.prompt:
            raise ValueError(f"request {index}: 0 prompt tokens; it must be at least 1")
        if context is not None and total > context:
            law = f"request {index}: {total} tokens are more than the model's context of {context}"
            raise ValueError(law)


@dataclass
class Sample:
    """A sample that a call wants: its request, what was drawn before that, and what was returned already."""

    sample_request: SampleRequest
    earlier: Generation = field(default_factory=Generation)  # drawn by requests that were aborted
    returned_tokens: int = 0  # by earlier calls

    def new_tokens(self, read: Read, chunks: Sequence[dict[str, Any]]) -> Generation:
        """Return what no call has returned, given the chunks of the reply that have come."""
        generation = read(self.sample_request, chunks)
        if self.earlier.tokens:
            generation = self.earlier.followed(generation)
        start = self.returned_tokens
        if start == 0:
            return generation
        return Generation(
            generation.tokens[start:],
            generation.logprobs[start:],
            generation.finish,
            generation.versions[start:],
        )


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
        body: returns the HTTP request for one sample, from its request and its seed.
        read: returns the sample that the chunks of a reply hold, of which some may not have come yet.
        enough: called with the numbers of requests that have samples; once it returns True, the others are
            aborted, or go on.
        stays: whether they go on, and the next such call takes them up: see ``ServeEngine``.

    Raises:
        RunError: a server refused, or ``read`` refused its answer.
        ServerLostError: no server is left.
    """
    requested = [number for number, request in enumerate(requests) for _ in request.seeds]
    server_share = -(-len(requested) // len(calls.clients))  # where all servers get as many
    batch = next(calls.batches)
    unfinished: dict[tuple[int, ...], list[Sample]] = calls.unfinished if stays else {}

    def new_sample(request: Request, seed: int, conversation: Hashable, earlier: Generation) -> Sample:
        def body_behind(tokens: Sequence[int]) -> dict[str, Any]:
            return body(request.behind(tokens, sampling), seed)

        sample_request = SampleRequest(
            body(request, seed), conversation, {version}, continued_body=body_behind
        )
        sample_request.is_cut = sampling.regex is None and sampling.json_schema is None
        return Sample(sample_request, earlier)

    def sample_of(number: int, index: int, seed: int) -> Sample:
        """Return the sample of a seed: an unfinished one of its prompt, or a new one."""
        request = requests[number]
        conversation = request.conversation or (batch, number, index // server_share)
        waiting = unfinished.get((*request.prompt,))
        if not waiting:
            return new_sample(request, seed, conversation, Generation())
        sample = waiting.pop()
        if not sample.sample_request.aborted:
            return sample
        task = calls.staying[sample.sample_request]
        earlier = sample.new_tokens(read, task.result()) if task.done() else Generation()
        if earlier.finish != "abort":
            return sample
        return new_sample(request.behind(earlier.tokens, sampling), seed, conversation, earlier)

    samples = []
    for number, request in enumerate(requests):
        for index, seed in enumerate(request.seeds):
            samples.append(sample_of(number, index, seed))
    replies = calls.run([sample.sample_request for sample in samples], enough, requested, stays)
    drawn = [sample.new_tokens(read, chunks) for sample, chunks in zip(samples, replies, strict=True)]
    generations: list[list[Generation]] = [[] for _ in requests]
    if stays:
        calls.unfinished = {}
    for number, sample, generation in zip(requested, samples, drawn, strict=True):
        generations[number].append(generation)
        if stays:
            sample.returned_tokens += len(generation.tokens)
            if generation.finish == "abort":
                tokens = (*requests[number].prompt, *generation.tokens)
                calls.unfinished.setdefault(tokens, []).append(sample)
    return generations


def cut(
    tokenizer: Tokenizer, generations: list[list[Generation]], sampling: Sampling
) -> list[list[Generation]]:
    """Return samples cut where a stop text is complete, whatever a server has seen of it."""
    texts = sampling.stop
    if not texts:
        return generations
    cut_generations = []
    for of_request in generations:
        cut_generations.append([cut_at_text(tokenizer, generation, texts) for generation in of_request])
    return cut_generations
