"""What TRL 1.16.0 does that a good guess misses, and that the importer relies on. Needs `make peers`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".peers/bin/python"
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs .peers: make peers"),
]

# the functions of ask_trl_grpo.py and ask_trl_preferences.py call TRL's own trainers on fixed rows
PROGRAM = """
import importlib.util, json, sys, tempfile
def module(name):
    spec = importlib.util.spec_from_file_location(name, f"{sys.argv[1]}/tests/peers/{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded
grpo, pairs = module("ask_trl_grpo"), module("ask_trl_preferences")
folder = tempfile.mkdtemp()
def loss(**settings): return grpo.loss_of(settings, grpo.rows(), folder)
def dpo(**settings): return pairs.dpo(settings, pairs.rows(), folder)
"""


def asked(expression: str) -> Any:
    program = f"{PROGRAM}\nimport trl\nprint(json.dumps({expression}))"
    command = [str(PYTHON), "-c", program, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_dpos_sigmoid_reads_no_label_smoothing() -> None:
    """In releases before 1.0 it made DPO conservative; 1.16.0 takes it without a word."""
    plain, smoothed = asked("[dpo(), dpo(label_smoothing=0.2)]")
    assert plain["loss"] == smoothed["loss"]
    assert plain["gradient"] == smoothed["gradient"]


def test_grpos_kl_is_weighed_by_default() -> None:
    default, weighed, plain = asked(
        "[loss(beta=0.04), loss(beta=0.04, use_bias_correction_kl=True), "
        "loss(beta=0.04, use_bias_correction_kl=False)]"
    )
    assert default["gradient"] == weighed["gradient"]
    assert default["gradient"] != plain["gradient"]


def test_cispos_epsilon_high_is_the_largest_weight_itself() -> None:
    """Not 1 + epsilon_high, as in the paper: by default no token counts for more than 0.2."""
    default, capped = asked("[loss(loss_type='cispo'), loss(loss_type='cispo', epsilon_high=0.2)]")
    assert default["gradient"] == capped["gradient"]
    per_token = [abs(number) * 17 for row in default["gradient"] for number in row]  # 17 tokens in all
    assert max(per_token) <= 0.2 * 1.1 + 1e-6  # the largest advantage is 1.1


def test_a_ratio_of_sequences_keeps_the_mean_of_loss_type() -> None:
    tokens, sequences = asked(
        "[loss(importance_sampling_level='sequence'), "
        "loss(importance_sampling_level='sequence', loss_type='grpo')]"
    )
    assert tokens["gradient"] != sequences["gradient"]


def test_weighted_pairs_with_a_likelihood_raise() -> None:
    program = "dpo(use_weighting=True, loss_type=['sigmoid', 'sft'])"
    command = [str(PYTHON), "-c", f"{PROGRAM}\n{program}", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "more than one element of the written-to tensor" in done.stderr


def test_kto_takes_rows_in_file_order() -> None:
    default = "__dataclass_fields__['train_sampling_strategy'].default"
    kto, dpo = asked(f"[str(trl.KTOConfig.{default}), str(trl.DPOConfig.{default})]")
    assert (kto, dpo) == ("sequential", "random")
