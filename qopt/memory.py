"""How much memory a compile, its check and its measurements need, and what may be used."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qopt.errors import ResourceError, UsageError

if TYPE_CHECKING:
    import torch

    from qopt.artifact import Artifact
    from qopt.runtime.generate import Model
    from qopt.sources import ModelSource

COMPILER = 900 << 20  # bytes: torch, transformers and a captured graph
CHECKER = 500 << 20  # bytes: the same in a second process, what both read counted once
PIECES = 128 << 20  # bytes of weights on their way into a file that is streamed
WRITING = "writing piece by piece"


@dataclass(frozen=True)
class Weights:
    """Of a model's weights: how many elements, how many at once where it is streamed."""

    elements: int
    heaviest: int  # elements of the largest tensor or of one layer, whichever has more
    itemsize: int  # bytes of an element in the artifact

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in the artifact."""
        return self.elements * self.itemsize

    @property
    def checked_whole(self) -> int:
        """Bytes of memory for a check with model and artifact whole, one after the other."""
        return COMPILER + CHECKER + 2 * self.nbytes

    @property
    def checked_in_parts(self) -> int:
        """Bytes of memory for the streamed check: a layer in fp32, or the logits' matrix."""
        return COMPILER + CHECKER + 4 * self.heaviest

    @property
    def run_whole(self) -> int:
        """Bytes of memory for running the artifact."""
        return COMPILER + 2 * self.nbytes

    @property
    def measured_whole(self) -> int:
        """Bytes of memory where model in fp32 and artifact answer in turns."""
        return COMPILER + 4 * self.elements + 2 * self.nbytes


def weights_of_source(source: ModelSource, dtype: torch.dtype) -> Weights:
    """What is known before capture, from the checkpoint's tensors and its config."""
    sizes = [w.nbytes // w.dtype.itemsize for w in source.tensors.values()]
    layers = getattr(source.config, "num_hidden_layers", None) or 1
    total = sum(sizes)
    return Weights(total, max([*sizes, total // layers]) if sizes else 0, dtype.itemsize)


def weights_of_artifact(artifact: Artifact | Model) -> Weights:
    """What the manifest tells."""
    info = artifact.manifest.model
    itemsize = 4 if artifact.manifest.dtype == "float32" else 2
    total = sum(file.size for file in artifact.manifest.files.values()) // itemsize
    logits = (info.vocab_size or 0) * (info.hidden_size or 0)
    return Weights(total, max(logits, total // max(1, len(info.layers))), itemsize)


@dataclass(frozen=True)
class Plan:
    """What is done part by part, since the memory allowed does not hold it whole."""

    check_in_parts: bool = False
    gate_in_parts: bool = False
    notes: tuple[str, ...] = ()


def plan(
    weights: Weights,
    budget: int,
    *,
    decoder: bool,
    streams: bool,
    checked: bool,
    gated: bool = False,
    timed: bool = False,
    without_check: str = "",
) -> Plan:
    """Decide what runs in parts; raises `ResourceError` where even that needs more than `budget`.

    `decoder`: what else there is, a check runs whole. `streams`: the format is written piece by
    piece, and can be run in parts. `without_check` begins the advice where a check may be left out.
    """
    saved = "a TorchScript file is saved from memory"
    needs = {
        WRITING if streams else saved: COMPILER + (PIECES if streams else weights.nbytes),
        "limits on milliseconds run the whole artifact": weights.run_whole if timed else 0,
    }
    if checked and not decoder:
        needs["the check runs the whole module"] = weights.checked_whole
    check_in_parts = checked and decoder and weights.checked_whole > budget
    gate_in_parts = gated and weights.measured_whole > budget
    notes = []
    if check_in_parts or gate_in_parts:
        least = weights.checked_in_parts
        if not streams:  # the reference in parts, then the script whole
            least = max(least, COMPILER + CHECKER + weights.nbytes)
        needs["the check holds the largest layer in fp32, even part by part"] = least
        whole = weights.checked_whole if check_in_parts else weights.measured_whole
        notes.append(
            f"the check runs part by part in about {least / 1e9:.1f} GB of memory: whole it needs "
            f"{whole / 1e9:.1f}, {budget / 1e9:.1f} may be used"
        )
    elif checked and weights.nbytes > 1 << 30:
        off = (COMPILER + PIECES) / 1e9
        whole = weights.checked_whole
        notes.append(f"the check needs about {whole / 1e9:.1f} GB of memory (off: {off:.1f})")
    reason, most = max(needs.items(), key=lambda item: item[1])
    if most > budget:
        raise ResourceError(
            f"about {most / 1e6:,.0f} MB of memory are needed, {budget / 1e6:,.0f} may be used",
            why=None if reason == WRITING else reason,
            todo=f"{without_check}free memory, or allow more with --max-ram",
        )
    return Plan(check_in_parts, gate_in_parts, tuple(notes))


def memory_budget(max_ram: str | None = None) -> int:
    """Bytes that this process may use: what was said, else what is free now."""
    if max_ram is not None:
        from qopt.recipe import size_in_bytes

        try:
            return int(size_in_bytes(max_ram))
        except ValueError as error:
            raise UsageError(
                f"--max-ram {max_ram}: {error}", todo="write a number with a unit, e.g. 4GB"
            ) from None
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
        return free * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
