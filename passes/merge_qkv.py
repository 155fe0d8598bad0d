"""Project queries, keys and values with one matrix."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from qopt.canonical import value
from qopt.graph import ATTENTION, CACHED_ATTENTION, Graph
from qopt.ops import OPS
from qopt.rewrite import Pass
from qopt.weights import LazyWeight

aten = torch.ops.aten
THROUGH = {
    aten.reshape.default,
    aten.transpose.int,
    aten.mul.Tensor,
    aten.layer_norm.default,
    OPS["rotary"].target,
    OPS["rms_norm"].target,
}


class MergeQKV(Pass):
    """Concatenate the q, k and v matrices of an attention into one linear and a split.

    Before::

        q, k, v = linear(x, wq), linear(x, wk), linear(x, wv)

    After::

        q, k, v = split_with_sizes(linear(x, concat(wq, wk, wv)), sizes)

    Why: one product reads `x` once, and an attention that takes packed heads needs no split.
    Needs: `canonicalize`; the rotation may be fused or not.
    Leaves: projections of different inputs, matrices that are read or tied elsewhere, and a layer
    where some projections have a bias and others have none. The concatenation is lazy.
    """

    name = "merge-qkv"
    after = ("canonicalize", "fuse-rotary-embedding", "fuse-rms-norm")

    def run(self, graph: Graph) -> int:
        """Merge at each attention; returns how many were merged."""
        count = 0
        for node in graph.find(ATTENTION, CACHED_ATTENTION):
            linears = [projection(argument) for argument in node.args[:3]]
            if all(linears):
                count += merge_linears(graph, [n for n in linears if n is not None], "qkv")
        return count


def projection(node: object) -> fx.Node | None:
    """The linear that an attention's argument comes from, through what keeps its columns."""
    while isinstance(node, fx.Node):
        if node.target is aten.linear.default:
            return node
        if node.target not in THROUGH:
            return None
        node = node.args[0]
    return None


def merge_linears(graph: Graph, linears: Sequence[fx.Node], suffix: str) -> int:
    """Make one linear and a split of several that read the same input; 1 where that was done."""
    first = linears[0]
    if len(set(linears)) != len(linears):
        return 0
    weights = [graph.weight(n.args[1]) for n in linears]
    biases = [n.args[2] if len(n.args) > 2 else None for n in linears]
    if any(
        n.args[0] is not first.args[0] or w is None for n, w in zip(linears, weights, strict=True)
    ):
        return 0
    if any(len(n.args[1].users) > 1 for n in linears):  # type: ignore[union-attr]
        return 0
    if graph.shared([str(n.args[1].target) for n in linears]):  # type: ignore[union-attr]
        return 0
    if len({b is None for b in biases}) != 1 or len({w.dtype for w in weights if w}) != 1:
        return 0
    stored = [graph.weight(b) for b in biases if b is not None]
    if any(b is None for b in stored):
        return 0
    name = f"{common_name([str(n.args[1].target) for n in linears])}{suffix}"  # type: ignore[union-attr]
    with graph.before(min(linears)):
        weight = graph.add_weight(f"{name}.weight", LazyWeight.concat([w for w in weights if w]))
        arguments = [first.args[0], weight]
        if stored:
            merged = LazyWeight.concat([b for b in stored if b])
            arguments.append(graph.add_weight(f"{name}.bias", merged))
        whole = graph.call(aten.linear.default, *arguments)
        sizes = [int(value(n).shape[-1]) for n in linears]
        dim = value(whole).dim() - 1
        pieces = graph.call(aten.split_with_sizes.default, whole, sizes, dim)
        parts = [graph.call(operator.getitem, pieces, i) for i in range(len(linears))]
    for old, new in zip(linears, parts, strict=True):
        new.meta["stack_trace"] = old.meta.get("stack_trace")
        graph.replace(old, new)
    return 1


def common_name(names: Sequence[str]) -> str:
    """The modules that all names share, with a dot behind."""
    shared = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "".join(f"{part}." for part in shared)
