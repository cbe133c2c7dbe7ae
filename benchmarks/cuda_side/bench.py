"""What the measures of ``cuda.py`` share: the device, the clock, the record of a figure, and the models.

Shapes are those of published models, weights are random, and nothing is downloaded. With ``small`` every size
shrinks so far that a CPU goes through all measures in seconds: its figures say only that the code runs.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlgraph.costs.detect import rates_of
from rlgraph.runtime.demo import make_tokenizer
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine

QWEN3 = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40960}
SHAPES: dict[str, dict[str, Any]] = {
    # 8 of the 36 layers: masters, gradients and AdamW's averages of all of them exceed one GPU
    "Qwen3-8B, 8 layers": {
        **QWEN3, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 8, "num_attention_heads": 32, "tie_word_embeddings": False,
    },
    "Qwen3-1.7B": {
        **QWEN3, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 28, "num_attention_heads": 16, "tie_word_embeddings": True,
    },
}  # fmt: skip
BIG, WHOLE = SHAPES
SMALL = {
    "vocab_size": 512, "head_dim": 16, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Record:
    """One figure, what it is held against, and the work that it is a rate of.

    Attributes:
        name: what was measured, under which settings.
        value: the figure.
        unit: of the figure.
        against: what ``bound`` is: a ceiling, a peer or a prediction of the same run; empty for none.
        bound: in the same unit.
        want: what the ratio should be, as ``>= 0.8``; empty where it is only recorded.
        work: for ``cuda_rates.py``: the kind of work, its sizes and its seconds.
    """

    name: str
    value: float
    unit: str
    against: str = ""
    bound: float | None = None
    want: str = ""
    work: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """The figure over what it is held against."""
        return self.value / self.bound if self.bound else None

    @property
    def is_met(self) -> bool | None:
        """Whether the ratio is what is wanted; None where nothing is."""
        if not self.want or self.ratio is None:
            return None
        sign, _, limit = self.want.partition(" ")
        return self.ratio >= float(limit) if sign == ">=" else self.ratio <= float(limit)


Records = Iterator[Record]


@dataclass
class Bench:
    """Where measures run, and what earlier ones found that later ones are held against."""

    device: torch.device
    small: bool
    folder: Path
    found: dict[str, float] = field(default_factory=dict)  # bytes, operations and tokens per second

    @property
    def is_cuda(self) -> bool:
        """Whether there is a GPU's allocator, streams and IPC."""
        return self.device.type == "cuda"

    def size(self, full: int, small: int) -> int:
        """A size, or the one that a CPU goes through in no time."""
        return small if self.small else full

    @property
    def peak(self) -> float:
        """Bfloat16 operations per second: the data sheet's where the GPU is known, else of the product."""
        gpu = rates_of(torch.cuda.get_device_name()) if self.is_cuda else None
        return gpu.bf16_flops if gpu else self.found["product"]

    def wait(self) -> None:
        """Wait until the device has done what it was given."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def seconds(self, action: Callable[[], Any], repeats: int = 5, warm: int = 2, inner: int = 1) -> float:
        """The median time of an action after ``warm`` of them, each time ``inner`` of them in a row."""
        if self.small:
            repeats = warm = 1
        for _ in range(warm):
            action()
        return statistics.median(self.once(action, inner) for _ in range(repeats))

    def once(self, action: Callable[[], Any], inner: int = 1) -> float:
        """Seconds of one action, or of each of ``inner`` in a row."""
        self.wait()
        start = time.perf_counter()
        for _ in range(inner):
            action()
        self.wait()
        return (time.perf_counter() - start) / inner

    def clear(self) -> None:
        """Give back all memory that nothing holds."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    def model(self, name: str) -> Path:
        """A directory with a model of random weights and a tokenizer; made on first use."""
        from transformers import Qwen3Config, Qwen3ForCausalLM

        path = self.folder / name.replace(" ", "-").replace(",", "")
        if not path.exists():
            shape = SMALL | {"tie_word_embeddings": name == WHOLE} if self.small else SHAPES[name]
            config = Qwen3Config(**shape, eos_token_id=2, bos_token_id=None, pad_token_id=0)
            torch.manual_seed(0)
            with self.device:
                made = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
            made.save_pretrained(path)
            make_tokenizer().save_pretrained(path)
            del made
            self.clear()
        return path

    @contextmanager
    def engine(self, name: str, **options: Any) -> Iterator[FsdpEngine]:
        """A train engine in bfloat16 on the device, which is freed at the end."""
        given = {"optimizer": {"lr": 1e-6}, "dtype": "bfloat16", "device": str(self.device)}
        made = FsdpEngine.of(str(self.model(name)), **(given | options))
        try:
            yield made
        finally:
            del made
            self.clear()
