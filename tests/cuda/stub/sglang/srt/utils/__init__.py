"""Objects as text that another process of this host reads: tensors travel by shared memory or CUDA IPC."""

from __future__ import annotations

import base64
import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch.multiprocessing  # noqa: F401  teaches ForkingPickler tensors


class MultiprocessingSerializer:
    """To text and back."""

    @staticmethod
    def serialize(thing: Any, output_str: bool = False) -> str:
        """The text; torch counts a hold on the memory until it is read."""
        sink = io.BytesIO()
        ForkingPickler(sink).dump(thing)
        return base64.b64encode(sink.getvalue()).decode()

    @staticmethod
    def deserialize(text: str) -> Any:
        """What was serialized."""
        return pickle.loads(base64.b64decode(text))
