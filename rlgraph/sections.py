"""The sections of a graph beside its nodes: what may stand in them, and the defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A strict record: no unknown keys, no silent conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class Optimizer(Section):
    """AdamW and its learning-rate schedule (Loshchilov and Hutter, arXiv 1711.05101)."""

    lr: Positive
    betas: Annotated[list[Share], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    eps: Positive = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0  # 0 is off
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: Natural = 0
    total_steps: Natural = 0  # optimizer steps until a cosine or linear schedule ends; 0: those of the run


class Serve(Section):
    """The engine that generates with the model."""

    engine: Literal["transformers"] = "transformers"
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_rows: Count = 1024  # samples that one device generates at a time


class Train(Section):
    """The engine that trains the model."""

    engine: Literal["fsdp"] = "fsdp"
    micro_tokens: Count = 16384  # padded tokens of one micro-batch on one device
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the computation; master weights are float32


class ModelSection(Section):
    """A set of weights by name."""

    path: str
    head: Literal["lm", "value"] = "lm"
    frozen: bool = False
    optimizer: Optimizer | None = None
    serve: Serve = Serve()
    train: Train = Train()


class Pool(Section):
    """A named set of devices."""

    devices: Count | Literal["auto"] = "auto"


class Schedule(Section):
    """How long to run, and what is kept on the way."""

    iterations: Natural
    staleness: Annotated[int, Field(ge=0, le=0)] = 0  # generation and training take turns
    save_every: Natural = 0  # iterations between checkpoints; 0: only at the end
    keep: Count = 2  # checkpoints that stay on disk
    timeout: Positive = 3600.0  # seconds that one step may take


class Eval(Section):
    """The graph once more, with other attributes, pruned to the columns that are reported.

    ``nodes`` changes attributes of the graph's nodes, or adds nodes (those with an ``op``), which take the
    place of any that write the same columns. ``report`` names metrics, each the mean of a column. It runs
    before the first iteration, every ``every``, and after the last.
    """

    nodes: dict[str, dict[str, Any]] = {}
    report: Annotated[dict[str, str], Field(min_length=1)]
    every: Natural = 0  # 0: only before the first iteration and after the last
