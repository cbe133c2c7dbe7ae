"""What is wrong beside the graph is said before anything starts, at its place in the graph."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlgraph.cli.main import main
from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError
from rlgraph.frontend.compose import compose
from rlgraph.nodes.support import sandbox
from rlgraph.runtime.engines.model_files import ModelFiles
from rlgraph.runtime.preflight import Preflight
from rlgraph.runtime.run import run_graph

GRAPH = """graph: small
extends: grpo
edits:
  - set: {models.policy.path: MODEL}
  - set: {prompts: {op: data.prompts, files: [FILE], batch: 2, template: plain}}
  - set: {rollout.max_new_tokens: 4}
"""
GOOD = {"MODEL": "demo_files/model", "FILE": "train.jsonl"}


@pytest.fixture(autouse=True)
def _folder(demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_files").symlink_to(demo_files / "demo_files")
    Path("train.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n' * 2)
    Path("folder").mkdir()
    Path("no_weights").mkdir()
    Path("no_weights/config.json").write_text(Path("demo_files/model/config.json").read_text())
    Path("no_answer.jsonl").write_text('{"question": "1+1=", "reply": "2"}\n')
    Path("broken.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n{"question":\n')
    Path("long.jsonl").write_text(
        '{"question": "1+1=", "answer": "2"}\n{"question": "' + "1" * 99 + '", "answer": "2"}\n'
    )


def refused(graph: str = GRAPH, overrides: tuple[str, ...] = (), **values: str) -> str:
    """What a run says that can't start; that it started nothing."""
    for name, value in {**GOOD, **values}.items():
        graph = graph.replace(name, value)
    Path("small.yaml").write_text(graph)
    with pytest.raises(GraphError) as caught:
        run_graph("small.yaml", overrides, 1, inline=True)
    assert not Path("runs").exists()
    assert all(problem.mark for problem in caught.value.problems)
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"FILE": "absent.jsonl"}, ["small.yaml:5:", "absent.jsonl"]),
        ({"FILE": "train.csv"}, ["small.yaml:5:", "train.csv"]),
        ({"FILE": "no_answer.jsonl"}, ["small.yaml:5:", "no_answer.jsonl", "answer", "reply"]),
        ({"FILE": "broken.jsonl"}, ["small.yaml:5:", "broken.jsonl:2"]),
        (
            {"FILE": "long.jsonl"},
            ["small.yaml:5:", "long.jsonl:2", "99 tokens", "prompts.max_prompt_tokens=60"],
        ),
        ({"MODEL": "absent/model/here"}, ["small.yaml:4:", "does not exist", "models.policy.path=DIR"]),
        ({"MODEL": "folder"}, ["small.yaml:4:", "no config.json"]),
        ({"MODEL": "no_weights"}, ["small.yaml:4:", "no weights"]),
        ({"MODEL": "runs/demo_sft/models/policy"}, ["rlgraph run demo_sft"]),
        ({"FILE": "demo_files/absent.parquet"}, ["python -m rlgraph.runtime.demo"]),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(values: dict[str, str], said: list[str]) -> None:
    text = refused(**values)
    for piece in said:
        assert piece in text


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        (["prompts.template=chat"], "set prompts.template=plain"),
        (["prompts.question=problem"], "name one of them with prompts.question, prompts.answer, "),
        (["eval.nodes.prompts.template=chat"], "set eval.nodes.prompts.template=plain"),
    ],
)
def test_the_remedy_of_an_error_in_data_can_be_typed(settings: list[str], remedy: str) -> None:
    """It says where its line goes: which node's attribute it is, in training or in the evaluation."""
    evaluation = "eval: {report: {reward: rewards}, nodes: {prompts: {batch: all}}}"
    head = GRAPH.replace("MODEL", "demo_files/model").replace("FILE", "demo_files/train.parquet")
    Path("evaluated.yaml").write_text(f"{head}  - set: {{{evaluation}}}\n")
    checked = CliRunner().invoke(main, ["check", "evaluated.yaml", "--files", *settings])
    assert checked.exit_code == 1 and f"\n  {remedy}" in checked.output, checked.output
    if remedy.startswith("set "):
        typed = [*settings, remedy.removeprefix("set ")]
        mended = CliRunner().invoke(main, ["check", "evaluated.yaml", "--files", *typed])
        assert mended.exit_code == 0, mended.output


def test_a_check_of_files_finds_what_a_run_would_without_starting_it() -> None:
    Path("small.yaml").write_text(GRAPH.replace("MODEL", "absent/model/here").replace("FILE", "absent.jsonl"))
    refused_check = CliRunner().invoke(main, ["check", "small.yaml", "--files", "--format", "json"])
    found = {(problem["kind"], problem["line"]) for problem in json.loads(refused_check.stdout)["problems"]}
    assert (refused_check.exit_code, found) == (1, {("no-model", 4), ("data", 5)})
    given = ["models.policy.path=demo_files/model", "prompts.files=[train.jsonl]"]
    assert CliRunner().invoke(main, ["check", "small.yaml", "--files"]).exit_code == 1
    assert CliRunner().invoke(main, ["check", "small.yaml", "--files", *given]).exit_code == 0
    assert CliRunner().invoke(main, ["check", "small.yaml"]).exit_code == 0
    assert not Path("runs").exists()


def test_a_model_has_the_tokens_that_end_its_samples() -> None:
    text = refused(GRAPH + "  - set: {rollout.stop_token_ids: [3, 5000]}\n")
    assert "small.yaml:7:" in text and "`policy` has no token 5000" in text and "leave it out" in text


def changed_model(name: str, **settings: object) -> str:
    """A copy of the demo's model whose files have other fields; of a file that has none left, without it."""
    shutil.copytree("demo_files/model", name)
    for file, fields in settings.items():
        path = Path(name, f"{file}.json")
        assert isinstance(fields, dict)
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return name


def test_a_model_whose_files_name_no_end_token_is_a_warning() -> None:
    ends = {"eos_token": None}
    model = changed_model("endless", tokenizer_config=ends, config={"eos_token_id": None})
    Path(model, "generation_config.json").unlink(missing_ok=True)
    Path("small.yaml").write_text(GRAPH.replace("MODEL", model).replace("FILE", "train.jsonl"))
    found = CliRunner().invoke(main, ["check", "small.yaml", "--files"])
    assert found.exit_code == 0, found.output
    assert "warning: node `rollout`: no file of `policy` names an end token" in found.output
    assert "name one in the model's generation_config.json, or set rollout.stop_token_ids" in found.output
    strict = CliRunner().invoke(main, ["check", "small.yaml", "--files", "--strict"])
    assert strict.exit_code and "names an end token" in strict.output + str(strict.exception)
    named = CliRunner().invoke(main, ["check", "small.yaml", "--files", "rollout.stop_token_ids=[2]"])
    assert "names an end token" not in named.output


@pytest.mark.parametrize(
    ("target", "meant"), [("q_porj", "did you mean `q_proj`?"), ("lm_head", "there are down_proj, gate_proj")]
)
def test_adapters_of_layers_that_there_are_not_are_refused(target: str, meant: str) -> None:
    text = refused(overrides=(f"models.policy.train.lora={{rank: 2, targets: [{target}]}}",))
    assert f"models.policy: lora: no decoder layer has a linear {target}\n" in text and meant in text


def test_a_tokenizer_that_its_files_contradict_is_refused() -> None:
    tokens = {"added_tokens_decoder": {"77": {"content": "<|tool|>", "special": True}}}
    text = refused(MODEL=changed_model("other", tokenizer_config=tokens))
    assert "transformers reads its tokenizer otherwise than tokenizer.json has it" in text
    assert "the added token '<|tool|>', which is 77\n" in text
    assert "save the tokenizer anew" in text


def test_an_open_value_is_named() -> None:
    assert "`nodes.prompts.files` is still open" in refused(GRAPH.replace("[FILE]", "???"))


def test_a_folder_of_workers_asks_for_absolute_paths() -> None:
    there = "schedule.runtime_env={working_dir: elsewhere}"
    model, data = (Path(name).absolute() for name in ("demo_files/model", "train.jsonl"))
    text = refused(overrides=(there,))
    assert "models.policy.path: demo_files/model is in this folder, and workers are in another" in text
    assert f"give it as {model}" in text and f"give it as {data}" in text
    given = [f"models.policy.path={model}", f"prompts.files=[{data}]", there]
    Path("small.yaml").write_text(GRAPH.replace("MODEL", "absent").replace("FILE", "absent.jsonl"))
    assert CliRunner().invoke(main, ["check", "small.yaml", "--files", *given]).exit_code == 0


def test_every_source_of_several_is_looked_at() -> None:
    two = GRAPH.replace("[FILE]", "{a: [train.jsonl], b: [FILE]}")
    assert "no_answer.jsonl:1: has no column 'answer'" in refused(two, FILE="no_answer.jsonl")
    assert "python -m rlgraph.runtime.demo" in refused(two, FILE="demo_files/absent.parquet")
    assert "weights are for b, and files has a, b" in refused(two, ("prompts.weights={b: 1}",))


def test_a_pattern_is_looked_at_file_by_file() -> None:
    """A broken file among several, a pattern that nothing has, files in a folder that workers lack."""
    Path("data").mkdir()
    Path("data/a.csv").write_text("question,answer\n1+1=,2\n")
    Path("data/b.csv").write_text("question,answer\n1+1=\n")
    assert "data/b.csv:1: has 1 cells, and the header 2" in refused(FILE="data/*.csv")
    assert "data/*.jsonl: no file has such a name" in refused(FILE="data/*.jsonl")
    Path("data/b.csv").unlink()
    there = "schedule.runtime_env={working_dir: elsewhere}"
    assert f"give it as {Path('data/a.csv').absolute()}" in refused(overrides=(there,), FILE="data/*.csv")
    graph = GRAPH.replace("MODEL", "demo_files/model").replace("FILE", "data/*.csv")
    Path("small.yaml").write_text(graph)
    assert CliRunner().invoke(main, ["check", "small.yaml", "--files"]).exit_code == 0


def test_overlong_questions_may_be_dropped_instead() -> None:
    Path("small.yaml").write_text(GRAPH.replace("MODEL", "demo_files/model").replace("FILE", "long.jsonl"))
    run_graph("small.yaml", ["prompts.max_prompt_tokens=60"], 1, inline=True, steps=1)
    assert '"data/overlong": 0.5' in Path("runs/small/metrics.jsonl").read_text()


def checked(*settings: str) -> str:
    """What ``rlgraph check --files`` says of the small graph."""
    Path("small.yaml").write_text(GRAPH.replace("MODEL", "demo_files/model").replace("FILE", "train.jsonl"))
    done = CliRunner().invoke(main, ["check", "small.yaml", "--files", *settings])
    assert done.exit_code == 0, done.output
    return done.output


def test_rows_without_answers_are_named_where_a_reward_reads_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row, answered = ({"question": "1+1=", "answer": answer} for answer in ("", "2"))
    for name, rows in (("open", [row] * 3 + [answered]), ("half", [row] * 2 + [answered] * 2)):
        Path(f"{name}.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    said = checked("prompts.files=[open.jsonl]")
    law = "node `prompts`: 3 of 4 rows of open have no answer, and `rewards` (reward.math) reads it"
    assert law in said and "name the column that has it, as prompts.answer=answer" in said
    # what is no conversation that ends with the assistant's turn has none where no column is named
    assert "2 of 2 rows of train have no answer" in checked("prompts.answer=null")
    assert "3 of 4 rows of a have no answer" in checked("prompts.files={a: [open.jsonl], b: [train.jsonl]}")
    assert "no answer" not in checked("prompts.files=[half.jsonl]")
    form = "nodes.rewards={op: reward.format, pattern: x}"
    assert "no answer" not in checked("prompts.files=[open.jsonl]", form)
    # a run says so, too, and a strict one does not begin
    run_graph("small.yaml", ["prompts.files=[open.jsonl]"], 1, inline=True, steps=0)
    assert law in capsys.readouterr().out
    with pytest.raises(GraphError, match="3 of 4 rows of open have no answer"):
        run_graph("small.yaml", ["prompts.files=[open.jsonl]"], 1, inline=True, strict=True)


def test_rows_that_an_evaluation_would_leave_out_are_counted() -> None:
    files = "{a: [train.jsonl], b: [long.jsonl]}"
    evaluation = f"eval={{nodes: {{prompts: {{batch: all, files: {files}}}}}, report: {{ok: rewards}}}}"
    said = checked(evaluation, "prompts.max_prompt_tokens=60")
    assert "node `prompts` of the evaluation: 1 of 4 rows (1 of b) have over 60 tokens" in said
    assert "left out, and not measured" in said and "raise eval.nodes.prompts.max_prompt_tokens" in said
    cut = checked(evaluation, "prompts.max_prompt_tokens=60", "prompts.truncate=left")
    assert "1 of 4 rows (1 of b) have over 60 tokens (prompts.max_prompt_tokens): they are cut" in cut
    shorter = evaluation.replace("long.jsonl", "train.jsonl")
    assert "of the evaluation" not in checked(shorter, "prompts.max_prompt_tokens=60")
    # and the run's metrics have them by source
    run_graph(
        "small.yaml", [evaluation, "prompts.max_prompt_tokens=60"], 1, inline=True, steps=0, run_dir=Path("a")
    )
    (line,) = [json.loads(line) for line in Path("a/metrics.jsonl").read_text().splitlines()]
    assert (line["eval/rows"], line["eval/rows/a"], line["eval/rows/b"]) == (3, 2, 1)
    assert (line["eval/overlong"], line["eval/overlong/a"], line["eval/overlong/b"]) == (0.25, 0, 0.5)


def test_warnings_are_errors_where_that_is_asked_for() -> None:
    greedy = GRAPH + "  - set: {rollout.temperature: 0}\n"
    assert "most likely token" not in refused(greedy, FILE="no_answer.jsonl")  # it is the data that stops it
    with pytest.raises(GraphError) as caught:
        run_graph("small.yaml", (), 1, inline=True, strict=True)
    assert [problem.kind for problem in caught.value.problems] == ["greedy"]
    assert not Path("runs").exists()


def test_a_run_begins_with_its_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    graph = GRAPH + "  - set: {rollout.temperature: 0}\n"
    for name, value in GOOD.items():
        graph = graph.replace(name, value)
    Path("small.yaml").write_text(graph)
    run_graph("small.yaml", (), 1, inline=True, steps=0)
    assert "small.yaml:7:11: warning: node `advantages`" in capsys.readouterr().out


def test_inline_is_one_device() -> None:
    text = refused(GRAPH + "  - set: {pools.main.devices: 2}\n")
    assert "small.yaml:7:" in text
    assert "have 2 devices (pools.main.devices: 2); 1 is asked for (--devices, or --inline)" in text


AGENT = "{op: rollout.agent, model: policy, n: 2, max_new_tokens: 4, tools: {py: {kind: python}}}"


@pytest.mark.parametrize(("node", "there"), [("rewards", "{op: reward.code}"), ("rollout", AGENT)])
def test_programs_of_a_policy_need_a_sandbox(node: str, there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "trouble", lambda: "no namespaces")
    edit = f"  - replace: {{{node}: {there}}}\n"
    text = refused(GRAPH.replace("  - set: {rollout.max_new_tokens: 4}\n", "") + edit)
    assert "small.yaml:6:" in text and f"node `{node}`: no sandbox can be had here: no namespaces" in text
    assert "set allow_unsandboxed: true" in text


CALLS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "CALL {{ c.function.name }}{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_a_parser_that_reads_no_call_of_the_template_is_a_warning() -> None:
    agent = AGENT.replace("{kind: python}", "{kind: calculator}")
    agent = agent.replace("}}}", f"}}}}, template_options: {{chat_template: {CALLS!r}}}}}")
    graph = (
        GRAPH.replace("  - set: {rollout.max_new_tokens: 4}\n", "") + f"  - replace: {{rollout: {agent}}}\n"
    )
    text = graph.replace("MODEL", GOOD["MODEL"]).replace("FILE", GOOD["FILE"])
    Path("small.yaml").write_text(text)
    found = CliRunner().invoke(main, ["check", "small.yaml", "--files"])
    assert found.exit_code == 0, found.output
    assert "writes a call as 'CALL py" in found.output and "the parser does not read" in found.output


def test_adapters_of_a_family_with_other_layers_are_refused_by_name() -> None:
    from transformers import Phi3Config

    settings = ["models.policy.train.lora={rank: 4}", "models.policy.serve={engine: sglang, lora: adapter}"]
    settings = [*settings, "models.policy.path=any"]
    tree, plan = compose("grpo", settings), compile_graph("grpo", settings, 1)
    check = Preflight(replace(plan, models={"policy": replace(plan.models["policy"], train=None)}), tree)
    check._fits("policy", ModelFiles("any"), Phi3Config(sliding_window=None))
    (said,) = [problem.render() for problem in check.problems]
    assert "models.policy: phi3: adapters are served of llama, mistral, mixtral, qwen2" in said
    assert "set models.policy.serve.lora=merged" in said


SOURCE = '''
from typing import NamedTuple

from rlgraph.ops import int64, op, prompt_tokens, prompts, text


class Asked(NamedTuple):
    prompt: int64[prompts, prompt_tokens]
    question: text[prompts]
    answer: text[prompts]


def look(*, name: str) -> None:
    pass


@op(makes="prompts", rows="all", LOADroles={"rows": "batch"})
def asked(*, batch: int = 2, name: str = "x") -> Asked:
    """Questions."""
    raise NotImplementedError
'''


def test_a_source_that_names_no_loader_is_named_with_what_to_add() -> None:
    prompts = "{op: data.prompts, files: [FILE], batch: 2, template: plain}"
    for file, load, sentences in (("bare.py", "", 1), ("loaded.py", "load=look, ", 0)):
        Path(file).write_text(SOURCE.replace("LOAD", load))
        graph = GRAPH.replace(prompts, f"{{op: '{file}:asked'}}").replace("MODEL", GOOD["MODEL"])
        Path("small.yaml").write_text(graph)
        checked = CliRunner().invoke(main, ["check", "small.yaml", "--files"])
        assert checked.exit_code == 0, checked.output
        assert checked.stdout.count("node `prompts`: its data were not looked at") == sentences
        assert checked.stdout.count("bare.py:asked has no load=") == sentences
        assert checked.stdout.count("add @op(..., load=FUNCTION)") == sentences
