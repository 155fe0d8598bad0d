"""Fuse a LayerNorm that the model writes out."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from qopt.canonical import value
from qopt.graph import Graph
from qopt.rewrite import Match, RewritePass, Scalar

aten = torch.ops.aten


def divided_by_root(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Division by the standard deviation."""
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.pow(2).mean(-1, keepdim=True)
    return weight * (centred / torch.sqrt(variance + eps)) + bias


def times_reciprocal_root(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Product with its reciprocal."""
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.pow(2).mean(-1, keepdim=True)
    return weight * (centred * torch.rsqrt(variance + eps)) + bias


class FuseLayerNorm(RewritePass):
    """Replace mean, centre, variance, scale and shift with `aten.layer_norm`.

    Before::

        centred = x - mean(x, -1)
        y = weight * (centred / sqrt(mean(centred ** 2, -1) + eps)) + bias

    After::

        y = aten.layer_norm(x, [width], weight, bias, eps)

    Why: one pass over `x` instead of seven.
    Needs: `canonicalize`.
    Leaves: a norm over another axis, one whose weight only fits by broadcasting, and one whose
    inner values are used elsewhere.
    """

    name = "fuse-layer-norm"
    after = ("canonicalize", "fold-constants")
    patterns = (divided_by_root, times_reciprocal_root)
    example = (torch.empty(2, 3, 8), torch.empty(8), torch.empty(8), Scalar(1.2345e-6))
    anchor = (aten.sqrt.default, aten.rsqrt.default)

    def check(self, graph: Graph, match: Match) -> str | None:
        """Weight and bias must be one number a column."""
        width = value(match.values["x"]).shape[-1]
        for name in ("weight", "bias"):
            if tuple(value(match.values[name]).shape) != (width,):
                return f"{name} has another shape than a row of {width}"
        return None

    def rewrite(self, graph: Graph, match: Match) -> fx.Node:
        """One `aten.layer_norm`."""
        x, weight, bias, eps = (match.values[n] for n in ("x", "weight", "bias", "eps"))
        width = int(value(x).shape[-1])
        return graph.call(aten.layer_norm.default, x, [width], weight, bias, float(eps))
