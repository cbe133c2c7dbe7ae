"""Which launch scripts and configurations of other systems become graphs that check and plan?

    python benchmarks/import_scripts.py FOLDER [--system verl] [--json FILE]

FOLDER is a checkout that the user has: verl's, TRL's, or one's own scripts. It is copied, and each `*.sh`
of the copy runs under bash, where every command but a few harmless ones only records its words: without a
network, on a file system that is read-only outside of the copy, for a few seconds. Of the words recorded,
each system's entry in ``SYSTEMS`` takes those that start one of its trainers. Scripts of OpenRLHF, slime and
miles are read, as `rlgraph import` does it, and so are prime-rl's TOML files. They are given to `rlgraph
import`, and the graph to `rlgraph check` and `rlgraph plan`, on as many H100s as it has devices.

A model at a local path, which is not here, is planned as the model on the hub that its last name is of, and
one whose size is not known as Qwen's dense model or mixture of about the size in its name. Where a plan does
not fit and names a setting of memory that would, it is planned with that: `with a remedy`. A file with a
reward function is taken to have the function; no code of FOLDER's is loaded. What becomes of a command is one
of ``CLASSES``; the table counts them per trainer.
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
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml
from click.testing import CliRunner

from rlgraph.cli.main import main as rlgraph
from rlgraph.costs.model_size import known_models, size_of
from rlgraph.errors import GraphError
from rlgraph.importing.shell import commands_of as shell_commands
from rlgraph.importing.shell import launches_of
from rlgraph.importing.table import table_of
from rlgraph.importing.verl import started_on

CLASSES = (
    "plans",
    "with a stand-in",
    "with a remedy",
    "refused by plan",
    "refused by check",
    "refused by import",
    "fails",
    "hangs",
)
ALLOWED = (
    "awk basename cat cut date dirname expr grep head hostname id ls nproc printf readlink realpath sed seq "
    "sort tail tr true uname uniq wc whoami"
)
ARGUMENTS = (
    (),
    ("8", "save"),
)  # given to a script; the second where it wants some and starts nothing without
SCRIPT_SECONDS, IMPORT_SECONDS = 10, 20

# Bash reads this file before a script. What is not found in PATH is recorded; a program given to Python as
# text fails, as one does that asks whether a package is installed.
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
VERL_OWN = ("ppo_trainer", "sft_trainer", "sft_trainer_engine")  # what the table's defaults are of
VERL_ROOTS = ("verl", "recipe")
VERL_CONFIGS = re.compile(r"(^|/)config(s)?/[^/]+\.yaml$")


def verl_words(root: Path, script: Path, words: Sequence[str]) -> Iterator[Command]:
    """Yield the trainer that `-m MODULE` names, with what is behind it."""
    for place, word in enumerate(words[:-1]):
        module = words[place + 1]
        if word == "-m" and module.split(".")[0] in VERL_ROOTS and VERL_MODULES.search(module):
            rest = [*words[place + 2 :], *started_on(words[:place])]
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
    """Return the file that `--config-name` means, where it is one of the checkout, and other words."""
    name = re.search(r"--config-name[= ](\S+)", " ".join(words))
    source = root / f"{module.replace('.', '/')}.py"
    if name is None and source.is_file():
        name = re.search(r"""config_name=["'](\w+)""", source.read_text())
    if name is None or name[1] in VERL_OWN:
        return [], words
    found = sorted(root.rglob(f"{name[1].removesuffix('.yaml')}.yaml"))
    near = Path(*module.split(".")[:-1])
    found.sort(key=lambda path: (near not in path.parents, len(os.path.relpath(path, script.parent))))
    return [str(found[0])] if found else [], words


def verl_file(root: Path, file: Path) -> Iterator[Command]:
    """Yield a configuration of a trainer: one with an actor, or with a model and an optimizer."""
    if file.suffix != ".yaml":
        return
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


# OpenRLHF, slime and miles: flags of a program. Scripts are read as `rlgraph import` reads them, and not run
def no_words(root: Path, script: Path, words: Sequence[str]) -> Iterator[Command]:
    """Yield nothing: the scripts themselves are read."""
    yield from ()


def launches_in(system: str, table: str, word: str = "") -> Callable[[Path, Path], Iterator[Command]]:
    """Return what yields each launch of a system's programs in a shell script that has a word in it."""
    programs = tuple(table_of(table).facts["programs"])

    def of_file(root: Path, file: Path) -> Iterator[Command]:
        if file.suffix != ".sh" or word not in file.read_text(errors="replace"):
            return
        try:
            launches = launches_of(shell_commands(file), programs)
        except GraphError:
            return
        for number, launch in enumerate(launches, 1):
            arguments = [str(file), "--launch", str(number)]
            yield Command(system, launch.program, str(file.relative_to(root)), arguments)

    return of_file


def prime_file(root: Path, file: Path) -> Iterator[Command]:
    """Yield a configuration of prime-rl's RL or SFT: a whole file, not of one part."""
    if file.suffix != ".toml":
        return
    try:
        tops = set(tomllib.loads(file.read_text(errors="replace")))
    except tomllib.TOMLDecodeError:
        return
    kind = "rl" if tops & {"trainer", "orchestrator"} else "sft" if {"model", "data"} <= tops else ""
    if kind:
        yield Command("prime-rl", kind, str(file.relative_to(root)), ["@", str(file)])


def configurations(system: str, folder: str, marks: Sequence[str]) -> System:
    """Return a system whose YAML files in a folder that have one of some sections are commands."""

    def of_file(root: Path, file: Path) -> Iterator[Command]:
        if file.suffix != ".yaml" or not str(file.relative_to(root)).startswith(folder):
            return
        if re.search(rf"^({'|'.join(marks)}):", file.read_text(errors="replace"), re.M):
            yield Command(system, "a YAML file", str(file.relative_to(root)), [str(file)])

    return System(no_words, of_file)


SYSTEMS = {
    "verl": System(verl_words, verl_file),
    "trl": System(trl_words, trl_file),
    "openrlhf": System(no_words, launches_in("openrlhf", "openrlhf")),
    "slime": System(no_words, launches_in("slime", "slime", "slime")),
    "miles": System(no_words, launches_in("miles", "slime", "miles")),
    "prime-rl": System(no_words, prime_file),
    "nemo-rl": configurations(
        "nemo-rl", "examples/configs/", ("defaults", "grpo", "ppo", "sft", "dpo", "rm")
    ),
    "areal": configurations("areal", "examples/", ("actor",)),
}


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
    runs = any(s.of_words is not no_words for s in chosen)
    for script in sorted(root.rglob("*.sh")) if runs else ():
        for where, arguments in [(root, a) for a in ARGUMENTS] + [(script.parent, ARGUMENTS[0])]:
            found = []
            for words in recorded(root, script, where, arguments):
                own = [word for word in words if word not in arguments]  # scripts pass theirs on
                found += [command for s in chosen for command in s.of_words(root, script, own)]
            if found:
                yield from found
                break
    for file in sorted(path for kind in ("*.yaml", "*.py", "*.toml", "*.sh") for path in root.rglob(kind)):
        for s in chosen:
            yield from s.of_file(root, file)


class Late(BaseException):
    """The time is over; no ``except Exception`` on the way keeps it."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise ``Late`` in the body after some seconds of work, so that other programs' load is no hang.

    What waits without working is late after ten times as many seconds.
    """

    def late(*_: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, late), signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(10 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before[0])
        signal.signal(signal.SIGPROF, before[1])


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
            stub_functions(graph)
            given, stands_in = hub_models(graph)
            stage = "check"
            code, text, crash = called("check", str(graph), *given)
            if crash or code:
                return Outcome(command, "fails" if crash else "refused by check", crash or said(text))
        stage = "plan"
        with within(IMPORT_SECONDS * 3):
            plan = ["plan", str(graph), "--cluster", f"h100-{devices_of(graph)}", "--brief", *given]
            code, text, crash = called(*plan)
            if crash:
                return Outcome(command, "fails", crash)
            if code:
                reason, remedy = said(text), re.findall(r"^ +(?:or )?((?:models\.\S+=\S+ ?)+)", text, re.M)
                fitting = (r.strip() for r in remedy if called(*plan, *r.split())[0] == 0)
                if settings := next(fitting, None):
                    return Outcome(command, "with a remedy", settings)
                return Outcome(command, "refused by plan", reason)
    except Late:
        return Outcome(command, "hangs", stage)
    return Outcome(command, "with a stand-in" if stands_in else "plans")


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


def stub_functions(graph: Path) -> None:
    """Give a graph functions that do nothing in place of those of files that are not its own."""
    text = graph.read_text()
    names = set(re.findall(r"\.py:(\w+)", text))
    stubs = "".join(f"def {name}(**given):\n    return 0.0\n" for name in sorted(names))
    file = Path(tempfile.mkstemp(".py", "stubs", graph.parent)[1])  # a new one: what is loaded stays
    file.write_text(stubs)
    graph.write_text(re.sub(r"[^\s\"'{}\[\],]*\.py:(\w+)", rf"{file.name}:\1", text))


def hub_models(graph: Path) -> tuple[list[str], bool]:
    """Return settings that give models of unknown size others, and whether one of these is a stand-in."""
    makers = dict.fromkeys(name.partition("/")[0] for name in known_models())
    settings, stands_in = [], False
    text = graph.read_text()
    has_experts = re.search(r"expert_parallel: ([2-9]|1\d)", text) is not None
    for model, given in re.findall(r"models\.(\w+)(?:\.path|: \{path): ([^\s,}]+)", text):
        path = given.strip("\"'")
        if "${" in given or (path != "???" and has_size(path)):
            continue
        names = [f"{maker}/{Path(path).name}" for maker in makers]
        known = next((name for name in names if path and has_size(name)), None)
        stands_in = stands_in or known is None
        settings.append(f"models.{model}.path={known or stand_in(path, has_experts)}")
    return settings, stands_in


def stand_in(path: str, has_experts: bool = False) -> str:
    """Return the model of Qwen's that is nearest to the size that a path says, 7B where it says none.

    Of a mixture, as a graph that divides experts has it, the size that it says is of all experts, else 30B.
    """
    sizes = re.findall(r"(\d+(?:\.\d+)?)[bB](?![a-zA-Z])", Path(path).name)
    billions = float(sizes[0]) if sizes else 30.0 if has_experts else 7.0
    if has_experts or "-A" in path or "oe" in Path(path).name:
        kinds = {30.0: "Qwen/Qwen3-30B-A3B", 235.0: "Qwen/Qwen3-235B-A22B", 671.0: "deepseek-ai/DeepSeek-V3"}
    else:
        names = ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")
        kinds = {float(name[:-1]): f"Qwen/Qwen2.5-{name}" for name in names}
    return kinds[min(kinds, key=lambda size: abs(size - billions))]


def has_size(path: str) -> bool:
    """Return whether a model's size is known here."""
    try:
        size_of(path)
    except GraphError as error:
        return "size of" not in str(error)
    return True


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
    reasons = Counter(
        (o.result, re.sub(r"\d+", "N", re.sub(r"/tmp/\S+?yaml:", "", o.reason))) for o in outcomes if o.reason
    )
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
