"""Fold the weight of a norm into the matrices that read it."""

from __future__ import annotations

import torch
from torch import fx

from qopt.graph import Graph
from qopt.ops import OPS
from qopt.rewrite import Pass
from qopt.weights import LazyWeight

LINEAR = torch.ops.aten.linear.default
FOLDABLE = {"source", "cast", "concat", "slice", "transpose", "scale", "low_rank", "reshape"}


class FoldNormWeight(Pass):
    """Multiply the columns of every matrix behind an RMSNorm by the norm's weight.

    Before::

        y = linear(qopt.rms_norm(x, weight, eps), matrix)

    After::

        y = linear(qopt.rms_norm(x, None, eps), matrix * weight)

    Why: a norm without a weight reads less, and can be folded further into the matrix product.
    Needs: `fuse-rms-norm`.
    Leaves: a norm that anything but a linear reads, a matrix that something else reads too (a tied
    embedding), quantized matrices, and those in fp16 or bf16: the product would be rounded to them,
    and SmolLM2's logits move by 0.1 in fp16 and by 1 in bf16. The products are taken lazily.
    """

    name = "fold-norm-weight"
    after = ("fuse-rms-norm", "merge-qkv", "merge-gate-up")

    def run(self, graph: Graph) -> int:
        """Fold where every reader allows it; returns the number of norms."""
        return sum(self._fold(graph, node) for node in graph.find(OPS["rms_norm"].target))

    def _fold(self, graph: Graph, node: fx.Node) -> int:
        weight = graph.weight(node.args[1])
        users = list(node.users)
        if weight is None or not users or not all(self._takes(graph, node, u) for u in users):
            return 0
        for user in users:
            matrix = user.args[1]
            assert isinstance(matrix, fx.Node)
            scaled = graph.weights[str(matrix.target)].scale(weight, 1)
            with graph.before(user):
                new = graph.add_weight(f"{matrix.target}_scaled", scaled)
            user.replace_input_with(matrix, new)
            graph.erase(matrix)
        node.update_arg(1, None)
        return 1

    def _takes(self, graph: Graph, norm: fx.Node, user: fx.Node) -> bool:
        if user.target is not LINEAR or user.args[0] is not norm:
            return False
        stored = graph.weight(user.args[1])
        if stored is None or len(user.args[1].users) > 1:  # type: ignore[union-attr]
            return False
        return (
            stored.dtype in (torch.float32, torch.float64)
            and plain(stored)
            and not graph.shared([str(user.args[1].target)])  # type: ignore[union-attr]
        )


def plain(weight: LazyWeight) -> bool:
    """Whether only transforms that keep elements elements stand between the weight and its file."""
    return weight.name in FOLDABLE and all(plain(part) for part in weight.inputs)
