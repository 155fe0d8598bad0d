"""ONNX for the dialect: how each target runs an op, and what it cannot take."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, fx

from qopt.canonical import operands, options, value
from qopt.emit.builder import DTYPES, Builder
from qopt.emit.onnx_aten import activation
from qopt.graph import Graph
from qopt.lower import Context, implements
from qopt.ops import OPS
from qopt.weights import LazyWeight

aten = torch.ops.aten
ROTARY = OPS["rotary"].target


class Plain:
    """An implementation that reads the node's own arguments and never refuses."""

    name = ""

    def refuses(self, context: Context, node: fx.Node) -> str | None:
        """Nothing is refused."""
        return None

    def sources(self, node: fx.Node) -> Iterable[fx.Node]:
        """The node's own inputs."""
        return node.all_input_nodes


def half(node: fx.Node) -> str | None:
    """Why an op that rounds once cannot run this node in half precision."""
    first = value(node)
    first = first[0] if isinstance(first, list | tuple) else first
    return (
        None if first.dtype == torch.float32 else "it rounds the product with the weight only once"
    )


def unfit_terms(node: fx.Node) -> str | None:
    """Why a norm with its sum cannot run on terms of this rank or these types."""
    x, residual = (value(term) for term in operands(node)[:2])
    if x.dtype != residual.dtype:
        return "the terms of its sum differ in type"
    rank = x.dim()
    return None if rank in (2, 3) else f"it takes 2 or 3 dimensions, not {rank}"


def gamma(b: Builder, weight: Any, x: fx.Node) -> ir.Value:
    """A norm's weight, ones where it has none."""
    dtype = value(x).dtype
    if weight is None:
        return b.const(torch.ones(int(value(x).shape[-1])), dtype)
    return b.get(weight, dtype)


@implements("rms_norm", "onnx", "onnx-cpu")
class StandardRMSNorm(Plain):
    """`RMSNormalization` of opset 23, which rounds before it multiplies by the weight."""

    name = "RMSNormalization"

    def refuses(self, context: Context, node: fx.Node) -> str | None:
        """It exists from opset 23 on; the place of the rounding matters below fp32."""
        if context.opset < 23:
            return f"it needs opset 23, the limit is {context.opset}"
        if (
            value(node).dtype != torch.float32
            and not operands(node)[3]
            and operands(node)[1] is not None
        ):
            return "the model rounds after the weight, the op before it"
        return None

    def emit(self, b: Builder, node: fx.Node) -> ir.Value:
        """One node."""
        x, weight, eps = operands(node)[:3]
        b.needs(23)
        scale = gamma(b, weight, x)
        return b.op("RMSNormalization", b.get(x), scale, axis=-1, epsilon=float(eps), stash_type=1)


@implements("add_rms_norm", "onnx-cpu")
class SkipRMSNorm(Plain):
    """`SkipSimplifiedLayerNormalization`; the sum is its output 3."""

    name = "SkipSimplifiedLayerNormalization"

    def refuses(self, context: Context, node: fx.Node) -> str | None:
        """Three dimensions, and one rounding."""
        return unfit_terms(node) or (None if operands(node)[2] is None else half(node))

    def emit(self, b: Builder, node: fx.Node) -> list[ir.Value]:
        """One node with two of its four results."""
        x, residual, weight, eps = operands(node)[:4]
        out = b.microsoft_ops(
            "SkipSimplifiedLayerNormalization",
            4,
            b.get(x),
            b.get(residual),
            gamma(b, weight, x),
            epsilon=float(eps),
        )
        return skip_results(out)


@implements("add_layer_norm", "onnx-cpu")
class SkipLayerNorm(Plain):
    """`SkipLayerNormalization`; the sum is its output 3."""

    name = "SkipLayerNormalization"

    def refuses(self, context: Context, node: fx.Node) -> str | None:
        """Three dimensions, and one rounding."""
        return unfit_terms(node) or half(node)

    def emit(self, b: Builder, node: fx.Node) -> list[ir.Value]:
        """One node with two of its four results."""
        x, residual, weight, bias, eps = operands(node)[:5]
        out = b.microsoft_ops(
            "SkipLayerNormalization",
            4,
            b.get(x),
            b.get(residual),
            gamma(b, weight, x),
            None if bias is None else b.get(bias),
            epsilon=float(eps),
        )
        return skip_results(out)


def skip_results(out: list[ir.Value]) -> list[ir.Value]:
    """The norm and the sum; mean and deviation are left out of the node."""
    for unused in (out[1], out[2]):
        unused.name = ""
    return [out[0], out[3]]


@implements("gated", "onnx", "onnx-cpu")
class Gated(Plain):
    """An activation and a product."""

    name = "activation and Mul"

    def emit(self, b: Builder, node: fx.Node) -> ir.Value:
        """Two or three nodes."""
        gate, up, *rest = operands(node)
        name = str(rest[0]) if rest else str(options(node).get("activation", "silu"))
        return b.op("Mul", activation(b, name, b.get(gate)), b.get(up))


@implements("last_tokens", "onnx", "onnx-cpu")
class LastTokens(Plain):
    """Each row's own last columns, by `GatherND`."""

    name = "GatherND"

    def emit(self, b: Builder, node: fx.Node) -> ir.Value:
        """Columns length - n to length - 1 of each row; all of them where n is 0."""
        x, mask, n = operands(node)
        assert isinstance(x, fx.Node)
        assert isinstance(mask, fx.Node)
        columns = b.size(x, 1)
        asked, zero = b.get(n), b.const([0])
        everything = b.op("Equal", asked, zero)
        count = b.op("Where", everything, columns, asked)
        length = b.op("Unsqueeze", query_lengths(b, mask, columns), b.const([1]))
        last = b.op("Where", everything, columns, length)
        offsets = b.op("Range", b.const(0), b.op("Squeeze", count, zero), b.const(1))
        places = b.op("Max", b.op("Add", b.op("Sub", last, count), offsets), zero)
        return b.op("GatherND", b.get(x), b.op("Unsqueeze", places, b.const([2])), batch_dims=1)


def query_lengths(b: Builder, mask: fx.Node, columns: ir.Value) -> ir.Value:
    """How many of each row's new columns are real: int64 [B]."""

    def make() -> ir.Value:
        new = b.op("Slice", b.get(mask), b.op("Neg", columns), b.const([1 << 62]), b.const([1]))
        return b.op("ReduceSum", new, b.const([1]), keepdims=0)

    return b.once("query_lengths", make)


@implements("rotary", "onnx", "onnx-cpu")
class StandardRotary(Plain):
    """`RotaryEmbedding` of opset 23 on angles that the graph computes."""

    name = "RotaryEmbedding"

    def refuses(self, context: Context, node: fx.Node) -> str | None:
        """It exists from opset 23 on, and wants angles in the type of x."""
        if context.opset < 23:
            return f"it needs opset 23, the limit is {context.opset}"
        if value(operands(node)[1]).dtype != value(operands(node)[0]).dtype:
            return "the angles are not of the type of x"
        return None

    def emit(self, b: Builder, node: fx.Node) -> ir.Value:
        """One node, the angles in one row for each sequence."""
        x, cos, sin, *rest = operands(node)
        assert isinstance(x, fx.Node)
        b.needs(23)
        size, width = int(value(x).shape[-1]), 2 * int(value(cos).shape[-1])
        return b.op(
            "RotaryEmbedding",
            b.get(x),
            rows(b, cos, x),
            rows(b, sin, x),
            interleaved=int(bool(rest[0])) if rest else 0,
            rotary_embedding_dim=0 if width == size else width,
        )


def rows(b: Builder, table: Any, x: fx.Node) -> ir.Value:
    """Angles of (1 or B, S, R) as (B, S, R)."""
    if value(table).shape[0] != 1:
        return b.get(table)

    def make() -> ir.Value:
        shape = b.op("Concat", b.size(x, 0), b.const([1, 1]), axis=0)
        return b.op("Expand", b.get(table), shape)

    return b.once(("rows", table), make)


# Attention -----------------------------------------------------------------------------------


@implements("cached_attention", "onnx-cpu")
class GroupQueryAttention:
    """`com.microsoft.GroupQueryAttention`: writes the cache in place, takes the rotation in."""

    name = "GroupQueryAttention"
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    of_types = "the CPU provider runs it in fp32 only"

    def refuses(self, context: Context, node: fx.Node) -> str | None:
        """What onnxruntime's CPU kernel cannot take (measured with 1.32)."""
        q, k, v, past_key = operands(node)[:4]
        key_size, value_size = int(value(k).shape[-1]), int(value(v).shape[-1])
        if past_key is None:
            return "it reads another layer's cache"
        if value(q).dtype not in self.dtypes:
            return self.of_types
        if key_size != value_size:
            return f"keys have {key_size} elements, values {value_size}"
        if key_size % 8:
            return f"the head size {key_size} is no multiple of 8"
        if not options(node).get("causal", True):
            return "it is not causal"
        mask = operands(node)[5]
        if not isinstance(mask, fx.Node) or mask.op != "placeholder":
            return "its mask is no input"
        if any(reader.op != "output" for reader in readers(node)):
            return "another layer reads its cache by slot, and it writes each row's without holes"
        node.meta["rotation"], why = rotation(context, node)
        if why is not None:
            node.meta["remarks"] = [f"the rotation stays outside: {why}"]
        return None

    def sources(self, node: fx.Node) -> Iterable[fx.Node]:
        """Queries, keys and values before rotation and reordering; the cache and the mask."""
        projected = packed(node)
        heads = (
            [projected] if projected is not None else [flat_source(n) for n in self._heads(node)]
        )
        others = [operands(node)[3], operands(node)[4], operands(node)[5], *operands(node)[6:7]]
        return [n for n in (*heads, *others) if isinstance(n, fx.Node)]

    def _heads(self, node: fx.Node) -> list[fx.Node]:
        """q, k and v, before the rotation where the op rotates."""
        found = []
        for argument in operands(node)[:3]:
            assert isinstance(argument, fx.Node)
            inside = node.meta["rotation"] is not None and argument.target is ROTARY
            found.append(operands(argument)[0] if inside else argument)
        return found

    def emit(self, b: Builder, node: fx.Node) -> list[Any]:
        """One node, and for the whole graph the lengths that it reads."""
        past_key, past_value, mask = operands(node)[3:6]
        sinks = operands(node)[6] if len(operands(node)) > 6 else None
        q, k = operands(node)[0], operands(node)[1]
        assert isinstance(mask, fx.Node)
        tables = node.meta["rotation"]
        projected = packed(node)
        if projected is not None:
            heads = [b.get(projected), None, None]
        else:
            heads = [flatten_heads(b, n) for n in self._heads(node)]
        window = options(node).get("window")
        out, key, held = b.microsoft_ops(
            "GroupQueryAttention",
            3,
            *heads,
            b.get(past_key),
            b.get(past_value),
            key_lengths(b, mask),
            total_length(b, mask),
            *(rotation_tables(b, tables) if tables else (None, None)),
            None,  # position_ids
            None,  # attention_bias
            None if sinks is None else b.get(sinks),
            None,
            None,
            None,
            None,
            self.new_lengths(b, node, mask, projected),
            num_heads=int(value(q).shape[1]),
            kv_num_heads=int(value(k).shape[1]),
            scale=float(options(node)["scale"]),
            local_window_size=None if window is None else int(window),
            softcap=options(node).get("softcap"),
            do_rotary=int(tables is not None),
            rotary_interleaved=int(tables is not None and tables.interleaved) or None,
        )
        annotate(node, 1, key)
        annotate(node, 2, held)
        return [unflatten_later(b, node, out), key, held]

    def new_lengths(
        self, b: Builder, node: fx.Node, mask: fx.Node, projected: fx.Node | None
    ) -> ir.Value | None:
        """Input 16, with which several rows may each feed several tokens to a filled cache."""
        return query_lengths_32(b, mask, lambda: new_columns(b, node, projected))


def readers(node: fx.Node) -> Iterable[fx.Node]:
    """What reads the present keys and values of an attention."""
    presents = [u for u in node.users if u.target is operator.getitem and u.args[1] != 0]
    return [reader for present in presents for reader in present.users]


def annotate(node: fx.Node, place: int, made: ir.Value) -> None:
    """Say type and shape of a present output."""
    fake = value(node)[place]
    made.type = ir.TensorType(DTYPES[fake.dtype])
    made.shape = ir.Shape([None, int(fake.shape[1]), None, int(fake.shape[3])])


def unflatten_later(b: Builder, node: fx.Node, out: ir.Value) -> ir.Value:
    """(B, S, H * D) as the (B, S, H, D) that the dialect speaks of; a reshape back is free."""
    readers = [u for u in node.users if u.target is operator.getitem and u.args[1] == 0]
    fake = value(node)[0]
    out.type = ir.TensorType(DTYPES[fake.dtype])
    out.shape = ir.Shape([None, None, int(fake.shape[2] * fake.shape[3])])
    for reader in readers:
        b.flat[reader] = out
    direct = all(
        user.target is aten.reshape.default and value(user).dim() == 3
        for reader in readers
        for user in reader.users
    )
    if direct:
        return out
    sizes = b.const([0, 0, int(fake.shape[2]), int(fake.shape[3])])
    return b.op("Reshape", out, sizes)


def key_lengths(b: Builder, mask: fx.Node) -> ir.Value:
    """Real tokens of each row, past and new, minus one: int32 [B]."""

    def make() -> ir.Value:
        total = b.op("ReduceSum", b.get(mask), b.const([1]), keepdims=0)
        return b.op("Cast", b.op("Sub", total, b.const([1])), to=ir.DataType.INT32)

    return b.once("seqlens_k", make)


def total_length(b: Builder, mask: fx.Node) -> ir.Value:
    """Columns of the mask: int32, no dimensions."""

    def make() -> ir.Value:
        scalar = b.op("Squeeze", b.size(mask, 1), b.const([0]))
        return b.op("Cast", scalar, to=ir.DataType.INT32)

    return b.once("total_sequence_length", make)


def query_lengths_32(b: Builder, mask: fx.Node, columns: Callable[[], ir.Value]) -> ir.Value:
    """Real new tokens of each row: int32 [B]."""

    def make() -> ir.Value:
        return b.op("Cast", query_lengths(b, mask, columns()), to=ir.DataType.INT32)

    return b.once("query_seqlens", make)


def head_source(node: fx.Node) -> tuple[fx.Node, bool]:
    """Where (B, H, S, D) heads come from: a (B, S, H * D) node, or else (B, S, H, D) or itself."""
    if node.target is aten.transpose.int and set(operands(node)[1:]) == {1, 2}:
        inner = operands(node)[0]
        assert isinstance(inner, fx.Node)
        if inner.target is aten.reshape.default:
            flat = inner.args[0]
            assert isinstance(flat, fx.Node)
            width = value(inner).shape[-1] * value(inner).shape[-2]
            if value(flat).dim() == 3 and value(flat).shape[-1] == width:
                return flat, True
        return inner, False
    return node, False


def flat_source(node: fx.Node) -> fx.Node:
    """The node that `flatten_heads` reads."""
    return head_source(node)[0]


def flatten_heads(b: Builder, node: fx.Node) -> ir.Value:
    """Heads (B, H, S, D) as (B, S, H * D)."""
    source, flat = head_source(node)
    if flat:
        return b.get(source)
    width = int(value(node).shape[1] * value(node).shape[3])
    made = b.get(source)
    if source is node:
        made = b.op("Transpose", made, perm=[0, 2, 1, 3])
    return b.op("Reshape", made, b.const([0, 0, width]))


def packed(node: fx.Node) -> fx.Node | None:
    """The one projection whose three pieces q, k and v are, in order and whole."""
    pieces = []
    for argument in operands(node)[:3]:
        assert isinstance(argument, fx.Node)
        if argument.target is ROTARY:
            if node.meta.get("rotation") is None:
                return None
            argument = operands(argument)[0]
        source, flat = head_source(argument)
        if not flat or source.target is not operator.getitem:
            return None
        pieces.append(source)
    split = operands(pieces[0])[0]
    if any(operands(piece)[0] is not split for piece in pieces):
        return None
    if split.target is not aten.split_with_sizes.default or len(operands(split)[1]) != 3:
        return None
    if [operands(piece)[1] for piece in pieces] != [0, 1, 2]:
        return None
    projected: fx.Node = operands(split)[0]
    return projected


def new_columns(b: Builder, node: fx.Node, projected: fx.Node | None) -> ir.Value:
    """How many new columns there are, read from what is written for sure: int64 [1]."""
    if projected is not None:
        return b.size(projected, 1)
    argument = operands(node)[0]
    assert isinstance(argument, fx.Node)
    if node.meta["rotation"] is not None and argument.target is ROTARY:
        argument = argument.args[0]
    source, _ = head_source(argument)
    return b.size(source, 2 if source is argument else 1)


# Rotation inside the attention ---------------------------------------------------------------


class Tables:
    """cos and sin for every position, as the model computes them."""

    def __init__(self, cos: Tensor, sin: Tensor, interleaved: bool, key: Any) -> None:
        self.cos, self.sin, self.interleaved, self.key = cos, sin, interleaved, key


def rotation_tables(b: Builder, tables: Tables) -> tuple[ir.Value, ir.Value]:
    """The tables as initializers, one pair for all layers that share them."""
    from qopt.weights import LazyWeight

    made = []
    for name, table in (("cos_cache", tables.cos), ("sin_cache", tables.sin)):

        def make(name: str = name, table: Tensor = table) -> ir.Value:
            count = sum(1 for key in b.once_values if isinstance(key, tuple) and key[0] == name)
            return b.weight(f"{name}_{count}" if count else name, LazyWeight.memory(table))

        made.append(b.once((name, tables.key), make))
    return made[0], made[1]


def rotation(context: Context, node: fx.Node) -> tuple[Tables | None, str | None]:
    """The tables for a rotation inside the op, or why it stays outside."""
    q, k = operands(node)[:2]
    assert isinstance(q, fx.Node)
    assert isinstance(k, fx.Node)
    if q.target is not ROTARY and k.target is not ROTARY:
        return None, None
    if q.target is not ROTARY or k.target is not ROTARY or q.args[1:] != k.args[1:]:
        return None, "queries and keys are not rotated by the same angles"
    size, half_width = int(value(q).shape[-1]), int(value(q.args[1]).shape[-1])
    if size % 16:
        return None, f"with rotation the head size must be a multiple of 16, not {size}"
    if half_width % 8:
        return None, f"the angles' width {half_width} is no multiple of 8"
    key = q.args[1:3]
    if key not in context.cache:
        context.cache[key] = position_tables(context.graph, key[0], key[1])
    tables = context.cache[key]
    if isinstance(tables, str):
        return None, tables
    interleaved = bool(q.args[3]) if len(q.args) > 3 else False
    cos, sin = tables
    return Tables(cos, sin, interleaved, key), None


def position_tables(graph: Graph, cos: Any, sin: Any) -> tuple[Tensor, Tensor] | str:
    """cos and sin of positions 0 to the context's end, or why they are no function of a position.

    The graph's own nodes compute them, so every rope type comes out as the model has it. What looks
    at other positions too (a switch by length) differs between one position and many.
    """
    length = graph.info.context_length
    if length is None:
        return "the context length is unknown"
    nodes = upstream([cos, sin])
    inputs = [n for n in nodes if n.op == "placeholder"]
    if [n.name for n in inputs] != ["position_ids"]:
        return "the angles are no function of the positions alone"
    if any(value(n).shape[0] == 1 for n in (cos, sin) if isinstance(n, fx.Node)):
        return "the angles are the same for every row"

    def tables(positions: Tensor) -> list[Tensor]:
        env: dict[fx.Node, Any] = {inputs[0]: positions[None]}
        for n in nodes:
            if n.op == "get_attr":
                env[n] = graph.weights[str(n.target)].evaluate()
            elif n.op == "call_function":
                args, kwargs = fx.map_arg((n.args, n.kwargs), env.__getitem__)
                env[n] = call_target(n)(*args, **kwargs)
        return [env[cos][0], env[sin][0]]

    whole = tables(torch.arange(length))
    for position in {0, 1, length // 2, length - 1}:
        alone = tables(torch.tensor([position]))
        if not all(torch.equal(w[position], a[0]) for w, a in zip(whole, alone, strict=True)):
            return "the angles of a position depend on the others"
    return whole[0].clone(), whole[1].clone()


def call_target(node: fx.Node) -> Callable[..., Any]:
    """What a call calls."""
    target = node.target
    assert callable(target)
    return target


def upstream(nodes: list[fx.Node]) -> list[fx.Node]:
    """Everything that `nodes` are computed from, in order, themselves included."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return [node for node in nodes[0].graph.nodes if node in found]


@implements("cached_attention", "onnx", "onnx-cpu")
class StandardAttention(Plain):
    """`Attention` of opset 23, with a mask by positions that layers share."""

    name = "Attention"

    def refuses(self, context: Context, node: fx.Node) -> str | None:
        """Learned sinks and shared caches are not in it."""
        if context.opset < 23:
            return f"it needs opset 23, the limit is {context.opset}"
        if len(operands(node)) > 6 and operands(node)[6] is not None:
            return "it has no sink logits"
        if operands(node)[3] is None:
            return "it reads another layer's cache"
        return None

    def emit(self, b: Builder, node: fx.Node) -> list[Any]:
        """One node; past and present are joined inside it."""
        q, k, v, past_key, past_value, mask = operands(node)[:6]
        assert isinstance(q, fx.Node)
        assert isinstance(mask, fx.Node)
        b.needs(23)
        window = options(node).get("window")
        seen = visible_mask(b, mask, q, window)
        softcap = options(node).get("softcap")
        out, key, held = b.ops(
            "Attention",
            3,
            b.get(q),
            b.get(k),
            b.get(v),
            seen,
            b.get(past_key),
            b.get(past_value),
            scale=float(options(node)["scale"]),
            softcap=None if softcap is None else float(softcap),
        )
        annotate(node, 1, key)
        annotate(node, 2, held)
        return [b.op("Transpose", out, perm=[0, 2, 1, 3]), key, held]


def visible_mask(b: Builder, mask: fx.Node, q: fx.Node, window: int | None) -> ir.Value:
    """Which of T keys each new column sees: bool (B, 1, S, T), once for each window."""

    def make() -> ir.Value:
        total, new = b.size(mask, 1), b.size(q, 2)
        zero = b.const([0])
        slots = b.op("Range", b.const(0), b.op("Squeeze", total, zero), b.const(1))
        first = b.op("Sub", total, new)
        own = b.op("Slice", slots, first, b.const([1 << 62]))
        causal = b.op("LessOrEqual", slots, b.op("Unsqueeze", own, b.const([1])))
        real = b.op("Cast", b.get(mask), to=ir.DataType.BOOL)
        keep = b.op("And", b.op("Unsqueeze", real, b.const([1, 2])), causal)
        if window is None:
            return keep
        position = b.op("CumSum", b.get(mask), b.const(1))
        mine = b.op("Slice", position, first, b.const([1 << 62]), b.const([1]))
        distance = b.op(
            "Sub", b.op("Unsqueeze", mine, b.const([2])), b.op("Unsqueeze", position, b.const([1]))
        )
        near = b.op("Less", distance, b.const(int(window)))
        return b.op("And", keep, b.op("Unsqueeze", near, b.const([1])))

    return b.once(("visible", window), make)


# Experts -------------------------------------------------------------------------------------


class StoredExperts(Plain):
    """What reads the experts' matrices as they are stored, one expert at a time."""

    def refuses(self, context: Context, node: fx.Node) -> str | None:
        """Weights must be stored, to be cut lazily."""
        held = [n for n in operands(node)[3:7] if n is not None]
        if any(context.graph.weight(n) is None for n in held):
            return "its matrices are computed"
        return None

    def sources(self, node: fx.Node) -> Iterable[fx.Node]:
        """Tokens and choices; the matrices are cut from the stored weights."""
        return [n for n in operands(node)[:3] if isinstance(n, fx.Node)]


@implements("experts", "onnx-cpu")
class MoE(StoredExperts):
    """`com.microsoft.MoE`, which runs whole experts side by side, each on one thread."""

    name = "MoE"
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    of_types = "it is measured in fp32 only"
    fewest = 16  # experts; with fewer, prompts and batches take longer than in the loop

    def refuses(self, context: Context, node: fx.Node) -> str | None:
        """Its gate is SiLU or a scaled swish; its routing is a softmax over a top-k."""
        reason = super().refuses(context, node)
        if reason is not None:
            return reason
        x, ids, weights, up = operands(node)[:4]
        experts, given = int(value(up).shape[0]), options(node)
        if value(x).dtype not in self.dtypes:
            return self.of_types
        if given.get("layout") == "single":
            return "the experts have no gate"
        if given["activation"] not in ("silu", "swish"):
            return f"the gate is {given['activation']}, the op's is silu or swish"
        if not is_top_of(ids, experts):
            return "the choices are no top-k over the experts"
        if may_be_negative(weights):
            return "the weights of the choices may be negative"
        return f"the loop is faster with {experts} experts" if experts < self.fewest else None

    def emit(self, b: Builder, node: fx.Node) -> ir.Value:
        """One node: the softmax of the weights' logarithms gives the weights over their sum."""
        x, ids, weights, up, up_bias, down, down_bias = operands(node)
        assert isinstance(x, fx.Node)
        dtype, given = value(x).dtype, options(node)
        share, tiny = b.get(weights, dtype), b.const(torch.finfo(dtype).tiny, dtype)
        logarithms = b.op("Log", b.op("Max", share, tiny))  # a row of -inf would have no softmax
        shape = b.op("Concat", b.size(x, 0), b.const([int(value(up).shape[0])]), axis=0)
        nowhere = b.op("Expand", b.const([-torch.inf], dtype), shape)
        router = b.op("ScatterElements", nowhere, b.get(ids), logarithms, axis=1)
        transposed = bool(given.get("transposed", False))
        split = given.get("layout", "concatenated") == "concatenated"
        alpha = float(given.get("alpha", 1.0)) if given["activation"] == "swish" else 1.0
        out = b.microsoft(
            "MoE",
            b.get(x),
            router,
            expert_rows(b, up, transposed, split),
            expert_rows(b, up_bias, False, split),
            expert_rows(b, down, transposed, False),
            expert_rows(b, down_bias, False, False),
            k=int(value(ids).shape[-1]),
            normalize_routing_weights=1,
            activation_type="swiglu",
            swiglu_fusion=1,
            swiglu_limit=None if given.get("limit") is None else float(given["limit"]),
            activation_alpha=alpha,
            activation_beta=float(given.get("up_offset", 0.0)),
        )
        return b.op("Mul", out, b.op("ReduceSum", share, b.const([1]), keepdims=1))


def is_top_of(ids: Any, experts: int) -> bool:
    """Whether the ids are a top-k over all experts: none twice in a row, none that is not there."""
    while isinstance(ids, fx.Node) and ids.target is aten.to.dtype:
        ids = operands(ids)[0]
    if not isinstance(ids, fx.Node) or ids.target is not operator.getitem:
        return False
    top, place = operands(ids)
    if top.target is not aten.topk.default or place != 1:
        return False
    scores = value(operands(top)[0])
    dim = operands(top)[2] if len(operands(top)) > 2 else options(top).get("dim", -1)
    return dim in (-1, scores.dim() - 1) and bool(scores.shape[-1] == experts)


PROBABILITIES = (aten.softmax.int, aten.sigmoid.default)
KEEPS_SIGN = {  # the result is not negative where so many of the first operands are not
    aten.add.Tensor: 2,
    aten.mul.Tensor: 2,
    aten.div.Tensor: 2,
    aten.clamp.default: 3,
    aten.sum.dim_IntList: 1,
    aten.topk.default: 1,
    aten.gather.default: 1,
    aten.to.dtype: 1,
    aten.reshape.default: 1,
    operator.getitem: 1,
}


def may_be_negative(given: Any) -> bool:
    """Whether the graph leaves open that a number, or some element of a node, is below 0."""
    if not isinstance(given, fx.Node):
        return given is not None and given < 0
    if given.target in PROBABILITIES:
        return False
    parts = operands(given)[: KEEPS_SIGN.get(given.target, 0)]
    factor = options(given).get("alpha", 1)
    return not parts or any(may_be_negative(part) for part in (*parts, factor))


def expert_rows(b: Builder, stored: Any, transposed: bool, split: bool) -> ir.Value | None:
    """A stack of matrices or biases by output rows, gate and up rows alternating where `split`."""
    if stored is None:
        return None
    if not transposed and not split:
        return b.get(stored)
    name = str(stored.target)
    weight, parts = b.graph.weights[name], []
    for expert in range(weight.shape[0]):
        own = weight.slice(0, expert, expert + 1).reshape(*weight.shape[1:])
        own = own.transpose() if transposed else own
        shape = own.shape
        own = own.reshape(2, shape[0] // 2, *shape[1:]).transpose() if split else own
        parts.append(own.reshape(1, *shape))
    return b.weight(f"{name}.rows", LazyWeight.concat(parts))


@implements("experts", "onnx", "onnx-cpu")
class ExpertLoop(StoredExperts):
    """Each expert on the tokens that chose it."""

    name = "a loop over the experts"

    def emit(self, b: Builder, node: fx.Node) -> ir.Value:
        """For each expert: gather its tokens, two products, scatter the sum."""
        x, ids, weights = operands(node)[:3]
        assert isinstance(x, fx.Node)
        dtype = value(x).dtype
        tokens, chosen, share = b.get(x), b.get(ids), b.get(weights, dtype)
        out = b.op("Mul", tokens, b.const(0.0, dtype))
        for expert in range(int(value(operands(node)[3]).shape[0])):
            mine = b.op("Equal", chosen, b.const(expert))
            picked = b.op("Where", mine, share, b.const(0.0, dtype))
            weight = b.op("ReduceSum", picked, b.const([1]), keepdims=1)
            hit = b.op(
                "ReduceMax", b.op("Cast", mine, to=ir.DataType.INT64), b.const([1]), keepdims=0
            )
            rows_of = b.op("Transpose", b.op("NonZero", hit), perm=[1, 0])
            flat = b.op("Squeeze", rows_of, b.const([1]))
            inner = b.op("Gather", tokens, flat, axis=0)
            inner = self.linear(b, node, inner, expert, 3)
            inner = expert_gate(b, inner, node, dtype)
            inner = self.linear(b, node, inner, expert, 5)
            inner = b.op("Mul", inner, b.op("Gather", weight, flat, axis=0))
            out = b.add_at(out, rows_of, inner, dtype)
        return out

    def linear(self, b: Builder, node: fx.Node, x: ir.Value, expert: int, place: int) -> ir.Value:
        """The product with an expert's part of the stack that operand `place` is, and its bias."""
        matrix, bias = operands(node)[place : place + 2]
        transposed = bool(options(node).get("transposed", False))
        out = b.op("MatMul", x, expert_part(b, matrix, expert, not transposed))
        return out if bias is None else b.op("Add", out, expert_part(b, bias, expert, False))


def expert_part(b: Builder, stack: fx.Node, expert: int, turned: bool) -> ir.Value:
    """One expert's matrix or bias as a weight of its own, transposed where it is to be."""
    name = str(stack.target)
    held = b.graph.weights[name]
    own = held.slice(0, expert, expert + 1).reshape(*held.shape[1:])
    return b.weight(f"{name}.{expert}", own.transpose() if turned else own)


def expert_gate(b: Builder, inner: ir.Value, node: fx.Node, dtype: torch.dtype) -> ir.Value:
    """What stands between an expert's two matrices."""
    given = options(node)
    name, layout = str(given["activation"]), given.get("layout", "concatenated")
    if layout == "single":
        return activation(b, name, inner)
    if layout == "interleaved":
        end, axis = b.const([1 << 62]), b.const([1])
        gate = b.op("Slice", inner, b.const([0]), end, axis, b.const([2]))
        up = b.op("Slice", inner, b.const([1]), end, axis, b.const([2]))
    else:
        gate, up = b.ops("Split", 2, inner, axis=1, num_outputs=2)
    limit = given.get("limit")
    if limit is not None:
        bound = b.const(float(limit), dtype)
        gate = b.op("Min", gate, bound)
        up = b.op("Max", b.op("Min", up, bound), b.const(-float(limit), dtype))
    if name == "swish":
        scaled = b.op("Mul", gate, b.const(float(given.get("alpha", 1.0)), dtype))
        acted = b.op("Mul", gate, b.op("Sigmoid", scaled))
    else:
        acted = activation(b, name, gate)
    offset = float(given.get("up_offset", 0.0))
    if offset:
        up = b.op("Add", up, b.const(offset, dtype))
    return b.op("Mul", acted, up)
