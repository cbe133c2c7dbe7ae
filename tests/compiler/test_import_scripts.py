"""benchmarks/import_scripts.py records what a script would start, and lets it do nothing else."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
set -euo pipefail
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' && echo npu || echo gpu)}
rm -rf "$PWD"/data
mkdir -p /root/made-by-a-script && echo text > OUTSIDE
if [ "$#" -lt 2 ]; then exit 1; fi
curl http://localhost/
sleep 3600
python3 -m verl.trainer.main_ppo \\
    data.train_files="['$HOME/a b.parquet']" \\
    trainer.experiment_name=$DEVICE \\
    trainer.nnodes=$(( 1 + 1 )) $@
"""


def has_namespaces() -> bool:
    words = ["unshare", "--map-root-user", "--net", "--mount", "--pid", "--fork", "true"]
    return shutil.which("unshare") is not None and subprocess.run(words, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not has_namespaces(), reason="namespaces of users are not allowed here")


@pytest.fixture
def scripts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("import_scripts", ROOT / "benchmarks" / "import_scripts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["import_scripts"] = module  # its records look themselves up there
    spec.loader.exec_module(module)
    return module


def test_a_script_is_recorded_and_does_nothing_else(scripts: ModuleType, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    checkout = tmp_path / "box" / "checkout"
    (checkout / "data").mkdir(parents=True)
    (checkout / "run.sh").write_text(SCRIPT.replace("echo text > OUTSIDE", f"echo text > {outside} || true"))
    (command,) = scripts.commands_of(checkout, "verl")
    assert (command.trainer, command.source) == ("verl.trainer.main_ppo", "run.sh")
    assert [*command.arguments] == [
        "data.train_files=['/root/a b.parquet']",
        "trainer.experiment_name=gpu",
        "trainer.nnodes=2",
    ]
    assert (checkout / "data").is_dir()
    assert not outside.exists()
    assert not Path("/root/made-by-a-script").exists()


def test_every_class_of_a_result_is_counted(scripts: ModuleType, tmp_path: Path) -> None:
    grpo = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"]
    given = {
        "plans": [*grpo, "actor_rollout_ref.rollout.n=4"],
        "with a stand-in": [
            *grpo[:1],
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.model.path=/x/Mine-7B",
        ],
        "refused by check": ["algorithm.adv_estimator=grpo_passk", *grpo[1:]],  # of one sample
        "refused by import": ["algorithm.adv_estimator=none"],
    }
    commands = {name: scripts.Command("verl", "main", name, words) for name, words in given.items()}
    outcomes = {name: scripts.result_of(command, tmp_path) for name, command in commands.items()}
    assert {name: outcome.result for name, outcome in outcomes.items()} == {name: name for name in given}
    assert "compares the samples of a prompt" in outcomes["refused by check"].reason
    assert "all 4" in "\n".join(scripts.table([*outcomes.values()]))
