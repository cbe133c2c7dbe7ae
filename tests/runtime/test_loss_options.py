"""Options of the policy's loss take one step on any number of devices, in any micro-batches, as on one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from ran import metrics
from test_objectives import noisy
from test_shipped import _folder as _folder
from test_shipped import tiny

# entropies as a column, whitened rewards with a KL behind them, weights of tokens and of the sampler's rows
SAMPLED = """
graph: options
extends: grpo
edits:
  - replace:
      old_logprobs: {op: logprobs.entropy, model: policy, out: {logprobs: old_logprobs}}
      advantages: {op: advantage.reinforce_pp, whiten: false, in: {rewards: shaped, loss_mask: whole_mask}}
  - add:
      scaled: {op: reward.scale, shift: 1, factor: 2, high: 3.5}
      ended: {op: reward.truncated, reward: 0.5, in: {rewards: scaled}}
      normal: {op: reward.whiten, mean: group, std: batch, in: {rewards: ended}}
      shaped: {op: reward.kl_penalty, beta: 0.1, in: {rewards: normal, loss_mask: whole_mask}}
      whole_mask: {op: mask.complete}
      token_ratio: {op: correction.tis, floor: 0.9, cap: null}
      rollout_weights:
        {op: correction.reject, kl: k1, threshold: 2.0, least: -1.0, over: sum, in: {weights: token_ratio}}
      near: {op: weight.second_moment, limit: 1.0e-5, minibatches: 2}
      token_weights:
        {op: weight.entropy, share: 0.5, minibatches: 2, in: {loss_mask: whole_mask, weights: near}}
  - replace: {update_policy.loss: {kind: ppo_clip, level: sequence, clip: 0.1, delta: 1.05}}
  - set:
      update_policy.in: {loss_mask: whole_mask, watched_logprobs: rollout_logprobs}
      update_policy.kl_coef: 0.5
      update_policy.kl_unbiased: true
      update_policy.off_policy_limit: 1.0e-6
      update_policy.entropy_coef: 0.01
      update_policy.entropy_aggregate: token-mean
      update_policy.minibatches: 2
      rollout.max_total_tokens: 20
"""
LEFT_OUT = ("rollout.n=", "rollout.max_new_tokens=", "update_policy.minibatches=")
READ = ("update_", "shaped/", "scaled/", "ended/", "whole_mask/", "token_", "near/", "rollout", "kl/")


def settings(*more: str) -> list[str]:
    chosen = [one for one in tiny("grpo") if not one.startswith(LEFT_OUT)]
    rewarded = "rewards={op: reward.format, pattern: '.*[0-4].*'}"
    own = ["models.policy.optimizer.lr=0.003", f"models.ref.path={noisy(Path('demo_files/model'))}"]
    own += ["models.policy.serve.dtype=bfloat16"]  # so that the engines are apart
    return [*chosen, *own, "rollout.n=4", "rollout.max_new_tokens=20", rewarded, *more]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["sequence", "product"])
def test_options_are_the_same_on_one_device_and_on_two(
    level: str, run_on_devices: Callable[..., str]
) -> None:
    Path("options.yaml").write_text(SAMPLED.replace("level: sequence", f"level: {level}"))
    once = ["options.yaml", *settings("schedule.save_every=1"), "--steps", "1"]
    run_on_devices(*once, "--devices", "1", "--inline", "--run-dir", "one")
    run_on_devices(*once, "models.policy.train.micro_tokens=24", "--devices", "2", "--run-dir", "two")
    (one,), (two,) = metrics("one"), metrics("two")
    names = [name for name in one if name.startswith(READ)]
    assert one["update_policy/grad_norm"] > 0
    assert 0 < one["whole_mask/masked"] < 1
    assert 0.4 < one["token_weights/share"] < 0.7
    assert 0 < one["near/share"] < 1
    assert math.isfinite(one["update_policy/kl_watched"])
    assert 0 < one["update_policy/off_policy"] < 1, "the second mini-batch has some"
    for name in names:
        assert math.isfinite(one[name]), name
        assert two[name] == pytest.approx(one[name], rel=2e-3, abs=1e-6), name
    rows = [json.loads(line) for line in Path("one/samples/step-000001.jsonl").read_text().splitlines()]
    assert max(len(row["loss_mask"]) for row in rows) == 20, "prompt and response together"
    assert {len(row["loss_mask"]) for row in rows if row["truncated"]} == {20}
    for row in rows:
        for written, entropy in zip(row["loss_mask"], row["entropy"], strict=True):
            assert (entropy > 0) == written
