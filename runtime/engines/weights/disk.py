"""Weights that travel through safetensors files in a folder that both sides see."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file, save_file

from rlgraph.runtime.engines.weights.transfer import Named, Peers, Weights, check_version, in_buckets

INDEX = "model.safetensors.index.json"  # the name that transformers gives it


class Disk:
    """Files of one version, a file per bucket, which the peers read at once and which are then removed."""

    def __init__(self, peers: Peers, folder: str) -> None:
        """Nothing is written yet.

        Args:
            peers: who reads the files.
            folder: that all of them see.
        """
        self.peers, self.folder = peers, Path(folder)

    def send(self, weights: Weights) -> None:
        """Write every tensor, and wait until all have read them; ``receive`` runs there at the same time."""
        path = self.folder / f"weights-{os.getpid()}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        try:
            index = {}
            for number, bucket in enumerate(in_buckets(weights.tensors)):
                name = f"model-{number:05d}.safetensors"
                save_file({key: tensor.detach().cpu().contiguous() for key, tensor in bucket}, path / name)
                index |= {key: name for key, _ in bucket}
            whole = {"metadata": {"version": weights.version}, "weight_map": index}
            (path / INDEX).write_text(json.dumps(whole), encoding="utf-8")
            self.peers.tell((str(path), weights.version))
            self.peers.wait()
        finally:
            shutil.rmtree(path)

    def receive(self, version: int) -> Weights:
        """Return the weights that are sent, file by file."""
        return Weights(version, self._tensors(version))

    def _tensors(self, version: int) -> Iterator[Named]:
        path, came = self.peers.tell(None)
        check_version(came, version)
        index = json.loads(Path(path, INDEX).read_text(encoding="utf-8"))
        check_version(index["metadata"]["version"], version)
        for name in dict.fromkeys(index["weight_map"].values()):
            yield from load_file(Path(path, name)).items()
        self.peers.wait()
