"""Launch scripts of bash are read as bash would run them, and nothing of them is run."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlgraph.errors import GraphError
from rlgraph.importing.flags import read_flags
from rlgraph.importing.shell import commands_of, flags_of, launches_of

RECORD = 'for word in "$@"; do printf \'%s\\0\' "$word"; done > recorded\n'


def words(text: str, folder: Path) -> tuple[str, ...]:
    """The words of the launch of train.py in a script."""
    (folder / "run.sh").write_text(text)
    (launch,) = launches_of(commands_of(folder / "run.sh"), ("train.py",))
    return launch.words


KNOWN = {
    "variables and a default": 'A=1\nexport B="x$A ${C:-def} y"\npython train.py --a $A --b "$B" --c \'$A\'',
    "an array with comments": (
        "ARGS=(\n  --x 1  # one\n  # --y 2\n  --z 'a b'\n)\nARGS+=(--w)\npython3 train.py ${ARGS[@]}"
    ),
    "an array in quotes": 'ARGS=(--z "a b" --n 4)\ntorchrun --nproc 8 train.py "${ARGS[@]}" --m 2',
    "a text that is split": 'ARGS="--x 1 --y 2"\nARGS="$ARGS --z 3"\npython train.py $ARGS',
    "lines that go on": "python train.py \\\n  --x 1 \\\n  --y=2",
    "a here-document": "read -r -d '' ARGS <<EOF\n--x 1 \\\n--y 2\nEOF\npython train.py $ARGS",
    "JSON": "python train.py --opt '{\"a\": [1, 2]}' --lr 1e-6",
    "a path": 'D=/data\npython train.py --file ${D}/a.jsonl --more "$D/b c.jsonl"',
    "a default of a default": 'A=${A:-${B:-7}}\npython train.py --a "$A"',
    "arithmetic": (
        "A=1024\nB=$((A * 2 + 6))\npython train.py --b $B --c $(( (A - 1) / 2 )) --d $((-7 / 2)) "
        "--e $((-7 % 2)) --f $((2 ** 10)) --g $(($A + ${B}))"
    ),
    "redirected, behind another command": "cd . && python train.py --a 1 2>&1 | tee log",
}


@pytest.mark.parametrize("name", KNOWN)
def test_words_are_those_that_bash_gives(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bash itself runs the script, with a stub in place of every launcher that writes down its words."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    (tmp_path / "bin").mkdir()
    for launcher in ("python", "python3", "torchrun"):
        (tmp_path / "bin" / launcher).write_text("#!/bin/bash\n" + RECORD)
        (tmp_path / "bin" / launcher).chmod(0o755)
    read = words(KNOWN[name], tmp_path)
    subprocess.run(["bash", "run.sh"], cwd=tmp_path, check=True, timeout=20, capture_output=True)
    ran = (tmp_path / "recorded").read_bytes().decode().split("\0")[:-1]
    assert list(read) == ran[ran.index("train.py") + 1 :]


UNKNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "the output of a command": (
        "N=$(nvidia-smi -L | wc -l)\npython train.py --n $N --m 2",
        {"n": "shell", "m": 2},
    ),
    "a parameter": ("python train.py --n $1 --m 2", {"n": "shell", "m": 2}),
    "a variable that is set nowhere": ("python train.py --n ${SET_NOWHERE} --m 2", {"n": "shell", "m": 2}),
    "another value under a condition": (
        'N=0\nif [ "$N" -le 0 ]; then\n  N=8\nfi\npython train.py --n $N',
        {"n": "shell"},
    ),
    "one that only a condition sets": ("if true; then\n  N=8\nfi\npython train.py --n $N", {"n": 8}),
    "an array that two branches set": (
        'if [ -n "$K" ]; then\n  W=(--key 1)\nelse\n  W=()\nfi\npython train.py --n 3 ${W[@]} --m 2',
        {"n": 3, "${shell:W}": True, "m": 2},
    ),
    "an array that is set nowhere": ("python train.py --n 3 ${W[@]} --m 2", {"n": 3, "m": 2}),
    "arithmetic with what is not known": ("python train.py --n $((SET_NOWHERE * 4))", {"n": "shell"}),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_only_a_shell_knows_stays_unknown(name: str, tmp_path: Path) -> None:
    text, right = UNKNOWN[name]
    read = flags_of(words(text, tmp_path))
    assert read.keys() == right.keys()
    for flag, value in right.items():
        assert str(read[flag]).startswith("${shell:") if value == "shell" else read[flag] == value


def test_a_script_that_is_sourced_is_read_wherever_the_shell_would_find_it(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/m.sh").write_text("MODEL=(--layers 4)\n")
    here = 'D="$(cd -- "$(dirname -- "$0")" && pwd)"\nsource "${D}/models/m.sh"\npython train.py ${MODEL[@]}'
    assert words(here, tmp_path) == ("--layers", "4")


def test_scripts_that_source_each_other_end(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("source b.sh\n")
    (tmp_path / "b.sh").write_text("source a.sh\n")
    assert words("source a.sh\npython train.py --x 1", tmp_path) == ("--x", "1")


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    words(f"touch {tmp_path}/ran\nA=$(touch {tmp_path}/ran)\npython train.py --x 1", tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "command",
    [
        "ray job submit --address=a -- python3 /root/x/train.py --x 1",
        "deepspeed --module train.py --x 1",
        'bash -c "cd /x && python3 train.py --x 1"',
        "srun python -m train.py --x 1",
    ],
)
def test_a_program_stands_behind_any_launcher(command: str, tmp_path: Path) -> None:
    assert flags_of(words(command, tmp_path)) == {"x": 1}


def test_of_several_launches_one_is_chosen_and_it_is_said(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python train.py --x 1\npython train.py --x 2\npython train.py --x 2\n")
    first = read_flags([str(script)], ("train.py",))
    assert first.flags == {"x": 1}
    assert "it has 2 launches, and this is the one in line 1" in first.outcomes()[0].text
    assert read_flags([str(script), "--y", "3"], ("train.py",), launch=2).flags == {"x": 2, "y": 3}
    with pytest.raises(GraphError, match="no launch 3"):
        read_flags([str(script)], ("train.py",), launch=3)


def test_flags_alone_and_a_pasted_command(tmp_path: Path) -> None:
    assert read_flags(["--x", "1", "--on"], ("train.py",)).flags == {"x": 1, "on": True}
    assert read_flags(["python3", "train.py", "--x", "1"], ("train.py",)).flags == {"x": 1}
    with pytest.raises(GraphError, match="there are no settings"):
        read_flags([], ("train.py",))
    with pytest.raises(GraphError, match=r"there is no file none\.sh"):
        read_flags(["none.sh"], ("train.py",))
    (tmp_path / "other.sh").write_text("python other.py\n")
    with pytest.raises(GraphError, match="launches no known trainer"):
        read_flags([str(tmp_path / "other.sh")], ("train.py",))
