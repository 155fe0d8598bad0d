"""The process that saves a TorchScript file: it imports torch alone, and holds no weight twice."""

from __future__ import annotations

import json
import math
import sys
import warnings
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass
class Saving:
    """What the saving process is asked to do."""

    path: str
    source: str
    data: str
    weights: dict[str, tuple[str, list[int], int]]  # attribute -> dtype, shape, offset in `data`
    same: dict[str, str]  # attribute -> the one that it is
    own: bool = False  # whether the source calls ops of qopt's own


class Artifact(torch.jit.ScriptModule):
    """A module with one method, `forward`, which `define` gives it."""

    def __init__(self, buffers: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)


def define(job: Saving) -> Artifact:
    """Make the module; its weights are views of the mapped file, none is copied."""
    buffers = {
        name: mapped(Path(job.data), getattr(torch, dtype), shape, offset)
        for name, (dtype, shape, offset) in job.weights.items()
    }
    if job.own:
        import_module("qopt.ops")  # registers them
    artifact = Artifact(buffers | {name: buffers[other] for name, other in job.same.items()})
    artifact.define(job.source)
    artifact.eval()
    return artifact


def mapped(path: Path, dtype: torch.dtype, shape: list[int], offset: int) -> Tensor:
    """A tensor whose memory is the file's, read page by page as it is needed."""
    count = math.prod(shape) * dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=dtype)
    data = np.memmap(path, np.uint8, "c", offset, (count,))
    return torch.from_numpy(data).view(dtype).reshape(shape)


def main() -> None:
    """Entry of the saving process."""
    job = Saving(**json.loads(sys.stdin.read()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(define(job), job.path)


if __name__ == "__main__":
    main()
