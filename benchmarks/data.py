"""How soon, and in how much memory, do a million rows begin? data.prompts against datasets.map.

    python benchmarks/data.py [--rows 1000000] [--small 100000] [--read]

Rows are questions of 4 to 12 words in a parquet file, put through a chat template and a byte-level BPE of
4,096 tokens that is trained here. Each measurement is a process of its own: the first start, which tokenises
and writes the cache, and the next, which maps it; each takes a batch of 1,024 rows. Few rows and many show
how memory grows. ``datasets`` (where it is installed) maps the same rows by the same template and tokenizer
with ``batched=True``, in as many processes as there are cores, whose memory is not seen, with its own cache.

``--read`` has each kind of file read alone, every row as Python objects, by ``read_rows`` and by
``datasets``: as a stream and by its cache. Behind each measurement stands its ratio to rlgraph's.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BATCH = 1024
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--small", type=int, default=100_000)
    parser.add_argument("--read", action="store_true", help="reading alone, of each kind of file")
    parser.add_argument(
        "--side", nargs=2, metavar=("NAME", "FOLDER"), help="one measurement, in this process"
    )
    options = parser.parse_args()
    if options.side:
        measure(options.side[0], Path(options.side[1]))
        return
    print(f"{len(os.sched_getaffinity(0))} cores; load {os.getloadavg()[0]:.1f}")
    for rows in (options.small, options.rows):
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder), rows)
            if options.read:
                write_kinds(Path(folder))
            base: dict[str, float] = {}
            for side in READINGS if options.read else SIDES:
                if side.startswith("datasets") and not find_spec("datasets"):
                    print(f"{rows:>9,} rows  {side:<24} not installed")
                    continue
                said = subprocess.run(
                    [sys.executable, __file__, "--side", side, folder],
                    env={**os.environ, "RLGRAPH_CACHE": f"{folder}/cache", "HF_HOME": f"{folder}/hf"},
                    check=True,
                    stdout=subprocess.PIPE,
                )
                seconds, spent, mib, kept, tokens = json.loads(said.stdout.splitlines()[-1])
                unit = "letters" if options.read else "tokens"
                rate = f"{rows / seconds:>10,.0f} rows/s  {tokens:>6.1f} {unit} per row"
                what = side.partition(", ")[2]
                ratio = seconds / base.setdefault(what, seconds)
                print(
                    f"{rows:>9,} rows  {side:<24} {seconds:>8.2f} s ({spent:>6.1f} of cores)  "
                    f"{mib:>4,.0f} MiB more at its peak, {kept:>4,.0f} of its own at the end  {rate}  "
                    f"{ratio:>5.2f} x",
                    flush=True,
                )


def make(folder: Path, rows: int) -> None:
    """Write the rows, a part at a time, and train a tokenizer on some."""
    import pyarrow
    import pyarrow.parquet
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlucmfwyp", k=draw.randint(2, 9))) for _ in range(5000)]

    def part(count: int) -> dict[str, list[str]]:
        texts = [" ".join(draw.choices(words, k=draw.randint(4, 12))) for _ in range(count)]
        return {"question": texts, "answer": [str(draw.randint(0, 999)) for _ in texts]}

    schema = pyarrow.schema({"question": pyarrow.string(), "answer": pyarrow.string()})
    with pyarrow.parquet.ParquetWriter(folder / "rows.parquet", schema) as writer:
        for begin in range(0, rows, 20_000):
            writer.write_table(pyarrow.table(part(min(20_000, rows - begin)), schema))
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(part(2000)["question"], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", chat_template=TEMPLATE)
    made.save_pretrained(folder / "tokenizer")


def measure(side: str, folder: Path) -> None:
    """Print seconds, those that cores computed, the MiB that the process grew by, at its peak and at the end
    without mapped files, and the mean tokens of a batch's rows."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    import torch  # noqa: F401 - what both have loaded anyway is not counted

    import rlgraph.nodes.data.prompts  # noqa: F401

    before, held, spent, start = peak(), own(), computed(), time.perf_counter()
    lengths = (SIDES | READINGS)[side](tokenizer, str(folder / "rows.parquet"))
    seconds = time.perf_counter() - start
    spent, mib = computed() - spent, [peak() - before, own() - held]
    print(json.dumps([seconds, spent, *mib, sum(lengths) / len(lengths)]))


def computed() -> float:
    """Return the seconds that cores have computed for this process and those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def own() -> float:
    """Return the memory that this process holds without mapped files, in MiB."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line]
    return int(line.split()[1]) / 1024


def peak() -> float:
    """Return the most memory that this process has held, in MiB, mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ours(tokenizer: Any, file: str) -> list[int]:
    from rlgraph.nodes.data.prompts import prompts
    from rlgraph.nodes.data.source import SourceAttributes
    from rlgraph.ops import Context

    source = SourceAttributes(files=[file], batch=BATCH)
    out = prompts(tokenizer, Context("prompts", 0, 0), source=source, max_prompt_tokens=512)
    return list(map(int, out.prompt.lengths))


def theirs(tokenizer: Any, file: str) -> list[int]:
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()

    def tokenised(rows: dict[str, list[str]]) -> dict[str, Any]:
        talks = [[{"role": "user", "content": question}] for question in rows["question"]]
        texts = tokenizer.apply_chat_template(talks, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        return {"ids": ids, "length": [len(one) for one in ids]}

    data = load_dataset("parquet", data_files=file, split="train")
    processes = len(os.sched_getaffinity(0))
    data = data.map(tokenised, batched=True, num_proc=processes if processes > 1 else None)
    data = data.filter(lambda lengths: [n <= 512 for n in lengths], input_columns=["length"], batched=True)
    return [len(ids) for ids in data.shuffle(seed=0)[:BATCH]["ids"]]


def write_kinds(folder: Path) -> None:
    """Write the rows as every other kind of file."""
    import pyarrow.parquet
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    table = pyarrow.parquet.read_table(folder / "rows.parquet")
    Dataset(table).save_to_disk(folder / "rows.saved")
    rows = table.to_pylist()
    with (folder / "rows.jsonl").open("w") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
    with (folder / "rows.csv").open("w", newline="") as cells:
        writer = csv.DictWriter(cells, ["question", "answer"])
        writer.writeheader()
        writer.writerows(rows)


def read_by_rlgraph(kind: str, file: str) -> list[int]:
    from rlgraph.nodes.support.data_file import read_rows

    name = str(Path(file).with_suffix(f".{kind}"))
    return [len(row["question"]) for _, row in read_rows(name, ["question", "answer"])]


def read_by_datasets(kind: str, streams: bool, file: str) -> list[int]:
    from datasets import disable_progress_bars, load_dataset, load_from_disk

    disable_progress_bars()
    name = str(Path(file).with_suffix(f".{kind}"))
    if kind == "saved":
        data = load_from_disk(name)
    else:
        module = "json" if kind == "jsonl" else kind
        data = load_dataset(module, data_files=name, split="train", streaming=streams)
    return [len(question) for batch in data.iter(BATCH) for question in batch["question"]]


def _readings() -> dict[str, Callable[[Any, str], list[int]]]:
    readings: dict[str, Callable[[Any, str], list[int]]] = {}
    for kind in ("parquet", "saved", "jsonl", "csv"):
        readings[f"rlgraph, {kind}"] = lambda _, file, kind=kind: read_by_rlgraph(kind, file)
        for streams in (True,) if kind == "saved" else (True, False):
            name = "datasets stream" if streams else "datasets cache"
            readings[f"{name}, {kind}"] = lambda _, file, kind=kind, streams=streams: read_by_datasets(
                kind, streams, file
            )
    return readings


READINGS = _readings()
SIDES: dict[str, Callable[[Any, str], list[int]]] = {
    "rlgraph, first start": ours,
    "rlgraph, next start": ours,
    "datasets.map, first start": theirs,
    "datasets.map, next start": theirs,
}

if __name__ == "__main__":
    main()
