"""A user's op: a reward for writing ones."""

from typing import Any

from rlgraph.ops import (
    SPREAD,
    Batch,
    Context,
    ServeEngine,
    Totals,
    TrainEngine,
    boolean,
    float32,
    int64,
    op,
    samples,
    text,
    tokens,
)


@op()
def ones(responses: text[samples], *, per: int = 4) -> float32[samples]:
    """The number of ones in a response, divided by ``per``; it records nothing, as most rewards of users."""
    import torch

    return torch.tensor([response.count("1") / per for response in responses], dtype=torch.float32)


@op()
def recorded_ones(ctx: Context, responses: text[samples], *, per: int = 4) -> float32[samples]:
    """The same; it records its metrics itself."""
    rewards = ones(responses, per=per)
    ctx.record("reward/", rewards, kind=SPREAD)
    return rewards


@op()
def ones_served(
    model: ServeEngine, ctx: Context, responses: text[samples], *, per: int = 4
) -> float32[samples]:
    """The same, on the engine that generates; records the version of its weights."""
    ctx.record("served/version", [model.version])
    return ones(responses, per=per)


@op(updates=True)
def imitate(
    model: TrainEngine, ctx: Context, tokens: int64[samples, tokens], loss_mask: boolean[samples, tokens]
) -> None:
    """A user's own update: one step towards what was sampled."""
    import torch

    def objective(batch: Batch, totals: Totals) -> tuple[Any, dict[str, tuple[float, float]]]:
        return -batch["logprobs"].values[batch["loss_mask"].values].sum() / totals.tokens, {}

    columns = {"tokens": tokens, "loss_mask": loss_mask}
    metrics = model.update(columns, objective, torch.tensor(list(ctx.rows)), ctx.total_rows)
    ctx.record("loss", metrics["loss"], count=1)


@op()
def raises(ctx: Context, responses: text[samples]) -> float32[samples]:
    """Fails in the second iteration."""
    import torch

    if ctx.iteration == 1:
        raise ArithmeticError("the abacus broke")
    return torch.zeros(len(responses))


@op()
def dies(ctx: Context, responses: text[samples]) -> float32[samples]:
    """Ends its process in the second iteration."""
    import os

    import torch

    if ctx.iteration == 1:
        os._exit(1)
    return torch.zeros(len(responses))


@op()
def trapped(
    ctx: Context,
    rewards: float32[samples],
    *,
    folder: str,
    traps: dict[str, int],
    first: bool = True,
    host: bool = False,
    kill: str = "SIGKILL",
) -> float32[samples]:
    """Rewards as they are. From an iteration of ``traps`` on, its process ends where it enters that function.

    Attributes:
        folder: where a trap leaves a file once it has gone off; it goes off once.
        traps: name of a function as in a traceback, and iteration, from 1.
        first: whether it is set on the device that has the first row, or on the others.
        host: whether Ray's daemon on the host ends instead, and with it all of its workers.
        kill: the signal that is sent.
    """
    import os
    import signal
    import sys
    import time
    from pathlib import Path

    due = {name for name, at in traps.items() if ctx.iteration + 1 >= at and not Path(folder, name).exists()}

    def enters(frame: Any, event: str, argument: Any) -> None:
        name = frame.f_code.co_qualname
        if event == "call" and name in due and "rlgraph" in frame.f_globals.get("__name__", ""):
            Path(folder, name).touch()
            time.sleep(0.5)  # what it did before is reported
            os.kill(os.getppid() if host else os.getpid(), signal.Signals[kill])
            time.sleep(600)  # until it is ended with its host

    if due and (0 in ctx.rows) == first:
        sys.setprofile(enters)
    return rewards


@op()
def infinite(
    logprobs: float32[samples, tokens], advantages: float32[samples, tokens], group: int64[samples]
) -> float32[samples, tokens]:
    """-A lp, and not finite on the samples of the first prompt."""
    import torch

    factor = torch.where(logprobs.spread(group).values == 0, torch.inf, 1.0)
    return logprobs.like(-advantages.values * logprobs.values * factor)


@op()
def steep(
    logprobs: float32[samples, tokens], advantages: float32[samples, tokens]
) -> float32[samples, tokens]:
    """-A lp, with a term that is 0 and has no gradient."""
    return logprobs.like(-advantages.values * logprobs.values + (0 * logprobs.values).sqrt())


@op()
def endless(logprobs: float32[samples, tokens]) -> float32[samples, tokens]:
    """Infinite on every token."""
    import torch

    return logprobs.like(torch.full_like(logprobs.values, torch.inf))


@op()
def unbounded(ctx: Context, responses: text[samples]) -> float32[samples]:
    """Infinite for two responses."""
    import torch

    rewards = torch.tensor([float(len(response)) for response in responses])
    rewards[2:4] = torch.inf
    ctx.record("reward/mean", rewards)
    return rewards


class Unpickled(Exception):
    """An error that can be pickled, and not be unpickled."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what)


class Unreadable(Exception):
    """An error that nobody can write on, or put into words."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)

    def __str__(self) -> str:
        raise ValueError("the abacus broke" * 500)


@op()
def cannot_be_pickled(ctx: Context, responses: text[samples]) -> float32[samples]:
    """Raises what holds a lock, with a long text."""
    import threading

    raise ValueError("the abacus broke" * 300_000, threading.Lock())


@op()
def cannot_be_unpickled(ctx: Context, responses: text[samples]) -> float32[samples]:
    """Raises what can't be made again from its text, a long one."""
    raise Unpickled("the abacus broke" * 300_000, "so")


@op()
def cannot_be_read(ctx: Context, responses: text[samples]) -> float32[samples]:
    """Raises what has no text, behind something that has."""
    try:
        raise ArithmeticError("the abacus broke" * 300_000)
    except ArithmeticError as error:
        raise Unreadable from error
