"""The one spelling that qopt gives to each computation: what `canonicalize` applies to models.

Patterns are put through the same rules, so a pattern and a model cannot differ by spelling alone.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from functools import partial
from operator import is_not
from typing import Any

import torch
from torch import Tensor, fx

from qopt.graph import Graph

aten = torch.ops.aten

Rule = Callable[[Graph, fx.Node], fx.Node | None]
RULES: dict[Any, list[Rule]] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register a rule for calls of `targets`: it returns what takes the node's place, or None."""

    def register(function: Rule) -> Rule:
        for target in targets:
            RULES.setdefault(target, []).append(function)
        return function

    return register


def canonicalize(graph: Graph) -> int:
    """Apply every rule at every node, in order, until none applies; returns how often one did."""
    count = 0
    touched = written(graph)
    for node in graph.nodes:
        while not node._erased and node.op == "call_function" and not near(node, touched):
            new = apply_rules(graph, node)
            if new is None:
                break
            count += 1
            node = new
    return count + eliminate_dead_code(graph)


def apply_rules(graph: Graph, node: fx.Node) -> fx.Node | None:
    """Apply the first rule that does something; returns the node that stands there now."""
    for apply in RULES.get(node.target, ()):
        with graph.before(node):
            new = apply(graph, node)
        if new is None:
            continue
        if new is not node:
            new.meta.setdefault("stack_trace", node.meta.get("stack_trace"))
            graph.replace(node, new)
        return new
    return None


def effect(node: fx.Node) -> bool:
    """Whether a call does more than compute its result: it mutates, or draws random numbers."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags


def owners(graph: Graph) -> dict[fx.Node, fx.Node]:
    """For each node, the node that made the memory which it reads: itself, unless it is a view."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.fx.nodes:
        base = aliased(node)
        found[node] = node if base is None else found[base]
    return found


def aliased(node: fx.Node) -> fx.Node | None:
    """The argument whose memory a call's result shares, or None."""
    if node.target is operator.getitem:  # a piece of a split is a view, a result of topk is not
        source = as_node(node.args[0])
        return source if source is not None and aliased(source) is not None else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    schema = node.target._schema
    if all(result.alias_info is None for result in schema.returns):
        return None
    shared = (given for a, given in arguments(node) if a.alias_info is not None)
    base = next((given for given in shared if isinstance(given, fx.Node)), None)
    held = node.meta.get("val")
    if base is None or not isinstance(held, Tensor) or node.target is aten.view.dtype:
        return base
    return base if held.dtype == value(base).dtype else None  # a cast made new memory


def arguments(node: fx.Node) -> list[tuple[Any, Any]]:
    """The schema's arguments of a call, each with what is given for it."""
    assert isinstance(node.target, torch._ops.OpOverload)
    declared = node.target._schema.arguments
    given = list(zip(declared, node.args, strict=False))
    return given + [(a, node.kwargs[a.name]) for a in declared if a.name in node.kwargs]


def as_node(given: Any) -> fx.Node | None:
    """`given` where it is a node."""
    return given if isinstance(given, fx.Node) else None


def targets_of_write(node: fx.Node) -> list[fx.Node]:
    """The arguments that a call writes into."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    wrote = [g for a, g in arguments(node) if a.alias_info is not None and a.alias_info.is_write]
    return [n for g in wrote for n in (g if isinstance(g, list | tuple) else [g]) if as_node(n)]


def written(graph: Graph) -> set[fx.Node]:
    """Nodes whose memory some call writes into, by whatever name: no rewrite may touch them."""
    writes = [base for node in graph.fx.nodes for base in targets_of_write(node)]
    if not writes:
        return set()
    owner = owners(graph)
    memory = {owner[base] for base in writes}
    return {node for node, made in owner.items() if made in memory}


def near(node: fx.Node, touched: set[fx.Node]) -> bool:
    """Whether a node, its arguments or theirs are in `touched`."""
    if not touched:
        return False
    sources = node.all_input_nodes
    return node in touched or any(
        source in touched or not touched.isdisjoint(source.all_input_nodes) for source in sources
    )


# Allocations: their memory is to be written, so no two are the same thing.
FRESH = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.empty_strided.default,
    aten.new_empty_strided.default,
}

ASSERTIONS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.msg,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}


def eliminate_dead_code(graph: Graph) -> int:
    """Erase calls and weights that nothing uses; effects stay. Returns how many calls went."""
    count = 0
    for node in reversed(graph.nodes):
        if node.users or node.op not in ("call_function", "get_attr"):
            continue
        if node.op == "call_function" and effect(node) and node.target not in ASSERTIONS:
            continue
        graph.fx.erase_node(node)
        count += node.op == "call_function"
    return count


def value(node: Any) -> Any:
    """What a node holds: a fake tensor, or a symbolic number."""
    return node.meta["val"] if isinstance(node, fx.Node) else node


def operands(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments of a call."""
    return node.args


def options(node: fx.Node) -> dict[str, Any]:
    """The named arguments of a call."""
    return dict(node.kwargs)


def same_shape(a: Any, b: Any) -> bool:
    """Whether two fake tensors have provably equal shapes."""
    return len(a.shape) == len(b.shape) and all(
        same_size(x, y) for x, y in zip(a.shape, b.shape, strict=True)
    )


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are the same number or the same symbolic expression."""
    a = a.node.expr if isinstance(a, torch.SymInt) else a
    b = b.node.expr if isinstance(b, torch.SymInt) else b
    return bool(a == b)


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """An argument by place or name."""
    if len(node.args) > index:
        return node.args[index]
    return node.kwargs.get(name, default)


# Casts and copies ----------------------------------------------------------------------------


@rule(
    aten._to_copy.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten.type_as.default,
    torch.ops.prims.convert_element_type.default,
)
def cast(graph: Graph, node: fx.Node) -> fx.Node | None:
    """A cast is `to.dtype`; one that changes nothing is no node."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    wanted = value(node).dtype
    if value(source).dtype == wanted:
        return source
    if node.target is aten.to.dtype and len(node.args) == 2 and not node.kwargs:
        return None
    return graph.call(aten.to.dtype, source, wanted)


@rule(
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.detach_.default,
    aten.lift_fresh_copy.default,
    aten.lift_fresh.default,
)
def copy(graph: Graph, node: fx.Node) -> fx.Node | None:
    """Values have no layout and are never written to: a copy is the thing itself."""
    return as_node(node.args[0])


@rule(aten.dropout.default, aten.feature_dropout.default)
def dropout(graph: Graph, node: fx.Node) -> fx.Node | None:
    """Dropout does nothing outside training."""
    return None if argument(node, 2, "train") else as_node(node.args[0])


@rule(aten.cat.default)
def join(graph: Graph, node: fx.Node) -> fx.Node | None:
    """Empty pieces add nothing, and one piece is no join."""
    pieces = list(node.args[0])  # type: ignore[arg-type]
    dim = int(argument(node, 1, "dim", 0))
    kept = [p for p in pieces if value(p).dim() == value(node).dim() and value(p).shape[dim] != 0]
    if len(kept) == len(pieces) > 1 or any(value(p).dtype != value(node).dtype for p in kept):
        return None
    if len(kept) == 1:
        return as_node(kept[0])
    return graph.call(aten.cat.default, kept, dim) if kept else None


@rule(aten.add.Tensor, aten.sub.Tensor)
def add_zero(graph: Graph, node: fx.Node) -> fx.Node | None:
    """x + 0 is x where neither dtype nor shape changes."""
    return neutral(node, 0)


@rule(aten.mul.Tensor, aten.div.Tensor)
def times_one(graph: Graph, node: fx.Node) -> fx.Node | None:
    """x * 1 is x where neither dtype nor shape changes."""
    return neutral(node, 1)


def neutral(node: fx.Node, number: int) -> fx.Node | None:
    """The first argument, where the second is the neutral number."""
    x, other = node.args[:2]
    if isinstance(other, fx.Node) or other != number or not isinstance(x, fx.Node):
        return None
    source = value(x)
    if not isinstance(source, Tensor) or source.dtype != value(node).dtype:
        return None
    return x


@rule(aten.mul.Tensor)
def square(graph: Graph, node: fx.Node) -> fx.Node | None:
    """x * x is x ** 2."""
    x, other = node.args
    if x is not other:
        return None
    return graph.call(aten.pow.Tensor_Scalar, x, 2)


@rule(aten.square.default)
def named_square(graph: Graph, node: fx.Node) -> fx.Node | None:
    """`square` is x ** 2."""
    return graph.call(aten.pow.Tensor_Scalar, node.args[0], 2)


@rule(aten.mul.Tensor)
def swish(graph: Graph, node: fx.Node) -> fx.Node | None:
    """x * sigmoid(x) is silu(x)."""
    for x, gate in (node.args, node.args[::-1]):
        if isinstance(gate, fx.Node) and gate.target is aten.sigmoid.default and gate.args[0] is x:
            return graph.call(aten.silu.default, x)
    return None


@rule(aten.transpose.int)
def twice_transposed(graph: Graph, node: fx.Node) -> fx.Node | None:
    """Exchanging the same two dimensions twice does nothing."""
    inner = node.args[0]
    if not isinstance(inner, fx.Node) or inner.target is not aten.transpose.int:
        return None
    return as_node(inner.args[0]) if set(inner.args[1:]) == set(node.args[1:]) else None


# Shapes --------------------------------------------------------------------------------------


@rule(
    aten.view.default,
    aten._unsafe_view.default,
    aten.view_as.default,
    aten.reshape_as.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.reshape.default,
)
def reshape(graph: Graph, node: fx.Node) -> fx.Node | None:
    """Every view of other sizes is a `reshape`; to its own shape it is no node."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if same_shape(value(source), value(node)):
        return source
    if node.target is aten.reshape.default:
        if source.target is aten.reshape.default:
            return graph.call(aten.reshape.default, source.args[0], node.args[1])
        return None
    if node.target in (aten.view.default, aten._unsafe_view.default):
        return graph.call(aten.reshape.default, source, node.args[1])
    found = sizes(graph, node, source)
    return None if found is None else graph.call(aten.reshape.default, source, found)


def sizes(graph: Graph, node: fx.Node, source: fx.Node) -> list[Any] | None:
    """The sizes of `node`: numbers, sizes of the tensors that it reads, or one left to infer."""
    known = [n for n in node.all_input_nodes if isinstance(value(n), Tensor)]
    numbers = [n for n in node.all_input_nodes if isinstance(value(n), torch.SymInt)]
    out: list[Any] = []
    for size in value(node).shape:
        places = [(n, d) for n in known for d, s in enumerate(value(n).shape) if same_size(s, size)]
        given = [n for n in numbers if same_size(value(n), size)]
        if not isinstance(size, torch.SymInt):
            out.append(size)
        elif given:
            out.append(given[0])
        elif places:
            out.append(graph.call(aten.sym_size.int, *places[0]))
        else:
            out.append(-1)
    return out if out.count(-1) <= 1 else None


@rule(aten.slice.Tensor)
def whole_slice(graph: Graph, node: fx.Node) -> fx.Node | None:
    """A slice that keeps everything is no node."""
    source = node.args[0]
    start, stop, step = (
        argument(node, 2, "start"),
        argument(node, 3, "end"),
        argument(node, 4, "step", 1),
    )
    assert isinstance(source, fx.Node)
    if step != 1 or start not in (0, None):
        return None
    return (
        source if same_shape(value(source), value(node)) and not isinstance(stop, fx.Node) else None
    )


@rule(aten.expand.default, aten.repeat.default)
def whole_expand(graph: Graph, node: fx.Node) -> fx.Node | None:
    """Expanding to its own shape is no node."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source if same_shape(value(source), value(node)) else None


@rule(aten.t.default, aten.numpy_T.default, aten.permute.default)
def transpose(graph: Graph, node: fx.Node) -> fx.Node | None:
    """A permutation that exchanges two dimensions is a `transpose`."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    rank = value(source).dim()
    if node.target is aten.permute.default:
        order = [d % rank for d in node.args[1]]  # type: ignore[union-attr]
    else:
        order = list(reversed(range(rank)))
    moved = [d for d in range(rank) if order[d] != d]
    if not moved:
        return source
    if len(moved) == 2:
        return graph.call(aten.transpose.int, source, *moved)
    if node.target is aten.permute.default:
        return None
    return graph.call(aten.permute.default, source, order)


# Where an op's dimensions stand among its arguments, if not second.
PLACES: dict[Any, tuple[int, ...]] = {
    aten.transpose.int: (1, 2),
    aten.split.Tensor: (2,),
    aten.split_with_sizes.default: (2,),
}


@rule(
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.cat.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.softmax.int,
)
def positive_dimension(graph: Graph, node: fx.Node) -> fx.Node | None:
    """Dimensions count from the front."""
    source = node.args[0]
    rank = value(node if isinstance(source, list | tuple) else source).dim()
    rank += node.target is aten.unsqueeze.default
    args: list[Any] = list(node.args)
    for place in PLACES.get(node.target, (1,)):
        if len(args) <= place:
            args.append(node.kwargs.get("dim", 0))
        if isinstance(args[place], int) and args[place] < 0:
            args[place] += rank
    kwargs = {k: v for k, v in node.kwargs.items() if k != "dim"}
    if args == list(node.args) and kwargs == dict(node.kwargs):
        return None
    node.args, node.kwargs = tuple(args), kwargs
    return node


@rule(aten.mean.dim, aten.sum.dim_IntList)
def last_dimension(graph: Graph, node: fx.Node) -> fx.Node | None:
    """A reduction over the last dimension says -1, whatever the rank."""
    dims = node.args[1] if len(node.args) > 1 else None
    if not isinstance(dims, list | tuple) or list(dims) != [value(node.args[0]).dim() - 1]:
        return None
    node.args = (node.args[0], [-1], *node.args[2:])
    return node


@rule(aten.split.Tensor, aten.chunk.default)
def split_sizes(graph: Graph, node: fx.Node) -> fx.Node | None:
    """Pieces of fixed sizes are `split_with_sizes`."""
    source, count = node.args[:2]
    dim = argument(node, 2, "dim", 0)
    dim %= value(source).dim()
    pieces = [piece.shape[dim] for piece in value(node)]
    if any(isinstance(size, torch.SymInt) for size in (*pieces, count)):
        return None
    return graph.call(aten.split_with_sizes.default, source, pieces, dim)


@rule(aten.index.Tensor)
def index_rows(graph: Graph, node: fx.Node) -> fx.Node | None:
    """Indexing the rows of a table is an `embedding`."""
    table, indices = node.args[:2]
    assert isinstance(indices, list | tuple)
    if len(indices) != 1 or not isinstance(indices[0], fx.Node) or value(table).dim() != 2:
        return None
    if value(indices[0]).dtype != torch.int64:
        return None
    return graph.call(aten.embedding.default, table, indices[0])


@rule(aten.embedding.default)
def plain_embedding(graph: Graph, node: fx.Node) -> fx.Node | None:
    """The padding index matters to training alone."""
    if len(node.args) == 2 and not node.kwargs:
        return None
    return graph.call(aten.embedding.default, *node.args[:2])


# Matrices ------------------------------------------------------------------------------------


@rule(aten.addmm.default, aten.mm.default, aten.matmul.default)
def linear(graph: Graph, node: fx.Node) -> fx.Node | None:
    """A product with a weight is a `linear`; its weight is transposed where it is stored so."""
    bias, x, matrix = (None, *node.args) if node.target is not aten.addmm.default else node.args
    if node.kwargs or not isinstance(matrix, fx.Node) or not isinstance(x, fx.Node):
        return None
    if matrix.target is aten.transpose.int and graph.weight(matrix.args[0]) is not None:
        weight = matrix.args[0]
        if value(weight).dim() != 2:
            return None
    else:
        stored = graph.weight(matrix)
        if stored is None or len(stored.shape) != 2 or len(matrix.users) > 1:
            return None
        weight = graph.add_weight(f"{matrix.target}_transposed", stored.transpose())
    if bias is not None and tuple(value(bias).shape) != tuple(value(weight).shape[:1]):
        return None
    return graph.call(aten.linear.default, x, weight, *([] if bias is None else [bias]))


@rule(aten.reshape.default)
def linear_in_place(graph: Graph, node: fx.Node) -> fx.Node | None:
    """A linear between a flattening and its inverse needs neither."""
    inner = node.args[0]
    if not isinstance(inner, fx.Node) or inner.target is not aten.linear.default:
        return None
    flat = inner.args[0]
    if (
        not isinstance(flat, fx.Node)
        or flat.target is not aten.reshape.default
        or len(inner.users) > 1
    ):
        return None
    source = flat.args[0]
    before, after = value(source).shape, value(node).shape
    fits = len(before) == len(after) and all(
        same_size(a, b) for a, b in zip(before[:-1], after[:-1], strict=True)
    )
    if not fits or not same_size(before[-1], value(flat).shape[-1]):
        return None
    if not same_size(after[-1], value(inner).shape[-1]):
        return None
    return graph.call(aten.linear.default, source, *inner.args[1:])


@rule(operator.getitem)
def pick(graph: Graph, node: fx.Node) -> fx.Node | None:
    """A piece of a split into one is the whole; one between given places is a slice."""
    source, index = node.args
    if not isinstance(source, fx.Node):
        return None
    if source.target is aten.tensor_split.indices:
        whole, places = source.args[:2]
        ends: list[Any] = [0, *places, sys.maxsize]  # type: ignore[misc]
        dim = argument(source, 2, "dim", 0)
        return graph.call(aten.slice.Tensor, whole, dim, *ends[index : index + 2])  # type: ignore
    if source.target is not aten.split_with_sizes.default:
        return None
    return as_node(source.args[0]) if len(source.args[1]) == 1 else None  # type: ignore[arg-type]


# Mutation ------------------------------------------------------------------------------------


def functional_form(target: Any) -> Any:
    """The op that computes what an in-place op writes, or None."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return None
    packet, overload = target._schema.name.rpartition("::")[2], target._overloadname
    if not packet.endswith("_") or packet.startswith("_"):
        return None
    functional = getattr(aten, packet[:-1], None)
    return getattr(functional, overload or "default", None) if functional is not None else None


def functionalize(graph: Graph) -> int:
    """Write calls that mutate a plain intermediate as calls that return the new value.

    The mutated tensor must be no input, no weight and no view, and no view made before may be read
    after: then every later use simply takes the new value. Anything else stays, and counts as an
    effect.
    """
    count = 0
    for node in graph.nodes:
        functional = functional_form(node.target) if node.op == "call_function" else None
        base = as_node(node.args[0]) if node.args else None
        if functional is None or base is None or not replaceable(graph, node, base):
            continue
        dtype = value(base).dtype
        node.target = functional
        graph.infer(node)
        new = node
        if value(node).dtype != dtype:  # an in-place call keeps the dtype that it writes into
            with graph.after(node):
                new = graph.call(aten.to.dtype, node, dtype)
            node.replace_all_uses_with(new, delete_user_cb=partial(is_not, new))
        order = {n: i for i, n in enumerate(graph.fx.nodes)}
        for user in list(base.users):
            if order[user] > order[new]:
                user.replace_input_with(base, new)
        count += 1
    return count


def replaceable(graph: Graph, node: fx.Node, base: fx.Node) -> bool:
    """Whether nothing but later uses of `base` itself sees what `node` writes into it."""
    owner = owners(graph)
    if base.op != "call_function" or owner[base] is not base:
        return False
    order = {n: i for i, n in enumerate(graph.fx.nodes)}
    views = [n for n in owner if owner[n] is base and n is not base and order[n] < order[node]]
    return all(order[user] <= order[node] for view in views for user in view.users)
