"""Take an RMSNorm into the linear that reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from qopt.canonical import argument, value
from qopt.graph import Graph, describe
from qopt.ops import OPS
from qopt.rewrite import Pass

aten = torch.ops.aten
RMS_NORM, ADD_RMS_NORM = OPS["rms_norm"].target, OPS["add_rms_norm"].target


class FuseNormLinear(Pass):
    """Replace an RMSNorm that one linear alone reads, and a SiLU behind it, with one op.

    Before::

        y = silu(linear(qopt.rms_norm(x, norm_weight, eps), weight, bias))

    After::

        y = qopt.rms_norm_linear(x, norm_weight, weight, bias, eps, cast_first, "silu")

    Why: the normed rows are made in the product's prologue and never written to memory.
    Needs: `fuse-rms-norm`; `merge-qkv` and `merge-gate-up` leave one linear where there were more.
    Leaves: a norm that several nodes read, and, of an `add_rms_norm`, the sum as its own node.
    """

    name = "fuse-norm-linear"
    after = (
        "fuse-rms-norm",
        "merge-qkv",
        "merge-gate-up",
        "fuse-add-rms-norm",
        "widen-residual",
        "fuse-linear-silu",
        "last-token-logits",
    )

    def run(self, graph: Graph) -> int:
        """Fuse every norm with one reader; returns how many."""
        count = 0
        for norm in graph.find(RMS_NORM):
            linear = only_linear(norm, norm)
            if linear is not None:
                self._fuse(graph, linear, norm.args[0], norm.args[1:])
                count += 1
        for both in graph.find(ADD_RMS_NORM):
            normed = next((user for user in both.users if user.args[1] == 0), None)
            linear = None if normed is None else only_linear(normed, both)
            if linear is not None:
                self._fuse(graph, linear, self._sum(graph, both), both.args[2:])
                count += 1
        return count

    def explain(self, graph: Graph) -> list[str]:
        """Candidates are norms that are left."""
        return [
            f"{describe(norm)}: not one linear alone reads it"
            for norm in graph.find(RMS_NORM, ADD_RMS_NORM)
        ]

    def _sum(self, graph: Graph, both: fx.Node) -> fx.Node:
        """The sum of an `add_rms_norm` as a node of its own, for all that read it."""
        with graph.before(both):
            total = graph.call(aten.add.Tensor, *both.args[:2])
        for user in list(both.users):
            if user.args[1] == 1:
                graph.replace(user, total)
        return total

    def _fuse(self, graph: Graph, linear: fx.Node, x: Any, rest: Any) -> None:
        norm_weight, eps, *cast_first = rest
        reader = next(iter(linear.users)) if len(linear.users) == 1 else None
        last = reader if reader is not None and reader.target is aten.silu.default else linear
        activation = "silu" if last is not linear else None
        weight, bias = linear.args[1], argument(linear, 2, "bias")
        first = cast_first[0] if cast_first else True
        with graph.before(last):
            call = graph.call(
                OPS["rms_norm_linear"].target, x, norm_weight, weight, bias, eps, first, activation
            )
        call.meta["stack_trace"] = linear.meta.get("stack_trace")
        graph.replace(last, call)


def only_linear(normed: fx.Node, norm: fx.Node) -> fx.Node | None:
    """The one linear that reads a norm, where it is the product of its rows with a matrix."""
    if len(normed.users) != 1:
        return None
    linear = next(iter(normed.users))
    if linear.target is not aten.linear.default or linear.args[0] is not normed:
        return None
    given = [linear.args[1], argument(linear, 2, "bias"), norm.args[2 if norm is not normed else 1]]
    dtype = value(normed).dtype
    alike = all(value(node).dtype == dtype for node in given if isinstance(node, fx.Node))
    return linear if alike and value(linear.args[1]).dim() == 2 else None
