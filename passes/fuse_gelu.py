"""Fuse a gelu that the model writes out."""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from qopt.graph import Graph
from qopt.rewrite import Match, RewritePass

aten = torch.ops.aten


def by_tanh(x: Tensor) -> Tensor:
    """The form of GPT-2 (Hendrycks and Gimpel 2016, their approximation)."""
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def by_tanh_factored(x: Tensor) -> Tensor:
    """The same with x taken out of the cube, as gelu_fast has it."""
    inner = x * 0.7978845608 * (1.0 + 0.044715 * x * x)
    return 0.5 * x * (1.0 + torch.tanh(inner))


def by_erf(x: Tensor) -> Tensor:
    """The exact form."""
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class FuseGelu(RewritePass):
    """Replace a gelu written in products, powers and tanh or erf with `aten.gelu`.

    Before::

        y = 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))

    After::

        y = aten.gelu(x, approximate="tanh")

    Why: one pass over `x` instead of eight.
    Needs: `canonicalize`.
    Leaves: other constants (a quick gelu, x * sigmoid(1.702 * x)), and a gelu whose inner values
    are used elsewhere.
    """

    name = "fuse-gelu"
    after = ("canonicalize",)
    patterns = (by_tanh, by_tanh_factored, by_erf)
    example = (torch.empty(2, 3, 8),)
    anchor = (aten.tanh.default, aten.erf.default)

    def rewrite(self, graph: Graph, match: Match) -> fx.Node:
        """One `aten.gelu`."""
        approximate = "none" if match.pattern.name == "by_erf" else "tanh"
        return graph.call(aten.gelu.default, match.values["x"], approximate=approximate)
