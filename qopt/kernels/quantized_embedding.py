"""Rows of a quantized table by id: one program a block of one row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qopt import ops
from qopt.kernel import Form, forms_of, kernel, launch, rows, unfit

TILE: dict[str, Any] = {"BLOCK": 1024, "num_warps": 4, "num_stages": 1}  # elements of a row
MAX_BLOCKS = 65535  # programs along the second axis of a grid


@triton.jit
def _quantized_embedding_kernel(
    ids_ptr: tl.tensor,
    packed_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    y_ptr: tl.tensor,
    packed_stride: tl.int64,
    scales_stride: tl.int64,
    zeros_stride: tl.int64,
    table: tl.int32,
    zeros: tl.int32,
    group: tl.int32,
    width: tl.int32,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + place)
    known = (row >= 0) & (row < table)
    row = tl.where(known, row, 0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = col < width
    at = col // group
    each: tl.constexpr = 8 // BITS
    top: tl.constexpr = 2**BITS - 1
    byte = tl.load(packed_ptr + row * packed_stride + col // each, mask=keep, other=0)
    value = (byte.to(tl.int32) >> (col % each) * BITS) & top
    # an absent zero point is 2 ** (BITS - 1): read as a byte that holds it in every place
    middle: tl.constexpr = 0x88 if BITS == 4 else 0x80
    zero = tl.load(
        zeros_ptr + row * zeros_stride + at // each, mask=keep & (col < zeros), other=middle
    )
    zero = (zero.to(tl.int32) >> (at % each) * BITS) & top
    scale = tl.load(scales_ptr + row * scales_stride + at, mask=keep, other=0.0).to(tl.float32)
    y = (value - zero).to(tl.float32) * scale
    y = tl.where(known, y, float("nan"))
    tl.store(y_ptr + place * width + col, y.to(y_ptr.dtype.element_ty), mask=keep)


def forms(arch: str) -> Iterator[Form]:
    """Every form that the launcher asks for; all architectures take the same."""
    for bits in (4, 8):
        yield from forms_of(
            _quantized_embedding_kernel,
            {"ids_ptr": "i64", "packed_ptr": "u8", "zeros_ptr": "u8"},
            TILE | {"BITS": bits},
            grid="(ids, ceil(width / BLOCK), 1)",
            aligned=("packed_stride", "group", "width"),
        )


def refuses(
    ids: Tensor,
    packed: Tensor,
    scales: Tensor,
    zero_points: Tensor | None = None,
    *,
    bits: int,
    width: int,
) -> str | None:
    """4 or 8 bits, groups of any size, with zero points or without; any shape of ids.

    Types of the scales: float32, float16, bfloat16. An id outside the table yields NaN.
    """
    if bits not in (4, 8):
        return f"{bits} bits are neither 4 nor 8"
    if width > MAX_BLOCKS * TILE["BLOCK"]:
        return f"rows of {width} elements exceed {MAX_BLOCKS * TILE['BLOCK']}"
    return unfit(ids, packed, zero_points, same=[scales])


@kernel(ops.quantized_embedding, "triton", refuses=refuses, forms=forms)
def quantized_embedding(
    ids: Tensor,
    packed: Tensor,
    scales: Tensor,
    zero_points: Tensor | None = None,
    *,
    bits: int,
    width: int,
) -> Tensor:
    """`qopt::quantized_embedding`; products in fp32, rounded once."""
    places, flat, factors = ids.flatten().long().contiguous(), rows(packed.flatten(1)), rows(scales)
    zeros = flat if zero_points is None else rows(zero_points)
    y = torch.empty(places.shape[0], width, dtype=scales.dtype, device=scales.device)
    if y.numel():
        launch(
            _quantized_embedding_kernel,
            (places.shape[0], triton.cdiv(width, TILE["BLOCK"])),
            places,
            flat,
            factors,
            zeros,
            y,
            flat.stride(0),
            factors.stride(0),
            zeros.stride(0),
            packed.shape[0],
            0 if zero_points is None else width,
            packed.shape[2] * 8 // bits,
            width,
            BITS=bits,
            **TILE,
        )
    return y.view(*ids.shape, width)
