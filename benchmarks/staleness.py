"""What rows of older weights cost and save, and what corrections give back: the demo's task, streamed.

    python benchmarks/staleness.py [--iterations 100] [--seeds 3] [--rates 2e-4,1e-4] [--inline] [DIR]

Each run sees as many samples. The model is the one that SFT leaves in `make demo`. In a DIR runs are kept,
and those that are done are not repeated. Two pools of a core each; with `--inline` all is in one process,
which says nothing of time, and rows are a little younger. `--picture FILE.svg` draws the accuracy over
iterations.

    ratio      ppo_clip, its ratio to the log-probs that tokens were drawn with
    decoupled  decoupled_ppo: clipped around the weights that an update starts from, weights of at most 2
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rlgraph.runtime.demo import make
from rlgraph.runtime.run import run_graph

SPLIT = "pools={train: {devices: 1}, gen: {devices: 1}}"
START = Path("runs/demo_sft/models/policy")
CORRECTIONS = {
    "ratio": "update_policy.in.old_logprobs=rollout_logprobs",
    "decoupled": "update_policy.loss={kind: decoupled_ppo, clip: 0.2, cap: 2.0}",
}
CASES = [(None, "ratio"), *product((1, 4), CORRECTIONS)]  # of staleness, None of a run that takes turns
EVERY, LAST = 20, 20  # iterations: between evaluations; whose rewards count
COLOURS = {None: "#444", 1: "#2a78b5", 4: "#c8442d"}
DASHES = {"ratio": "5 4", "decoupled": ""}
WIDTH, HEIGHT, LEFT, TOP = 560, 320, 48, 16  # of the picture; the place of its axes


@dataclass(frozen=True)
class Case:
    """The runs of one staleness, correction and learning rate, a seed each: evaluations, and the rest."""

    staleness: int | None
    correction: str
    rate: str
    curves: list[dict[int, float]]  # iteration -> accuracy
    rewards: list[float]
    seconds: float
    age: float
    drift: float | None  # nats per token between the weights that drew and those of the update

    @property
    def name(self) -> str:
        return "synchronous" if self.staleness is None else f"stream {self.staleness}, {self.correction}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="by default one that is not kept")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", default="1e-4")
    parser.add_argument("--inline", action="store_true", help="in one process")
    parser.add_argument("--read", action="store_true", help="only what is done")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    with nullcontext(options.folder) if options.folder else tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder))


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Train what is not done yet, in a folder, and print the table."""
    picture = options.picture and options.picture.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    make("demo_files")
    if not START.exists():
        run_graph("demo_sft", [], run_dir=Path("runs/demo_sft"), inline=True)
    rates = options.rates.split(",")
    for seed, rate, case in product(range(options.seeds), rates, CASES):
        if not options.read:
            train(*case, rate, seed, options.iterations, options.inline)
    cases = [found for rate, case in product(rates, CASES) if (found := measured(*case, rate))]
    print(table(cases, options.inline))
    if picture:
        picture.write_text(drawn(cases, options.iterations))


def folder_of(staleness: int | None, correction: str, rate: str) -> str:
    return f"{'synchronous' if staleness is None else f'stream{staleness}-{correction}'}-{rate}"


def train(
    staleness: int | None, correction: str, rate: str, seed: int, iterations: int, inline: bool
) -> None:
    """Train one seed, unless that is done."""
    run = Path(f"{folder_of(staleness, correction, rate)}-{seed}")
    if (run / "models").exists():
        return
    stream = "" if staleness is None else f"buffer: {{staleness: {staleness}}}, "
    schedule = f"schedule={{{stream}iterations: {iterations}, save_every: 0}}"
    optimizer = f"models.policy.optimizer.lr={rate}"
    own = [f"models.policy.path={START}", optimizer, f"seed={seed}", f"eval.every={EVERY}"]
    resume = (run / "plan.json").exists()
    settings = [SPLIT, CORRECTIONS[correction], schedule, *own]
    run_graph("demo", settings, run_dir=run, inline=inline, resume=resume)


def measured(staleness: int | None, correction: str, rate: str) -> Case | None:
    """Return what the seeds that are done have come to; None of none."""
    runs = sorted(Path().glob(f"{folder_of(staleness, correction, rate)}-?"))
    lines = [metrics(run) for run in runs if (run / "models").exists()]
    if not lines:
        return None
    curves = [
        {line["step"]: line["eval/accuracy"] for line in run if "eval/accuracy" in line} for run in lines
    ]
    rewards = [statistics.mean(every(run[-LAST:], "reward/mean")) for run in lines]
    steps = [line for run in lines for line in run if "time/step" in line]
    drift = every(steps, "update_policy/rollout_kl" if correction == "decoupled" else "update_policy/kl_old")
    seconds, ages = every(steps, "time/step"), every(steps, "finished/age") or [0.0]
    apart = statistics.mean(drift) if staleness is not None else None
    return Case(
        staleness, correction, rate, curves, rewards, statistics.median(seconds), statistics.mean(ages), apart
    )


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def every(lines: Sequence[dict[str, float]], name: str) -> list[float]:
    return [line[name] for line in lines if name in line]


def table(cases: Sequence[Case], inline: bool) -> str:
    """Return the cases as a table in Markdown."""
    lines = [f"| rate | | accuracy after the last | reward of the last {LAST} | nats apart | age | seconds |"]
    lines.append("|---|---|---|---|---|---|---|")
    for case in cases:
        last = [curve[max(curve)] for curve in case.curves]
        cells = [case.rate, case.name, spread(last), spread(case.rewards)]
        cells += ["" if case.drift is None else f"{case.drift:.2f}", f"{case.age:.2f}"]
        lines.append(f"| {' | '.join([*cells, '' if inline else f'{case.seconds:.3f}'])} |")
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.3f} ({', '.join(f'{value:.3f}' for value in sorted(values))})"


def drawn(cases: Sequence[Case], iterations: int) -> str:
    """Return an SVG of the mean accuracy over iterations, a panel for each rate."""
    rates = list(dict.fromkeys(case.rate for case in cases))
    size = f'width="{WIDTH * len(rates)}" height="{HEIGHT}"'
    body = [f'<rect {size} fill="white"/>']
    for panel, rate in enumerate(rates):
        body += axes(panel, rate, iterations)
        for number, case in enumerate(case for case in cases if case.rate == rate):
            points = [
                (step, statistics.mean(curve[step] for curve in case.curves)) for step in case.curves[0]
            ]
            at = " ".join("{:.1f},{:.1f}".format(*place(panel, x / iterations, y)) for x, y in points)
            look = f'stroke="{COLOURS[case.staleness]}" stroke-dasharray="{DASHES[case.correction]}"'
            look = look if case.staleness else f'stroke="{COLOURS[None]}"'
            body.append(f'<polyline points="{at}" fill="none" stroke-width="2" {look}/>')
            x, y = place(panel, 0.5, 0.32 - 0.045 * number)
            body.append(f'<path d="M{x:.0f} {y - 4:.0f}h34" stroke-width="2" {look}/>')
            seeds = f"{len(case.curves)} seed{'s' * (len(case.curves) > 1)}"
            body.append(f'<text x="{x + 42:.0f}" y="{y:.0f}">{case.name} ({seeds})</text>')
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(body) + "\n</svg>\n"


def axes(panel: int, rate: str, iterations: int) -> list[str]:
    """Return the ticks and the title of a panel."""
    lines = []
    for tenth in range(1, 9):
        (left, y), (right, _) = place(panel, 0, tenth / 10), place(panel, 1, tenth / 10)
        lines.append(f'<path d="M{left:.0f} {y:.0f}H{right:.0f}" stroke="#ddd"/>')
        lines.append(f'<text x="{left - 8:.0f}" y="{y + 4:.0f}" text-anchor="end">0.{tenth}</text>')
    for fifth in range(6):
        x, y = place(panel, fifth / 5, 0.1)
        text = f"{iterations * fifth // 5}"
        lines.append(f'<text x="{x:.0f}" y="{y + 18:.0f}" text-anchor="middle">{text}</text>')
    x, y = place(panel, 0.5, 0.84)
    title = f"accuracy over iterations, learning rate {rate}"
    return [*lines, f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="middle">{title}</text>']


def place(panel: int, share: float, accuracy: float) -> tuple[float, float]:
    """Return where a point is: a share of the iterations, and an accuracy between 0.1 and 0.85."""
    across, down = WIDTH - LEFT - 24, HEIGHT - TOP - 36
    return panel * WIDTH + LEFT + share * across, TOP + down * (0.85 - accuracy) / 0.75


if __name__ == "__main__":
    main()
