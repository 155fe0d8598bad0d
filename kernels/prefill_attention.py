"""Attention of many new tokens: one program a head and a block of queries, softmax online."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qopt import ops
from qopt.kernel import FLOATS, Form, architecture, forms_of, kernel, launch, unfit

SIZES = (64, 128, 256)  # elements of a head that a tile holds
MAX_BLOCKS = 65535  # programs along the second axis of a grid


@triton.jit
def _prefill_attention_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    keep_ptr: tl.tensor,
    first_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    y_ptr: tl.tensor,
    q_batch_stride: tl.int64,
    q_head_stride: tl.int64,
    q_token_stride: tl.int64,
    k_batch_stride: tl.int64,
    k_head_stride: tl.int64,
    k_token_stride: tl.int64,
    v_batch_stride: tl.int64,
    v_head_stride: tl.int64,
    v_token_stride: tl.int64,
    heads: tl.int32,
    group: tl.int32,
    new: tl.int32,
    total: tl.int32,
    size: tl.int32,
    value_size: tl.int32,
    causal: tl.int32,
    sinks: tl.int32,
    scale: tl.float32,
    softcap: tl.float32,
    CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    q_ptr += batch * q_batch_stride + head * q_head_stride
    k_ptr += batch * k_batch_stride + (head // group) * k_head_stride
    v_ptr += batch * v_batch_stride + (head // group) * v_head_stride
    keep_ptr += batch * total
    q_ptrs = q_ptr + row.to(tl.int64)[:, None] * q_token_stride + d[None, :]
    q = tl.load(q_ptrs, mask=(row[:, None] < new) & (d[None, :] < size), other=0.0)
    if WIDE:
        q = q.to(tl.float32)
    first = tl.load(first_ptr + batch * new + row, mask=row < new, other=total)
    last = tl.where(causal != 0, total - new + row, total - 1)
    low = tl.min(first, axis=0) // BLOCK_N * BLOCK_N
    high = tl.minimum(tl.max(last, axis=0) + 1, total)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    y = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(low, high, BLOCK_N):
        slot = start + n
        k_ptrs = k_ptr + slot.to(tl.int64)[None, :] * k_token_stride + d[:, None]
        k = tl.load(k_ptrs, mask=(slot[None, :] < total) & (d[:, None] < size), other=0.0)
        if WIDE:
            k = k.to(tl.float32)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        real = tl.load(keep_ptr + slot, mask=slot < total, other=0)
        seen = (real[None, :] != 0) & (slot[None, :] >= first[:, None])
        seen = seen & (slot[None, :] <= last[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf would be NaN
        powers = tl.exp(scores - base[:, None])
        shrink = tl.exp(top - base)
        mass = mass * shrink + tl.sum(powers, axis=1)
        v_ptrs = v_ptr + slot.to(tl.int64)[:, None] * v_token_stride + d[None, :]
        v = tl.load(v_ptrs, mask=(slot[:, None] < total) & (d[None, :] < value_size), other=0.0)
        powers = powers.to(v.dtype)
        if WIDE:
            powers, v = powers.to(tl.float32), v.to(tl.float32)
        y = tl.dot(powers, v, y * shrink[:, None], input_precision="ieee")
        top = higher
    if sinks != 0:
        sink = tl.load(sinks_ptr + head)
        mass += tl.exp(sink - tl.where(top == float("-inf"), sink, top))
    y = y / tl.where(mass == 0.0, 1.0, mass)[:, None]
    y_ptrs = y_ptr + ((batch * new + row[:, None]) * heads + head) * value_size + d[None, :]
    keep = (row[:, None] < new) & (d[None, :] < value_size)
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=keep)


def tile(size: int, dtype: torch.dtype, arch: str) -> dict[str, Any]:
    """The options of a launch for heads of a size and type, on an architecture."""
    block = next(block for block in SIZES if size <= block)
    amd = arch.startswith("gfx")
    if dtype == torch.float32:
        queries, keys, warps = (16 if block == 256 else 32), 32, 8
    elif block == 256:
        queries, keys, warps = {"sm_80": (32, 32, 4), "sm_100": (64, 32, 4)}.get(arch, (64, 32, 8))
    else:
        queries, keys, warps = (64, 64, 4) if amd else (128, 64, 8)
    return {
        "BLOCK_M": queries,
        "BLOCK_N": keys,
        "BLOCK_D": block,
        "num_warps": warps,
        "num_stages": 1 if amd or block == 256 else 2,
    }


def forms(arch: str) -> Iterator[Form]:
    """Every form that the launcher asks for."""
    strides = (f"{x}_{axis}_stride" for x in "qkv" for axis in ("batch", "head", "token"))
    aligned = (*strides, "size", "value_size")
    for dtype in FLOATS:
        for size in SIZES:
            for capped in (False, True):
                yield from forms_of(
                    _prefill_attention_kernel,
                    {"keep_ptr": "u1", "first_ptr": "i32", "sinks_ptr": "fp32"},
                    tile(size, dtype, arch) | {"CAPPED": capped},
                    [dtype],
                    grid="(batch * heads, ceil(new / BLOCK_M), 1)",
                    aligned=aligned,
                )


def refuses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past_key: Tensor | None,
    past_value: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
) -> str | None:
    """Heads of up to 256 elements, grouped or not; causal, window, sinks, soft-cap, any mask.

    q, keys and values of one type: float32, float16, bfloat16. Rows may differ in length.
    """
    if q.shape[1] % k.shape[1]:
        return f"{q.shape[1]} heads are no multiple of {k.shape[1]}"
    if max(q.shape[3], v.shape[3]) > SIZES[-1]:
        return f"heads of {max(q.shape[3], v.shape[3])} elements exceed {SIZES[-1]}"
    if triton.cdiv(q.shape[2], 16) > MAX_BLOCKS:
        return f"{q.shape[2]} new tokens exceed {16 * MAX_BLOCKS}"
    if softcap is not None and softcap <= 0:
        return f"soft-cap {softcap} is not positive"
    return unfit(mask, sinks, same=[q, k, v, past_key, past_value])


def seen(mask: Tensor | None, key: Tensor, new: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Which of T keys are real, bool (B, T), and each new position's first in reach, int32 (B, S).

    A window counts real tokens: positions never fall along the slots, so that what is in reach of
    the window is all that follows one slot.
    """
    batch, total = key.shape[0], key.shape[2]
    if mask is None:
        keep = torch.ones(batch, total, dtype=torch.bool, device=key.device)
    else:
        keep = mask.bool().expand(batch, total).contiguous()
    if window is None:
        return keep, torch.zeros(batch, new, dtype=torch.int32, device=key.device)
    positions = keep.cumsum(1) - 1
    bounds = (positions[:, total - new :] - window).contiguous()
    return keep, torch.searchsorted(positions, bounds, right=True, out_int32=True)


def with_past(x: Tensor, past: Tensor | None) -> Tensor:
    """Keys or values with their past before them, (B, K, T, D), as a new tensor."""
    return (
        x.clone(memory_format=torch.contiguous_format) if past is None else torch.cat([past, x], 2)
    )


def heads_of(q: Tensor) -> Tensor:
    """q as it is where elements of a head lie side by side, else a copy."""
    return q if q.stride(3) == 1 else q.contiguous()


@kernel(ops.cached_attention, "triton-prefill", refuses=refuses, forms=forms)
def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past_key: Tensor | None,
    past_value: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`qopt::cached_attention`; blocks of keys that no query of a block sees are not read.

    Online softmax after Milakov and Gimelshein 2018, tiled as in Dao et al. 2022.
    """
    key, value = with_past(k, past_key), with_past(v, past_value)
    batch, heads, new, size = q.shape
    y = torch.empty(batch, new, heads, v.shape[3], dtype=v.dtype, device=v.device)
    options = tile(max(size, v.shape[3]), q.dtype, architecture(q.device))
    if y.numel():
        q = heads_of(q)
        launch(
            _prefill_attention_kernel,
            (batch * heads, triton.cdiv(new, options["BLOCK_M"])),
            q,
            key,
            value,
            *seen(mask, key, new, window),
            torch.zeros(1, device=q.device) if sinks is None else sinks.float().contiguous(),
            y,
            *(stride for x in (q, key, value) for stride in x.stride()[:3]),
            heads,
            heads // k.shape[1],
            new,
            key.shape[2],
            size,
            v.shape[3],
            int(causal),
            int(sinks is not None),
            scale,
            softcap or 0.0,
            CAPPED=softcap is not None,
            **options,
        )
    return y, key, value
