"""The shipped ops, and the functions that their attributes can name, by name.

A value says where its op is imported from, on first use.

A graph may also name a function in a file (``my_ops.py:length_penalty``); it needs no entry here.
"""

from __future__ import annotations

OPS: dict[str, str] = {
    "data.prompts": "rlgraph.nodes.data.prompts:prompts",
    "data.examples": "rlgraph.nodes.data.prompts:examples",
    "data.pairs": "rlgraph.nodes.data.pairs:pairs",
    "data.recorded": "rlgraph.nodes.data.recorded:recorded",
    "rollout": "rlgraph.nodes.rollout.rollout:rollout",
    "rollout.partial": "rlgraph.nodes.rollout.partial:partial",
    "rollout.agent": "rlgraph.nodes.agent.rollout:agent",
    "logprobs": "rlgraph.nodes.score.forward:logprobs",
    "logprobs.squares": "rlgraph.nodes.score.forward:squares",
    "realign": "rlgraph.nodes.score.realign:realign",
    "reprompt": "rlgraph.nodes.score.reprompt:reprompt",
    "prompts.from": "rlgraph.nodes.score.reprompt:from_rows",
    "values": "rlgraph.nodes.score.forward:values",
    "extract": "rlgraph.nodes.reward.text:extract",
    "reward.exact": "rlgraph.nodes.reward.text:exact",
    "reward.f1": "rlgraph.nodes.reward.text:f1",
    "reward.format": "rlgraph.nodes.reward.text:form",
    "reward.code": "rlgraph.nodes.reward.code:code",
    "reward.remote": "rlgraph.nodes.reward.remote:remote",
    "reward.model": "rlgraph.nodes.reward.model:reward_model",
    "reward.process": "rlgraph.nodes.reward.model:process",
    "reward.agreement": "rlgraph.nodes.reward.shaping:agreement",
    "reward.judge": "rlgraph.nodes.reward.judge:judge",
    "reward.sum": "rlgraph.nodes.reward.shaping:total",
    "reward.math": "rlgraph.nodes.reward.math:math",
    "reward.overlong": "rlgraph.nodes.reward.shaping:overlong",
    "reward.kl_penalty": "rlgraph.nodes.reward.shaping:kl_penalty",
    "reward.per_sample": "rlgraph.nodes.reward.shaping:per_sample",
    "reward.verl": "rlgraph.nodes.reward.functions:verl",
    "reward.trl": "rlgraph.nodes.reward.functions:trl",
    "advantage.gae": "rlgraph.nodes.advantage.gae:gae",
    "advantage.reinforce_pp": "rlgraph.nodes.advantage.gae:reinforce_pp",
    "advantage.grpo": "rlgraph.nodes.advantage.group:grpo",
    "advantage.rloo": "rlgraph.nodes.advantage.group:rloo",
    "advantage.maxrl": "rlgraph.nodes.advantage.group:maxrl",
    "advantage.reinforce_pp_baseline": "rlgraph.nodes.advantage.group:reinforce_pp_baseline",
    "advantage.opo": "rlgraph.nodes.advantage.group:opo",
    "advantage.gpg": "rlgraph.nodes.advantage.group:gpg",
    "advantage.remax": "rlgraph.nodes.advantage.baseline:remax",
    "advantage.optimal_token_baseline": "rlgraph.nodes.advantage.baseline:optimal_token_baseline",
    "advantage.running": "rlgraph.nodes.advantage.baseline:running",
    "advantage.grpo_passk": "rlgraph.nodes.advantage.group:grpo_passk",
    "advantage.gdpo": "rlgraph.nodes.advantage.group:gdpo",
    "advantage.distill": "rlgraph.nodes.advantage.gae:distill",
    "advantage.process": "rlgraph.nodes.advantage.process:process",
    "advantage.turns": "rlgraph.nodes.advantage.turns:turns",
    "preference.dpo": "rlgraph.nodes.loss.preference:dpo_weights",
    "preference.simpo": "rlgraph.nodes.loss.preference:simpo_weights",
    "preference.orpo": "rlgraph.nodes.loss.preference:orpo_weights",
    "preference.mismatched": "rlgraph.nodes.loss.preference:mismatched",
    "preference.kto": "rlgraph.nodes.loss.preference:kto_weights",
    "preference.reward": "rlgraph.nodes.loss.preference:reward_weights",
    "covariance.band": "rlgraph.nodes.loss.covariance:band",
    "covariance.top": "rlgraph.nodes.loss.covariance:top",
    "correction.tis": "rlgraph.nodes.select.correction:tis",
    "correction.mis": "rlgraph.nodes.select.correction:mis",
    "correction.reject": "rlgraph.nodes.select.correction:reject",
    "filter.all": "rlgraph.nodes.select.filter:everything",
    "filter.mixed": "rlgraph.nodes.select.filter:mixed",
    "filter.threshold": "rlgraph.nodes.select.filter:threshold",
    "filter.widest": "rlgraph.nodes.select.filter:widest",
    "filter.best": "rlgraph.nodes.select.filter:best",
    "filter.judged": "rlgraph.nodes.select.filter:judged",
    "filter.difficulty": "rlgraph.nodes.select.difficulty:within",
    "difficulty": "rlgraph.nodes.select.difficulty:difficulty",
    "fill": "rlgraph.nodes.select.fill:fill",
    "replay": "rlgraph.nodes.select.replay:replay",
    "group.mean": "rlgraph.nodes.advantage.group:group_mean",
    "group.peer": "rlgraph.nodes.advantage.group:group_peer",
    "mask.steps": "rlgraph.nodes.select.mask:steps",
    "mask.observations": "rlgraph.nodes.select.mask:observations",
    "metric.pass_at_k": "rlgraph.nodes.select.metric:pass_at_k",
    "metric.mean_at_k": "rlgraph.nodes.select.metric:mean_at_k",
    "segment.contexts": "rlgraph.nodes.score.segment:contexts",
    "segment.align": "rlgraph.nodes.score.segment:align",
    "update.policy": "rlgraph.nodes.update.update:policy",
    "update.critic": "rlgraph.nodes.update.update:critic",
    "update.reward": "rlgraph.nodes.update.reward:reward",
    "update.copy": "rlgraph.nodes.update.update:copy",
}

LOSSES: dict[str, str] = {
    "ppo_clip": "rlgraph.nodes.loss.policy:ppo_clip",
    "decoupled_ppo": "rlgraph.nodes.loss.policy:decoupled_ppo",
    "decoupled_ppo_approx": "rlgraph.nodes.loss.policy:decoupled_ppo_approx",
    "sft": "rlgraph.nodes.loss.policy:sft",
    "reinforce": "rlgraph.nodes.loss.policy:reinforce",
    "fipo": "rlgraph.nodes.loss.policy:fipo",
    "cispo": "rlgraph.nodes.loss.policy:cispo",
    "sapo": "rlgraph.nodes.loss.policy:sapo",
    "clip_cov": "rlgraph.nodes.loss.covariance:clip_cov",
    "kl_cov": "rlgraph.nodes.loss.covariance:kl_cov",
    "dppo_tv": "rlgraph.nodes.loss.divergence:dppo_tv",
    "dppo_kl": "rlgraph.nodes.loss.divergence:dppo_kl",
    "preference": "rlgraph.nodes.loss.preference:preference",
    "gspo": "rlgraph.nodes.loss.sequence:gspo",
    "geo_mean": "rlgraph.nodes.loss.sequence:geo_mean",
    "vespo": "rlgraph.nodes.loss.sequence:vespo",
}

LOOPS: dict[str, str] = {
    "single_turn": "rlgraph.nodes.agent.chat:single_turn",
    "tool_loop": "rlgraph.nodes.agent.chat:tool_loop",
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
