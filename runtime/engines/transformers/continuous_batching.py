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
    """One call of ``generate``: the running and the waiting samples, and their tokens.

    Invariants:
        - Slots 0 to ``live`` - 1 have running samples, and ``state[:, :live]`` what is known of them.
        - The slots from the last one down have samples that were cut short and may go on (``set_aside``).
        - ``width`` is the length of the longest live row, its newest token included; ``aligned``: all are
          that long.
        - A sample is in ``waiting``, running, or in ``ended``, or the call ends before it does.
    """

    def __init__(
        self,
        engine: Decoder,
        requests: Sequence[Request],
        sampling: Sampling,
        limits: Sequence[Sequence[int]],
        stops: Tensor,
        stays: bool = False,
        earlier: KeptSlots | None = None,
    ) -> None:
        """Prepare slots.

        Args:
            engine: computes logits.
            requests: what to continue.
            sampling: how.
            limits: for each request, the most new tokens of each of its samples.
            stops: the ids of end tokens.
            stays: whether samples that are cut short keep their slots, for the next call.
            earlier: such slots of the call before.
        """
        self.engine = engine
        self.sampling = sampling
        self.stops = stops
        self.stays = stays
        penalties = sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
        self.penalises = penalties != (0.0, 0.0, 1.0)
        self.prompts = [request.prompt for request in requests]
        self.requests = [number for number, counts in enumerate(limits) for _ in counts]  # one per sample
        samples = len(self.requests)
        most_new = max(max(counts, default=0) for counts in limits)

        # slots, as many as the cache has room for
        lengths = [
            len(request.prompt) + max(counts)
            for request, counts in zip(requests, limits, strict=True)
            if counts
        ]
        length = max(lengths)
        self.rows = max(1, min(samples, engine.max_rows, engine.max_cached_tokens // length))
        self.cache = SlotCache(self.rows, length, [kind == "sliding_attention" for kind in engine.attentions])
        self.state = torch.zeros(6, self.rows, dtype=torch.int64, device=engine.device)
        self.slots = torch.arange(self.rows, device=engine.device)
        self.live = 0
        self.width = 0
        self.aligned = True
        self.set_aside: list[int] = []  # samples: of the last slot, the last but one, ...

        # the output
        self.tokens = torch.full((samples, most_new), -1, device=engine.device)  # -1 where unused
        self.logprobs = torch.zeros(samples, most_new, device=engine.device)
        self.log: RoutingLog | None = None
        if sampling.routing and engine.routing:
            self.log = RoutingLog(engine.routing, samples, most_new)
        self.ended: list[int] = []  # samples, in the order in which they ended

        fewest_new = [request.limits(sampling)[0] for request in requests]
        entrants = [*entrants_of(requests, limits, fewest_new, most_new, engine.device)]
        if earlier and not self.log:
            entrants = self._take_up(entrants, earlier)
        self.waiting: deque[Entrants] = deque()
        for group in entrants:
            self.waiting += group.split(self.rows)
        self.texts = engine.stop_texts(sampling.stop)
        self.stopped_by_text = set[int]()  # samples

    def finish(self, enough: Enough | None = None) -> list[Generation]:
        """Run every sample to its end, or until enough have ended; return them in order."""
        reported_samples = 0
        while self.live or self.waiting:
            self._admit()
            self._step()
            if enough:
                newly_ended = self.ended[reported_samples:]
                reported_samples = len(self.ended)
                if enough([self.requests[sample] for sample in newly_ended]):
                    break
        return self._generations()

    def kept(self, generations: Sequence[Generation]) -> KeptSlots:
        """Return the slots of samples that have not ended; ``finish`` has returned the ``generations``."""
        slot_of_sample: dict[int, int] = {}
        for slot, sample in enumerate(self._samples(self.state[:, : self.live])):
            slot_of_sample[sample] = slot
        for index, sample in enumerate(self.set_aside):
            slot_of_sample[sample] = self.rows - 1 - index
        slots: dict[tuple[int, ...], int] = {}
        for sample, slot in slot_of_sample.items():
            prompt = self.prompts[self.requests[sample]]
            slots[*prompt, *generations[sample].tokens] = slot
        return KeptSlots(self.cache, slots)

    def _take_up(self, entrants: Sequence[Entrants], earlier: KeptSlots) -> list[Entrants]:
        """Let samples enter whose slots were kept, as far as there is room; return the others."""
        waiting: list[Entrants] = []
        states: list[Tensor] = []
        slots: list[int] = []
        for group in entrants:
            slot = earlier.slots.get((*group.prompt,))
            if slot is None:
                waiting.append(group)
                continue
            entering, without_room = group.state.tensor_split([self.rows - len(slots)], 1)
            entering[TOKEN] = group.prompt[-1]
            states.append(entering)
            slots += [slot] * entering.shape[1]
            waiting.append(Entrants(group.prompt, without_room))
        if slots:
            self.live = len(slots)
            self.state[:, : self.live] = torch.cat(states, 1)
            self._measure()
            self.cache.take(earlier.cache, torch.tensor(slots, device=self.slots.device), self.width)
        return waiting

    def _samples(self, state: Tensor) -> list[int]:
        """Return which samples rows of the state ``[6, rows]`` are."""
        return ((state[OUTPUT] + state[POSITION]) // self.tokens.shape[1]).tolist()

    def _admit(self) -> None:
        """Prefill waiting requests, in order, once an eighth of the slots is free.

        A prefill of one request takes about as long as a token for every live row, so few are better.
        """
        free = self.rows - self.live
        if self.live and free < self.rows // 8:
            return
        entering: list[Entrants] = []
        while self.waiting and self.waiting[0].samples <= free:
            entrants = self.waiting.popleft()
            entering.append(entrants)
            free -= entrants.samples
        for together in slices(entering, self.engine.prefill_tokens):
            self._enter(together)

    def _enter(self, entrants: Sequence[Entrants]) -> None:
        """Prefill the prompts of waiting samples in one pass, and draw their first tokens."""
        prompts = [group.prompt for group in entrants]
        sizes = torch.tensor([group.samples for group in entrants])
        source = torch.arange(len(entrants)).repeat_interleave(sizes).to(self.engine.device)  # row -> prompt
        start = self.live
        self.live += len(source)
        del self.set_aside[self.rows - self.live :]  # slots that live rows take
        self.state[:, start : self.live] = torch.cat([group.state for group in entrants], 1)
        self.width = max(self.width, *map(len, prompts))
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
        logits = self._adjusted(logits, place, position <= state[LEAST])
        tokens, logprobs = draw(logits, uniform(state[STREAM], position), self.sampling)
        self.tokens.view(-1).index_copy_(0, place, tokens)
        self.logprobs.view(-1).index_copy_(0, place, logprobs)
        state[TOKEN] = tokens
        state[POSITION] = position
        stopped = torch.isin(tokens, self.stops)
        if self.texts:
            self._mark_stop_texts(tokens, place, stopped)
        ended = stopped | (position >= state[END])
        if ended.any():
            self.ended += (place[ended] // self.tokens.shape[1]).tolist()
            cut_short = self.slots[:0]
            if self.stays:
                cut_short = (ended & ~stopped).nonzero()[:, 0] + start
            self._retire(ended.nonzero()[:, 0] + start, cut_short)

    def _adjusted(self, logits: Tensor, place: Tensor, must_go_on: Tensor) -> Tensor:
        """Return the logits that tokens are drawn from; rows of ``must_go_on`` may have no end token."""
        if self.penalises:
            logits = logits.to(torch.float32, copy=True)
            penalise(logits, self.tokens[place // self.tokens.shape[1]], self.sampling)
        if self.sampling.min_new_tokens:
            ends = torch.zeros_like(logits[0]).index_fill_(0, self.stops, -torch.inf)
            logits = torch.where(must_go_on[:, None], logits + ends, logits)
        return logits

    def _mark_stop_texts(self, tokens: Tensor, place: Tensor, stopped: Tensor) -> None:
        """Mark rows as stopped whose newest token completes a stop text."""
        assert self.texts
        for row in self.texts.candidates(tokens).tolist():
            sample, newest = divmod(int(place[row]), self.tokens.shape[1])
            start = max(newest + 1 - self.texts.reach, 0)
            if self.texts.stand_in(self.tokens[sample, start : newest + 1].tolist()):
                stopped[row] = True
                self.stopped_by_text.add(sample)

    def _retire(self, ended: Tensor, cut_short: Tensor) -> None:
        """Free slots ``ended [k]``, ascending: the last live rows move into the holes.

        Of these, ``cut_short [m]`` are set aside, in the last slots that are not yet.
        """
        self.live -= len(ended)
        holes = ended[ended < self.live]
        is_running = torch.ones(len(ended), dtype=torch.bool, device=ended.device)  # rows from ``live`` on
        is_running[ended[len(holes) :] - self.live] = False
        movers = is_running.nonzero()[:, 0] + self.live
        target = holes
        source = movers
        if len(cut_short):
            end = self.rows - len(self.set_aside)
            aside = torch.arange(end - 1, end - 1 - len(cut_short), -1, device=cut_short.device)
            target = torch.cat([holes, aside])
            source = torch.cat([movers, cut_short])
            self.set_aside += self._samples(self.state[:, cut_short])
        if len(target):
            self.state[:, holes] = self.state[:, movers]
            self.cache.move(target, source, self.width)
        self._measure()

    def _measure(self) -> None:
        """Note the longest live row, its newest token included, and whether all are that long."""
        if self.live:
            low, high = torch.stack(self.state[POSITION, : self.live].aminmax()).tolist()
            self.width = high + 1
            self.aligned = low == high

    def _generations(self) -> list[Generation]:
        """Return the samples' tokens, in order; raise FloatingPointError where logits are not numbers."""
        if self.logprobs.isnan().any():
            raise FloatingPointError(f"the model's logits are NaN at version {self.engine.version}")
        lengths = (self.tokens >= 0).sum(1)
        newest = self.tokens.gather(1, lengths[:, None].clamp(min=1) - 1)[:, 0]
        has_end_token = torch.isin(newest, self.stops).tolist()
        ended = set(self.ended)
        generations = []
        rows = zip(self.tokens.tolist(), self.logprobs.tolist(), lengths.tolist(), strict=True)
        for sample, (tokens, logprobs, length) in enumerate(rows):
            if sample not in ended:
                finish = "abort"
            elif has_end_token[sample]:
                finish = "stop"
            elif sample in self.stopped_by_text:
                finish = "text"
            else:
                finish = "length"
            routing = self.log.of(sample, length) if self.log else None
            generations.append(Generation(tokens[:length], logprobs[:length], finish, routing=routing))
        return generations
