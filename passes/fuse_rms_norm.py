"""Fuse the decomposed RMSNorm into one op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from qopt.canonical import argument, value
from qopt.graph import Graph
from qopt.ops import OPS
from qopt.rewrite import Match, RewritePass, Scalar, Wide

aten = torch.ops.aten


def norm(x: Tensor, eps: float) -> Tensor:
    """The normalised row in fp32, before weight and rounding."""
    h = x.float()
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)


def weight_after_cast(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Llama: round, then multiply."""
    return weight * norm(x, eps).to(x.dtype)


def weight_before_cast(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gemma: multiply by the widened weight, then round."""
    return (norm(x, eps) * weight.float()).to(x.dtype)


def weight_promoted(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same, the weight widened by the product itself."""
    return (weight * norm(x, eps)).to(x.dtype)


def weight_in_fp32(x: Tensor, wide: Tensor, eps: float) -> Tensor:
    """The same, the weight stored in fp32."""
    return (norm(x, eps) * wide).to(x.dtype)


def no_weight(x: Tensor, eps: float) -> Tensor:
    """Rounded, without a weight."""
    return norm(x, eps).to(x.dtype)


def divided(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Division by the root, rounded before the weight."""
    h = x.float()
    h = h / torch.sqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


EXAMPLE = {
    "x": torch.empty(2, 3, 8),
    "weight": torch.empty(8),
    "wide": Wide(torch.empty(8)),
    "eps": Scalar(1.2345e-6),
}


class FuseRMSNorm(RewritePass):
    """Replace square, mean, rsqrt and scale with `qopt::rms_norm`.

    Before::

        h = x.float()
        h = h * rsqrt(mean(h ** 2, -1) + eps)
        y = weight * h.to(x.dtype)

    After::

        y = qopt.rms_norm(x, weight, eps)

    Why: one pass over `x` instead of five, and every target has a kernel for it.
    Needs: `canonicalize`; `fold-constants` first, where the model adds 1 to the weight.
    Leaves: a norm over another axis, one whose weight only fits by broadcasting, one whose inner
    values are used elsewhere, and an epsilon that is not a number in the graph. The place where the
    model rounds (before or after the weight) is kept.
    """

    name = "fuse-rms-norm"
    after = ("canonicalize", "fold-constants")
    patterns = (
        weight_after_cast,
        weight_before_cast,
        weight_promoted,
        weight_in_fp32,
        divided,
        no_weight,
    )
    anchor = (aten.rsqrt.default,)

    def arguments(self, function: object) -> list[object]:
        """Example arguments by name."""
        code = function.__code__  # type: ignore[attr-defined]
        return [EXAMPLE[name] for name in code.co_varnames[: code.co_argcount]]

    def run(self, graph: Graph) -> int:
        """Fuse the decomposed forms, then rename torch's own op."""
        return super().run(graph) + sum(rename(graph, n) for n in graph.find(aten.rms_norm.default))

    def check(self, graph: Graph, match: Match) -> str | None:
        """The weight must be one number a column."""
        weight = match.values.get("weight", match.values.get("wide"))
        x = value(match.values["x"])
        if weight is not None and tuple(value(weight).shape) != (x.shape[-1],):
            return f"the weight has shape {tuple(value(weight).shape)}, a row has {x.shape[-1]}"
        return None

    def rewrite(self, graph: Graph, match: Match) -> fx.Node:
        """One `qopt::rms_norm`."""
        values = match.values
        weight = values.get("weight", values.get("wide"))
        x = value(values["x"])
        first = match.pattern.name in ("weight_after_cast", "divided") or x.dtype == torch.float32
        target = OPS["rms_norm"].target
        return graph.call(target, values["x"], weight, float(values["eps"]), first)


def rename(graph: Graph, node: fx.Node) -> int:
    """Write `aten.rms_norm` over the last dimension as `qopt::rms_norm`."""
    arguments: Any = node.args
    x, shape = arguments[:2]
    if len(shape) != 1:
        return 0
    eps = argument(node, 3, "eps")
    if eps is None:
        eps = torch.finfo(value(x).dtype).eps
    with graph.before(node):
        first = value(x).dtype == torch.float32
        weight = argument(node, 2, "weight")
        new = graph.call(OPS["rms_norm"].target, x, weight, eps, first)
    graph.replace(node, new)
    return 1
