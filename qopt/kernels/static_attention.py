"""Attention over buffers of a fixed size: new tokens written in place, then decode or prefill."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from qopt import ops
from qopt.kernel import Form, kernel
from qopt.kernels import decode_attention as decode
from qopt.kernels import prefill_attention as prefill
from qopt.kernels.attention_cache import Cache, lacks, unfit_cache, write, write_forms


def decode_forms(arch: str) -> Iterator[Form]:
    """Every form that the launcher for few new tokens asks for."""
    for int8 in (False,) if lacks(arch) else (False, True):
        yield from decode.forms(arch, int8=int8)
    yield from write_forms(paged=False)


def prefill_forms(arch: str) -> Iterator[Form]:
    """Every form that the launcher for many new tokens asks for."""
    for int8 in (False,) if lacks(arch) else (False, True):
        yield from prefill.forms(arch, int8=int8)
    yield from write_forms(paged=False)


def refuses(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    past: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
) -> str | None:
    """Heads of up to 256 elements, grouped or not; causal, window, sinks, soft-cap, any mask.

    q, keys, values and buffers of one type: float32, float16, bfloat16; the latter two also with
    int8 buffers and float32 scales of channels or tokens. Elements of a head lie side by side.
    """
    if past.numel() != 1 or past.dtype != torch.int64:
        return f"past is {past.numel()} of {past.dtype}, not one int64".replace("torch.", "")
    reason: str | None = prefill.too_many(q) or unfit_cache(
        q, k, v, key_cache, value_cache, key_scale, value_scale, softcap, past, mask, sinks
    )
    return reason


def refuses_decode(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    past: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
) -> str | None:
    """Up to 8 new tokens a row; else as `triton-prefill`, buffers of any length."""
    reason: str | None = decode.too_many(q) or refuses(
        q, k, v, key_cache, value_cache, past, mask, sinks, key_scale, value_scale,
        scale=scale, causal=causal, window=window, softcap=softcap,
    )  # fmt: skip
    return reason


def filled(
    k: Tensor | None,
    v: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    past: Tensor,
    mask: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> Cache:
    """The buffers with the new tokens written into them."""
    cache = Cache(
        key_cache,
        value_cache,
        lengths=past,
        key_scale=key_scale,
        value_scale=value_scale,
        mask=mask,
    )
    if k is not None and v is not None:
        write(k, v, cache)
    return cache


@kernel(
    ops.static_attention, "triton-decode", refuses=refuses_decode, forms=decode_forms, lacks=lacks
)
def decode_static(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    past: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """`qopt::static_attention` of few new tokens; nothing waits for the device."""
    cache = filled(k, v, key_cache, value_cache, past, mask, key_scale, value_scale)
    y: Tensor = decode.attend(q, cache, sinks, scale, causal, window, softcap)
    return y


@kernel(ops.static_attention, "triton-prefill", refuses=refuses, forms=prefill_forms, lacks=lacks)
def prefill_static(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    past: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """`qopt::static_attention` of many new tokens; nothing waits for the device."""
    cache = filled(k, v, key_cache, value_cache, past, mask, key_scale, value_scale)
    y: Tensor = prefill.attend(q, cache, sinks, scale, causal, window, softcap)
    return y
