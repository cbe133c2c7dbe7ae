"""Continuous batching: assigns samples to slots, steps them, and collects their tokens.

A request is prefilled once for its samples. A sample that ends leaves at once: the last live row moves into
its slot, so that live rows are dense and a forward runs over nothing else. Whole requests enter as soon as
enough slots are free (Orca, Yu et al., OSDI 2022).

Where the next call may go on with what has not ended, slots of samples that reach their limit are set aside,
unless others need them. Samples that go on from exactly the tokens of such a slot enter without a prefill.

Shapes: rows (slots), live (slots in use), samples (all of the call), vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rlgraph.ops.interfaces import Enough, Generation, Request, Sampling
from rlgraph.runtime.engines.routing import Routing
from rlgraph.runtime.engines.transformers.entrants import (
    END,
    LEAST,
    OUTPUT,
    POSITION,
    STREAM,
    TOKEN,
    Entrants,
    entrants_of,
    slices,
)
from rlgraph.runtime.engines.transformers.kv_cache import Decode, Prefill, SlotCache
from rlgraph.runtime.engines.transformers.routing_log import RoutingLog
from rlgraph.runtime.engines.transformers.sampling import draw, penalise, uniform
from rlgraph.runtime.engines.transformers.stop_texts import StopTexts


class Decoder(Protocol):
    """The model's two forwards and their limits, which a batch uses."""

    device: torch.device
    max_rows: int
    max_cached_tokens: int
    prefill_tokens: int
    version: int
    routing: Routing | None

    @property
    def attentions(self) -> Sequence[str]:
        """Return each layer's kind of attention."""

    def prefill(self, prompts: Sequence[Sequence[int]], cache: SlotCache) -> Tensor:
        """Return the logits ``[prompts, vocabulary]`` after each prompt, and fill the cache."""

    def stop_texts(self, texts: Sequence[str]) -> StopTexts | None:
        """Return what looks for these texts; None where there are none."""

    def decode(self, tokens: Tensor, target: Decode, cache: SlotCache) -> Tensor:
        """Return the logits ``[live, vocabulary]`` after one more token per live row."""


@dataclass(frozen=True)
class KeptSlots:
    """Slots of samples that may go on, by their tokens: all but the last of these are in the cache."""

    cache: SlotCache
    slots: dict[tuple[int, ...], int]


class BatchRun:
    """One call of ``generate``: the running and the waiting samples, and their tokens."""

    def __init__(
        self,
        engine: Decoder,
        requests: Sequence[Request],
        sampling: Sampling,
        limits: Sequence[Sequence[int]],
        stops: Tensor,
        stays: bool = False,
        before: KeptSlots | None = None,
    ) -> None:
        """Prepare slots; with ``stays`` to keep those of what does not end, the first from ``before``."""
        penalties = sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
        self.penalises = penalties != (0.0, 0.0, 1.0)
        self.engine, self.sampling, self.stops = engine, sampling, stops
        samples, longest = sum(map(len, limits)), max(max(counts, default=0) for counts in limits)
        length = max(len(r.prompt) + max(c) for r, c in zip(requests, limits, strict=True) if c)
        self.rows = max(1, min(samples, engine.max_rows, engine.max_cached_tokens // length))
        self.cache = SlotCache(self.rows, length, [kind == "sliding_attention" for kind in engine.attentions])
        self.state = torch.zeros(6, self.rows, dtype=torch.int64, device=engine.device)
        self.slots = torch.arange(self.rows, device=engine.device)
        self.tokens = torch.full((samples, longest), -1, device=engine.device)  # -1 where unused
        self.logprobs = torch.zeros(samples, longest, device=engine.device)
        self.log = (
            RoutingLog(engine.routing, samples, longest) if sampling.routing and engine.routing else None
        )
        self.live, self.width, self.aligned = 0, 0, True
        self.prompts, self.stays = [request.prompt for request in requests], stays
        self.aside: list[int] = []  # samples whose slots are set aside: the last slot, the last but one, ...
        least = [request.limits(sampling)[0] for request in requests]
        pieces = [*entrants_of(requests, limits, least, longest, engine.device)]
        pieces = self._taken_up(pieces, before) if before and not self.log else pieces
        self.waiting = deque(part for piece in pieces for part in piece.parts(self.rows))
        self.requests = [number for number, counts in enumerate(limits) for _ in counts]  # one per sample
        self.ended: list[int] = []  # samples, in the order in which they ended
        self.texts = engine.stop_texts(sampling.stop)
        self.reported = set[int]()  # samples that a stop text ended

    def finish(self, enough: Enough | None = None) -> list[Generation]:
        """Run every sample to its end, or until enough have ended; return them in order."""
        finished_requests = 0
        while self.live or self.waiting:
            self._admit()
            self._step()
            if enough:
                finished_requests, new = len(self.ended), self.ended[finished_requests:]
                if enough([self.requests[sample] for sample in new]):
                    break
        return self._generations()

    def kept(self, made: Sequence[Generation]) -> KeptSlots:
        """Return the slots of what has not ended; ``made`` is what ``finish`` returned."""
        running = self._samples(self.state[:, : self.live])
        held = [*enumerate(running), *((self.rows - 1 - i, sample) for i, sample in enumerate(self.aside))]
        tokens = [(*self.prompts[self.requests[sample]], *made[sample].tokens) for _, sample in held]
        return KeptSlots(self.cache, {key: slot for key, (slot, _) in zip(tokens, held, strict=True)})

    def _taken_up(self, pieces: Sequence[Entrants], before: KeptSlots) -> list[Entrants]:
        """Let samples enter whose slots were kept; return the others."""
        waiting_entrants, states, slots = list[Entrants](), list[Tensor](), list[int]()
        for entrants in pieces:
            slot = before.slots.get((*entrants.prompt,))
            if slot is None:
                waiting_entrants.append(entrants)
                continue
            entering, waiting = entrants.state.tensor_split([self.rows - len(slots)], 1)
            entering[TOKEN] = entrants.prompt[-1]
            states.append(entering)
            slots += [slot] * entering.shape[1]
            waiting_entrants.append(Entrants(entrants.prompt, waiting))
        if slots:
            self.live = len(slots)
            self.state[:, : self.live] = torch.cat(states, 1)
            self._measure()
            self.cache.take(before.cache, torch.tensor(slots, device=self.slots.device), self.width)
        return waiting_entrants

    def _samples(self, state: Tensor) -> list[int]:
        """Return which samples rows of the state ``[6, rows]`` are."""
        return ((state[OUTPUT] + state[POSITION]) // self.tokens.shape[1]).tolist()

    def _admit(self) -> None:
        """Prefill waiting requests, in order, once an eighth of the slots is free.

        A prefill of one request takes about as long as a token for every live row, so few are better.
        """
        free, entering = self.rows - self.live, []
        if self.live and free < self.rows // 8:
            return
        while self.waiting and self.waiting[0].state.shape[1] <= free:
            entering.append(self.waiting.popleft())
            free -= entering[-1].state.shape[1]
        for pieces in slices(entering, self.engine.prefill_tokens):
            self._enter(pieces)

    def _enter(self, pieces: Sequence[Entrants]) -> None:
        sizes = torch.tensor([piece.state.shape[1] for piece in pieces])
        source = torch.arange(len(pieces)).repeat_interleave(sizes).to(self.engine.device)
        start, self.live = self.live, self.live + len(source)
        del self.aside[self.rows - self.live :]
        self.state[:, start : self.live] = torch.cat([piece.state for piece in pieces], 1)
        self.width = max(self.width, *(len(piece.prompt) for piece in pieces))
        prompts = [piece.prompt for piece in pieces]
        if self.log:
            self.log.routing.note()
        logits = self.engine.prefill(prompts, self.cache.aim(Prefill(start, source)))
        if self.log:
            state = self.state[:, start : self.live]
            samples = (state[OUTPUT] + state[POSITION] + 1) // self.tokens.shape[1]
            self.log.prompt([*map(len, prompts)], source, samples)
        self._emit(start, logits[source])
        self._measure()

    def _step(self) -> None:
        """Generate one more token for every live row."""
        if not self.live:
            return
        positions = self.state[POSITION, : self.live]
        target = Decode(self.slots[: self.live], positions, self.width, self.aligned)
        if self.log:
            self.log.routing.note()
        logits = self.engine.decode(self.state[TOKEN, : self.live], target, self.cache)
        if self.log:
            self.log.token(self.state[OUTPUT, : self.live] + positions)
        self.width += 1
        self._emit(0, logits)

    def _emit(self, start: int, logits: Tensor) -> None:
        """Choose a token for each row from ``start`` on, write it out, and retire rows that it ends."""
        state = self.state[:, start : self.live]
        position = state[POSITION] + 1
        place = state[OUTPUT] + position
        logits = self._changed(logits, place, position <= state[LEAST])
        tokens, logprobs = draw(logits, uniform(state[STREAM], position), self.sampling)
        self.tokens.view(-1).index_copy_(0, place, tokens)
        self.logprobs.view(-1).index_copy_(0, place, logprobs)
        state[TOKEN], state[POSITION] = tokens, position
        over = torch.isin(tokens, self.stops)
        if self.texts:
            self._look(tokens, place, over)
        ended = over | (position >= state[END])
        if ended.any():
            self.ended += (place[ended] // self.tokens.shape[1]).tolist()
            cut = (ended & ~over).nonzero()[:, 0] + start if self.stays else self.slots[:0]
            self._retire(ended.nonzero()[:, 0] + start, cut)

    def _changed(self, logits: Tensor, place: Tensor, goes_on: Tensor) -> Tensor:
        """Return the logits that tokens are drawn from; rows of ``goes_on`` have no end token."""
        if self.penalises:
            logits = logits.to(torch.float32, copy=True)
            penalise(logits, self.tokens[place // self.tokens.shape[1]], self.sampling)
        if self.sampling.min_new_tokens:
            ends = torch.zeros_like(logits[0]).index_fill_(0, self.stops, -torch.inf)
            logits = torch.where(goes_on[:, None], logits + ends, logits)
        return logits

    def _look(self, tokens: Tensor, place: Tensor, ended: Tensor) -> None:
        """Mark rows as ended whose newest token completes a stop text."""
        assert self.texts
        for row in self.texts.candidates(tokens).tolist():
            sample, last = divmod(int(place[row]), self.tokens.shape[1])
            first = max(last + 1 - self.texts.reach, 0)
            if self.texts.stand_in(self.tokens[sample, first : last + 1].tolist()):
                ended[row] = True
                self.reported.add(sample)

    def _retire(self, ended: Tensor, cut: Tensor) -> None:
        """Free slots ``ended [k]``, ascending: the last live rows move into the holes.

        Of these ``cut [m]`` are set aside, in the last slots that are not yet.
        """
        self.live -= len(ended)
        holes = ended[ended < self.live]
        stays = torch.ones(len(ended), dtype=torch.bool, device=ended.device)
        stays[ended[len(holes) :] - self.live] = False
        movers = stays.nonzero()[:, 0] + self.live
        to, source = holes, movers
        if len(cut):
            last = self.rows - len(self.aside)
            to = torch.cat([holes, torch.arange(last - 1, last - 1 - len(cut), -1, device=cut.device)])
            source = torch.cat([movers, cut])
            self.aside += self._samples(self.state[:, cut])
        if len(to):
            self.state[:, holes] = self.state[:, movers]
            self.cache.move(to, source, self.width)
        self._measure()

    def _measure(self) -> None:
        """Note the longest live row, its newest token included, and whether all are that long."""
        if self.live:
            low, high = torch.stack(self.state[POSITION, : self.live].aminmax()).tolist()
            self.width, self.aligned = high + 1, low == high

    def _generations(self) -> list[Generation]:
        """Return the samples' tokens, in order; raise FloatingPointError where logits are not numbers."""
        if self.logprobs.isnan().any():
            raise FloatingPointError(f"the model's logits are NaN at version {self.engine.version}")
        lengths = (self.tokens >= 0).sum(1)
        last = self.tokens.gather(1, lengths[:, None].clamp(min=1) - 1)[:, 0]
        stopped, ended = torch.isin(last, self.stops).tolist(), {*self.ended}
        ends = [
            "stop" if stop else "text" if i in self.reported else "length" for i, stop in enumerate(stopped)
        ]
        finishes = [end if sample in ended else "abort" for sample, end in enumerate(ends)]
        rows = zip(self.tokens.tolist(), self.logprobs.tolist(), lengths.tolist(), finishes, strict=True)
        log = self.log.of if self.log else lambda sample, new: None
        return [
            Generation(t[:n], p[:n], finish, routing=log(sample, n))
            for sample, (t, p, n, finish) in enumerate(rows)
        ]
