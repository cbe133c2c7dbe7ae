"""The GPU that Ray has given to this process: it sees that one alone, and torch has to find it."""

from __future__ import annotations

import os
import socket

import torch

from rlgraph.errors import RunError


def see_own_gpu() -> None:
    """Hide the GPUs of others, which are seen where RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set.

    To be called before CUDA is first used, which reads what is visible once.
    """
    import ray

    (own,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    os.environ["CUDA_VISIBLE_DEVICES"] = own


def check_own_gpu() -> None:
    """Check that torch finds the GPU of this process.

    Raises:
        RunError: it does not, as where it is a build for CPUs.
    """
    if torch.cuda.is_available():
        return
    own, build = os.environ.get("CUDA_VISIBLE_DEVICES", ""), torch.version.cuda
    law = (
        f"Ray has given GPU {own} of host {socket.gethostname()} to this worker, and torch finds none there:"
    )
    if build is None:
        law += f" torch {torch.__version__} is a build without CUDA"
        remedy = "install a build of torch with CUDA there, or hide the GPUs from Ray (CUDA_VISIBLE_DEVICES=)"
    else:
        law += f" torch {torch.__version__} is built for CUDA {build}"
        remedy = "does `nvidia-smi` list it there, and is the driver new enough for this CUDA?"
    raise RunError(f"{law}\n  {remedy}")
