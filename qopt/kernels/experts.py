"""The experts of a mixture: tokens sorted by expert, one program a tile of one expert's product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qopt import ops
from qopt.kernel import FLOATS, Form, architecture, forms_of, kernel, launch, rows, unfit

FEW = 16  # rows an expert gets on average up to which tiles are low
MAX_BLOCKS = 65535  # programs along the second axis of a grid


@triton.jit
def _grouped_linear_kernel(
    x_ptr: tl.tensor,
    source_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    end_ptr: tl.tensor,
    x_stride: tl.int64,
    expert_stride: tl.int64,
    weight_stride: tl.int64,
    experts: tl.int32,
    outputs: tl.int32,
    width: tl.int32,
    bias_width: tl.int32,
    TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    expert = tl.load(expert_ptr + block)
    if expert < experts:
        row = tl.load(begin_ptr + block) + tl.arange(0, BLOCK_M)
        live = row < tl.load(end_ptr + block)
        out = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        source = tl.load(source_ptr + row, mask=live, other=0)
        x_ptrs = x_ptr + source[:, None] * x_stride + k[None, :]
        weight_ptr += expert * expert_stride
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, width, BLOCK_K):
            at = start + k
            x = tl.load(x_ptrs + start, mask=live[:, None] & (at[None, :] < width), other=0.0)
            if TRANSPOSED:
                weight_ptrs = weight_ptr + at.to(tl.int64)[:, None] * weight_stride + out[None, :]
            else:
                weight_ptrs = weight_ptr + out.to(tl.int64)[None, :] * weight_stride + at[:, None]
            keep = (out[None, :] < outputs) & (at[:, None] < width)
            weight = tl.load(weight_ptrs, mask=keep, other=0.0)
            if WIDE:
                x, weight = x.to(tl.float32), weight.to(tl.float32)
            total = tl.dot(x, weight, total, input_precision="ieee")
        bias_ptrs = bias_ptr + expert * bias_width + out
        total += tl.load(bias_ptrs, mask=out < bias_width, other=0.0).to(tl.float32)[None, :]
        y_ptrs = y_ptr + row[:, None] * outputs + out[None, :]
        keep = live[:, None] & (out[None, :] < outputs)
        tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=keep)


def tile(rows: int, dtype: torch.dtype, arch: str) -> dict[str, Any]:
    """The options of a launch for so many rows an expert, on an architecture."""
    amd = arch.startswith("gfx")
    if rows <= FEW:
        sizes, warps, stages = (16, 32, 64), 4, 2 if amd else 3
    elif dtype == torch.float32:
        sizes, warps, stages = (32, 64, 32), 8, 2
    else:
        sizes, warps, stages = (64, 128, 32 if amd else 64), 8 if arch == "sm_90" else 4, 2
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K")
    return dict(zip(names, sizes, strict=True)) | {"num_warps": warps, "num_stages": stages}


def forms(arch: str) -> Iterator[Form]:
    """Every form that the launcher asks for."""
    places = dict.fromkeys(("source_ptr", "expert_ptr", "begin_ptr", "end_ptr"), "i64")
    for dtype in FLOATS:
        for count in (1, FEW + 1):
            for transposed in (False, True):
                yield from forms_of(
                    _grouped_linear_kernel,
                    places,
                    tile(count, dtype, arch) | {"TRANSPOSED": transposed},
                    [dtype],
                    grid="(rows // BLOCK_M + experts, ceil(outputs / BLOCK_N), 1); a block whose "
                    "expert is `experts` has nothing to do",
                    aligned=("x_stride", "expert_stride", "weight_stride", "outputs", "width"),
                )


def refuses(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    *,
    activation: str,
    layout: str = "concatenated",
    transposed: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> str | None:
    """Any number of tokens and experts, every gate and layout, matrices transposed or not.

    x, matrices and biases of one type: float32, float16, bfloat16; elements of a matrix's rows or
    of its columns lie side by side.
    """
    for name, matrix in (("up", up), ("down", down)):
        if 1 not in matrix.stride()[1:] and min(matrix.shape[1:]) > 1:
            return f"neither rows nor columns of {name} lie side by side"
        if max(matrix.shape[1:]) > 32 * MAX_BLOCKS:
            return f"{name} has more than {32 * MAX_BLOCKS} rows or columns"
    return unfit(ids, weights, same=[x, up, up_bias, down, down_bias])


@kernel(ops.experts, "triton", refuses=refuses, forms=forms)
def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    *,
    activation: str,
    layout: str = "concatenated",
    transposed: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Tensor:
    """`qopt::experts` without a copy of any matrix, and without waiting for the device.

    The gate between the two products is torch's; a token's results are summed in fp32.
    """
    if transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    count, top = ids.shape
    if x.numel() == 0 or top == 0:
        return torch.zeros_like(x)
    flat = ids.flatten().long()
    chosen, order = flat.sort(stable=True)
    options = tile(count * top // up.shape[0], x.dtype, architecture(x.device))
    plan = blocks(chosen, up.shape[0], options["BLOCK_M"])
    inner = grouped(rows(x), order // top, plan, up, up_bias, options)
    inner = ops.expert_gate(inner, activation, layout, alpha, limit, up_offset)
    places = torch.arange(count * top, device=x.device)
    out = torch.empty(count * top, down.shape[1], dtype=x.dtype, device=x.device)
    out[order] = grouped(rows(inner), places, plan, down, down_bias, options)
    # weighted in fp32: `weights` may be wider than x
    shares = weights.reshape(-1, top, 1).float()
    return (out.view(count, top, -1).float() * shares).sum(1).to(x.dtype)


def blocks(chosen: Tensor, experts: int, height: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each block of `height` rows: its expert (`experts`: none), its first row, its end.

    `chosen` is each row's expert, sorted; rows of an id that is no expert's are in no block.
    """
    names = torch.arange(experts, device=chosen.device)
    starts = torch.searchsorted(chosen, names)
    ends = torch.searchsorted(chosen, names, right=True)
    needed = (ends - starts + height - 1) // height
    before = needed.cumsum(0) - needed
    block = torch.arange(chosen.shape[0] // height + experts, device=chosen.device)
    expert = torch.searchsorted(before + needed, block, right=True)
    known = expert.clamp(max=experts - 1)
    return expert, starts[known] + (block - before[known]) * height, ends[known]


def grouped(
    x: Tensor,
    source: Tensor,
    plan: tuple[Tensor, Tensor, Tensor],
    matrix: Tensor,
    bias: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Row i is x[source[i]] times its expert's matrix of (E, N, K); 0 where it has none."""
    by_columns = matrix.stride(2) != 1 and matrix.shape[2] > 1
    outputs = matrix.shape[1]
    y = torch.zeros(source.shape[0], outputs, dtype=x.dtype, device=x.device)
    launch(
        _grouped_linear_kernel,
        (plan[0].shape[0], triton.cdiv(outputs, options["BLOCK_N"])),
        x,
        source,
        matrix,
        x if bias is None else bias.contiguous(),
        y,
        *plan,
        x.stride(0),
        matrix.stride(0),
        matrix.stride(2) if by_columns else matrix.stride(1),
        matrix.shape[0],
        outputs,
        x.shape[1],
        0 if bias is None else outputs,
        TRANSPOSED=by_columns,
        **options,
    )
    return y
