"""Rewards by functions that were written for verl or for TRL, which run as they are."""

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from rlgraph.errors import shortened
from rlgraph.nodes.reward.per_sample import (
    Judged,
    OnError,
    RewardError,
    as_json,
    at_once,
    each,
    is_reward,
    settled,
)
from rlgraph.nodes.support.lazy import asyncio, torch
from rlgraph.nodes.support.row_field import as_number
from rlgraph.nodes.support.user_call import UserExitError, call, needs_main_thread
from rlgraph.ops import Context, FileFunction, anything, boolean, int64, op, samples, text, tokens
from rlgraph.ops.registry import absent_module, load_function, load_module

# what verl's reward managers call a function with, for each sample
COLUMNS = ("data_source", "solution_str", "ground_truth", "extra_info")
# names in signatures of verl 0.9.1's own scorers for what its reward managers call otherwise
OTHER_NAMES = {
    "model_output": "solution_str",  # math_verify, prime_math
    "predict_str": "solution_str",  # geo3k
    "completion": "solution_str",  # prime_code, sandbox_fusion
    "test_cases": "ground_truth",  # prime_code, sandbox_fusion
}
# what its batch manager calls a function with -> what that is a list of
OF_A_BATCH = {
    "data_sources": "data_source",
    "solution_strs": "solution_str",
    "ground_truths": "ground_truth",
    "extra_infos": "extra_info",
}


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
    """Rewards from a function written for verl (https://github.com/verl-project/verl).

    It is called for each sample, by name: ``compute_score(data_source, solution_str, ground_truth,
    extra_info)``, with ``arguments`` added to these or replacing them, and returns a number, a dict with
    ``score``, or a tuple that begins with the score; it may be async. It gets only those of the four that it
    names, so verl's scorers of a single kind of answer run unchanged (docs/from_verl.md lists them), such as
    ``math_dapo.compute_score(solution_str, ground_truth)``. A required parameter ``model_output``,
    ``predict_str`` or ``completion`` gets the response, ``test_cases`` the ground truth. A function that
    names ``solution_strs``, ``ground_truths``, ``data_sources`` or ``extra_infos`` is called once with lists
    for all samples that are scored together, and returns a list. ``data_source`` is empty and ``extra_info``
    an empty dict if no node writes a column of that name. Other numbers in the dict are recorded under the
    node's name. A function that is not async runs in threads. If its file, or a neighbouring file that it
    imports, imports ``signal``, ``math_verify`` or verl, which need the main thread, it runs there instead,
    one call after the other, and is interrupted when it is late. Records ``reward/mean`` and
    ``reward/failed`` as reward.remote does.

    Attributes:
        function: the function, such as my_rewards.py:compute_score in a file next to the graph, or
            verl.utils.reward_score.gsm8k:compute_score in an installed module.
        arguments: more arguments of each call, by name; they take precedence over columns.
        key: which number of the dict is the reward; with gdpo, each reward has its own key.
        timeout: seconds that one call may take, above 0.
        parallel: concurrent calls, at least 1.
        on_error: what happens if a call fails, is late or returns no number: fail, zero or drop, as in
            reward.remote.

    Raises:
        RewardError: the function has a parameter that nothing gives.

    Example:
        rewards: {op: reward.verl, function: ???, in: {ground_truth: answer}}
    """
    columns = {
        "data_source": data_source or [""] * len(responses),
        "solution_str": responses,
        "ground_truth": as_json(ground_truth),
        "extra_info": extra_info or [{} for _ in responses],
    }
    scorer = load_function(function)
    filled = _filled(scorer, function, arguments or {})
    takes_a_batch = not OF_A_BATCH.keys().isdisjoint(filled)
    lists = {}
    rows: list[dict[str, Any]] = [{} for _ in responses]
    for parameter, name in filled.items():
        lists[parameter] = columns[OF_A_BATCH.get(name, name)]
        for row, value in zip(rows, lists[parameter], strict=True):
            row[parameter] = value
    results: list[Mapping[str, Any]] = []

    def read(result: Any) -> Any:
        reward = _reward_of(result, key)
        if isinstance(result, Mapping):
            results.append(result)
        return reward

    in_main_thread = any(needs_main_thread(file) for file in _files(function, scorer))
    if arguments:
        scorer = partial(scorer, **arguments)
    if takes_a_batch:
        judged = at_once(ctx, scorer, lists, rows, on_error, timeout, read, in_main_thread)
    else:
        judged = each(ctx, scorer, rows, on_error, timeout, parallel, read, in_main_thread)
    _record_other_numbers(ctx, results, key)
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
    arguments: dict[str, Any] | None = None,
    factory: dict[str, Any] | None = None,
    conversational: bool | None = None,
    on_error: Literal["zero", "drop"] = "zero",
    **more: anything[samples],
) -> Judged:
    """Rewards from a function written for TRL (https://github.com/huggingface/trl).

    It is called with lists, by name: ``f(prompts, completions, completion_ids, **columns)``, also with
    ``trainer_state`` (which has only ``global_step``), ``log_metric`` and ``log_extra``, and returns a number
    or None for each sample; it may be async. If prompts are messages, so are completions, ``[{"role":
    "assistant", "content": ...}]``; otherwise both are texts. An error that it raises ends the run. Records
    ``reward/mean`` (of samples with a reward) and ``reward/failed``, the fraction without one.
    docs/from_trl.md lists those of ``trl.rewards``.

    Attributes:
        function: the function, such as my_rewards.py:reward in a file next to the graph, or
            trl.rewards:think_format_reward in an installed module.
        columns: more columns to pass to it, by name, as in [answer].
        arguments: more arguments of each call, by name; they take precedence over columns.
        factory: the arguments, by name, of a function that makes the reward function, such as
            trl.rewards:get_soft_overlong_punishment; null: ``function`` is the reward function itself.
        conversational: whether prompts and completions are messages, where a question in text becomes a
            message of the user; null: as the prompts are.
        on_error: what happens to a sample for which it returns None: zero, it has a reward of 0; drop, a
            filter.judged leaves it out.

    Example:
        rewards: {op: reward.trl, function: ???, columns: [answer]}
    """
    prompts = as_json(question)
    completions: list[Any] = responses
    if conversational is None:
        conversational = bool(prompts) and isinstance(prompts[0], list)
    if conversational:
        prompts = [_messages("user", prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        completions = [_messages("assistant", response) for response in responses]
    written_tokens = tokens.take_where(loss_mask.values).tolist()
    keyword_arguments = {
        "prompts": prompts,
        "completions": completions,
        "completion_ids": [[int(token) for token in row] for row in written_tokens],
        "trainer_state": SimpleNamespace(global_step=max(ctx.iteration - 1, 0)),
        "log_metric": lambda name, value: ctx.record(name, [float(value)], over="calls"),
        "log_extra": lambda column, values: None,
        **{name: as_json(values) for name, values in more.items()},
        **(arguments or {}),
    }
    scorer = load_function(function) if factory is None else _built_reward(function, json.dumps(factory))
    _check_parameters(scorer, function, keyword_arguments)
    try:
        results = asyncio.run(call(scorer, None, **keyword_arguments)) if prompts else []
    except UserExitError as error:
        raise RewardError(f"the reward function ended by {error}; mend it: {function}") from error
    except ModuleNotFoundError as error:
        raise RewardError(f"the reward function {function}: {error}; {absent_module(error)}") from error
    scores = _numbers(results, len(prompts))
    failed = torch.tensor([score is None for score in scores], dtype=torch.bool)
    rewards = torch.tensor([score or 0.0 for score in scores], dtype=torch.float32)
    return settled(ctx, rewards, failed)


def _check_parameters(scorer: Callable[..., Any], target: str, arguments: Mapping[str, Any]) -> None:
    """Check that a function of TRL's takes the arguments that it is called with.

    Raises:
        RewardError: it does not; the message lists what it is called with.
    """
    try:
        signature = inspect.signature(scorer)
    except (TypeError, ValueError):  # a callable of C has none
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        law = (
            f"the reward function {target} can't be called: {error}; it is called with {', '.join(arguments)}"
        )
        remedy = "write it as def reward(prompts, completions, **kwargs)"
        raise RewardError(f"{law}; {remedy}") from error


@cache  # it may have a state, which lasts as long as the process
def _built_reward(target: str, factory: str) -> Callable[..., Any]:
    """Return the reward function that a function makes of arguments, which are given as JSON."""
    reward: Callable[..., Any] = load_function(target)(**json.loads(factory))
    return reward


def _filled(scorer: Callable[..., Any], target: str, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return which column a function of verl's gets for which of its parameters.

    Raises:
        RewardError: it has a required parameter for which there is none, and no argument.
    """
    filled: dict[str, str] = {}
    required: list[str] = []
    takes_any_name = False
    for name, parameter in inspect.signature(scorer).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_any_name = True
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        if name in COLUMNS or name in OF_A_BATCH:
            filled[name] = name
        if parameter.default is parameter.empty:
            required.append(name)
    if takes_any_name and OF_A_BATCH.keys().isdisjoint(filled):
        filled |= {name: name for name in COLUMNS}
    for name in required:
        if name in OTHER_NAMES:
            filled[name] = OTHER_NAMES[name]
    for name in arguments:
        filled.pop(name, None)
    for name in required:
        if name not in filled and name not in arguments:
            law = f"{target} has a parameter `{name}`, which no column gives; a function may name"
            known_names = ", ".join([*COLUMNS, *OTHER_NAMES, *OF_A_BATCH])
            raise RewardError(f"{law} {known_names}; give any other by arguments: {{{name}: ...}}")
    return filled


def _files(target: str, function: Any) -> set[str]:
    """Return the file that a target names, and the one that the function was written in."""
    while isinstance(function, partial):
        function = function.func
    module_of_function = sys.modules.get(getattr(function, "__module__", ""))
    files = set()
    for module in (load_module(target), module_of_function):
        file = getattr(module, "__file__", None)
        if file:
            files.add(file)
    return files


def _record_other_numbers(ctx: Context, results: Sequence[Mapping[str, Any]], key: str) -> None:
    """Record the numbers that results have beside the reward, each under its own name."""
    numbers: dict[str, list[float]] = {}
    for result in results:
        for name, value in result.items():
            numbers.setdefault(name, [])  # recorded in the order in which names occur
            number = as_number(value)
            if is_reward(number):
                numbers[name].append(float(number))
    numbers.pop(key, None)
    for name, values in numbers.items():
        if values:
            ctx.record(name, values)


def _reward_of(result: Any, key: str) -> Any:
    """Return the reward in a result: a number, a dict with one, or a tuple of which the first counts.

    verl's PrimeRewardManager and its default_compute_score take tuples so.
    """
    if isinstance(result, tuple) and result:
        return as_number(result[0])
    if not isinstance(result, Mapping):
        return as_number(result)
    if key not in result:
        known = ", ".join(map(str, result)) or "nothing"
        raise KeyError(f"its dict has no {key!r}, only {known}")
    return as_number(result[key])


def _messages(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def _numbers(results: Sequence[Any], count: int) -> list[float | None]:
    """Return a function's results as numbers; NaN is none, as in TRL, where it stands for None.

    Raises:
        RewardError: they are not one number or None for each sample.
    """
    if not hasattr(results, "__len__") or isinstance(results, str | bytes | Mapping):
        law = f"a reward function owes a list of {count} numbers, and gave {type(results).__name__}"
        if results is None:
            raise RewardError(f"{law}: end it with a return statement that gives the list")
        raise RewardError(f"{law}: {shortened(repr(results), 80)}")
    scores: list[Any] = []
    wrong = []
    for result in results:
        number = as_number(result)
        is_nan = number != number
        if number is None or is_nan:
            scores.append(None)
            continue
        scores.append(number)
        if not is_reward(number):
            wrong.append(number)
    if len(scores) != count or wrong:
        law = f"a reward function owes {count} finite numbers of float32, or None, and gave {len(scores)}"
        raise RewardError(f"{law}: {wrong[:3]}" if wrong else law)
    return scores
