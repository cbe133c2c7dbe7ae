"""Do SGLang servers draw tokens all through a sync? A streamed run, tokens over time, and a picture.

    PYTHONPATH=$PWD/runtime/engines/sglang/cpu .sglang/bin/python benchmarks/sync_throughput.py [--servers 2]

GRPO of a random model; replies of the servers are streamed token by token, and noted as they come. A sync is
looked at from when its weights begin to arrive until half a second after they are there; all other times are
the rest. The first sync is left out, before which nothing runs, and so is all behind the last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import sglang

from rlgraph.runtime.demo import make, make_tokenizer, model_config, write_model
from rlgraph.runtime.run import run_graph

GRAPH = Path(__file__).parent / "sync_throughput.yaml"
BEHIND = 0.5  # seconds behind a sync that are looked at
WIDE, HIGH = 900, 220  # of the picture, in pixels
Line = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=128, help="the model's width; of 8 layers")
    parser.add_argument("--bin", type=float, default=0.1, help="seconds")
    parser.add_argument("--notes", type=Path, help="a file for what was noted, as JSON")
    parser.add_argument("--svg", type=Path, help="a file for the picture")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = measure(Path(folder), given.servers, given.iterations, given.hidden)
    if given.notes:
        given.notes.write_text(json.dumps(lines), encoding="utf-8")
    course = Course(lines, given.bin)
    print(course.text(), flush=True)
    if given.svg:
        given.svg.write_text(course.picture(), encoding="utf-8")


def measure(folder: Path, servers: int, iterations: int, hidden: int) -> list[Line]:
    """Return what the workers that generate noted: tokens, and syncs."""
    make(folder / "files")
    config = model_config(tokenizer := make_tokenizer())
    config.update({"hidden_size": hidden, "intermediate_size": 4 * hidden, "max_position_embeddings": 1024})
    config.update({"num_hidden_layers": 8, "layer_types": ["full_attention"] * 8})
    write_model(folder / "model", config, tokenizer, 0)
    size = (folder / "model/model.safetensors").stat().st_size
    print(f"sglang {sglang.__version__}: {servers} servers, {size / 2**20:.0f} MiB of weights in float32")
    (notes := folder / "notes").mkdir()
    settings = [f"models.policy.path={folder}/model", f"pools.gen.devices={servers}"]
    settings += [f"prompts.files=[{folder}/files/train.parquet]", f"schedule.iterations={iterations}"]
    run_graph(str(GRAPH), [*settings, f"eval.nodes.watched.folder={notes}"], run_dir=folder / "run")
    return [json.loads(line) for file in notes.iterdir() for line in file.read_text().splitlines()]


class Course:
    """Tokens over time: in bins of some seconds, between the first sync and the last."""

    def __init__(self, lines: list[Line], width: float) -> None:
        syncs: dict[int, list[Line]] = {}
        for line in lines:
            syncs.setdefault(line.get("sync", -1), []).append(line)
        self.drawn = sorted((line["at"], line["server"], line["tokens"]) for line in syncs.pop(-1))
        times = [
            tuple(choose(line[key] for line in own) for choose, key in MOMENTS) for own in syncs.values()
        ]
        first, *self.syncs = sorted(times)
        self.start, self.end, self.width = first[-1] + BEHIND, self.syncs[-1][-1] + BEHIND, width
        self.bins: Counter[int] = Counter()
        for at, _, tokens in self.drawn:
            self.bins[self.bin(at)] += tokens
        self.near = {n for a, _, z in self.syncs for n in range(self.bin(a), self.bin(z + BEHIND))}

    def bin(self, at: float) -> int:
        return int((at - self.start) / self.width)

    def rates(self, near: bool) -> list[float]:
        """Return the tokens per second of the bins that are near a sync, or of the rest."""
        return [self.bins[n] / self.width for n in range(self.bin(self.end)) if (n in self.near) == near]

    def text(self) -> str:
        near, rest = self.rates(True), statistics.median(self.rates(False))
        arrival = statistics.median(there - begun for begun, there, _ in self.syncs)
        taking = statistics.median(end - there for _, there, end in self.syncs)
        meanwhile = [sum(n for at, _, n in self.drawn if a < at < z) for a, _, z in self.syncs]
        servers = {server for _, server, _ in self.drawn}
        alone = [max(self.gaps({server})) for server in sorted(servers)]
        return (
            f"{len(self.syncs)} syncs: weights arrive in {arrival:.2f} s, and are taken in {taking:.2f} s\n"
            f"tokens drawn from begin to end of a sync: median {statistics.median(meanwhile):.0f}, "
            f"least {min(meanwhile)}\n"
            f"longest time without a token: {max(self.gaps(servers)):.2f} s of all servers, "
            f"{', '.join(f'{gap:.2f}' for gap in alone)} s of each\n"
            f"bins of {self.width:g} s, tokens per second: median {rest:.0f} away from syncs; "
            f"near them median {statistics.median(near):.0f}, least {min(near):.0f} "
            f"({min(near) / max(rest, 1):.0%}), {near.count(0)} of {len(near)} without a token"
        )

    def gaps(self, servers: set[str]) -> list[float]:
        """Return the times between tokens of some servers that overlap a sync."""
        times = [at for at, server, _ in self.drawn if server in servers and self.start < at < self.end]
        near = [(a, z + BEHIND) for a, _, z in self.syncs]
        return [b - a for a, b in pairwise(times) if any(a < end and b > begin for begin, end in near)]

    def picture(self) -> str:
        """Return the tokens per second as an SVG, with a bar from a sync's begin to its end."""
        most = max(self.bins.values())
        across = WIDE / (self.end - self.start)
        shapes = []
        for begun, there, end in self.syncs:
            for a, z, colour in ((begun, there, "#cfe3f7"), (there, end, "#f2b8a0")):
                at, wide = (a - self.start) * across, max(1.0, (z - a) * across)
                shapes.append(f'<rect x="{at:.1f}" width="{wide:.1f}" height="{HIGH}" fill="{colour}"/>')
        for number in range(self.bin(self.end)):
            high = self.bins[number] / most * (HIGH - 20)
            at, wide = number * self.width * across, self.width * across
            place = f'x="{at:.2f}" y="{HIGH - high:.1f}" width="{wide:.2f}" height="{high:.1f}"'
            shapes.append(f'<rect {place} fill="#3b6ea5"/>')
        words = f"tokens per second in bins of {self.width:g} s, at most {most / self.width:.0f}; over "
        words += f"{self.end - self.start:.0f} s. Light: weights arrive. Red: servers take them."
        text = f'<text x="4" y="{HIGH + 16}" font-family="sans-serif" font-size="12">{words}</text>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH + 24}">'
        back = f'<rect width="{WIDE}" height="{HIGH + 24}" fill="white"/>'
        return "\n".join([head, back, *shapes, text, "</svg>", ""])


MOMENTS = ((min, "begun"), (max, "arrived"), (max, "ended"))

if __name__ == "__main__":
    main()
