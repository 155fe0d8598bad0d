"""A linear with SiLU in its epilogue: one program a tile of the result, of gate and up together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qopt import ops
from qopt.kernel import FLOATS, Form, architecture, forms_of, kernel, launch, rows, unfit

FEW = 16  # rows up to which a product is bound by reading its weight


@triton.jit
def _linear_silu_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_stride: tl.int64,
    weight_stride: tl.int64,
    rows: tl.int32,
    outputs: tl.int32,
    width: tl.int32,
    bias_width: tl.int32,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    blocks = tl.cdiv(rows, BLOCK_M)
    row = (tl.program_id(0) % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    out = (tl.program_id(0) // blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    gate_ptrs = weight_ptr + out.to(tl.int64)[None, :] * weight_stride + k[:, None]
    up_ptrs = gate_ptrs + weight_stride * outputs
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, width, BLOCK_K):
        inside = start + k < width
        keep = (row[:, None] < rows) & inside[None, :]
        x = tl.load(x_ptrs + start, mask=keep, other=0.0)
        keep = (out[None, :] < outputs) & inside[:, None]
        weight = tl.load(gate_ptrs + start, mask=keep, other=0.0)
        if WIDE:
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        gate = tl.dot(x, weight, gate, input_precision="ieee")
        if GATED:
            weight = tl.load(up_ptrs + start, mask=keep, other=0.0)
            if WIDE:
                weight = weight.to(tl.float32)
            up = tl.dot(x, weight, up, input_precision="ieee")
    given = out < tl.minimum(outputs, bias_width)
    gate += tl.load(bias_ptr + out, mask=given, other=0.0).to(tl.float32)[None, :]
    gate = gate.to(y_ptr.dtype.element_ty).to(tl.float32)  # as the linear's result is
    y = gate * tl.sigmoid(gate)
    if GATED:
        up += tl.load(bias_ptr + outputs + out, mask=given, other=0.0).to(tl.float32)[None, :]
        up = up.to(y_ptr.dtype.element_ty).to(tl.float32)
        y = y.to(y_ptr.dtype.element_ty).to(tl.float32) * up
    y_ptrs = y_ptr + row.to(tl.int64)[:, None] * outputs + out[None, :]
    keep = (row[:, None] < rows) & (out[None, :] < outputs)
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=keep)


def tile(rows: int, dtype: torch.dtype, arch: str) -> dict[str, Any]:
    """The options of a launch for so many rows of a type, on an architecture."""
    amd = arch.startswith("gfx")
    if rows <= FEW:
        deep = 64 if dtype == torch.float32 else 128
        sizes, warps, stages = (16, 32, deep), 4, 2 if amd else 3
    elif dtype == torch.float32:
        sizes, warps, stages = (32, 32, 32), 4, 2
    elif arch in ("sm_90", "sm_100"):
        sizes, warps, stages = (128, 64, 64), 8, 3
    else:
        sizes, warps, stages = (64, 64, 32 if amd else 64), 4, 2 if amd else 3
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K")
    return dict(zip(names, sizes, strict=True)) | {"num_warps": warps, "num_stages": stages}


def forms(arch: str) -> Iterator[Form]:
    """Every form that the launcher asks for."""
    for dtype in FLOATS:
        for count in (1, FEW + 1):
            for gated in (False, True):
                yield from forms_of(
                    _linear_silu_kernel,
                    {},
                    tile(count, dtype, arch) | {"GATED": gated},
                    [dtype],
                    grid="(ceil(rows / BLOCK_M) * ceil(outputs / BLOCK_N), 1, 1)",
                    aligned=("x_stride", "weight_stride", "outputs", "width"),
                )


def refuses(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, gated: bool = False
) -> str | None:
    """Any number and width of rows, all tensors of one type.

    Types: float32, float16, bfloat16. fp32 is multiplied in full precision, without TF32.
    """
    if x.shape[-1] != weight.shape[1]:
        return "x and weight differ in width"
    if gated and weight.shape[0] % 2:
        return f"{weight.shape[0]} rows are no halves"
    if triton.cdiv(x.numel(), 16 * max(1, x.shape[-1])) * triton.cdiv(weight.shape[0], 32) >= 2**31:
        return "more than 2 ** 31 tiles"
    return unfit(same=[x, weight, bias])


@kernel(ops.linear_silu, "triton", refuses=refuses, forms=forms)
def linear_silu(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, gated: bool = False
) -> Tensor:
    """`qopt::linear_silu`; products are rounded before the gate, as a linear's are."""
    flat, matrix = rows(x), rows(weight)
    count, width = flat.shape
    outputs = matrix.shape[0] // (2 if gated else 1)
    y = torch.empty(count, outputs, dtype=x.dtype, device=x.device)
    options = tile(count, x.dtype, architecture(x.device))
    tiles = triton.cdiv(count, options["BLOCK_M"]) * triton.cdiv(outputs, options["BLOCK_N"])
    if tiles:
        launch(
            _linear_silu_kernel,
            (tiles,),
            flat,
            matrix,
            flat if bias is None else bias.contiguous(),
            y,
            flat.stride(0),
            matrix.stride(0),
            count,
            outputs,
            width,
            0 if bias is None else outputs,
            GATED=gated,
            **options,
        )
    return y.view(*x.shape[:-1], outputs)
