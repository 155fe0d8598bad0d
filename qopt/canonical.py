"""The one spelling that qopt gives to each computation: what `canonicalize` applies to models.

Patterns are put through the same rules, so a pattern and a model cannot differ by spelling alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
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
    for node in graph.nodes:
        while not node._erased and node.op == "call_function":
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


ASSERTIONS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.msg,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}


def eliminate_dead_code(graph: Graph) -> int:
    """Erase calls and weights that nothing uses; effects stay. Returns the number of calls erased."""
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
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return None if mutated(node) or mutated(source) else source


def mutated(node: fx.Node) -> bool:
    """Whether some call writes into the node's tensor, or into a view of it."""
    return any(
        isinstance(user.target, torch._ops.OpOverload)
        and (
            (user.target._schema.is_mutable and user.args and user.args[0] is node)
            or (is_view(user) and mutated(user))
        )
        for user in node.users
    )


def is_view(node: fx.Node) -> bool:
    """Whether a call's result shares memory with its argument."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    returns = node.target._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


@rule(aten.dropout.default, aten.feature_dropout.default)
def dropout(graph: Graph, node: fx.Node) -> fx.Node | None:
    """Dropout does nothing outside training."""
    return None if argument(node, 2, "train") else node.args[0]  # type: ignore[return-value]


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
    if not isinstance(source, Tensor) or source.dtype != value(node).dtype or mutated(node):
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
    if set(inner.args[1:]) != set(node.args[1:]) or mutated(node) or mutated(inner):
        return None
    return inner.args[0]  # type: ignore[return-value]


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
    if mutated(node):
        return None
    if same_shape(value(source), value(node)):
        return source
    if node.target is aten.reshape.default:
        inner = source
        if inner.target is aten.reshape.default and not mutated(inner):
            return graph.call(aten.reshape.default, inner.args[0], node.args[1])
        return None
    if node.target in (aten.view.default, aten._unsafe_view.default):
        return graph.call(aten.reshape.default, source, node.args[1])
    return graph.call(aten.reshape.default, source, sizes(graph, node, source))


def sizes(graph: Graph, node: fx.Node, source: fx.Node) -> list[Any]:
    """The sizes of `node`, symbolic ones read from `source` or left to be inferred."""
    out: list[Any] = []
    for size in value(node).shape:
        if not isinstance(size, torch.SymInt):
            out.append(size)
            continue
        dims = [d for d, s in enumerate(value(source).shape) if same_size(s, size)]
        if dims:
            out.append(graph.call(aten.sym_size.int, source, dims[0]))
        else:
            out.append(-1)
    if out.count(-1) > 1:
        reference = node.args[1] if len(node.args) > 1 else None
        if isinstance(reference, fx.Node):  # view_as: the other tensor has the sizes
            return [
                graph.call(aten.sym_size.int, reference, d) if s == -1 else s
                for d, s in enumerate(out)
            ]
        raise AssertionError(f"cannot say the shape of {node.name}")
    return out


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
    if step != 1 or mutated(node) or start not in (0, None):
        return None
    return source if same_shape(value(source), value(node)) and not isinstance(stop, fx.Node) else None


@rule(aten.expand.default, aten.repeat.default)
def whole_expand(graph: Graph, node: fx.Node) -> fx.Node | None:
    """Expanding to its own shape is no node."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source if same_shape(value(source), value(node)) and not mutated(node) else None


@rule(aten.t.default, aten.numpy_T.default, aten.permute.default)
def transpose(graph: Graph, node: fx.Node) -> fx.Node | None:
    """A permutation that exchanges two dimensions is a `transpose`."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    rank = value(source).dim()
    if node.target is aten.permute.default:
        order = [d % rank for d in node.args[1]]  # type: ignore[operator, union-attr]
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
    first = node.args[0]
    tensor = first[0] if isinstance(first, list | tuple) else first
    rank = value(tensor).dim() + (node.target is aten.unsqueeze.default)
    places = {aten.transpose.int: (1, 2), aten.split.Tensor: (2,)}.get(
        node.target, (2,) if node.target is aten.split_with_sizes.default else (1,)
    )
    args = list(node.args)
    for place in places:
        if len(args) <= place:
            if node.target in (aten.split.Tensor, aten.split_with_sizes.default):
                args.append(node.kwargs.get("dim", 0))
            else:
                args.append(node.kwargs.get("dim", 0))
        if isinstance(args[place], int) and args[place] < 0:
            args[place] += rank
    kwargs = {k: v for k, v in node.kwargs.items() if k != "dim"}
    if args == list(node.args) and kwargs == dict(node.kwargs):
        return None
    node.args, node.kwargs = tuple(args), kwargs
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
    if bias is not None and value(bias).dim() != 1:
        return None
    arguments = (x, weight) if bias is None else (x, weight, bias)
    return graph.call(aten.linear.default, *arguments)


@rule(aten.reshape.default)
def linear_in_place(graph: Graph, node: fx.Node) -> fx.Node | None:
    """A linear between a flattening and its inverse needs neither."""
    inner = node.args[0]
    if not isinstance(inner, fx.Node) or inner.target is not aten.linear.default:
        return None
    flat = inner.args[0]
    if not isinstance(flat, fx.Node) or flat.target is not aten.reshape.default or len(inner.users) > 1:
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
    """A piece of a split into one is the whole."""
    source, index = node.args
    if not isinstance(source, fx.Node) or source.target is not aten.split_with_sizes.default:
        return None
    whole = source.args[0]
    return whole if len(source.args[1]) == 1 else None  # type: ignore[arg-type, return-value]


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

    The mutated tensor must be no input, no weight and no view, and have no live view: then every
    later use simply takes the new value. Anything else stays, and counts as an effect.
    """
    count = 0
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        functional = functional_form(node.target) if node.op == "call_function" else None
        base = node.args[0] if node.args else None
        if functional is None or not isinstance(base, fx.Node) or base.op != "call_function":
            continue
        if is_view(base) or any(is_view(user) for user in base.users):
            continue
        node.target = functional
        graph.infer(node)
        for user in list(base.users):
            if user is not node and order.get(user, 0) > order[node]:
                user.replace_input_with(base, node)
        count += 1
    return count
