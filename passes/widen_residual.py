"""Keep the residual stream of a half-precision decoder in fp32."""

from __future__ import annotations

import operator

import torch
from torch import fx

from qopt.canonical import value
from qopt.graph import Graph, describe
from qopt.ops import OPS
from qopt.passes.fuse_add_rms_norm import plain_sum
from qopt.rewrite import Pass, getitem

aten = torch.ops.aten
RMS_NORM, ADD_RMS_NORM = OPS["rms_norm"].target, OPS["add_rms_norm"].target


class WidenResidual(Pass):
    """Add what the layers return in fp32; all that reads the sum reads it rounded, as before.

    Before::

        y, total = qopt.add_rms_norm(branch, residual, weight, eps)  # all bf16

    After::

        y, total = qopt.add_rms_norm(branch, residual, weight, eps)  # residual and total fp32

    Why: each layer adds a little to a sum that has grown large, and bf16 keeps eight bits of it.
    Half of a model's error in bf16 comes from there, for no more than a row's bytes.
    Needs: `fuse-add-rms-norm`, whose norms read the wide sum without a cast.
    Leaves: sums that are no residual (no term is computed from the other), as of two experts, and
    those that are one op with a LayerNorm.
    fp16 keeps eleven bits, and its sums are exact enough unless `fp16` is set.
    """

    name = "widen-residual"
    rerounds = True
    after = ("fuse-add-rms-norm",)

    fp16: bool = False  # widen the sums of fp16 too

    def run(self, graph: Graph) -> int:
        """Widen in order; returns the number of sums."""
        sums = [node for node in graph.nodes if self._is_sum(node)]
        wide: dict[fx.Node, fx.Node] = {}  # what a reader gets -> the same in fp32
        found = residuals(graph, sums)
        made = [self._widen(graph, node, at, wide) for node, at in found.items()]
        for rounded, total in made:
            for norm in [user for user in rounded.users if user.target is RMS_NORM]:
                self._norm(graph, norm, rounded, total)
            if not rounded.users:
                graph.erase(rounded)
        return len(found)

    def explain(self, graph: Graph) -> list[str]:
        """Candidates are sums that are left."""
        left = [node for node in graph.nodes if self._is_sum(node)]
        return [f"{describe(node)}: neither term is computed from the other" for node in left]

    def _is_sum(self, node: fx.Node) -> bool:
        if node.target is not ADD_RMS_NORM and not plain_sum(node):
            return False
        terms = [value(term) for term in node.args[:2]]
        dtypes = (torch.bfloat16, torch.float16) if self.fp16 else (torch.bfloat16,)
        return all(t.dtype in dtypes and t.dim() == 3 for t in terms)

    def _widen(
        self, graph: Graph, node: fx.Node, at: int, wide: dict[fx.Node, fx.Node]
    ) -> tuple[fx.Node, fx.Node]:
        """Replace a sum; returns its total, rounded and in fp32."""
        residual, branch = node.args[at], node.args[1 - at]
        assert isinstance(residual, fx.Node)
        dtype = value(residual).dtype
        with graph.before(node):
            if residual not in wide:
                wide[residual] = graph.call(aten.to.dtype, residual, torch.float32)
            new = graph.call(node.target, branch, wide[residual], *node.args[2:])  # type: ignore[arg-type]
            new.meta["stack_trace"] = node.meta.get("stack_trace")
            total = new if node.target is aten.add.Tensor else getitem(graph, new, 1)
            rounded = graph.call(aten.to.dtype, total, dtype)
            wide[rounded] = total
            normed = None if total is new else getitem(graph, new, 0)
        if normed is None:
            graph.replace(node, rounded)
        else:
            for user in list(node.users):
                graph.replace(user, rounded if user.args[1] == 1 else normed)
            graph.erase(node)
        return rounded, total

    def _norm(self, graph: Graph, norm: fx.Node, rounded: fx.Node, total: fx.Node) -> None:
        with graph.before(norm):
            new = graph.call(RMS_NORM, total, *norm.args[1:])
            again = graph.call(aten.to.dtype, new, value(rounded).dtype)
        graph.replace(norm, again)


def residuals(graph: Graph, sums: list[fx.Node]) -> dict[fx.Node, int]:
    """The sums of which one term is computed from the other, and which argument that other is."""
    own = {node: 1 << i for i, node in enumerate(graph.fx.nodes)}
    above: dict[fx.Node, int] = {}  # all that a node is computed from, a bit each
    for node in graph.fx.nodes:
        above[node] = own[node]
        for source in node.all_input_nodes:
            above[node] |= above[source]
    found = {}
    for node in sums:
        x, residual = node.args[:2]
        assert isinstance(x, fx.Node)
        assert isinstance(residual, fx.Node)
        if maker(x) is maker(residual):
            continue
        if above[residual] & own[maker(x)]:
            found[node] = 0
        elif above[x] & own[maker(residual)]:
            found[node] = 1
    return found


def maker(node: fx.Node) -> fx.Node:
    """The call whose result, or one of whose results, a node is."""
    source = node.args[0] if node.target is operator.getitem else node
    assert isinstance(source, fx.Node)
    return source
