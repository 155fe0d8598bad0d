"""Complex numbers as pairs of real ones: no target computes with them.

Models use them to rotate queries and keys. Every complex node becomes two, one for each part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from qopt.canonical import value
from qopt.graph import Graph

aten = torch.ops.aten

Pair = tuple[fx.Node, fx.Node]

# Ops that treat both parts alike.
PARTWISE = {
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.select.int,
    aten.slice.Tensor,
    aten.reshape.default,
    aten.view.default,
    aten.expand.default,
    aten.transpose.int,
    aten.permute.default,
    aten.index.Tensor,
    aten.embedding.default,
    aten.cat.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.to.device,
    aten.neg.default,
}


def is_complex(node: Any) -> bool:
    """Whether a node holds complex numbers."""
    held = value(node)
    return isinstance(held, Tensor) and held.is_complex()


def split_complex(graph: Graph) -> int:
    """Rewrite every complex node that can be; returns how many."""
    pairs: dict[fx.Node, Pair] = {}
    count = 0
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if not is_complex(node) and not any(map(is_complex, node.all_input_nodes)):
            continue
        with graph.before(node):
            made = rewrite(graph, node, pairs)
        if isinstance(made, tuple):
            pairs[node] = made
        elif made is not None:
            graph.replace(node, made)
            count += 1
    for node in reversed(list(pairs)):
        if not node._erased and not node.users:
            graph.erase(node)
            count += 1
    return count


def rewrite(graph: Graph, node: fx.Node, pairs: dict[fx.Node, Pair]) -> Pair | fx.Node | None:
    """A complex node as two, a real one that reads complex ones as one; None: not known."""
    function = FUNCTIONS.get(node.target)
    sources = [n for n in node.all_input_nodes if is_complex(n)]
    if any(source not in pairs for source in sources):
        return None
    if function is not None:
        return function(graph, node, pairs)
    if node.target not in PARTWISE or not is_complex(node):
        return None
    parts = []
    for part in (0, 1):
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs),
            lambda n: pairs[n][part] if n in pairs else n,  # noqa: B023
        )
        parts.append(graph.call(node.target, *args, **kwargs))
    return parts[0], parts[1]


Rewrite = Callable[[Graph, fx.Node, dict[fx.Node, Pair]], Pair | fx.Node | None]
FUNCTIONS: dict[Any, Rewrite] = {}


def for_op(*targets: Any) -> Callable[[Rewrite], Rewrite]:
    """Register how an op is written on pairs."""

    def register(function: Rewrite) -> Rewrite:
        for target in targets:
            FUNCTIONS[target] = function
        return function

    return register


@for_op(aten.view_as_complex.default)
def view_as_complex(graph: Graph, node: fx.Node, pairs: dict[fx.Node, Pair]) -> Pair:
    """The two slices of the last dimension."""
    x = node.args[0]
    last = value(x).dim() - 1
    return graph.call(aten.select.int, x, last, 0), graph.call(aten.select.int, x, last, 1)


@for_op(aten.polar.default)
def polar(graph: Graph, node: fx.Node, pairs: dict[fx.Node, Pair]) -> Pair:
    """A length and an angle."""
    length, angle = node.args
    cos, sin = (graph.call(f, angle) for f in (aten.cos.default, aten.sin.default))
    return graph.call(aten.mul.Tensor, length, cos), graph.call(aten.mul.Tensor, length, sin)


@for_op(aten.complex.default)
def from_parts(graph: Graph, node: fx.Node, pairs: dict[fx.Node, Pair]) -> Pair:
    """The parts themselves."""
    return node.args[0], node.args[1]  # type: ignore[return-value]


@for_op(aten.mul.Tensor)
def multiply(graph: Graph, node: fx.Node, pairs: dict[fx.Node, Pair]) -> Pair | None:
    """(a + bi)(c + di), or a factor that is real."""
    left, right = node.args
    if not isinstance(left, fx.Node) or isinstance(right, complex):
        return None

    def times(x: Any, y: Any) -> fx.Node:
        return graph.call(aten.mul.Tensor, x, y)

    if left not in pairs:
        left, right = right, left
    a, b = pairs[left]  # type: ignore[index]
    if not isinstance(right, fx.Node) or right not in pairs:
        return times(a, right), times(b, right)
    c, d = pairs[right]
    real = graph.call(aten.sub.Tensor, times(a, c), times(b, d))
    return real, graph.call(aten.add.Tensor, times(a, d), times(b, c))


@for_op(aten.to.dtype, aten._to_copy.default)
def cast(graph: Graph, node: fx.Node, pairs: dict[fx.Node, Pair]) -> Pair | None:
    """A cast to the same type."""
    source = node.args[0]
    same = value(source).dtype == value(node).dtype
    return pairs[source] if same else None  # type: ignore[index]


@for_op(aten._conj.default, aten.conj.default)
def conjugate(graph: Graph, node: fx.Node, pairs: dict[fx.Node, Pair]) -> Pair:
    """The second part with the other sign."""
    real, imaginary = pairs[node.args[0]]  # type: ignore[index]
    return real, graph.call(aten.neg.default, imaginary)


@for_op(aten.view_as_real.default)
def view_as_real(graph: Graph, node: fx.Node, pairs: dict[fx.Node, Pair]) -> fx.Node:
    """Both parts along a new last dimension."""
    return graph.call(aten.stack.default, list(pairs[node.args[0]]), value(node).dim() - 1)  # type: ignore[index]


@for_op(aten.real.default)
def real_part(graph: Graph, node: fx.Node, pairs: dict[fx.Node, Pair]) -> fx.Node:
    """The first part."""
    return pairs[node.args[0]][0]  # type: ignore[index]


@for_op(aten.imag.default)
def imaginary_part(graph: Graph, node: fx.Node, pairs: dict[fx.Node, Pair]) -> fx.Node:
    """The second part."""
    return pairs[node.args[0]][1]  # type: ignore[index]
