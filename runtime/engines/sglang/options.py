"""Checks settings of SGLang's own against the installed SGLang.

    python -m rlgraph.runtime.engines.sglang.options <<< '{"attention_backend": "fa3"}'

prints what is wrong with each as JSON. It is asked in a process of its own: SGLang's modules change what they
are imported into. Settings may hold keys, and any user can read a command line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from rlgraph.errors import RunError, nearest, shortened
from rlgraph.runtime.engines.model_files import ModelFiles


def words(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as a command line: true is a flag, false a flag that is left out.

    Example:
        >>> words({"tp_size": 2, "enable_memory_saver": True, "disable_radix_cache": False})
        ['--tp-size', '2', '--enable-memory-saver']
    """
    line = []
    for name, value in settings.items():
        if value is False:
            continue
        line.append(f"--{name.replace('_', '-')}")
        if isinstance(value, list):
            line += map(str, value)
        elif value is not True:
            line.append(str(value))
    return line


def options_of(files: ModelFiles) -> dict[str, str | bool]:
    """Return what SGLang is told of a model's files, beside where they are."""
    options: dict[str, str | bool] = {}
    if files.changed:
        options["json_model_override_args"] = json.dumps(files.resolved())
    if files.trusted:
        options["trust_remote_code"] = True
    return options


def tokenizer_option(files: ModelFiles, tokenizer: Any, logs: Path) -> dict[str, str]:
    """Return where SGLang finds a model's tokenizer, where it would read another out of the model's folder.

    It looks for stop texts with it. Like transformers it takes the class of the model's type, whatever the
    files say (0.5.23); in a folder without a configuration it takes the files.
    """
    if files.is_read_by_class(tokenizer):
        return {}
    logs.mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="tokenizer-", dir=logs.absolute())
    tokenizer.save_pretrained(folder)
    return {"tokenizer_path": folder}


def wrong(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the problems that the installed SGLang finds with settings, by their names.

    Raises:
        RunError: it can't be asked.
    """
    command = [sys.executable, "-m", __name__]
    settings_text = json.dumps(dict(settings))
    checked = subprocess.run(command, input=settings_text, capture_output=True, text=True, check=False)
    if checked.returncode:
        raise RunError(
            f"SGLang can't be imported to check serve.sglang.options:\n{shortened(checked.stderr.rstrip())}"
        )
    problems: dict[str, str] = json.loads(checked.stdout.splitlines()[-1])
    return problems


class _Parser(argparse.ArgumentParser):
    """SGLang's command line, which reports problems in place of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _wrong(parser: argparse.ArgumentParser, name: str, value: Any) -> str:
    """Return the problem with one setting, or nothing."""
    known = {option.removeprefix("--").replace("-", "_") for option in parser._option_string_actions}
    if name not in known:
        return f"SGLang has no such setting; {nearest(name, known) or 'see sglang.launch_server --help'}"
    try:
        parser.parse_args(["--model-path", "any", *words({name: value})])
    except ValueError as error:
        return str(error)
    return ""


def main(settings: Mapping[str, Any]) -> None:
    """Print the problems with settings."""
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    problems = {name: _wrong(parser, name, value) for name, value in settings.items()}
    print(json.dumps({name: law for name, law in problems.items() if law}))


if __name__ == "__main__":
    main(json.load(sys.stdin))
