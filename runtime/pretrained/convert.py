"""Writes the model of a GGUF file as a directory that transformers loads, with weights in float32.

    python -m rlgraph.runtime.pretrained.convert MODEL.gguf DIR [WHEEL]

A process of its own: it needs twice the memory of the model, and the package gguf, which it takes from the
wheel if one is given.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file into a folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = str(file.parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file.name, trust_remote_code=False)
    loaded = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=file.name, trust_remote_code=False, dtype=torch.float32
    )

    # transformers 5.23 refuses to save a model whose configuration names GGUF as its quantization, though
    # the weights are de-quantized: they go into a model that was built without it
    config = loaded.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(arguments: list[str]) -> None:
    """Convert the file that the command line names."""
    file, folder, *wheels = arguments
    sys.path[:0] = wheels  # a wheel of Python files is imported as it is
    convert(Path(file), Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
