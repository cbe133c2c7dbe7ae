"""The JSON Schema of the language: takes every shipped graph, refuses what is mistyped, describes all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from rlgraph.check import check_report
from rlgraph.cli.main import main
from rlgraph.errors import Source
from rlgraph.frontend.compose import compose
from rlgraph.frontend.edits import EDITS
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.nodes import LOSSES, OPS
from rlgraph.reference.describe import find
from rlgraph.reference.json_schema import graph_schema
from rlgraph.reference.schema_parts import EDITS as SAID
from rlgraph.request import PlanRequest
from rlgraph.syntax import source
from rlgraph.syntax.validate import NODE_KEYS

BAD = Path(__file__).parent / "bad"
SCHEMA = graph_schema()
VALIDATOR = Draft202012Validator(SCHEMA)
GRAPH = """
graph: small
models: {policy: {path: a, optimizer: {lr: 1e-6}}, ref: {path: a, frozen: true}}
nodes:
  prompts:      {op: data.prompts, files: [a.jsonl], batch: 2}
  rollout:      {op: rollout, model: policy, n: 2, max_new_tokens: 8}
  scores:       {op: reward.exact}
  old_logprobs: {op: logprobs, model: policy}
  advantages:   {op: advantage.grpo, in: {rewards: scores}}
  update:       {op: update.policy, model: policy, minibatches: 2, loss: {kind: ppo_clip}}
schedule: {iterations: 1}
"""


def plain(text: str) -> Any:
    return source.parse(Source("test", text)).plain()


def refused(graph: Any) -> str:
    """Where the schema refuses a graph, and why; empty where it takes it."""
    return "\n".join(f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(graph))


def changed(path: str, value: str) -> Any:
    """The small graph with one value set, or taken out where it is empty."""
    graph = plain(GRAPH)
    *above, last = path.split("/")
    place = graph
    for name in above:
        place = place[name]
    if value:
        place[last] = plain(value)
    else:
        del place[last]
    return graph


def test_it_is_a_schema() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    for reference in references(SCHEMA):
        target = SCHEMA
        for part in reference.removeprefix("#/").split("/"):
            target = target[part]


def references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for inner in schema.values():
            yield from references(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from references(inner)


def test_the_command_prints_it(tmp_path: Path) -> None:
    path = tmp_path / "rlgraph.reference.json_schema.json"
    result = CliRunner().invoke(main, ["nodes", "--format", "jsonschema", "-o", str(path)])
    assert (result.exit_code, result.stdout) == (0, "")
    assert json.loads(path.read_text(encoding="utf-8")) == SCHEMA
    assert CliRunner().invoke(main, ["nodes", "rollout", "--format", "jsonschema"]).exit_code == 2


@pytest.mark.parametrize("name", shipped_graphs())
def test_shipped_graphs_pass_as_written_and_composed(name: str) -> None:
    assert not refused(source.read(shipped_graphs()[name]).plain())
    assert not refused(compose(name).plain())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("nodes/rollout/n", "8"),
        ("nodes/rollout/temperature", "1"),
        ("nodes/rollout/model", "policy@next"),
        ("nodes/rollout/in", "{prompt: other}"),
        ("nodes/rollout/out", "{tokens: other}"),
        ("nodes/update/loss", "{kind: my_losses.py:name, any: thing}"),
        ("nodes/update/in", "{advantages: other, tokens: others}"),
        ("nodes/own", "{op: my_ops.py:name, any: thing, in: {a: b}}"),
        ("nodes/update/rows", "informative"),
        ("nodes/own", "{op: ../ops/my_ops.py:name, model: policy}"),
        ("nodes/values", "{op: values, model: critic, out: {values: estimates}}"),
        ("nodes/prompts", "{op: data.prompts, files: [a], batch: all, answer: null}"),
        ("eval", "{report: {accuracy: rewards}, nodes: {rollout: {n: 1}, r: {op: reward.exact}}, every: 5}"),
        ("pools", "{main: {devices: 4}}"),
        ("pools", "{main: {devices: auto}}"),
        ("models/policy/serve", "{dtype: bfloat16}"),
        ("models/critic", "{path: b, head: value, frozen: true}"),
        ("seed", "3"),
        ("schedule/save_every", "50"),
        ("schedule/save_every", "30 min"),
        ("schedule/save_every", "2h"),
        ("schedule/record_every", "0.5 epochs of prompts"),
        ("eval", "{report: {accuracy: rewards}, every: 1 epoch}"),
        ("schedule/best", "{metric: eval/accuracy, mode: min, keep: 3}"),
    ],
)
def test_what_may_be_written(path: str, value: str) -> None:
    assert not refused(changed(path, value))


@pytest.mark.parametrize(
    "path",
    [
        "seed",
        "schedule",
        "schedule/iterations",
        "schedule/timeout",
        "schedule/save_every",
        "schedule/best",
        "pools",
        "models/policy",
        "models/policy/path",
        "models/policy/optimizer",
        "models/policy/optimizer/lr",
        "models/policy/optimizer/betas",
        "models/policy/optimizer/schedule",
        "models/policy/frozen",
        "models/policy/serve/engine",
        "nodes/rollout",
        "nodes/rollout/model",
        "nodes/rollout/n",
        "nodes/rollout/in",
        "nodes/update/loss",
        "nodes/update/loss/clip",
        "nodes/update/loss/clip_high",
        "nodes/update/kl",
        "eval",
    ],
)
@pytest.mark.parametrize("value", ["???", "${models.policy.path}", "a${env:HOME}b"])
def test_any_value_may_be_open(path: str, value: str) -> None:
    graph = plain(GRAPH)
    graph["models"]["policy"]["serve"] = {}
    place = graph
    *above, last = path.split("/")
    for name in above:
        place = place[name]
    place[last] = value
    assert not refused(graph)


MISTAKES = [
    ("nodes/rollout/temprature", "1.0", "$.nodes.rollout"),  # unknown attributes
    ("nodes/update/loss/clp", "0.2", "$.nodes.update.loss"),
    ("nodes/update/model_name", "policy", "$.nodes.update"),
    ("models/policy/optimiser", "{lr: 1}", "$.models.policy"),
    ("models/policy/optimizer/learning_rate", "1e-6", "$.models.policy.optimizer"),
    ("schedule/epoch", "3", "$.schedule"),
    ("rewards", "{op: reward.exact}", "$"),
    ("nodes/rollout/n", "many", "$.nodes.rollout.n"),  # wrong types
    ("nodes/rollout/n", "1.5", "$.nodes.rollout.n"),
    ("nodes/rollout/n", "true", "$.nodes.rollout.n"),
    ("nodes/rollout/temperature", "[1.0]", "$.nodes.rollout.temperature"),
    ("nodes/rollout", "[op, rollout]", "$.nodes.rollout"),
    ("models/ref/frozen", "1", "$.models.ref.frozen"),
    ("models/policy/path", "3", "$.models.policy.path"),
    ("nodes", "[rollout]", "$.nodes"),
    ("nodes/rollout/op", "rolout", "$.nodes.rollout.op"),  # unknown names
    ("nodes/update/loss/kind", "ppo", "$.nodes.update.loss.kind"),
    ("nodes/update/aggregate", "mean", "$.nodes.update.aggregate"),
    ("nodes/rollout/in", "{prompts: other}", "$.nodes.rollout.in"),
    ("nodes/rollout/out", "{token: other}", "$.nodes.rollout.out"),
    ("nodes/rollout/model", "policy@last", "$.nodes.rollout.model"),
    ("nodes/my-node", "{op: reward.exact}", "$.nodes"),
    ("models/policy/head", "reward", "$.models.policy.head"),
    ("nodes/rollout/n", "0", "$.nodes.rollout.n"),  # bounds
    ("nodes/rollout/top_p", "0", "$.nodes.rollout.top_p"),
    ("nodes/rollout/top_p", "1.5", "$.nodes.rollout.top_p"),
    ("nodes/update/loss/clip", "-0.1", "$.nodes.update.loss.clip"),
    ("models/policy/optimizer/lr", "0", "$.models.policy.optimizer"),
    ("models/policy/optimizer/betas", "[0.9]", "$.models.policy.optimizer"),
    ("pools", "{main: {devices: 0}}", "$.pools.main.devices"),
    ("seed", "-1", "$.seed"),
    ("schedule/save_every", "-1", "$.schedule.save_every"),
    ("schedule/save_every", "30 mins", "$.schedule.save_every"),
    ("schedule/save_every", "1.5", "$.schedule.save_every"),
    ("schedule/record_every", "30 min of prompts", "$.schedule.record_every"),
    ("schedule/best", "{metric: eval/accuracy}", "$.schedule.best"),
    ("schedule/best", "{metric: eval/accuracy, mode: highest}", "$.schedule.best"),
    ("graph", "two words", "$.graph"),
    ("eval", "{report: {}}", "$.eval"),
    ("nodes/rollout/max_new_tokens", "", "$.nodes.rollout"),  # what is missing
    ("nodes/rollout/model", "", "$.nodes.rollout"),
    ("nodes/rollout/op", "", "$.nodes.rollout"),
    ("nodes/update/loss", "", "$.nodes.update"),
    ("nodes/update/loss/kind", "", "$.nodes.update.loss"),
    ("models/policy/path", "", "$.models.policy"),
    ("schedule", "", "$"),
    ("edits", "[{remove: rollout}]", "$"),
    ("nodes/exact", "{op: reward.exact, model: policy}", "$.nodes.exact"),
]


@pytest.mark.parametrize(("path", "value", "where"), MISTAKES)
def test_typical_mistakes_are_refused_where_they_are(path: str, value: str, where: str) -> None:
    assert f"{where}: " in refused(changed(path, value))


@pytest.mark.parametrize(("path", "value", "where"), [("seed", "1", ""), *MISTAKES])
def test_check_refuses_them_too(path: str, value: str, where: str, tmp_path: Path) -> None:
    file = tmp_path / "graph.yaml"
    file.write_text(json.dumps(changed(path, value)))
    report = check_report(PlanRequest(str(file), (), 1))
    assert report["ok"] == (not where), report


EDITED = """
graph: mine
extends: grpo
edits:
  - remove: [ref_logprobs, models.ref]
  - remove: update_policy.kl_coef
  - set: {rollout.n: 16, models.policy.optimizer.lr: 1e-5, schedule.save_every: 10, nodes.rollout.top_k: 3}
  - replace: {rewards: {op: reward.exact}, schedule: {iterations: 3}}
  - add: {eval: {report: {accuracy: rewards}}, eval.nodes.rollout: {n: 1}}
  - rename: {rewards: scores}
  - insert: {shaped: {op: reward.kl_penalty, on: scores, in: {rewards: scores}}}
"""


def test_edits_that_compose_are_taken(tmp_path: Path) -> None:
    (tmp_path / "graph.yaml").write_text(EDITED)
    assert "shaped" in compose(str(tmp_path / "graph.yaml")).items["nodes"].items
    assert not refused(plain(EDITED))


@pytest.mark.parametrize(
    ("edit", "where"),
    [
        ("{remove: 3}", "remove"),
        ("{delete: rollout}", ""),
        ("{set: {schedule.iterations: -1}}", "set"),
        ("{set: {models.policy.optimizer.lr: high}}", "set"),
        ("{set: {models.policy.frozen: 3}}", "set"),
        ("{set: {eval.every: -1}}", "set"),
        ("{add: {mine: {op: reward.exct}}}", "add.mine.op"),
        ("{add: {nodes.mine: {op: reward.exact, timeout: 3}}}", "add"),
        ("{replace: {models.policy: {paths: a}}}", "replace"),
        ("{replace: {schedule: {iterations: 1, save: 2}}}", "replace.schedule"),
        ("{insert: {mine: {op: reward.kl_penalty}}}", "insert.mine"),
        ("{insert: {mine: {op: reward.kl_penalty, on: rewards, bta: 1}}}", "insert.mine"),
        ("{set: {a.b: 1}, remove: c}", ""),
    ],
)
def test_wrong_edits_are_refused(edit: str, where: str) -> None:
    graph = {"graph": "mine", "extends": "grpo", "edits": [plain(edit)]}
    assert f"$.edits[0]{'.' * bool(where)}{where}" in refused(graph)


def test_every_edit_is_known_and_said() -> None:
    assert {*SAID} == {*EDITS} == {*SCHEMA["$defs"]["edit"]["properties"]}


def test_a_section_beside_extends_is_refused() -> None:
    assert refused({"graph": "a", "extends": "ppo", "seed": 1})


@pytest.mark.parametrize("name", sorted(path.stem for path in BAD.glob("*.yaml")))
def test_it_never_fails_on_a_broken_graph(name: str) -> None:
    tree = source_of(BAD / f"{name}.yaml")
    assert tree is None or isinstance(refused(tree), str)


def source_of(path: Path) -> Any:
    try:
        return source.read(path).plain()
    except source.GraphError:
        return None  # no YAML that the language takes


@pytest.mark.parametrize("name", [*OPS, *LOSSES])
def test_every_attribute_has_its_type_default_and_description(name: str) -> None:
    definition = SCHEMA["$defs"][f"{'op' if name in OPS else 'loss'}.{name}"]
    keys = {*definition["properties"]} - {*NODE_KEYS, "kind"}
    assert keys == {*find(name).attributes.model_fields}
    for key in definition["properties"].keys() - {"op", "kind"}:
        schema = definition["properties"][key]
        assert schema["description"]
        assert {"type", "anyOf", "$ref"} & {*schema}
    for key, field in find(name).attributes.model_fields.items():
        schema = definition["properties"][key]
        assert ("default" in schema) != field.is_required()
        assert schema["description"] in schema["markdownDescription"]
    assert definition["description"] == find(name).doc.partition("\n")[0].replace("``", "`")


@pytest.mark.parametrize("name", ["ModelSection", "Optimizer", "Serve", "Train", "Pool", "Schedule", "Eval"])
def test_every_value_of_a_section_has_a_description(name: str) -> None:
    section = SCHEMA["$defs"][name]
    assert section["description"]
    assert all(schema["description"] for schema in section["properties"].values())
    assert all(schema["description"] for schema in SCHEMA["properties"].values())


def test_every_description_is_markdown_too() -> None:
    said = [schema for schema in schemas(SCHEMA) if isinstance(schema.get("description"), str)]
    assert len(said) > 200
    assert all(schema["markdownDescription"] and "``" not in schema["description"] for schema in said)


def schemas(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from schemas(inner)


def test_every_default_is_accepted() -> None:
    seen = 0
    for name, definition in SCHEMA["$defs"].items():
        for key, schema in definition.get("properties", {}).items():
            if "default" in schema:
                seen += 1
                reached = VALIDATOR.evolve(schema={"$ref": f"#/$defs/{name}/properties/{key}"})
                assert reached.is_valid(schema["default"]), f"{name}.{key}"
    assert seen > 50


def test_every_key_of_a_node_has_a_description() -> None:
    keys = SCHEMA["$defs"]["custom"]["properties"]
    assert [*keys] == [*NODE_KEYS]
    assert all(schema["description"] for key, schema in keys.items() if key != "op")
    assert "rows" not in SCHEMA["$defs"]["op.data.prompts"]["properties"]


def test_ports_are_the_ops_own() -> None:
    columns = SCHEMA["$defs"]["op.advantage.gae"]["properties"]
    assert [*columns["in"]["properties"]] == ["rewards", "values", "loss_mask"]
    assert [*columns["out"]["properties"]] == ["advantages", "returns"]
    assert columns["in"]["properties"]["rewards"]["description"] == "A column of float32[samples, tokens]."
