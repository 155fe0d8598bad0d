"""A graph in bf16 as one in fp32: what runs where a provider has no bf16 kernels.

Nodes and weights are the same; every bf16 tensor is held in fp32, so that only bf16's rounding of
what is computed is gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

TOLD = (
    "bf16 was not run, since the CPU provider has no kernels for it: the same nodes and weights "
    "ran in fp32, without bf16's rounding"
)


def widen(model: Any) -> None:
    """Make a ModelProto (without its external weights) compute in fp32 where it is bf16."""
    import onnx

    graph = model.graph
    stored = {t.name for t in graph.initializer if t.data_type == BFLOAT16}
    for value in (*graph.input, *graph.output, *graph.value_info):
        held = value.type.tensor_type
        if held.elem_type == BFLOAT16:
            held.elem_type = FLOAT
    nodes: list[Any] = []
    for node in graph.node:
        for place, name in enumerate(node.input):
            if name in stored:  # at its reader, so that a part of the graph reads its own alone
                wide = f"{name}/wide_{len(nodes)}"
                nodes.append(onnx.helper.make_node("Cast", [name], [wide], to=FLOAT))
                node.input[place] = wide
        widen_attributes([node])
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    for function in model.functions:
        del function.value_info[:]
        widen_attributes(function.node)


def widen_attributes(nodes: Iterable[Any]) -> None:
    """Casts and constants of these nodes, and of graphs inside them, as fp32."""
    for node in nodes:
        for attribute in node.attribute:
            if node.op_type in ("Cast", "CastLike") and attribute.name == "to":
                attribute.i = FLOAT if attribute.i == BFLOAT16 else attribute.i
            if attribute.t.data_type == BFLOAT16:
                attribute.t.CopyFrom(in_fp32(attribute.t))
            for inner in (attribute.g, *attribute.graphs):
                widen_attributes(inner.node)


def in_fp32(tensor: Any) -> Any:
    """A bf16 TensorProto as one in fp32."""
    from onnx import numpy_helper

    array = numpy_helper.to_array(tensor).astype(np.float32)
    return numpy_helper.from_array(array, tensor.name)


FLOAT, BFLOAT16 = 1, 16  # onnx's numbers for element types
