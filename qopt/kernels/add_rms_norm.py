"""A sum and its RMSNorm: one program a row, the sum held in registers where it fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qopt import ops
from qopt.kernel import FLOATS, HALVES, Form, forms_of, kernel, launch, rows, unfit, unlike

TILES = {
    1024: {"BLOCK": 1024, "WHOLE": True, "num_warps": 4, "num_stages": 1},
    4096: {"BLOCK": 4096, "WHOLE": True, "num_warps": 8, "num_stages": 1},
}  # by the longest row, in elements, that a tile holds
LOOP = {"BLOCK": 4096, "WHOLE": False, "num_warps": 8, "num_stages": 2}


@triton.jit
def _add_rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    total_ptr: tl.tensor,
    x_stride: tl.int64,
    residual_stride: tl.int64,
    width: tl.int32,
    weight_width: tl.int32,
    eps: tl.float32,
    cast_first: tl.int32,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    residual_ptr += row * residual_stride
    y_ptr += row * width
    total_ptr += row * width
    cols = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + cols
        x = tl.load(x_ptr + at, mask=at < width, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + at, mask=at < width, other=0.0).to(tl.float32)
        rounded = (x + residual).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + at, rounded, mask=at < width)
        total = rounded.to(tl.float32)
        squares += total * total
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / width + eps)
    for start in range(0, width, BLOCK):
        at = start + cols
        if not WHOLE:
            # the sum anew: what other threads of the program stored is not seen without a barrier
            x = tl.load(x_ptr + at, mask=at < width, other=0.0).to(tl.float32)
            residual = tl.load(residual_ptr + at, mask=at < width, other=0.0).to(tl.float32)
            total = (x + residual).to(total_ptr.dtype.element_ty).to(tl.float32)
        weight = tl.load(weight_ptr + at, mask=at < weight_width, other=1.0).to(tl.float32)
        normed = total * rstd
        rounded = normed.to(y_ptr.dtype.element_ty)
        normed = tl.where(cast_first != 0, rounded.to(tl.float32), normed) * weight
        tl.store(y_ptr + at, normed.to(y_ptr.dtype.element_ty), mask=at < width)


def tile(width: int) -> dict[str, Any]:
    """The options of a launch for rows of this many elements."""
    return next((TILES[longest] for longest in TILES if width <= longest), LOOP)


def forms(arch: str) -> Iterator[Form]:
    """Every form that the launcher asks for; all architectures take the same."""
    aligned = ("x_stride", "residual_stride", "width", "weight_width")
    stream = dict.fromkeys(("residual_ptr", "total_ptr"), "fp32")
    for options in (*TILES.values(), LOOP):
        for types, dtypes in (({}, FLOATS), (stream, HALVES)):
            yield from forms_of(
                _add_rms_norm_kernel, types, options, dtypes, grid="(rows, 1, 1)", aligned=aligned
            )


def refuses(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, cast_first: bool = True
) -> str | None:
    """Rows of any width and stride; x and residual of one shape, all of one type.

    Types: float32, float16, bfloat16; the residual of a half-precision x may be float32.
    """
    if x.shape != residual.shape:
        return "x and residual differ in shape"
    return unfit(residual, same=[x, weight]) or unlike(residual, x)


@kernel(ops.add_rms_norm, "triton", refuses=refuses, forms=forms)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, cast_first: bool = True
) -> tuple[Tensor, Tensor]:
    """`qopt::add_rms_norm`; the sum is rounded before it is normed, as the reference does."""
    flat, other = rows(x), rows(residual)
    y = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(y, dtype=residual.dtype)
    if x.numel():
        launch(
            _add_rms_norm_kernel,
            (flat.shape[0],),
            flat,
            other,
            flat if weight is None else weight.contiguous(),
            y,
            total,
            flat.stride(0),
            other.stride(0),
            flat.shape[1],
            0 if weight is None else flat.shape[1],
            eps,
            int(cast_first),
            **tile(flat.shape[1]),
        )
    return y.view(x.shape), total.view(x.shape)
