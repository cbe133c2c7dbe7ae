"""Messages about a step: the scope that a worker gets, and the report of its share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlgraph.ops.metric import Metric


@dataclass(frozen=True)
class Usage:
    """Resources that one device's share of a step used. Memory is in bytes."""

    memory: int = 0  # the peak of tensors in the step on CUDA; on a CPU the process's since it began
    gpu: str = ""  # name of the GPU, empty on a CPU
    tokens: float = 0.0  # tokens that a train engine went through
    squares: float = 0.0  # the sum of the squared lengths of its sequences
    reserved: int = 0  # the most that torch reserved in the step on CUDA, free blocks included
    device: int = 0  # the CUDA driver's count at the step's end, for all processes


@dataclass(frozen=True)
class Scope:
    """The scope of a worker's share: where in the run the step stands, and the rows of the share."""

    phase: str
    iteration: int
    rows: Any = ()  # int64 row numbers: of the rows read, or of a source's none
    total_rows: int = 0
    position: int = 0
    versions: Mapping[str, int] = field(default_factory=dict)
    adapted: Mapping[str, float] = field(default_factory=dict)  # the op's attributes that follow a metric
    requested_rows: int | None = None  # rows that are asked of a source; None: its own ``batch``
    resumes: bool = False  # whether an op's unfinished rows are taken up again
    may_end_early: bool = False  # whether its round ends where others wait for that: see ``RoundEnd``
    state: str = ""  # JSON, of the node whose state the op has; "": none yet
    samples: Any = ()  # of segments, int64: the number of each row's sample; ``total_samples``: 0 of others
    total_samples: int = 0
    resumed: tuple[Any, ...] = ()  # picks and counts, as of ``repartition``, of what is taken up

    def __str__(self) -> str:
        if self.phase == "eval":
            return f"the evaluation after iteration {self.iteration}"
        return f"iteration {self.iteration + 1}"


@dataclass(frozen=True)
class Report:
    """A worker's report of its share of a step: when it ran, its metrics, and the rows that it made."""

    start: float
    end: float
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    lengths: Any = None  # int64 [rows written], tokens of each, of an op that makes a domain
    counts: Any = None  # int64 [rows read]: how many rows each has become, where that varies
    selected: Any = None  # int64 [rows that stay], which of the rows read, of a filter
    used: Usage = field(default_factory=Usage)
    finished: Any = None  # int64: which of the rows read are finished, of an op that may leave some
    state: str = ""  # JSON, of an op that keeps one
    off_device: bool = False  # whether it ran beside the device
    spans: Sequence[tuple[str, str, float, float]] = ()  # as of ``Context``
    notes: Sequence[str] = ()  # what a user may want to change: a setup's is other than the plan counts
