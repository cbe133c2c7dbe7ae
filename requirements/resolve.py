"""Resolve what `pip install 'rlgraph-compiler[sglang]'` installs, for Python 3.11 and 3.12.

    python requirements/resolve.py           # write sglang-py311.txt and sglang-py312.txt anew
    python requirements/resolve.py --check   # exit 1 where a file is no longer a solution of pyproject.toml

uv reads the metadata of packages alone: nothing is installed or built, and some 50 MB are fetched. A check
resolves again with the versions of the file as constraints, so newer releases do not fail it. Where no
package registry can be reached, the check says so and passes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent
PROJECT = FOLDER.parent / "pyproject.toml"
VERSIONS = ("3.11", "3.12")
PLATFORM = "x86_64-manylinux_2_34"  # the oldest that SGLang 0.5.23 has wheels for
HEADER = """\
# What rlgraph-compiler[sglang] resolves to on Linux x86-64 (glibc 2.34 or newer), Python {version}, CUDA 13.
# Made by `make lock`, checked by `make lock-check`.
"""
UNREACHABLE = ("error sending request", "failed to fetch", "dns error", "timed out")


class ResolveError(Exception):
    """uv found no solution; the message is its own."""


class OfflineError(Exception):
    """No package registry answers."""


def file_of(version: str) -> Path:
    """The file of a Python version, as ``sglang-py312.txt``."""
    return FOLDER / f"sglang-py{version.replace('.', '')}.txt"


def resolved(version: str, constraints: Path | None) -> str:
    """The set for a Python version, one ``name==version`` per line, as the text of its file.

    Raises:
        ResolveError: there is no such set.
        OfflineError: no package registry answers.
    """
    command = [sys.executable, "-m", "uv", "pip", "compile", str(PROJECT), "--extra", "sglang", "--quiet"]
    command += ["--python-version", version, "--python-platform", PLATFORM, "--only-binary", ":all:"]
    command += ["--no-header", "--no-annotate"]
    command += ["--constraints", str(constraints)] if constraints else ["--upgrade"]
    environment = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == 0:
        return HEADER.format(version=version) + done.stdout
    if any(sign in done.stderr.lower() for sign in UNREACHABLE):
        raise OfflineError
    raise ResolveError(done.stderr.strip())


def check(version: str) -> str:
    """What is wrong with the file of a Python version, or nothing."""
    path = file_of(version)
    try:
        text = resolved(version, path)
    except ResolveError as error:
        return f"{path.name} is no solution of pyproject.toml any more:\n{error}"
    if text == path.read_text(encoding="utf-8"):
        return ""
    differing = set(text.splitlines()) ^ set(path.read_text(encoding="utf-8").splitlines())
    return f"{path.name} differs from what it resolves to: {', '.join(sorted(differing))}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file is wrong")
    checking = parser.parse_args().check
    if find_spec("uv") is None:
        print("uv is not installed: pip install -e '.[dev]'", file=sys.stderr)
        return 1
    try:
        if not checking:
            for version in VERSIONS:
                file_of(version).write_text(resolved(version, None), encoding="utf-8")
            return 0
        problems = [problem for version in VERSIONS if (problem := check(version))]
    except OfflineError:
        print("requirements: not checked, no package registry can be reached", file=sys.stderr)
        return 0 if checking else 1
    except ResolveError as error:
        problems = [str(error)]
    print(
        "\n".join(problems) + "\n  mend pyproject.toml, or resolve anew: make lock"
        if problems
        else "requirements: ok"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
