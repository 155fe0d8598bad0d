"""Linear in int8: rows rounded by one launch, products summed in integers by another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qopt import ops
from qopt.kernel import Form, architecture, forms_of, kernel, launch, rows, unfit
from qopt.kernels.attention_cache import rounded

FEW = 16  # rows up to which a product is bound by reading its weight
DEEPEST = 2**17  # elements of a row whose products, of at most 127 * 128, fit into 32 bits


@triton.jit
def on_grid(x: tl.tensor, DROPPED: tl.constexpr, SMALLEST: tl.constexpr) -> tl.tensor:
    """fp32 to the nearest even number of an fp8 grid, so that the cast behind is exact anywhere.

    `DROPPED` bits of the mantissa go; below `SMALLEST`, the least normal number, steps are even.
    """
    bits = x.to(tl.int32, bitcast=True)
    half: tl.constexpr = (1 << (DROPPED - 1)) - 1
    bits = (bits + half + ((bits >> DROPPED) & 1)) & -(1 << DROPPED)
    shift: tl.constexpr = 1.5 * SMALLEST * 2**DROPPED  # its last place is a step below SMALLEST
    near = (x + shift) - shift
    return tl.where(tl.abs(x) < SMALLEST, near, bits.to(tl.float32, bitcast=True))


@triton.jit
def _quantize_rows_kernel(
    x_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    held_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    x_stride: tl.int64,
    width: tl.int32,
    given: tl.int32,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    held_ptr += row * width
    column = tl.arange(0, BLOCK)
    if held_ptr.dtype.element_ty == tl.int8:
        reach = 127.0
    elif held_ptr.dtype.element_ty == tl.float8e4nv:
        reach = 448.0
    else:
        reach = 57344.0
    top = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, tl.where(given != 0, 0, width), BLOCK):
        x = tl.load(x_ptr + start + column, mask=start + column < width, other=0.0)
        top = tl.maximum(top, tl.abs(x.to(tl.float32)))
    scale = tl.div_rn(tl.max(top, axis=0), reach)
    scale = tl.where(given != 0, tl.load(scale_ptr), scale)
    tl.store(factors_ptr + row, scale)
    step = tl.where(scale == 0.0, 1.0, scale)
    for start in range(0, width, BLOCK):
        x = tl.load(x_ptr + start + column, mask=start + column < width, other=0.0).to(tl.float32)
        if held_ptr.dtype.element_ty == tl.int8:
            held = rounded(x, step)
        elif held_ptr.dtype.element_ty == tl.float8e4nv:
            held = on_grid(tl.div_rn(x, step), 20, 2.0**-6).to(tl.float8e4nv)
        else:
            held = on_grid(tl.div_rn(x, step), 21, 2.0**-14).to(tl.float8e5)
        tl.store(held_ptr + start + column, held, mask=start + column < width)


@triton.jit
def _scaled_linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_stride: tl.int64,
    weight_stride: tl.int64,
    scales_stride: tl.int64,
    rows: tl.int32,
    outputs: tl.int32,
    width: tl.int32,
    factor_rows: tl.int32,
    bias_width: tl.int32,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    INT8: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    blocks = tl.cdiv(rows, BLOCK_M)
    row = (tl.program_id(0) % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    out = (tl.program_id(0) // blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_ptrs = weight_ptr + out.to(tl.int64)[None, :] * weight_stride + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if INT8 else tl.float32)
    for start in range(0, width, BLOCK_K):
        inside = start + k < width
        x = tl.load(x_ptrs + start, mask=(row[:, None] < rows) & inside[None, :], other=0.0)
        keep = (out[None, :] < outputs) & inside[:, None]
        weight = tl.load(weight_ptrs + start, mask=keep, other=0.0)
        if INT8:
            total = tl.dot(x, weight, total, out_dtype=tl.int32)
        else:
            if WIDE:
                x, weight = x.to(tl.float32), weight.to(tl.float32)
            elif x_ptr.dtype.element_ty != weight_ptr.dtype.element_ty:
                weight = weight.to(x.dtype)
            total = tl.dot(x, weight, total, input_precision="ieee", max_num_imprecise_acc=0)
    factors = tl.load(factors_ptr + row, mask=row < factor_rows, other=1.0)
    scales = tl.load(scales_ptr + out * scales_stride, mask=out < outputs, other=0.0)
    y = total.to(tl.float32) * factors[:, None] * scales[None, :]
    y += tl.load(bias_ptr + out, mask=out < bias_width, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + row.to(tl.int64)[:, None] * outputs + out[None, :]
    keep = (row[:, None] < rows) & (out[None, :] < outputs)
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=keep)


def tile(rows: int, dtype: torch.dtype, arch: str) -> dict[str, Any]:
    """The options of a launch for so many rows of a type, on an architecture."""
    amd, byte = arch.startswith("gfx"), dtype.itemsize == 1
    if rows <= FEW:
        sizes, warps, stages = (16, 32, 128 if byte else 64), 4, 2 if amd else 4
    elif dtype == torch.float32:
        sizes, warps, stages = (32, 64, 32), 8, 2
    elif amd:
        sizes, warps, stages = (64, 64, 64), 8, 2
    elif byte:
        sizes, warps, stages = (128, 128, 64 if arch == "sm_80" else 128), 8, 3
    else:
        sizes, warps, stages = (64, 128, 64), 4 if arch == "sm_100" else 8, 3
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K")
    return dict(zip(names, sizes, strict=True)) | {"num_warps": warps, "num_stages": stages}


QUANTIZE_TILE = {"BLOCK": 2048, "num_warps": 4, "num_stages": 1}


def quantize_rows(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """x (rows, K) as int8 or fp8, and the fp32 scale of each row: one given for all, or its own."""
    held = torch.empty(x.shape, dtype=dtype, device=x.device)
    factors = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    launch(
        _quantize_rows_kernel,
        (x.shape[0],),
        x,
        factors if scale is None else scale,
        held,
        factors,
        x.stride(0),
        x.shape[1],
        int(scale is not None),
        **QUANTIZE_TILE,
    )
    return held, factors


def product(
    x: Tensor,
    weight: Tensor,
    factors: Tensor | None,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """(rows, N) of x (rows, K) by weight (N, K), times a factor a row (None: 1) and a scale."""
    count, width = x.shape
    outputs = weight.shape[0]
    scales = scales.float().flatten()
    scales = scales if scales.numel() == 1 else scales.contiguous()
    arch = architecture(x.device)
    if arch == "sm_80" and weight.dtype == torch.float8_e4m3fn:
        arch = (
            "sm_90"  # sm_89 and sm_12x, which else take the sizes of sm_80, where no such type is
        )
    options = tile(count, x.dtype, arch)
    y = torch.empty(count, outputs, dtype=dtype, device=x.device)
    launch(
        _scaled_linear_kernel,
        (triton.cdiv(count, options["BLOCK_M"]) * triton.cdiv(outputs, options["BLOCK_N"]),),
        x,
        weight,
        scales if factors is None else factors,
        scales,
        y if bias is None else bias.contiguous(),
        y,
        x.stride(0),
        weight.stride(0),
        int(scales.numel() > 1),
        count,
        outputs,
        width,
        0 if factors is None else count,
        0 if bias is None else outputs,
        **options,
    )
    return y


PRODUCT = {"factors_ptr": "fp32", "scales_ptr": "fp32"}  # pointers not of the type of y
ALIGNED = ("x_stride", "weight_stride", "outputs", "width")
GRID = "(ceil(rows / BLOCK_M) * ceil(outputs / BLOCK_N), 1, 1)"


def quantize_forms(kind: str) -> Iterator[Form]:
    """Every form that `quantize_rows` asks for, to one type as Triton writes it."""
    yield from forms_of(
        _quantize_rows_kernel,
        {"scale_ptr": "fp32", "held_ptr": kind, "factors_ptr": "fp32"},
        QUANTIZE_TILE,
        grid="(rows, 1, 1)",
        aligned=("x_stride", "width"),
    )


def forms(arch: str) -> Iterator[Form]:
    """Every form that the launcher asks for."""
    yield from quantize_forms("i8")
    for count in (1, FEW + 1):
        yield from forms_of(
            _scaled_linear_kernel,
            PRODUCT | {"x_ptr": "i8", "weight_ptr": "i8"},
            tile(count, torch.int8, arch),
            grid=GRID,
            aligned=ALIGNED,
        )


def refuses(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
) -> str | None:
    """Any number of rows, of up to 131072 elements; a scale a row, or a float32 one for all of x.

    x and bias of one type: float32, float16, bfloat16.
    """
    if weight.dtype != torch.int8:
        return f"the weight is {weight.dtype}, not int8".replace("torch.", "")
    if weight.shape[1] > DEEPEST:
        return f"sums of {weight.shape[1]} products may exceed 32 bits"
    if x_scale is not None and (x_scale.numel() != 1 or x_scale.dtype != torch.float32):
        return "the scale of x is not one float32"
    return unfit(weight, scales, x_scale, same=[x, bias])


@kernel(ops.int8_linear, "triton", refuses=refuses, forms=forms)
def int8_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
) -> Tensor:
    """`qopt::int8_linear`; the scales come in behind the sum, in fp32."""
    flat, matrix = rows(x), rows(weight)
    if flat.shape[0] == 0 or matrix.shape[0] == 0:
        return x.new_empty(*x.shape[:-1], matrix.shape[0])
    held, factors = quantize_rows(flat, torch.int8, x_scale)
    y = product(held, matrix, factors, scales, bias, x.dtype)
    return y.view(*x.shape[:-1], matrix.shape[0])
