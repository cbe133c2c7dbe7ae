"""Warnings about settings of a model that no step of the plan reads.

A plan repeats every setting of a model that it has an engine for, so that planning again with another value
shows no difference. ``CONDITIONS`` therefore declares, by setting, what has to hold for it to have an effect.
Every setting of the schema is in ``CONDITIONS`` or is refused where it has no effect, or is listed with a
reason in ``tests/compiler/test_idle_settings.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from rlgraph.engines.registry import SERVING
from rlgraph.engines.serve_settings import OpenAISettings, SglangSettings
from rlgraph.errors import Problem
from rlgraph.ir.actions import Sync
from rlgraph.ir.plan import ModelPlan, Plan, Step
from rlgraph.laws.settings import decides_nothing
from rlgraph.laws.views import RunView
from rlgraph.records import dataclass
from rlgraph.section import Section
from rlgraph.syntax.model_settings import Optimizer, Serve, Train
from rlgraph.syntax.source import OPEN

# the sections of ``models.NAME`` that have settings without effect, by their paths in it
SECTIONS: Mapping[str, type[Section]] = {
    "optimizer": Optimizer,
    "train": Train,
    "serve": Serve,
    "serve.sglang": SglangSettings,
    "serve.openai": OpenAISettings,
}
FALLING = ("cosine", "linear")  # schedules of the learning rate that end somewhere


@dataclass(frozen=True)
class ModelUse:
    """A model of a plan, and the steps that use it, in training and in evaluations."""

    name: str
    model: ModelPlan
    plan: Plan
    steps: tuple[Step, ...]

    @property
    def is_updated(self) -> bool:
        """Return whether a step trains it, by itself or with the steps of another update.

        A step that copies another model's weights onto it makes no backward pass.
        """
        return any(step.updated == self.name and not step.copied for step in self.steps)

    @property
    def is_scored_with(self) -> bool:
        """Return whether a step computes log-probs or values with it, and updates nothing."""
        for step in self.steps:
            runs_op = step.run is not None and not step.updated
            if runs_op and "train" in step.engines:
                return True
        return False

    @property
    def syncs(self) -> list[Sync]:
        """Return the syncs of its weights."""
        return [step.action for step in self.steps if isinstance(step.action, Sync)]


def use_of(plan: Plan, name: str) -> ModelUse:
    """Return a model of a plan with the steps that use it."""
    steps = [step for step in (*plan.steps, *plan.eval_steps) if name in step.models]
    return ModelUse(name, plan.models[name], plan, tuple(steps))


Condition = Callable[[ModelUse], str]  # returns why a setting has no effect, or "" where it has one


def _needs_updates(use: ModelUse) -> str:
    if use.is_updated:
        return ""
    return f"no step trains `{use.name}`"


def _needs_full_passes(use: ModelUse) -> str:
    """Passes that score go by ``score_tokens`` where it is given."""
    train = use.model.train
    has_score_tokens = train is not None and train.score_tokens is not None
    if use.is_updated or not has_score_tokens:
        return ""
    return f"no step trains `{use.name}`, and passes that score go by `score_tokens`"


def _needs_scores(use: ModelUse) -> str:
    # whether log-probs of a model that samples are computed again depends on the number of mini-batches
    may_be_scored_with = use.is_scored_with or use.model.serve is not None
    if may_be_scored_with:
        return ""
    return f"no step computes log-probs or values with `{use.name}`"


def _needs_narrow_computation(use: ModelUse) -> str:
    train = use.model.train
    if train is None or train.dtype != "float32":
        return ""
    return f"`models.{use.name}.train.dtype` is float32 already"


def _needs_cosine(use: ModelUse) -> str:
    optimizer = use.model.optimizer
    if optimizer and optimizer.schedule == "cosine":
        return ""
    return "only a cosine schedule reads it"


def _needs_falling_rate(use: ModelUse) -> str:
    optimizer = use.model.optimizer
    if optimizer and optimizer.schedule in FALLING:
        return ""
    return f"only a {' or '.join(FALLING)} schedule reads it"


def _needs_counted_steps(use: ModelUse) -> str:
    optimizer = use.model.optimizer
    if optimizer and 0 < optimizer.warmup_steps < 1:
        return ""
    reason = _needs_falling_rate(use)
    if not reason:
        return ""
    return f"{reason}, and `warmup_steps` below 1"


def _needs_sync_between_pools(use: ModelUse) -> str:
    if any(sync.source for sync in use.syncs):
        return ""
    return f"no sync sends weights of `{use.name}` to another pool"


def _needs_sync_by_files(use: ModelUse) -> str:
    if any(sync.path == "disk" for sync in use.syncs):
        return ""
    return f"no sync sends weights of `{use.name}` to another pool, or to servers at addresses"


def _needs_own_weights(use: ModelUse) -> str:
    serve = use.model.serve
    if serve is None or SERVING[serve.engine].paths:
        return ""
    return f"the engine {serve.engine} holds weights and cache in servers of its own"


def _needs_own_servers(use: ModelUse) -> str:
    serve = use.model.serve
    if serve is None or not serve.addresses:
        return ""
    return "the servers at `addresses` run already, and the run starts none"


def _needs_time_within_step(use: ModelUse) -> str:
    limit = use.plan.schedule.timeout
    serve = use.model.serve
    if serve is None or (serve.request_timeout or 0) < limit:
        return ""
    return f"`schedule.timeout` ends the step before, after {limit:g} s"


# a setting of ``models.NAME`` -> the condition under which a step reads it
CONDITIONS: Mapping[str, Condition] = {
    "optimizer.min_lr_ratio": _needs_falling_rate,
    "optimizer.cycles": _needs_cosine,
    "optimizer.total_steps": _needs_counted_steps,
    "train.micro_tokens": _needs_full_passes,
    "train.score_tokens": _needs_scores,
    "train.head_dtype": _needs_narrow_computation,
    "train.recompute": _needs_updates,
    "train.lora": _needs_updates,
    "serve.dtype": _needs_own_weights,
    "serve.cache_tokens": _needs_own_weights,
    "serve.sync": _needs_sync_between_pools,
    "serve.sync_folder": _needs_sync_by_files,
    "serve.sglang.restarts": _needs_own_servers,
    "serve.sglang.start_timeout": _needs_own_servers,
    "serve.sglang.request_timeout": _needs_time_within_step,
    "serve.openai.request_timeout": _needs_time_within_step,
}


def idle_settings(view: RunView) -> Iterator[Problem]:
    """Yield a problem for each setting of a model that is given another value than its default, and that no
    step of the plan reads.

    Settings of an engine that the plan does not have are left to ``dead_settings``.
    """
    for name in view.plan.models:
        use = use_of(view.plan, name)
        for setting, condition in CONDITIONS.items():
            keys = setting.split(".")
            if not _is_given(view, name, keys) or not _has_section(use.model, keys):
                continue
            reason = condition(use)
            if reason:
                yield decides_nothing(view.tree, ("models", name, *keys), reason)


def _is_given(view: RunView, model: str, keys: list[str]) -> bool:
    """Return whether the graph gives a setting a value other than its default."""
    setting = view.tree.find(("models", model, *keys))
    if setting is None or setting.value == OPEN:
        return False
    *section, key = keys
    fields = SECTIONS[".".join(section)].model_fields
    default = fields[key].get_default(call_default_factory=True)
    return bool(setting.plain() != default)


def _has_section(model: ModelPlan, keys: list[str]) -> bool:
    """Return whether the plan has what a setting belongs to: an optimizer, or an engine and its settings."""
    section, *rest = keys
    if section == "serve" and model.serve and len(rest) > 1:
        return rest[0] == model.serve.engine
    return getattr(model, section) is not None
