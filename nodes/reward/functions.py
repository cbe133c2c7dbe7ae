"""Rewards by functions that were written for verl or for TRL, which run as they are."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from rlgraph.errors import shortened
from rlgraph.nodes.reward.per_sample import (
    Judged,
    OnError,
    RewardError,
    as_json,
    as_number,
    each,
    is_reward,
    settled,
)
from rlgraph.nodes.support.lazy import asyncio, torch
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.support.user_call import UserExitError, call, needs_main_thread
from rlgraph.ops import Context, FileFunction, anything, boolean, int64, op, samples, text, tokens
from rlgraph.ops.registry import load_function


@op(assumes=("dropped",), beside=True)
def verl(
    ctx: Context,
    responses: text[samples],
    ground_truth: anything[samples],
    data_source: anything[samples] | None,
    extra_info: anything[samples] | None,
    *,
    function: FileFunction,
    arguments: dict[str, Any] | None = None,
    key: str = "score",
    timeout: PositiveFloat = 60.0,
    parallel: Annotated[int, Field(ge=1)] = 8,
    on_error: OnError = "fail",
) -> Judged:
    """Rewards of a function that was written for verl (https://github.com/verl-project/verl).

    It is called for each sample, by name: ``compute_score(data_source, solution_str, ground_truth,
    extra_info)``, with ``arguments`` beside these, and returns a number or a dict with ``score``; it may be
    async. Of these four it gets those that it names, so verl's scorers of one kind of answer run as they are,
    such as ``math_dapo.compute_score(solution_str, ground_truth)``. ``data_source`` is empty and
    ``extra_info`` an empty dict where no node writes a column of that name. Other numbers in the dict are
    recorded under the node's name. A function that is not async runs in threads; one whose file,
    or a file beside it that this imports, imports ``signal``, ``math_verify`` or verl, which need it, runs in
    the main thread, one call after the other, and is interrupted when it is late. Records ``reward/mean`` and
    ``reward/failed`` as reward.remote does.

    Attributes:
        function: the function, as my_rewards.py:compute_score, in a file beside the graph.
        arguments: more arguments of each call, by name.
        key: which number of the dict is the reward; of gdpo each reward has its own.
        timeout: seconds that one call may take, above 0.
        parallel: calls at a time, at least 1.
        on_error: what a call that fails, is late or gives no number does: fail, zero or drop, as in
            reward.remote.

    Example:
        rewards: {op: reward.verl, function: ???, in: {ground_truth: answer}}
    """
    given = {
        "data_source": data_source or [""] * len(responses),
        "solution_str": responses,
        "ground_truth": as_json(ground_truth),
        "extra_info": extra_info or [{} for _ in responses],
    }
    scorer = load_function(function)
    parameters = inspect.signature(scorer).parameters.values()
    if all(parameter.kind != parameter.VAR_KEYWORD for parameter in parameters):
        given = {parameter.name: given[parameter.name] for parameter in parameters if parameter.name in given}
    rows = [dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)]
    told: list[Mapping[str, Any]] = []
    judged = each(
        ctx,
        partial(scorer, **(arguments or {})) if arguments else scorer,
        rows,
        on_error,
        timeout,
        parallel,
        read=_reading(told, key),
        in_main_thread=needs_main_thread(function.rpartition(":")[0]),
    )
    for name in dict.fromkeys(name for result in told for name in result if name != key):
        if numbers := [float(r[name]) for r in told if is_reward(r.get(name))]:
            ctx.record(name, numbers)
    return judged


@op(assumes=("dropped",), beside=True, reads=("columns",))
def trl(
    ctx: Context,
    question: anything[samples],
    responses: text[samples],
    tokens: int64[samples, tokens],
    loss_mask: boolean[samples, tokens],
    *,
    function: FileFunction,
    columns: list[str] = [],  # noqa: B006 - never changed
    conversational: bool | None = None,
    on_error: Literal["zero", "drop"] = "zero",
    **more: anything[samples],
) -> Judged:
    """Rewards of a function that was written for TRL (https://github.com/huggingface/trl).

    It is called with lists, by name: ``f(prompts, completions, completion_ids, **columns)``, with
    ``trainer_state`` (of which there is ``global_step``), ``log_metric`` and ``log_extra`` beside these, and
    returns a number or None for each sample; it may be async. Prompts that are messages have completions that
    are messages, ``[{"role": "assistant", "content": ...}]``; others have texts. An error that it raises ends
    the run. Records ``reward/mean`` (of what has a reward) and ``reward/failed``, the fraction that has none.

    Attributes:
        function: the function, as my_rewards.py:reward, in a file beside the graph.
        columns: more columns that it is given, by name, as [answer].
        conversational: whether prompts and completions are messages, a question in text being one of the
            user; null: as the prompts are.
        on_error: what becomes of a sample for which it gives None: zero, a reward of 0; or drop, left out by
            a filter.judged.

    Example:
        rewards: {op: reward.trl, function: ???, columns: [answer]}
    """
    prompts, chat = as_json(question), conversational
    if chat is None:
        chat = bool(prompts) and isinstance(prompts[0], list)
    given = {
        "prompts": [_messages("user", p) if chat and isinstance(p, str) else p for p in prompts],
        "completions": [_messages("assistant", r) if chat else r for r in responses],
        "completion_ids": _written(tokens, loss_mask),
        "trainer_state": SimpleNamespace(global_step=max(ctx.iteration - 1, 0)),
        "log_metric": lambda name, value: ctx.record(name, [float(value)], over="calls"),
        "log_extra": lambda column, values: None,
        **{name: as_json(values) for name, values in more.items()},
    }
    try:
        results = asyncio.run(call(load_function(function), None, **given)) if prompts else []
    except UserExitError as error:
        raise RewardError(f"the reward function ended by {error}; mend it: {function}") from error
    scores = _numbers(results, len(prompts))
    failed = torch.tensor([score is None for score in scores], dtype=torch.bool)
    return settled(ctx, torch.tensor([score or 0.0 for score in scores], dtype=torch.float32), failed)


def _reading(told: list[Mapping[str, Any]], key: str) -> Callable[[Any], Any]:
    """Return what makes a reward of a result: a number, or one of a dict, which is added to ``told``."""

    def read(result: Any) -> Any:
        if not isinstance(result, Mapping):
            return as_number(result)
        if key not in result:
            raise KeyError(f"its dict has no {key!r}, only {', '.join(map(str, result)) or 'nothing'}")
        told.append(result)
        return as_number(result[key])

    return read


def _messages(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def _written(tokens: Ragged, loss_mask: Ragged) -> list[list[int]]:
    """Return the ids that the policy wrote of each sample."""
    return [[int(token) for token in row] for row in tokens.take_where(loss_mask.values).tolist()]


def _numbers(results: Sequence[Any], count: int) -> list[float | None]:
    """Return a function's results as numbers; NaN is none, as in TRL, where it stands for None.

    Raises:
        RewardError: they are not one number or None for each sample.
    """
    if not hasattr(results, "__len__") or isinstance(results, str | bytes | Mapping):
        law = f"a reward function owes a list of {count} numbers, and gave {type(results).__name__}"
        raise RewardError(f"{law}: {shortened(repr(results), 80)}")
    numbers = [as_number(result) for result in results]
    scores = [None if number is None or number != number else number for number in numbers]
    wrong = [score for score in scores if score is not None and not is_reward(score)]
    if len(scores) != count or wrong:
        law = f"a reward function owes {count} finite numbers of float32, or None, and gave {len(scores)}"
        raise RewardError(f"{law}: {wrong[:3]}" if wrong else law)
    return scores
