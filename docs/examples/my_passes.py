"""A pass in twenty lines: fuse the gate of a gated MLP."""

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from qopt.graph import Graph
from qopt.rewrite import Match, RewritePass


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class MySiluMul(RewritePass):
    """Replace silu and a product with `qopt::gated`."""

    name = "my-silu-mul"
    after = ("canonicalize",)
    patterns = (silu_times,)
    example = (torch.empty(2, 8), torch.empty(2, 8))

    def rewrite(self, graph: Graph, match: Match) -> fx.Node:
        gate, up = match.values["gate"], match.values["up"]
        return graph.call(torch.ops.qopt.gated.default, gate, up, "silu")
