"""Examples of the pages: YAML blocks compile, and commands are those of `rlgraph`, run if they only look.

Blocks with the name of a file, such as ```yaml mine.yaml, also run on data: tests/runtime/test_pages.py and
test_tutorials.py. Python blocks run in tests/nodes/test_page_code.py.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from rlgraph.cli.main import main
from rlgraph.compiler import compile_graph
from rlgraph.ir.plan import Target

DOCS = Path(__file__).parents[2] / "docs"
# made by other tests from what they hold: docstrings, shipped graphs, graphs with errors, --help
GENERATED = {"reference.md", "algorithms.md", "gallery.md", "commands.md"}
PAGES = [path.name for path in sorted(DOCS.glob("*.md")) if path.name not in GENERATED]
TUTORIALS = [f"tutorials/{path.name}" for path in sorted((DOCS / "tutorials").glob("*.md"))]
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTIONS = {"models", "nodes", "pools", "schedule", "eval", "seed"}
ACCURACY = "set: {eval: {report: {accuracy: rewards}}}"
# (page, words of an example) -> the graph that it edits in place of grpo, and an edit that comes first
BASES = {
    ("data_formats.md", "report: {preferred: preferred}"): ("dpo", None),
    ("from_trl.md", "my_rewards.py:correct"): ("grpo", "set: {prompts.columns: {trl_prompt: text}}"),
    ("language.md", "op: advantage.gae"): ("ppo", None),
    ("running.md", "stop: {metric: eval/accuracy"): ("grpo", ACCURACY),
}
DEVICES = {
    ("planning.md", "pools: {train: {devices: 6}, gen: {devices: 2}}"): 8,
    ("streaming.md", "set: {pools: {train: {devices: 4}, gen: {devices: 4}}}"): 8,
}
NO_GRAPHS = {  # (page, words of an example): who reads it
    ("clusters.md", "apiVersion: ray.io/v1"): "Kubernetes",
    ("gpu.md", "volumeMounts:"): "Kubernetes",
    ("tuning.md", "method: bayes"): "`wandb sweep`: tests/runtime/test_wandb_sweep.py runs it",
}
FILES = {  # what examples name beside themselves
    "my_ops.py": """from rlgraph.ops import boolean, float32, int64, op, prompts, samples, text, tokens


@op()
def my_reward(responses: text[samples]) -> float32[samples]: ...


@op()
def length_penalty(
    rewards: float32[samples], tokens: int64[samples, tokens], *, coef: float = 0.001
) -> float32[samples]: ...


@op(filters=True)
def easy(question: text[prompts], *, most: float = 1000) -> boolean[prompts]: ...
""",
    "my_tools.py": """from rlgraph.ops import prompts, text


def check(guess: int, answer: text[prompts], *, near: int = 0) -> str:
    '''Say whether a guess is right.

    Args:
        guess: a whole number.
    '''
    ...
""",
    "my_agent.py": "def solve(task, base_url, api_key): ...\n",
    "my_reward.py": "def compute_score(solution_str, ground_truth, scale=1.0): ...\n",
    "my_rewards.py": "def correct(completions, question, answer, **others): ...\n",
    "my_buffer.py": "def shortest(waiting, wanted): ...\n",
    "lora.yaml": "edits:\n  - set: {models.policy.train.lora.rank: 32}\n",
    "my.yaml": "graph: my\nextends: grpo\nedits:\n  - set: {prompts.files: [train.jsonl]}\n",
    "mine.yaml": "graph: mine\nextends: grpo\nedits:\n  - set: {prompts.files: [train.jsonl]}\n",
}


def blocks(page: str) -> list[tuple[str, str]]:
    """The language and text of each fenced block of a page."""
    return BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))


def examples() -> list[tuple[str, int, str]]:
    """The page, number and text of each YAML example of a graph."""
    graphs = []
    for page in PAGES:
        for number, (language, text) in enumerate(blocks(page)):
            is_graph = entry(NO_GRAPHS, page, text, None) is None
            if language.startswith("yaml") and is_graph:
                graphs.append((page, number, text))
    return graphs


def entry(table: dict[tuple[str, str], Any], page: str, text: str, default: Any) -> Any:
    """The value in a table whose key is a page and words of an example."""
    for (page_in_table, words), value in table.items():
        if page_in_table == page and words in text:
            return value
    return default


EXAMPLES = examples()


def edits_of(base: str, example: Any) -> list[Any]:
    """The edits that bring an example, a list of edits, sections or nodes, into a graph."""
    if isinstance(example, list):
        return example
    assert isinstance(example, dict)
    if example.keys() <= SECTIONS:
        models = {f"models.{name}": model for name, model in example.pop("models", {}).items()}
        nodes = example.pop("nodes", {})
        edits = [{"add": models}] if models else []
        edits += edits_of(base, nodes) if nodes else []
        return [*edits, {"set": example}] if example else edits
    nodes_of_base = compile_graph(base, devices=2).functions["train"]
    edits = []
    for name, value in example.items():
        if name not in nodes_of_base:
            edits.append({"add": {name: value}})
        elif "op" in value:
            edits.append({"replace": {name: value}})
        else:
            edits.append({"set": {f"{name}.{key}": setting for key, setting in value.items()}})
    return edits


def graph_text(page: str, text: str) -> str:
    """An example as a whole graph."""
    example = yaml.safe_load(text)
    if isinstance(example, dict) and "graph" in example:
        return text
    base, preparation = entry(BASES, page, text, ("grpo", None))
    if isinstance(example, dict) and "edits" in example:
        return yaml.safe_dump({"graph": "example", "extends": base, **example}, sort_keys=False)
    edits = edits_of(base, example)
    if preparation is not None:
        edits = [yaml.safe_load(preparation), *edits]
    return yaml.safe_dump({"graph": "example", "extends": base, "edits": edits}, sort_keys=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that examples name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "a token")
    for name, text in FILES.items():
        Path(name).write_text(text)
    return tmp_path


IDS = [f"{page}-{number}" for page, number, _ in EXAMPLES]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("page", "number", "text"), EXAMPLES, ids=IDS)
def test_an_example_compiles(page: str, number: int, text: str) -> None:
    for info, named in blocks(page):
        _, _, name = info.partition(" ")
        if name:
            Path(name).write_text(named)
    if text.startswith("cluster: "):
        Path("cluster.yaml").write_text(text)
        assert compile_graph("grpo", target=Target("cluster.yaml")).peak
        return
    Path("example.yaml").write_text(graph_text(page, text))
    compile_graph("example.yaml", devices=entry(DEVICES, page, text, 2))


def test_exceptions_are_of_examples_that_there_are() -> None:
    for table in (BASES, DEVICES, NO_GRAPHS):
        for page, words in table:
            assert words in (DOCS / page).read_text(encoding="utf-8"), f"{page} has no example with {words}"


def whole_lines(text: str) -> list[str]:
    """The lines of some shell text; one that ends in a backslash or within quotes goes on in the next."""
    lines: list[str] = []
    unfinished = ""
    for line in text.replace("\\\n", " ").splitlines():
        unfinished = f"{unfinished}\n{line}" if unfinished else line
        try:
            shlex.split(unfinished, comments=True)
        except ValueError:  # a quote is open
            continue
        lines.append(unfinished)
        unfinished = ""
    return lines


def commands() -> list[tuple[str, str]]:
    """The page and text of each `rlgraph` command that pages show, in blocks without a language."""
    shell_lines = []
    for page in [*PAGES, *TUTORIALS]:
        for language, text in blocks(page):
            if not language:
                shell_lines += [(page, line.removeprefix("$ ")) for line in whole_lines(text)]
    return [(page, line) for page, line in shell_lines if line.startswith("rlgraph ")]


COMMANDS = list(dict.fromkeys(commands()))


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page}: {line[:60]}" for page, line in COMMANDS])
def test_a_command_is_one_of_rlgraph(page: str, line: str) -> None:
    """It exists, and takes these options and no other number of arguments."""
    name, *words = shlex.split(line, comments=True)[1:]
    command = main.get_command(click.Context(main), name)
    assert command is not None, name
    command.make_context(name, words)


LOOKING = {"plan", "check", "show", "diff", "nodes"}
SLOW_OR_ELSEWHERE = {"--autoplace", "--files", "--against", "--address", "--calibration"}
SHIPPED = {path.stem for path in (DOCS.parent / "graphs").glob("*.yaml")}


def only_looks(line: str) -> bool:
    """Whether a command is quick, and about a graph that is shipped or that FILES has."""
    name, *words = shlex.split(line, comments=True)[1:]
    if name not in LOOKING or "..." in words:
        return False
    if SLOW_OR_ELSEWHERE & {*words}:
        return False
    return name == "nodes" or words[0] in SHIPPED | FILES.keys()


QUICK = [line for _, line in COMMANDS if only_looks(line)]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("line", QUICK)
def test_a_command_that_only_looks_runs(line: str) -> None:
    _, *words = shlex.split(line, comments=True)
    if "--cluster mine.yaml" in line:
        (cluster,) = [text for _, text in blocks("cost_model.md") if text.startswith("cluster: mine")]
        Path("mine.yaml").write_text(cluster)
    result = CliRunner().invoke(main, words)
    differs = words[0] == "diff" and result.exit_code == 1
    assert result.exit_code == 0 or differs or "does not fit on" in result.output, result.output


def test_there_are_examples() -> None:
    assert len(EXAMPLES) > 50
    assert len(COMMANDS) > 80
    assert len(QUICK) > 20
