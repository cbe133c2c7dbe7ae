"""Every setting of the schema is read by each graph that accepts it, or ``check`` reports where it is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
import yaml

from rlgraph.api import load
from rlgraph.errors import GraphError
from rlgraph.laws.idle_settings import CONDITIONS
from rlgraph.lowering import lower_tree
from rlgraph.section import Section
from rlgraph.syntax.interpolate import interpolate
from rlgraph.syntax.settings import GraphFile, Refill
from rlgraph.warnings.find import find_warnings

REMOTE = "engine: sglang, sglang: {addresses: ['http://one:1']"
JUDGE = "path: a/b, frozen: true, serve: {engine: openai, openai: {addresses: ['http://one:1']}"
JUDGED = "replace: {rewards: {op: reward.judge, model: judge, prompt: '{response}'}}"
POOLS = "pools: {train: {devices: auto}, gen: {devices: auto}}"
APART = f"{POOLS}, models.policy.serve: {{pool: gen"

# a setting of a model -> a graph and an edit with which nothing reads it, and one with which something does
EXAMPLES = {
    "optimizer.min_lr_ratio": (
        ("grpo", "set: {models.policy.optimizer.min_lr_ratio: 0.1}"),
        ("grpo", "set: {models.policy.optimizer: {lr: 1.0e-6, schedule: linear, min_lr_ratio: 0.1}}"),
    ),
    "optimizer.cycles": (
        ("grpo", "set: {models.policy.optimizer: {lr: 1.0e-6, schedule: linear, cycles: 1.0}}"),
        ("grpo", "set: {models.policy.optimizer: {lr: 1.0e-6, schedule: cosine, cycles: 1.0}}"),
    ),
    "optimizer.total_steps": (
        ("grpo", "set: {models.policy.optimizer: {lr: 1.0e-6, warmup_steps: 5, total_steps: 90}}"),
        ("grpo", "set: {models.policy.optimizer: {lr: 1.0e-6, warmup_steps: 0.5, total_steps: 90}}"),
    ),
    "train.micro_tokens": (
        ("grpo", "set: {models.ref.train: {score_tokens: 999, micro_tokens: 999}}"),
        ("grpo", "set: {models.ref.train.micro_tokens: 999}"),
    ),
    "train.score_tokens": (
        ("sft", "set: {models.policy.train.score_tokens: 999}"),
        ("grpo", "set: {models.ref.train.score_tokens: 999}"),
    ),
    "train.head_dtype": (
        ("grpo", "set: {models.policy.train: {dtype: float32, head_dtype: float32}}"),
        ("grpo", "set: {models.policy.train: {dtype: bfloat16, head_dtype: float32}}"),
    ),
    "train.recompute": (
        ("grpo", "set: {models.ref.train.recompute: true}"),
        ("grpo", "set: {models.policy.train.recompute: true}"),
    ),
    "train.lora": (
        ("grpo", "set: {models.ref.train.lora: {rank: 8}}"),
        ("grpo", "set: {models.policy.train.lora: {rank: 8}}"),
    ),
    "serve.dtype": (
        ("grpo", f"add: {{models.judge: {{{JUDGE}, dtype: float32}}}}}}, {JUDGED}"),
        ("grpo", "set: {models.policy.serve.dtype: float32}"),
    ),
    "serve.cache_tokens": (
        ("grpo", f"add: {{models.judge: {{{JUDGE}, cache_tokens: 9999}}}}}}, {JUDGED}"),
        ("grpo", "set: {models.policy.serve.cache_tokens: 9999}"),
    ),
    "serve.sync": (
        ("grpo", "set: {models.policy.serve.sync: full}"),
        ("grpo", f"set: {{{APART}, sync: full}}}}"),
    ),
    "serve.sync_folder": (
        ("grpo", "set: {models.policy.serve.sync_folder: /shared}"),
        ("grpo", f"set: {{models.policy.serve: {{{REMOTE}}}, sync_folder: /shared}}}}"),
    ),
    "serve.sglang.restarts": (
        ("grpo", f"set: {{models.policy.serve: {{{REMOTE}, restarts: 1}}}}}}"),
        ("grpo", "set: {models.policy.serve: {engine: sglang, sglang: {restarts: 1}}}"),
    ),
    "serve.sglang.start_timeout": (
        ("grpo", f"set: {{models.policy.serve: {{{REMOTE}, start_timeout: 60}}}}}}"),
        ("grpo", "set: {models.policy.serve: {engine: sglang, sglang: {start_timeout: 60}}}"),
    ),
    "serve.sglang.request_timeout": (
        ("grpo", "set: {models.policy.serve: {engine: sglang, sglang: {request_timeout: 3600}}}"),
        ("grpo", "set: {models.policy.serve: {engine: sglang, sglang: {request_timeout: 3599}}}"),
    ),
    "serve.openai.request_timeout": (
        ("grpo", f"add: {{models.judge: {{{JUDGE[:-1]}, request_timeout: 3600}}}}}}}}, {JUDGED}"),
        ("grpo", f"add: {{models.judge: {{{JUDGE[:-1]}, request_timeout: 60}}}}}}}}, {JUDGED}"),
    ),
}

# a setting -> a graph and an edit in which nothing would read it, and which is refused for that
REFUSED = {
    "models.*.optimizer.momentum": ("grpo", "set: {models.policy.optimizer.momentum: 0.9}"),
    "models.*.serve.tensor_parallel": (
        "grpo",
        "set: {models.policy.serve: {engine: transformers, tensor_parallel: 2}}",
    ),
    "models.*.serve.lora": ("grpo", "set: {models.policy.serve.lora: merged}"),
    "models.*.serve.sglang.addresses": (
        "grpo",
        f"set: {{models.policy.serve: {{{REMOTE.replace('engine: sglang', 'engine: transformers')}}}}}}}",
    ),
    "models.*.serve.sglang.options": (
        "grpo",
        f"set: {{models.policy.serve: {{{REMOTE}, options: {{a: 1}}}}}}}}",
    ),
    "models.*.serve.sglang.hosts": ("grpo", f"set: {{models.policy.serve: {{{REMOTE}, hosts: 2}}}}}}"),
    "models.*.serve.sglang.expert_parallel": (
        "grpo",
        f"set: {{models.policy.serve: {{{REMOTE}, expert_parallel: 2}}}}}}",
    ),
    "models.*.serve.sglang.attention_replicas": (
        "grpo",
        f"set: {{models.policy.serve: {{{REMOTE}, attention_replicas: 2}}}}}}",
    ),
    "models.*.serve.sglang.quantization": (
        "grpo",
        f"set: {{models.policy.serve: {{{REMOTE}, quantization: fp8}}}}}}",
    ),
    "models.*.train.optimizer_offload": ("grpo", "set: {models.ref.train.optimizer_offload: true}"),
    "models.*.train.activation_offload": ("grpo", "set: {models.ref.train.activation_offload: true}"),
    "models.*.train.router_aux_loss_coef": ("grpo", "set: {models.ref.train.router_aux_loss_coef: 0.1}"),
    "models.*.train.router_bias_update_rate": (
        "grpo",
        "set: {models.ref.train.router_bias_update_rate: 0.1}",
    ),
    "pools.*.devices": (
        "grpo",
        "set: {pools: {train: {devices: 1}, gen: {devices: 1}, more: {devices: 1}}}",
    ),
    "schedule.buffer.in_flight": ("grpo", f"set: {{{POOLS}, schedule.buffer: {{by: batch, in_flight: 9}}}}"),
    "schedule.buffer.chunk": ("grpo", f"set: {{{POOLS}, schedule.buffer: {{by: batch, chunk: 9}}}}"),
    "schedule.buffer.order": ("grpo", f"set: {{{POOLS}, schedule.buffer: {{by: batch, order: in_order}}}}"),
    "schedule.buffer.too_old": ("grpo", f"set: {{{POOLS}, schedule.buffer: {{by: batch, too_old: drop}}}}"),
    "schedule.buffer.lend": ("grpo", f"set: {{{POOLS}, schedule.buffer: {{by: batch, lend: true}}}}"),
    "schedule.stop.at_least": (
        "demo",
        "set: {schedule.stop: {metric: eval/accuracy, at_least: 1, at_most: 2}}",
    ),
    "schedule.stop.at_most": (
        "demo",
        "set: {schedule.stop: {metric: eval/accuracy, at_least: 1, at_most: 2}}",
    ),
    "schedule.best.metric": ("grpo", "set: {schedule.best: {metric: reward/mean, mode: max}}"),
    "schedule.iterations": ("grpo", "set: {schedule: {iterations: 3, epochs: 1}}"),
    "schedule.epochs": ("grpo", "set: {schedule: {iterations: 3, epochs: 1}}"),
}

USED_BY_THE_STEPS = "every plan with this section has a step, or a worker, that reads it"
COMPARED = "dead_settings plans again with another value, and reports it where the plan is the same"
EVERY_RUN = "every run reads it"
# a setting, or all below one (*) -> why no graph that accepts it has it without effect and unreported
EXCEPTIONS = {
    "graph": "names the plan and the files of a run",
    "about": "a text for people, which plans and pages show",
    "extends": "composition reads it: it has no meaning behind that",
    "use": "composition reads it: it has no meaning behind that",
    "edits": "composition reads them, and refuses one that changes nothing that is there",
    "seed": EVERY_RUN,
    "nodes": "attributes that an op may pass over declare it by @op(when=...): test_warnings.py",
    "eval.nodes": COMPARED,
    "eval.report": "each report is a metric",
    "eval.every": "long-interval reports one that is longer than the run",
    "eval.before": EVERY_RUN,
    "pools.*.hosts": "the planner and Ray place the pool by it",
    "models.*.path": COMPARED,
    "models.*.head": COMPARED,
    "models.*.frozen": COMPARED,
    "models.*.config": COMPARED,
    "models.*.trust_remote_code": COMPARED,
    "models.*.vocabulary": COMPARED,
    "models.*.optimizer.*": USED_BY_THE_STEPS,
    "models.*.serve.engine": USED_BY_THE_STEPS,
    "models.*.serve.pool": USED_BY_THE_STEPS,
    "models.*.serve.max_rows": USED_BY_THE_STEPS,
    "models.*.serve.sglang.request_retries": USED_BY_THE_STEPS,
    "models.*.serve.openai.*": USED_BY_THE_STEPS,
    "models.*.train.*": "passes that score read it as updates do",
    "models.*.train.lora.*": "read with the adapter, which `train.lora` is about",
    "schedule.save_every": "long-interval reports one that is longer than the run",
    "schedule.record_every": "long-interval reports one that is longer than the run",
    "schedule.keep": "a run without save_every writes several checkpoints too, if it is stopped and resumed",
    "schedule.restarts": EVERY_RUN,
    "schedule.on_nan": EVERY_RUN,
    "schedule.timeout": EVERY_RUN,
    "schedule.runtime_env": "Ray reads it; --inline, which does not, is not known when a graph is checked",
    "schedule.buffer.staleness": "0 and 1 and more are different plans",
    "schedule.buffer.by": "it chooses among three plans, and refuses the settings of the others",
    "schedule.stop.*": EVERY_RUN,
    "schedule.best.*": "best-of-one reports one that has a single checkpoint to choose from",
    "refill.*": "each round reads it",
}


def problems_of(graph: str, edit: str) -> dict[str, str]:
    """Return the settings that are reported as without effect, and why."""
    algorithm = load(graph)
    for word, content in yaml.safe_load(f"{{{edit}}}").items():
        algorithm = algorithm.edit(**{word: content})
    written = algorithm.written()
    found = find_warnings(written, lower_tree(interpolate(written), 2))
    return {one.law.split("`")[1]: one.law for one in found if one.kind == "dead"}


def settings(section: type[Section], path: str = "") -> Iterator[str]:
    """Yield the paths of all settings of a section and of those in it, with * for a name that users give."""
    for name, field in section.model_fields.items():
        nested = [
            part for part in parts(field.annotation) if isinstance(part, type) and issubclass(part, Section)
        ]
        is_named = any(getattr(part, "__origin__", None) is dict for part in parts(field.annotation))
        if not nested or name == "lora":
            yield f"{path}{name}"
        for part in nested:
            yield from settings(part, f"{path}{name}.{'*.' if is_named else ''}")


def parts(annotation: Any) -> Iterator[Any]:
    """Yield an annotation and all within it."""
    yield annotation
    for part in get_args(annotation):
        yield from parts(part)


SETTINGS = [*settings(GraphFile), *(f"refill.{name}" for name in Refill.model_fields)]


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_is_accounted_for(setting: str) -> None:
    is_conditional = setting.removeprefix("models.*.") in CONDITIONS
    above = [f"{setting.rpartition('.')[0]}.*", setting]
    assert is_conditional or setting in REFUSED or any(path in EXCEPTIONS for path in above)


def test_nothing_is_listed_that_the_schema_lacks() -> None:
    groups = {f"{setting.rpartition('.')[0]}.*" for setting in SETTINGS}
    assert {*REFUSED, *(f"models.*.{setting}" for setting in CONDITIONS)} <= {*SETTINGS}
    assert {*EXCEPTIONS} <= {*SETTINGS} | groups
    assert EXAMPLES.keys() == CONDITIONS.keys()


@pytest.mark.parametrize("setting", EXAMPLES)
def test_a_setting_without_effect_is_reported_and_one_with_an_effect_is_not(setting: str) -> None:
    idle, read = EXAMPLES[setting]
    assert any(path.endswith(f".{setting}") for path in problems_of(*idle))
    assert not any(path.endswith(f".{setting}") for path in problems_of(*read))


@pytest.mark.parametrize("setting", REFUSED)
def test_a_setting_that_nothing_could_read_is_refused(setting: str) -> None:
    with pytest.raises(GraphError) as refused:
        problems_of(*REFUSED[setting])
    names = {"pool" if name == "pools" else name for name in setting.split(".")} - {"models", "*", "schedule"}
    texts = [f"{one.law} {one.remedy}" for one in refused.value.problems]
    assert any(name in text for name in names for text in texts), texts


def test_a_setting_that_is_given_its_default_is_not_reported() -> None:
    assert problems_of("grpo", "set: {models.ref.train.recompute: auto}") == {}


def test_a_model_that_weights_are_copied_onto_makes_no_backward_pass() -> None:
    edit = "add: {copy: {op: update.copy, model: ref, of: policy}}, set: {models.ref.train.recompute: true}"
    assert [*problems_of("grpo", edit)] == ["models.ref.train.recompute"]
