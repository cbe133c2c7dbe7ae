"""The configuration, the command line and the environment by which an SGLang server is started."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from rlgraph.runtime.engines.memory.allocator import CHOSEN
from rlgraph.runtime.engines.sglang.client import Client
from rlgraph.runtime.engines.sglang.contents import Adapter, AllWeights
from rlgraph.runtime.engines.sglang.options import words
from rlgraph.runtime.messages.log_level import LEVEL
from rlgraph.variables import hidden

CPU = Path(__file__).parent / "cpu"  # what a server on a CPU finds in place of a CUDA build
# What a server on CUDA needs of its environment; what is set there already stays. SGLang 0.5.23 reads them
# by srt/environ.py.
CUDA_ENVIRONMENT = {
    # a trainer holds more on some devices of a group than on others
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
    # its graphs are released with the cache, instead of staying on the device while others train
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true",
    # kernels are compiled as they are met, instead of all of them before the server answers
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "false",
    # seconds: while it idles it gives back what its allocator keeps, as the trainer beside it does
    "SGLANG_EMPTY_CACHE_INTERVAL": "1",
}
# NCCL would hold on to the memory of graphs that are released (fzyzcjy/torch_memory_saver#88)
SPANNING = {"NCCL_GRAPH_REGISTER": "0"}
# A draft model's weights are its file's: no sync brings them, and `load_format` would draw them
DRAFTS = "speculative_algorithm"
DRAFT_FORMAT = {"speculative_draft_load_format": "auto"}
DRAFT_KEPT = {"enable_draft_weights_cpu_backup": True}  # else they are lost as the server sleeps


@dataclass(frozen=True)
class Launch:
    """Settings that decide how a server runs."""

    path: str  # a Hugging Face directory or name
    device: str  # ``cpu`` or ``cuda``
    dtype: str  # the type of weights and computation
    group: int  # devices that it spans (tensor parallelism), of all its hosts
    tokens: int  # positions that its cache holds
    max_rows: int  # requests that run at a time
    # SGLang's own settings, by its names; those in ``sglang_options.owned`` are not among them
    options: Mapping[str, str | float | bool] = field(default_factory=dict)
    content: AllWeights | Adapter = field(default_factory=AllWeights)  # what syncs bring
    hosts: int = 1  # that it spans, with a process on each
    node: int = 0  # which of them this process is on
    meeting: str = ""  # the address where processes of several hosts meet
    name: ClassVar[str] = "sglang"  # its logs' name
    kind: ClassVar[type[Client]] = Client  # what speaks to it
    shared: ClassVar[str] = "/dev/shm/sglang_loads_"  # files in which its processes exchange their loads

    def settings(self) -> dict[str, object]:
        """Return SGLang's settings by its own names; true is a flag, false a flag that is left out."""
        shared: dict[str, object] = {
            "model_path": self.path,
            "load_format": "dummy",  # random weights until those of the run arrive
            "device": self.device,
            "dtype": self.dtype,
            "tp_size": self.group,
            "max_total_tokens": self.tokens,
            "max_running_requests": self.max_rows,
            "grammar_backend": "none",
            "log_level": os.environ.get(LEVEL, "warning"),
            "incremental_streaming_output": True,  # else it streams all tokens of a sample again and again
            "sleep_on_idle": True,  # else it keeps a core busy while others train
        }
        if self.hosts > 1:
            shared |= {"nnodes": self.hosts, "node_rank": self.node, "dist_init_addr": self.meeting}
        shared |= DRAFT_FORMAT if DRAFTS in self.options else {}
        if isinstance(self.content, Adapter):
            shared |= {"load_format": "auto", **self.content.launched()}
            shared |= {"lora_backend": "torch_native"} if self.device == "cpu" else {}  # others are kernels
        if self.device != "cpu":
            # its own share would leave 10 GB free; what the plan leaves free is more than 5 % of a device
            saved: dict[str, object] = {
                "enable_memory_saver": True,
                "mem_fraction_static": 0.95,
                # the default, breakable, refuses graphs that are released with the cache
                "cuda_graph_backend_prefill": "disabled",
            }
            if DRAFTS in self.options:
                saved |= DRAFT_KEPT
            return {**shared, **saved, **self.options}
        cpu_settings = {
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "mem_fraction_static": 0.1,
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
        }
        return {**shared, **cpu_settings, **self.options}

    def configuration(self, host: str, port: int, key: str) -> str:
        """Return the content of SGLang's ``--config``: its address, its key and values of the environment.

        Any user can read a command line; but SGLang takes some options, such as lists, from there alone.
        """
        private = {name: value for name, value in self.settings().items() if _is_private(value)}
        settings = private | {"host": host, "port": port, "api_key": key}
        return json.dumps({name.replace("_", "-"): value for name, value in settings.items()})

    def arguments(self, configuration: Path) -> list[str]:
        """Return the command line after ``python``: all other settings, and the file."""
        settings = self.settings() | {"skip_server_warmup": True, "config": configuration}
        public = {name: value for name, value in settings.items() if not _is_private(value)}
        return ["-m", "sglang.launch_server", *words(public)]

    def environment(self, given: Mapping[str, str], devices: Sequence[str]) -> dict[str, str]:
        """Return the server's environment: its devices, and what a memory saver and a CPU need."""
        variables = dict(given)
        if self.device == "cpu":
            variables["PYTHONPATH"] = os.pathsep.join([str(CPU), *filter(None, [given.get("PYTHONPATH")])])
            variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(devices)
            # a thread a core: more wait for one another at the end of every operation
            variables["OMP_NUM_THREADS"] = str(len(devices[0].split(",")))
            return variables
        # expandable segments break the memory saver
        for name in CHOSEN:
            variables.pop(name, None)
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        return CUDA_ENVIRONMENT | (SPANNING if self.group > 1 else {}) | variables


def _is_private(value: object) -> bool:
    """Return whether a setting holds a text of the environment."""
    return hidden(str(value)) != str(value)
