"""What `qopt kernels bench` runs: calls of dialect ops at the sizes of real models, with peers.

A peer computes the same, as torch's users write it (`eager`, and what torch.compile gets) or as
Liger-Kernel has it. Shapes are those of ops.py: B batch, S new tokens, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qopt import ops

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
EPS = 1e-5


@dataclass(frozen=True)
class Peer:
    """The same computation elsewhere.

    `prepare` makes of the op's arguments what `call` is given; its time does not count (a weight
    dequantized beforehand, a table of angles).
    """

    call: Callable[..., Any]
    prepare: Callable[..., tuple[Any, ...]] = lambda *args, **kwargs: args


@dataclass(frozen=True)
class Case:
    """One call of an op.

    `flops` counts multiplications and additions of products of matrices, nothing else; `untouched`
    the bytes of arguments, and of those written to a second time, that no implementation needs to
    move. `reduced` is the length of the
    longest sum in fp32 and `rounded` of the longest chain of roundings to the type; both widen the
    tolerance.
    """

    op: str
    name: str
    arguments: Callable[[torch.Generator, torch.device], Arguments]
    eager: Peer
    compiled: Peer | None = None  # what torch.compile is given; None: `eager`
    liger: Peer | None = None
    flops: int = 0
    untouched: int = 0
    reduced: int = 1
    rounded: int = 1


class Random:
    """Random tensors of one type on one device."""

    def __init__(self, generator: torch.Generator, device: torch.device, dtype: torch.dtype):
        self.generator, self.device, self.dtype = generator, device, dtype

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal values with this standard deviation."""
        made = torch.randn(shape, generator=self.generator, device=self.device) * scale
        return made.to(self.dtype)

    def integers(
        self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64
    ) -> Tensor:
        """Integers from `low` to below `high`."""
        return torch.randint(
            low, high, shape, generator=self.generator, device=self.device, dtype=dtype
        )


def liger(name: str) -> Callable[..., Any] | None:
    """A function of Liger-Kernel; None where it is not installed or has no such function."""
    if find_spec("liger_kernel") is None:
        return None
    from liger_kernel.transformers import functional

    found: Callable[..., Any] | None = getattr(functional, name, None)
    return found


def _liger(name: str, prepare: Callable[..., tuple[Any, ...]], **fixed: Any) -> Peer | None:
    function = liger(name)
    if function is None:
        return None
    return Peer(lambda *args: function(*args, **fixed), prepare)


# --- norms, gates, softmax -------------------------------------------------------------------


def rms_norm(dtype: torch.dtype, *, tokens: int, width: int) -> Case:
    """RMSNorm of `tokens` rows."""

    def arguments(generator: torch.Generator, device: torch.device) -> Arguments:
        new = Random(generator, device, dtype)
        return (new.normal(tokens, width), new.normal(width), EPS), {}

    return Case(
        "rms_norm",
        f"{tokens} x {width}",
        arguments,
        Peer(lambda x, weight, eps: F.rms_norm(x, x.shape[-1:], weight, eps)),
        liger=_liger("liger_rms_norm", lambda *args: args, in_place=False),
        reduced=width,
    )


def add_rms_norm(dtype: torch.dtype, *, tokens: int, width: int) -> Case:
    """A residual added, then RMSNorm."""

    def arguments(generator: torch.Generator, device: torch.device) -> Arguments:
        new = Random(generator, device, dtype)
        x, residual = new.normal(tokens, width), new.normal(tokens, width)
        return (x, residual, new.normal(width), EPS), {}

    def eager(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, x.shape[-1:], weight, eps), total

    return Case(
        "add_rms_norm",
        f"{tokens} x {width}",
        arguments,
        Peer(eager),
        liger=_liger("liger_fused_add_rms_norm", lambda *args: args, in_place=False),
        reduced=width,
    )


def gated(dtype: torch.dtype, *, tokens: int, width: int) -> Case:
    """The gate of a SwiGLU MLP."""

    def arguments(generator: torch.Generator, device: torch.device) -> Arguments:
        new = Random(generator, device, dtype)
        return (new.normal(tokens, width), new.normal(tokens, width)), {}

    return Case(
        "gated",
        f"{tokens} x {width}",
        arguments,
        Peer(lambda gate, up: F.silu(gate) * up),
        liger=_liger("liger_swiglu", lambda *args: args),
    )


def softmax(dtype: torch.dtype, *, tokens: int, width: int) -> Case:
    """Softmax of `tokens` rows."""

    def arguments(generator: torch.Generator, device: torch.device) -> Arguments:
        return (Random(generator, device, dtype).normal(tokens, width),), {}

    return Case(
        "softmax",
        f"{tokens} x {width}",
        arguments,
        Peer(lambda x: F.softmax(x, -1)),
        liger=_liger("liger_softmax", lambda *args: args),
        reduced=width,
    )


def rotary_from_positions(
    dtype: torch.dtype, *, tokens: int, heads: int, kv_heads: int, size: int
) -> Case:
    """Rotation of queries and keys, behind a projection: (B, S, H, D) in memory."""

    def arguments(generator: torch.Generator, device: torch.device) -> Arguments:
        new = Random(generator, device, dtype)
        q, k = (new.normal(1, tokens, n, size).transpose(1, 2) for n in (heads, kv_heads))
        powers = torch.arange(0, size, 2, device=device).float() / size
        positions = torch.arange(tokens, device=device)[None]
        return (q, k, positions, 10000.0**-powers), {}

    def table(q: Tensor, k: Tensor, positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, ...]:
        angles = (positions[:, :, None].float() * inv_freq).repeat(1, 1, 2)
        return q, k, angles.cos().to(q.dtype), angles.sin().to(q.dtype)

    return Case(
        "rotary_from_positions",
        f"{tokens} x {heads}+{kv_heads} heads of {size}",
        arguments,
        Peer(ops.rotary_from_positions.reference),
        liger=_liger("liger_rope", table),
    )


# --- products --------------------------------------------------------------------------------


def rms_norm_linear(dtype: torch.dtype, *, tokens: int, width: int, outputs: int) -> Case:
    """A norm and the projection behind it."""

    def arguments(generator: torch.Generator, device: torch.device) -> Arguments:
        new = Random(generator, device, dtype)
        weight = new.normal(outputs, width, scale=width**-0.5)
        return (new.normal(tokens, width), new.normal(width), weight, None, EPS), {}

    def eager(x: Tensor, norm: Tensor, weight: Tensor, bias: None, eps: float) -> Tensor:
        return F.linear(F.rms_norm(x, x.shape[-1:], norm, eps), weight, bias)

    return Case(
        "rms_norm_linear",
        f"{tokens} x {width} -> {outputs}",
        arguments,
        Peer(eager),
        flops=2 * tokens * width * outputs,
        reduced=width,
    )


def linear_silu(dtype: torch.dtype, *, tokens: int, width: int, outputs: int) -> Case:
    """Gate and up of an MLP in one product, and the gate behind it."""

    def arguments(generator: torch.Generator, device: torch.device) -> Arguments:
        new = Random(generator, device, dtype)
        weight = new.normal(2 * outputs, width, scale=width**-0.5)
        return (new.normal(tokens, width), weight, None, True), {}

    def eager(x: Tensor, weight: Tensor, bias: None, gated: bool) -> Tensor:
        gate, up = F.linear(x, weight).chunk(2, -1)
        return F.silu(gate) * up

    return Case(
        "linear_silu",
        f"{tokens} x {width} -> 2 x {outputs}",
        arguments,
        Peer(eager),
        flops=4 * tokens * width * outputs,
        reduced=width,
        rounded=3,
    )


def packed_weight(new: Random, outputs: int, width: int, bits: int, group: int) -> list[Tensor]:
    """A quantized weight and its scales, such that its values are about `width**-0.5`."""
    packed = new.integers(0, 256, outputs, -(-width // group), group * bits // 8, dtype=torch.uint8)
    spread = 2**bits / 12**0.5  # of integers, each as likely as another
    scales = new.normal(*packed.shape[:2], scale=width**-0.5 / spread)
    return [packed, scales]


def quantized_linear(
    dtype: torch.dtype, *, tokens: int, width: int, outputs: int, bits: int, group: int = 128
) -> Case:
    """A projection by a quantized weight; torch's rate is that of the weight in full."""

    def arguments(generator: torch.Generator, device: torch.device) -> Arguments:
        new = Random(generator, device, dtype)
        weight = packed_weight(new, outputs, width, bits, group)
        return (new.normal(tokens, width), *weight), {"bits": bits}

    def widened(x: Tensor, packed: Tensor, scales: Tensor, *, bits: int) -> tuple[Tensor, Tensor]:
        return x, ops.dequantize(packed, scales, None, bits, x.shape[-1])

    def whole(x: Tensor, packed: Tensor, scales: Tensor, *, bits: int) -> tuple[Any, ...]:
        return x, packed, scales, bits

    return Case(
        "quantized_linear",
        f"{tokens} x {width} -> {outputs}, {bits} bits",
        arguments,
        Peer(F.linear, widened),
        compiled=Peer(
            lambda x, packed, scales, bits: ops.quantized_linear.reference(
                x, packed, scales, bits=bits
            ),
            whole,
        ),
        flops=2 * tokens * width * outputs,
        reduced=width,
    )


def int8_linear(dtype: torch.dtype, *, tokens: int, width: int, outputs: int) -> Case:
    """A product of integers; torch's rate is that of the same numbers in full."""

    def arguments(generator: torch.Generator, device: torch.device) -> Arguments:
        new = Random(generator, device, dtype)
        weight = new.integers(-127, 128, outputs, width, dtype=torch.int8)
        scales = new.normal(outputs, scale=width**-0.5 / 73).abs()  # 73: of the integers
        return (new.normal(tokens, width), weight, scales), {}

    def widened(x: Tensor, weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        held, factors = ops.as_int8(x)
        whole = weight.float() * scales.float()[:, None]
        return (held.float() * factors.float()).to(dtype), whole.to(dtype)

    def fused(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        held, factors = ops.as_int8(x)
        # integers up to 127 are exact in any of the types; _int_mm takes no fewer rows
        few = F.linear(held.to(dtype), weight.to(dtype)) if tokens <= 16 else None
        total = torch._int_mm(held, weight.t()) if few is None else few
        return (total.float() * factors.float() * scales.float()).to(dtype)

    return Case(
        "int8_linear",
        f"{tokens} x {width} -> {outputs}",
        arguments,
        Peer(F.linear, widened),
        compiled=Peer(fused),
        flops=2 * tokens * width * outputs,
        reduced=width,
        rounded=2,  # peers round operands
    )


def fp8_linear(dtype: torch.dtype, *, tokens: int, width: int, outputs: int, quantize: int) -> Case:
    """A product by a weight in fp8, of x as it is or in fp8 too (`quantize`)."""

    def arguments(generator: torch.Generator, device: torch.device) -> Arguments:
        new = Random(generator, device, dtype)
        weight = new.normal(outputs, width).to(torch.float8_e4m3fn)
        scales = new.normal(outputs, scale=width**-0.5).abs()
        return (new.normal(tokens, width), weight, scales), {"quantize": bool(quantize)}

    def rounded(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        if not quantize:
            return x, torch.ones_like(x[:, :1], dtype=torch.float32)
        factors = x.float().abs().amax(-1, keepdim=True) / torch.finfo(weight.dtype).max
        return (x.float() / factors).to(weight.dtype).to(dtype), factors  # exact in 16 bits

    def widened(x: Tensor, weight: Tensor, scales: Tensor, **_: bool) -> tuple[Tensor, Tensor]:
        held, factors = rounded(x, weight)
        whole = weight.float() * scales.float()[:, None]
        return (held.float() * factors).to(dtype), whole.to(dtype)

    def fused(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        held, factors = rounded(x, weight)
        total = F.linear(held, weight.to(dtype)).float()
        return (total * factors * scales.float()).to(dtype)

    return Case(
        "fp8_linear",
        f"{tokens} x {width} -> {outputs}{', x too' if quantize else ''}",
        arguments,
        Peer(F.linear, widened),
        compiled=Peer(fused, lambda *args, **_: args),
        flops=2 * tokens * width * outputs,
        reduced=width,
        rounded=2,  # peers round operands
    )


def quantized_embedding(
    dtype: torch.dtype, *, tokens: int, width: int, rows: int, bits: int, group: int = 128
) -> Case:
    """Rows of a quantized table; eagerly, of the table in full."""
    group = min(group, width)

    def arguments(generator: torch.Generator, device: torch.device) -> Arguments:
        new = Random(generator, device, dtype)
        table = packed_weight(new, rows, width, bits, group)
        return (new.integers(0, rows, 1, tokens), *table), {"bits": bits, "width": width}

    def widened(ids: Tensor, packed: Tensor, scales: Tensor, **options: int) -> tuple[Any, ...]:
        return ids, ops.dequantize(packed, scales, None, options["bits"], options["width"])

    def reference(ids: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
        found: Tensor = ops.quantized_embedding.reference(
            ids, packed, scales, bits=bits, width=width
        )
        return found

    row = -(-width // group) * (group * bits // 8 + dtype.itemsize)
    return Case(
        "quantized_embedding",
        f"{tokens} of {rows} x {width}, {bits} bits",
        arguments,
        Peer(F.embedding, widened),
        compiled=Peer(reference, lambda *args, **_: args),
        untouched=max(0, rows - tokens) * row,
    )


# --- attention and experts -------------------------------------------------------------------


def cached_attention(
    dtype: torch.dtype, *, tokens: int, past: int, heads: int, kv_heads: int, size: int
) -> Case:
    """New tokens over a contiguous cache, which the op returns longer."""

    def arguments(generator: torch.Generator, device: torch.device) -> Arguments:
        new = Random(generator, device, dtype)
        q = new.normal(1, heads, tokens, size)
        k, v = (new.normal(1, kv_heads, tokens, size) for _ in range(2))
        caches = [new.normal(1, kv_heads, past, size) if past else None for _ in range(2)]
        return (q, k, v, *caches, None), {"scale": size**-0.5}

    def eager(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past_key: Tensor | None,
        past_value: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        key = k.clone() if past_key is None else torch.cat([past_key, k], 2)
        value = v.clone() if past_value is None else torch.cat([past_value, v], 2)
        out = F.scaled_dot_product_attention(
            q, key, value, is_causal=tokens > 1, scale=size**-0.5, enable_gqa=heads > kv_heads
        )
        return out.transpose(1, 2).contiguous(), key, value

    if past and tokens > 1:  # torch's causal mask begins at the first key, not behind the past
        raise ValueError("a case has a past or several tokens, not both")
    seen = tokens * (tokens + 1) // 2 + tokens * past
    return Case(
        "cached_attention",
        f"{tokens} after {past}, {heads}/{kv_heads} heads of {size}",
        arguments,
        Peer(eager, lambda *args, **_: args[:5]),
        flops=4 * heads * size * seen,
        reduced=past + tokens,
        rounded=2,  # the reference rounds scores and weights
    )


def static_attention(
    dtype: torch.dtype, *, tokens: int, past: int, room: int, heads: int, kv_heads: int, size: int
) -> Case:
    """New tokens over buffers of a fixed size, written in place."""

    def arguments(generator: torch.Generator, device: torch.device) -> Arguments:
        new = Random(generator, device, dtype)
        q = new.normal(1, heads, tokens, size)
        k, v = (new.normal(1, kv_heads, tokens, size) for _ in range(2))
        caches = [new.normal(1, kv_heads, room, size) for _ in range(2)]
        mask = (torch.arange(room, device=device) < past + tokens).long()[None]
        behind = torch.tensor([past], device=device)
        return (q, k, v, *caches, behind, mask), {"scale": size**-0.5}

    def eager(
        q: Tensor, k: Tensor, v: Tensor, key: Tensor, value: Tensor, behind: Tensor, mask: Tensor
    ) -> Tensor:
        slots = behind + torch.arange(tokens, device=q.device)
        key.index_copy_(2, slots, k)
        value.index_copy_(2, slots, v)
        keep = mask.bool()[:, None, None] & (
            torch.arange(room, device=q.device)[None] <= slots[:, None]
        )
        out = F.scaled_dot_product_attention(
            q, key, value, keep, scale=size**-0.5, enable_gqa=heads > kv_heads
        )
        return out.transpose(1, 2).contiguous()

    seen = tokens * (tokens + 1) // 2 + tokens * past
    return Case(
        "static_attention",
        f"{tokens} after {past} of {room}, {heads}/{kv_heads} heads of {size}",
        arguments,
        Peer(eager, lambda *args, **_: args),
        flops=4 * heads * size * seen,
        untouched=2 * kv_heads * size * dtype.itemsize * (2 * room - past - tokens),
        reduced=past + tokens,
        rounded=2,  # the reference rounds scores and weights
    )


def paged_attention(
    dtype: torch.dtype,
    *,
    batch: int,
    tokens: int,
    past: int,
    block: int,
    heads: int,
    kv_heads: int,
    size: int,
) -> Case:
    """New tokens of several sequences of one length over pages that lie in no order."""
    pages = -(-(past + tokens) // block)

    def arguments(generator: torch.Generator, device: torch.device) -> Arguments:
        new = Random(generator, device, dtype)
        q = new.normal(batch, heads, tokens, size)
        k, v = (new.normal(batch, kv_heads, tokens, size) for _ in range(2))
        pools = [new.normal(batch * pages, kv_heads, block, size) for _ in range(2)]
        order = torch.randperm(batch * pages, generator=generator, device=device)
        table, lengths = order.int().view(batch, pages), torch.full((batch,), past, device=device)
        return (q, k, v, *pools, table, lengths), {"scale": size**-0.5}

    def eager(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        block_table: Tensor,
        lengths: Tensor,
    ) -> Tensor:
        table = block_table.long()
        own = lengths[:, None] + torch.arange(tokens, device=q.device)
        page = table.gather(1, own // block)
        for x, pool in ((k, key_pool), (v, value_pool)):
            pool[page, :, own % block] = x.transpose(1, 2)
        key, value = (pool[table].transpose(1, 2).flatten(2, 3) for pool in (key_pool, value_pool))
        keep = torch.arange(pages * block, device=q.device) <= own[:, :, None]
        out = F.scaled_dot_product_attention(
            q, key, value, keep[:, None], scale=size**-0.5, enable_gqa=heads > kv_heads
        )
        return out.transpose(1, 2).contiguous()

    seen = tokens * (tokens + 1) // 2 + tokens * past
    slots = 2 * batch * pages * block - batch * (past + tokens)
    return Case(
        "paged_attention",
        f"{batch} x {tokens} after {past}, {heads}/{kv_heads} heads of {size}",
        arguments,
        Peer(eager, lambda *args, **_: args),
        flops=4 * batch * heads * size * seen,
        untouched=2 * kv_heads * size * dtype.itemsize * slots,
        reduced=past + tokens,
        rounded=2,  # the reference rounds scores and weights
    )


def experts(
    dtype: torch.dtype, *, tokens: int, width: int, inner: int, count: int, top: int
) -> Case:
    """The experts of a mixture, each token through `top` of `count`."""

    def arguments(generator: torch.Generator, device: torch.device) -> Arguments:
        new = Random(generator, device, dtype)
        scores = torch.rand(tokens, count, generator=generator, device=device)
        shares, ids = scores.softmax(1).topk(top, 1)
        up = new.normal(count, 2 * inner, width, scale=width**-0.5)
        down = new.normal(count, width, inner, scale=inner**-0.5)
        x = new.normal(tokens, width)
        return (x, ids, shares.to(dtype), up, None, down, None), {"activation": "silu"}

    def eager(x: Tensor, ids: Tensor, shares: Tensor, up: Tensor, down: Tensor) -> Tensor:
        order = ids.flatten().argsort(stable=True)
        ends = (ids.flatten()[:, None] == torch.arange(count, device=x.device)).sum(0).cumsum(0)
        ends = ends.to(torch.int32)
        both = F.grouped_mm(x[order // top], up.transpose(1, 2), offs=ends)
        gate, side = both.chunk(2, -1)
        out = F.grouped_mm(F.silu(gate) * side, down.transpose(1, 2), offs=ends)
        out = out * shares.flatten()[order, None]
        return torch.zeros_like(x).index_add_(0, order // top, out)

    idle = max(0, count - tokens * top)
    return Case(
        "experts",
        f"{tokens} x {width}, {top} of {count} experts of {inner}",
        arguments,
        Peer(eager, lambda x, ids, shares, up, _, down, __, **___: (x, ids, shares, up, down)),
        flops=6 * tokens * top * width * inner,
        untouched=idle * 3 * width * inner * dtype.itemsize,
        reduced=max(width, inner),
        rounded=top + 2,  # the reference adds up one expert after the other
    )


LLAMA = {"heads": 32, "kv_heads": 8, "size": 128}
SIZES: list[tuple[Callable[..., Case], list[dict[str, int]]]] = [
    (
        rms_norm,
        [
            {"tokens": 1, "width": 4096},
            {"tokens": 512, "width": 576},
            {"tokens": 4096, "width": 2048},
            {"tokens": 4096, "width": 4096},
            {"tokens": 4096, "width": 8192},
        ],
    ),
    (
        add_rms_norm,
        [
            {"tokens": 1, "width": 4096},
            {"tokens": 512, "width": 576},
            {"tokens": 4096, "width": 4096},
            {"tokens": 4096, "width": 8192},
        ],
    ),
    (
        gated,
        [
            {"tokens": 1, "width": 14336},
            {"tokens": 512, "width": 1536},
            {"tokens": 4096, "width": 14336},
        ],
    ),
    (softmax, [{"tokens": 512, "width": 512}, {"tokens": 4096, "width": 8192}]),
    (
        rotary_from_positions,
        [
            {"tokens": 1, **LLAMA},
            {"tokens": 512, "heads": 9, "kv_heads": 3, "size": 64},
            {"tokens": 4096, **LLAMA},
        ],
    ),
    (
        rms_norm_linear,
        [
            {"tokens": 1, "width": 4096, "outputs": 6144},
            {"tokens": 512, "width": 2048, "outputs": 3072},
            {"tokens": 4096, "width": 4096, "outputs": 6144},
        ],
    ),
    (
        linear_silu,
        [
            {"tokens": 1, "width": 4096, "outputs": 14336},
            {"tokens": 512, "width": 576, "outputs": 1536},
            {"tokens": 4096, "width": 4096, "outputs": 14336},
        ],
    ),
    (
        quantized_linear,
        [
            {"tokens": 1, "width": 4096, "outputs": 14336, "bits": 4},
            {"tokens": 1, "width": 4096, "outputs": 14336, "bits": 8},
            {"tokens": 512, "width": 4096, "outputs": 14336, "bits": 4},
        ],
    ),
    (
        int8_linear,
        [
            {"tokens": 1, "width": 4096, "outputs": 14336},
            {"tokens": 512, "width": 4096, "outputs": 14336},
        ],
    ),
    (
        fp8_linear,
        [
            {"tokens": 1, "width": 4096, "outputs": 14336, "quantize": 0},
            {"tokens": 512, "width": 4096, "outputs": 14336, "quantize": 0},
            {"tokens": 512, "width": 4096, "outputs": 14336, "quantize": 1},
        ],
    ),
    (
        quantized_embedding,
        [
            {"tokens": 1, "width": 4096, "rows": 128256, "bits": 4},
            {"tokens": 4096, "width": 4096, "rows": 128256, "bits": 8},
        ],
    ),
    (
        cached_attention,
        [
            {"tokens": 1, "past": 512, "heads": 9, "kv_heads": 3, "size": 64},
            {"tokens": 1, "past": 4096, **LLAMA},
            {"tokens": 512, "past": 0, "heads": 9, "kv_heads": 3, "size": 64},
            {"tokens": 4096, "past": 0, **LLAMA},
        ],
    ),
    (
        static_attention,
        [
            {"tokens": 1, "past": 512, "room": 1024, "heads": 9, "kv_heads": 3, "size": 64},
            {"tokens": 1, "past": 4095, "room": 8192, **LLAMA},
            {"tokens": 512, "past": 0, "room": 1024, **LLAMA},
        ],
    ),
    (
        paged_attention,
        [
            {"batch": batch, "tokens": tokens, "past": past, "block": 16, **LLAMA}
            for batch, tokens, past in ((1, 1, 512), (16, 1, 2047), (1, 512, 0))
        ],
    ),
    (
        experts,
        [
            {"tokens": 1, "width": 2048, "inner": 1024, "count": 64, "top": 8},
            {"tokens": 512, "width": 2048, "inner": 1024, "count": 64, "top": 8},
            {"tokens": 4096, "width": 4096, "inner": 14336, "count": 8, "top": 2},
        ],
    ),
]


def cases(dtype: torch.dtype, at_most: Mapping[str, int] | None = None) -> list[Case]:
    """All cases in one floating type; `at_most` lowers sizes by name, for tests."""
    limit = at_most or {}
    return [
        make(dtype, **{name: min(size, limit.get(name, size)) for name, size in sizes.items()})
        for make, table in SIZES
        for sizes in table
    ]
