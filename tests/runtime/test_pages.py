"""Examples of pages run as they stand, on data in the layout that the page names."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from gsm8k_layout import make_data, make_model
from rlgraph.cli.main import main
from rlgraph.runtime.run import run_graph

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="session")
def brought(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``gsm8k``, in verl's layout, and ``model``."""
    folder = tmp_path_factory.mktemp("brought")
    make_data(folder / "gsm8k")
    make_model(folder / "model")
    return folder


@pytest.fixture
def folder(brought: Path, demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with the data, the model and the demo's files."""
    monkeypatch.chdir(tmp_path)
    Path("gsm8k").symlink_to(brought / "gsm8k")
    Path("model").symlink_to(brought / "model")
    Path("demo_files").symlink_to(demo_files / "demo_files")
    Path("train.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n' * 8)
    return tmp_path


def files_of(page: str) -> dict[str, str]:
    """The blocks of a page that name a file, such as ```yaml mine.yaml, by that name."""
    files = {}
    for info, text in BLOCK.findall((DOCS / page).read_text(encoding="utf-8")):
        _, _, name = info.partition(" ")
        if name:
            files[name] = text
    return files


def write_files(page: str) -> dict[str, str]:
    """Write the blocks of a page that name a file, and return them by name."""
    files = files_of(page)
    for name, text in files.items():
        Path(name).write_text(text, encoding="utf-8")
    return files


def commands(text: str) -> list[list[str]]:
    """The `rlgraph` commands of some shell text, as words."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("rlgraph ")]


def typed(page: str) -> list[list[str]]:
    """The `rlgraph` commands that a page shows."""
    blocks = BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
    return [command for info, block in blocks if not info for command in commands(block)]


def call(*words: str) -> str:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, (words, result.output)
    return result.output


def first_run() -> str:
    return files_of("quickstart.md")["first_run.sh"]


def test_a_stranger_trains_on_their_own_data_in_four_commands() -> None:
    typed_commands = first_run().replace("\\\n", " ").splitlines()
    assert len(typed_commands) <= 4


@pytest.mark.usefixtures("folder")
def test_the_first_training_run_on_data_in_verls_layout() -> None:
    (command,) = commands(first_run())
    call(*command, "models.policy.path=model", "--inline", "--run-dir", "runs/first")
    lines = [json.loads(line) for line in Path("runs/first/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines][-1] == 2
    assert "update_policy/loss" in lines[-1]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_four_commands_in_a_fresh_clone(brought: Path, tmp_path: Path) -> None:
    """As a stranger types them, with packages from the registry, through Ray; only the model is another."""
    cloning, *others = first_run().replace("Qwen/Qwen2.5-0.5B-Instruct", str(brought / "model")).splitlines()
    put_data = f"ln -s {shlex.quote(str(brought / 'gsm8k'))} gsm8k"
    script = "\n".join([cloning.replace("ADDRESS", shlex.quote(str(ROOT))), put_data, *others])
    done = subprocess.run(
        ["bash", "-e", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=1700, check=False
    )
    if re.search("NameResolutionError|NewConnectionError|ConnectTimeout", done.stderr):
        pytest.skip("no package registry can be reached")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (tmp_path / "rlgraph/runs/grpo/metrics.jsonl").read_text().count("\n") >= 2


CHECKED = {  # page -> the graphs in it whose files, rows and model are checked
    "quickstart.md": ["mine.yaml"],
    "data.md": ["gsm8k.yaml"],
    "lora.md": ["my_lora.yaml"],
    "memory.md": ["offloaded.yaml"],
}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("page", "graph"), [(page, name) for page in CHECKED for name in CHECKED[page]])
def test_a_graph_of_a_page_fits_its_data(page: str, graph: str) -> None:
    write_files(page)
    assert "ok" in call("check", "--files", graph, "models.policy.path=model")


REWARDS = ["my_reward.yaml", "verl_reward.yaml", "trl_reward.yaml", "two_rewards.yaml"]
SMALL = ["prompts.batch=4", "rollout.n=4", "update_policy.minibatches=1", "eval.every=0"]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("graph", REWARDS)
def test_a_reward_of_the_page_trains(graph: str) -> None:
    files = write_files("rewards.md")
    assert sorted(name for name in files if name.endswith(".yaml")) == sorted(REWARDS)
    run_graph(graph, SMALL, 1, steps=1, inline=True, run_dir=Path("run"))
    sample = json.loads(next(Path("run/samples").glob("*.jsonl")).read_text().splitlines()[0])
    assert 0 <= sample["rewards"] <= 1.1


PLANNED = ["quickstart.md", "lora.md", "memory.md", "slurm.md"]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("page", PLANNED)
def test_plans_of_a_page_can_be_made(page: str) -> None:
    """On a graph `mine.yaml` of the quickstart, where the page names one of the reader's."""
    write_files("quickstart.md")
    write_files(page)
    plans = [command for command in typed(page) if command[0] in ("plan", "diff", "check")]
    assert plans
    for command in plans:
        if command[0] == "check":
            command = [*command, "models.policy.path=model"]
        call(*command)


def test_the_script_for_slurm_is_a_script(tmp_path: Path) -> None:
    text = files_of("slurm.md")["train.sh"]
    subprocess.run(["bash", "-n"], cwd=tmp_path, input=text, text=True, check=True)
    (command,) = commands(text)
    options = {option for one in main.commands["run"].params for option in one.opts}
    assert {word for word in command if word.startswith("--")} <= options
