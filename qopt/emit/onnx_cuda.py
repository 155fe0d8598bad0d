"""ONNX for onnxruntime's CUDA provider: its `com.microsoft` ops, and bf16 where it has kernels.

What the provider has is taken from onnxruntime's docs/OperatorKernels.md. Version 1.31 has neither
`query_seqlens` of `GroupQueryAttention` nor opset 25's windowed `Attention`: neither is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir
import torch
from torch import fx

from qopt.canonical import operands, options, value
from qopt.emit.builder import Builder
from qopt.emit.onnx_dialect import (
    ExpertLoop,
    Gated,
    GroupQueryAttention,
    LastTokens,
    MoE,
    SkipLayerNorm,
    SkipRMSNorm,
    StandardRMSNorm,
    StandardRotary,
    skip_results,
    unfit_terms,
)
from qopt.lower import Context, implements

if TYPE_CHECKING:
    import onnx

TARGET = "onnx-cuda"
HALVES = (torch.float16, torch.bfloat16)
WIDEST_HEAD = 256  # elements of a head that the flash attention behind GroupQueryAttention takes

# Standard ops that have a bf16 kernel in the CUDA provider; other ones compute in fp32, since the
# CPU provider, where they would else run, has none.
BF16_OPS = frozenset(
    (
        *("Add", "Cast", "Concat", "ConstantOfShape", "Div", "Erf", "Exp", "Expand", "Gather"),
        *("GatherElements", "GatherND", "Gelu", "Gemm", "Identity", "LayerNormalization", "MatMul"),
        *("Max", "Min", "Mul", "Neg", "Pow", "RMSNormalization", "ReduceSum", "Relu", "Reshape"),
        *("RotaryEmbedding", "ScatterElements", "Shape", "Sigmoid", "Slice", "Softmax", "Split"),
        *("Sqrt", "Squeeze", "Sub", "Tanh", "Tile", "Transpose", "Unsqueeze", "Where"),
    )
)


class CudaRMSNorm(StandardRMSNorm):
    """`RMSNormalization` of opset 23, wherever the model rounds."""

    def refuses(self, context: Context, node: fx.Node) -> str | None:
        """Nothing: the target writes opset 23 and later."""
        return None


class CudaSkipRMSNorm(SkipRMSNorm):
    """`SkipSimplifiedLayerNormalization`, which rounds once where the model may round twice.

    A residual in fp32 has the op run in fp32, its norm rounded to the type of x.
    """

    def refuses(self, context: Context, node: fx.Node) -> str | None:
        """Two or three dimensions."""
        rank = value(operands(node)[0]).dim()
        return None if rank in (2, 3) else f"it takes 2 or 3 dimensions, not {rank}"

    def emit(self, b: Builder, node: fx.Node) -> list[ir.Value]:
        """One node with two of its four results, and casts where the terms differ in type."""
        x, residual, weight, eps = operands(node)[:4]
        normed, total = value(node)
        out = b.microsoft_ops(
            "SkipSimplifiedLayerNormalization",
            4,
            b.get(x, total.dtype),
            b.get(residual, total.dtype),
            b.const(torch.ones(int(total.shape[-1])), total.dtype)
            if weight is None
            else b.get(weight, total.dtype),
            epsilon=float(eps),
        )
        made, summed = skip_results(out)
        return [b.cast(made, total.dtype, normed.dtype), summed]


class CudaSkipLayerNorm(SkipLayerNorm):
    """`SkipLayerNormalization`, which rounds once where the model may round twice."""

    def refuses(self, context: Context, node: fx.Node) -> str | None:
        """Two or three dimensions, and one type."""
        return unfit_terms(node)


class CudaGroupQueryAttention(GroupQueryAttention):
    """`com.microsoft.GroupQueryAttention` without `query_seqlens`.

    Several rows may then feed several tokens each to an empty cache, or one each to a filled one.
    """

    dtypes = HALVES
    of_types = "the CUDA provider runs it in fp16 and bf16 only"

    def refuses(self, context: Context, node: fx.Node) -> str | None:
        """What the op cannot take anywhere, and heads that no CUDA kernel behind it takes."""
        size = int(value(operands(node)[0]).shape[-1])
        if size > WIDEST_HEAD:
            return f"heads of {size} elements exceed {WIDEST_HEAD}"
        softcap = options(node).get("softcap")
        if softcap is not None and softcap <= 0:
            return f"soft-cap {softcap} is not positive"
        return super().refuses(context, node)

    def new_lengths(
        self, b: Builder, node: fx.Node, mask: fx.Node, projected: fx.Node | None
    ) -> ir.Value | None:
        """The CUDA provider has no such input."""
        return None


class CudaMoE(MoE):
    """`com.microsoft.MoE`: a loop would wait for the device at each expert."""

    dtypes = HALVES
    of_types = "it is fp16 or bf16"
    fewest = 0


for _op, _classes in {
    "rms_norm": (CudaRMSNorm,),
    "add_rms_norm": (CudaSkipRMSNorm,),
    "add_layer_norm": (CudaSkipLayerNorm,),
    "gated": (Gated,),
    "last_tokens": (LastTokens,),
    "rotary": (StandardRotary,),
    "cached_attention": (CudaGroupQueryAttention,),
    "experts": (CudaMoE, ExpertLoop),
}.items():
    for _class in _classes:
        implements(_op, TARGET)(_class)


CHUNKS = (
    "several rows cannot feed several tokens each to a filled cache: the CUDA provider's "
    "GroupQueryAttention has no query_seqlens"
)


def after_writing(path: Path, batched_chunks: bool) -> list[str]:
    """Mend the file where the provider has no bf16 kernel; returns what is to be said of it."""
    notes = [] if batched_chunks else [CHUNKS]
    widened = widen_missing(path)
    if widened:
        what = ", ".join(widened)
        notes.append(f"computed in fp32, since the CUDA provider has no bf16 kernel: {what}")
    return notes


def widen_missing(path: Path) -> list[str]:
    """Have ops without a bf16 kernel compute in fp32, casts around them; returns their names.

    Reads and writes the ONNX file; its weights stay where they are.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    halves = bf16_values(model)
    nodes: list[onnx.NodeProto] = []
    widened: dict[str, int] = {}
    for node in model.graph.node:
        given = [i for i, name in enumerate(node.input) if name in halves]
        if node.domain or node.op_type in BF16_OPS or not given:
            nodes.append(node)
            continue
        widened[node.op_type] = widened.get(node.op_type, 0) + 1
        for i in given:
            wide = f"{node.name}/wide_{i}"
            nodes.append(onnx.helper.make_node("Cast", [node.input[i]], [wide], to=FLOAT))
            node.input[i] = wide
        nodes.append(node)
        for i, name in enumerate(node.output):
            if name in halves:
                wide = f"{node.name}/result_{i}"
                nodes.append(onnx.helper.make_node("Cast", [wide], [name], to=BFLOAT16))
                node.output[i] = wide
    if widened:
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        onnx.save(model, path)
    return [f"{op} {count}x" for op, count in sorted(widened.items())]


FLOAT, BFLOAT16 = int(ir.DataType.FLOAT), int(ir.DataType.BFLOAT16)


def bf16_values(model: onnx.ModelProto) -> set[str]:
    """The names of all values that are bf16."""
    import onnx

    graph = onnx.shape_inference.infer_shapes(model).graph
    held = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.output)}
    held |= {v.name: v.type.tensor_type.elem_type for v in graph.value_info}
    held |= {t.name: t.data_type for t in graph.initializer}
    return {name for name, kind in held.items() if kind == BFLOAT16}
