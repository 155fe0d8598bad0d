"""Fuse the gate of a gated MLP."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from qopt.canonical import same_shape, value
from qopt.graph import Graph
from qopt.ops import OPS
from qopt.rewrite import Match, RewritePass


def silu(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU."""
    return F.silu(gate) * up


def gelu(gate: Tensor, up: Tensor) -> Tensor:
    """GeGLU with the exact error function."""
    return F.gelu(gate) * up


def gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    """GeGLU with the approximation by tanh."""
    return F.gelu(gate, approximate="tanh") * up


class FuseSiluMul(RewritePass):
    """Replace an activation and the product with `qopt::gated`.

    Before::

        y = silu(gate) * up

    After::

        y = qopt.gated(gate, up, "silu")

    Why: the activated gate is never written to memory.
    Needs: `canonicalize`.
    Leaves: products that only fit by broadcasting, and an activation that is used elsewhere.
    """

    name = "fuse-silu-mul"
    after = ("canonicalize", "fuse-gelu")
    patterns = (silu, gelu, gelu_tanh)
    example = (torch.empty(2, 3, 8), torch.empty(2, 3, 8))
    anchor = (torch.ops.aten.silu.default, torch.ops.aten.gelu.default)

    def check(self, graph: Graph, match: Match) -> str | None:
        """Gate and up must have one shape."""
        gate, up = value(match.values["gate"]), value(match.values["up"])
        if not same_shape(gate, up) or gate.dtype != up.dtype:
            return "gate and up differ in shape or dtype"
        return None

    def rewrite(self, graph: Graph, match: Match) -> fx.Node:
        """One `qopt::gated`."""
        values = match.values
        return graph.call(OPS["gated"].target, values["gate"], values["up"], match.pattern.name)
