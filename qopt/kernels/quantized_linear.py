"""Linear by a quantized weight: one program a tile of the product, widened on the way."""

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
DEPTHS = (64, 32)  # elements of a group that a step widens; a group is a multiple of one of them


@triton.jit
def _quantized_linear_kernel(
    x_ptr: tl.tensor,
    packed_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_stride: tl.int64,
    packed_stride: tl.int64,
    scales_stride: tl.int64,
    zeros_stride: tl.int64,
    rows: tl.int32,
    outputs: tl.int32,
    width: tl.int32,
    group: tl.int32,
    zeros: tl.int32,
    bias_width: tl.int32,
    BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    blocks = tl.cdiv(rows, BLOCK_M)
    row = (tl.program_id(0) % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    out = (tl.program_id(0) // blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    each: tl.constexpr = 8 // BITS
    top: tl.constexpr = 2**BITS - 1
    middle: tl.constexpr = 0x88 if BITS == 4 else 0x80  # 2 ** (BITS - 1) in every place
    byte = tl.arange(0, BLOCK_K // each)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    packed_ptrs = packed_ptr + out.to(tl.int64)[:, None] * packed_stride + byte[None, :]
    scales_ptrs = scales_ptr + out.to(tl.int64) * scales_stride
    zeros_ptrs = zeros_ptr + out.to(tl.int64) * zeros_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, width, BLOCK_K):
        at = start // group
        keep = (row[:, None] < rows) & (start + k[None, :] < width)
        x = tl.load(x_ptrs + start, mask=keep, other=0.0)
        packed = tl.load(packed_ptrs + start // each, mask=out[:, None] < outputs, other=0)
        value = tl.interleave(packed & top, packed >> 4) if BITS == 4 else packed
        zero = tl.load(zeros_ptrs + at // each, mask=out < zeros, other=middle).to(tl.int32)
        zero = (zero >> (at % each) * BITS) & top
        scale = tl.load(scales_ptrs + at, mask=out < outputs, other=0.0).to(tl.float32)
        weight = (value.to(tl.int32) - zero[:, None]).to(tl.float32) * scale[:, None]
        weight = tl.trans(weight.to(x.dtype))
        if WIDE:
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        total = tl.dot(x, weight, total, input_precision="ieee")
    total += tl.load(bias_ptr + out, mask=out < bias_width, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + row.to(tl.int64)[:, None] * outputs + out[None, :]
    keep = (row[:, None] < rows) & (out[None, :] < outputs)
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=keep)


def tile(rows: int, depth: int, dtype: torch.dtype, arch: str) -> dict[str, Any]:
    """The options of a launch for so many rows of a type, on an architecture."""
    amd = arch.startswith("gfx")
    if rows <= FEW:
        sizes, warps, stages = (16, 32), 4, 2 if amd else 4
    elif dtype == torch.float32:
        sizes, warps, stages, depth = (32, 64), 8, 2, DEPTHS[-1]
    elif amd:
        sizes, warps, stages = (64, 64), 8, 2
    else:
        sizes, warps, stages = (64, 128), 4 if arch == "sm_100" else 8, 3
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K")
    return dict(zip(names, (*sizes, depth), strict=True)) | {
        "num_warps": warps,
        "num_stages": stages,
    }


def forms(arch: str) -> Iterator[Form]:
    """Every form that the launcher asks for."""
    for dtype in FLOATS:
        for count in (1, FEW + 1):
            for depth in DEPTHS:
                for bits in (4, 8):
                    yield from forms_of(
                        _quantized_linear_kernel,
                        {"packed_ptr": "u8", "zeros_ptr": "u8"},
                        tile(count, depth, dtype, arch) | {"BITS": bits},
                        [dtype],
                        grid="(ceil(rows / BLOCK_M) * ceil(outputs / BLOCK_N), 1, 1)",
                        aligned=("x_stride", "packed_stride", "outputs", "width", "group"),
                    )


def refuses(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zero_points: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    bits: int,
) -> str | None:
    """4 or 8 bits, groups of a multiple of 32, with zero points or without; any number of rows.

    x, scales and bias of one type: float32, float16, bfloat16.
    """
    if bits not in (4, 8):
        return f"{bits} bits are neither 4 nor 8"
    if packed.shape[2] * 8 // bits % DEPTHS[-1]:
        return f"groups of {packed.shape[2] * 8 // bits} are no multiple of {DEPTHS[-1]}"
    return unfit(packed, zero_points, same=[x, scales, bias])


@kernel(ops.quantized_linear, "triton", refuses=refuses, forms=forms)
def quantized_linear(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zero_points: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    bits: int,
) -> Tensor:
    """`qopt::quantized_linear`; the weight is rounded to the type of x, as the reference does."""
    flat, matrix, factors = rows(x), rows(packed.flatten(1)), rows(scales)
    zeros = matrix if zero_points is None else rows(zero_points)
    count, width = flat.shape
    outputs, group = packed.shape[0], packed.shape[2] * 8 // bits
    depth = next(depth for depth in DEPTHS if group % depth == 0)
    options = tile(count, depth, x.dtype, architecture(x.device))
    tiles = triton.cdiv(count, options["BLOCK_M"]) * triton.cdiv(outputs, options["BLOCK_N"])
    y = torch.empty(count, outputs, dtype=x.dtype, device=x.device)
    if tiles:
        launch(
            _quantized_linear_kernel,
            (tiles,),
            flat,
            matrix,
            factors,
            zeros,
            flat if bias is None else bias.contiguous(),
            y,
            flat.stride(0),
            matrix.stride(0),
            factors.stride(0),
            zeros.stride(0),
            count,
            outputs,
            width,
            group,
            0 if zero_points is None else outputs,
            0 if bias is None else outputs,
            BITS=bits,
            **options,
        )
    return y.view(*x.shape[:-1], outputs)
