"""Fuse the rotation of queries and keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from qopt.canonical import value
from qopt.graph import Graph, describe
from qopt.ops import OPS
from qopt.rewrite import Pass

aten = torch.ops.aten
ROTARY = OPS["rotary"].target
POINTWISE = {aten.cos.default, aten.sin.default, aten.to.dtype, aten.neg.default}
HALVES, PAIRS = "halves", "pairs"


class FuseRotaryEmbedding(Pass):
    """Replace slices, negation, joining and products with `qopt::rotary`.

    Before::

        turned = cat([-x[..., half:], x[..., :half]], -1)
        y = x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)

    After::

        y = qopt.rotary(x, half_cos, half_sin)

    Why: one op that a target's attention can take in; and cos and sin are computed at half width.
    Needs: `canonicalize`.
    Leaves: pairings that are neither halves nor neighbours, and tables whose two halves cannot be
    shown to be equal. A rotation of the first part of a head takes in the join with its rest.
    """

    name = "fuse-rotary-embedding"
    after = ("canonicalize",)

    def run(self, graph: Graph) -> int:
        """Fuse every rotation, then the joins around partial ones."""
        count = 0
        for node in graph.nodes:
            if node._erased:
                continue
            new = self._sum(graph, node) or self._join(graph, node)
            if new is not None:
                graph.replace(node, new)
                count += 1
        for node in graph.find(aten.cat.default):
            take_in_rest(graph, node)
        return count

    def explain(self, graph: Graph) -> list[str]:
        """Candidates are products by a cosine that are left."""
        left = []
        for node in graph.find(aten.neg.default):
            users = [user for user in node.users if user.target in (aten.cat.default, aten.stack.default)]
            if users:
                left.append(f"{describe(node)}: joined, but not recognised as a rotation")
        return left

    def _sum(self, graph: Graph, node: fx.Node) -> fx.Node | None:
        """`x * cos + turned * sin`."""
        if node.target is not aten.add.Tensor or node.kwargs:
            return None
        for plain, crossed in (node.args, node.args[::-1]):
            for (x, cos), (turned, sin) in product_pairs(plain, crossed):
                form = turned_form(turned, x)
                if form is not None:
                    return build(graph, node, x, cos, sin, form)
        return None

    def _join(self, graph: Graph, node: fx.Node) -> fx.Node | None:
        """`cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin])`, tables at half width already."""
        if node.target is not aten.cat.default or len(node.args[0]) != 2:  # type: ignore[arg-type]
            return None
        first, second = node.args[0]  # type: ignore[misc]
        found = half_width(first, second)
        if found is None or node.args[1] != value(node).dim() - 1:
            return None
        x, cos, sin = found
        return place(graph, node, x, cos, sin, False)


def product_pairs(plain: Any, crossed: Any) -> Iterator[tuple[tuple[Any, Any], tuple[Any, Any]]]:
    """Both orders of the factors of two products."""
    if not all(isinstance(n, fx.Node) and n.target is aten.mul.Tensor for n in (plain, crossed)):
        return
    for a in (plain.args, plain.args[::-1]):
        for b in (crossed.args, crossed.args[::-1]):
            if all(isinstance(n, fx.Node) for n in (*a, *b)):
                yield tuple(a), tuple(b)


def turned_form(turned: fx.Node, x: fx.Node) -> str | None:
    """How `turned` is made of x: by halves, or by neighbours."""
    size = value(x).shape[-1]
    if turned.target is aten.cat.default and len(turned.args[0]) == 2:  # type: ignore[arg-type]
        minus, plus = turned.args[0]  # type: ignore[misc]
        if minus.target is aten.neg.default and size % 2 == 0:
            if piece(minus.args[0], x) == (size // 2, size, 1) and piece(plus, x) == (0, size // 2, 1):
                return HALVES
    if turned.target is aten.reshape.default and turned.args[0].target is aten.stack.default:  # type: ignore[union-attr]
        stacked = turned.args[0]
        parts, dim = stacked.args[0], stacked.args[1] if len(stacked.args) > 1 else 0  # type: ignore[union-attr]
        if len(parts) == 2 and dim in (-1, value(x).dim()):  # type: ignore[arg-type]
            minus, plus = parts  # type: ignore[misc]
            odd, even = (1, size, 2), (0, size, 2)
            if minus.target is aten.neg.default and piece(minus.args[0], x) == odd:
                if piece(plus, x) == even:
                    return PAIRS
    return None


def piece(node: Any, x: fx.Node) -> tuple[int, int, int] | None:
    """(start, stop, step) where `node` is that part of x's last dimension."""
    if not isinstance(node, fx.Node):
        return None
    size = value(x).shape[-1]
    if node.target is aten.slice.Tensor and node.args[0] is x:
        dim, start, stop, step = (*node.args[1:], *(0, 0, 1 << 62, 1)[len(node.args) - 1 :])
        if dim != value(x).dim() - 1:
            return None
        return start or 0, min(stop, size), step  # type: ignore[type-var]
    source = node.args[0] if node.args else None
    if isinstance(source, fx.Node) and source.target is aten.split_with_sizes.default:
        if source.args[0] is x and source.args[2] == value(x).dim() - 1:
            sizes, index = source.args[1], node.args[1]
            start = sum(sizes[:index])  # type: ignore[index, arg-type]
            return start, start + sizes[index], 1  # type: ignore[index]
    return None


def half_width(first: fx.Node, second: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """x, cos and sin of `x1 * cos - x2 * sin` and `x2 * cos + x1 * sin`."""
    if first.target is not aten.sub.Tensor or second.target is not aten.add.Tensor:
        return None
    if first.kwargs or second.kwargs:
        return None
    for (x1, cos), (x2, sin) in product_pairs(*first.args):
        for left, right in (second.args, second.args[::-1]):
            for (y2, cos2), (y1, sin2) in product_pairs(left, right):
                if (y1, y2, cos2, sin2) == (x1, x2, cos, sin):
                    x = x1.args[0]
                    if isinstance(x, fx.Node) and x.target is aten.split_with_sizes.default:
                        x = x.args[0]
                    size = value(x).shape[-1]
                    if piece(x1, x) == (0, size // 2, 1) and piece(x2, x) == (size // 2, size, 1):
                        return x, cos, sin
    return None


def build(
    graph: Graph, node: fx.Node, x: fx.Node, cos: fx.Node, sin: fx.Node, form: str
) -> fx.Node | None:
    """Make the rotation, from tables halved where that is shown to be right."""
    with graph.before(node):
        halves = [halve(graph, table, form) for table in (cos, sin)]
    if halves[0] is None or halves[1] is None:
        return None
    return place(graph, node, x, halves[0], halves[1], form == PAIRS)


def halve(graph: Graph, table: Any, form: str) -> fx.Node | None:
    """The distinct half of a full-width table, where its structure shows what repeats."""
    if not isinstance(table, fx.Node):
        return None
    last = value(table).dim() - 1
    if table.target is aten.cat.default and form == HALVES:
        parts, dim = table.args[0], table.args[1]
        same = len(parts) == 2 and parts[0] is parts[1]  # type: ignore[arg-type, index]
        return parts[0] if same and dim == last else None  # type: ignore[index, return-value]
    if table.target is aten.repeat_interleave.self_int and form == PAIRS:
        source, times, dim = (*table.args, None)[:3]
        return source if times == 2 and dim in (-1, last) else None  # type: ignore[return-value]
    if table.target is aten.reshape.default and form == PAIRS:
        inner = table.args[0]
        if isinstance(inner, fx.Node) and inner.target is aten.stack.default:
            parts = inner.args[0]
            dim = inner.args[1] if len(inner.args) > 1 else 0
            if len(parts) == 2 and parts[0] is parts[1] and dim in (-1, last + 1):  # type: ignore[arg-type, index]
                return parts[0]  # type: ignore[index, return-value]
        return None
    if table.target is aten.unsqueeze.default and table.args[1] != last:
        source = halve(graph, table.args[0], form)
        return source and graph.call(table.target, source, table.args[1])
    if table.target in POINTWISE:
        source = halve(graph, table.args[0], form)
        return source and graph.call(table.target, source, *table.args[1:])
    if table.target is aten.mul.Tensor and not isinstance(table.args[1], fx.Node):
        source = halve(graph, table.args[0], form)
        return source and graph.call(table.target, source, table.args[1])
    return None


def place(
    graph: Graph, node: fx.Node, x: fx.Node, cos: fx.Node, sin: fx.Node, interleaved: bool
) -> fx.Node | None:
    """Insert the op; x may have its heads before or after its tokens."""
    axis = None
    tables = []
    for table in (cos, sin):
        if value(table).dim() != 4:
            return None
        found = table.args[1] if table.target is aten.unsqueeze.default else None
        if found not in (1, 2) or axis not in (None, found):
            return None
        axis = found
        tables.append(table.args[0])
    if value(x).dim() != 4:
        return None
    with graph.before(node):
        if axis == 1:
            new = graph.call(ROTARY, x, *tables, interleaved)
        else:
            moved = graph.call(aten.transpose.int, x, 1, 2)
            new = graph.call(ROTARY, moved, *tables, interleaved)
            new = graph.call(aten.transpose.int, new, 1, 2)
    return new if value(new).dtype == value(node).dtype else None


def take_in_rest(graph: Graph, node: fx.Node) -> None:
    """`cat([rotary(x[..., :r]), x[..., r:]])` is a partial rotation of x."""
    parts = node.args[0]
    if len(parts) != 2 or node.args[1] != value(node).dim() - 1:  # type: ignore[arg-type]
        return
    turned, rest = parts  # type: ignore[misc]
    behind = turned.target is aten.transpose.int and set(turned.args[1:]) == {1, 2}
    rotation = turned.args[0] if behind else turned
    if not isinstance(rotation, fx.Node) or rotation.target is not ROTARY or len(rotation.users) > 1:
        return
    part = rotation.args[0]
    if behind:
        if not isinstance(part, fx.Node) or part.target is not aten.transpose.int:
            return
        part = part.args[0]
    x = source_of(part)
    if x is None or source_of(rest) is not x:
        return
    width, size = value(part).shape[-1], value(x).shape[-1]
    if piece(part, x) != (0, width, 1) or piece(rest, x) != (width, size, 1):
        return
    with graph.before(node):
        whole = graph.call(aten.transpose.int, x, 1, 2) if behind else x
        new = graph.call(ROTARY, whole, *rotation.args[1:])
        if behind:
            new = graph.call(aten.transpose.int, new, 1, 2)
    graph.replace(node, new)


def source_of(node: Any) -> fx.Node | None:
    """What a slice or a piece of a split is taken from."""
    if not isinstance(node, fx.Node) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    if source.target is aten.split_with_sizes.default:
        return source.args[0]  # type: ignore[return-value]
    return source if node.target is aten.slice.Tensor else None
