"""What does a pretrained model learn by each kind of algorithm, from the same questions?

    python benchmarks/real_model.py [--methods grpo,ppo,...] [--seeds 1] [--folder DIR] [--gsm8k DIR]

The model, the questions and the measure are those of `rlgraph demo smollm`: SmolLM2-135M-Instruct, sums
asked in words, accuracy of greedy answers to 100 held-out questions, every five iterations. The graphs are
`graphs/demo_smollm.yaml` and those in `benchmarks/real_model/`; they run one after the other. Prints a row
per run, with its accuracies and seconds; `rlgraph view DIR/*` draws the curves. A run that is there is not
run again.

With `--gsm8k`, a folder with GSM8K's `train.jsonl` and `test.jsonl`, the methods are SFT on worked answers
and GRPO from the model that it leaves; accuracy is that of 100 test questions.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
from pathlib import Path

from rlgraph.reports.measured import read_metrics
from rlgraph.runtime import demo_sums
from rlgraph.runtime.demo import write_parquet
from rlgraph.runtime.demo_smollm import ONE_DEVICE

RLGRAPH = (sys.executable, "-m", "rlgraph")
HERE = Path(__file__).parent / "real_model"
SUMS = ("grpo", "rloo", "ppo", "streamed", "sft", "dpo")
GSM8K = ("gsm8k_sft", "gsm8k_grpo")
FILES = Path("demo_files/smollm")  # made by `rlgraph demo smollm`
PAIRS = FILES / "pairs.parquet"  # made here
EVERY = {"gsm8k_sft": 100, "gsm8k_grpo": 20}  # iterations between evaluations; of the others:
EVERY_FEW = 5
CLOSE = 9  # a wrong answer is at most so far from the right one


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--methods", help="names  [all that the files are there for]")
    parser.add_argument("--seeds", type=int, default=1, help="how many runs of each")
    parser.add_argument("--folder", type=Path, default=Path("runs/real_model"), help="of the runs")
    parser.add_argument("--gsm8k", type=Path, help="a folder with train.jsonl and test.jsonl")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([*RLGRAPH, "demo", "smollm", "--no-run"], check=True)
    make_pairs()
    methods = options.methods.split(",") if options.methods else GSM8K if options.gsm8k else SUMS

    print("| method | seed | accuracy | seconds per iteration, median | minutes |")
    print("|---|---|---|---|---|")
    for method in methods:
        for seed in range(options.seeds):
            run = options.folder / f"{method}-{seed}"
            settings = files_of(method, options.gsm8k, options.folder / f"{GSM8K[0]}-{seed}")
            train(method, [*settings, f"seed={seed}"], run)
            print(f"| {method} | {seed} | {' | '.join(measured(run))} |", flush=True)


def files_of(method: str, gsm8k: Path | None, after_sft: Path) -> list[str]:
    """Return the settings that give a graph its model and its data."""
    model = f"models.policy.path={FILES}/model"
    asked = f"eval.nodes.prompts.files=[{FILES}/test.parquet]"
    match method:
        case "ppo":
            return [model, f"prompts.files=[{FILES}/train.parquet]", asked]
        case "sft":
            return [model, f"examples.files=[{FILES}/train.parquet]", asked]
        case "dpo":
            return [model, f"pairs.files=[{PAIRS}]", asked]
        case "gsm8k_sft":
            return [
                model,
                f"examples.files=[{gsm8k}/train.jsonl]",
                f"eval.nodes.prompts.files=[{gsm8k}/test.jsonl]",
            ]
        case "gsm8k_grpo":
            trained = f"models.policy.path={after_sft}/models/policy"
            return [
                trained,
                f"prompts.files=[{gsm8k}/train.jsonl]",
                f"eval.nodes.prompts.files=[{gsm8k}/test.jsonl]",
            ]
        case "grpo" | "rloo":  # what extends demo_smollm has both
            return [ONE_DEVICE]
        case _:
            return []


def make_pairs() -> None:
    """Write a right and a wrong answer to each training question, for DPO."""
    generator = random.Random(0)
    questions, _ = demo_sums.questions(0)
    pairs = []
    for row in questions:
        wrong = int(row["answer"]) + generator.choice((-1, 1)) * generator.randint(1, CLOSE)
        pairs.append({"question": row["question"], "chosen": row["answer"], "rejected": str(wrong)})
    write_parquet(PAIRS, pairs)


def train(method: str, settings: list[str], run: Path) -> None:
    """Run a method's graph, unless the run has ended already; one that was stopped goes on."""
    if (run / "models").is_dir():
        return
    graph = "demo_smollm" if method == "grpo" else str(HERE / f"{method}.yaml")
    every = f"eval.every={EVERY.get(method, EVERY_FEW)}"
    command = ["run", graph, *settings, every, "--run-dir", str(run)]
    if (run / "plan.json").is_file():
        command = ["resume", str(run)]
    with run.with_suffix(".log").open("a") as log:
        subprocess.run([*RLGRAPH, *command], check=True, stdout=log, stderr=subprocess.STDOUT)


def measured(run: Path) -> tuple[str, str, str]:
    """Return the accuracies of a run, the median of its iterations' seconds, and all its minutes."""
    lines = read_metrics(run)
    accuracies = [f"{line['eval/accuracy']:.2f}" for line in lines if "eval/accuracy" in line]
    steps = [line["time/step"] for line in lines if "time/step" in line]
    evaluations = [line["time/eval"] for line in lines if "time/eval" in line]
    minutes = (sum(steps) + sum(evaluations)) / 60
    return " ".join(accuracies), f"{statistics.median(steps):.1f}", f"{minutes:.1f}"


if __name__ == "__main__":
    main()
