"""A serve engine whose answers a function gives, from the text of the prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlgraph.ops import Enough, Generation, Request, Sampling


class ScriptedEngine:
    """Draws the ids of the text that ``reply`` returns for a prompt's text, and keeps what it was asked."""

    version = 3

    def __init__(self, tokenizer: Any, reply: Callable[[str], str], overlaps: bool = False) -> None:
        self.tokenizer, self.reply, self.overlaps = tokenizer, reply, overlaps
        self.prompts: list[Sequence[int]] = []
        self.calls: list[int] = []  # how many samples each call drew
        self.drawn: list[Generation] = []

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        enough: Enough | None = None,
        stays: bool = False,
    ) -> list[list[Generation]]:
        self.calls.append(sum(len(request.seeds) for request in requests))
        return [[self._draw(request, sampling) for _ in request.seeds] for request in requests]

    def abort(self) -> None:
        pass

    def _draw(self, request: Request, sampling: Sampling) -> Generation:
        self.prompts.append(tuple(request.prompt))
        text = self.reply(self.tokenizer.decode(list(request.prompt)))
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        finish = "stop"
        for stop in sampling.stop:
            if stop in text:
                ids = self.tokenizer(text[: text.index(stop) + len(stop)], add_special_tokens=False)[
                    "input_ids"
                ]
                finish = "text"
        if finish == "stop":
            ids = [*ids, self.tokenizer.eos_token_id]
        _, longest = request.limits(sampling)
        if len(ids) > longest:
            ids, finish = ids[:longest], "length"
        logprobs = [-0.25 * (place + 1) for place in range(len(ids))]
        generation = Generation(ids, logprobs, finish, [self.version] * len(ids))
        self.drawn.append(generation)
        return generation
