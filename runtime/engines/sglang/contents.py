"""The contents of a sync to SGLang servers: all weights, or an adapter (LoRA) beside those of the files.

Each way has the same four moves: ``begin`` before anything is sent, the ``buckets`` of what is sent, ``send``
of one of them, and ``end``, after which the server is at the version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlgraph.costs.lora_size import SLOTS, adapted_layers
from rlgraph.costs.model_size import size_of
from rlgraph.runtime.engines.sglang.client import Client
from rlgraph.runtime.engines.weights.transfer import Named, in_buckets
from rlgraph.syntax.model_settings import Lora


class AllWeights:
    """Brings every weight, bucket by bucket, in a session of updates."""

    def begin(self, client: Client) -> None:
        client.begin_update()

    def buckets(self, parameters: Iterable[Named]) -> Iterator[Sequence[Named]]:
        return in_buckets(parameters)

    def send(self, client: Client, handles: Sequence[str], version: int) -> None:
        """Bring a bucket into the memory of a server on this host.

        Each of its ranks takes its part of the weights by one of the handles.
        """
        body = {
            "serialized_named_tensors": list(handles),
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": str(version),
        }
        client.post("update_weights_from_tensor", body)

    def end(self, client: Client, version: int) -> None:
        client.end_update()


class Adapter:
    """Brings an adapter at once, under a name that has its version, and drops those before it.

    A server that starts anew says that it has no version until it has its adapter again.
    """

    def __init__(self, lora: Lora, layers: Sequence[str]) -> None:
        """Take the adapter's settings, and the last names of the linear layers that have it."""
        self.settings = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha}
        self.settings |= {"target_modules": sorted(layers), "bias": "none"}

    def launched(self) -> dict[str, Any]:
        """Return the settings by which a server has room for it, and for requests without one."""
        return {
            "enable_lora": True,
            "max_lora_rank": self.settings["r"],
            "lora_target_modules": self.settings["target_modules"],
            "max_loras_per_batch": SLOTS,
            "lora_strict_loading": True,
        }

    def begin(self, client: Client) -> None:
        """Drop what an earlier sync brought: nothing may be in flight that names it."""
        for name in client.adapters():
            client.post("unload_lora_adapter", {"lora_name": name})

    def buckets(self, parameters: Iterable[Named]) -> Iterator[Sequence[Named]]:
        """Yield one bucket: SGLang takes all tensors of an adapter in one call."""
        yield [*parameters]

    def send(self, client: Client, handles: Sequence[str], version: int) -> None:
        body = {
            "lora_name": adapter_name(version),
            "config_dict": self.settings,
            "serialized_named_tensors": list(handles),
            "load_format": "flattened_bucket",
        }
        client.post("load_lora_adapter_from_tensors", body)

    def end(self, client: Client, version: int) -> None:
        client.post("update_weight_version", {"new_version": str(version), "abort_all_requests": False})


def adapter_name(version: int) -> str:
    """Return the name of the adapter of a version, which requests give."""
    return f"version-{version}"


def adapter_of(path: str, options: Mapping[str, Any]) -> Adapter:
    """Return the adapter of a model, by ``models.NAME.train.lora``.

    Raises:
        GraphError: the model's family is not one whose layers are known.
    """
    lora = Lora.model_validate(options)
    return Adapter(lora, sorted(adapted_layers(size_of(path), lora)))
