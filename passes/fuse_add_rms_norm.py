"""Fuse the residual sum with the norm that reads it."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from qopt.canonical import argument, same_shape, value
from qopt.graph import Graph
from qopt.ops import OPS
from qopt.rewrite import Pass, getitem

aten = torch.ops.aten


class FuseAddRMSNorm(Pass):
    """Replace a sum and the RMSNorm or LayerNorm of it with one op that returns both.

    Before::

        total = x + residual
        y = qopt.rms_norm(total, weight, eps)

    After::

        y, total = qopt.add_rms_norm(x, residual, weight, eps)

    Why: the sum is read while it is in registers; it is still returned, since the next residual
    needs it.
    Needs: `fuse-rms-norm`.
    Leaves: sums that broadcast, change the dtype or scale a term; a second norm of the same sum.
    """

    name = "fuse-add-rms-norm"
    after = ("fuse-rms-norm", "fuse-layer-norm", "fold-norm-weight")

    def run(self, graph: Graph) -> int:
        """Fuse in order; returns the number of sums."""
        norms = graph.find(OPS["rms_norm"].target, aten.layer_norm.default)
        return sum(self._fuse(graph, norm) for norm in norms)

    def _fuse(self, graph: Graph, norm: fx.Node) -> int:
        total = norm.args[0]
        if not isinstance(total, fx.Node) or not plain_sum(total):
            return 0
        order = {node: i for i, node in enumerate(graph.fx.nodes)}
        others = [n for n in norm.all_input_nodes if n is not total]
        last = max([total, *others], key=order.__getitem__)
        if any(order[user] <= order[last] for user in total.users):
            return 0
        with graph.after(last):
            call = self._call(graph, norm, total)
            if call is None:
                return 0
            call.meta["stack_trace"] = norm.meta.get("stack_trace")
            normed, joined = getitem(graph, call, 0), getitem(graph, call, 1)
        graph.replace(norm, normed)
        if not total._erased:
            graph.replace(total, joined)
        return 1

    def _call(self, graph: Graph, norm: fx.Node, total: fx.Node) -> fx.Node | None:
        x, residual = total.args[:2]
        if norm.target is OPS["rms_norm"].target:
            return graph.call(OPS["add_rms_norm"].target, x, residual, *norm.args[1:])
        if len(norm.args[1]) != 1:  # type: ignore[arg-type]
            return None
        weight, bias = argument(norm, 2, "weight"), argument(norm, 3, "bias")
        eps = argument(norm, 4, "eps", 1e-5)
        return graph.call(OPS["add_layer_norm"].target, x, residual, weight, bias, eps)


def plain_sum(node: fx.Node) -> bool:
    """Whether a node adds two tensors of its own shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    return all(
        isinstance(a, fx.Node)
        and isinstance(value(a), Tensor)
        and value(a).dtype == value(node).dtype
        and same_shape(value(a), value(node))
        for a in node.args
    )
