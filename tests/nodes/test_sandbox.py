"""The sandbox: what a program sees, writes, starts and takes, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import random
import site
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rlgraph.nodes.support import sandbox
from rlgraph.nodes.support.sandbox import MIB, SANDBOXED, Limits, confined, trouble

LIMITS = Limits(timeout=60.0, memory=1024 * MIB, file=4 * MIB)
needs_sandbox = pytest.mark.skipif(bool(trouble()), reason=f"needs a sandbox: {trouble()}")


def shown(source: str, limits: Limits = LIMITS) -> str:
    with confined("show", {"program": source}, limits) as running:
        return running.read(2**20).decode().strip()


def sleeps(seconds: int) -> bool:
    """Return whether a process of this machine is `sleep SECONDS`, a number that tells it from others."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if file.read_bytes() == f"sleep\0{seconds}\0".encode():
                return True
        except OSError:
            continue
    return False


def until(holds: object) -> None:
    """Wait until a call gives a true value: what is killed takes a moment to end."""
    for _ in range(600):
        if holds():  # type: ignore[operator]
            return
        time.sleep(0.05)
    raise AssertionError


def test_a_program_finds_no_module_of_the_sandbox_by_a_short_name() -> None:
    names = [path.stem for path in Path(SANDBOXED).glob("*.py") if not path.stem.startswith("__")]
    assert "wire" in names and "start" in names
    look = f"""
import importlib.util
print([name for name in {names} if importlib.util.find_spec(name)])
"""
    assert shown(look) == "[]"


@needs_sandbox
@pytest.mark.parametrize("network", [False, True])
def test_it_sees_python_and_nothing_of_the_run(
    network: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "sk-secret")
    secret = tmp_path / "secret"
    secret.write_text("sk-secret")
    os.makedirs("/tmp/ray", exist_ok=True)
    look = f"""
import os, json, sys
def can(*path):
    try:
        return bool(open(os.path.join(*path), "rb").read(1))
    except OSError:
        return False
pids = [name for name in os.listdir("/proc") if name.isdigit()]
print(json.dumps([sorted(os.environ), os.listdir(), os.listdir("/tmp"), can({str(secret)!r}),
    os.path.exists({str(Path(__file__).parent)!r}), os.path.exists("/etc/shadow"), os.path.exists("/tmp/ray"),
    [can("/proc", pid, name) for pid in pids for name in ("environ", "mem") if pid != str(os.getpid())],
    len(pids) <= 2, os.path.exists("/etc/hosts"), os.path.exists(json.__file__)]))
"""
    said = shown(look, Limits(60.0, 1024 * MIB, MIB, network))
    environment, *seen = json.loads(said)
    assert set(environment) <= {"PATH", "HOME", "OMP_NUM_THREADS", "LC_CTYPE"}
    # a Python that lies in /tmp itself stays visible
    roots = {
        Path(path).resolve() for path in (sys.prefix, sys.base_prefix, *site.getsitepackages(), *sys.path)
    }
    names = sorted({path.parts[2] for path in roots if path.is_relative_to("/tmp") and len(path.parts) > 2})
    assert seen == [names, names, False, False, False, False, [False, False], True, network, True]


@needs_sandbox
def test_only_a_network_has_a_network() -> None:
    # an address of this machine that is always there, but in a network of its own
    connect = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('127.0.0.1', 9))"
    assert "unreachable" in shown(connect)
    assert shown(connect, Limits(60.0, 1024 * MIB, MIB, network=True)) == ""


@needs_sandbox
def test_it_writes_to_its_folder_alone() -> None:
    said = shown("""
import os, sys
for path in ("/", "/usr", "/etc", "/dev", "/proc/sys/kernel", os.path.dirname(os.__file__), sys.prefix):
    try:
        open(path + "/core_pattern", "a")
        print("wrote to", path)
    except OSError as error:
        pass
for path in (".", "/tmp", "/dev/shm", os.path.expanduser("~")):
    open(path + "/x", "w").write("x")
os.write(os.open("/dev/null", os.O_WRONLY), b"x")
import multiprocessing
multiprocessing.Lock()
print("done")
""")
    assert said == "done"


@needs_sandbox
def test_what_lies_in_tmp_may_be_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment there, for one: it is read-only, and all around it is the program's."""
    (tmp_path / "x").write_text("seen")
    monkeypatch.setattr(sandbox, "SYSTEM", [*sandbox.SYSTEM, str(tmp_path)])
    said = shown(f"""
open("y", "w")
print(open({str(tmp_path / "x")!r}).read())
open({str(tmp_path / "y")!r}, "w")
""")
    assert said.startswith("seen\n") and "Read-only file system" in said


@needs_sandbox
def test_it_gains_no_rights() -> None:
    said = shown("""
import ctypes, os, subprocess
print([line.split()[1] for line in open("/proc/self/status") if line.startswith(("Cap", "NoNewPrivs"))])
for command in ("mount -o remount,bind,rw /usr", "mount -t tmpfs x /tmp", "unshare -U true",
    "unshare -rm true", "chroot / true", "cat /proc/1/environ"):
    if not subprocess.run(command.split(), stderr=subprocess.DEVNULL).returncode:
        print(command)
os.kill(1, 9)
libc = ctypes.CDLL(None)
print(libc.ptrace(16, 1, 0, 0), libc.prctl(4, 0, 0, 0, 0))
""")
    none = "0000000000000000"
    assert said.splitlines() == [str([none] * 5 + ["1"]), "-1 0"]


@needs_sandbox
def test_what_it_takes_is_bounded() -> None:
    assert shown("x = bytearray(600 * 2**20); print('fits')") == "fits"
    assert "MemoryError" in shown("x = bytearray(2000 * 2**20)")
    assert "File too large" in shown("open('out', 'wb').write(bytes(2**23))")
    small = "\nfor i in range(9):\n    open(str(i), 'wb').write(bytes(2**20))"
    assert "No space left" in shown(small)
    assert "No space left" in shown("import os\nfor i in range(5000): os.mkdir(str(i))")
    assert "Too many open files" in shown("files = [open('/dev/null') for _ in range(100)]")
    forks = "import os, time\nfor _ in range(300):\n    if not os.fork(): time.sleep(60)\n"
    assert "unavailable" in shown(forks) or shown(f"{forks}time.sleep(60)\nprint('had them')") == ""


@needs_sandbox
@pytest.mark.nightly
@pytest.mark.parametrize("held", ["bytearray(300 << 20)", "mmap.mmap(-1, 300 << 20)"])
def test_memory_of_several_processes_is_summed(held: str) -> None:
    said = shown(f"""
import mmap, os, time
print("begun", flush=True)
for _ in range(4):
    if not os.fork():
        held = {held}
        held[:] = b"x" * len(held)
        time.sleep(600)
time.sleep(600)
""")
    assert said == "begun"  # killed long before its time


@needs_sandbox
def test_a_name_that_is_no_text_hides_nothing() -> None:
    said = shown(
        """
import ctypes, time
ctypes.CDLL(None).prctl(15, b"\\xffRssAnon:\\t9")
print("begun", flush=True)
time.sleep(600)
""",
        Limits(1.0, 1024 * MIB, MIB),
    )
    assert said == "begun"


@needs_sandbox
@pytest.mark.nightly
def test_memory_that_others_touched_is_found() -> None:
    """Each process holds what a child of it has filled, and shows none of it as its own."""
    said = shown("""
import mmap, os, time
print("begun", flush=True)
for _ in range(20):
    if not os.fork():
        held = mmap.mmap(-1, 300 << 20)
        if not os.fork():
            held[: 1 << 20] = b"x" * (1 << 20)
            os._exit(0)
        time.sleep(600)
time.sleep(600)
""")
    assert said == "begun"


@needs_sandbox
def test_memory_of_no_process_is_refused() -> None:
    said = shown("""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
try:
    os.memfd_create("x")
except OSError as error:
    print(error.errno)
print(libc.shmget(0, 1 << 20, 0o1600), ctypes.get_errno())
print(libc.msgget(0, 0o1600), ctypes.get_errno())
print(libc.semget(0, 32000, 0o1600), ctypes.get_errno())
""")
    assert said.split() == ["1", *["-1", "1"] * 3]


SLEEP = "import os; print('begun', flush=True); os.execvp('sleep', ['sleep', '{}'])"


@needs_sandbox
def test_nothing_outlives_it() -> None:
    detached, attached = random.sample(range(10**6, 10**9), 2)
    assert (
        shown(f"""
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
read, write = os.pipe()
if not os.fork():
    os.setsid()
    if not os.fork():
        os.set_inheritable(write, False)
        os.execvp("sleep", ["sleep", "{detached}"])
    os._exit(0)
os.close(write)
print(os.read(read, 1))  # its end: the other has become `sleep`
""")
        == "b''"
    )
    until(lambda: not sleeps(detached))
    with confined("show", {"program": SLEEP.format(attached)}, LIMITS) as running:
        assert running.read(5) == b"begun"
        until(lambda: sleeps(attached))
    until(lambda: not sleeps(attached))


@needs_sandbox
@pytest.mark.nightly
def test_it_ends_by_itself_where_the_run_is_killed() -> None:
    seconds = random.randrange(10**6, 10**9)
    script = f"""
from rlgraph.nodes.support.sandbox import Limits, MIB, confined
with confined("show", {{"program": {SLEEP.format(seconds)!r}}}, Limits(3.0, 1024 * MIB, MIB)) as running:
    print(running.read(5).decode(), flush=True)
    running.read(1)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout and run.stdout.readline() == "begun\n"
        run.kill()
    until(lambda: not sleeps(seconds))


@needs_sandbox
def test_why_none_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "NAMESPACES", (*sandbox.NAMESPACES, "--no-such"))
    assert "--no-such" in trouble.__wrapped__()
    monkeypatch.setattr(sandbox, "NAMESPACES", ("unshare", "--user"))
    assert "mount" in trouble.__wrapped__()
    monkeypatch.setattr(sandbox, "NAMESPACES", ("no-such-program",))
    assert trouble.__wrapped__() == "there is no `no-such-program`"
    monkeypatch.setattr(sandbox, "CHILDREN", "/proc/self/no-such")
    assert "CONFIG_PROC_CHILDREN" in trouble.__wrapped__()


@pytest.mark.parametrize(
    "source",
    [
        "import os\nfor _ in range(1200): os.mkdir('d'); os.chdir('d')",
        "import os\nfolder = os.getcwd(); os.rmdir(folder); os.symlink('/usr', folder)",
        "import os\nfolder = os.getcwd(); os.rmdir(folder); open(folder, 'w').close()",
        "import os, stat\nos.mkdir('d'); open('d/x', 'w').close(); os.chmod('d', 0)",
    ],
)
def test_without_a_sandbox_its_folder_goes_too(
    source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sandbox, "trouble", lambda: "none here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert shown(f"{source}\nprint('done')") == "done"
    assert list(tmp_path.iterdir()) == []
    assert Path("/usr/bin").exists()


def test_without_a_sandbox_limits_and_time_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sandbox, "trouble", lambda: "none here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("A_SECRET", "1")
    assert shown("import os; print(os.listdir(), 'A_SECRET' in os.environ)") == "[] False"
    assert "MemoryError" in shown("x = bytearray(2000 * 2**20)")
    escapee = """
import os, time
print("begun", flush=True)
if not os.fork():
    os.setsid()
    place = time.time()
    while time.time() < place + 3:
        try:
            open(str(time.time()), "w").close()
        except OSError:
            pass
    os._exit(0)
time.sleep(600)
"""
    assert shown(escapee, Limits(1.0, 1024 * MIB, MIB)) == "begun"
    assert shown("print('and on')") == "and on"


def test_what_runs_in_it_needs_no_package() -> None:
    """It is the standard library alone, and loads little of that, since it starts for every program."""
    script = f"""
import sys, types
sys.modules["sandboxed"] = package = types.ModuleType("sandboxed")
package.__path__ = [{SANDBOXED!r}]
from sandboxed import check, confine, main, run, serve, show, start, wire
assert not {{'rlgraph', 'socket', 'subprocess', 'pathlib'}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-I", "-S", "-c", script], check=True)
