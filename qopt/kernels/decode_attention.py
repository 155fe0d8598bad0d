"""Attention of few new tokens: one program a KV head and a split of its cache, then a combine."""

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
from qopt.kernels.prefill_attention import joined, seen

ROWS = 16  # query rows (heads of a group times new tokens) of a program: what a dot needs
MAX_NEW = 8  # new tokens; from there on prefill reads the cache less often
WHOLE = 2048  # cached tokens that one program reads; beyond, one program for each `SPLIT`
SPLIT = 512


@triton.jit
def _decode_attention_kernel(
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
    part_ptr: tl.tensor,
    stats_ptr: tl.tensor,
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
    kv_heads: tl.int32,
    group: tl.int32,
    new: tl.int32,
    past: tl.int32,
    slots: tl.int32,
    block: tl.int32,
    split: tl.int32,
    size: tl.int32,
    value_size: tl.int32,
    causal: tl.int32,
    window: tl.int32,
    sinks: tl.int32,
    scale: tl.float32,
    softcap: tl.float32,
    CAPPED: tl.constexpr,
    PAGED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    batch = (tl.program_id(0) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(0) % kv_heads).to(tl.int64)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    live = row < group * new
    head = kv_head * group + row // new
    token = row % new
    d = tl.arange(0, BLOCK_D)
    past, count = filled(length_ptr, count_ptr, batch, past, new, PAGED)
    total = tl.minimum(past + count, slots)
    q_ptrs = q_ptr + batch * q_batch_stride + head * q_head_stride + token * q_token_stride
    q_ptrs = q_ptrs[:, None] + d[None, :]
    q = tl.load(q_ptrs, mask=live[:, None] & (d[None, :] < size), other=0.0)
    if WIDE:
        q = q.to(tl.float32)
    first, last = reach(
        first_ptr + batch * new, token, live, past, count, total, causal, window, PAGED
    )
    begin = tl.program_id(1) * split
    low = tl.maximum(begin, tl.min(first, axis=0) // BLOCK_N * BLOCK_N)
    high = tl.minimum(begin + split, total)
    top, mass, y = attend_slots(
        q,
        k_ptr,
        v_ptr,
        key_scale_ptr,
        value_scale_ptr,
        table_ptr,
        keep_ptr,
        batch,
        kv_head,
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
        ROWS,
        BLOCK_N,
        BLOCK_D,
        WIDE,
    )
    place = (batch * new + token) * (kv_heads * group) + head
    keep = live[:, None] & (d[None, :] < value_size)
    if tl.num_programs(1) == 1:
        sink = tl.load(sinks_ptr + head, mask=live & (head < sinks), other=float("-inf"))
        mass += tl.exp(sink - tl.where(top == float("-inf"), 0.0, top))
        y = y / tl.where(mass == 0.0, 1.0, mass)[:, None]
        y_ptrs = y_ptr + place[:, None] * value_size + d[None, :]
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=keep)
    elif begin < total:  # the combine step reads no split behind the last token
        place = place * tl.num_programs(1) + tl.program_id(1)
        tl.store(part_ptr + place[:, None] * value_size + d[None, :], y, mask=keep)
        tl.store(stats_ptr + 2 * place, top, mask=live)
        tl.store(stats_ptr + 2 * place + 1, mass, mask=live)


@triton.jit
def _combine_kernel(
    part_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    length_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    y_ptr: tl.tensor,
    heads: tl.int32,
    new: tl.int32,
    past: tl.int32,
    splits: tl.int32,
    split: tl.int32,
    value_size: tl.int32,
    sinks: tl.int32,
    PAGED: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    past, _ = filled(length_ptr, length_ptr, place // heads // new, past, new, PAGED)
    used = tl.minimum(tl.cdiv(past + new, split), splits)
    top = tl.full((), float("-inf"), tl.float32)
    if sinks != 0:
        top = tl.load(sinks_ptr + place % heads)
    mass = tl.where(top == float("-inf"), 0.0, 1.0)
    y = tl.zeros((BLOCK_D,), tl.float32)
    for i in range(0, used):
        at = place * splits + i
        other = tl.load(stats_ptr + 2 * at)
        higher = tl.maximum(top, other)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, share = tl.exp(top - base), tl.exp(other - base)
        mass = mass * shrink + tl.load(stats_ptr + 2 * at + 1) * share
        part = tl.load(part_ptr + at * value_size + d, mask=d < value_size, other=0.0)
        y = y * shrink + part * share
        top = higher
    y = y / tl.where(mass == 0.0, 1.0, mass)
    tl.store(y_ptr + place * value_size + d, y.to(y_ptr.dtype.element_ty), mask=d < value_size)


def tile(
    size: int, dtype: torch.dtype, arch: str, paged: bool = False, int8: bool = False
) -> dict[str, Any]:
    """The options of a launch for heads of a size and type, on an architecture."""
    block = next(block for block in SIZES if size <= block)
    if dtype == torch.float32:
        keys, warps = {64: (32, 4), 128: (16 if paged else 32, 8), 256: (16, 8)}[block]
    else:
        tight = (("sm_80", 64), ("sm_80", 128), ("sm_90", 128))  # registers, with pages to look up
        narrow = block == 256 or (paged and not int8 and (arch, block) in tight)
        many = int8 and not arch.startswith("gfx") and (block > 64 or arch == "sm_90")
        keys, warps = (32 if narrow else 64), (8 if many else 4)
    return {
        "ROWS": ROWS,
        "BLOCK_N": keys,
        "BLOCK_D": block,
        "num_warps": warps,
        "num_stages": 1 if arch.startswith("gfx") or block == 256 else 2,
    }


def combine_tile(size: int) -> dict[str, Any]:
    """The options of the combine step for heads of a size."""
    block = next(block for block in SIZES if size <= block)
    return {"BLOCK_D": block, "num_warps": 1, "num_stages": 2}


def forms(arch: str, paged: bool = False, int8: bool = False) -> Iterator[Form]:
    """Every form that `attend` asks for on a cache of one kind."""
    axes = [f"{axis}_stride" for axis in ("batch", "head", "token")]
    aligned = (*(f"{x}_{axis}" for x in "qkv" for axis in axes), "size", "value_size")
    wide = dict.fromkeys(("part_ptr", "stats_ptr", "sinks_ptr"), "fp32")
    told = POINTERS | wide | {"keep_ptr": "u1", "first_ptr": "i32"}
    if int8:
        told |= {"k_ptr": "i8", "v_ptr": "i8"}
    for size in SIZES:
        for dtype in HALVES if int8 else FLOATS:
            for capped in (False,) if paged or int8 else (False, True):
                yield from forms_of(
                    _decode_attention_kernel,
                    told,
                    tile(size, dtype, arch, paged, int8) | {"CAPPED": capped, "PAGED": paged},
                    [dtype],
                    grid="(batch * kv_heads, slots <= 2048 ? 1 : ceil(slots / split), "
                    "ceil(group * new / ROWS))",
                    aligned=(*aligned, *(["block"] if paged else [])),
                )
        yield from forms_of(
            _combine_kernel,
            wide | {"length_ptr": "i64"},
            combine_tile(size) | {"PAGED": paged},
            grid="(batch * new * heads, 1, 1), where there is more than one split",
            aligned=("value_size",),
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
    """Up to 8 new tokens a row; heads of up to 256 elements, grouped or not; any mask.

    Causal, window, sinks, soft-cap. q, keys and values of one type: float32, float16, bfloat16.
    """
    return (
        too_many(q)
        or unfit_heads(q, k, v, softcap)
        or unfit(mask, sinks, same=[q, k, v, past_key, past_value])
    )


def too_many(q: Tensor) -> str | None:
    """Why so many new tokens are better served by `triton-prefill`, or None."""
    return f"{q.shape[2]} new tokens exceed {MAX_NEW}" if q.shape[2] > MAX_NEW else None


def splits_of(slots: int) -> tuple[int, int]:
    """How many programs share a cache of so many slots, and the slots that each reads."""
    return (1, slots) if slots <= WHOLE else (triton.cdiv(slots, SPLIT), SPLIT)


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

    A program reads its keys and values once for a group of heads. Splits hold an unscaled sum, its
    largest score and its mass, and are joined in fp32 (Dao et al., "Flash-Decoding", 2023). How
    many there are follows from the slots, not from how many are filled: behind the last token they
    do nothing.
    """
    batch, heads, new, size = q.shape
    kv_heads, value_size = cache.key.shape[1], cache.value.shape[3]
    int8, paged = cache.key.dtype == torch.int8, cache.table is not None
    y = torch.empty(batch, new, heads, value_size, dtype=q.dtype, device=q.device)
    if y.numel() == 0:
        return y
    q = side_by_side(q)
    splits, split = splits_of(cache.slots)
    partial = (batch * new * heads, splits) if splits > 1 else (1, 1)
    part = torch.empty(*partial, value_size, dtype=torch.float32, device=q.device)
    stats = torch.empty(*partial, 2, dtype=torch.float32, device=q.device)
    levels = torch.zeros(1, device=q.device) if sinks is None else sinks.float().contiguous()
    sink_count = 0 if sinks is None else heads
    past = -1 if cache.past is None else cache.past
    pointers = cache.pointers()
    launch(
        _decode_attention_kernel,
        (batch * kv_heads, splits, triton.cdiv(heads // kv_heads * new, ROWS)),
        q,
        cache.key,
        cache.value,
        *pointers,
        *seen(cache, new, window),
        levels,
        y,
        part,
        stats,
        *q.stride()[:3],
        *cache.strides(),
        kv_heads,
        heads // kv_heads,
        new,
        past,
        cache.slots,
        cache.key.shape[2],
        split,
        size,
        value_size,
        int(causal),
        window or 0,
        sink_count,
        scale,
        softcap or 0.0,
        CAPPED=softcap is not None and not paged and not int8,
        PAGED=paged,
        **tile(max(size, value_size), q.dtype, architecture(q.device), paged, int8),
    )
    if splits > 1:
        launch(
            _combine_kernel,
            (batch * new * heads,),
            part,
            stats,
            pointers[3],
            levels,
            y,
            heads,
            new,
            past,
            splits,
            split,
            value_size,
            sink_count,
            PAGED=paged,
            **combine_tile(value_size),
        )
    return y


@kernel(ops.cached_attention, "triton-decode", refuses=refuses, forms=forms, first=True)
def decode_attention(
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
    """`qopt::cached_attention`, for few new tokens."""
    cache = joined(k, v, past_key, past_value, mask)
    y = attend(q, cache, sinks, scale, causal, window, softcap)
    return y, cache.key, cache.value
