"""The reference of a model that does not fit in memory: its captured graph, one weight at a time.

It is less than the model run by transformers: what capture itself got wrong is in it too. So the
report says which of the two an artifact was held against.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qopt.capture import capture
from qopt.check import decoder_feeds
from qopt.errors import ResourceError
from qopt.sources import ModelSource
from qopt.weights import LazyWeight

Array = NDArray[Any]


class StreamedReference:
    """The captured graph in fp32, interpreted on all rows at once, node by node."""

    def __init__(self, source: ModelSource) -> None:
        self.graph = capture(source, torch.float32)
        self.notes = [
            "streamed check: the model does not fit the memory allowed, so the reference is its "
            "captured graph in fp32, interpreted one weight at a time, not transformers' own run"
        ]

    def answers(self, rows: list[Array], room: Path) -> list[Array]:
        """Logits (tokens, vocabulary) of each row of ids, kept in a file in the folder `room`."""
        spill = Spill(room)
        return [spill.keep(logits) for logits in self.stream(rows)]

    def stream(self, rows: list[Array]) -> Iterator[Array]:
        """Logits (tokens, vocabulary) of one row of ids after the other."""
        feeds = [decoder_feeds(self.graph, torch.from_numpy(row[None]), 0, {}) for row in rows]
        caches: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = [{} for _ in rows]
        for out in self.graph.interpret_all(feeds, caches, assembled):
            yield out["logits"][0].float().numpy()

    def free(self) -> None:
        """Let go of the graph before the artifact is loaded."""
        del self.graph


def assembled(weight: LazyWeight) -> torch.Tensor:
    """Evaluate piece by piece: beside the result no whole tensor of another type is in memory."""
    pieces = weight.chunks()
    first = next(pieces)
    if first.shape == torch.Size(weight.shape):
        return first
    whole = torch.empty(weight.shape, dtype=weight.dtype)
    whole[: len(first)] = first
    at = len(first)
    for piece in pieces:
        whole[at : at + len(piece)] = piece
        at += len(piece)
    return whole


class Spill:
    """Arrays kept in a temporary file without a name in `folder`, which goes with the process."""

    def __init__(self, folder: Path) -> None:
        place = folder if os.access(folder, os.W_OK) else None  # the system's own may be in memory
        self.file = tempfile.TemporaryFile(dir=place)  # noqa: SIM115 - lives as long as its maps
        self.at = 0

    def keep(self, array: Array) -> Array:
        """The same values, read from the file."""
        if not array.size:
            return array
        try:  # written, not mapped: a full disk is an error, where a map would end the process
            self.file.seek(self.at)
            self.file.write(np.ascontiguousarray(array).data)
            self.file.flush()
        except OSError as error:
            raise ResourceError(
                "no room for the logits of the check",
                why=error.strerror,
                todo="free disk space where the artifact is written, or compile with --check off",
            ) from None
        kept = np.memmap(self.file, array.dtype, "r", self.at, array.shape)
        self.at += -(-array.nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        return kept
