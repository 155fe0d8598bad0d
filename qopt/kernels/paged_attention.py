"""Attention over a cache in pages: new tokens written in place, then decode or prefill."""

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
        yield from decode.forms(arch, paged=True, int8=int8)
    yield from write_forms(paged=True)


def prefill_forms(arch: str) -> Iterator[Form]:
    """Every form that the launcher for many new tokens asks for."""
    for int8 in (False,) if lacks(arch) else (False, True):
        yield from prefill.forms(arch, paged=True, int8=int8)
    yield from write_forms(paged=True)


def refuses(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    key_pool: Tensor,
    value_pool: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    query_lengths: Tensor | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
) -> str | None:
    """Heads of up to 256 elements, grouped or not; causal, window, sinks, soft-cap, any
    page size.

    q, keys, values and pools of one type: float32, float16, bfloat16; the latter two also with int8
    pools and float32 scales of channels or tokens. Elements of a head lie side by side.
    """
    if block_table.dtype != torch.int32:
        return f"the block table is {block_table.dtype}, not int32".replace("torch.", "")
    for name, x in (("lengths", lengths), ("query lengths", query_lengths)):
        if x is not None and x.dtype not in (torch.int32, torch.int64):
            return f"{name} are {x.dtype}, not int64".replace("torch.", "")
    reason: str | None = prefill.too_many(q) or unfit_cache(
        q, k, v, key_pool, value_pool, key_scale, value_scale, softcap,
        block_table, lengths, query_lengths, sinks,
    )  # fmt: skip
    return reason


def refuses_decode(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    key_pool: Tensor,
    value_pool: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    query_lengths: Tensor | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
) -> str | None:
    """Up to 8 new tokens a row; else as `triton-prefill`, pools of any size."""
    reason: str | None = decode.too_many(q) or refuses(
        q, k, v, key_pool, value_pool, block_table, lengths, query_lengths, sinks, key_scale,
        value_scale,
        scale=scale, causal=causal, window=window, softcap=softcap,
    )  # fmt: skip
    return reason


def filled(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    key_pool: Tensor,
    value_pool: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    query_lengths: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> Cache:
    """The pools with the new tokens written into their pages."""
    if query_lengths is None:
        query_lengths = torch.full_like(lengths, q.shape[2])
    cache = Cache(
        key_pool,
        value_pool,
        lengths=lengths.long().contiguous(),
        counts=query_lengths.long().contiguous(),
        table=block_table.contiguous(),
        key_scale=key_scale,
        value_scale=value_scale,
    )
    if k is not None and v is not None:
        write(k, v, cache)
    return cache


@kernel(
    ops.paged_attention, "triton-decode", refuses=refuses_decode, forms=decode_forms, lacks=lacks
)
def decode_paged(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    key_pool: Tensor,
    value_pool: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    query_lengths: Tensor | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """`qopt::paged_attention` of few new tokens; nothing waits for the device."""
    cache = filled(
        q, k, v, key_pool, value_pool, block_table, lengths, query_lengths, key_scale, value_scale
    )
    y: Tensor = decode.attend(q, cache, sinks, scale, causal, window, softcap)
    return y


@kernel(ops.paged_attention, "triton-prefill", refuses=refuses, forms=prefill_forms, lacks=lacks)
def prefill_paged(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    key_pool: Tensor,
    value_pool: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    query_lengths: Tensor | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """`qopt::paged_attention` of many new tokens; nothing waits for the device."""
    cache = filled(
        q, k, v, key_pool, value_pool, block_table, lengths, query_lengths, key_scale, value_scale
    )
    y: Tensor = prefill.attend(q, cache, sinks, scale, causal, window, softcap)
    return y
