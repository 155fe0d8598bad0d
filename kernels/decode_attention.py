"""Attention of few new tokens: one program a KV head and a split of its cache, then a combine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qopt import ops
from qopt.kernel import FLOATS, Form, architecture, forms_of, kernel, launch
from qopt.kernels import prefill_attention as prefill

ROWS = 16  # query rows (heads of a group times new tokens) of a program: what a dot needs
MAX_NEW = 8  # new tokens; from there on prefill reads the cache less often
WHOLE = 2048  # cached tokens that one program reads; beyond, one program for each `SPLIT`
SPLIT = 512


@triton.jit
def _decode_attention_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
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
    kv_heads: tl.int32,
    group: tl.int32,
    new: tl.int32,
    total: tl.int32,
    split: tl.int32,
    size: tl.int32,
    value_size: tl.int32,
    causal: tl.int32,
    sinks: tl.int32,
    scale: tl.float32,
    softcap: tl.float32,
    CAPPED: tl.constexpr,
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
    n = tl.arange(0, BLOCK_N)
    k_ptr += batch * k_batch_stride + kv_head * k_head_stride
    v_ptr += batch * v_batch_stride + kv_head * v_head_stride
    keep_ptr += batch * total
    q_ptrs = q_ptr + batch * q_batch_stride + head * q_head_stride + token * q_token_stride
    q_ptrs = q_ptrs[:, None] + d[None, :]
    q = tl.load(q_ptrs, mask=live[:, None] & (d[None, :] < size), other=0.0)
    if WIDE:
        q = q.to(tl.float32)
    first = tl.load(first_ptr + batch * new + token, mask=live, other=total)
    last = tl.where(causal != 0, total - new + token, total - 1)
    begin = tl.program_id(1) * split
    low = tl.maximum(begin, tl.min(first, axis=0) // BLOCK_N * BLOCK_N)
    high = tl.minimum(begin + split, total)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    y = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for start in range(low, high, BLOCK_N):
        slot = start + n
        inside = slot < high
        k_ptrs = k_ptr + slot.to(tl.int64)[None, :] * k_token_stride + d[:, None]
        k = tl.load(k_ptrs, mask=inside[None, :] & (d[:, None] < size), other=0.0)
        if WIDE:
            k = k.to(tl.float32)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        real = tl.load(keep_ptr + slot, mask=inside, other=0)
        seen = (real[None, :] != 0) & (slot[None, :] >= first[:, None])
        seen = seen & (slot[None, :] <= last[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf would be NaN
        powers = tl.exp(scores - base[:, None])
        shrink = tl.exp(top - base)
        mass = mass * shrink + tl.sum(powers, axis=1)
        v_ptrs = v_ptr + slot.to(tl.int64)[:, None] * v_token_stride + d[None, :]
        v = tl.load(v_ptrs, mask=inside[:, None] & (d[None, :] < value_size), other=0.0)
        powers = powers.to(v.dtype)
        if WIDE:
            powers, v = powers.to(tl.float32), v.to(tl.float32)
        y = tl.dot(powers, v, y * shrink[:, None], input_precision="ieee")
        top = higher
    place = (batch * new + token) * (kv_heads * group) + head
    keep = live[:, None] & (d[None, :] < value_size)
    if tl.num_programs(1) == 1:
        sink = tl.load(sinks_ptr + head, mask=live & (head < sinks), other=float("-inf"))
        mass += tl.exp(sink - tl.where(top == float("-inf"), 0.0, top))
        y = y / tl.where(mass == 0.0, 1.0, mass)[:, None]
        y_ptrs = y_ptr + place[:, None] * value_size + d[None, :]
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=keep)
    else:
        place = place * tl.num_programs(1) + tl.program_id(1)
        tl.store(part_ptr + place[:, None] * value_size + d[None, :], y, mask=keep)
        tl.store(stats_ptr + 2 * place, top, mask=live)
        tl.store(stats_ptr + 2 * place + 1, mass, mask=live)


@triton.jit
def _combine_kernel(
    part_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    y_ptr: tl.tensor,
    heads: tl.int32,
    splits: tl.int32,
    value_size: tl.int32,
    sinks: tl.int32,
    BLOCK_D: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    top = tl.full((), float("-inf"), tl.float32)
    if sinks != 0:
        top = tl.load(sinks_ptr + place % heads)
    mass = tl.where(top == float("-inf"), 0.0, 1.0)
    y = tl.zeros((BLOCK_D,), tl.float32)
    for i in range(0, splits):
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


def tile(size: int, dtype: torch.dtype, arch: str) -> dict[str, Any]:
    """The options of a launch for heads of a size and type, on an architecture."""
    block = next(block for block in prefill.SIZES if size <= block)
    if dtype == torch.float32:
        keys, warps = {64: (32, 4), 128: (32, 8), 256: (16, 8)}[block]
    else:
        keys, warps = (32 if block == 256 else 64), 4
    return {
        "ROWS": ROWS,
        "BLOCK_N": keys,
        "BLOCK_D": block,
        "num_warps": warps,
        "num_stages": 1 if arch.startswith("gfx") or block == 256 else 2,
    }


def combine_tile(size: int) -> dict[str, Any]:
    """The options of the combine step for heads of a size."""
    block = next(block for block in prefill.SIZES if size <= block)
    return {"BLOCK_D": block, "num_warps": 1, "num_stages": 2}


def forms(arch: str) -> Iterator[Form]:
    """Every form that the launcher asks for."""
    strides = (f"{x}_{axis}_stride" for x in "qkv" for axis in ("batch", "head", "token"))
    aligned = (*strides, "size", "value_size")
    wide = dict.fromkeys(("part_ptr", "stats_ptr", "sinks_ptr"), "fp32")
    for size in prefill.SIZES:
        for dtype in FLOATS:
            for capped in (False, True):
                yield from forms_of(
                    _decode_attention_kernel,
                    wide | {"keep_ptr": "u1", "first_ptr": "i32"},
                    tile(size, dtype, arch) | {"CAPPED": capped},
                    [dtype],
                    grid="(batch * kv_heads, total <= 2048 ? 1 : ceil(total / split), "
                    "ceil(group * new / ROWS))",
                    aligned=aligned,
                )
        yield from forms_of(
            _combine_kernel,
            wide,
            combine_tile(size),
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
    if q.shape[2] > MAX_NEW:
        return f"{q.shape[2]} new tokens exceed {MAX_NEW}"
    reason: str | None = prefill.refuses(
        q, k, v, past_key, past_value, mask, sinks,
        scale=scale, causal=causal, window=window, softcap=softcap,
    )  # fmt: skip
    return reason


def splits_of(total: int) -> tuple[int, int]:
    """How many programs share a cache of so many tokens, and the tokens that each reads."""
    return (1, total) if total <= WHOLE else (triton.cdiv(total, SPLIT), SPLIT)


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
    """`qopt::cached_attention`; a program reads its keys and values once for a group of heads.

    Splits hold an unscaled sum, its largest score and its mass, and are joined in fp32 (Dao et al.,
    "Flash-Decoding", 2023).
    """
    key, value = prefill.with_past(k, past_key), prefill.with_past(v, past_value)
    batch, heads, new, size = q.shape
    kv_heads, total, value_size = key.shape[1], key.shape[2], v.shape[3]
    y = torch.empty(batch, new, heads, value_size, dtype=v.dtype, device=v.device)
    if y.numel() == 0:
        return y, key, value
    q = prefill.heads_of(q)
    splits, split = splits_of(total)
    partial = (batch * new * heads, splits) if splits > 1 else (1, 1)
    part = torch.empty(*partial, value_size, dtype=torch.float32, device=q.device)
    stats = torch.empty(*partial, 2, dtype=torch.float32, device=q.device)
    levels = torch.zeros(1, device=q.device) if sinks is None else sinks.float().contiguous()
    sink_count = 0 if sinks is None else heads
    launch(
        _decode_attention_kernel,
        (batch * kv_heads, splits, triton.cdiv(heads // kv_heads * new, ROWS)),
        q,
        key,
        value,
        *prefill.seen(mask, key, new, window),
        levels,
        y,
        part,
        stats,
        *(stride for x in (q, key, value) for stride in x.stride()[:3]),
        kv_heads,
        heads // kv_heads,
        new,
        total,
        split,
        size,
        value_size,
        int(causal),
        sink_count,
        scale,
        softcap or 0.0,
        CAPPED=softcap is not None,
        **tile(max(size, value_size), q.dtype, architecture(q.device)),
    )
    if splits > 1:
        launch(
            _combine_kernel,
            (batch * new * heads,),
            part,
            stats,
            levels,
            y,
            heads,
            splits,
            value_size,
            sink_count,
            **combine_tile(value_size),
        )
    return y, key, value
