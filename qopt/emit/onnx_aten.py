"""ONNX for the aten ops that decoders use; any other goes through torchlib."""

from __future__ import annotations

import operator
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, fx

from qopt.canonical import argument, operands, options, same_shape, value
from qopt.emit.builder import DTYPES, Builder, Emitter, emits

aten = torch.ops.aten

# Element by element --------------------------------------------------------------------------


def binary(kind: str) -> Emitter:
    """An arithmetic op: both sides in the result's type."""

    def emit(b: Builder, node: fx.Node) -> ir.Value:
        dtype = value(node).dtype
        left, right = (b.get(a, dtype) for a in operands(node)[:2])
        alpha = options(node).get("alpha", 1)
        if alpha != 1:
            right = b.op("Mul", right, b.const(alpha, dtype))
        return b.op(kind, left, right)

    return emit


def comparison(kind: str, negated: bool = False) -> Emitter:
    """A comparison: both sides in their common type."""

    def emit(b: Builder, node: fx.Node) -> ir.Value:
        dtype = common_type(*operands(node)[:2])
        if dtype == torch.bool and kind not in ("Equal",):
            dtype = torch.int64
        out = b.op(kind, *(b.get(a, dtype) for a in operands(node)[:2]))
        return b.op("Not", out) if negated else out

    return emit


def common_type(*items: Any) -> torch.dtype:
    """The type to which torch promotes these arguments."""
    held = [value(i) if isinstance(i, fx.Node) else i for i in items]
    plain = [
        torch.empty([2] * h.dim(), dtype=h.dtype) if isinstance(h, Tensor) else python_number(h)
        for h in held
    ]
    return torch.result_type(plain[0], plain[1])


def python_number(number: Any) -> Any:
    """A symbolic number as a plain one of its kind."""
    if isinstance(number, torch.SymInt):
        return 2
    return 2.0 if isinstance(number, torch.SymFloat) else number


def unary(kind: str) -> Emitter:
    """An op of one tensor, in the result's type."""

    def emit(b: Builder, node: fx.Node) -> ir.Value:
        return b.op(kind, b.get(operands(node)[0], value(node).dtype))

    return emit


def table(targets: dict[Any, Emitter]) -> None:
    """Register several emitters."""
    for target, emitter in targets.items():
        emits(target)(emitter)


table(
    {
        aten.add.Tensor: binary("Add"),
        aten.add.Scalar: binary("Add"),
        aten.sub.Tensor: binary("Sub"),
        aten.sub.Scalar: binary("Sub"),
        aten.mul.Tensor: binary("Mul"),
        aten.mul.Scalar: binary("Mul"),
        aten.div.Tensor: binary("Div"),
        aten.div.Scalar: binary("Div"),
        aten.maximum.default: binary("Max"),
        aten.max.other: binary("Max"),
        aten.min.other: binary("Min"),
        aten.minimum.default: binary("Min"),
        aten.eq.Tensor: comparison("Equal"),
        aten.eq.Scalar: comparison("Equal"),
        aten.ne.Tensor: comparison("Equal", True),
        aten.ne.Scalar: comparison("Equal", True),
        aten.lt.Tensor: comparison("Less"),
        aten.lt.Scalar: comparison("Less"),
        aten.le.Tensor: comparison("LessOrEqual"),
        aten.le.Scalar: comparison("LessOrEqual"),
        aten.gt.Tensor: comparison("Greater"),
        aten.gt.Scalar: comparison("Greater"),
        aten.ge.Tensor: comparison("GreaterOrEqual"),
        aten.ge.Scalar: comparison("GreaterOrEqual"),
        aten.neg.default: unary("Neg"),
        aten.abs.default: unary("Abs"),
        aten.exp.default: unary("Exp"),
        aten.log.default: unary("Log"),
        aten.sin.default: unary("Sin"),
        aten.cos.default: unary("Cos"),
        aten.tanh.default: unary("Tanh"),
        aten.erf.default: unary("Erf"),
        aten.sqrt.default: unary("Sqrt"),
        aten.sigmoid.default: unary("Sigmoid"),
        aten.relu.default: unary("Relu"),
        aten.floor.default: unary("Floor"),
        aten.ceil.default: unary("Ceil"),
        aten.round.default: unary("Round"),
        aten.reciprocal.default: unary("Reciprocal"),
    }
)


@emits(aten.rsub.Scalar, aten.rsub.Tensor)
def rsub(b: Builder, node: fx.Node) -> ir.Value:
    """b - a."""
    dtype = value(node).dtype
    return b.op("Sub", b.get(operands(node)[1], dtype), b.get(operands(node)[0], dtype))


@emits(aten.rsqrt.default)
def rsqrt(b: Builder, node: fx.Node) -> ir.Value:
    """1 / sqrt(x)."""
    return b.op("Reciprocal", b.op("Sqrt", b.get(operands(node)[0], value(node).dtype)))


@emits(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor)
def power(b: Builder, node: fx.Node) -> ir.Value:
    """x ** y; a square is a product, which is exact and fast."""
    dtype = value(node).dtype
    x = b.get(operands(node)[0], dtype)
    if operands(node)[1] == 2:
        return b.op("Mul", x, x)
    return b.op("Pow", x, b.get(operands(node)[1], dtype))


@emits(aten.pow.Scalar)
def scalar_power(b: Builder, node: fx.Node) -> ir.Value:
    """A number to the powers of a tensor."""
    dtype = value(node).dtype
    return b.op("Pow", b.const(operands(node)[0], dtype), b.get(operands(node)[1], dtype))


@emits(aten.silu.default)
def silu(b: Builder, node: fx.Node) -> ir.Value:
    """x * sigmoid(x)."""
    return activation(b, "silu", b.get(operands(node)[0]))


@emits(aten.gelu.default)
def gelu(b: Builder, node: fx.Node) -> ir.Value:
    """Gelu, exact or by tanh."""
    tanh = argument(node, 1, "approximate", "none") == "tanh"
    return activation(b, "gelu_tanh" if tanh else "gelu", b.get(operands(node)[0]))


def activation(b: Builder, name: str, x: ir.Value) -> ir.Value:
    """One of the dialect's activations."""
    if name == "silu":
        if b.target.contrib:
            return b.microsoft("QuickGelu", x, alpha=1.0)
        return b.op("Mul", x, b.op("Sigmoid", x))
    return b.op("Gelu", x, approximate="tanh" if name == "gelu_tanh" else "none")


@emits(aten.softplus.default)
def softplus(b: Builder, node: fx.Node) -> ir.Value:
    """log(1 + exp(beta * x)) / beta, x itself above the threshold."""
    dtype = value(node).dtype
    x = b.get(operands(node)[0])
    beta, threshold = argument(node, 1, "beta", 1), argument(node, 2, "threshold", 20)
    scaled = b.op("Mul", x, b.const(beta, dtype))
    soft = b.op("Div", b.op("Softplus", scaled), b.const(beta, dtype))
    return b.op("Where", b.op("Greater", scaled, b.const(threshold, dtype)), x, soft)


@emits(aten.to.dtype)
def to_dtype(b: Builder, node: fx.Node) -> ir.Value:
    """A cast."""
    return b.op("Cast", b.get(operands(node)[0]), to=DTYPES[value(node).dtype])


@emits(aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)
def clamp(b: Builder, node: fx.Node) -> ir.Value:
    """Bounds below and above, either may be missing."""
    dtype = value(node).dtype
    low, high = argument(node, 1, "min"), argument(node, 2, "max")
    if node.target is aten.clamp_max.default:
        low, high = None, operands(node)[1]
    out = b.get(operands(node)[0], dtype)
    if low is not None:
        out = b.op("Max", out, b.get(low, dtype))
    if high is not None:
        out = b.op("Min", out, b.get(high, dtype))
    return out


@emits(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where(b: Builder, node: fx.Node) -> ir.Value:
    """Choose element by element."""
    dtype = value(node).dtype
    condition, yes, no = operands(node)
    return b.op("Where", b.get(condition, torch.bool), b.get(yes, dtype), b.get(no, dtype))


@emits(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(b: Builder, node: fx.Node) -> ir.Value:
    """A number where the mask is true."""
    dtype = value(node).dtype
    x, mask, number = operands(node)
    return b.op("Where", b.get(mask, torch.bool), b.get(number, dtype), b.get(x, dtype))


def logical(kind: str) -> Emitter:
    """A logical op on truth values, or bits."""

    def emit(b: Builder, node: fx.Node) -> ir.Value:
        dtype = value(node).dtype
        if dtype == torch.bool:
            return b.op(kind, *(b.get(a, torch.bool) for a in operands(node)[:2]))
        bits = {"And": "BitwiseAnd", "Or": "BitwiseOr", "Xor": "BitwiseXor"}[kind]
        return b.op(bits, *(b.get(a, dtype) for a in operands(node)[:2]))

    return emit


table(
    {
        aten.logical_and.default: logical("And"),
        aten.logical_or.default: logical("Or"),
        aten.logical_xor.default: logical("Xor"),
        aten.bitwise_and.Tensor: logical("And"),
        aten.bitwise_or.Tensor: logical("Or"),
        aten.__and__.Tensor: logical("And"),
        aten.__or__.Tensor: logical("Or"),
        aten.bitwise_and.Scalar: logical("And"),
    }
)


@emits(aten.logical_not.default, aten.bitwise_not.default)
def logical_not(b: Builder, node: fx.Node) -> ir.Value:
    """Not, or the complement of integers."""
    if node.target is aten.bitwise_not.default and value(node).dtype != torch.bool:
        return b.op("BitwiseNot", b.get(operands(node)[0]))
    return b.op("Not", b.get(operands(node)[0], torch.bool))


@emits(aten.div.Tensor_mode, aten.div.Scalar_mode)
def divide_rounded(b: Builder, node: fx.Node) -> ir.Value:
    """Division rounded down or towards zero."""
    dtype = value(node).dtype
    left, right = (b.get(a, torch.float64) for a in operands(node)[:2])
    quotient = b.op("Div", left, right)
    mode = options(node).get("rounding_mode")
    if mode == "floor":
        quotient = b.op("Floor", quotient)
    elif mode == "trunc":
        quotient = b.op("Mul", b.op("Sign", quotient), b.op("Floor", b.op("Abs", quotient)))
    return b.op("Cast", quotient, to=DTYPES[dtype])


@emits(aten.floor_divide.default)
def floor_divide(b: Builder, node: fx.Node) -> ir.Value:
    """Division rounded down."""
    dtype = value(node).dtype
    left, right = (b.get(a, torch.float64) for a in operands(node)[:2])
    return b.op("Cast", b.op("Floor", b.op("Div", left, right)), to=DTYPES[dtype])


@emits(aten.remainder.Scalar, aten.remainder.Tensor)
def remainder(b: Builder, node: fx.Node) -> ir.Value:
    """The remainder with the divisor's sign."""
    dtype = value(node).dtype
    left, right = (b.get(a, dtype) for a in operands(node)[:2])
    if dtype.is_floating_point:
        return b.op("Sub", left, b.op("Mul", right, b.op("Floor", b.op("Div", left, right))))
    return b.op("Mod", left, right)


# Matrices ------------------------------------------------------------------------------------


@emits(aten.linear.default)
def linear(b: Builder, node: fx.Node) -> ir.Value:
    """x @ weight.T + bias.

    `FusedMatMul` reads the weight transposed, as it is stored: it is packed at load all the same,
    and nothing has to be turned over while it is written. In standard ops the transpose is part of
    the lazy weight, unless something else reads the weight too: then `Gemm` reads it, kept once.
    """
    x, weight = operands(node)[:2]
    bias = argument(node, 2, "bias")
    assert isinstance(x, fx.Node)
    assert isinstance(weight, fx.Node)
    stored = b.graph.weight(weight)
    if stored is None:
        out = b.op("MatMul", b.get(x), b.op("Transpose", b.get(weight), perm=[1, 0]))
    elif b.target.contrib and value(x).dtype == torch.float32:
        out = b.microsoft("FusedMatMul", b.get(x), b.get(weight), transB=1)
    elif all(
        user.target is aten.linear.default and user.args[1] is weight for user in weight.users
    ):
        name = f"{weight.target}"
        out = b.op("MatMul", b.get(x), b.weight(f"{name}.T", stored.transpose()))
    else:
        out = shared_gemm(b, node, x, weight)
    return out if bias is None else b.op("Add", out, b.get(bias))


def shared_gemm(b: Builder, node: fx.Node, x: fx.Node, weight: fx.Node) -> ir.Value:
    """A product with a shared weight in standard ops."""
    width = int(value(x).shape[-1])
    rank = value(x).dim()
    flat = b.get(x) if rank == 2 else b.op("Reshape", b.get(x), b.const([-1, width]))
    out = b.op("Gemm", flat, b.get(weight), transB=1)
    if rank == 2:
        return out
    rows = [b.size(x, i) for i in range(rank - 1)]
    shape = b.op("Concat", *rows, b.const([int(value(node).shape[-1])]), axis=0)
    return b.op("Reshape", out, shape)


@emits(aten.matmul.default, aten.bmm.default, aten.mm.default)
def matmul(b: Builder, node: fx.Node) -> ir.Value:
    """A product."""
    return b.op("MatMul", b.get(operands(node)[0]), b.get(operands(node)[1]))


@emits(aten.addmm.default, aten.baddbmm.default)
def addmm(b: Builder, node: fx.Node) -> ir.Value:
    """beta * c + alpha * (a @ b)."""
    dtype = value(node).dtype
    added, left, right = (b.get(a, dtype) for a in operands(node)[:3])
    alpha, beta = options(node).get("alpha", 1), options(node).get("beta", 1)
    product = b.op("MatMul", left, right)
    if alpha != 1:
        product = b.op("Mul", product, b.const(alpha, dtype))
    if beta == 0:
        return product
    if beta != 1:
        added = b.op("Mul", added, b.const(beta, dtype))
    return b.op("Add", added, product)


@emits(aten.einsum.default)
def einsum(b: Builder, node: fx.Node) -> ir.Value:
    """Sums of products, by the same notation."""
    dtype = value(node).dtype
    terms = operands(node)[1]
    return b.op("Einsum", *(b.get(o, dtype) for o in terms), equation=operands(node)[0])


@emits(aten.embedding.default)
def embedding(b: Builder, node: fx.Node) -> ir.Value:
    """Rows of a table."""
    return b.op("Gather", b.get(operands(node)[0]), b.get(operands(node)[1]), axis=0)


# Reductions ----------------------------------------------------------------------------------


def reduction(kind: str, dims_at: int = 1) -> Emitter:
    """A reduction over some dimensions, or all."""

    def emit(b: Builder, node: fx.Node) -> ir.Value:
        dtype = value(node).dtype
        dims = argument(node, dims_at, "dim")
        keep = bool(argument(node, dims_at + 1, "keepdim", False))
        if isinstance(dims, int):
            dims = [dims]
        source = dtype if dtype != torch.bool else torch.int64
        x = b.get(operands(node)[0], source)
        axes = b.const(list(dims)) if dims else None
        out = b.op(kind, x, axes, keepdims=int(keep))
        return b.cast(out, source, dtype)

    return emit


table(
    {
        aten.mean.dim: reduction("ReduceMean"),
        aten.mean.default: reduction("ReduceMean", 9),
        aten.sum.dim_IntList: reduction("ReduceSum"),
        aten.sum.default: reduction("ReduceSum", 9),
        aten.amax.default: reduction("ReduceMax"),
        aten.amin.default: reduction("ReduceMin"),
        aten.max.default: reduction("ReduceMax", 9),
        aten.min.default: reduction("ReduceMin", 9),
        aten.any.dim: reduction("ReduceMax"),
        aten.any.default: reduction("ReduceMax", 9),
        aten.all.dim: reduction("ReduceMin"),
        aten.all.default: reduction("ReduceMin", 9),
    }
)


@emits(aten.max.dim, aten.min.dim)
def extreme(b: Builder, node: fx.Node) -> list[ir.Value]:
    """The largest or smallest along a dimension, and where it is."""
    largest = node.target is aten.max.dim
    x, dim = b.get(operands(node)[0]), int(argument(node, 1, "dim"))
    keep = int(bool(argument(node, 2, "keepdim", False)))
    found = b.op("ReduceMax" if largest else "ReduceMin", x, b.const([dim]), keepdims=keep)
    place = b.op("ArgMax" if largest else "ArgMin", x, axis=dim, keepdims=keep)
    return [found, place]


@emits(aten.argmax.default, aten.argmin.default)
def argmax(b: Builder, node: fx.Node) -> ir.Value:
    """The index of the largest along a dimension."""
    dim, keep = argument(node, 1, "dim"), bool(argument(node, 2, "keepdim", False))
    kind = "ArgMax" if node.target is aten.argmax.default else "ArgMin"
    if dim is None:
        flat = b.op("Reshape", b.get(operands(node)[0]), b.const([-1]))
        return b.op(kind, flat, axis=0, keepdims=0)
    return b.op(kind, b.get(operands(node)[0]), axis=int(dim), keepdims=int(keep))


@emits(aten.topk.default)
def topk(b: Builder, node: fx.Node) -> list[ir.Value]:
    """The k largest along a dimension."""
    dim = argument(node, 2, "dim", -1)
    largest, ordered = argument(node, 3, "largest", True), argument(node, 4, "sorted", True)
    out: list[ir.Value] = b.ops(
        "TopK",
        2,
        b.get(operands(node)[0]),
        b.number(operands(node)[1]),
        axis=int(dim),
        largest=int(bool(largest)),
        sorted=int(bool(ordered)),
    )
    return out


@emits(aten.cumsum.default)
def cumsum(b: Builder, node: fx.Node) -> ir.Value:
    """Running sums."""
    return b.op(
        "CumSum", b.get(operands(node)[0], value(node).dtype), b.const(int(operands(node)[1]))
    )


@emits(aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default)
def softmax(b: Builder, node: fx.Node) -> ir.Value:
    """Softmax along a dimension, in the result's type."""
    log = "log" in str(node.target)
    x = b.get(operands(node)[0], value(node).dtype)
    return b.op("LogSoftmax" if log else "Softmax", x, axis=int(operands(node)[1]))


@emits(aten.layer_norm.default)
def layer_norm(b: Builder, node: fx.Node) -> ir.Value:
    """LayerNorm over the last dimensions."""
    x, shape = operands(node)[:2]
    dtype = value(node).dtype
    weight, bias = argument(node, 2, "weight"), argument(node, 3, "bias")
    sizes = [int(s) for s in shape]
    scale = b.const(torch.ones(sizes), dtype) if weight is None else b.get(weight, dtype)
    shift = None if bias is None else b.get(bias, dtype)
    eps = float(argument(node, 4, "eps", 1e-5))
    return b.op("LayerNormalization", b.get(x), scale, shift, axis=-len(sizes), epsilon=eps)


@emits(aten.native_layer_norm.default)
def native_layer_norm(b: Builder, node: fx.Node) -> list[ir.Value | None]:
    """LayerNorm of which only the first result can be used."""
    x, shape, weight, bias, eps = operands(node)
    dtype = value(node)[0].dtype
    sizes = [int(s) for s in shape]
    scale = b.const(torch.ones(sizes), dtype) if weight is None else b.get(weight, dtype)
    shift = None if bias is None else b.get(bias, dtype)
    out = b.op("LayerNormalization", b.get(x), scale, shift, axis=-len(sizes), epsilon=float(eps))
    return [out, None, None]


def by_torchlib(b: Builder, node: fx.Node) -> ir.Value:
    """A form of an op that is left to torchlib."""
    from qopt.emit.torchlib import call_torchlib

    made: ir.Value = call_torchlib(b, node)
    return made


# Shapes --------------------------------------------------------------------------------------


@emits(aten.reshape.default, aten.view.default, aten._unsafe_view.default)
def reshape(b: Builder, node: fx.Node) -> ir.Value:
    """The same elements under another shape."""
    source = operands(node)[0]
    assert isinstance(source, fx.Node)
    flat = b.flat.get(source)
    if flat is not None and value(node).dim() == 3:
        return flat
    return b.reshape(node, source, operands(node)[1])


@emits(aten.transpose.int)
def transpose(b: Builder, node: fx.Node) -> ir.Value:
    """Exchange two dimensions."""
    rank = value(operands(node)[0]).dim()
    order = list(range(rank))
    i, j = (int(d) % rank for d in operands(node)[1:3])
    order[i], order[j] = order[j], order[i]
    return b.op("Transpose", b.get(operands(node)[0]), perm=order)


@emits(aten.permute.default)
def permute(b: Builder, node: fx.Node) -> ir.Value:
    """Reorder the dimensions."""
    rank = value(operands(node)[0]).dim()
    order = [int(d) % rank for d in operands(node)[1]]
    return b.op("Transpose", b.get(operands(node)[0]), perm=order)


@emits(aten.unsqueeze.default)
def unsqueeze(b: Builder, node: fx.Node) -> ir.Value:
    """A dimension of size 1."""
    return b.op("Unsqueeze", b.get(operands(node)[0]), b.const([int(operands(node)[1])]))


@emits(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def squeeze(b: Builder, node: fx.Node) -> ir.Value:
    """Drop dimensions of size 1."""
    source = value(operands(node)[0])
    dims = operands(node)[1] if len(operands(node)) > 1 else range(source.dim())
    dims = [dims] if isinstance(dims, int) else dims
    ones = [int(d) for d in dims if source.shape[d] == 1]
    if not ones:
        return b.op("Identity", b.get(operands(node)[0]))
    return b.op("Squeeze", b.get(operands(node)[0]), b.const(ones))


@emits(aten.expand.default)
def expand(b: Builder, node: fx.Node) -> ir.Value:
    """Repeat dimensions of size 1."""
    source = value(operands(node)[0])
    sizes = list(operands(node)[1])
    lead = len(sizes) - source.dim()
    for i, size in enumerate(sizes):
        if size == -1:
            sizes[i] = 1 if i >= lead else size
    return b.op("Expand", b.get(operands(node)[0]), b.shape(sizes))


@emits(aten.repeat.default)
def repeat(b: Builder, node: fx.Node) -> ir.Value:
    """Tile."""
    x, times = operands(node)
    lead = len(times) - value(x).dim()
    out = b.get(x)
    if lead:
        out = b.op("Unsqueeze", out, b.const(list(range(lead))))
    return b.op("Tile", out, b.shape(times))


@emits(aten.repeat_interleave.self_int)
def repeat_interleave(b: Builder, node: fx.Node) -> ir.Value:
    """Each slice several times in a row."""
    x, times = operands(node)[:2]
    dim = argument(node, 2, "dim")
    source = value(x)
    if dim is None:
        raise b.refuse(node, "repeat_interleave without a dimension")
    dim = int(dim) % source.dim()
    out = b.op("Unsqueeze", b.get(x), b.const([dim + 1]))
    tiles: list[Any] = [1] * (source.dim() + 1)
    tiles[dim + 1] = times
    out = b.op("Tile", out, b.shape(tiles))
    return b.op("Reshape", out, merged(b, x, node, dim))


def merged(b: Builder, x: fx.Node, node: fx.Node, dim: int) -> ir.Value:
    """Sizes of x where dimension `dim` has grown."""
    parts = [b.size(x, i) for i in range(value(x).dim())]
    after = value(node).shape[dim]
    parts[dim] = b.const([-1]) if isinstance(after, torch.SymInt) else b.const([int(after)])
    return b.op("Concat", *parts, axis=0)


@emits(aten.cat.default)
def cat(b: Builder, node: fx.Node) -> ir.Value:
    """Join along a dimension; an empty vector joins with anything."""
    dtype, rank = value(node).dtype, value(node).dim()
    parts = [p for p in operands(node)[0] if value(p).dim() == rank]
    dim = int(argument(node, 1, "dim", 0))
    return b.op("Concat", *(b.get(p, dtype) for p in parts), axis=dim)


@emits(aten.stack.default)
def stack(b: Builder, node: fx.Node) -> ir.Value:
    """Join along a new dimension."""
    dtype = value(node).dtype
    dim = int(argument(node, 1, "dim", 0)) % value(node).dim()
    parts = [b.op("Unsqueeze", b.get(p, dtype), b.const([dim])) for p in operands(node)[0]]
    return b.op("Concat", *parts, axis=dim)


@emits(aten.split_with_sizes.default)
def split_with_sizes(b: Builder, node: fx.Node) -> list[ir.Value]:
    """Pieces of given sizes."""
    x, sizes = operands(node)[:2]
    dim = int(argument(node, 2, "dim", 0))
    out = b.ops("Split", len(sizes), b.get(x), b.shape(sizes), axis=dim)
    return out if isinstance(out, list) else [out]


@emits(aten.split.Tensor, aten.chunk.default)
def split(b: Builder, node: fx.Node) -> list[ir.Value]:
    """Pieces of one size, the last one shorter, some of it symbolic."""
    pieces = value(node)
    dim = int(argument(node, 2, "dim", 0))
    if node.target is aten.split.Tensor:
        size = b.number(operands(node)[1])
        out, at = [], b.const([0])
        for _ in pieces:
            end = b.op("Add", at, size)
            out.append(b.op("Slice", b.get(operands(node)[0]), at, end, b.const([dim])))
            at = end
        return out
    made = b.ops("Split", len(pieces), b.get(operands(node)[0]), axis=dim, num_outputs=len(pieces))
    return made if isinstance(made, list) else [made]


@emits(aten.unbind.int)
def unbind(b: Builder, node: fx.Node) -> list[ir.Value]:
    """Each slice along a dimension."""
    dim = int(argument(node, 1, "dim", 0))
    x = b.get(operands(node)[0])
    return [b.op("Gather", x, b.const(i), axis=dim) for i in range(len(value(node)))]


@emits(aten.slice.Tensor)
def slice_tensor(b: Builder, node: fx.Node) -> ir.Value:
    """A range of a dimension."""
    dim = int(argument(node, 1, "dim", 0))
    start, stop = argument(node, 2, "start"), argument(node, 3, "end")
    step = argument(node, 4, "step", 1)
    low = b.number(0 if start is None else start)
    high = b.number((1 << 62) if stop is None else stop)
    return b.op("Slice", b.get(operands(node)[0]), low, high, b.const([dim]), b.number(step))


@emits(aten.narrow.default)
def narrow(b: Builder, node: fx.Node) -> ir.Value:
    """A range of a dimension by start and length."""
    x, dim, start, length = operands(node)
    low = b.number(start)
    high = b.op("Add", low, b.number(length))
    return b.op("Slice", b.get(x), low, high, b.const([int(dim)]))


@emits(aten.select.int)
def select(b: Builder, node: fx.Node) -> ir.Value:
    """One slice of a dimension."""
    x, dim, index = operands(node)
    if isinstance(index, fx.Node):
        at = b.op("Squeeze", b.number(index), b.const([0]))
    else:
        at = b.const(int(index))
    return b.op("Gather", b.get(x), at, axis=int(dim))


@emits(aten.index_select.default)
def index_select(b: Builder, node: fx.Node) -> ir.Value:
    """Slices of a dimension."""
    x, dim, index = operands(node)
    return b.op("Gather", b.get(x), b.get(index), axis=int(dim))


@emits(aten.gather.default)
def gather(b: Builder, node: fx.Node) -> ir.Value:
    """One element for each index, along a dimension."""
    x, dim, index = operands(node)[:3]
    return b.op("GatherElements", b.get(x), b.get(index), axis=int(dim))


@emits(aten.index.Tensor)
def index(b: Builder, node: fx.Node) -> ir.Value:
    """Advanced indexing by integers on leading dimensions."""
    x, indices = operands(node)
    items = list(indices)
    held = [i for i, item in enumerate(items) if item is not None]
    if any(value(items[i]).dtype == torch.bool for i in held):
        raise b.refuse(node, "indexing by a mask")
    if len(held) == 1:
        return b.op("Gather", b.get(x), b.get(items[held[0]], torch.int64), axis=held[0])
    if held != list(range(len(held))):
        return by_torchlib(b, node)
    shape = broadcast_shape(b, [items[i] for i in held])
    parts = []
    for i in held:
        wide = b.op("Expand", b.get(items[i], torch.int64), shape)
        parts.append(b.op("Unsqueeze", wide, b.const([-1])))
    return b.op("GatherND", b.get(x), b.op("Concat", *parts, axis=-1))


def broadcast_shape(b: Builder, items: list[fx.Node]) -> ir.Value:
    """The shape that several tensors broadcast to."""
    rank = max(value(i).dim() for i in items)
    shape = None
    for item in items:
        sizes = b.sizes(item)
        lead = rank - value(item).dim()
        if lead:
            sizes = b.op("Concat", b.const([1] * lead), sizes, axis=0)
        shape = sizes if shape is None else b.op("Max", shape, sizes)
    assert shape is not None
    return shape


@emits(aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
def scatter(b: Builder, node: fx.Node) -> ir.Value:
    """Write elements at indices along a dimension."""
    x, dim, index, source = operands(node)[:4]
    dtype = value(node).dtype
    updates = b.get(source, dtype)
    if not (isinstance(source, fx.Node) and isinstance(value(source), Tensor)):
        updates = b.op("Expand", updates, b.sizes(index))
    kind = "add" if node.target is aten.scatter_add.default else "none"
    return b.op("ScatterElements", b.get(x), b.get(index), updates, axis=int(dim), reduction=kind)


@emits(aten.tril.default, aten.triu.default)
def triangle(b: Builder, node: fx.Node) -> ir.Value:
    """One triangle of a matrix, the rest 0."""
    upper = int(node.target is aten.triu.default)
    diagonal = argument(node, 1, "diagonal", 0)
    k = b.op("Squeeze", b.number(diagonal), b.const([0]))
    held = value(node).dtype
    if held == torch.bool:
        out = b.op("Trilu", b.get(operands(node)[0], torch.int64), k, upper=upper)
        return b.op("Cast", out, to=DTYPES[torch.bool])
    return b.op("Trilu", b.get(operands(node)[0]), k, upper=upper)


@emits(aten.constant_pad_nd.default, aten.pad.default)
def pad(b: Builder, node: fx.Node) -> ir.Value:
    """Pad the last dimensions by a number."""
    x, pads = operands(node)[:2]
    mode = argument(node, 2, "mode", "constant") if node.target is aten.pad.default else "constant"
    at = 3 if node.target is aten.pad.default else 2
    fill = argument(node, at, "value", 0)
    if mode != "constant":
        raise b.refuse(node, f"padding by {mode}")
    rank = value(x).dim()
    before: list[Any] = [0] * rank
    after: list[Any] = [0] * rank
    for i in range(len(pads) // 2):
        before[rank - 1 - i], after[rank - 1 - i] = pads[2 * i], pads[2 * i + 1]
    number = b.const(0 if fill is None else fill, value(node).dtype)
    return b.op("Pad", b.get(x), b.shape(before + after), number)


@emits(aten.flip.default)
def flip(b: Builder, node: fx.Node) -> ir.Value:
    """Reverse dimensions."""
    dims = [int(d) for d in operands(node)[1]]
    n = len(dims)
    return b.op(
        "Slice",
        b.get(operands(node)[0]),
        b.const([-1] * n),
        b.const([-(1 << 62)] * n),
        b.const(dims),
        b.const([-1] * n),
    )


# Writes, as values ---------------------------------------------------------------------------


@emits(aten.slice_scatter.default)
def slice_scatter(b: Builder, node: fx.Node) -> ir.Value:
    """A range of a dimension replaced: what is before it, the new part, what is after it."""
    dim, step = int(argument(node, 2, "dim", 0)), argument(node, 5, "step", 1)
    start, end = argument(node, 3, "start"), argument(node, 4, "end")
    if step != 1:
        return strided_scatter(b, node, dim, start, step)
    x, dtype = b.get(operands(node)[0]), value(node).dtype
    axis, last = b.const([dim]), b.const([1 << 62])
    parts = [b.get(operands(node)[1], dtype)]
    if start not in (None, 0):
        parts.insert(0, b.op("Slice", x, b.const([0]), b.number(start), axis))
    if end is not None and not (isinstance(end, int) and end >= 1 << 60):
        parts.append(b.op("Slice", x, b.number(end), last, axis))
    return parts[0] if len(parts) == 1 else b.op("Concat", *parts, axis=dim)


def strided_scatter(b: Builder, node: fx.Node, dim: int, start: Any, step: Any) -> ir.Value:
    """Every `step`-th slice replaced."""
    x, new = operands(node)[:2]
    assert isinstance(x, fx.Node)
    assert isinstance(new, fx.Node)
    if (isinstance(start, int) and start < 0) or isinstance(start, fx.Node):
        raise b.refuse(node, "a strided write from a start that is counted from the end")
    rank, zero = value(x).dim(), b.const([0])
    count = b.op("Squeeze", b.size(new, dim), zero)
    places = b.op("Range", b.const(0), count, b.const(1))
    places = b.op("Add", b.op("Mul", places, b.const(int(step))), b.const(int(start or 0)))
    shape = b.op("Unsqueeze", places, b.const([d for d in range(rank) if d != dim % rank]))
    places = b.op("Expand", shape, b.op("Shape", b.get(new)))
    return b.op("ScatterElements", b.get(x), places, b.get(new, value(node).dtype), axis=dim)


@emits(aten.select_scatter.default)
def select_scatter(b: Builder, node: fx.Node) -> ir.Value:
    """One slice of a dimension replaced."""
    dim, index = int(operands(node)[2]), operands(node)[3]
    x, axis = b.get(operands(node)[0]), b.const([dim])
    new = b.op("Unsqueeze", b.get(operands(node)[1], value(node).dtype), axis)
    at = b.number(index)
    before = b.op("Slice", x, b.const([0]), at, axis)
    after = b.op("Add", at, b.const([1]))
    if isinstance(index, int) and index == -1:
        return b.op("Concat", before, new, axis=dim)
    rest = b.op("Slice", x, after, b.const([1 << 62]), axis)
    return b.op("Concat", before, new, rest, axis=dim)


@emits(aten.copy.default)
def copy(b: Builder, node: fx.Node) -> ir.Value:
    """The second tensor, in type and shape of the first."""
    x, source = operands(node)[:2]
    assert isinstance(x, fx.Node)
    made = b.get(source, value(node).dtype)
    if isinstance(source, fx.Node) and same_shape(value(source), value(x)):
        return made
    return b.op("Expand", made, b.sizes(x))


@emits(aten.fill.Scalar, aten.fill.Tensor, aten.zero.default)
def fill(b: Builder, node: fx.Node) -> ir.Value:
    """A number in every place of a tensor."""
    x = operands(node)[0]
    assert isinstance(x, fx.Node)
    number = 0 if node.target is aten.zero.default else operands(node)[1]
    return b.op("Expand", b.get(number, value(node).dtype), b.sizes(x))


@emits(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(b: Builder, node: fx.Node) -> ir.Value:
    """Elements replaced, or added to, at indices of the leading dimensions or by a mask."""
    x, indices, new = operands(node)[:3]
    add = bool(argument(node, 3, "accumulate", False))
    items = list(indices)
    dtype = value(node).dtype
    assert isinstance(x, fx.Node)
    if len(items) == 1 and value(items[0]).dtype == torch.bool:
        return masked_put(b, node, x, items[0], new, add)
    if any(item is None or value(item).dtype == torch.bool for item in items):
        raise b.refuse(node, "a write at indices of some later dimension")
    shape = broadcast_shape(b, items)
    parts = [
        b.op("Unsqueeze", b.op("Expand", b.get(item, torch.int64), shape), b.const([-1]))
        for item in items
    ]
    places = b.op("Concat", *parts, axis=-1)
    tail = b.op("Shape", b.get(x), start=len(items))
    updates = b.op("Expand", b.get(new, dtype), b.op("Concat", shape, tail, axis=0))
    if add:
        return b.add_at(b.get(x), places, updates, dtype)
    return b.op("ScatterND", b.get(x), places, updates)


def masked_put(
    b: Builder, node: fx.Node, x: fx.Node, mask: fx.Node, new: Any, add: bool
) -> ir.Value:
    """One number where the mask is true."""
    single = not isinstance(new, fx.Node) or value(new).numel() == 1
    if add or not single:
        raise b.refuse(node, "a write of several values by a mask")
    dtype, lead = value(node).dtype, value(x).dim() - value(mask).dim()
    where = b.get(mask)
    if lead:
        where = b.op("Unsqueeze", where, b.const(list(range(-lead, 0))))
    return b.op("Where", where, b.get(new, dtype), b.get(x))


# Making tensors ------------------------------------------------------------------------------


@emits(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(b: Builder, node: fx.Node) -> ir.Value:
    """Numbers in order."""
    dtype = value(node).dtype
    if node.target is aten.arange.default:
        start, stop, step = 0, operands(node)[0], 1
    else:
        start, stop = operands(node)[:2]
        step = operands(node)[2] if len(operands(node)) > 2 else 1
    return b.op("Range", *(b.get(item, dtype) for item in (start, stop, step)))


@emits(aten.full.default, aten.new_full.default)
def full(b: Builder, node: fx.Node) -> ir.Value:
    """A number in every place."""
    sizes, number = operands(node)[-2:]
    return b.op("Expand", b.get(number, value(node).dtype), b.shape(sizes))


@emits(
    aten.zeros.default,
    aten.ones.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.empty.memory_format,
    aten.new_empty.default,
)
def filled(b: Builder, node: fx.Node) -> ir.Value:
    """Zeros or ones; memory without contents becomes zeros."""
    sizes = operands(node)[-1]
    number = 1 if "ones" in str(node.target) else 0
    return b.op("Expand", b.const(number, value(node).dtype), b.shape(sizes))


@emits(
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
)
def filled_like(b: Builder, node: fx.Node) -> ir.Value:
    """A number in the shape of another tensor."""
    number: Any = 1 if "ones" in str(node.target) else 0
    if node.target is aten.full_like.default:
        number = operands(node)[1]
    source = operands(node)[0]
    return b.op("Expand", b.get(number, value(node).dtype), b.sizes(source))


@emits(aten.scalar_tensor.default)
def scalar_tensor(b: Builder, node: fx.Node) -> ir.Value:
    """A number as a tensor."""
    return b.get(operands(node)[0], value(node).dtype)


# Convolutions and pools ----------------------------------------------------------------------


@emits(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
def convolution(b: Builder, node: fx.Node) -> ir.Value:
    """A convolution; the padding may be given by name."""
    x, weight = operands(node)[:2]
    bias = argument(node, 2, "bias")
    spatial = value(weight).dim() - 2
    stride, padding, dilation = (
        argument(node, i, n, d)
        for i, n, d in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    )
    groups = argument(node, 6, "groups", 1)
    pads = spread(padding, spatial)
    return b.op(
        "Conv",
        b.get(x),
        b.get(weight),
        None if bias is None else b.get(bias),
        strides=spread(stride, spatial),
        pads=pads + pads,
        dilations=spread(dilation, spatial),
        group=int(groups),
    )


def spread(number: Any, count: int) -> list[int]:
    """A number for each dimension."""
    items = [number] if isinstance(number, int) else [int(n) for n in number]
    return items * count if len(items) == 1 else items


@emits(aten.batch_norm.default)
def batch_norm(b: Builder, node: fx.Node) -> ir.Value:
    """Batch norm by its stored statistics."""
    x, weight, bias, mean, variance = operands(node)[:5]
    channels = int(value(x).shape[1])
    dtype = value(node).dtype
    scale = b.const(torch.ones(channels), dtype) if weight is None else b.get(weight)
    shift = b.const(torch.zeros(channels), dtype) if bias is None else b.get(bias)
    return b.op(
        "BatchNormalization",
        b.get(x),
        scale,
        shift,
        b.get(mean),
        b.get(variance),
        epsilon=float(operands(node)[7]),
    )


@emits(aten.max_pool2d.default, aten.avg_pool2d.default)
def pool(b: Builder, node: fx.Node) -> ir.Value:
    """Pooling of two dimensions."""
    kernel = spread(operands(node)[1], 2)
    stride = spread(argument(node, 2, "stride") or kernel, 2)
    pads = spread(argument(node, 3, "padding", 0), 2)
    if node.target is aten.max_pool2d.default:
        dilations = spread(argument(node, 4, "dilation", 1), 2)
        ceil = int(bool(argument(node, 5, "ceil_mode", False)))
        return b.op(
            "MaxPool",
            b.get(operands(node)[0]),
            kernel_shape=kernel,
            strides=stride,
            pads=pads * 2,
            dilations=dilations,
            ceil_mode=ceil,
        )
    ceil = int(bool(argument(node, 4, "ceil_mode", False)))
    include = int(bool(argument(node, 5, "count_include_pad", True)))
    return b.op(
        "AveragePool",
        b.get(operands(node)[0]),
        kernel_shape=kernel,
        strides=stride,
        pads=pads * 2,
        ceil_mode=ceil,
        count_include_pad=include,
    )


@emits(aten.adaptive_avg_pool2d.default)
def adaptive_pool(b: Builder, node: fx.Node) -> ir.Value:
    """The mean over all of two dimensions."""
    if list(operands(node)[1]) != [1, 1]:
        return by_torchlib(b, node)
    return b.op("GlobalAveragePool", b.get(operands(node)[0]))


@emits(aten.scaled_dot_product_attention.default)
def sdpa(b: Builder, node: fx.Node) -> ir.Value:
    """Attention of queries over keys, by standard products."""
    q, k, v = operands(node)[:3]
    mask = argument(node, 3, "attn_mask")
    causal = argument(node, 5, "is_causal", False)
    scale = options(node).get("scale")
    dtype = value(node).dtype
    size = int(value(q).shape[-1])
    factor = float(scale) if scale is not None else size**-0.5
    key, held = b.get(k), b.get(v)
    if options(node).get("enable_gqa"):
        raise b.refuse(node, "grouped heads in scaled_dot_product_attention")
    rank = value(k).dim()
    order = [*range(rank - 2), rank - 1, rank - 2]
    scores = b.op("MatMul", b.get(q), b.op("Transpose", key, perm=order))
    scores = b.op("Mul", scores, b.const(factor, dtype))
    low = b.const(float(torch.finfo(dtype).min), dtype)
    if causal:
        square = b.op(
            "Expand", b.const(1), b.op("Concat", b.size(q, -2 % rank), b.size(k, -2 % rank), axis=0)
        )
        seen = b.op("Cast", b.op("Trilu", square, upper=0), to=DTYPES[torch.bool])
        scores = b.op("Where", seen, scores, low)
    if mask is not None and value(mask).dtype == torch.bool:
        scores = b.op("Where", b.get(mask), scores, low)
    elif mask is not None:
        scores = b.op("Add", scores, b.get(mask, dtype))
    return b.op("MatMul", b.op("Softmax", scores, axis=-1), held)


# Symbolic numbers ----------------------------------------------------------------------------


@emits(aten.sym_size.int)
def sym_size(b: Builder, node: fx.Node) -> ir.Value:
    """A size."""
    return b.size(operands(node)[0], int(operands(node)[1]))


def symbolic(kind: str) -> Emitter:
    """Arithmetic of sizes."""

    def emit(b: Builder, node: fx.Node) -> ir.Value:
        return b.op(kind, b.number(operands(node)[0]), b.number(operands(node)[1]))

    return emit


table(
    {
        operator.add: symbolic("Add"),
        operator.sub: symbolic("Sub"),
        operator.mul: symbolic("Mul"),
        operator.floordiv: symbolic("Div"),
        operator.mod: symbolic("Mod"),
        torch.sym_max: symbolic("Max"),
        torch.sym_min: symbolic("Min"),
    }
)


@emits(torch.sym_sum)
def sym_sum(b: Builder, node: fx.Node) -> ir.Value:
    """The sum of several sizes."""
    total, *rest = (b.number(item) for item in operands(node)[0])
    for item in rest:
        total = b.op("Add", total, item)
    return total


@emits(operator.neg)
def sym_neg(b: Builder, node: fx.Node) -> ir.Value:
    """A size with the other sign."""
    return b.op("Neg", b.number(operands(node)[0]))


@emits(operator.getitem)
def getitem(b: Builder, node: fx.Node) -> Any:
    """One of several results."""
    source, place = operands(node)
    assert isinstance(source, fx.Node)
    results = b.values[source]
    return results[place]
