"""The qopt dialect: every op with its meaning in torch, which is also its shape function.

An op's reference runs on real tensors (the interpreter), on fake tensors (shapes) and under tracing
(lowering to aten where a target has nothing better). Shapes: B batch, S new tokens, T past and new
tokens, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_LIBRARY: Any = torch.library.Library("qopt", "DEF")  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Op:
    """A dialect op: `target` is what stands in a graph, `reference` what it means."""

    name: str
    target: torch._ops.OpOverload
    reference: Callable[..., Any]
    doc: str


OPS: dict[str, Op] = {}


def op(schema: str, shape: Callable[..., Any] | None = None) -> Callable[[Callable[..., Any]], Op]:
    """Register the decorated reference under a torch schema `name(arguments) -> results`.

    `shape` makes results of the right shape and dtype at less cost than the reference would.
    """

    def register(reference: Callable[..., Any]) -> Op:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"qopt::{name}", shape or reference, lib=_LIBRARY)
        target = getattr(torch.ops.qopt, name).default
        OPS[name] = Op(name, target, reference, reference.__doc__ or "")
        return OPS[name]

    return register


def run_on(device: str, name: str, implementation: Callable[..., Any]) -> None:
    """Make `torch.ops.qopt.<name>` call another implementation on one device type (`CUDA`)."""
    _LIBRARY.impl(name, implementation, device)


def visible(
    mask: Tensor, new: int, causal: bool, window: int | None, past: Tensor | None = None
) -> Tensor:
    """Which of T keys each of `new` positions sees: bool (B, 1, S, T).

    `mask` is (B, T), 1 where a token is real. The new positions are the last ones, or those behind
    `past` (int64 [1]) keys. A key's position is the number of real tokens before it, so a window
    counts tokens and not the holes that padding left.
    """
    total = mask.shape[1]
    slot = torch.arange(total, device=mask.device)
    own = slot[total - new :] if past is None else past + torch.arange(new, device=mask.device)
    keep = mask.bool()[:, None, None, :]
    if causal:
        keep = keep & (slot[None, :] <= own[:, None])
    elif past is not None:
        keep = keep & (slot < past + new)
    if window is not None:
        position = mask.cumsum(1) - 1
        mine = position[:, total - new :] if past is None else position.index_select(1, own)
        distance = mine[:, :, None] - position[:, None, :]
        keep = keep & (distance < window)[:, None]
    return keep.expand(mask.shape[0], 1, new, total)


def like_first(x: Tensor, *_: Any, **__: Any) -> Tensor:
    """A result like the first argument."""
    return torch.empty_like(x)


def like_first_twice(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Two results like the first argument."""
    return torch.empty_like(x), torch.empty_like(x)


def norm_and_sum(x: Tensor, residual: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """A norm like x, and a sum in the wider type of both."""
    wider = torch.promote_types(x.dtype, residual.dtype)
    return torch.empty_like(x), torch.empty_like(x, dtype=wider)


def heads_behind(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """(B, S, H, D of v)."""
    return v.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def heads_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past_key: Tensor | None,
    past_value: Tensor | None,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, S, H, D of v), and keys and values with their past before them."""
    total = k.shape[2] if past_key is None else past_key.shape[2] + k.shape[2]
    out = heads_behind(q, k, v)
    return (
        out,
        k.new_empty(*k.shape[:2], total, k.shape[3]),
        v.new_empty(*v.shape[:2], total, v.shape[3]),
    )


@op(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks=None, *, int layer, "
    "float scale, bool causal=True, int? window=None, float? softcap=None) -> Tensor",
    heads_behind,
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None = None,
    *,
    layer: int,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of q (B, H, S, D) over this layer's implied cache and the new k, v (B, K, S, D).

    The cache is not an argument: `materialize-kv-cache` decides how it is kept. Run as it stands,
    the op sees an empty cache. `mask` (B, T) holds 1 for real tokens; None means all are. Scores
    are scaled, soft-capped (`softcap * tanh(x / softcap)`), masked, and joined by one learned sink
    logit a head. Returns (B, S, H, D of v).
    """
    out, _, _ = cached_attention.reference(
        q,
        k,
        v,
        None,
        None,
        mask if mask is None else mask[:, mask.shape[1] - k.shape[2] :],
        sinks,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
    )
    return out  # type: ignore[no-any-return]


@op(
    "cached_attention(Tensor q, Tensor k, Tensor v, Tensor? past_key, Tensor? past_value, "
    "Tensor? mask, Tensor? sinks=None, *, float scale, bool causal=True, int? window=None, "
    "float? softcap=None) -> (Tensor, Tensor, Tensor)",
    heads_and_cache,
)
def cached_attention(
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
    """`attention` with its cache in sight: past (B, K, P, D) in, present (B, K, P + S, D) out.

    A query of a row without any visible key (padding) yields 0.
    """
    key = k.clone() if past_key is None else torch.cat([past_key, k], 2)
    value = v.clone() if past_value is None else torch.cat([past_value, v], 2)
    if mask is None:
        mask = torch.ones_like(key[:, 0, :, 0], dtype=torch.int64)
    keep = visible(mask, q.shape[2], causal, window)
    return attend(q, key, value, keep, sinks, scale, softcap), key, value


def attend(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attention of q (B, H, S, D) over keys (B, K, T, D) that `keep` (B, 1, S, T) lets it see."""
    groups = q.shape[1] // key.shape[1]
    wide = key if groups == 1 else key.repeat_interleave(groups, 1)
    scores = torch.matmul(q, wide.transpose(2, 3)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
    if sinks is None:
        weights = F.softmax(scores, -1, dtype=torch.float32)
    else:
        column = sinks.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1).to(scores.dtype)
        joined = torch.cat([scores, column], -1)
        weights = F.softmax(joined, -1, dtype=torch.float32)[..., : key.shape[2]]
    weights = weights.masked_fill(~keep, 0.0).to(value.dtype)
    wide = value if groups == 1 else value.repeat_interleave(groups, 1)
    return torch.matmul(weights, wide).transpose(1, 2).contiguous()


def as_int8(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x (..., D) as int8 within ±127, and its scale: the one given, else one a row, fp32 (..., 1).

    A row's own scale is its largest magnitude / 127; a row of zeros has scale 0.
    """
    wide = x.float()
    if scale is None:
        scale = wide.abs().amax(-1, keepdim=True) / 127
    steps = torch.round(wide / torch.where(scale == 0, 1.0, scale.float()))
    return steps.clamp(-127, 127).to(torch.int8), scale


def for_cache(x: Tensor, cache: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """New keys or values (B, K, S, D) as a cache holds them, with their scales where it keeps any.

    `scale` is None, fixed per channel (K, 1, D), or a buffer with one a token (4 dimensions).
    """
    if scale is None:
        return x.to(cache.dtype), None
    if scale.dim() == 3:
        return as_int8(x, scale)[0], None
    return as_int8(x)


def from_cache(cache: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Cached keys or values in a floating type; int8 ones are widened by their scales."""
    return cache if scale is None else (cache.float() * scale.float()).to(dtype)


def heads_of_query(
    q: Tensor, k: Tensor | None, v: Tensor | None, _: Tensor, values: Tensor, *__: Any, **___: Any
) -> Tensor:
    """(B, S, H, D of the cached values), in the type of q: a cache may hold int8."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], values.shape[3])


@op(
    "static_attention(Tensor q, Tensor? k, Tensor? v, Tensor(a!) key_cache, Tensor(b!) "
    "value_cache, Tensor past, Tensor? mask, Tensor? sinks=None, Tensor(c!)? key_scale=None, "
    "Tensor(d!)? value_scale=None, *, float scale, bool causal=True, int? window=None, "
    "float? softcap=None) -> Tensor",
    heads_of_query,
)
def static_attention(
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
    """`attention` over buffers of a fixed size, (B, K, M, D), which it writes in place.

    k and v go to the slots from `past` on, int64 [1], which only the device reads: the shapes of a
    step are those of the step before it, so that a CUDA graph can replay it. Without k and v (a
    layer that reads another's cache) nothing is written; the new tokens are there. `mask` (B, M)
    is 0 behind the new tokens. Returns (B, S, H, D of v).

    int8 buffers come with fp32 scales: fixed ones per channel (K, 1, D), or one a token in a buffer
    (B, K, M, 1), written along with the tokens.
    """
    if k is not None and v is not None:
        slots = past + torch.arange(q.shape[2], device=q.device)
        for x, cache, scales in ((k, key_cache, key_scale), (v, value_cache, value_scale)):
            held, factors = for_cache(x, cache, scales)
            cache.index_copy_(2, slots, held)
            if factors is not None and scales is not None:
                scales.index_copy_(2, slots, factors.to(scales.dtype))
    if mask is None:
        mask = torch.ones_like(key_cache[:, 0, :, 0], dtype=torch.int64)
    keep = visible(mask, q.shape[2], causal, window, past)
    key = from_cache(key_cache, key_scale, q.dtype)
    value = from_cache(value_cache, value_scale, q.dtype)
    return attend(q, key, value, keep, sinks, scale, softcap)


@op(
    "paged_attention(Tensor q, Tensor? k, Tensor? v, Tensor(a!) key_pool, Tensor(b!) value_pool, "
    "Tensor block_table, Tensor lengths, Tensor? query_lengths=None, Tensor? sinks=None, "
    "Tensor(c!)? key_scale=None, Tensor(d!)? value_scale=None, *, float scale, bool causal=True, "
    "int? window=None, float? softcap=None) -> Tensor",
    heads_of_query,
)
def paged_attention(
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
    """`attention` over a cache in pages, which it writes in place, for sequences of any lengths.

    Pools (blocks, K, block, D) hold the pages of all sequences; `block_table`, int32 (B, pages),
    names those of each in order, -1 for none: such a slot is neither read nor written. `lengths`,
    int64 [B], is how many tokens each has cached before its new ones, `query_lengths`, int64 [B],
    how many of the S are real (None: all); the others yield 0 and are not written. There are no
    holes: a token's position is its slot. Without k and v nothing is written; the new tokens are
    there. Returns (B, S, H, D of v). Kwon et al. 2023.

    int8 pools come with fp32 scales: fixed ones per channel (K, 1, D), or one a token in a pool
    (blocks, K, block, 1), written along with the tokens.
    """
    new, block = q.shape[2], key_pool.shape[2]
    step = torch.arange(new, device=q.device)
    counts = torch.full_like(lengths, new) if query_lengths is None else query_lengths
    own = lengths.long()[:, None] + step  # (B, S)
    table = block_table.long()
    if k is not None and v is not None:
        page = (own // block).clamp(max=table.shape[1] - 1)
        page = table.gather(1, page).masked_fill(own >= table.shape[1] * block, -1)
        rows, tokens = torch.where((step < counts[:, None]) & (page >= 0))
        place = page[rows, tokens], slice(None), own[rows, tokens] % block
        for x, pool, scales in ((k, key_pool, key_scale), (v, value_pool, value_scale)):
            held, factors = for_cache(x, pool, scales)
            pool[place] = held[rows, :, tokens]
            if factors is not None and scales is not None:
                scales[place] = factors[rows, :, tokens].to(scales.dtype)
    slot = torch.arange(table.shape[1] * block, device=q.device)
    there = (table >= 0).repeat_interleave(block, 1)[:, None, :]
    keep = (there & (slot < (lengths + counts)[:, None, None])).expand(-1, new, -1)
    keep = keep & (step < counts[:, None])[:, :, None]
    if causal:
        keep = keep & (slot <= own[:, :, None])
    if window is not None:
        keep = keep & (own[:, :, None] - slot < window)

    def pages(pool: Tensor, scales: Tensor | None) -> Tensor:
        held = pool[table.clamp(min=0)]  # (B, pages, K, block, D)
        if scales is not None:
            per_token = scales.dim() == 4
            held = from_cache(held, scales[table.clamp(min=0)] if per_token else scales, q.dtype)
        held = held.transpose(1, 2).flatten(2, 3)
        return held.masked_fill(~keep.any(1)[:, None, :, None], 0.0)  # whatever a pool starts with

    key, value = pages(key_pool, key_scale), pages(value_pool, value_scale)
    return attend(q, key, value, keep[:, None], sinks, scale, softcap)


@op("rms_norm(Tensor x, Tensor? weight, float eps, bool cast_first=True) -> Tensor", like_first)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float, cast_first: bool = True) -> Tensor:
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dimension, computed in fp32.

    `cast_first` (Llama) rounds to x's dtype before the weight multiplies; else (Gemma) the product
    is taken in fp32 and rounded once. Zhang and Sennrich 2019.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return wide.to(x.dtype)
    if cast_first:
        return wide.to(x.dtype) * weight
    return (wide * weight.float()).to(x.dtype)


@op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, bool cast_first=True) "
    "-> (Tensor, Tensor)",
    norm_and_sum,
)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, cast_first: bool = True
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of `x + residual`; returns the norm, in x's type, and the sum, in the wider type.

    A residual in fp32 keeps what a half-precision x adds to it (`widen-residual`).
    """
    total = x + residual
    return normed_as(x.dtype, total, weight, eps, cast_first), total


def normed_as(
    dtype: torch.dtype, x: Tensor, weight: Tensor | None, eps: float, cast_first: bool
) -> Tensor:
    """`rms_norm` of x, which may be wider, in another type: that is what `cast_first` rounds to."""
    if cast_first or weight is None:
        normed: Tensor = rms_norm.reference(x, None, eps).to(dtype)
        return normed if weight is None else normed * weight
    normed = rms_norm.reference(x, weight, eps, False)
    return normed.to(dtype)


@op(
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) "
    "-> (Tensor, Tensor)",
    like_first_twice,
)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """LayerNorm over the last dimension of `x + residual`; returns the norm and the sum."""
    total = x + residual
    return F.layer_norm(total, (total.shape[-1],), weight, bias, eps), total


@op("rotary(Tensor x, Tensor cos, Tensor sin, bool interleaved=False) -> Tensor", like_first)
def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first 2·R elements of each head of x (B, H, S, D) by angles (B or 1, S, R).

    Element i is paired with i + R, or, `interleaved`, 2·i with 2·i + 1; the rest passes through.
    Su et al. 2021.
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        pairs = [first * cos - second * sin, second * cos + first * sin]
        turned = torch.stack(pairs, -1).flatten(-2)
    else:
        first, second = turned[..., :half], turned[..., half:]
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return turned if x.shape[-1] == 2 * half else torch.cat([turned, rest], -1)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@op('gated(Tensor gate, Tensor up, str activation="silu") -> Tensor', like_first)
def gated(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """`activation(gate) * up`, the gate of a gated MLP: silu, gelu, or gelu_tanh. Shazeer 2020."""
    return ACTIVATIONS[activation](gate) * up


@op("softmax(Tensor x, Tensor? mask=None) -> Tensor", like_first)
def softmax(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax over the last dimension of x, computed in fp32, of the elements that a mask keeps.

    `mask` is bool and broadcasts to x's shape. What it drops becomes 0, as does -inf; a row without
    any element left is 0, not NaN.
    """
    wide = x.float()
    if mask is not None:
        wide = wide.masked_fill(~mask, float("-inf"))
    top = wide.amax(-1, keepdim=True) if x.shape[-1] else wide.sum(-1, keepdim=True)
    powers = torch.exp(wide - top.masked_fill(top == float("-inf"), 0.0))
    total = powers.sum(-1, keepdim=True)
    return (powers / total.masked_fill(total == 0.0, 1.0)).to(x.dtype)


@op(
    "rotary_from_positions(Tensor q, Tensor k, Tensor positions, Tensor inv_freq, "
    "float scaling=1.0, bool interleaved=False) -> (Tensor, Tensor)",
    lambda q, k, *_, **__: (torch.empty_like(q), torch.empty_like(k)),
)
def rotary_from_positions(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    scaling: float = 1.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """`rotary` of q (B, H, S, D) and k (B, K, S, D) by angles computed here, with no table.

    Angles are `positions * inv_freq` in fp32: int64 (B or 1, S) times fp32 (R), R at most D / 2.
    cos and sin are multiplied by `scaling` (yarn, longrope) and rounded to the type of q. Every
    rope type comes down to its `inv_freq` and `scaling`. Su et al. 2021.
    """
    angles = positions[:, :, None].float() * inv_freq.float()
    cos, sin = (angles.cos() * scaling).to(q.dtype), (angles.sin() * scaling).to(q.dtype)
    return (
        rotary.reference(q, cos, sin, interleaved),
        rotary.reference(k, cos, sin, interleaved),
    )


def linear_behind(x: Tensor, _: Tensor | None, weight: Tensor, *__: Any, **___: Any) -> Tensor:
    """(..., rows of weight), in the type of weight."""
    return weight.new_empty(*x.shape[:-1], weight.shape[0])


@op(
    "rms_norm_linear(Tensor x, Tensor? norm_weight, Tensor weight, Tensor? bias, float eps, "
    "bool cast_first=True, str? activation=None) -> Tensor",
    linear_behind,
)
def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    cast_first: bool = True,
    activation: str | None = None,
) -> Tensor:
    """`activation(rms_norm(x) @ weight.T + bias)`: x (..., K), weight (N, K), bias (N).

    `norm_weight` (K), `eps` and `cast_first` are those of `rms_norm`; activation is None or silu.
    The norm is rounded to the type of weight, which may be narrower than x's.
    """
    normed = normed_as(weight.dtype, x, norm_weight, eps, cast_first)
    out = F.linear(normed, weight, bias)
    return out if activation is None else ACTIVATIONS[activation](out)


@op(
    "linear_silu(Tensor x, Tensor weight, Tensor? bias=None, bool gated=False) -> Tensor",
    lambda x, weight, bias=None, gated=False: x.new_empty(
        *x.shape[:-1], weight.shape[0] // (2 if gated else 1)
    ),
)
def linear_silu(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, gated: bool = False
) -> Tensor:
    """`silu(x @ weight.T + bias)`: x (..., K), weight (N, K), bias (N), result (..., N).

    `gated`: the first N / 2 rows of weight give the gate, the others up; the result is
    `silu(gate) * up`, (..., N / 2). Shazeer 2020.
    """
    out = F.linear(x, weight, bias)
    if not gated:
        return F.silu(out)
    gate, up = out.chunk(2, -1)
    return F.silu(gate) * up


def dequantize(
    packed: Tensor, scales: Tensor, zero_points: Tensor | None, bits: int, width: int
) -> Tensor:
    """Rows of a quantized matrix in full, (N, width), in the type of its scales.

    `packed` is uint8 (N, G, g * bits / 8), groups of g elements of 2, 4 or 8 bits, low bits first;
    scales (N, G); `zero_points` uint8 (N, ceil(G * bits / 8)), packed likewise, absent 2^(bits-1).
    The layout is that of onnxruntime's MatMulNBits; width is at most G * g.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)

    def unpacked(data: Tensor) -> Tensor:
        parts: Tensor = (data[..., None] >> shifts) & (2**bits - 1)
        return parts.flatten(-2).float()

    values = unpacked(packed)
    if zero_points is None:
        values = values - 2 ** (bits - 1)
    else:
        values = values - unpacked(zero_points)[:, : packed.shape[1], None]
    wide = (values * scales[..., None].float()).flatten(1)[:, :width]
    return wide.to(scales.dtype).contiguous()


@op(
    "quantized_embedding(Tensor ids, Tensor packed, Tensor scales, Tensor? zero_points=None, *, "
    "int bits, int width) -> Tensor",
    lambda ids, packed, scales, *_, width, **__: scales.new_empty(*ids.shape, width),
)
def quantized_embedding(
    ids: Tensor,
    packed: Tensor,
    scales: Tensor,
    zero_points: Tensor | None = None,
    *,
    bits: int,
    width: int,
) -> Tensor:
    """Rows of a quantized table by integer ids of any shape: (..., width), in the scales' type.

    The table's tensors are as `dequantize` has them; only the rows that are asked for are widened.
    """
    rows = ids.flatten()
    zeros = None if zero_points is None else zero_points[rows]
    wide = dequantize(packed[rows], scales[rows], zeros, bits, width)
    return wide.view(*ids.shape, width)


@op(
    "quantized_linear(Tensor x, Tensor packed, Tensor scales, Tensor? zero_points=None, "
    "Tensor? bias=None, *, int bits) -> Tensor",
    lambda x, packed, *_, **__: x.new_empty(*x.shape[:-1], packed.shape[0]),
)
def quantized_linear(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zero_points: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    bits: int,
) -> Tensor:
    """`x @ weight.T + bias` by a weight that is stored quantized: x (..., K), result (..., N).

    The weight's tensors are as `dequantize` has them, K its width; it is rounded to the type of x.
    """
    weight = dequantize(packed, scales, zero_points, bits, x.shape[-1])
    return F.linear(x, weight.to(x.dtype), bias)


@op(
    "int8_linear(Tensor x, Tensor weight, Tensor scales, Tensor? bias=None, Tensor? x_scale=None) "
    "-> Tensor",
    lambda x, weight, *_, **__: x.new_empty(*x.shape[:-1], weight.shape[0]),
)
def int8_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T + bias` in int8: x (..., K) is rounded as `as_int8` has it, row by row.

    `weight` is int8 (N, K) with one scale a row, (N); `x_scale`, fp32 [1], is a scale for all of x
    that was calibrated, instead of one a row. Products are summed in integers.
    """
    held, factors = as_int8(x, x_scale)
    total = held.double() @ weight.double().t()  # exact: integers below 2 ** 53
    out = total.float() * factors.float() * scales.float()
    return (out if bias is None else out + bias.float()).to(x.dtype)


@op(
    "fp8_linear(Tensor x, Tensor weight, Tensor scales, Tensor? bias=None, *, "
    "bool quantize=False) -> Tensor",
    lambda x, weight, *_, **__: x.new_empty(*x.shape[:-1], weight.shape[0]),
)
def fp8_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    quantize: bool = False,
) -> Tensor:
    """`x @ weight.T + bias` by a weight in fp8: x (..., K), result (..., N), summed in fp32.

    `weight` is float8_e4m3fn or float8_e5m2 (N, K), `scales` one a row (N) or one for all [1].
    `quantize` rounds x to the weight's type as well, each row by its largest magnitude; else x
    keeps its own. Micikevicius et al. 2022.
    """
    wide = x.float()
    factors = torch.ones_like(wide[..., :1])
    if quantize:
        factors = wide.abs().amax(-1, keepdim=True) / torch.finfo(weight.dtype).max
        wide = (wide / torch.where(factors == 0, 1.0, factors)).to(weight.dtype).float()
    out = wide @ weight.float().t() * factors * scales.float()
    return (out if bias is None else out + bias.float()).to(x.dtype)


@op("last_tokens(Tensor x, Tensor mask, Tensor n) -> Tensor")
def last_tokens(x: Tensor, mask: Tensor, n: Tensor) -> Tensor:
    """Each row's own last n real columns of x (B, S, W): (B, n, W); n = 0 keeps all S.

    The last S columns of `mask` (B, T) tell how many of a row's columns are real; n is int64 [1].
    """
    keep = int(n) or x.shape[1]
    length = mask[:, mask.shape[1] - x.shape[1] :].sum(1, keepdim=True)
    if int(n) == 0:
        length = torch.full_like(length, x.shape[1])
    columns = (length - keep + torch.arange(keep, device=x.device)).clamp(min=0)
    return x.gather(1, columns[:, :, None].expand(-1, -1, x.shape[2]))


def _last_tokens_shape(x: Tensor, mask: Tensor, n: Tensor) -> Tensor:
    rows = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(x.shape[0], rows, x.shape[2])


torch.library.register_fake(
    "qopt::last_tokens", _last_tokens_shape, lib=_LIBRARY, allow_override=True
)


@op(
    "experts(Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor? up_bias, Tensor down, "
    'Tensor? down_bias, *, str activation, str layout="concatenated", bool transposed=False, '
    "float alpha=1.0, float? limit=None, float up_offset=0.0) -> Tensor",
    like_first,
)
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
    """The experts of a mixture: x (tokens, W) through the chosen ids by weights (tokens, top).

    `up` (E, 2·I, W) holds gate and up rows one after the other (`concatenated`), alternating
    (`interleaved`), or (E, I, W) without a gate (`single`); `transposed` swaps the last two
    dimensions of both matrices. Gate is clamped to `limit`, up to ±`limit`;
    `act(gate) * (up + up_offset)` with act = gate * sigmoid(alpha * gate) for `swish`. Each chosen
    expert's output times its weight is summed over the choices.
    """
    hidden = torch.zeros_like(x)
    if transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    for expert in range(up.shape[0]):
        share = (weights * (ids == expert)).sum(1, keepdim=True).to(x.dtype)
        inner = F.linear(x, up[expert], None if up_bias is None else up_bias[expert])
        inner = expert_gate(inner, activation, layout, alpha, limit, up_offset)
        out = F.linear(inner, down[expert], None if down_bias is None else down_bias[expert])
        hidden = hidden + out * share
    return hidden


def expert_gate(
    inner: Tensor, activation: str, layout: str, alpha: float, limit: float | None, offset: float
) -> Tensor:
    """What stands between an expert's two matrices."""
    if layout == "single":
        return ACTIVATIONS[activation](inner)
    if layout == "interleaved":
        gate, up = inner[..., 0::2], inner[..., 1::2]
    else:
        gate, up = inner.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    swish = activation == "swish"
    act = gate * torch.sigmoid(gate * alpha) if swish else ACTIVATIONS[activation](gate)
    return act * (up + offset) if offset else act * up
