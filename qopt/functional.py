"""Writes in place become values: what a call wrote through a view is made anew for later readers.

A write through a chain of views is undone step by step (`slice` by `slice_scatter`, and so on) up
to the memory's owner; every other view of that memory that is read later is taken again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from qopt.canonical import aliased, argument, functional_form, targets_of_write, value
from qopt.graph import Graph

aten = torch.ops.aten

Undo = Callable[[Graph, fx.Node, fx.Node, fx.Node], fx.Node]
UNDO: dict[Any, Undo] = {}

# Ops that are a view of their argument, or a copy of it where its layout allows no view.
MAYBE_VIEWS = {
    aten.reshape.default,
    aten.reshape_as.default,
    aten.contiguous.default,
    aten.flatten.using_ints,
    aten.view_as.default,
}


def functionalize(graph: Graph) -> int:
    """Rewrite every write that can be; the rest stays, and counts as an effect."""
    return sum(rewrite_write(graph, node) for node in graph.nodes if targets_of_write(node))


def rewrite_write(graph: Graph, node: fx.Node) -> bool:
    """Replace one call that writes by calls that make the new values."""
    written, functional = targets_of_write(node), functional_form(node.target)
    if functional is None or len(written) != 1 or written[0] is not node.args[0]:
        return False
    parents = {n: parent_of(graph, n) for n in graph.fx.nodes if n.op == "call_function"}
    steps, owner = chain(parents, written[0])
    if owner.op != "call_function" or any(undo_of(view) is None for view, _ in steps):
        return False
    order = {n: i for i, n in enumerate(graph.fx.nodes)}
    with graph.before(node):
        new = graph.call(functional, *node.args, **node.kwargs)
        if value(new).dtype != value(written[0]).dtype:
            new = graph.call(aten.to.dtype, new, value(written[0]).dtype)
        fresh = {written[0]: new}
        for view, parent in steps:
            undo = undo_of(view)
            assert undo is not None
            new = undo(graph, view, parent, new)
            fresh[parent] = new
        again(graph, parents, owner, fresh, node, order)
    for old, made in fresh.items():
        for user in [u for u in old.users if order.get(u, -1) > order[node]]:
            user.replace_input_with(old, made)
    graph.replace(node, fresh[written[0]])
    return True


def parent_of(graph: Graph, node: fx.Node) -> fx.Node | None:
    """The argument that a node is a view of, or None."""
    parent = aliased(node)
    if parent is None or node.target not in MAYBE_VIEWS:
        return parent
    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    try:
        with graph.fake_mode:
            made = node.target(*args, **kwargs)
        same = made.untyped_storage()._cdata == value(parent).untyped_storage()._cdata
        return parent if same else None
    except Exception:  # the layout cannot be told: as its schema says
        return parent


def chain(
    parents: dict[fx.Node, fx.Node | None], node: fx.Node
) -> tuple[list[tuple[fx.Node, fx.Node]], fx.Node]:
    """The views from `node` up to the owner of its memory, each with its parent; and the owner."""
    steps = []
    while (parent := parents.get(node)) is not None:
        if node.target is operator.getitem:  # of a split: one step, from the piece to the whole
            whole = parents[parent]
            assert whole is not None
            parent = whole
        steps.append((node, parent))
        node = parent
    return steps, node


def again(
    graph: Graph,
    parents: dict[fx.Node, fx.Node | None],
    owner: fx.Node,
    fresh: dict[fx.Node, fx.Node],
    node: fx.Node,
    order: dict[fx.Node, int],
) -> None:
    """Take the views of the memory again that something after `node` reads."""
    family = {owner}
    for view, parent in parents.items():
        if parent in family and order[view] < order[node]:
            family.add(view)
    needed = set()
    for view in sorted(family - {owner}, key=order.__getitem__, reverse=True):
        if view in needed or any(order.get(user, -1) > order[node] for user in view.users):
            needed.update({view, *(p for p in [parents[view]] if p is not None)})
    for view in sorted(needed - fresh.keys(), key=order.__getitem__):
        made = graph.fx.node_copy(view, lambda n: fresh.get(n, n))
        made.meta = dict(view.meta)
        fresh[view] = made


# Undoing views -------------------------------------------------------------------------------


def undoes(*targets: Any) -> Callable[[Undo], Undo]:
    """Register how a write into a view reaches what it is a view of."""

    def register(function: Undo) -> Undo:
        for target in targets:
            UNDO[target] = function
        return function

    return register


def undo_of(view: fx.Node) -> Undo | None:
    """How to undo a view; a piece of a split by the split."""
    if view.target is operator.getitem:
        source = view.args[0]
        assert isinstance(source, fx.Node)
        undo = UNDO.get((operator.getitem, source.target))
        dim = argument(source, 2, "dim", 0) if undo is piece_of_split else 0
        sizes = [piece.shape[dim] for piece in value(source)] if undo is piece_of_split else []
        return None if any(isinstance(size, torch.SymInt) for size in sizes) else undo
    return UNDO.get(view.target)


@undoes(aten.slice.Tensor)
def undo_slice(graph: Graph, view: fx.Node, parent: fx.Node, new: fx.Node) -> fx.Node:
    """Write a range back."""
    dim, step = argument(view, 1, "dim", 0), argument(view, 4, "step", 1)
    start, end = argument(view, 2, "start"), argument(view, 3, "end")
    return graph.call(aten.slice_scatter.default, parent, new, dim, start, end, step)


@undoes(aten.narrow.default)
def undo_narrow(graph: Graph, view: fx.Node, parent: fx.Node, new: fx.Node) -> fx.Node:
    """Write a range of a given length back."""
    _, dim, start, length = view.args
    end: Any = None
    if isinstance(start, int) and isinstance(length, int):
        end = start + length
    else:
        end = graph.call(operator.add, start, length)
    return graph.call(aten.slice_scatter.default, parent, new, dim, start, end, 1)


@undoes(aten.select.int)
def undo_select(graph: Graph, view: fx.Node, parent: fx.Node, new: fx.Node) -> fx.Node:
    """Write one slice back."""
    return graph.call(aten.select_scatter.default, parent, new, *view.args[1:])


@undoes(aten.transpose.int)
def undo_transpose(graph: Graph, view: fx.Node, parent: fx.Node, new: fx.Node) -> fx.Node:
    """Exchange the dimensions back."""
    return graph.call(aten.transpose.int, new, *view.args[1:])


@undoes(aten.t.default, aten.numpy_T.default)
def undo_t(graph: Graph, view: fx.Node, parent: fx.Node, new: fx.Node) -> fx.Node:
    """Turn back."""
    rank = value(parent).dim()
    return graph.call(aten.permute.default, new, list(reversed(range(rank))))


@undoes(aten.permute.default)
def undo_permute(graph: Graph, view: fx.Node, parent: fx.Node, new: fx.Node) -> fx.Node:
    """Put the dimensions back in order."""
    rank = value(parent).dim()
    order = [d % rank for d in view.args[1]]  # type: ignore[union-attr]
    return graph.call(aten.permute.default, new, [order.index(d) for d in range(rank)])


@undoes(aten.unsqueeze.default)
def undo_unsqueeze(graph: Graph, view: fx.Node, parent: fx.Node, new: fx.Node) -> fx.Node:
    """Drop the dimension of size 1."""
    return graph.call(aten.squeeze.dim, new, view.args[1])


@undoes(
    aten.view.default,
    aten._unsafe_view.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.unflatten.int,
    *MAYBE_VIEWS,
)
def undo_reshape(graph: Graph, view: fx.Node, parent: fx.Node, new: fx.Node) -> fx.Node:
    """Give the elements their former shape."""
    return graph.call(aten.reshape_as.default, new, parent)


@undoes(aten.alias.default, aten.detach.default, aten.lift_fresh.default, aten.to.dtype)
def undo_alias(graph: Graph, view: fx.Node, parent: fx.Node, new: fx.Node) -> fx.Node:
    """The same thing under another name."""
    return new


def piece_of_split(graph: Graph, view: fx.Node, parent: fx.Node, new: fx.Node) -> fx.Node:
    """Write a piece of a split back."""
    split: Any = view.args[0]
    place: Any = view.args[1]
    dim = argument(split, 2, "dim", 0)
    sizes = [piece.shape[dim] for piece in value(split)]
    start = sum(sizes[:place])
    end = start + sizes[place]
    return graph.call(aten.slice_scatter.default, parent, new, dim, start, end, 1)


for _split in (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default):
    UNDO[(operator.getitem, _split)] = piece_of_split


@undoes((operator.getitem, aten.unbind.int))
def undo_unbind(graph: Graph, view: fx.Node, parent: fx.Node, new: fx.Node) -> fx.Node:
    """Write one slice back."""
    unbind, place = view.args
    dim = argument(unbind, 1, "dim", 0)  # type: ignore[arg-type]
    return graph.call(aten.select_scatter.default, parent, new, dim, place)
