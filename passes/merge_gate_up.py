"""Project gate and up of a gated MLP with one matrix."""

from __future__ import annotations

import torch
from torch import fx

from qopt.graph import Graph
from qopt.ops import OPS
from qopt.passes.merge_qkv import merge_linears
from qopt.rewrite import Pass

LINEAR = torch.ops.aten.linear.default


class MergeGateUp(Pass):
    """Concatenate the gate and up matrices of a gated MLP into one linear and a split.

    Before::

        y = qopt.gated(linear(x, gate), linear(x, up))

    After::

        gate, up = split_with_sizes(linear(x, concat(gate, up)), sizes)
        y = qopt.gated(gate, up)

    Why: one product reads `x` once.
    Needs: `fuse-silu-mul`.
    Leaves: matrices that something else reads too, and projections of different inputs. The
    concatenation is lazy.
    """

    name = "merge-gate-up"
    after = ("canonicalize", "fuse-silu-mul")

    def run(self, graph: Graph) -> int:
        """Merge at each gate; returns how many were merged."""
        count = 0
        for node in graph.find(OPS["gated"].target):
            gate, up = node.args[:2]
            both = [n for n in (gate, up) if isinstance(n, fx.Node) and n.target is LINEAR]
            if len(both) == 2 and all(len(n.users) == 1 for n in both):
                count += merge_linears(graph, both, "gate_up")
        return count
