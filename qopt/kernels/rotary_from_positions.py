"""Rotation of q and k with no table: one program a token and a block of its heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qopt import ops
from qopt.kernel import Form, forms_of, kernel, launch, unfit

HEADS = 4  # heads that a program turns
PAIRS = (32, 64, 128)  # pairs of a head that a tile holds
MAX_BLOCKS = 65535  # programs along the second axis of a grid


@triton.jit
def _turn(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_head_stride: tl.int64,
    y_head_stride: tl.int64,
    cos: tl.tensor,
    sin: tl.tensor,
    first_head: tl.int32,
    heads: tl.int32,
    pairs: tl.int32,
    size: tl.int32,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    head = first_head + tl.arange(0, HEADS)[:, None]
    x_ptr += head.to(tl.int64) * x_head_stride
    y_ptr += head.to(tl.int64) * y_head_stride
    pair = tl.arange(0, PAIRS)[None, :]
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + pairs
    keep = (head < heads) & (pair < pairs)
    a = tl.load(x_ptr + first, mask=keep, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + second, mask=keep, other=0.0).to(tl.float32)
    tl.store(y_ptr + first, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=keep)
    tl.store(y_ptr + second, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=keep)
    for start in range(2 * pairs, size, PAIRS):
        rest = start + pair
        keep = (head < heads) & (rest < size)
        tl.store(y_ptr + rest, tl.load(x_ptr + rest, mask=keep, other=0.0), mask=keep)


@triton.jit
def _rotary_from_positions_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    q_out_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    inv_freq_ptr: tl.tensor,
    q_batch_stride: tl.int64,
    q_head_stride: tl.int64,
    q_token_stride: tl.int64,
    k_batch_stride: tl.int64,
    k_head_stride: tl.int64,
    k_token_stride: tl.int64,
    q_out_batch_stride: tl.int64,
    q_out_head_stride: tl.int64,
    q_out_token_stride: tl.int64,
    k_out_batch_stride: tl.int64,
    k_out_head_stride: tl.int64,
    k_out_token_stride: tl.int64,
    positions_stride: tl.int64,
    tokens: tl.int32,
    q_heads: tl.int32,
    k_heads: tl.int32,
    pairs: tl.int32,
    size: tl.int32,
    scaling: tl.float32,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    batch = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    pair = tl.arange(0, PAIRS)[None, :]
    rate = tl.load(inv_freq_ptr + pair, mask=pair < pairs, other=0.0)
    angle = tl.load(positions_ptr + batch * positions_stride + token).to(tl.float32) * rate
    cos = (tl.cos(angle) * scaling).to(q_out_ptr.dtype.element_ty).to(tl.float32)
    sin = (tl.sin(angle) * scaling).to(q_out_ptr.dtype.element_ty).to(tl.float32)
    block = tl.program_id(1)
    q_blocks = tl.cdiv(q_heads, HEADS)
    if block < q_blocks:
        _turn(
            q_ptr + batch * q_batch_stride + token * q_token_stride,
            q_out_ptr + batch * q_out_batch_stride + token * q_out_token_stride,
            q_head_stride,
            q_out_head_stride,
            cos,
            sin,
            block * HEADS,
            q_heads,
            pairs,
            size,
            INTERLEAVED,
            HEADS,
            PAIRS,
        )
    else:
        _turn(
            k_ptr + batch * k_batch_stride + token * k_token_stride,
            k_out_ptr + batch * k_out_batch_stride + token * k_out_token_stride,
            k_head_stride,
            k_out_head_stride,
            cos,
            sin,
            (block - q_blocks) * HEADS,
            k_heads,
            pairs,
            size,
            INTERLEAVED,
            HEADS,
            PAIRS,
        )


def tile(pairs: int) -> dict[str, Any]:
    """The options of a launch that turns this many pairs of each head."""
    block = next(block for block in PAIRS if pairs <= block)
    return {"HEADS": HEADS, "PAIRS": block, "num_warps": 4, "num_stages": 1}


def forms(arch: str) -> Iterator[Form]:
    """Every form that the launcher asks for; all architectures take the same."""
    for pairs in PAIRS:
        for interleaved in (False, True):
            yield from forms_of(
                _rotary_from_positions_kernel,
                {"positions_ptr": "i64", "inv_freq_ptr": "fp32"},
                tile(pairs) | {"INTERLEAVED": interleaved},
                grid="(batch * tokens, ceil(q_heads / HEADS) + ceil(k_heads / HEADS), 1)",
                aligned=(
                    *(f"{x}_{axis}_stride" for x in ("q", "k") for axis in ("head", "token")),
                    *(f"{x}_out_{axis}_stride" for x in ("q", "k") for axis in ("head", "token")),
                ),
            )


def refuses(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    scaling: float = 1.0,
    interleaved: bool = False,
) -> str | None:
    """Heads of any stride; up to 128 pairs turned a head, fp32 `inv_freq`, int64 positions.

    Types of q and k: float32, float16, bfloat16.
    """
    if q.dim() != 4 or k.dim() != 4 or q.shape[0::2] != k.shape[0::2]:
        return "q and k are not (B, H, S, D) and (B, K, S, D)"
    if q.shape[3] != k.shape[3] or 2 * inv_freq.shape[-1] > q.shape[3]:
        return "q and k differ in head size, or fewer elements than twice the angles"
    if inv_freq.dim() != 1 or inv_freq.dtype != torch.float32:
        return "inv_freq is not fp32 of one dimension"
    if inv_freq.shape[0] > PAIRS[-1]:
        return f"{inv_freq.shape[0]} pairs a head exceed {PAIRS[-1]}"
    if positions.dtype != torch.int64:
        return "positions are not int64"
    if positions.shape not in ((1, q.shape[2]), (q.shape[0], q.shape[2])):
        return "positions are not (B or 1, S)"
    if triton.cdiv(q.shape[1], HEADS) + triton.cdiv(k.shape[1], HEADS) > MAX_BLOCKS:
        return f"more than {MAX_BLOCKS} blocks of heads"
    return unfit(positions, inv_freq, same=[q, k])


@kernel(ops.rotary_from_positions, "triton", refuses=refuses, forms=forms)
def rotary_from_positions(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    scaling: float = 1.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """`qopt::rotary_from_positions`; products and sums in fp32, rounded once."""
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    outs = torch.empty_like(q), torch.empty_like(k)
    batch, q_heads, tokens, size = q.shape
    blocks = triton.cdiv(q_heads, HEADS) + triton.cdiv(k.shape[1], HEADS)
    places = positions.expand(batch, tokens)
    if places.stride(1) != 1:
        places = places.contiguous()
    if batch * tokens * blocks * size:
        launch(
            _rotary_from_positions_kernel,
            (batch * tokens, blocks),
            q,
            k,
            *outs,
            places,
            inv_freq.contiguous(),
            *(stride for x in (q, k, *outs) for stride in x.stride()[:3]),
            places.stride(0),
            tokens,
            q_heads,
            k.shape[1],
            inv_freq.shape[0],
            size,
            scaling,
            INTERLEAVED=interleaved,
            **tile(inv_freq.shape[0]),
        )
    return outs
