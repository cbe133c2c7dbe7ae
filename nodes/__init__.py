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
    "reward.kl_penalty": "rlgraph.nodes.reward.kl_penalty:kl_penalty",
    "advantage.gae": "rlgraph.nodes.advantage:gae",
    "advantage.grpo": "rlgraph.nodes.advantage:grpo",
    "filter.mixed": "rlgraph.nodes.filter:mixed",
    "update.policy": "rlgraph.nodes.update:policy",
    "update.critic": "rlgraph.nodes.update:critic",
}

LOSSES: dict[str, str] = {
    "ppo_clip": "rlgraph.nodes.loss:ppo_clip",
    "sft": "rlgraph.nodes.loss:sft",
    "reinforce": "rlgraph.nodes.loss:reinforce",
}
