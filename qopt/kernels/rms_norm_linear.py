"""RMSNorm and the linear behind it: one program a tile of the product, the norm in its prologue."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qopt import ops
from qopt.kernel import FLOATS, Form, architecture, forms_of, kernel, launch, rows, unfit, unlike

FEW = 16  # rows up to which a product is bound by reading its weight


@triton.jit
def _rms_norm_linear_kernel(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_stride: tl.int64,
    weight_stride: tl.int64,
    rows: tl.int32,
    outputs: tl.int32,
    width: tl.int32,
    norm_width: tl.int32,
    bias_width: tl.int32,
    eps: tl.float32,
    cast_first: tl.int32,
    SILU: tl.constexpr,
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
    weight_ptrs = weight_ptr + out.to(tl.int64)[None, :] * weight_stride + k[:, None]
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, width, BLOCK_K):
        keep = (row[:, None] < rows) & (start + k[None, :] < width)
        x = tl.load(x_ptrs + start, mask=keep, other=0.0).to(tl.float32)
        squares += tl.sum(x * x, axis=1)
    rstd = tl.rsqrt(squares / width + eps)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, width, BLOCK_K):
        at = start + k
        keep = (row[:, None] < rows) & (at[None, :] < width)
        x = tl.load(x_ptrs + start, mask=keep, other=0.0).to(tl.float32) * rstd[:, None]
        norm = tl.load(norm_ptr + at, mask=at < norm_width, other=1.0).to(tl.float32)
        rounded = x.to(weight_ptr.dtype.element_ty).to(tl.float32)
        x = tl.where(cast_first != 0, rounded, x) * norm[None, :]
        x = x.to(weight_ptr.dtype.element_ty)
        keep = (out[None, :] < outputs) & (at[:, None] < width)
        weight = tl.load(weight_ptrs + start, mask=keep, other=0.0)
        if WIDE:
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        total = tl.dot(x, weight, total, input_precision="ieee")
    total += tl.load(bias_ptr + out, mask=out < bias_width, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = total.to(y_ptr.dtype.element_ty).to(tl.float32)  # as the linear's result is
        total = total * tl.sigmoid(total)
    y_ptrs = y_ptr + row.to(tl.int64)[:, None] * outputs + out[None, :]
    keep = (row[:, None] < rows) & (out[None, :] < outputs)
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=keep)


def tile(rows: int, dtype: torch.dtype, arch: str) -> dict[str, Any]:
    """The options of a launch for so many rows of a type, on an architecture."""
    amd = arch.startswith("gfx")
    if rows <= FEW:
        deep = 64 if dtype == torch.float32 else 128
        sizes, warps, stages = (16, 32, deep), 4, 2 if amd else 3
    elif dtype == torch.float32:
        sizes, warps, stages = (32, 64, 32), 4, 2
    elif arch in ("sm_90", "sm_100"):
        sizes, warps, stages = (128, 128, 64), 8, 3
    else:
        sizes, warps, stages = (64, 128, 32 if amd else 64), 4, 2 if amd else 3
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K")
    return dict(zip(names, sizes, strict=True)) | {"num_warps": warps, "num_stages": stages}


def forms(arch: str) -> Iterator[Form]:
    """Every form that the launcher asks for."""
    for dtype in FLOATS:
        streams = [{}] if dtype == torch.float32 else [{}, {"x_ptr": "fp32"}]
        for count, silu, types in product((1, FEW + 1), (False, True), streams):
            yield from forms_of(
                _rms_norm_linear_kernel,
                types,
                tile(count, dtype, arch) | {"SILU": silu},
                [dtype],
                grid="(ceil(rows / BLOCK_M) * ceil(outputs / BLOCK_N), 1, 1)",
                aligned=("x_stride", "weight_stride", "outputs", "width", "norm_width"),
            )


def refuses(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    cast_first: bool = True,
    activation: str | None = None,
) -> str | None:
    """Any number and width of rows; all tensors of one type, no activation or silu.

    Types: float32, float16, bfloat16; x may be float32 beside narrower weights. fp32 is multiplied
    in full precision, without TF32.
    """
    if activation not in (None, "silu"):
        return f"activation {activation} is neither None nor silu"
    if x.shape[-1] != weight.shape[1]:
        return "x and weight differ in width"
    if triton.cdiv(x.numel(), 16 * max(1, x.shape[-1])) * triton.cdiv(weight.shape[0], 32) >= 2**31:
        return "more than 2 ** 31 tiles"
    return unfit(x, same=[weight, norm_weight, bias]) or unlike(x, weight)


@kernel(ops.rms_norm_linear, "triton", refuses=refuses, forms=forms)
def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    cast_first: bool = True,
    activation: str | None = None,
) -> Tensor:
    """`qopt::rms_norm_linear`; the normed row is rounded before it multiplies, as a norm's is."""
    flat, matrix = rows(x), rows(weight)
    count, width = flat.shape
    outputs = matrix.shape[0]
    y = torch.empty(count, outputs, dtype=weight.dtype, device=x.device)
    options = tile(count, weight.dtype, architecture(x.device))
    tiles = triton.cdiv(count, options["BLOCK_M"]) * triton.cdiv(outputs, options["BLOCK_N"])
    if tiles:
        launch(
            _rms_norm_linear_kernel,
            (tiles,),
            flat,
            matrix if norm_weight is None else norm_weight.contiguous(),
            matrix,
            matrix if bias is None else bias.contiguous(),
            y,
            flat.stride(0),
            matrix.stride(0),
            count,
            outputs,
            width,
            0 if norm_weight is None else width,
            0 if bias is None else outputs,
            eps,
            int(cast_first),
            SILU=activation == "silu",
            **options,
        )
    return y.view(*x.shape[:-1], outputs)
