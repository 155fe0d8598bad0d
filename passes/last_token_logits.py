"""Compute logits only where they are asked for."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from qopt.canonical import value
from qopt.graph import Graph
from qopt.ops import OPS
from qopt.rewrite import Pass

aten = torch.ops.aten
POINTWISE = {
    aten.to.dtype,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.add.Tensor,
    aten.tanh.default,
    aten.mul.Scalar,
    aten.div.Scalar,
}
INPUT = "num_logits_to_keep"


class LastTokenLogits(Pass):
    """Keep each row's own last n columns before the head; n is an input with a default.

    Before::

        logits = linear(hidden, head)

    After::

        kept = qopt.last_tokens(hidden, attention_mask, num_logits_to_keep)
        logits = linear(kept, head)

    Why: in a prompt of 512 tokens the head is a fifth of the work of a small model, and generation
    reads one row of it.
    Needs: nothing; stands late, so that the norm before the head is fused first.
    Leaves: models whose logits are not a linear of one hidden state a token. Rows of unequal
    length count their own real tokens. `keep` is the default n; 0 means all columns.
    """

    name = "last-token-logits"
    after = ("canonicalize", "fuse-rms-norm")

    keep: int = 1  # columns of logits a row gets unless the caller says otherwise; 0 = all

    def run(self, graph: Graph) -> int:
        """Insert at the head; returns 1 where that was possible."""
        names = {node.name for node in graph.inputs}
        if graph.info.kind != "decoder" or INPUT in names or "attention_mask" not in names:
            return 0
        head = self._head(graph)
        if head is None:
            graph.notes.append(
                "logits are no linear of the hidden states: all columns are computed"
            )
            return 0
        mask = next(n for n in graph.inputs if n.name == "attention_mask")
        with graph.before(next(n for n in graph.nodes if n.op == "call_function")):
            count = graph.fx.placeholder(INPUT)
        with graph.fake_mode:
            count.meta["val"] = torch.ones(1, dtype=torch.int64)
        graph.defaults[INPUT] = torch.tensor([self.keep], dtype=torch.int64)
        hidden = head.args[0]
        with graph.before(head):
            kept = graph.call(OPS["last_tokens"].target, hidden, mask, count)
        head.replace_input_with(hidden, kept)  # type: ignore[arg-type]
        downstream(graph, head)
        return 1

    def _head(self, graph: Graph) -> fx.Node | None:
        node = graph.results[0]
        while node.target in POINTWISE and isinstance(node.args[0], fx.Node):
            others = [a for a in node.args[1:] if isinstance(a, fx.Node)]
            if any(graph.weight(other) is None for other in others):
                return None
            node = node.args[0]
        if node.target is not aten.linear.default or value(node.args[0]).dim() != 3:
            return None
        return node


def downstream(graph: Graph, start: fx.Node) -> None:
    """Compute shapes anew from `start` on."""
    stale = {start}
    for node in graph.nodes:
        if node.op == "call_function" and (node in stale or stale & set(node.all_input_nodes)):
            stale.add(node)
            graph.infer(node)
            assert isinstance(node.meta["val"], Tensor)
