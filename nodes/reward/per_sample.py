"""Per-sample rewards: a function of one sample that may raise or run late.

    @op(assumes=("dropped",))
    def helpful(
        ctx: Context, responses: text[samples], answer: text[samples], *, on_error: OnError = "drop"
    ) -> Judged:
        return each(ctx, score, [{"response": r, "answer": a} for r, a in zip(responses, answer)], on_error)

``on_error`` is what the graph says: ``fail`` ends the run, ``zero`` goes on with reward 0, ``drop`` has the
graph leave such samples out, by a filter.judged that ``rlgraph check`` asks for.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rlgraph.errors import RunError, shortened, visible
from rlgraph.nodes.support.lazy import asyncio, torch
from rlgraph.nodes.support.row_field import LARGEST, as_number
from rlgraph.nodes.support.user_call import DaemonThreads, UserExitError, call, error_text
from rlgraph.ops import SPREAD, Context, boolean, float32, samples
from rlgraph.ops.registry import absent_module

log = logging.getLogger(__name__)

SHOWN = 800  # characters of a failure that are shown, and of its sample
OnError = Literal["fail", "zero", "drop"]
Score = Callable[..., Any]  # called with a sample's row by name; returns a number or a coroutine of one


class RewardError(RunError):
    """A reward that could not be had; the message says why, of which sample, and what to do."""


class Judged(NamedTuple):
    """A reward for each sample, 0 where ``failed``."""

    rewards: float32[samples]
    failed: boolean[samples]


def as_json(values: Any) -> list[Any]:
    """Return a column's values as JSON has them: those of a tensor are numbers."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    return list(values)


def as_texts(values: Any) -> list[str]:
    """Return a column's values as texts, in JSON where they are none.

    Example:
        >>> as_texts(["a", ["b", 1], None])
        ['a', '["b", 1]', 'null']
    """
    texts = []
    for value in as_json(values):
        is_text = isinstance(value, str)
        texts.append(value if is_text else json.dumps(value, ensure_ascii=False))
    return texts


def each(
    ctx: Context,
    score: Score,
    rows: Sequence[Mapping[str, Any]],
    on_error: OnError = "fail",
    timeout: float = 60.0,
    parallel: int = 8,
    read: Callable[[Any], Any] | None = None,
    in_main_thread: bool = False,
) -> Judged:
    """Return the reward that a function gives each sample.

    A sample has failed where it raises, exits, is cancelled, takes longer than ``timeout`` or gives what is
    no finite number of float32. A function that is not async runs in threads, and a late one goes on to its
    end; what is awaitable is awaited. Records ``reward/mean`` (of what did not fail) and ``reward/failed``,
    the fraction that did; the first failure is logged with its sample.

    Args:
        ctx: where metrics go.
        score: called with each row's values by their names; may be async.
        rows: one per sample.
        on_error: see above.
        timeout: seconds that one sample may take.
        parallel: samples at a time.
        read: what makes the reward of what the function gave; its errors are the sample's.
        in_main_thread: call it here, one sample after the other, as what uses signals has to be; one that
            takes longer is interrupted.

    Raises:
        RewardError: one failed, and ``on_error`` is ``fail``.
    """
    threads = None if in_main_thread else DaemonThreads(parallel)
    scored = _Scorer(score, read or as_number, timeout, threads)
    at_a_time = 1 if in_main_thread else parallel  # a sample that waits its turn is not late
    outcomes = asyncio.run(_all(scored, rows, at_a_time)) if rows else []
    return _rewards(ctx, outcomes, rows, on_error)


def at_once(
    ctx: Context,
    score: Score,
    columns: Mapping[str, Sequence[Any]],
    rows: Sequence[Mapping[str, Any]],
    on_error: OnError = "fail",
    timeout: float = 60.0,
    read: Callable[[Any], Any] | None = None,
    in_main_thread: bool = False,
) -> Judged:
    """Return the rewards of a function that takes a batch: lists by name, and a list of results.

    Where the call fails, is late or gives another number of results, all samples have failed. Arguments and
    errors are otherwise those of ``each``.

    Args:
        columns: what the function is called with.
        rows: one per sample, to be shown where one failed.
        timeout: seconds that the call may take.
    """
    threads = None if in_main_thread else DaemonThreads(1)
    scored = _Scorer(score, read or as_number, timeout, threads)
    outcomes = asyncio.run(_batch(scored, columns, len(rows))) if rows else []
    return _rewards(ctx, outcomes, rows, on_error)


def _rewards(
    ctx: Context, outcomes: Sequence[float | str], rows: Sequence[Mapping[str, Any]], on_error: OnError
) -> Judged:
    """Return the rewards of samples, of which some are, in words, why there is none."""
    failures = []
    failed = []
    rewards = []
    for row, outcome in enumerate(outcomes):
        has_failed = isinstance(outcome, str)
        failed.append(has_failed)
        rewards.append(0.0 if has_failed else outcome)
        if has_failed:
            failures.append((row, outcome, rows[row]))
    complain(ctx, failures, on_error)
    return settled(ctx, torch.tensor(rewards).float(), torch.tensor(failed, dtype=torch.bool))


def settled(ctx: Context, rewards: Any, failed: Any) -> Judged:
    """Record the metrics of rewards ``[samples]`` and return them, 0 where ``failed``."""
    ctx.record("reward/", rewards[~failed], kind=SPREAD)
    ctx.record("reward/failed", failed, kind="share")
    return Judged(rewards.masked_fill(failed, 0.0), failed)


def complain(ctx: Context, failures: Sequence[tuple[int, object, object]], on_error: OnError) -> None:
    """Log how many samples failed, and why and on what the first did; a failure is (row, why, what).

    Raises:
        RewardError: something failed, and ``on_error`` is ``fail``.
    """
    if not failures:
        return
    row, reason, sample = failures[0]
    law = f"{len(failures)} requests for rewards failed; the first, of sample {ctx.number(row)}: "
    law += f"{shown(reason)}; it was of {shown(sample)}"
    if on_error == "fail":
        raise RewardError(f"{law}; mend it, or go on without by on_error: zero or drop")
    log.warning(law)


def record_late(ctx: Context, late: Sequence[bool], responses: Sequence[str]) -> None:
    """Record the fraction of responses that took too long to judge, as ``reward/late``, and log the first."""
    record_some(ctx, "reward/late", late, "took too long to judge", lambda row: shown(responses[row]))


def record_some(
    ctx: Context, metric: str, those: Sequence[bool], law: str, describe: Callable[[int], str]
) -> None:
    """Record the fraction of responses for which something holds, and log what is told of the first."""
    ctx.record(metric, those, kind="share")
    rows = [row for row, is_concerned in enumerate(those) if is_concerned]
    if rows:
        description = f"the first, of sample {ctx.number(rows[0])}: {describe(rows[0])}"
        log.warning(f"{len(rows)} of {len(those)} responses {law}; {description}")


def shown(value: object) -> str:
    """Return what a response or a service wrote as a few lines at most, in which nothing is an escape."""
    return visible(shortened(str(value), SHOWN))


def is_reward(value: object) -> bool:
    """Return whether a value is a number that a column of float32 can hold.

    Example:
        >>> [is_reward(value) for value in (1, 0.5, float("nan"), 1e308, 10**400, "1")]
        [True, True, False, False, False, False]
    """
    return isinstance(value, int | float) and abs(value) <= LARGEST


@dataclass(frozen=True)
class _Scorer:
    """A user's function, and how it is called."""

    function: Score
    read: Callable[[Any], Any]
    timeout: float
    threads: Executor | None

    async def outcome(self, row: Mapping[str, Any]) -> float | str:
        """Return a sample's reward, or in words why it has none."""
        try:
            result = await self.result(row)
        except _FailedError as error:
            return str(error)
        return self.reward(result)

    async def outcomes(self, columns: Mapping[str, Any], count: int) -> list[float | str]:
        """Return the same of each sample, where the function takes them all."""
        try:
            results = await self.result(columns)
        except _FailedError as error:
            return [str(error)] * count
        if hasattr(results, "tolist"):  # of NumPy or torch
            results = results.tolist()
        is_list = isinstance(results, Sequence) and not isinstance(results, str)
        if not is_list or len(results) != count:
            outcome = shortened(repr(results), 80)
            return [f"a function of a batch owes a list of {count} scores, and gave {outcome}"] * count
        return [self.reward(result) for result in results]

    async def result(self, arguments: Mapping[str, Any]) -> Any:
        """Return what the function gives.

        Raises:
            _FailedError: it gave nothing; the message says why.
        """
        since = time.monotonic()
        late = f"it took over {self.timeout:g} s"
        try:
            result = await asyncio.wait_for(
                call(self.function, self.threads, self.timeout, **arguments), self.timeout
            )
        except TimeoutError:
            raise _FailedError(late) from None
        except UserExitError as error:
            raise _FailedError(str(error)) from error
        except Exception as error:  # `on_error` decides about any error of a user's function
            raise _FailedError(_describe_failure(error)) from error
        if self.threads is None and time.monotonic() - since > self.timeout:
            raise _FailedError(late)
        return result

    def reward(self, result: Any) -> float | str:
        """Return the reward that a result is, or in words why it is none."""
        try:
            reward = self.read(result)
        except Exception as error:  # as above
            return _describe_failure(error)
        if is_reward(reward):
            return float(reward)
        return f"it gave {shortened(repr(reward), 80)}, which is not a finite number of float32"


class _FailedError(Exception):
    """A sample has no reward; the message says why."""


def _describe_failure(error: Exception) -> str:
    """Return an error of a user's function in words, with what to do where a module is absent."""
    text = error_text(error)
    remedy = absent_module(error)
    return f"{text}; {remedy}" if remedy else text


async def _batch(scorer: _Scorer, columns: Mapping[str, Any], count: int) -> list[float | str]:
    try:
        return await scorer.outcomes(columns, count)
    finally:
        if scorer.threads is not None:
            scorer.threads.shutdown(wait=False, cancel_futures=True)


async def _all(scorer: _Scorer, rows: Sequence[Mapping[str, Any]], parallel: int) -> list[float | str]:
    room = asyncio.Semaphore(parallel)

    async def outcome_of(row: Mapping[str, Any]) -> float | str:
        async with room:
            return await scorer.outcome(row)

    try:
        return list(await asyncio.gather(*map(outcome_of, rows)))
    finally:
        if scorer.threads is not None:
            scorer.threads.shutdown(wait=False, cancel_futures=True)
