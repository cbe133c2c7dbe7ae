"""Python in the sandbox of reward.code (``nodes/support/sandbox.py``)."""

from rlgraph.nodes.support.sandbox import MIB, Limits, check_sandbox, confined

MOST = 2**16  # bytes of output that are read


def python(
    code: str,
    *,
    timeout: float = 10.0,
    memory_mib: int = 1024,
    file_mib: int = 16,
    network: bool = False,
    allow_unsandboxed: bool = False,
) -> str:
    """Run a Python program; the answer is what it prints, its traceback included.

    Args:
        code: the program; it starts anew each time, in an empty folder.

    Attributes:
        timeout: seconds that it may take, above 0; must be less than ``tool_timeout`` of the rollout.
        memory_mib: address space per process and memory of all its processes together, in MiB.
        file_mib: the most that it may write in total, in MiB.
        network: whether it may use the network, including this host's loopback.
        allow_unsandboxed: whether to run it with resource limits only if Linux provides no sandbox (see
            reward.code).

    Example:
        tools: {python: {kind: python, timeout: 5}}
    """
    check_sandbox("the tool python", allow_unsandboxed)
    limits = Limits(timeout, memory_mib * MIB, file_mib * MIB, network)
    with confined("show", {"program": code}, limits) as sandbox:
        text = sandbox.read(MOST).decode("utf-8", "replace").rstrip()
        is_late = sandbox.is_late()
    return f"{text}\n(ended: it ran over {timeout:g} s)".lstrip() if is_late else text
