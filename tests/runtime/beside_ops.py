"""A user's ops: rewards that run beside the devices, and what runs there meanwhile."""

import os
import signal
import time
from pathlib import Path

import torch

from rlgraph.ops import Context, boolean, float32, int64, op, samples, text, tokens


@op(beside=True)
def patient(responses: text[samples], *, until: str, within: float = 120.0) -> float32[samples]:
    """How many ones each response has, once a file is there."""
    end = time.monotonic() + within
    while not Path(until).exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{until} did not come")
        time.sleep(0.01)
    return torch.tensor([float(response.count("1")) for response in responses])


@op(beside=True)
def mortal(responses: text[samples], *, flag: str) -> float32[samples]:
    """The same, but the first process that is asked ends."""
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return torch.tensor([float(response.count("1")) for response in responses])
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@op(beside=True)
def wrong(tokens: int64[samples, tokens]) -> float32[samples]:
    """Fails where the tokens, which a worker may have shared, are there."""
    raise ValueError(f"no reward for {len(tokens)} samples")


@op()
def marked(loss_mask: boolean[samples, tokens], *, file: str) -> float32[samples]:
    """Ones; makes a file."""
    Path(file).touch()
    return torch.ones(len(loss_mask))


@op()
def both(ctx: Context, rewards: float32[samples], mark: float32[samples]) -> float32[samples]:
    """The product, whose mean is recorded."""
    ctx.record("reward/mean", (rewards * mark).tolist())
    return rewards * mark
