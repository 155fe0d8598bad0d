"""Compute what depends on no input once, at compile time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from qopt.canonical import FRESH, effect, near, value, written
from qopt.graph import Graph
from qopt.rewrite import Pass
from qopt.weights import LazyWeight


class FoldConstants(Pass):
    """Turn calls on weights and numbers alone into weights.

    Before::

        scale = aten.add.Tensor(norm_weight, 1.0)
        y = aten.mul.Tensor(x, scale)

    After::

        y = aten.mul.Tensor(x, norm_weight_plus_one)

    Why: what no input changes need not be computed at every step.
    Needs: `canonicalize`.
    Leaves: packed weights (8- and 32-bit integers of two or more dimensions), which are never
    unpacked, and results that would make the weights grow by more than `budget` bytes, as a second
    form of a shared matrix would. Also random calls, and memory that is written to. Folding is
    lazy: it adds a transform and evaluates nothing.
    """

    name = "fold-constants"
    after = ("canonicalize",)

    budget: int = 1 << 16  # bytes by which one folded result may outgrow what it replaces

    def run(self, graph: Graph) -> int:
        """Fold in order; returns the number of calls that became weights."""
        count = 0
        touched = written(graph)
        for node in graph.nodes:
            if node._erased or near(node, touched) or not self._foldable(graph, node):
                continue
            weight = folded(graph, node)
            with graph.before(node):
                new = graph.add_weight(f"folded.{node.name}", weight)
            graph.replace(node, new)
            count += 1
        return count

    def _foldable(self, graph: Graph, node: fx.Node) -> bool:
        if node.op != "call_function" or effect(node) or node.target in FRESH:
            return False
        result = value(node)
        if not isinstance(result, Tensor) or any(isinstance(s, torch.SymInt) for s in result.shape):
            return False
        weights = [graph.weight(source) for source in node.all_input_nodes]
        if any(weight is None or packed(weight) for weight in weights):
            return False
        replaced = [source for source in node.all_input_nodes if len(source.users) == 1]
        freed = sum(weight.nbytes for weight in map(graph.weight, replaced) if weight)
        return result.numel() * result.dtype.itemsize - freed <= self.budget


def packed(weight: LazyWeight) -> bool:
    """Whether a weight looks like the packed or quantized form of a matrix."""
    return len(weight.shape) > 1 and weight.dtype in (torch.uint8, torch.int8, torch.int32)


def folded(graph: Graph, node: fx.Node) -> LazyWeight:
    """The call as a lazy transform of the weights that it reads."""
    sources = node.all_input_nodes
    inputs = [graph.weights[str(source.target)] for source in sources]
    return LazyWeight.apply(
        "call",
        caller(node, sources),
        inputs,
        value(node).shape,
        value(node).dtype,
        (str(node.target), _named(node, sources)),
    )


def caller(node: fx.Node, sources: list[fx.Node]) -> Callable[[list[Tensor]], Tensor]:
    """The call as a function of the weights' tensors."""
    target, args, kwargs = node.target, node.args, node.kwargs

    def call(values: list[Tensor]) -> Tensor:
        given = dict(zip(sources, values, strict=True))
        filled = fx.map_arg((args, kwargs), given.__getitem__)
        with torch.no_grad():
            return target(*filled[0], **filled[1])  # type: ignore[operator, no-any-return]

    return call


def _named(node: fx.Node, sources: list[fx.Node]) -> Any:
    places = {source: f"input {i}" for i, source in enumerate(sources)}
    return repr(fx.map_arg((node.args, node.kwargs), places.__getitem__))
