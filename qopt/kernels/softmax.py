"""Softmax over the last dimension: one program a row, an online pass where the row is long."""

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
    1024: {"BLOCK": 1024, "WHOLE": True, "num_warps": 4, "num_stages": 1},
    4096: {"BLOCK": 4096, "WHOLE": True, "num_warps": 8, "num_stages": 1},
}  # by the longest row, in elements, that a tile holds
LOOP = {"BLOCK": 4096, "WHOLE": False, "num_warps": 8, "num_stages": 2}


@triton.jit
def _softmax_kernel(
    x_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_stride: tl.int64,
    mask_stride: tl.int64,
    width: tl.int32,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    mask_ptr += row * mask_stride
    y_ptr += row * width
    cols = tl.arange(0, BLOCK)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    powers = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + cols
        x = tl.load(x_ptr + at, mask=at < width, other=float("-inf")).to(tl.float32)
        if MASKED:
            keep = tl.load(mask_ptr + at, mask=at < width, other=0)
            x = tl.where(keep != 0, x, float("-inf"))
        higher = tl.maximum(top, tl.max(x, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf would be NaN
        powers = tl.exp(x - base)
        total = total * tl.exp(top - base) + tl.sum(powers, axis=0)
        top = higher
    base = tl.where(top == float("-inf"), 0.0, top)
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    for start in range(0, width, BLOCK):
        at = start + cols
        if not WHOLE:
            x = tl.load(x_ptr + at, mask=at < width, other=float("-inf")).to(tl.float32)
            if MASKED:
                keep = tl.load(mask_ptr + at, mask=at < width, other=0)
                x = tl.where(keep != 0, x, float("-inf"))
            powers = tl.exp(x - base)
        tl.store(y_ptr + at, (powers * share).to(y_ptr.dtype.element_ty), mask=at < width)


def tile(width: int) -> dict[str, Any]:
    """The options of a launch for rows of this many elements."""
    return next((TILES[longest] for longest in TILES if width <= longest), LOOP)


def forms(arch: str) -> Iterator[Form]:
    """Every form that the launcher asks for; all architectures take the same."""
    for options in (*TILES.values(), LOOP):
        for masked in (False, True):
            yield from forms_of(
                _softmax_kernel,
                {"mask_ptr": "u8"},
                options | {"MASKED": masked},
                grid="(rows, 1, 1)",
                aligned=("x_stride", "mask_stride", "width"),
            )


def refuses(x: Tensor, mask: Tensor | None = None) -> str | None:
    """Rows of any width and stride, float32, float16 or bfloat16; a bool mask that broadcasts.

    Rows that keep nothing become 0.
    """
    if x.dim() == 0:
        return "x is a scalar"
    if mask is not None and mask.dtype != torch.bool:
        return f"the mask is {str(mask.dtype).removeprefix('torch.')}, not bool"
    return unfit(mask, same=[x])


@kernel(ops.softmax, "triton", refuses=refuses, forms=forms)
def softmax(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """`qopt::softmax`."""
    flat = rows(x)
    y = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    if mask is None:
        keep = torch.empty(1, 1, dtype=torch.uint8, device=x.device)
    else:
        keep = rows(mask.expand(x.shape)).view(torch.uint8)
    if x.numel():
        launch(
            _softmax_kernel,
            (flat.shape[0],),
            flat,
            keep,
            y,
            flat.stride(0),
            keep.stride(0),
            flat.shape[1],
            MASKED=mask is not None,
            **tile(flat.shape[1]),
        )
    return y.view(x.shape)
