"""Does every shipped graph learn? Each trains the demo's SFT model for a while, from the same start.

    make demo                                # makes the files, the model that this starts from, and a teacher
    python benchmarks/learning.py            # goes on where it was stopped; 20 s a run on one core
    python benchmarks/learning.py --graphs grpo,rloo --seeds 5

Held-out exact match (greedy, 500 questions) before and after; of graphs that learn from preferences
also the share of held-out pairs in order. A run is one line of ``--results``; what stands
there is not run again unless its graph has changed. Whenever a run is done, ``--page`` is written anew.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hinted_model
import preferences
import reward_model

from rlgraph.compiler import compile_graph
from rlgraph.frontend.compose import compose
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.runtime import demo_tools
from rlgraph.version import VERSION

START, TEACHER = Path("runs/demo_sft/models/policy"), Path("runs/demo/models/policy")
REWARD = Path("runs/reward_model")  # made here where it is not there
HINTED = Path("runs/hinted_model")  # likewise
TAUGHT = Path("runs/calculator_sft")  # likewise, by the graph of that name
TOOLS = ("calculator_tool", "gagpo", "echo")  # their task is their own: products, with a calculator at hand
# a share of the others' iterations, and rates of their own
LENGTHS = dict.fromkeys(TOOLS, 1 / 6) | {"reward_model": 3}
RATES = {"reward_model": 5e-4, "sdft": 5e-5, "sdpo": 5e-5}
EVEN = "{op: reward.format, pattern: '[0-9]*[02468]'}"  # what the game is about
FILES = Path("demo_files")
PREFERENCES = FILES / "preferences"  # made here where they are not there
ELSEWHERE = ("demo", "demo_sft", "demo_smollm", "calculator_sft")  # other data
MARGIN = 0.1  # what every seed has to gain
MEASURES = ("accuracy", "preferred")  # of an evaluation
PROMPTS = f"{{op: data.prompts, files: [{FILES}/train.parquet], batch: 32, template: plain}}"
OPTIMIZER = "{lr: 2e-4, schedule: linear, warmup_steps: 5}"
HELD_OUT = f"prompts: {{files: [{FILES}/test.parquet], batch: all}}, rollout: {{n: 1, temperature: 0}}"
EVAL = f"{{nodes: {{{HELD_OUT}, held_out: {{op: reward.exact}}}}, report: {{accuracy: held_out}}}}"
ASKED = f"prompts: {{op: data.prompts, files: [{FILES}/test.parquet], batch: all, template: plain}}, "
ASKED += "rollout: {op: rollout, model: policy, n: 1, max_new_tokens: 8, temperature: 0, "
ASKED += "out: {tokens: said, loss_mask: said_mask, group: asked}}, "  # apart from those of pairs
ASKED += "held_out: {op: reward.exact}"
PAIRS = f"pairs: {{op: data.pairs, files: [{PREFERENCES}/test.parquet], batch: all, template: plain}}"
OUT = "out: {tokens: example_tokens, loss_mask: example_mask}"
EXAMPLES = f"{{op: data.examples, files: [{FILES}/train.parquet], batch: 32, template: plain, {OUT}}}"
# where a graph has such a node or model: what fits answers of three digits
FITTING = {
    "nodes.values": ["models.critic.optimizer.lr=1e-3"],
    "models.teacher": [f"models.teacher.path={TEACHER}"],
    "models.math_teacher": [
        *(f"models.{name}_teacher.path={TEACHER}" for name in ("math", "rest")),
        f"prompts.files={{math: [{FILES}/train.parquet], rest: [{FILES}/train.parquet]}}",
    ],
    "models.reward": [f"models.reward.path={REWARD}"],
    "models.prm": [f"models.prm.path={REWARD}"],
    "nodes.examples": [f"examples={EXAMPLES}"],
    "nodes.overlong": ["overlong.buffer=2"],
    "nodes.formatted": ["formatted.pattern='[0-9]+'"],
    "nodes.steps": ["steps.end=''"],  # each token is a step
    "nodes.hinted": ["hinted.template=plain", "hinted.prompt='{hint} {question}'"],
    "nodes.asked": ["asked.template=plain", "asked.prompt='{question}{response}='"],
    "nodes.retry": ["retry.max_new_tokens=8"],
    "nodes.learnt": ["learnt.template=plain"],
    "nodes.verdicts": ["verdicts.max_new_tokens=1", "praised.pattern='1'", "prompts.tokenizer=policy"],
    "nodes.kept": ["prompts.batch=128"],  # each batch serves four iterations
}
PAGE = """\
# What the algorithms learn

Does an algorithm work here? Every shipped graph trains the demo's model, which SFT left mediocre at adding
two numbers of two digits, for {iterations} iterations of 32 questions x 8 samples at a learning rate of 2e-4
with linear decay; all else is as in the graph. Graphs that learn from given answers get 64 per iteration.
Accuracy is exact match on 500 held-out questions, greedy; `preferred` is the share of held-out pairs in which
the right answer gets the higher score.

A graph should gain {margin:.2f} with every seed ({seeds} each): {met} of {graphs} do. One run is uncertain by
0.02 (500 questions), and seeds differ by more, so don't rank algorithms by this table. `none`: a loss of
preferences promises no accuracy.

| graph | measure | before | after: mean | least | most | least gain | margin |
|---|---|---|---|---|---|---|---|
{table}
Not all start alike:

- `distill` learns from the model that the demo ends with, `mopd` from two of these, each for half of the
  questions, `rm_ppo` from a reward model that reads no answers (`benchmarks/reward_model.py`), and
  `process_rewards` from the same model, token by token.
- `sdft` and `sdpo` start from a model that was taught to read a hint (`benchmarks/hinted_model.py`), at a
  quarter of the rate.
- `calculator_tool`, `gagpo` and `echo` multiply with a calculator ([agents.md](agents.md)), for a sixth of
  the iterations, starting from the model of `calculator_sft`.
- `game` asks for even answers, which only its critic is told. `reward_model` has 180 iterations at 5e-4.

`python benchmarks/learning.py` makes this page from `benchmarks/results/learning.jsonl`, after adding missing
runs; run `make demo` first.
"""


@dataclass(frozen=True)
class Result:
    """One run: held-out accuracy before and after, of which graph (``digest``) by which version."""

    graph: str
    seed: int
    iterations: int
    before: float
    after: float
    digest: str
    rlgraph: str
    measure: str = "accuracy"

    @property
    def key(self) -> tuple[str, int, int]:
        """The run that it is of, whose results a newer run takes the place of."""
        return self.graph, self.seed, self.iterations

    @property
    def bound(self) -> bool:
        """Whether a graph promises that this rises."""
        return self.measure == "preferred" or "preference" not in nodes_of(self.graph)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--graphs", default=",".join(learnable()))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time, of one thread each")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "learning.jsonl")
    parser.add_argument("--page", type=Path, default=Path(__file__).parents[1] / "docs" / "learning.md")
    options = parser.parse_args()
    if not (START.is_dir() and TEACHER.is_dir()):
        sys.exit(f"there is no {START} or {TEACHER}: run `make demo` first, and this from the same folder")
    prepare({*options.graphs.split(",")})
    wanted = [(name, seed) for seed in range(options.seeds) for name in options.graphs.split(",")]
    done = read(options.results)
    with ThreadPoolExecutor(options.jobs) as pool:
        missing = [job for job in wanted if not known(done, *job, options.iterations)]
        for results in pool.map(lambda job: run(*job, options.iterations), missing):
            done = [*(one for one in done if one.key != results[0].key), *results]
            options.results.write_text("".join(json.dumps(asdict(one)) + "\n" for one in done))
            options.page.write_text(page(done, options.iterations), encoding="utf-8")
            for one in results:
                print(f"  {one.graph:<24} seed {one.seed}  {one.measure} {one.before:.3f} -> {one.after:.3f}")
            sys.stdout.flush()
    options.page.write_text(page(done, options.iterations), encoding="utf-8")


def prepare(graphs: set[str]) -> None:
    """Make the models that graphs start from, or read, where they are not there."""
    if graphs & {"rm_ppo", "process_rewards"} and not REWARD.is_dir():
        share = reward_model.make(TEACHER, START, FILES, REWARD)
        print(f"  {REWARD} tells {share:.3f} of held-out answers right from wrong")
    if any("preference" in nodes_of(name) for name in graphs) and not PREFERENCES.is_dir():
        preferences.make(START, FILES, PREFERENCES)
    if graphs & {"sdft", "sdpo"} and not (HINTED / "models").is_dir():
        hinted_model.make(START, FILES, HINTED)
    if graphs & {*TOOLS} and not (TAUGHT / "models").is_dir():
        demo_tools.make()
        command = [
            sys.executable,
            "-m",
            "rlgraph",
            "run",
            "calculator_sft",
            "--inline",
            "--run-dir",
            str(TAUGHT),
        ]
        subprocess.run(command, check=True, capture_output=True)


def learnable() -> list[str]:
    """The shipped graphs that train on answers to questions."""
    sampled = {
        name: nodes_of(name).get("rollout", {}).get("op", "rollout") == "rollout" for name in shipped_graphs()
    }
    return [name for name in sampled if name in TOOLS or (sampled[name] and name not in ELSEWHERE)]


def nodes_of(name: str) -> dict[str, Any]:
    """The nodes of a shipped graph."""
    return dict(compose(name).items["nodes"].plain())


def read(path: Path) -> list[Result]:
    """The runs that were made before."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return [Result(**json.loads(line)) for line in lines]


def known(done: Sequence[Result], name: str, seed: int, iterations: int) -> bool:
    """Whether this very run is among them."""
    digest = compile_graph(name, settings(name, seed, iterations), 1).digest
    return any((one.key, one.digest) == ((name, seed, iterations), digest) for one in done)


def run(name: str, seed: int, iterations: int) -> list[Result]:
    """Train in a process of its own; a result for each measure of its evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "rlgraph", "run", name, *settings(name, seed, iterations)]
        command += ["--inline", "--run-dir", str(run_dir)]
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        if done.returncode:
            sys.exit(f"{name}, seed {seed}, ended with {done.returncode}:\n{done.stderr[-2000:]}")
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        digest = json.loads((run_dir / "plan.json").read_text())["digest"]
    first, last = lines[0], lines[-1]
    measured = [(measure, f"eval/{measure}") for measure in MEASURES if f"eval/{measure}" in first]
    return [Result(name, seed, iterations, first[k], last[k], digest, VERSION, m) for m, k in measured]


def settings(name: str, seed: int, iterations: int) -> list[str]:
    """What puts a shipped graph on the demo's task: its nodes stay, but for the data and the reward."""
    length = f"schedule.iterations={round(iterations * LENGTHS.get(name, 1))}"
    if name in TOOLS:
        return [f"seed={seed}", length, "schedule.save_every=0"]
    graph = compose(name).plain()
    model = "policy" if "policy" in graph["models"] else "reward"
    start = HINTED / "models/policy" if "hinted" in graph["nodes"] else START
    found = [f"seed={seed}", f"models.{model}.path={start}", f"models.{model}.optimizer={OPTIMIZER}"]
    found += [length, "schedule.save_every=0"]
    found += [f"models.{model}.optimizer.lr={RATES[name]}"] if name in RATES else []
    if "prompts" not in graph["nodes"]:
        return [*found, *given(name, model)]
    found += sampled()
    for node, body in graph["nodes"].items():
        if name == "game" and node == "rewards":
            found += [
                f"rewards={EVEN}",
                f"models.critic.optimizer={OPTIMIZER}",
                f"eval.nodes.held_out={EVEN}",
            ]
        elif body["op"] == "reward.math":
            columns = f", in: {json.dumps(body['in'])}" if body.get("in") else ""
            found.append(f"{node}={{op: reward.exact{columns}}}")
    for place, fitting in FITTING.items():
        section, _, part = place.partition(".")
        own = graph[section].get(part)
        has_path = (
            "path=" in fitting[0] and own and own["path"] != "???"
        )  # as the teacher that follows the policy
        found += fitting if own and not has_path else []
    return found


def sampled() -> list[str]:
    """The data of graphs that sample answers, and their evaluation."""
    return [f"prompts={PROMPTS}", "rollout.n=8", "rollout.max_new_tokens=8", f"eval={EVAL}"]


def given(name: str, model: str) -> list[str]:
    """The data of graphs that learn from given answers, and their evaluation."""
    source = "pairs" if "pairs" in nodes_of(name) else "examples"
    file = {"pairs": PREFERENCES / "train.parquet", "kto": PREFERENCES / "labelled.parquet"}
    files = file.get(name, file.get(source, FILES / "train.parquet"))
    nodes, report = ([ASKED], ["accuracy: held_out"]) if model == "policy" else ([], [])
    if "preference" in nodes_of(name):
        nodes, report = [*nodes, PAIRS], [*report, "preferred: preferred"]
        nodes += ["preference: {op: preference.dpo}"] if name == "kto" else []
    evaluated = f"{{nodes: {{{', '.join(nodes)}}}, report: {{{', '.join(report)}}}}}"
    rows = [f"{source}.files=[{files}]", f"{source}.batch=64", f"{source}.template=plain"]
    return [*rows, f"eval={evaluated}"]


def page(done: Sequence[Result], iterations: int) -> str:
    """docs/learning.md."""
    rows: dict[tuple[str, str], list[Result]] = {}
    for one in done:
        if one.iterations == iterations:
            rows.setdefault((one.graph, one.measure), []).append(one)
    bound = [runs for runs in rows.values() if runs[0].bound]
    met = sum(least(runs) >= MARGIN for runs in bound)
    table = "".join(row(*key, rows[key]) for key in sorted(rows))
    seeds = " or ".join(str(count) for count in sorted({len(runs) for runs in rows.values()}))
    return PAGE.format(
        margin=MARGIN, iterations=iterations, seeds=seeds, met=met, graphs=len(bound), table=table
    )


def row(name: str, measure: str, runs: Sequence[Result]) -> str:
    after = [one.after for one in runs]
    seen = f"{runs[0].before:.3f} | {sum(after) / len(after):.3f} | {min(after):.3f} | {max(after):.3f}"
    verdict = "met" if least(runs) >= MARGIN else "**missed**" if runs[0].bound else "none"
    return f"| `{name}` | {measure} | {seen} | {least(runs):+.3f} | {verdict} |\n"


def least(runs: Sequence[Result]) -> float:
    """The gain of the seed that gains least."""
    return min(one.after - one.before for one in runs)


if __name__ == "__main__":
    main()
