"""The shapes of an artifact's inputs and outputs, dynamic dimensions under the artifact's names."""

from __future__ import annotations

from torch import Tensor, fx

from qopt.canonical import value
from qopt.graph import Graph
from qopt.runtime.cache import CACHE_POSITION, CAPACITY

TOKENS = {
    "input_ids": ("batch_size", "sequence_length"),
    "position_ids": ("batch_size", "sequence_length"),
    "attention_mask": ("batch_size", "total_sequence_length"),
}


def input_shape(graph: Graph, node: fx.Node, name: str) -> list[int | str]:
    """The declared shape of an input, its dynamic dimensions under the artifact's names."""
    held = value(node).shape
    if graph.info.kind == "decoder":
        static = any(other.name == CACHE_POSITION for other in graph.inputs)
        if static and name == "attention_mask":
            return ["batch_size", CAPACITY]
        if static and name.startswith("past_key_values."):
            return ["batch_size", int(held[1]), CAPACITY, int(held[3])]
        if name in TOKENS:
            return list(TOKENS[name])
        if name.startswith("past_key_values."):
            return ["batch_size", int(held[1]), "past_sequence_length", int(held[3])]
        if name.startswith("past_state."):
            rest = [int(d) if isinstance(d, int) else "past_sequence_length" for d in held[1:]]
            return ["batch_size", *rest]
    return [int(d) if isinstance(d, int) else str(d) for d in held]


def output_shape(graph: Graph, name: str, held: Tensor) -> list[int | str | None]:
    """The declared shape of an output."""
    if graph.info.kind != "decoder":
        return [d if isinstance(d, int) else str(d) for d in held.shape]
    if name.startswith("present."):
        return ["batch_size", int(held.shape[1]), "total_sequence_length", int(held.shape[3])]
    if name.startswith("present_state."):
        sizes = [int(d) if isinstance(d, int) else "total_sequence_length" for d in held.shape[1:]]
        return ["batch_size", *sizes]
    keep = graph.defaults.get("num_logits_to_keep")
    rows: int | str = "sequence_length"
    if isinstance(held.shape[1], int):
        rows = held.shape[1]
    elif keep is not None and int(keep) > 0:
        rows = int(keep)  # onnxruntime-genai allocates by this number
    return ["batch_size", rows, int(held.shape[-1])]
