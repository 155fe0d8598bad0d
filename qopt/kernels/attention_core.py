"""What all attention kernels share: some queries against a range of slots, softmax online."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def filled(
    length_ptr: tl.tensor,
    count_ptr: tl.tensor,
    batch: tl.tensor,
    past: tl.tensor,
    new: tl.tensor,
    PAGED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """How many tokens lie there before the new ones, and how many of the new are real.

    They are in memory of the device with a table, and where `past` is negative.
    """
    if PAGED:
        past = tl.load(length_ptr + batch).to(tl.int32)
        new = tl.load(count_ptr + batch).to(tl.int32)
    else:  # no branch: one before a loop keeps Triton from overlapping the loop's loads
        held = tl.load(length_ptr, mask=past < 0, other=0).to(tl.int32)
        past = tl.where(past < 0, held, past)
    return past, new


@triton.jit
def reach(
    first_ptr: tl.tensor,
    token: tl.tensor,
    live: tl.tensor,
    past: tl.tensor,
    count: tl.tensor,
    total: tl.tensor,
    causal: tl.tensor,
    window: tl.tensor,
    PAGED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The first and the last slot that each new token may see; none for one that is not live."""
    last = tl.where(causal != 0, past + token, total - 1)
    if PAGED:
        live = live & (token < count)
        first = tl.where(window > 0, tl.maximum(past + token - window + 1, 0), 0)
        first = tl.where(live, first, total)
        last = tl.where(live, last, -1)
    else:
        first = tl.load(first_ptr + token, mask=live, other=total)
    return first, last


@triton.jit
def capped(scores: tl.tensor, softcap: tl.tensor) -> tl.tensor:
    """softcap * tanh(scores / softcap)."""
    return softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)


@triton.jit
def capped_if_asked(scores: tl.tensor, softcap: tl.tensor) -> tl.tensor:
    """`capped` where there is a cap, which is positive."""
    if softcap > 0.0:
        scores = capped(scores, softcap)
    return scores


@triton.jit
def channels(
    scale_ptr: tl.tensor, token_stride: tl.tensor, d: tl.tensor, size: tl.tensor
) -> tl.tensor:
    """Scales of a head's channels; 1 where the tokens have them, which a stride tells."""
    count = tl.where(token_stride == 0, size, 0)
    return tl.load(scale_ptr + d, mask=d < count, other=1.0)


@triton.jit
def cached_tile(
    ptr: tl.tensor,
    scale_ptr: tl.tensor,
    channel: tl.tensor,
    table_ptr: tl.tensor,
    slot: tl.tensor,
    high: tl.tensor,
    block: tl.tensor,
    page_stride: tl.tensor,
    token_stride: tl.tensor,
    scale_page_stride: tl.tensor,
    scale_token_stride: tl.tensor,
    d: tl.tensor,
    size: tl.tensor,
    dtype: tl.constexpr,
    PAGED: tl.constexpr,
) -> tl.tensor:
    """Keys or values of the slots below `high`; int8 ones by the scales of channels or tokens.

    Slots and d are a row and a column, or the other way. All that follows from a slot is computed
    here, in the layout of the tile: what is shared between tiles would have to change its layout.
    """
    inside = slot < high
    if PAGED:
        page = tl.load(table_ptr + slot // block, mask=inside, other=-1).to(tl.int64)
        inside = inside & (page >= 0)
        slot = slot % block
        ptrs = ptr + (page * page_stride + slot.to(tl.int64) * token_stride) + d
    else:
        ptrs = ptr + slot.to(tl.int64) * token_stride + d
    if ptr.dtype.element_ty != tl.int8:
        x = tl.load(ptrs, mask=inside & (d < size), other=0.0)
    else:
        x = tl.load(ptrs, mask=inside & (d < size), other=0)
        per_token = tl.where(scale_token_stride != 0, high, 0)
        scale_ptrs = scale_ptr + slot.to(tl.int64) * scale_token_stride
        if PAGED:
            scale_ptrs += page * scale_page_stride
        token = tl.load(scale_ptrs, mask=inside & (slot < per_token), other=1.0)
        x = (x.to(tl.float32) * channel * token).to(dtype)
    return x


@triton.jit
def is_real(
    keep_ptr: tl.tensor,
    table_ptr: tl.tensor,
    slot: tl.tensor,
    high: tl.tensor,
    block: tl.tensor,
    PAGED: tl.constexpr,
) -> tl.tensor:
    """Which slots below `high` hold a token: those with a page, or those that the mask keeps."""
    if PAGED:
        real = tl.load(table_ptr + slot // block, mask=slot < high, other=-1) >= 0
    else:
        real = tl.load(keep_ptr + slot, mask=slot < high, other=0) != 0
    return real


@triton.jit
def attend_slots(
    q: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    key_scale_ptr: tl.tensor,
    value_scale_ptr: tl.tensor,
    table_ptr: tl.tensor,
    keep_ptr: tl.tensor,
    batch: tl.tensor,
    kv_head: tl.tensor,
    k_batch_stride: tl.tensor,
    k_head_stride: tl.tensor,
    k_token_stride: tl.tensor,
    v_batch_stride: tl.tensor,
    v_head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    key_scale_batch_stride: tl.tensor,
    key_scale_head_stride: tl.tensor,
    key_scale_token_stride: tl.tensor,
    value_scale_batch_stride: tl.tensor,
    value_scale_head_stride: tl.tensor,
    value_scale_token_stride: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    slots: tl.tensor,
    block: tl.tensor,
    size: tl.tensor,
    value_size: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    dtype: tl.constexpr,
    CAPPED: tl.constexpr,
    PAGED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Largest score, mass and unscaled sum of each row of q over the slots from low to high."""
    INT8: tl.constexpr = k_ptr.dtype.element_ty == tl.int8
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    k_ptr += kv_head * k_head_stride
    v_ptr += kv_head * v_head_stride
    if PAGED:
        table_ptr += batch * (slots // block)
    else:
        k_ptr += batch * k_batch_stride
        v_ptr += batch * v_batch_stride
        keep_ptr += batch * slots
    key_channel, value_channel = d, d
    if INT8:
        key_scale_ptr += kv_head * key_scale_head_stride
        value_scale_ptr += kv_head * value_scale_head_stride
        key_channel = channels(key_scale_ptr, key_scale_token_stride, d, size)
        value_channel = channels(value_scale_ptr, value_scale_token_stride, d, value_size)
        if not PAGED:
            key_scale_ptr += batch * key_scale_batch_stride
            value_scale_ptr += batch * value_scale_batch_stride
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    y = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for start in range(low, high, BLOCK_N):
        slot = start + n
        k = cached_tile(
            k_ptr,
            key_scale_ptr,
            key_channel[:, None],
            table_ptr,
            slot[None, :],
            high,
            block,
            k_batch_stride,
            k_token_stride,
            key_scale_batch_stride,
            key_scale_token_stride,
            d[:, None],
            size,
            dtype,
            PAGED,
        )
        if WIDE:
            k = k.to(tl.float32)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if CAPPED:
            scores = capped(scores, softcap)
        elif PAGED or INT8:  # asked at run time: a constant would double these forms
            scores = capped_if_asked(scores, softcap)
        real = is_real(keep_ptr, table_ptr, slot, high, block, PAGED)
        seen = real[None, :] & (slot[None, :] >= first[:, None])
        seen = seen & (slot[None, :] <= last[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf would be NaN
        powers = tl.exp(scores - base[:, None])
        shrink = tl.exp(top - base)
        mass = mass * shrink + tl.sum(powers, axis=1)
        v = cached_tile(
            v_ptr,
            value_scale_ptr,
            value_channel[None, :],
            table_ptr,
            slot[:, None],
            high,
            block,
            v_batch_stride,
            v_token_stride,
            value_scale_batch_stride,
            value_scale_token_stride,
            d[None, :],
            value_size,
            dtype,
            PAGED,
        )
        powers = powers.to(v.dtype)
        if WIDE:
            powers, v = powers.to(tl.float32), v.to(tl.float32)
        y = tl.dot(powers, v, y * shrink[:, None], input_precision="ieee")
        top = higher
    return top, mass, y
