"""Attention of many new tokens: one program a head and a block of queries, softmax online."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qopt import ops
from qopt.kernel import FLOATS, HALVES, Form, architecture, forms_of, kernel, launch, unfit
from qopt.kernels.attention_cache import (
    POINTERS,
    SIZES,
    Cache,
    side_by_side,
    unfit_heads,
)
from qopt.kernels.attention_core import attend_slots, filled, reach

MAX_BLOCKS = 65535  # programs along the second axis of a grid


@triton.jit
def _prefill_attention_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    key_scale_ptr: tl.tensor,
    value_scale_ptr: tl.tensor,
    table_ptr: tl.tensor,
    length_ptr: tl.tensor,
    count_ptr: tl.tensor,
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
    key_scale_batch_stride: tl.int64,
    key_scale_head_stride: tl.int64,
    key_scale_token_stride: tl.int64,
    value_scale_batch_stride: tl.int64,
    value_scale_head_stride: tl.int64,
    value_scale_token_stride: tl.int64,
    heads: tl.int32,
    group: tl.int32,
    new: tl.int32,
    past: tl.int32,
    slots: tl.int32,
    block: tl.int32,
    size: tl.int32,
    value_size: tl.int32,
    causal: tl.int32,
    window: tl.int32,
    sinks: tl.int32,
    scale: tl.float32,
    softcap: tl.float32,
    CAPPED: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    past, count = filled(length_ptr, count_ptr, batch, past, new, PAGED)
    total = tl.minimum(past + count, slots)
    q_ptr += batch * q_batch_stride + head * q_head_stride
    q_ptrs = q_ptr + row.to(tl.int64)[:, None] * q_token_stride + d[None, :]
    q = tl.load(q_ptrs, mask=(row[:, None] < new) & (d[None, :] < size), other=0.0)
    if WIDE:
        q = q.to(tl.float32)
    first, last = reach(
        first_ptr + batch * new, row, row < new, past, count, total, causal, window, PAGED
    )
    low = tl.min(first, axis=0) // BLOCK_N * BLOCK_N
    high = tl.minimum(tl.max(last, axis=0) + 1, total)
    top, mass, y = attend_slots(
        q,
        k_ptr,
        v_ptr,
        key_scale_ptr,
        value_scale_ptr,
        table_ptr,
        keep_ptr,
        batch,
        head // group,
        k_batch_stride,
        k_head_stride,
        k_token_stride,
        v_batch_stride,
        v_head_stride,
        v_token_stride,
        key_scale_batch_stride,
        key_scale_head_stride,
        key_scale_token_stride,
        value_scale_batch_stride,
        value_scale_head_stride,
        value_scale_token_stride,
        first,
        last,
        low,
        high,
        slots,
        block,
        size,
        value_size,
        scale,
        softcap,
        q_ptr.dtype.element_ty,
        CAPPED,
        PAGED,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
        WIDE,
    )
    if sinks != 0:
        sink = tl.load(sinks_ptr + head)
        mass += tl.exp(sink - tl.where(top == float("-inf"), sink, top))
    y = y / tl.where(mass == 0.0, 1.0, mass)[:, None]
    y_ptrs = y_ptr + ((batch * new + row[:, None]) * heads + head) * value_size + d[None, :]
    keep = (row[:, None] < new) & (d[None, :] < value_size)
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=keep)


def tile(
    size: int, dtype: torch.dtype, arch: str, paged: bool = False, int8: bool = False
) -> dict[str, Any]:
    """The options of a launch for heads of a size and type, on an architecture."""
    block = next(block for block in SIZES if size <= block)
    amd = arch.startswith("gfx")
    if dtype == torch.float32:
        queries, keys, warps = (16 if block == 256 or paged else 32), 32, 8
    elif block == 256:
        low = {"sm_80": (32, 32, 4), "gfx942": (32, 16, 4) if int8 else (64, 32, 8)}
        queries, keys, warps = low.get(arch, (64, 32, 4 if arch == "sm_100" and not int8 else 8))
    else:
        queries, keys, warps = (64, 64, 4) if amd else (128, 64, 8)
        if int8 and block == 128 and not amd:
            queries = 64
        elif paged and block == 128 and arch == "sm_80":
            keys = 32
    return {
        "BLOCK_M": queries,
        "BLOCK_N": keys,
        "BLOCK_D": block,
        "num_warps": warps,
        "num_stages": 1 if amd or block == 256 else 2,
    }


def forms(arch: str, paged: bool = False, int8: bool = False) -> Iterator[Form]:
    """Every form that `attend` asks for on a cache of one kind."""
    axes = [f"{axis}_stride" for axis in ("batch", "head", "token")]
    aligned = (*(f"{x}_{axis}" for x in "qkv" for axis in axes), "size", "value_size")
    told = POINTERS | {"keep_ptr": "u1", "first_ptr": "i32", "sinks_ptr": "fp32"}
    if int8:
        told |= {"k_ptr": "i8", "v_ptr": "i8"}
    for dtype in HALVES if int8 else FLOATS:
        for size in SIZES:
            for capped in (False,) if paged or int8 else (False, True):
                yield from forms_of(
                    _prefill_attention_kernel,
                    told,
                    tile(size, dtype, arch, paged, int8) | {"CAPPED": capped, "PAGED": paged},
                    [dtype],
                    grid="(batch * heads, ceil(new / BLOCK_M), 1)",
                    aligned=(*aligned, *(["block"] if paged else [])),
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
    return (
        unfit_heads(q, k, v, softcap)
        or too_many(q)
        or unfit(mask, sinks, same=[q, k, v, past_key, past_value])
    )


def too_many(q: Tensor) -> str | None:
    """Why a grid cannot hold so many new tokens, or None."""
    new, most = q.shape[2], 16 * MAX_BLOCKS
    return f"{new} new tokens exceed {most}" if new > most else None


def seen(cache: Cache, new: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Which of T slots are real, bool (B, T), and each new position's first in reach, int32 (B, S).

    A window counts real tokens: positions never fall along the slots, so that what is in reach of
    the window is all that follows one slot. With a table there are no holes: both are left empty.
    """
    batch, slots, device = cache.key.shape[0], cache.slots, cache.key.device
    if cache.table is not None:
        keep = torch.empty(1, dtype=torch.bool, device=device)
        return keep, torch.empty(1, dtype=torch.int32, device=device)
    if cache.mask is None:
        keep = torch.ones(batch, slots, dtype=torch.bool, device=device)
    else:
        keep = cache.mask.bool().expand(batch, slots).contiguous()
    if window is None:
        return keep, torch.zeros(batch, new, dtype=torch.int32, device=device)
    positions = keep.cumsum(1) - 1
    if cache.lengths is None:
        mine = positions[:, slots - new :]
    else:
        own = cache.lengths + torch.arange(new, device=device)
        mine = positions.index_select(1, own.clamp(max=slots - 1))
    return keep, torch.searchsorted(
        positions, (mine - window).contiguous(), right=True, out_int32=True
    )


def joined(
    k: Tensor,
    v: Tensor,
    past_key: Tensor | None,
    past_value: Tensor | None,
    mask: Tensor | None,
) -> Cache:
    """A cache (B, K, P + S, D) of past and new, as new tensors."""
    key, value = (
        x.clone(memory_format=torch.contiguous_format) if past is None else torch.cat([past, x], 2)
        for x, past in ((k, past_key), (v, past_value))
    )
    return Cache(key, value, past=key.shape[2] - k.shape[2], mask=mask)


def attend(
    q: Tensor,
    cache: Cache,
    sinks: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention of q (B, H, S, D) over a cache that holds the new tokens: (B, S, H, D of v).

    Blocks of keys that no query of a block sees are not read. Online softmax after Milakov and
    Gimelshein 2018, tiled as in Dao et al. 2022.
    """
    batch, heads, new, size = q.shape
    value_size, kv_heads = cache.value.shape[3], cache.key.shape[1]
    int8, paged = cache.key.dtype == torch.int8, cache.table is not None
    y = torch.empty(batch, new, heads, value_size, dtype=q.dtype, device=q.device)
    options = tile(max(size, value_size), q.dtype, architecture(q.device), paged, int8)
    if y.numel():
        q = side_by_side(q)
        launch(
            _prefill_attention_kernel,
            (batch * heads, triton.cdiv(new, options["BLOCK_M"])),
            q,
            cache.key,
            cache.value,
            *cache.pointers(),
            *seen(cache, new, window),
            torch.zeros(1, device=q.device) if sinks is None else sinks.float().contiguous(),
            y,
            *q.stride()[:3],
            *cache.strides(),
            heads,
            heads // kv_heads,
            new,
            -1 if cache.past is None else cache.past,
            cache.slots,
            cache.key.shape[2],
            size,
            value_size,
            int(causal),
            window or 0,
            int(sinks is not None),
            scale,
            softcap or 0.0,
            CAPPED=softcap is not None and not paged and not int8,
            PAGED=paged,
            **options,
        )
    return y


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
    """`qopt::cached_attention`, by blocks of new tokens."""
    cache = joined(k, v, past_key, past_value, mask)
    y = attend(q, cache, sinks, scale, causal, window, softcap)
    return y, cache.key, cache.value
