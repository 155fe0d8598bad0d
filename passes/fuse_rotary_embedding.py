"""Fuse the rotation of queries and keys."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, fx

from qopt.canonical import apply_rules, as_node, value
from qopt.graph import Graph, describe
from qopt.ops import OPS
from qopt.rewrite import Pass

aten = torch.ops.aten
ROTARY = OPS["rotary"].target
POINTWISE = {aten.cos.default, aten.sin.default, aten.to.dtype, aten.neg.default}
HALVES, PAIRS = "halves", "pairs"
Halved = dict[tuple[fx.Node, str], fx.Node]  # a table and how it repeats, to its half
Piece = tuple[int, int, int]  # start, stop, step


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
        halved: Halved = {}
        for node in graph.nodes:
            if node._erased:
                continue
            new = self._sum(graph, node, halved) or self._join(graph, node)
            if new is not None:
                graph.replace(node, new)
                count += 1
        for node in graph.find(aten.cat.default):
            take_in_rest(graph, node)
        if count:  # heads moved in front for the op, and back, and in front for the attention
            for node in graph.find(aten.transpose.int):
                if not node._erased:
                    apply_rules(graph, node)
        return count

    def explain(self, graph: Graph) -> list[str]:
        """Candidates are products by a cosine that are left."""
        left = []
        for node in graph.find(aten.neg.default):
            users = [
                user for user in node.users if user.target in (aten.cat.default, aten.stack.default)
            ]
            if users:
                left.append(f"{describe(node)}: joined, but not recognised as a rotation")
        return left

    def _sum(self, graph: Graph, node: fx.Node, halved: Halved) -> fx.Node | None:
        """`x * cos + turned * sin`."""
        if node.target is not aten.add.Tensor or node.kwargs:
            return None
        terms: Any = node.args
        for plain, crossed in (terms, terms[::-1]):
            for (x, cos), (turned, sin) in product_pairs(plain, crossed):
                form = turned_form(turned, x)
                if form is not None:
                    return build(graph, node, x, (cos, sin), form, halved)
        return None

    def _join(self, graph: Graph, node: fx.Node) -> fx.Node | None:
        """`cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin])`, tables at half width already."""
        if node.target is not aten.cat.default:
            return None
        parts, dim = joined(node)
        if len(parts) != 2 or dim != value(node).dim() - 1:
            return None
        found = half_width(*parts)
        return None if found is None else place(graph, node, *found, False)


def joined(node: fx.Node) -> tuple[list[Any], int]:
    """What a `cat` or `stack` joins, and along which dimension, counted from the front."""
    args: Any = node.args
    return list(args[0]), (args[1] if len(args) > 1 else 0) % value(node).dim()


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
    if not isinstance(value(x), Tensor) or not value(x).dim():
        return None
    size = value(x).shape[-1]
    halves, pairs = turned, stacked(turned)
    if halves.target is aten.cat.default and size % 2 == 0:
        first, second = (0, size // 2, 1), (size // 2, size, 1)
        return HALVES if minus_then_plus(halves, x, second, first) else None
    if pairs is not None:
        even, odd = (0, size, 2), (1, size, 2)
        return PAIRS if minus_then_plus(pairs, x, odd, even) else None
    return None


def minus_then_plus(node: fx.Node, x: fx.Node, minus: Piece, plus: Piece) -> bool:
    """Whether a join along the last dimension holds -x[minus] and x[plus]."""
    parts, dim = joined(node)
    if len(parts) != 2 or dim != value(node).dim() - 1:
        return False
    negative, positive = parts
    if negative.target is not aten.neg.default:
        return False
    return piece(negative.args[0], x) == minus and piece(positive, x) == plus


def stacked(node: Any) -> fx.Node | None:
    """The `stack` of two along a new last dimension that `node` flattens, or None."""
    if not isinstance(node, fx.Node) or node.target is not aten.reshape.default:
        return None
    inner = node.args[0]
    if not isinstance(inner, fx.Node) or inner.target is not aten.stack.default:
        return None
    parts, dim = joined(inner)
    flat, deep = value(node), value(inner)
    fits = len(parts) == 2 and dim == deep.dim() - 1 == flat.dim()
    return inner if fits and flat.shape[-1] == 2 * deep.shape[-2] else None


def piece(node: Any, x: fx.Node) -> Piece | None:
    """(start, stop, step) where `node` is that part of x's last dimension."""
    if not isinstance(node, fx.Node) or not node.args:
        return None
    args: Any = node.args
    size, last = value(x).shape[-1], value(x).dim() - 1
    if node.target is aten.slice.Tensor and args[0] is x:
        given = [*args[1:], *[0, 0, None, 1][len(args) - 1 :]]
        dim, start, stop, step = given
        if dim != last or isinstance(start, fx.Node) or isinstance(stop, fx.Node):
            return None
        start, stop, step = slice(start, stop, step).indices(size)
        return start, stop, step
    if node.target is operator.getitem and args[0].target is aten.split_with_sizes.default:
        source, sizes, dim = args[0].args
        if source is x and dim == last:
            start = sum(sizes[: args[1]])
            return start, start + sizes[args[1]], 1
    return None


def half_width(first: Any, second: Any) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """x, cos and sin of `x1 * cos - x2 * sin` and `x2 * cos + x1 * sin`."""
    if first.target is not aten.sub.Tensor or second.target is not aten.add.Tensor:
        return None
    if first.kwargs or second.kwargs:
        return None
    difference: Any = first.args
    terms: Any = second.args
    for (x1, cos), (x2, sin) in product_pairs(*difference):
        for left, right in (terms, terms[::-1]):
            for (y2, cos2), (y1, sin2) in product_pairs(left, right):
                if (y1, y2, cos2, sin2) == (x1, x2, cos, sin):
                    x = source_of(x1)
                    size = 0 if x is None else value(x).shape[-1]
                    if x is None or size % 2:
                        continue
                    if piece(x1, x) == (0, size // 2, 1) and piece(x2, x) == (size // 2, size, 1):
                        return x, cos, sin
    return None


def build(
    graph: Graph,
    node: fx.Node,
    x: fx.Node,
    tables: tuple[fx.Node, fx.Node],
    form: str,
    halved: Halved,
) -> fx.Node | None:
    """Make the rotation, from tables halved where that is shown to be right."""
    with graph.before(node):
        halves = [halve(graph, table, form, halved) for table in tables]
    if halves[0] is None or halves[1] is None:
        return None
    return place(graph, node, x, halves[0], halves[1], form == PAIRS)


def halve(graph: Graph, table: Any, form: str, halved: Halved) -> fx.Node | None:
    """The distinct half of a full-width table, where its structure shows what repeats.

    A table is halved once: all layers rotate by the same angles, and a target sees that they do.
    """
    if not isinstance(table, fx.Node):
        return None
    if (table, form) in halved:
        return halved[table, form]
    last = value(table).dim() - 1
    args: Any = table.args
    if table.target is aten.cat.default and form == HALVES:
        parts, dim = joined(table)
        return parts[0] if len(parts) == 2 and parts[0] is parts[1] and dim == last else None
    if table.target is aten.repeat_interleave.self_int and form == PAIRS:
        source, times, dim = (*args, None)[:3]
        return source if times == 2 and dim in (-1, last) else None
    pairs = stacked(table)
    if pairs is not None and form == PAIRS:
        parts, _ = joined(pairs)
        return parts[0] if parts[0] is parts[1] else None
    if through(table, last):
        source = halve(graph, args[0], form, halved)
        if source is not None:
            halved[table, form] = graph.call(cast(Any, table.target), source, *args[1:])
            return halved[table, form]
    return None


def through(table: fx.Node, last: int) -> bool:
    """Whether a call treats every element of its first argument alike, columns staying columns."""
    if table.target is aten.unsqueeze.default:
        return bool(table.args[1] != last)
    if table.target is aten.mul.Tensor:
        return not isinstance(table.args[1], fx.Node)
    return table.target in POINTWISE and not table.kwargs


def place(
    graph: Graph, node: fx.Node, x: fx.Node, cos: fx.Node, sin: fx.Node, interleaved: bool
) -> fx.Node | None:
    """Insert the op; x may have its heads before or after its tokens."""
    if {value(n).dim() for n in (x, cos, sin)} != {4}:
        return None
    with graph.before(node):
        (axis, *_), (other, *_) = both = [without_heads(graph, table) for table in (cos, sin)]
        if axis is None or axis != other:
            return None
        tables = [table for _, table in both]
        if axis == 1:
            new = graph.call(ROTARY, x, *tables, interleaved)
        else:
            moved = graph.call(aten.transpose.int, x, 1, 2)
            new = graph.call(ROTARY, moved, *tables, interleaved)
            new = graph.call(aten.transpose.int, new, 1, 2)
    return new if value(new).dtype == value(node).dtype else None


def without_heads(graph: Graph, table: fx.Node) -> tuple[int | None, fx.Node]:
    """A table that was broadcast over heads, before it was; and the axis of the heads."""
    args: Any = table.args
    if table.target is aten.unsqueeze.default and args[1] in (1, 2):
        return args[1], args[0]
    sliced = table.target is aten.slice.Tensor and args[1] == value(table).dim() - 1
    if sliced or (table.target in POINTWISE and not table.kwargs):
        axis, inner = without_heads(graph, args[0])
        if axis is not None:
            rest = (args[1] - 1, *args[2:]) if sliced else args[1:]
            return axis, graph.call(cast(Any, table.target), inner, *rest)
    return None, table


def take_in_rest(graph: Graph, node: fx.Node) -> None:
    """`cat([rotary(x[..., :r]), x[..., r:]])` is a partial rotation of x."""
    parts, dim = joined(node)
    if len(parts) != 2 or dim != value(node).dim() - 1:
        return
    turned, rest = parts
    behind = exchanged(turned)
    rotation = turned.args[0] if behind else turned
    if rotation.target is not ROTARY or len(rotation.users) > 1:
        return
    part = rotation.args[0]
    if behind:
        if not exchanged(part):
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


def exchanged(node: Any) -> bool:
    """Whether a node exchanges heads and tokens."""
    return node.target is aten.transpose.int and set(node.args[1:]) == {1, 2}


def source_of(node: Any) -> fx.Node | None:
    """What a slice or a piece of a split is taken from."""
    if not isinstance(node, fx.Node) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    if source.target is aten.split_with_sizes.default:
        return as_node(source.args[0])
    return source if node.target is aten.slice.Tensor else None
