"""Which launch scripts and configurations of other systems become graphs that check and plan?

    python benchmarks/import_scripts.py FOLDER [--system verl] [--reasons] [--json FILE]

FOLDER is a checkout that the user has: verl's, TRL's, or one's own scripts. It is copied, and each `*.sh` of the
copy runs under bash, where every command but a few harmless ones only records its words: without a network, on a
file system that is read-only outside of the copy, for a few seconds. Of the words recorded, each system's entry in
``SYSTEMS`` takes those that start one of its trainers. They are given to `rlgraph import`, and the graph to
`rlgraph check --no-code` and `rlgraph plan`, on as many H100s as it has devices.

A model at a local path, which is not here, is planned as the model on the hub that its last name is of. The result
of a command is one of ``CLASSES``; the table counts them per trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml
from click.testing import CliRunner

from rlgraph.cli.main import main as rlgraph
from rlgraph.costs.model_size import known_models

CLASSES = ("plans", "refused by plan", "refused by check", "refused by import", "fails", "hangs")
ALLOWED = (
    "awk basename cat cut date dirname expr grep head hostname id ls nproc printf readlink realpath sed seq "
    "sort tail tr true uname uniq wc whoami"
)
ARGUMENTS = (
    (),
    ("8", "save"),
)  # given to a script; the second where it wants some and starts nothing without
SCRIPT_SECONDS, IMPORT_SECONDS = 10, 20

# Bash reads this file before a script. What is not found in PATH is recorded; a program given to Python as text
# fails, as one does that asks whether a package is installed.
PRELUDE = """
record() { printf '%s\\0' "$@" > "$RECORDS/$BASHPID-$RANDOM-$RANDOM"; }
command_not_found_handle() {
    record "$@"
    case "$1 $2" in python*" -c") return 1 ;; esac
    return 0
}
export -f record command_not_found_handle
"""
SANDBOX = 'mount --bind "$BOX" "$BOX" && mount -o remount,bind,ro / && cd "$WHERE" && exec timeout -k 1 '


@dataclass(frozen=True)
class Command:
    """A trainer that a script starts, and what `rlgraph import` is given for it."""

    system: str
    trainer: str
    source: str
    arguments: Sequence[str]


@dataclass(frozen=True)
class System:
    """How commands of a system are recognised.

    ``of_words`` yields commands of the words of one recorded command; ``of_file`` those that a configuration
    stands for by itself. Both are given the root of the checkout, and the script or the configuration.
    """

    of_words: Callable[[Path, Path, Sequence[str]], Iterator[Command]]
    of_file: Callable[[Path, Path], Iterator[Command]]


@dataclass(frozen=True)
class Outcome:
    """What became of a command, and why."""

    command: Command
    result: str
    reason: str = ""


# verl: python3 -m verl.trainer.main_ppo [--config-path P] [--config-name N] key=value ...
VERL_MODULES = re.compile(r"(^|[./])(main_\w+|sft_trainer\w*|fsdp_sft_trainer|fully_async_main|\w*main\w*)$")
VERL_ROOTS = ("verl", "recipe")
VERL_CONFIGS = re.compile(r"(^|/)config(s)?/[^/]+\.yaml$")


def verl_words(root: Path, script: Path, words: Sequence[str]) -> Iterator[Command]:
    """Yield the trainer that `-m MODULE` names, with what is behind it."""
    for place, word in enumerate(words[:-1]):
        module = words[place + 1]
        if word == "-m" and module.split(".")[0] in VERL_ROOTS and VERL_MODULES.search(module):
            rest = words[place + 2 :]
        elif word.endswith(".py") and "main" in Path(word).stem and any("=" in w for w in words[place + 1 :]):
            module, rest = word, words[place + 1 :]
        else:
            continue
        file, rest = _verl_file(root, script, module, rest)
        yield Command("verl", module, str(script.relative_to(root)), [*file, *rest])
        return


def _verl_file(
    root: Path, script: Path, module: str, words: Sequence[str]
) -> tuple[list[str], Sequence[str]]:
    """Return the configuration that `--config-name` means, where it is one of the checkout, and other words."""
    text = " ".join(words)
    name = re.search(r"--config-name[= ](\S+)", text)
    if name is None:
        return [], words
    found = sorted(root.rglob(f"{name[1].removesuffix('.yaml')}.yaml"))
    near = Path(*module.split(".")[:-1])
    found.sort(key=lambda path: (near not in path.parents, len(os.path.relpath(path, script.parent))))
    return [str(found[0])] if found else [], words


def verl_file(root: Path, file: Path) -> Iterator[Command]:
    """Yield a configuration of a trainer: one with an actor, or with a model and an optimizer."""
    try:
        content = yaml.safe_load(file.read_text(errors="replace"))
    except yaml.YAMLError:
        return
    if isinstance(content, dict) and "actor_rollout_ref" in content and VERL_CONFIGS.search(str(file)):
        yield Command("verl", "a YAML file", str(file.relative_to(root)), [str(file)])


# TRL: accelerate launch script.py --flags, trl grpo --flags
TRL_TRAINERS = ("grpo", "rloo", "dpo", "sft", "kto", "reward", "distillation")


def trl_words(root: Path, script: Path, words: Sequence[str]) -> Iterator[Command]:
    """Yield `trl TRAINER`, or a script of Python with settings behind it."""
    for place, word in enumerate(words):
        trainer = words[place + 1] if place + 1 < len(words) else ""
        if Path(word).name == "trl" and trainer in TRL_TRAINERS:
            file = re.search(r"--config[= ](\S+)", " ".join(words))
            if file and (root / file[1]).exists():
                yield Command(
                    "trl",
                    f"trl {trainer}",
                    str(script.relative_to(root)),
                    [str(root / file[1]), "--trainer", trainer],
                )
            return


def trl_file(root: Path, file: Path) -> Iterator[Command]:
    """Yield a script that makes a trainer."""
    if file.suffix == ".py" and re.search(r"\b\w+Trainer\(", text := file.read_text(errors="replace")):
        trainer = next(iter(re.findall(r"\b(\w+Trainer)\(", text)))
        yield Command("trl", trainer, str(file.relative_to(root)), [str(file)])


SYSTEMS = {"verl": System(verl_words, verl_file), "trl": System(trl_words, trl_file)}


def recorded(root: Path, script: Path, where: Path, arguments: Sequence[str]) -> list[list[str]]:
    """Run a script of a checkout in a sandbox, in one folder of it; return the words of what it would run."""
    with tempfile.TemporaryDirectory(dir=root.parent) as folder:
        tools, records = Path(folder, "tools"), Path(folder, "records")
        tools.mkdir()
        records.mkdir()
        for name in ALLOWED.split():
            if path := shutil.which(name):
                (tools / name).symlink_to(path)
        Path(folder, "prelude").write_text(PRELUDE)
        box = {"BOX": str(root.parent), "WHERE": str(where), "RECORDS": str(records), "PATH": str(tools)}
        more = {"HOME": "/root", "BASH_ENV": f"{folder}/prelude", "USER": "user"}
        outside = {"BOX": box["BOX"], "WHERE": box["WHERE"], "PATH": os.environ["PATH"]}
        inside = " ".join(f"{key}='{value}'" for key, value in (box | more).items())
        run = f"{SANDBOX} {SCRIPT_SECONDS} env -i {inside} {shutil.which('bash')} '{script}' " + " ".join(
            arguments
        )
        command = ["unshare", "--map-root-user", "--net", "--mount", "--pid", "--fork", "sh", "-c", run]
        subprocess.run(command, env=outside, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
        made = sorted(records.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        return [path.read_bytes().decode(errors="replace").split("\0")[:-1] for path in made]


def commands_of(root: Path, system: str) -> Iterator[Command]:
    """Yield every command of a checkout that a system knows."""
    chosen = [SYSTEMS[system]] if system else [*SYSTEMS.values()]
    for script in sorted(root.rglob("*.sh")):
        for where, arguments in [(root, a) for a in ARGUMENTS] + [(script.parent, ARGUMENTS[0])]:
            found = [
                c
                for words in recorded(root, script, where, arguments)
                for s in chosen
                for c in s.of_words(root, script, words)
            ]
            if found:
                yield from found
                break
    for file in sorted(path for kind in ("*.yaml", "*.py", "*.toml") for path in root.rglob(kind)):
        for s in chosen:
            yield from s.of_file(root, file)


class Late(BaseException):
    """The time is over; no ``except Exception`` on the way keeps it."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise ``Late`` in the body after some seconds."""

    def late(*_: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def result_of(command: Command, folder: Path) -> Outcome:
    """Import a command, check the graph and plan it."""
    graph = folder / "graph.yaml"
    graph.unlink(missing_ok=True)
    stage = "import"
    try:
        with within(IMPORT_SECONDS):
            code, text, crash = called("import", command.system, *command.arguments, "-o", str(graph))
            if crash or code or not graph.exists():
                return Outcome(command, "fails" if crash else "refused by import", crash or said(text))
            given = hub_models(graph)
            stage = "check"
            code, text, crash = called("check", str(graph), "--no-code", *given)
            if crash or code:
                return Outcome(command, "fails" if crash else "refused by check", crash or said(text))
        stage = "plan"
        with within(IMPORT_SECONDS * 3):
            devices = devices_of(graph)
            cluster = f"h100-{devices}"
            code, text, crash = called(
                "plan", str(graph), "--no-code", "--cluster", cluster, "--brief", *given
            )
            if crash or code:
                return Outcome(command, "fails" if crash else "refused by plan", crash or said(text))
    except Late:
        return Outcome(command, "hangs", stage)
    return Outcome(command, "plans")


def called(*words: str) -> tuple[int, str, str]:
    """Call rlgraph; return the exit status, what it printed, and the exception of a crash."""
    result = CliRunner().invoke(rlgraph, [*words])
    error = result.exception
    if isinstance(error, Late):
        raise error
    crash = "" if error is None or isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
    return result.exit_code, result.output, crash


def said(text: str) -> str:
    """Return the line of an error that says what is wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(error|Error)", line) or "error[" in line]
    return " | ".join(errors[:3] or lines[:2])[:400]


def devices_of(graph: Path) -> int:
    """Return the devices of all pools of a graph; 8 where none says."""
    devices = [int(n) for n in re.findall(r"\bdevices: (\d+)", graph.read_text())]
    return max(sum(devices), 1) if devices else 8


def hub_models(graph: Path) -> list[str]:
    """Return settings that give models at paths that are not here the hub's name of the same last word."""
    cards = {name.partition("/")[2].lower(): name for name in known_models()}
    settings = []
    for model, path in re.findall(r"models\.(\w+)\.path: (\S+)", graph.read_text()):
        name = Path(path.strip("\"'")).name
        for end in ("", "-instruct", "-base", "-hf"):
            short = name.lower().removesuffix(end)
            if (os.path.isabs(path.strip("\"'")) or path.count("/") != 1) and short in cards:
                settings.append(f"models.{model}.path={cards[short].partition('/')[0]}/{name}")
                break
    return settings


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield lines that count results per trainer, and reasons."""
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        counts[outcome.command.system, outcome.command.trainer][outcome.result] += 1
    yield f"{'trainer':<60}" + "".join(f"{name:>19}" for name in CLASSES)
    for (system, trainer), row in sorted(counts.items()):
        yield f"{system + ' ' + trainer:<60}" + "".join(f"{row[name]:>19}" for name in CLASSES)
    total = Counter(outcome.result for outcome in outcomes)
    yield f"{'all ' + str(len(outcomes)):<60}" + "".join(f"{total[name]:>19}" for name in CLASSES)
    reasons = Counter((o.result, re.sub(r"\d+", "N", o.reason)) for o in outcomes if o.reason)
    for (result, reason), count in reasons.most_common():
        yield f"{count:>4}  {result}: {reason}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--system", choices=[*SYSTEMS], default="", help="only this one")
    parser.add_argument(
        "--commands", type=Path, help="a file of commands: written, or read where it is there"
    )
    parser.add_argument("--json", type=Path, help="write every outcome here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary, "box", "checkout")
        shutil.copytree(options.folder, root, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        if options.commands and options.commands.exists():
            rows = json.loads(options.commands.read_text().replace("$CHECKOUT", str(root)))
            commands = [Command(**row) for row in rows]
        else:
            commands = [*commands_of(root, options.system)]
            if options.commands:
                text = json.dumps([asdict(c) for c in commands], indent=1)
                options.commands.write_text(text.replace(str(root), "$CHECKOUT"))
        os.chdir(root)
        outcomes = [result_of(command, Path(temporary)) for command in commands]
        if options.json:
            text = json.dumps([asdict(o) for o in outcomes], indent=1)
            options.json.write_text(text.replace(str(root), "$CHECKOUT"))
    print("\n".join(table(outcomes)))


if __name__ == "__main__":
    main()
