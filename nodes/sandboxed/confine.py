"""Close a sandbox from within: its own file system, no capabilities, limits.

unshare    pid outside of the sandbox ── its end ends process 1
process 1  mounts, chroot; waits, and all else in the sandbox ends with it
program    process 2: no capabilities, no new ones, limits
"""

import ctypes
import os
import resource
import signal
import struct
from contextlib import suppress
from typing import Any

ROOT = "/proc"  # where the new root is made: nothing that it shows lies there
TASKS = 64  # processes and threads
INODES = 4096
DEVICES = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
LINKS = {"/dev/fd": "/proc/self/fd", "/dev/shm": "/tmp"}
NOSUID, NODEV, BIND_ALL = 2, 4, 0x1000 | 0x4000
MOUNT_SETATTR, HERE, RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1
DROP_BOUNDING, NO_NEW_PRIVILEGES, SECCOMP, FILTER = 24, 38, 22, 2
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # instructions of a filter of system calls
ARCHITECTURE, NUMBER = 4, 0  # where they read a call's
FOREIGN, ALLOW, REFUSE = 0x40000000, 0x7FFF0000, 0x50001  # calls of another ABI; what becomes of a call
# refused: memory that belongs to no process (memfd_create, shmget, msgget, semget), and parts of the kernel
# that no program needs (io_uring_setup, userfaultfd, bpf, keyctl, add_key, perf_event_open)
REFUSED = {
    "x86_64": (0xC000003E, (319, 29, 68, 64, 425, 323, 321, 250, 248, 298)),
    "aarch64": (0xC00000B7, (279, 194, 186, 190, 425, 282, 280, 219, 217, 241)),
}
LIBC = ctypes.CDLL(None, use_errno=True)


def shut(job: dict[str, Any]) -> None:
    """Make the sandbox of a process that is process 1 in namespaces of its own; return in process 2.

    Raises:
        OSError: a step is not allowed or not known here; it says which.
    """
    with open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # where memory ends, the kernel takes it from here
    _mount("tmpfs", ROOT, "tmpfs", NOSUID, "size=1m,mode=755")
    os.mkdir(f"{ROOT}/proc")
    os.mkdir(f"{ROOT}/tmp")
    _mount("tmpfs", f"{ROOT}/tmp", "tmpfs", NOSUID | NODEV, f"size={job['file']},nr_inodes={INODES}")
    for path in [*sorted(job["visible"], key=len), *DEVICES]:
        _show(path)
    for link, target in LINKS.items():
        os.symlink(target, ROOT + link)
    _change_mount(ROOT, RECURSIVE, READ_ONLY | NOSUID, 0)
    _change_mount(f"{ROOT}/tmp", 0, 0, READ_ONLY)
    with suppress(OSError):  # a container that hides parts of its /proc allows no other: then there is none
        _mount("proc", f"{ROOT}/proc", "proc", READ_ONLY | NOSUID | NODEV)  # root could write sysctls
    os.chroot(ROOT)  # also forbids new user namespaces
    os.chdir("/tmp")
    _become_process_2(job["seconds"])
    _drop_capabilities()
    _refuse_calls(*REFUSED.get(os.uname().machine, (0, ())))
    resource.setrlimit(resource.RLIMIT_NPROC, (TASKS, TASKS))  # counted in this user namespace


def limit(job: dict[str, Any]) -> None:
    """Bound CPU time, address space and the size and number of files; no core is dumped."""
    bounds = {
        resource.RLIMIT_CPU: job["seconds"],
        resource.RLIMIT_AS: job["memory"],
        resource.RLIMIT_FSIZE: job["file"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for kind, bound in bounds.items():
        resource.setrlimit(kind, (bound, bound))


def _show(path: str) -> None:
    """Make a file or folder of the host, and all mounted in it, visible at the same path."""
    visible_path = ROOT + path
    if os.path.exists(visible_path) or not os.path.exists(path):
        return
    if os.path.isdir(path):
        os.makedirs(visible_path)
    else:
        os.makedirs(os.path.dirname(visible_path), exist_ok=True)
        os.close(os.open(visible_path, os.O_CREAT))
    _mount(path, visible_path, "", BIND_ALL)


def _become_process_2(seconds: int) -> None:
    """Fork; the parent, process 1, waits for the child or the end of its time, and then ends all."""
    child = os.fork()
    if child:
        signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
        signal.alarm(seconds)  # where whoever started this is gone, and with it who would have killed it
        while os.wait()[0] != child:
            pass
        os._exit(0)
    os.setsid()


def _drop_capabilities() -> None:
    for capability in range(64):
        LIBC.prctl(DROP_BOUNDING, capability, 0, 0, 0)  # refused past the kernel's last one
    _call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))


def _refuse_calls(architecture: int, numbers: tuple[int, ...]) -> None:
    """Refuse system calls by their numbers, and all of another ABI, which has other numbers."""
    if not numbers:
        return
    end = len(numbers) + 5  # the place of the line that refuses
    lines = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 0, end - 2, architecture)]
    lines += [(LOAD, 0, 0, NUMBER), (AT_LEAST, end - 4, 0, FOREIGN)]
    lines += [(EQUAL, end - place - 1, 0, number) for place, number in enumerate(numbers, len(lines))]
    lines += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    _call("prctl", SECCOMP, FILTER, struct.pack("HP", len(lines), ctypes.addressof(code)), 0, 0)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode(), flags, options.encode())


def _change_mount(path: str, flags: int, on: int, off: int) -> None:
    attributes = struct.pack("QQQQ", on, off, 0, 0)
    _call("syscall", MOUNT_SETATTR, HERE, path.encode(), flags, attributes, len(attributes))


def _call(name: str, *arguments: object) -> None:
    if getattr(LIBC, name)(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}{arguments}: {os.strerror(error)}")
