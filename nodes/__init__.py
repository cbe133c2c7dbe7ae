"""The shipped ops, and the functions that attributes of theirs name, by name.

Values are where to import them from, on first use.

A graph may also name a function in a file (``my_ops.py:length_penalty``); it needs no entry here.
"""

from __future__ import annotations

OPS: dict[str, str] = {
    "data.prompts": "rlgraph.nodes.data:prompts",
    "data.examples": "rlgraph.nodes.data:examples",
    "data.pairs": "rlgraph.nodes.data_pairs:pairs",
    "data.recorded": "rlgraph.nodes.data_recorded:recorded",
    "rollout": "rlgraph.nodes.rollout:rollout",
    "rollout.partial": "rlgraph.nodes.rollout_partial:partial",
    "rollout.agent": "rlgraph.nodes.agent.rollout:agent",
    "logprobs": "rlgraph.nodes.logprobs:logprobs",
    "logprobs.squares": "rlgraph.nodes.logprobs:squares",
    "values": "rlgraph.nodes.values:values",
    "reward.exact": "rlgraph.nodes.reward.exact:exact",
    "reward.f1": "rlgraph.nodes.reward.f1:f1",
    "reward.format": "rlgraph.nodes.reward.format:form",
    "reward.code": "rlgraph.nodes.reward.code:code",
    "reward.remote": "rlgraph.nodes.reward.remote:remote",
    "reward.model": "rlgraph.nodes.reward.model:reward_model",
    "reward.judge": "rlgraph.nodes.reward.judge:judge",
    "reward.sum": "rlgraph.nodes.reward.total:total",
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
    "advantage.remax": "rlgraph.nodes.advantage_baseline:remax",
    "advantage.optimal_token_baseline": "rlgraph.nodes.advantage_token:optimal_token_baseline",
    "advantage.grpo_passk": "rlgraph.nodes.advantage_passk:grpo_passk",
    "advantage.gdpo": "rlgraph.nodes.advantage_multi:gdpo",
    "advantage.distill": "rlgraph.nodes.advantage_distill:distill",
    "preference.dpo": "rlgraph.nodes.preference:dpo_weights",
    "covariance.band": "rlgraph.nodes.loss_covariance:band",
    "covariance.top": "rlgraph.nodes.loss_covariance:top",
    "correction.tis": "rlgraph.nodes.correction:tis",
    "correction.mis": "rlgraph.nodes.correction:mis",
    "correction.reject": "rlgraph.nodes.correction:reject",
    "filter.mixed": "rlgraph.nodes.filter:mixed",
    "filter.threshold": "rlgraph.nodes.filter:threshold",
    "filter.widest": "rlgraph.nodes.filter:widest",
    "filter.judged": "rlgraph.nodes.reward.judged:judged",
    "metric.pass_at_k": "rlgraph.nodes.metric:pass_at_k",
    "metric.mean_at_k": "rlgraph.nodes.metric:mean_at_k",
    "update.policy": "rlgraph.nodes.update:policy",
    "update.critic": "rlgraph.nodes.update:critic",
    "update.copy": "rlgraph.nodes.refresh:copy",
}

LOSSES: dict[str, str] = {
    "ppo_clip": "rlgraph.nodes.loss:ppo_clip",
    "decoupled_ppo": "rlgraph.nodes.loss:decoupled_ppo",
    "sft": "rlgraph.nodes.loss:sft",
    "reinforce": "rlgraph.nodes.loss:reinforce",
    "cispo": "rlgraph.nodes.loss:cispo",
    "sapo": "rlgraph.nodes.loss:sapo",
    "clip_cov": "rlgraph.nodes.loss_covariance:clip_cov",
    "kl_cov": "rlgraph.nodes.loss_covariance:kl_cov",
    "dppo_tv": "rlgraph.nodes.loss_divergence:dppo_tv",
    "dppo_kl": "rlgraph.nodes.loss_divergence:dppo_kl",
    "dpo": "rlgraph.nodes.preference:dpo",
    "gspo": "rlgraph.nodes.loss_sequence:gspo",
    "geo_mean": "rlgraph.nodes.loss_sequence:geo_mean",
}

LOOPS: dict[str, str] = {
    "single_turn": "rlgraph.nodes.agent.loops:single_turn",
    "tool_loop": "rlgraph.nodes.agent.loops:tool_loop",
}

TOOLS: dict[str, str] = {
    "calculator": "rlgraph.nodes.tools.calculator:calculator",
    "python": "rlgraph.nodes.tools.python:python",
    "search": "rlgraph.nodes.tools.search:search",
}

PARSERS: dict[str, str] = {
    "hermes": "rlgraph.nodes.agent.parsers:hermes",
    "json": "rlgraph.nodes.agent.parsers:plain_json",
    "qwen": "rlgraph.nodes.agent.parsers:qwen",
}

HOOKS: dict[str, dict[str, str]] = {"loss": LOSSES, "loop": LOOPS, "tool": TOOLS, "parser": PARSERS}
