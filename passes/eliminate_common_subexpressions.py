"""Compute equal things once."""

from __future__ import annotations

from typing import Any

from torch import fx

from qopt.canonical import FRESH, effect, written
from qopt.graph import Graph
from qopt.rewrite import Pass


class EliminateCommonSubexpressions(Pass):
    """Let equal calls share one result, and equal reads of a weight one node.

    Before::

        a = aten.sym_size.int(ids, 1)
        b = aten.sym_size.int(ids, 1)

    After::

        a = aten.sym_size.int(ids, 1)

    Why: every layer asks for the same sizes, masks and rotations again.
    Needs: nothing.
    Leaves: calls that draw random numbers, that allocate or receive memory to be written, and
    everything that a mutation touches: two of those are not the same thing.
    """

    name = "eliminate-common-subexpressions"

    def run(self, graph: Graph) -> int:
        """Walk in order; returns the number of calls replaced."""
        seen: dict[Any, fx.Node] = {}
        count = 0
        touched = written(graph)
        for node in graph.nodes:
            key = self._key(node, touched)
            if key is None:
                continue
            first = seen.setdefault(key, node)
            if first is not node:
                graph.replace(node, first)
                count += 1
        return count

    def _key(self, node: fx.Node, touched: set[fx.Node]) -> Any:
        if node.op == "get_attr" and node not in touched:
            return node.op, node.target
        if node.op != "call_function" or node.target in FRESH or effect(node):
            return None
        if node in touched or not touched.isdisjoint(node.all_input_nodes):
            return None
        return node.target, _frozen(node.args), _frozen(node.kwargs)


def _frozen(argument: Any) -> Any:
    if isinstance(argument, list | tuple):
        return tuple(_frozen(item) for item in argument)
    if isinstance(argument, dict):
        return tuple(sorted((key, _frozen(item)) for key, item in argument.items()))
    # 1, 1.0 and True are equal and hash alike, but do not compute alike.
    return (type(argument), argument)
