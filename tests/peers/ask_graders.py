"""What verl's and TRL's graders, and Math-Verify, pay for the responses of tests/helpers/grading_rows.py."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
warnings.simplefilter("ignore")
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from math_verify import parse, verify  # noqa: E402
from trl.rewards import accuracy_reward  # noqa: E402
from verl.utils.reward_score import gsm8k, math_dapo, prime_math  # noqa: E402
from verl.utils.reward_score.math_verify import _verify_in_subprocess  # noqa: E402

from grading_rows import ROWS  # noqa: E402

PEERS = ["verl", "trl", "math-verify", "pylatexenc"]
logging.disable(logging.CRITICAL)


def math_verify_defaults(response: str, reference: str) -> bool:
    return verify(parse(f"${reference}$"), parse(response))


def verl_math_verify(response: str, reference: str) -> bool:
    return _verify_in_subprocess(f"\\boxed{{{reference}}}", response) > 0


def verl_math_dapo(response: str, reference: str) -> bool:
    return math_dapo.compute_score(response, reference)["score"] > 0


def verl_gsm8k(response: str, reference: str) -> bool:
    return gsm8k.compute_score(response, reference) > 0


def verl_prime_math(response: str, reference: str) -> bool:
    return bool(prime_math.compute_score(response, reference)[0])


def trl_accuracy_reward(response: str, reference: str) -> bool:
    return accuracy_reward([[{"content": response}]], [f"${reference}$"])[0] == 1.0


GRADERS: dict[str, Callable[[str, str], bool]] = {
    "math_verify": math_verify_defaults,
    "verl math_verify": verl_math_verify,
    "verl math_dapo": verl_math_dapo,
    "verl gsm8k": verl_gsm8k,
    "verl prime_math": verl_prime_math,
    "trl accuracy_reward": trl_accuracy_reward,
}


def paid(grader: Callable[[str, str], bool], response: str, reference: str) -> bool | str:
    """Return whether a grader pays, or the exception that it raises."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return bool(grader(response, reference))
    except Exception as error:
        return type(error).__name__


def numbers() -> dict[str, Any]:
    return {
        "rows": [
            {
                "response": response,
                "reference": reference,
                **{name: paid(grader, response, reference) for name, grader in GRADERS.items()},
            }
            for rows in ROWS.values()
            for response, reference, _ in rows
        ]
    }
