"""verl: which nodes its trainer would run, and values that follow from several keys."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlgraph.errors import GraphError, Problem, nearest
from rlgraph.importing.draft import UNKNOWN, Draft
from rlgraph.importing.importer import By, Hand, Idle, Imported, KeyOutcome, graph_name, outcomes_of
from rlgraph.importing.options import Options, read_settings
from rlgraph.importing.table import table_of

ACTOR, REF, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"
SCORED = "actor_rollout_ref.rollout"  # where log-probs of the policy are set
REWARD, OVERLONG = "reward.custom_reward_function", "reward.reward_kwargs.overlong_buffer_cfg"
FILTER, CORRECTION = "algorithm.filter_groups", "algorithm.rollout_correction"
IN_REWARD, IN_LOSS = "algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss"
TRUTH = "reward_model.ground_truth"
NO_LIMIT = 1000  # rounds of a refill that is to have no limit


def import_verl(file: Path | None, overrides: Sequence[str], folder: Path = Path()) -> Imported:
    """Return the graph, to be written to a folder, that does what verl's trainer does with these settings.

    Raises:
        GraphError: the settings can't be read, or the estimator is none that there is a graph for.
    """
    options = Options(table_of("verl"), read_settings(file, overrides), folder)
    draft = draft_of(options)
    outcomes = list(outcomes_of(options, draft, BY))
    if not options[f"{REWARD}.path"]:
        told = options.table.facts["told"]
        text = told["scorers"] + told["overlong"] * options.is_on(f"{OVERLONG}.enable")
        outcomes.insert(0, KeyOutcome("the reward", UNKNOWN, "hand", text))
    name = options["trainer.experiment_name"] or (file.stem if file else "imported")
    return Imported(graph_name(str(name)), "verl", draft, outcomes)


def draft_of(options: Options) -> Draft:
    """Return the parent of an estimator with the nodes that verl's switches ask for."""
    estimators, name = options.table.facts["estimators"], str(options["algorithm.adv_estimator"])
    if name not in estimators:
        law = f"algorithm.adv_estimator={name}: there is no graph for this estimator of verl's"
        raise GraphError([Problem("no-graph", law, None, tuple(estimators), nearest(name, estimators))])
    drops, overlong = options.is_on(f"{FILTER}.enable"), options.is_on(f"{OVERLONG}.enable")
    dapo = name == "grpo" and drops and overlong and not options.is_on(IN_REWARD)
    draft = Draft("dapo" if dapo else estimators[name]["extends"])
    if options["trainer.total_training_steps"] is None:
        draft.remove("schedule.iterations")
    _loss(draft, options)
    _reference(draft, options, estimators[name]["compares"] == "tokens")
    _data(draft, options)
    if overlong and not dapo:
        penalty = {"op": "reward.overlong", "on": "rewards", "limit": "${nodes.rollout.max_new_tokens}"}
        draft.edit("insert", overlong={**penalty, "buffer": options[f"{OVERLONG}.len"]})
    if drops:
        _filter(draft, options, added=not dapo)
    _correction(draft, options)
    if options.is_on("actor_rollout_ref.rollout.multi_turn.enable"):
        draft.set("rollout.op", "rollout.agent")
    return draft


def _loss(draft: Draft, options: Options) -> None:
    """Give the update verl's loss, whatever the parent's is: verl clips ratios with every estimator."""
    spec = _spec(options) or options.table.facts["losses"]["vanilla"]
    given = {name: _of_actor(options, key) for name, key in spec["with"].items()}
    if not draft.has("old_logprobs"):
        draft.edit("add", old_logprobs={"op": "logprobs", "model": "policy"})
    draft.edit("replace", **{"update_policy.loss": {"kind": spec["kind"], **given}})
    if "aggregate" in spec:
        draft.set("update_policy.aggregate", spec["aggregate"])
    elif options[f"{ACTOR}.loss_agg_mode"] == "seq-mean-token-sum-norm":
        longest = options[f"{ACTOR}.loss_scale_factor"] or options["data.max_response_length"]
        draft.set("update_policy.norm", longest)


def _spec(options: Options) -> Mapping[str, Any]:
    """Return what the table says of the loss; nothing where it has none of the name."""
    return dict(options.table.facts["losses"].get(options[f"{ACTOR}.policy_loss.loss_mode"], {}))


def _of_actor(options: Options, key: str) -> Any:
    """Return a key of the actor; a bound of the ratio that is null is clip_ratio."""
    name = f"{ACTOR}.{key}"
    is_null = name in options.values and options.values[name] is None
    bound = key in ("clip_ratio_low", "clip_ratio_high")
    return options[f"{ACTOR}.clip_ratio"] if bound and is_null else options[name]


def _reference(draft: Draft, options: Options, per_token: bool) -> None:
    """Put the KL where verl has it: into the reward, into the loss, or nowhere."""
    in_reward, in_loss = options.is_on(IN_REWARD), options.is_on(IN_LOSS)
    if not in_loss:
        draft.remove("update_policy.kl_coef", "update_policy.kl")
    if not (in_reward or in_loss):
        draft.remove("ref_logprobs", "models.ref")
    elif not draft.has("ref_logprobs"):
        reference = {"models.ref": {"path": "${models.policy.path}", "frozen": True}}
        draft.edit("add", **reference, ref_logprobs={"op": "logprobs", "model": "ref"})
    if per_token and not in_reward:
        draft.set("shaped.beta", 0.0)
    elif in_reward and not per_token:
        draft.add_kl_per_sample()


def _data(draft: Draft, options: Options) -> None:
    """Read verl's rows, score them by the user's function, and evaluate where verl does."""
    draft.set("prompts.answer", TRUTH)
    draft.set("prompts.answer_after", None)
    if path := options[f"{REWARD}.path"]:
        source = {"from": options["data.reward_fn_key"], "type": "text", "default": ""}
        more = {"data_source": source, "extra_info": {"type": "json", "default": {}}}
        draft.set("prompts.columns", {"ground_truth": {"from": TRUTH, "type": "json"}, **more})
        node: dict[str, Any] = {
            "op": "reward.verl",
            "function": f"{options.path(path)}:{options[f'{REWARD}.name']}",
        }
        if arguments := options.below(f"{REWARD}.reward_kwargs.*"):
            node["arguments"] = arguments
        draft.edit("replace", rewards=node)
        if draft.has("greedy_rewards"):
            outs = {"rewards": "greedy_rewards", "failed": "greedy_failed"}
            ins = {"responses": "greedy_responses"}
            draft.edit("replace", greedy_rewards={**node, "in": ins, "out": outs})
    if options.is_on("trainer.test_freq"):
        nodes = {"prompts": {"files": "???", "batch": "all"}, "rollout": {"n": 1, "temperature": 0}}
        report = {"reward": "rewards"}
        draft.set("eval", {"every": options["trainer.test_freq"], "nodes": nodes, "report": report})


def _filter(draft: Draft, options: Options, added: bool) -> None:
    """Sample groups of one reward again, as dynamic sampling does."""
    refill: dict[str, Any] = {"rounds": options[f"{FILTER}.max_num_gen_batches"] or NO_LIMIT}
    asked, wanted = options["data.gen_batch_size"], options["data.train_batch_size"]
    if asked and asked > wanted:
        refill["expected"] = round(wanted / asked, 6)
    if not added:
        draft.set("informative.refill", refill)
        return
    draft.edit("add", informative={"op": "filter.mixed", "refill": refill})
    for node in ("old_logprobs", "ref_logprobs", "values", "shaped", "scored", "advantages"):
        if draft.has(node):
            draft.set(f"{node}.rows", "informative")


def _correction(draft: Draft, options: Options) -> None:
    """Weigh tokens by how far the engine that sampled is from the one that trains."""
    level, cap = options[f"{CORRECTION}.rollout_is"], options[f"{CORRECTION}.rollout_is_threshold"]
    if options.is_on(f"{ACTOR}.tis_imp_ratio_cap"):
        level, cap = "token", options[f"{ACTOR}.tis_imp_ratio_cap"]
    if level in ("token", "sequence"):
        draft.edit("add", rollout_weights={"op": "correction.tis", "level": level, "cap": cap})


def truncate(_: Any, options: Options) -> str | None:
    """Return what becomes of rows that are too long: verl drops them where it filters."""
    if options["data.filter_overlong_prompts"]:
        return None
    side = str(options["data.truncation"])
    return "refuse" if side == "error" else side


def minibatches(value: int, options: Options) -> int:
    """Return the optimizer steps of a pass; verl's mini-batches are counted in prompts."""
    batch = options["data.train_batch_size"]
    if batch % value:
        law = f"{batch} prompts are no whole number of mini-batches of {value}"
        raise Hand(f"{law}: set update_policy.minibatches, {batch / value:.2f} here")
    return int(batch // value)


def aggregate(value: str, options: Options) -> str:
    """Return how losses are averaged; of some losses verl has a mean that nobody sets."""
    own = _spec(options).get("aggregate", value)
    if own != value and (options.is_on(IN_LOSS) or options[f"{ACTOR}.entropy_coeff"]):
        raise Hand(f"verl averages the loss by {own}, KL and entropy by this; the graph has {own} for all")
    return str(own)


def kl_in_reward(value: float, options: Options) -> Any:
    control = "algorithm.kl_ctrl"
    if options[f"{control}.type"] == "fixed":
        return value
    target, horizon = (options[f"{control}.{name}"] for name in ("target_kl", "horizon"))
    return {"adaptive": value, "target": target, "horizon": horizon}


def steps_of(where: str) -> Callable[[int, Options], int]:
    """Return what makes optimizer steps of iterations: verl's learning rate moves once per iteration."""

    def steps(value: int, options: Options) -> int:
        size = options[f"{where}.ppo_mini_batch_size"] or options[f"{ACTOR}.ppo_mini_batch_size"]
        passes = options[f"{where}.ppo_epochs"] or options[f"{ACTOR}.ppo_epochs"]
        return max(int(value), 0) * minibatches(size, options) * int(passes)

    return steps


def warmup_share(where: str) -> Callable[[float, Options], float]:
    def share(value: float, options: Options) -> float:
        if not value or options[f"{where}.optim.lr_warmup_steps"] >= 0:
            raise Idle("decides nothing: there is none, or lr_warmup_steps counts")
        return float(value)

    return share


def lora(value: int, options: Options) -> Mapping[str, Any] | None:
    alpha, targets = (options[f"actor_rollout_ref.model.{name}"] for name in ("lora_alpha", "target_modules"))
    return {"rank": value, "alpha": float(alpha), "targets": targets} if value else None


def micro_tokens(where: str, switch: str, rows: bool) -> Callable[[int, Options], int]:
    """Return what makes tokens of a micro-batch's size, which is one device's, in tokens or in rows.

    Without a switch of its own a model's micro-batches are counted as the actor's are. Of rows, each is
    taken to be as long as one may be. Devices that share a row add up.
    """

    def tokens(value: int, options: Options) -> int:
        own, shared = f"{where}.{switch}", "ulysses_sequence_parallel_size"
        counted = options.is_on(own if options.values.get(own) is not None else f"{ACTOR}.use_dynamic_bsz")
        if counted == rows:
            raise Idle(f"decides nothing: {own} is {'on' if rows else 'off'}")
        longest = options["data.max_prompt_length"] + options["data.max_response_length"]
        sharers = options[f"{where}.{shared}"] or options[f"{ACTOR}.{shared}"]
        return int(value) * int(longest if rows else 1) * int(sharers)

    return tokens


def _samples(options: Options) -> bool:
    return options.is_on("actor_rollout_ref.rollout.val_kwargs.do_sample")


def val_cut(value: float, options: Options) -> float:
    if not _samples(options):
        raise Idle("decides nothing: the likeliest token is taken")
    return max(value, 0)


def epochs(value: Any, options: Options) -> Any:
    if options["trainer.total_training_steps"] is not None:
        raise Idle("decides nothing: total_training_steps counts")
    return value


BY: By = {
    "files": lambda value, o: [o.path(path) for path in (value if isinstance(value, list) else [value])],
    "path": lambda value, o: o.path(value),
    "truncate": truncate,
    "minibatches": minibatches,
    "aggregate": aggregate,
    "kl_in_reward": kl_in_reward,
    "natural": lambda value, _: max(int(value), 0),
    "whole": lambda value, _: value if value > 0 else None,
    "steps": steps_of(ACTOR),
    "critic_steps": steps_of(CRITIC),
    "warmup_share": warmup_share(ACTOR),
    "critic_warmup_share": warmup_share(CRITIC),
    "epochs": epochs,
    "devices": lambda _, o: o["trainer.nnodes"] * o["trainer.n_gpus_per_node"],
    "critic_warmup": lambda value, _: max(int(value), 1) if value else None,
    "lora": lora,
    "val_temperature": lambda value, o: value if _samples(o) else 0,
    "val_cut": val_cut,
    "tokens_per_gpu": micro_tokens(ACTOR, "use_dynamic_bsz", rows=False),
    "rows_per_gpu": micro_tokens(ACTOR, "use_dynamic_bsz", rows=True),
    "scored_tokens": micro_tokens(SCORED, "log_prob_use_dynamic_bsz", rows=False),
    "scored_rows": micro_tokens(SCORED, "log_prob_use_dynamic_bsz", rows=True),
    "ref_tokens": micro_tokens(REF, "log_prob_use_dynamic_bsz", rows=False),
    "ref_rows": micro_tokens(REF, "log_prob_use_dynamic_bsz", rows=True),
    "critic_tokens": micro_tokens(CRITIC, "use_dynamic_bsz", rows=False),
    "critic_rows": micro_tokens(CRITIC, "use_dynamic_bsz", rows=True),
}
