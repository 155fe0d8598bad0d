"""RMSNorm over the last dimension: one program a row, the row held in registers where it fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qopt import ops
from qopt.kernel import Form, forms_of, kernel, launch, rows, unfit

TILES = {
    256: {"BLOCK": 256, "WHOLE": True, "num_warps": 1, "num_stages": 1},
    1024: {"BLOCK": 1024, "WHOLE": True, "num_warps": 4, "num_stages": 1},
    4096: {"BLOCK": 4096, "WHOLE": True, "num_warps": 8, "num_stages": 1},
}  # by the longest row, in elements, that a tile holds
LOOP = {"BLOCK": 4096, "WHOLE": False, "num_warps": 8, "num_stages": 2}


@triton.jit
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_stride: tl.int64,
    width: tl.int32,
    eps: tl.float32,
    weight_width: tl.int32,
    cast_first: tl.int32,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * width
    cols = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    x = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + cols
        x = tl.load(x_ptr + at, mask=at < width, other=0.0).to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / width + eps)
    for start in range(0, width, BLOCK):
        at = start + cols
        if not WHOLE:
            x = tl.load(x_ptr + at, mask=at < width, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + at, mask=at < weight_width, other=1.0).to(tl.float32)
        normed = x * rstd
        rounded = normed.to(y_ptr.dtype.element_ty)
        normed = tl.where(cast_first != 0, rounded.to(tl.float32), normed) * weight
        tl.store(y_ptr + at, normed.to(y_ptr.dtype.element_ty), mask=at < width)


def tile(width: int) -> dict[str, Any]:
    """The options of a launch for rows of this many elements."""
    return next((TILES[longest] for longest in TILES if width <= longest), LOOP)


def forms(arch: str) -> Iterator[Form]:
    """Every form that the launcher asks for; all architectures take the same."""
    for options in (*TILES.values(), LOOP):
        yield from forms_of(
            _rms_norm_kernel,
            {},
            options,
            grid="(rows, 1, 1)",
            aligned=("x_stride", "width", "weight_width"),
        )


def refuses(x: Tensor, weight: Tensor | None, eps: float, cast_first: bool = True) -> str | None:
    """Rows of any width and stride; x and weight of one type, float32, float16 or bfloat16."""
    return unfit(same=[x, weight])


@kernel(ops.rms_norm, "triton", refuses=refuses, forms=forms)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float, cast_first: bool = True) -> Tensor:
    """`qopt::rms_norm`; the sum of squares in fp32, rounded where the reference rounds."""
    flat = rows(x)
    y = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        launch(
            _rms_norm_kernel,
            (flat.shape[0],),
            flat,
            flat if weight is None else weight.contiguous(),
            y,
            flat.stride(0),
            flat.shape[1],
            eps,
            flat.shape[1] if weight is not None else 0,
            int(cast_first),
            **tile(flat.shape[1]),
        )
    return y.view(x.shape)
