"""Take a SiLU, and the product with up, into the linear before it."""

from __future__ import annotations

import operator

import torch
from torch import fx

from qopt.canonical import argument, value
from qopt.graph import Graph, describe
from qopt.ops import OPS
from qopt.rewrite import Pass

aten = torch.ops.aten
GATED = OPS["gated"].target


class FuseLinearSilu(Pass):
    """Replace a SiLU of a linear, or the gate of its two halves, with one op.

    Before::

        gate, up = split_with_sizes(linear(x, weight, bias), [n, n])
        y = qopt.gated(gate, up, "silu")

    After::

        y = qopt.linear_silu(x, weight, bias, True)

    Why: the product, twice as wide as what is left of it, is never written to memory.
    Needs: `fuse-silu-mul` and `merge-gate-up` for the gate of an MLP; a lone SiLU needs nothing.
    Leaves: linears that something else reads, gates of other activations, halves in another order.
    """

    name = "fuse-linear-silu"
    after = ("canonicalize", "fuse-silu-mul", "merge-gate-up")

    def run(self, graph: Graph) -> int:
        """Fuse every SiLU whose linear it alone reads; returns how many."""
        count = 0
        for node in graph.find(aten.silu.default, GATED):
            linear = self._linear(node)
            if linear is None:
                continue
            weight, bias = linear.args[1], argument(linear, 2, "bias")
            with graph.before(node):
                new = graph.call(
                    OPS["linear_silu"].target, linear.args[0], weight, bias, node.target is GATED
                )
            new.meta["stack_trace"] = node.meta.get("stack_trace")
            graph.replace(node, new)
            count += 1
        return count

    def explain(self, graph: Graph) -> list[str]:
        """Candidates are activations that are left."""
        return [
            f"{describe(node)}: it alone does not read the halves, or the whole, of one linear"
            for node in graph.find(aten.silu.default, GATED)
        ]

    def _linear(self, node: fx.Node) -> fx.Node | None:
        """The linear that a SiLU or a gate takes in."""
        source = node.args[0]
        if node.target is GATED:
            if argument(node, 2, "activation", "silu") != "silu":
                return None
            source = halved(node.args[0], node.args[1])
        if not isinstance(source, fx.Node) or len(source.users) != 1:
            return None
        if source.target is not aten.linear.default:
            return None
        operands = (source.args[0], source.args[1], argument(source, 2, "bias"))
        dtypes = {value(held).dtype for held in operands if isinstance(held, fx.Node)}
        return source if len(dtypes) == 1 and value(source.args[1]).dim() == 2 else None


def halved(gate: object, up: object) -> fx.Node | None:
    """What was split into two equal parts, gate and up in this order, for them alone."""
    both = []
    for at, half in enumerate((gate, up)):
        if not isinstance(half, fx.Node) or half.target is not operator.getitem:
            return None
        if half.args[1] != at or len(half.users) != 1:
            return None
        both.append(half.args[0])
    split = both[0]
    if split is not both[1] or not isinstance(split, fx.Node) or len(split.users) != 2:
        return None
    if split.target is not aten.split_with_sizes.default:
        return None
    sizes, dim = split.args[1], argument(split, 2, "dim", 0)
    source = split.args[0]
    last = value(source).dim() - 1
    equal = isinstance(sizes, list | tuple) and len(sizes) == 2 and sizes[0] == sizes[1]
    return source if equal and dim in (-1, last) else None  # type: ignore[return-value]
