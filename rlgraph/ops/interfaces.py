"""Interfaces that an op uses. The runtime implements these; an op only names them.

An op's parameter annotated with one of these classes is filled in by the runtime, not by a column:

    def logprobs(model: TrainEngine, tokens: int64[samples, tokens], ...) -> float32[samples, tokens]

Nothing here imports torch: columns are annotated as in ops, ``int64[samples, tokens]`` for a ``Ragged``.

One file: whoever writes an op finds here all that one may be given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Protocol

from rlgraph.ops.column_types import boolean, float32, int64, k, layers, samples, tokens
from rlgraph.ops.metric import Metric, add_up
from rlgraph.records import dataclass


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling.

    Units: ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. Log-probs that come
    back are those of the distribution at ``temperature`` before these cut it. A sample ends where its text
    has one of ``stop``, and with a token of ``stop_token_ids``, which are end tokens beside the model's own.
    ``routing`` asks a mixture for the experts that it chose.

    Penalties and what follows change the logits before all else, and so the log-probs too. Of a token that
    the call has drawn c > 0 times for the sample, ``presence_penalty`` + c ``frequency_penalty`` is taken
    off; then it is divided by ``repetition_penalty`` if positive, else multiplied. No end token comes before
    ``min_new_tokens`` others. ``regex`` or ``json_schema`` allow the tokens alone that go on to such a text.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: int = 0
    regex: str | None = None
    json_schema: Mapping[str, Any] | None = None
    routing: bool = False


@dataclass(frozen=True)
class Request:
    """One prompt to continue ``len(seeds)`` times; sample k depends on ``seeds[k]`` and nothing beside it.

    Requests of one ``conversation`` go to the same server where they can, which still has what came before.
    ``max_new_tokens`` is a limit of its own, where that of the ``Sampling`` is higher. The last ``drawn``
    tokens of the prompt are the sample's own, of an earlier call.
    """

    prompt: Sequence[int]
    seeds: Sequence[int]
    conversation: str | None = None
    max_new_tokens: int | None = None
    drawn: int = 0

    def limits(self, sampling: Sampling) -> tuple[int, int]:
        """Return how many new tokens come at least before an end token, and at most in all."""
        longest = min(self.max_new_tokens or sampling.max_new_tokens, sampling.max_new_tokens)
        shortest = max(min(sampling.min_new_tokens - self.drawn, longest), 0)
        return shortest, longest

    def behind(self, tokens: Sequence[int], sampling: Sampling) -> Request:
        """Return the request that goes on behind new tokens of its sample, which are fewer than its limit."""
        _, longest = self.limits(sampling)
        return replace(
            self,
            prompt=(*self.prompt, *tokens),
            max_new_tokens=longest - len(tokens),
            drawn=self.drawn + len(tokens),
        )


@dataclass(frozen=True)
class Generation:
    """One continuation: the new token ids, the end token among them, and a log-prob for each; none at first.

    ``finish`` is ``stop`` (an end token did), ``text`` (a text of ``Sampling.stop`` did, which is whole in
    it), ``length`` (the limit did) or ``abort`` (it was ended from outside). ``versions`` are those of the
    weights, one per token, where an engine tells them. ``routing``, where it was asked for, is an int16
    tensor ``[prompt and new tokens, layers, k]``: the experts that each token was routed to, and -1 where the
    engine has routed none, as for the last token.
    """

    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    finish: str = "abort"
    versions: Sequence[int] = ()
    routing: Any = None

    @property
    def is_whole(self) -> bool:
        """Return whether it has come to its end."""
        return self.finish in ("stop", "text")

    def followed(self, by: Generation) -> Generation:
        """Return it with what was drawn behind it; of ``routing`` nothing."""
        tokens, logprobs = [*self.tokens, *by.tokens], [*self.logprobs, *by.logprobs]
        return Generation(tokens, logprobs, by.finish, [*self.versions, *by.versions])


# takes the requests whose samples have ended since, none of them too; returns whether to stop
Enough = Callable[[Sequence[int]], bool]


class Tokenizer(Protocol):
    """A Hugging Face tokenizer (``transformers.PreTrainedTokenizerBase``)."""

    eos_token_id: int | None

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str: ...

    def __call__(self, text: Any, **options: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


class ServeEngine(Protocol):
    """A model that generates: token ids in, token ids and log-probs out."""

    @property
    def tokenizer(self) -> Any:
        """Return the model's tokenizer (``Tokenizer``), which may have more than an op asks of one."""

    @property
    def overlaps(self) -> bool:
        """Return whether calls of ``generate`` in several threads run at the same time."""

    @property
    def version(self) -> int:
        """Return the version of the weights that it serves, counted in updates from the start of the run."""

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        enough: Enough | None = None,
        stays: bool = False,
    ) -> list[list[Generation]]:
        """Continue each request's prompt once for each of its seeds; the order is that of the requests.

        ``enough`` is told whenever samples have ended, the place of each one's request, and asked every few
        milliseconds. Once it says so the others are aborted, and come back as far as they are.

        With ``stays`` the engine goes on with what has not ended where the next such call does: a request for
        exactly its tokens takes the sample up. What that call does not ask for is given up. One that
        ``overlaps`` goes on between calls too: a call comes back once it has enough, or after a moment, with
        the tokens that are known by then, and aborts nothing. New weights leave what has been drawn.
        """

    def abort(self) -> None:
        """End what is in flight, where calls overlap; ``generate`` returns what there is of it."""


@dataclass(frozen=True)
class Totals:
    """Counts of one mini-batch over all ranks: divisors of means, so that no rank count shows in them."""

    tokens: int
    sequences: int
    lengths: Any = None  # int64 [rows of the micro-batch]: tokens of each one's sequence, if merged


Batch = Mapping[str, Any]
Objective = Callable[[Batch, Totals], tuple[Any, Mapping[str, Metric | tuple[Any, Any]]]]
Recorder = Callable[[Mapping[str, Metric]], None]


class TrainEngine(Protocol):
    """A model that trains, sharded over the ranks of its pool; every rank calls the same methods in order.

    Token columns are ``Ragged``; position t speaks of token t given the tokens before it. Positions where
    ``loss_mask`` is false (and each row's first) hold 0. ``routing`` are the experts that a mixture routes
    each token to; -1 where its routers choose by themselves.
    """

    def logprobs(
        self,
        tokens: int64[samples, tokens],
        loss_mask: boolean[samples, tokens],
        temperature: float = 1.0,
        *,
        routing: int64[samples, tokens, layers, k] | None = None,
    ) -> float32[samples, tokens]:
        """Return the log-prob of each token."""

    def squares(
        self,
        tokens: int64[samples, tokens],
        loss_mask: boolean[samples, tokens],
        temperature: float = 1.0,
        *,
        routing: int64[samples, tokens, layers, k] | None = None,
    ) -> tuple[float32[samples, tokens], float32[samples, tokens]]:
        """Return ``logprobs``, and each token's sum of squared probabilities."""

    def entropies(
        self,
        tokens: int64[samples, tokens],
        loss_mask: boolean[samples, tokens],
        temperature: float = 1.0,
        *,
        routing: int64[samples, tokens, layers, k] | None = None,
    ) -> tuple[float32[samples, tokens], float32[samples, tokens]]:
        """Return ``logprobs``, and the entropy of each token's distribution, in nats."""

    def values(
        self, tokens: int64[samples, tokens], loss_mask: boolean[samples, tokens]
    ) -> float32[samples, tokens]:
        """Return the value head's estimate before each token."""

    def copy(self, of: TrainEngine, mix: float = 1.0) -> None:
        """Copy the weights of another train engine of the same ranks: W <- (1 - mix) W + mix W_of."""

    def update(
        self,
        columns: Batch,
        objective: Objective,
        rows: Any,
        total_rows: int,
        minibatches: int = 1,
        epochs: int = 1,
        temperature: float = 1.0,
        entropy: bool = False,
        merged: bool = False,
        weight: float = 1.0,
        record: Recorder | None = None,
    ) -> dict[str, float]:
        """Train on the rows of this rank; ``minibatches`` optimizer steps an epoch.

        Args:
            columns: ``tokens`` and ``loss_mask``, and whatever ``objective`` reads, cut to each micro-batch;
                ``routing`` is for the model alone.
            objective: from a micro-batch (the columns, with ``logprobs`` or ``new_values`` computed now, and
                ``entropy`` where asked) and the mini-batch's totals, the loss (a scalar that sums to the
                mini-batch's over micro-batches and ranks) and metrics: ``Metric``, whose parts may be scalars
                on the device, or (sum, count) of a mean over tokens.
            rows: int64 ``[rows]``, this rank's row numbers in the whole batch; row r of R belongs to
                mini-batch ``r * minibatches // R``.
            total_rows: R, the rows of the whole batch over all ranks. Of segments both are of samples: rows
                then have one number that are of one sample.
            minibatches: how many optimizer steps one pass over the batch makes; ``epochs``, how many passes.
            temperature: what the logits are divided by.
            entropy: whether ``objective`` differentiates ``entropy``; it is given either way.
            merged: whether rows of one number count as one sequence in the totals.
            weight: what the loss counts in the gradient; the metric ``loss`` is without it.
            record: takes this rank's parts of the metrics, as ``Context.add`` does: over all ranks they add
                up to what is returned.

        Returns:
            Metrics over all ranks, the same on each: the objective's, and over optimizer steps ``loss``,
            ``grad_norm``, ``lr`` and the sum ``skipped``; as ``NODE/loss`` those of each node that ``joins``
            this one. Of a node that joins another nothing, and nothing is recorded: its loss is added to that
            one's optimizer steps, as many as that one makes.
        """


class Course(Protocol):
    """A number that changes over the iterations."""

    def at(self, iteration: int) -> float:
        """Return it in an iteration, counted from 1."""


class Session(Protocol):
    """The state of an op on its worker from call to call, as conversations that go on (``Context.session``).

    It ends with its worker, and no checkpoint has it.
    """

    def settle(self) -> None:
        """Leave serve engines alone until the op is called again: their weights change, or they move."""

    def close(self) -> None:
        """End, and free what it holds."""


@dataclasses.dataclass
class Context:
    """An op's context: the iteration, the rows, and a place for its metrics.

    ``record("reward/mean", rewards)`` adds values to a mean over all rows and ranks: see docs/metrics.md.

    Invariants:
        - a name in ``metrics`` has one kind and one domain; ``add`` refuses another;
        - ``whole`` and ``left`` are set together, by ``leave`` alone;
        - ``state``, ``held`` and ``session`` outlive the call: the next one of the node finds what they hold.

    Attributes:
        rows: the numbers of the op's output rows in the whole batch; of its input rows for a rollout.
        total_rows: how many rows the whole batch has.
        position: the rows of a data source that earlier iterations took.
        batch: the rows that a data source gives in an iteration in which no filter asks for more.
        courses: the attributes that change over the iterations, as ``weights.easy``.
        samples: for segments, the number of each row's sample; empty for others.
        total_samples: how many samples the whole batch has, for segments.
        over: what a row of its metrics is, as a rule: a row of what the op writes, or reads.
        state: values of JSON that last from iteration to iteration (``@op(state=...)``).
        given: the columns of the rows that have come (``@op(holds=True)``).
        held: columns that last from iteration to iteration (``@op(holds=True)``).
        session: objects of the node on this worker that last from call to call.
        resumes: whether rows that are left unfinished are taken up again.
        begun: the columns that were given to ``leave`` before; they are of the first rows.
        is_due: returns whether to leave what is unfinished now, since others wait.
        yields: whether ``is_due`` may say so, and time may decide what a round draws.
        left: the columns of the unfinished rows; ``whole``, which of the rows are finished.
        spans: parts of the call for a timeline: lane, name, start and end, in seconds since the epoch.
    """

    node: str
    seed: int
    iteration: int
    rows: Sequence[int] = ()
    total_rows: int = 0
    position: int = 0
    batch: int = 0
    courses: Mapping[str, Course] = field(default_factory=dict)
    samples: Sequence[int] = ()
    total_samples: int = 0
    over: str = "rows"
    metrics: dict[str, Metric] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)
    session: dict[str, Session] = field(default_factory=dict)
    resumes: bool = False
    begun: Sequence[Any] = ()
    is_due: Callable[[], bool] = lambda: False
    yields: bool = False
    left: Sequence[Any] = ()
    whole: Any = None
    spans: Sequence[tuple[str, str, float, float]] = ()

    def number(self, row: int) -> int:
        """Return the number in the whole batch of one of the rows."""
        return int(self.rows[row]) if len(self.rows) else row

    def leave(self, finished: Any, *columns: Any) -> None:
        """Leave rows unfinished: they come again, first, with these columns in ``begun``.

        ``finished`` is an int64 array: which of the rows read are finished. What is written is of these
        alone. The columns are tensors and ``Ragged`` of the others, in their order.
        """
        self.whole = finished
        self.left = columns

    def record(
        self,
        name: str,
        values: Any,
        count: float | None = None,
        *,
        kind: str | Sequence[str] = "mean",
        over: str | None = None,
    ) -> None:
        """Add rows' values to a metric, which is one number over all rows, devices and rounds.

        Args:
            name: its own, or where it has no slash ``NODE/name``.
            values: a tensor or a sequence of numbers, or one number; or a sum with its ``count``.
            kind: mean, share (of rows for which something holds), sum, min, max, std, or p1 to p99. Of
                several each is a metric, whose name ends with it: ``record("reward/", rewards,
                kind=("mean", "max"))`` makes reward/mean and reward/max.
            over: what a row is, where it is not a row of the op: tokens, ...

        Raises:
            RunError: there is no such kind, or the node has recorded the name as another one.
        """
        if hasattr(values, "tolist"):
            values = values.tolist()
        if not isinstance(values, list | tuple):
            values = [values]
        numbers = [float(value) for value in values]
        kinds = {name: kind} if isinstance(kind, str) else {f"{name}{suffix}": suffix for suffix in kind}
        metrics = {}
        for metric_name, metric_kind in kinds.items():
            metrics[metric_name] = Metric.of(metric_kind, numbers, over or self.over, count)
        self.add(metrics)

    def add(self, metrics: Mapping[str, Metric]) -> None:
        """Add parts of metrics that were made elsewhere, as by ``TrainEngine.update``."""
        new = {}
        for name, metric in metrics.items():
            full_name = name if "/" in name else f"{self.node}/{name}"
            new[full_name] = metric
        known = {name: metric for name, metric in self.metrics.items() if name in new}
        self.metrics |= add_up([known, new], self.node)
