"""OpenRLHF: which nodes its trainers would run, and values that follow from several flags."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlgraph.importing.draft import Draft
from rlgraph.importing.flags import read_flags
from rlgraph.importing.importer import (
    COMMON,
    Converters,
    Idle,
    Imported,
    KeyOutcome,
    graph_name,
    outcomes_of,
    refuse_unknown,
    remark,
    warmup_share,
)
from rlgraph.importing.options import Options
from rlgraph.importing.table import table_of

CORRECTION = "algo.advantage.is_correction"
FILTER = "algo.dynamic_filtering_enable"
KL = "algo.kl.init_coef"
KL_IN_LOSS = "algo.kl.use_loss"
GRAPHS = {"sft": "sft", "dpo": "dpo", "rm": "reward_model"}
SOURCES = {"ppo": "prompts", "sft": "examples", "dpo": "pairs", "rm": "pairs"}


def import_openrlhf(
    words: Sequence[str], folder: Path = Path(), trainer: str | None = None, launch: int = 1
) -> Imported:
    """Return the graph, to be written to a folder, that does what a trainer of OpenRLHF does.

    Args:
        words: a launch script, which is not run, or flags, or both: see ``rlgraph.importing.flags``.
        folder: where the graph is to be written.
        trainer: ppo, sft, dpo or rm, where flags are given alone; null is ppo.
        launch: which launch of a script is meant, from 1.

    Raises:
        GraphError: the script can't be read, or the estimator is none that there is a graph for.
    """
    programs = table_of("openrlhf").facts["programs"]
    settings = read_flags(words, tuple(programs), launch)
    names_program = bool(words) and not words[0].startswith("--")
    if trainer is None:
        trainer = programs[settings.program] if names_program else "ppo"
    options = Options(table_of("openrlhf", trainer), settings.flags, folder)
    draft = draft_of(options)
    outcomes = [*settings.outcomes(), *remarks(options), *outcomes_of(options, draft, CONVERTERS)]
    name = settings.file.stem if settings.file else trainer
    return Imported(graph_name(name), "OpenRLHF", draft, outcomes)


def draft_of(options: Options) -> Draft:
    """Return the parent of a trainer with the nodes that its flags ask for."""
    kind = options.table.kind
    draft = _policy_gradient(options) if kind == "ppo" else Draft(GRAPHS[kind])
    draft.remove("schedule.iterations")
    source = SOURCES[kind]
    draft.set(f"{source}.template", "chat" if options["data.apply_chat_template"] else "plain")
    if kind == "sft":
        draft.set("examples.batch", options["train.batch_size"])
        draft.set("examples.answer", options["data.output_key"])
    elif kind in ("dpo", "rm"):
        draft.set("pairs.batch", options["train.batch_size"])
        draft.set("pairs.question", options["data.prompt_key"])
    if kind == "dpo":
        _preference_loss(draft, options)
    return draft


def _preference_loss(draft: Draft, options: Options) -> None:
    """Give DPO OpenRLHF's loss where it is another than the graph's: IPO, or labels that are smoothed."""
    smoothing = options["model.label_smoothing"]
    if options.is_on("model.ipo_enable"):
        # OpenRLHF's IPO is of summed log-probs, and smooths nothing (DPOLoss, dpo_trainer.py)
        draft.set("preference.losses", {"ipo": {"kind": "ipo", "mean": False}})
    elif isinstance(smoothing, int | float) and smoothing > 0:
        draft.set("preference.losses", {"sigmoid": {"kind": "sigmoid", "smoothing": float(smoothing)}})


def _policy_gradient(options: Options) -> Draft:
    estimators = options.table.facts["estimators"]
    name = str(options["algo.advantage.estimator"])
    law = f"--algo.advantage.estimator {name}: there is no graph for this estimator of OpenRLHF"
    refuse_unknown(name, estimators, law)
    draft = Draft(estimators[name]["extends"])
    _data(draft, options)
    _reward(draft, options)
    _loss(draft, options)
    _reference(draft, options, estimators[name]["compares"] == "tokens")
    _truncated(draft, options)
    if options["reward.overlong_buffer_len"] is not None:
        penalty = {"op": "reward.overlong", "on": "rewards", "limit": "${nodes.rollout.max_new_tokens}"}
        buffer = int(options["reward.overlong_buffer_len"])
        factor = float(options["reward.overlong_penalty_factor"])
        draft.edit("insert", overlong={**penalty, "buffer": buffer, "penalty": factor})
    if options.is_on(FILTER):
        draft.sample_mixed_groups()
    if options.is_on(f"{CORRECTION}_enable"):
        _correct(draft, options)
    return draft


def _data(draft: Draft, options: Options) -> None:
    """Read OpenRLHF's rows, and evaluate where it does."""
    draft.set("prompts.answer", options["data.label_key"])
    draft.set("prompts.answer_after", None)
    longest = options["data.max_len"]
    most = options["rollout.max_new_tokens"]
    draft.set("rollout.max_new_tokens", most or longest)
    draft.set("rollout.max_total_tokens", longest)
    if not options["data.prompt_max_len"]:
        longest_prompt = longest - 1
        if most and most < longest:
            longest_prompt = longest - most
        draft.set("prompts.max_prompt_tokens", longest_prompt)
    if options.is_on("eval.steps") and options["eval.dataset"]:
        draft.evaluate(options["eval.steps"], {"n": 1, "temperature": 0})


def _reward(draft: Draft, options: Options) -> None:
    """Score by a reward model where OpenRLHF does; a function or a service needs the user."""
    path = options["reward.model_name_or_path"]
    is_scored_elsewhere = options["reward.remote_url"] or options["train.agent_func_path"]
    if is_scored_elsewhere or not path:
        return
    reward = {"path": options.path(str(path)), "head": "value", "frozen": True}
    draft.edit("add", **{"models.reward": reward})
    draft.edit("replace", rewards={"op": "reward.model", "model": "reward"})


def _loss(draft: Draft, options: Options) -> None:
    """Give the update OpenRLHF's loss, whatever the parent's is: it clips ratios with every estimator."""
    low, high = options["actor.eps_clip_low_high"] or [options["actor.eps_clip"]] * 2
    loss: dict[str, Any] = {"kind": "ppo_clip", "clip": low, "clip_high": high}
    aggregate = "token-mean"
    if options["actor.policy_loss_type"] == "gspo":
        loss["kind"] = "gspo"
        aggregate = "seq-mean-token-mean"
    elif options["actor.dual_clip"] is not None:
        loss["dual_clip"] = options["actor.dual_clip"]
    draft.edit("replace", **{"update_policy.loss": loss})
    draft.remove("update_policy.norm")
    draft.set("update_policy.aggregate", aggregate)
    if not draft.has("old_logprobs"):
        draft.edit("add", old_logprobs={"op": "logprobs", "model": "policy"})
    draft.set("update_policy.minibatches", minibatches(options))
    if draft.has("update_critic"):
        draft.set("update_critic.minibatches", minibatches(options))
        draft.set("update_critic.epochs", options["train.max_epochs"])


def _reference(draft: Draft, options: Options, per_token: bool) -> None:
    """Put the KL where OpenRLHF has it: into the loss, into each token's reward, or nowhere."""
    draft.remove("update_policy.kl_coef", "update_policy.kl")
    if not options[KL]:
        draft.remove("ref_logprobs", "models.ref")
        if per_token:
            draft.set("shaped.beta", 0.0)
        return
    draft.add_reference()
    if options.is_on(KL_IN_LOSS):
        draft.set("update_policy.kl_coef", kl_coefficient(options))
        draft.set("update_policy.kl", options["algo.kl.estimator"])
        if per_token:
            draft.set("shaped.beta", 0.0)
    elif per_token:
        draft.set("shaped.beta", kl_coefficient(options))
        draft.set("shaped.kl", options["algo.kl.estimator"])
    else:
        _kl_behind_the_group(draft, options, str(options["algo.advantage.estimator"]))


def _kl_behind_the_group(draft: Draft, options: Options, estimator: str) -> None:
    """Take a KL off each token's return, after rewards were compared within their group.

    OpenRLHF normalises rewards per prompt first, and adds -beta KL of each token then: the advantage is the
    return-to-go of both.
    """
    std = "group" if estimator == "group_norm" else "none"
    normal: dict[str, Any] = {"op": "reward.whiten", "mean": "group", "std": std, "eps": 1e-9}
    if estimator == "rloo":
        normal["leave_one_out"] = True
    shaped = {"op": "reward.kl_penalty", "beta": kl_coefficient(options), "kl": options["algo.kl.estimator"]}
    draft.edit("add", normal=normal)
    draft.edit("add", shaped={**shaped, "in": {"rewards": "normal"}})
    whiten = estimator == "reinforce_baseline"  # it alone of these normalises over the batch, too
    advantages = {"op": "advantage.reinforce_pp", "gamma": 1.0, "whiten": whiten}
    draft.edit("replace", advantages={**advantages, "in": {"rewards": "shaped"}})


def _truncated(draft: Draft, options: Options) -> None:
    """Change what truncated responses get, as OpenRLHF's stop_properly_penalty_coef does."""
    penalty = options["reward.stop_properly_penalty_coef"]
    if penalty is not None and penalty <= 0:
        draft.edit("insert", ended={"op": "reward.truncated", "on": "rewards", "reward": float(penalty)})


def _correct(draft: Draft, options: Options) -> None:
    """Weigh tokens by how far the engine that sampled is from the one that trains."""
    low, high = options[f"{CORRECTION}_threshold"]
    kind = options[f"{CORRECTION}_type"]
    if kind == "icepop":
        draft.edit(
            "add", rollout_weights={"op": "correction.mis", "level": "token", "low": low, "high": high}
        )
    elif kind == "seq-mask-tis":
        draft.correct_within(low, high)
    else:
        weights = {"op": "correction.tis", "level": "token", "floor": low, "cap": high}
        draft.edit("add", rollout_weights=weights)


def remarks(options: Options) -> Iterator[KeyOutcome]:
    """Yield what the user has to look after and what no flag stands for."""
    facts = options.table.facts["told"]
    yield remark("the data", facts["files"])
    if options.table.kind != "ppo":
        return
    url = options["reward.remote_url"]
    if options["train.agent_func_path"]:
        yield remark("the reward", facts["agent"])
    elif url:
        is_service = str(url).startswith("http")
        yield remark("the reward", facts["url" if is_service else "remote"])
    elif not options["reward.model_name_or_path"]:
        yield remark("the reward", facts["none"])


def kl_coefficient(options: Options) -> Any:
    """Return the coefficient of the KL: a number, or one that follows a target."""
    if options["algo.kl.target"] is None:
        return options[KL]
    return {
        "adaptive": options[KL],
        "target": options["algo.kl.target"],
        "horizon": options["algo.kl.horizon"],
    }


def minibatches(options: Options) -> int:
    """Return the optimizer steps of a pass: OpenRLHF's training batches are counted in samples."""
    samples = options["rollout.batch_size"] * options["rollout.n_samples_per_prompt"]
    return max(int(samples // options["train.batch_size"]), 1)


def lora(value: int, options: Options) -> Mapping[str, Any] | None:
    if not value:
        return None
    targets = options["ds.lora.target_modules"]
    if isinstance(targets, str) and targets != "all-linear":
        targets = [targets]
    return {"rank": value, "alpha": float(options["ds.lora.alpha"]), "targets": targets}


def _has_minimum(options: Options, prefix: str) -> bool:
    return bool(options[f"{prefix}lr_scheduler"] == "cosine_with_min_lr")


def min_lr(value: float, options: Options) -> float:
    prefix = "actor." if options.table.kind == "ppo" else ""
    if not _has_minimum(options, prefix):
        raise Idle("has no effect: the schedule has no minimum")
    return value


def critic_min_lr(value: float, options: Options) -> float:
    if not _has_minimum(options, "critic."):
        raise Idle("has no effect: the schedule has no minimum")
    return value


def freezing(value: int, options: Options) -> int | None:
    """Return the first iteration that trains the policy; OpenRLHF counts steps from 1, and trains above."""
    if value < 0:
        raise Idle("has no effect: nothing is frozen")
    return int(value) + 1


def aux_loss(value: float, _: Options) -> float | None:
    if not value:
        raise Idle("has no effect: it is 0")
    return value


def files(value: Any, options: Options) -> list[str]:
    return [options.path(path) for path in str(value).split(",")]


CONVERTERS: Converters = {
    **COMMON,
    "files": files,
    "devices": lambda _, o: o["actor.num_nodes"] * o["actor.num_gpus_per_node"],
    "micro_tokens": lambda value, o: int(value) * int(o["ds.ring_attn_size"]),
    "lora": lora,
    "min_lr": min_lr,
    "critic_min_lr": critic_min_lr,
    "freezing": freezing,
    "aux_loss": aux_loss,
    "share": warmup_share,
}
