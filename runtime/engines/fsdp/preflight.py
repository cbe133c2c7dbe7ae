"""Says before a run why a model can't be trained as its section of a graph says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlgraph.runtime.engines import experts
from rlgraph.runtime.engines.decoder_layers import decoder_layers
from rlgraph.runtime.engines.fsdp import scoring, tensor
from rlgraph.runtime.engines.fsdp.load import quiet
from rlgraph.runtime.engines.fsdp.options import Head
from rlgraph.runtime.engines.model_files import ModelFiles
from rlgraph.runtime.engines.sequence import attention as sequence
from rlgraph.runtime.engines.weights import four_bit, lora, naming, pretrained
from rlgraph.syntax.model_settings import Lora, Train


def unfit(files: ModelFiles, head: Head, train: Train) -> str:
    """Return why a model can't be trained, or nothing.

    The model is built without memory for its weights, of which no more than names and shapes are read.
    """
    if train.lora and train.lora.quantize and (law := four_bit.unfit()):
        return law
    config = files.config()
    if law := pretrained.unfit(config, head):
        return law
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            model = pretrained.shape_of(files, *pretrained.classes(head), torch.float32)
            if head == "lm":
                scoring.check(model)
            tensor.check(model, train.tensor_parallel)
            experts.check(model, train.expert_parallel)
            sequence.check(model, train.sequence_parallel)
            stored = pretrained.weights_of(files.path) if Path(files.path).is_dir() else ()
            naming.views_of(model, stored)
            return _without_targets(model, train.lora) if train.lora else ""
    except ValueError as error:
        return str(error)


def _without_targets(model: Any, options: Lora) -> str:
    try:
        lora.targets_of(model, decoder_layers(model), options.targets)
    except ValueError as error:
        return str(error)
    return ""
