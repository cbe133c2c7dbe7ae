"""The shipped ops and losses by name. Values are where to import them from, on first use.

A graph may also name a function in a file (``my_ops.py:length_penalty``); it needs no entry here.
"""

from __future__ import annotations

OPS: dict[str, str] = {
    "data.prompts": "rlgraph.nodes.data:prompts",
    "data.examples": "rlgraph.nodes.data:examples",
    "rollout": "rlgraph.nodes.rollout:rollout",
    "logprobs": "rlgraph.nodes.logprobs:logprobs",
    "values": "rlgraph.nodes.values:values",
    "reward.exact": "rlgraph.nodes.reward.exact:exact",
    "reward.math": "rlgraph.nodes.reward.math:math",
    "reward.overlong": "rlgraph.nodes.reward.overlong:overlong",
    "reward.kl_penalty": "rlgraph.nodes.reward.kl_penalty:kl_penalty",
    "advantage.gae": "rlgraph.nodes.advantage:gae",
    "advantage.reinforce_pp": "rlgraph.nodes.advantage:reinforce_pp",
    "advantage.grpo": "rlgraph.nodes.advantage_group:grpo",
    "advantage.rloo": "rlgraph.nodes.advantage_group:rloo",
    "advantage.reinforce_pp_baseline": "rlgraph.nodes.advantage_group:reinforce_pp_baseline",
    "advantage.opo": "rlgraph.nodes.advantage_group:opo",
    "advantage.gpg": "rlgraph.nodes.advantage_group:gpg",
    "filter.mixed": "rlgraph.nodes.filter:mixed",
    "filter.threshold": "rlgraph.nodes.filter:threshold",
    "update.policy": "rlgraph.nodes.update:policy",
    "update.critic": "rlgraph.nodes.update:critic",
}

LOSSES: dict[str, str] = {
    "ppo_clip": "rlgraph.nodes.loss:ppo_clip",
    "sft": "rlgraph.nodes.loss:sft",
    "reinforce": "rlgraph.nodes.loss:reinforce",
    "cispo": "rlgraph.nodes.loss:cispo",
    "sapo": "rlgraph.nodes.loss:sapo",
    "gspo": "rlgraph.nodes.loss_sequence:gspo",
    "geo_mean": "rlgraph.nodes.loss_sequence:geo_mean",
}
