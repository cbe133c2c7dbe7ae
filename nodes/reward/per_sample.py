"""Per-sample rewards: a function of one sample that may raise or run late.

    @op(assumes=("dropped",))
    def helpful(
        ctx: Context, responses: text[samples], answer: text[samples], *, on_error: OnError = "drop"
    ) -> Judged:
        return each(ctx, score, [{"response": r, "answer": a} for r, a in zip(responses, answer)], on_error)

``on_error`` is what the graph says: ``fail`` ends the run, ``zero`` goes on with reward 0, ``drop`` has the
graph leave such samples out, by a filter.judged that ``rlgraph check`` asks for.
"""

import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

from rlgraph.errors import RunError, shortened, visible
from rlgraph.nodes.support.lazy import asyncio, torch
from rlgraph.ops import SPREAD, Context, boolean, float32, samples

log = logging.getLogger(__name__)

SHOWN = 800  # characters of a failure that are shown, and of its sample
LARGEST = 3.4028234663852886e38  # of float32
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
    return list(values.tolist() if hasattr(values, "tolist") else values)


def as_texts(values: Any) -> list[str]:
    """Return a column's values as texts, in JSON where they are none.

    Example:
        >>> as_texts(["a", ["b", 1], None])
        ['a', '["b", 1]', 'null']
    """
    return [v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in as_json(values)]


def each(
    ctx: Context,
    score: Score,
    rows: Sequence[Mapping[str, Any]],
    on_error: OnError = "fail",
    timeout: float = 60.0,
    parallel: int = 8,
) -> Judged:
    """Return the reward that a function gives each sample.

    A sample has failed where it raises, takes longer than ``timeout`` or gives what is no finite number of
    float32. A function that is not async runs in threads, and a late one goes on to its end. Records
    ``reward/mean`` (of what did not fail) and ``reward/failed``, the fraction that did; the first failure is
    logged with its sample.

    Args:
        ctx: where metrics go.
        score: called with each row's values by their names; may be async.
        rows: one per sample.
        on_error: see above.
        timeout: seconds that one sample may take.
        parallel: samples at a time.

    Raises:
        RewardError: one failed, and ``on_error`` is ``fail``.
    """
    outcomes = asyncio.run(_all(score, rows, timeout, parallel)) if rows else []
    told = [(row, why, rows[row]) for row, why in enumerate(outcomes) if isinstance(why, str)]
    complain(ctx, told, on_error)
    failed = torch.tensor([isinstance(outcome, str) for outcome in outcomes], dtype=torch.bool)
    rewards = torch.tensor([0.0 if isinstance(outcome, str) else outcome for outcome in outcomes])
    return settled(ctx, rewards.float(), failed)


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
    for row, why, what in failures[:1]:
        first = f"the first, of sample {ctx.number(row)}: {shown(why)}; it was of {shown(what)}"
        law = f"{len(failures)} requests for rewards failed; {first}"
        if on_error == "fail":
            raise RewardError(f"{law}; mend it, or go on without by on_error: zero or drop")
        log.warning(law)


def record_late(ctx: Context, late: Sequence[bool], responses: Sequence[str]) -> None:
    """Record the fraction of responses that took too long to judge, as ``reward/late``, and log the first."""
    record_some(ctx, "reward/late", late, "took too long to judge", lambda row: shown(responses[row]))


def record_some(
    ctx: Context, metric: str, those: Sequence[bool], law: str, told: Callable[[int], str]
) -> None:
    """Record the fraction of responses for which something holds, and log what is told of the first."""
    ctx.record(metric, those, kind="share")
    rows = [row for row, holds in enumerate(those) if holds]
    for first in rows[:1]:
        of = f"the first, of sample {ctx.number(first)}: {told(first)}"
        log.warning(f"{len(rows)} of {len(those)} responses {law}; {of}")


def shown(what: object) -> str:
    """Return what a response or a service wrote as a few lines at most, in which nothing is an escape."""
    return visible(shortened(str(what), SHOWN))


def is_reward(value: object) -> bool:
    """Return whether a value is a number that a column of float32 can hold.

    Example:
        >>> [is_reward(value) for value in (1, 0.5, float("nan"), 1e308, 10**400, "1")]
        [True, True, False, False, False, False]
    """
    return isinstance(value, int | float) and abs(value) <= LARGEST


async def _all(
    score: Score, rows: Sequence[Mapping[str, Any]], timeout: float, parallel: int
) -> list[float | str]:
    room, threads = asyncio.Semaphore(parallel), ThreadPoolExecutor(parallel)

    async def outcome_of(row: Mapping[str, Any]) -> float | str:
        async with room:
            return await _outcome(score, row, timeout, threads)

    try:
        return list(await asyncio.gather(*map(outcome_of, rows)))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


async def _outcome(
    score: Score, row: Mapping[str, Any], timeout: float, threads: ThreadPoolExecutor
) -> float | str:
    """Return a sample's reward, or in words why it has none."""
    if inspect.iscoroutinefunction(score):
        call: Any = score(**row)
    else:
        call = asyncio.get_running_loop().run_in_executor(threads, lambda: score(**row))
    try:
        reward = await asyncio.wait_for(call, timeout)
        if is_reward(reward):
            return float(reward)
        return f"it gave {reward!r}, which is no finite number of float32"
    except TimeoutError:
        return f"it took over {timeout:g} s"
    except Exception as error:  # `on_error` decides about any error of a user's function
        return f"{type(error).__name__}: {error}"
