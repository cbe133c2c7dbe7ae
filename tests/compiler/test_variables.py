"""Texts of the environment stand in nothing that is written; numbers and choices of it decide a plan."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rlgraph.cli.main import main
from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError, RunError, shortened
from rlgraph.ir.function import Function
from rlgraph.reports.plan_file import compile_again, load
from rlgraph.variables import hidden, hide, with_values

CANARY = "sk-canary/4711+x"
GRAPH = """
graph: own
about: "asks ${env:CANARY}"
extends: grpo
edits:
  - set: {models.policy.path: "${env:MODELS}/m", models.ref.path: "${models.policy.path}"}
  - set: {prompts.files: [train.jsonl], models.policy.serve.dtype: "${env:DTYPE}", rollout.n: "${env:COUNT}"}
  - set: {models.policy.serve.sglang.options: {tag: "${env:CANARY}"}, models.policy.serve.engine: sglang}
  - replace: {rewards: {op: reward.remote, url: "${env:URL}?key=${env:CANARY}"}}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    values = {"CANARY": CANARY, "MODELS": "/srv/canary", "DTYPE": "float32", "COUNT": "6"}
    for name, value in (values | {"URL": "http://judge"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(GRAPH)
    return Path("own.yaml")


def call(*args: str, expect: int = 0) -> Result:
    result = CliRunner().invoke(main, args)
    assert result.exit_code == expect, result.output
    assert "canary" not in result.output.replace("${env:CANARY}", "")
    return result


@pytest.mark.parametrize(
    "args",
    [
        ("show",),
        ("show", "--origin"),
        ("plan",),
        *(("plan", "--format", form) for form in ("json", "mermaid", "dot", "html", "trace")),
        ("view", "-o", "page.html"),
        ("check", "--format", "json"),
    ],
    ids=" ".join,
)
def test_nothing_that_is_shown_or_written_holds_a_text_of_the_environment(
    own: Path, args: tuple[str, ...], tmp_path: Path
) -> None:
    call(args[0], "own.yaml", *args[1:])
    call("diff", "grpo", "own.yaml", expect=1)
    for file in tmp_path.rglob("*"):
        assert "canary" not in file.read_text()


def test_a_plan_has_references_and_is_read_where_the_variables_are_not(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call("plan", "own.yaml", "-o", "plan.json")
    again = compile_again(Path("plan.json")).plan.functions["train"]["rewards"]
    assert again.attributes["url"] == "${env:URL}?key=${env:CANARY}"
    for name in ("CANARY", "MODELS", "URL", "DTYPE", "COUNT"):
        monkeypatch.delenv(name)
    plan = load(Path("plan.json"))
    assert plan.models["policy"].path == plan.models["ref"].path == "${env:MODELS}/m"
    assert plan.functions["train"]["rewards"].attributes["url"] == "${env:URL}?key=${env:CANARY}"
    assert plan.functions["train"]["rollout"].attributes["n"] == 6
    assert plan.models["policy"].serve and plan.models["policy"].serve.dtype == "float32"
    assert plan.origin and plan.origin.composed["nodes"]["rollout"]["n"] == "${env:COUNT}"
    call("view", "plan.json")
    assert "the environment has no `CANARY`" in call("check", "own.yaml", expect=1).output
    assert "the environment has no `CANARY`" in call("run", "plan.json", expect=1).output


@pytest.mark.parametrize(
    ("override", "law"),
    [
        ("rewards.url=${env:CANARY}", "`rewards.url` must match pattern"),
        ("models.policy.serve.dtype=${env:CANARY}", "`models.policy.serve.dtype` must be 'auto'"),
        ("rollout.n=${env:CANARY}", "`rollout.n` must be a whole number; it is '${env:CANARY}'"),
        ("rewards.op=${env:CANARY}", "there is no op `${env:CANARY}`"),
        ("rollout.n=${env:ZERO}", "`rollout.n` must be at least 1; it is '${env:ZERO}'"),
    ],
)
def test_an_error_names_the_variable_and_not_its_value(
    own: Path, override: str, law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZERO", "0")
    assert law in call("check", "own.yaml", override, expect=1).output


def test_a_key_of_digits_is_a_text_where_a_text_is_asked_for(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("ops.py").write_text(
        "from rlgraph.ops import float32, op, samples, text\n\n\n@op()\n"
        "def mine(responses: text[samples], *, key: str) -> float32[samples]:\n    return responses\n"
    )
    monkeypatch.setenv("PIN", "314159265358")
    plan = compile_graph("own.yaml", ["rewards={op: 'ops.py:mine', key: '${env:PIN}'}"], 1)
    assert plan.functions["train"]["rewards"].attributes == {"key": "${env:PIN}"}
    assert "314159265358" not in plan.json()
    assert hidden("314159265358") == "${env:PIN}"


def test_a_number_of_the_environment_is_not_hidden(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "8675309")
    monkeypatch.setenv("LATE", "late-canary")
    compile_graph("own.yaml", ["schedule.iterations=${env:STEPS}", "models.policy.path=${env:LATE}"], 1)
    assert hidden("8675309 of late-canary") == "8675309 of ${env:LATE}"


def test_a_folder_of_the_environment_is_absolute_and_a_name_stays_one(
    own: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "below").mkdir()
    Path("below/deep.yaml").write_text(
        'graph: deep\nextends: ../own.yaml\nedits: [{set: {models.policy.path: "${env:MODELS}/a/m"}}]\n'
    )
    path = compile_graph("below/deep.yaml", [], 1).models["policy"].path
    assert path == "${env:MODELS}/a/m"
    monkeypatch.setenv("MODELS", "models")
    assert compile_graph("below/deep.yaml", [], 1).models["policy"].path == "below/${env:MODELS}/a/m"
    monkeypatch.setenv("HUB", "Qwen/Qwen2.5-0.5B")
    assert (
        compile_graph("own.yaml", ["models.policy.path=${env:HUB}"], 1).models["policy"].path == "${env:HUB}"
    )


def test_values_take_the_place_of_references_in_any_record() -> None:
    function = Function("a:b", {"url": "x${env:KEY}", "more": ("${env:KEY}", {"n": 1}), "n": 2})
    values = {"KEY": "${env:KEY}!"}  # what a value holds is not read again
    made = with_values(function, values)
    assert made.attributes == {"url": "x${env:KEY}!", "more": ("${env:KEY}!", {"n": 1}), "n": 2}
    assert with_values("${env:NOWHERE}", values) == "${env:NOWHERE}"
    assert with_values(function, {}) is function


def test_errors_and_logs_repeat_no_value(caplog: pytest.LogCaptureFixture) -> None:
    hide({"KEY": CANARY, "STAGE": "dev"})
    assert str(RunError(f"http://x?key={CANARY}: refused")) == "http://x?key=${env:KEY}: refused"
    quoted = "http://x?key=sk-canary%2F4711%2Bx"
    assert hidden(quoted) == "http://x?key=${env:KEY}"
    assert hidden("/dev/shm") == "/dev/shm"  # too short to be a secret
    with caplog.at_level(logging.WARNING):
        logging.getLogger("an.op").warning("%s refused", CANARY)
        try:
            raise ValueError(CANARY)
        except ValueError:
            logging.getLogger("an.op").exception("it failed")
    wrong = logging.getLogRecordFactory()("an.op", logging.INFO, "file", 1, "%d", ("no number",), None)
    assert wrong.msg == "%d", "it is the handler's to complain about"
    assert "canary" not in caplog.text and caplog.text.count("${env:KEY}") == 2


def test_a_value_is_hidden_before_a_text_is_cut_and_as_it_is_quoted() -> None:
    hide({"KEY": CANARY, "ODD": 'odd\n"canary\\é'})
    said = shortened(f"{CANARY}{'.' * 60}", 20)
    assert said.startswith("${env:KEY}\n") and "canary" not in said
    odd = 'odd\n"canary\\é'
    assert hidden(f"{[odd]} {json.dumps(odd)} {odd}") == "['${env:ODD}'] \"${env:ODD}\" ${env:ODD}"


def test_a_law_repeats_no_value_and_a_place_stays_one(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDER", str(own.absolute().parent))
    text = own.read_text().replace("${env:MODELS}/m", "${env:FOLDER}/m")
    own.write_text(text + "nodes: {}\n")
    with pytest.raises(GraphError) as caught:
        compile_graph(str(own.absolute()), [], 1)
    assert str(own.absolute()) in str(caught.value)
