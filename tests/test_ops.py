"""The dialect: each reference against torch written out, and against its shape function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from qopt.ops import OPS

OPERATIONS: Any = torch.ops.qopt


def eager_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of transformers' eager code, in fp64: scale, cap, mask, sink, softmax."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = (
        q.double(),
        k.double().repeat_interleave(groups, 1),
        v.double().repeat_interleave(groups, 1),
    )
    scores = q @ k.transpose(2, 3) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~keep, float("-inf"))
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2)


def heads(new: int, past: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, 4, new, 8), (2, 2, new, 8), (2, 2, new, 8), (2, 2, past, 8), (2, 2, past, 8)]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 100])
@pytest.mark.parametrize(("new", "past"), [(5, 0), (2, 3), (1, 7), (4, 4)])
def test_causal_and_window(window: int | None, new: int, past: int) -> None:
    """A04, B08: query i of S over T keys sees keys up to T - S + i, and W of them with a window."""
    q, k, v, past_k, past_v = heads(new, past)
    total = new + past
    mask = torch.ones(2, total, dtype=torch.int64)
    i, j = torch.arange(past, total)[:, None], torch.arange(total)[None]
    keep = (j <= i) & (i - j < window if window is not None else True)
    out, key, value = OPERATIONS.cached_attention(
        q, k, v, past_k, past_v, mask, scale=0.3, window=window
    )
    assert torch.equal(key, torch.cat([past_k, k], 2))
    assert torch.equal(value, torch.cat([past_v, v], 2))
    want = eager_attention(q, key, value, keep, 0.3)
    torch.testing.assert_close(out.double(), want, atol=1e-6, rtol=1e-5)


def test_window_rows_of_hf() -> None:
    """B08: window 4, 10 tokens: keys seen a row are 1, 2, 3, 4, 4, ..."""
    from qopt.ops import visible

    seen = visible(torch.ones(1, 10, dtype=torch.int64), 10, True, 4)
    assert seen.sum(-1).flatten().tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]


def test_a_window_counts_tokens_and_not_holes() -> None:
    q, k, v, past_k, past_v = heads(1, 7)
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 0, 1], [1] * 8])
    out, _, _ = OPERATIONS.cached_attention(q, k, v, past_k, past_v, mask, scale=1.0, window=3)
    keep = torch.tensor([[0, 0, 0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 1, 1, 1]]).bool()[:, None, None]
    want = eager_attention(q, torch.cat([past_k, k], 2), torch.cat([past_v, v], 2), keep, 1.0)
    torch.testing.assert_close(out.double(), want, atol=1e-6, rtol=1e-5)


def test_soft_cap_comes_before_the_mask() -> None:
    """B12: a cap after the mask would let masked keys in."""
    q, k, v, _, _ = heads(4, 0)
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]])
    keep = torch.tril(torch.ones(4, 4)).bool() & mask.bool()[:, None, None]
    out, _, _ = OPERATIONS.cached_attention(q, k, v, None, None, mask, scale=2.0, softcap=2.0)
    torch.testing.assert_close(
        out.double(), eager_attention(q, k, v, keep, 2.0, softcap=2.0), atol=1e-6, rtol=1e-5
    )
    changed = v.clone()
    changed[0, :, 2] = 1e6
    again, _, _ = OPERATIONS.cached_attention(
        q, k, changed, None, None, mask, scale=2.0, softcap=2.0
    )
    assert torch.equal(out[0], again[0])


def test_sinks() -> None:
    q, k, v, _, _ = heads(4, 0)
    sinks = torch.randn(4)
    out, _, _ = OPERATIONS.cached_attention(
        q, k, v, None, None, torch.ones(2, 4, dtype=torch.int64), sinks, scale=0.4
    )
    want = eager_attention(q, k, v, torch.tril(torch.ones(4, 4)).bool(), 0.4, sinks=sinks)
    torch.testing.assert_close(out.double(), want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_row_that_sees_nothing_is_zero(dtype: torch.dtype) -> None:
    """B10: no NaN, no uniform average, in any dtype; fp16's smallest number is not fp32's."""
    q, k, v, _, _ = heads(3, 0, dtype)
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    out, _, _ = OPERATIONS.cached_attention(q, k, v, None, None, mask, scale=0.3)
    assert not out.isnan().any()
    assert torch.equal(out[0, :2], torch.zeros_like(out[0, :2]))
    torch.testing.assert_close(out[0, 2].float(), v[0, :, 2].repeat_interleave(2, 0).float())


def test_attention_not_causal() -> None:
    q, k, v, _, _ = heads(4, 0)
    out = OPERATIONS.attention(q, k, v, None, layer=0, scale=0.3, causal=False)
    want = eager_attention(q, k, v, torch.ones(4, 4).bool(), 0.3)
    torch.testing.assert_close(out.double(), want, atol=1e-6, rtol=1e-5)


def test_norms_round_where_they_say() -> None:
    """B02, B03, B04."""
    torch.manual_seed(0)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    weight = torch.randn(64, dtype=torch.bfloat16)
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    llama, gemma = normed.bfloat16() * weight, (normed * weight.float()).bfloat16()
    assert torch.equal(OPERATIONS.rms_norm(x, weight, 1e-6), llama)
    assert torch.equal(OPERATIONS.rms_norm(x, weight, 1e-6, False), gemma)
    assert not torch.equal(llama, gemma)
    big = torch.full((1, 64), 300.0, dtype=torch.float16)
    assert torch.equal(OPERATIONS.rms_norm(big, None, 1e-6), torch.ones_like(big))
    zero = torch.zeros(1, 64, dtype=torch.float16)
    for eps in (1e-8, 1e-12):
        assert torch.equal(OPERATIONS.rms_norm(zero, None, eps), zero)


def test_sums_and_norms() -> None:
    """E09: the norm first, the sum second."""
    x, residual, weight, bias = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8), torch.randn(8)
    normed, total = OPERATIONS.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, F.rms_norm(x + residual, (8,), weight, 1e-6))
    normed, total = OPERATIONS.add_layer_norm(x, residual, weight, bias, 1e-6)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, F.layer_norm(x + residual, (8,), weight, bias, 1e-6))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_by_complex_numbers(interleaved: bool) -> None:
    """B06: pairs (i, i + R), or (2i, 2i + 1), turn by the angle; the rest passes."""
    x, angle = torch.randn(2, 3, 5, 12), torch.randn(2, 5, 4)
    got = OPERATIONS.rotary(x, angle.cos(), angle.sin(), interleaved)
    a, b = (x[..., 0:8:2], x[..., 1:8:2]) if interleaved else (x[..., :4], x[..., 4:8])
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)[:, None]
    c, d = (got[..., 0:8:2], got[..., 1:8:2]) if interleaved else (got[..., :4], got[..., 4:8])
    torch.testing.assert_close(torch.complex(c, d), turned)
    assert torch.equal(got[..., 8:], x[..., 8:])


def test_norm_and_linear() -> None:
    x, scale, weight, bias = (torch.randn(s) for s in ((2, 3, 8), (8,), (5, 8), (5,)))
    normed = x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * scale
    want = normed @ weight.t() + bias
    got = OPERATIONS.rms_norm_linear(x, scale, weight, bias, 1e-6)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    got = OPERATIONS.rms_norm_linear(x, scale, weight, bias, 1e-6, False, "silu")
    torch.testing.assert_close(got, want * want.sigmoid(), rtol=1e-5, atol=1e-5)


def quantized(rows: int, width: int, bits: int, group: int) -> list[Tensor]:
    groups = -(-width // group)
    return [
        torch.randint(256, (rows, groups, group * bits // 8), dtype=torch.uint8),
        torch.rand(rows, groups) + 0.5,
        torch.randint(256, (rows, -(-groups * bits // 8)), dtype=torch.uint8),
    ]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", [False, True])
def test_quantized_matrices(bits: int, zeros: bool) -> None:
    """D01: low bits first, one scale and zero point a group, the last group partly used."""
    packed, scales, zero_points = quantized(5, 40, bits, 16)
    want = torch.empty(5, 40)
    for n in range(5):
        for k in range(40):
            group, at = divmod(k, 16)
            q = int(packed[n, group, at * bits // 8]) >> (at * bits % 8) & (2**bits - 1)
            z = int(zero_points[n, group * bits // 8]) >> (group * bits % 8) & (2**bits - 1)
            want[n, k] = (q - (z if zeros else 2 ** (bits - 1))) * scales[n, group]
    args = (packed, scales, zero_points if zeros else None)
    ids = torch.tensor([[4, 0], [2, 2]])
    got = OPERATIONS.quantized_embedding(ids, *args, bits=bits, width=40)
    assert torch.equal(got, want[ids])
    x, bias = torch.randn(2, 3, 40), torch.randn(5)
    got = OPERATIONS.quantized_linear(x, *args, bias, bits=bits)
    torch.testing.assert_close(got, F.linear(x, want, bias))


def rates(pairs: int) -> Tensor:
    return 1e4 ** -(torch.arange(pairs) / pairs)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotation_from_positions(interleaved: bool, dtype: torch.dtype) -> None:
    """B06: the table of transformers' rotary embedding, at far positions too, partly rotated."""
    q, k = torch.randn(2, 4, 3, 12).to(dtype), torch.randn(2, 2, 3, 12).to(dtype)
    positions = torch.tensor([[0, 7, 100_000], [3, 4, 5]])
    angles = positions[:, :, None].float() @ rates(4)[None, None, :]
    cos, sin = (angles.cos() * 1.5).to(dtype), (angles.sin() * 1.5).to(dtype)
    got = OPERATIONS.rotary_from_positions(q, k, positions, rates(4), 1.5, interleaved)
    for x, turned in zip((q, k), got, strict=True):
        assert torch.equal(turned, OPERATIONS.rotary(x, cos, sin, interleaved))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_softmax(dtype: torch.dtype) -> None:
    x = (torch.randn(2, 5, 9) * 8).to(dtype)
    torch.testing.assert_close(OPERATIONS.softmax(x), x.softmax(-1))
    mask = torch.rand(5, 9) < 0.7
    mask[1] = False
    want = x.double().masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(OPERATIONS.softmax(x, mask), want.to(dtype))
    x[0, 0] = float("-inf")
    assert torch.equal(OPERATIONS.softmax(x)[0, 0], torch.zeros(9, dtype=dtype))
    assert OPERATIONS.softmax(x[..., :0]).shape == (2, 5, 0)


def test_last_tokens() -> None:
    x = torch.arange(2 * 4).float().view(2, 4, 1)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]])  # 2 cached, 4 new
    for count, want in {
        1: [[1], [6]],
        2: [[0, 1], [5, 6]],
        0: [[0, 1, 2, 3], [4, 5, 6, 7]],
    }.items():
        got = OPERATIONS.last_tokens(x, mask, torch.tensor([count]))
        assert got[..., 0].tolist() == want


@pytest.mark.parametrize(
    ("layout", "activation"),
    [
        (layout, activation)
        for layout in ("concatenated", "interleaved", "single")
        for activation in ("silu", "gelu", "gelu_tanh", "swish")
        if (layout, activation) != ("single", "swish")  # there is no such expert
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_experts(layout: str, activation: str, transposed: bool) -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(6, 8), torch.rand(6, 2)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(6)])
    wide = 5 if layout == "single" else 10
    up, up_bias = torch.randn(4, wide, 8), torch.randn(4, wide)
    down, down_bias = torch.randn(4, 8, 5), torch.randn(4, 8)
    act: dict[str, Any] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
        "swish": lambda t: t * torch.sigmoid(1.702 * t),
    }
    want = torch.zeros(6, 8)
    for token in range(6):
        for choice in range(2):
            expert = int(ids[token, choice])
            inner = up[expert] @ x[token] + up_bias[expert]
            if layout == "single":
                inner = act[activation](inner)
            else:
                gate, lift = (
                    (inner[0::2], inner[1::2]) if layout == "interleaved" else inner.chunk(2)
                )
                inner = act[activation](gate.clamp(max=2.0)) * (lift.clamp(-2.0, 2.0) + 1.0)
            want[token] += weights[token, choice] * (down[expert] @ inner + down_bias[expert])
    matrices = (up.transpose(1, 2), down.transpose(1, 2)) if transposed else (up, down)
    got = OPERATIONS.experts(
        x, ids, weights, matrices[0], up_bias, matrices[1], down_bias,
        activation=activation, layout=layout, transposed=transposed,
        alpha=1.702, limit=None if layout == "single" else 2.0, up_offset=1.0,
    )  # fmt: skip
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def int8(*size: int) -> Tensor:
    return torch.randint(-127, 128, size, dtype=torch.int8)


def int8_cache(per_token: bool) -> dict[str, Any]:
    """Scales of caches (2, 2, 6, 8)."""
    size = (2, 2, 6, 1) if per_token else (2, 1, 8)
    return {"key_scale": torch.rand(size) / 50, "value_scale": torch.rand(size) / 50}


ARGUMENTS: dict[str, Any] = {
    "attention": lambda: ([*heads(3, 0)[:3], None], {"layer": 0, "scale": 1.0}),
    "cached_attention": lambda: ([*heads(3, 2), torch.ones(2, 5).long()], {"scale": 1.0}),
    "static_attention": lambda: (
        [*heads(2, 6), torch.tensor([3]), torch.tensor([[1, 1, 1, 1, 1, 0], [1, 0, 1, 1, 0, 0]])],
        {"scale": 1.0, "window": 2},
    ),
    "paged_attention": lambda: (
        [
            *heads(2, 0)[:3],
            torch.randn(4, 2, 4, 8),
            torch.randn(4, 2, 4, 8),
            torch.tensor([[2, 0], [1, -1]]).int(),
            torch.tensor([3, 0]),
            torch.tensor([2, 1]),
        ],
        {"scale": 1.0, "window": 2},
    ),
    "rms_norm": lambda: ([torch.randn(2, 3, 8).half(), torch.randn(8).half(), 1e-6], {}),
    "add_rms_norm": lambda: ([torch.randn(2, 8), torch.randn(2, 8), torch.randn(8), 1e-6], {}),
    "add_layer_norm": lambda: (
        [torch.randn(2, 8), torch.randn(2, 8), torch.randn(8), None, 1e-6],
        {},
    ),
    "rotary": lambda: ([torch.randn(2, 3, 5, 12), torch.rand(1, 5, 4), torch.rand(1, 5, 4)], {}),
    "rotary_from_positions": lambda: (
        [torch.randn(2, 3, 5, 12), torch.randn(2, 1, 5, 12), torch.randint(9, (2, 5)), rates(4)],
        {},
    ),
    "softmax": lambda: ([torch.randn(2, 3, 8).half(), torch.rand(3, 1) < 0.5], {}),
    "rms_norm_linear": lambda: (
        [torch.randn(2, 3, 8).half(), torch.randn(8).half(), torch.randn(5, 8).half(), None, 1e-6],
        {"activation": "silu"},
    ),
    "linear_silu": lambda: (
        [torch.randn(2, 3, 8).half(), torch.randn(6, 8).half(), torch.randn(6).half(), True],
        {},
    ),
    "quantized_embedding": lambda: (
        [torch.randint(9, (2, 3)), *quantized(9, 40, 4, 16)],
        {"bits": 4, "width": 40},
    ),
    "quantized_linear": lambda: (
        [torch.randn(2, 3, 40), *quantized(9, 40, 8, 16), torch.randn(9)],
        {"bits": 8},
    ),
    "int8_linear": lambda: (
        [torch.randn(2, 3, 8).half(), int8(5, 8), torch.rand(5).half(), torch.randn(5).half()],
        {},
    ),
    "fp8_linear": lambda: (
        [torch.randn(2, 3, 8).half(), torch.randn(5, 8).to(torch.float8_e5m2), torch.rand(1)],
        {"quantize": True},
    ),
    "gated": lambda: ([torch.randn(2, 8), torch.randn(2, 8), "gelu"], {}),
    "experts": lambda: (
        [
            torch.randn(6, 8),
            torch.zeros(6, 2).long(),
            torch.rand(6, 2),
            torch.randn(4, 10, 8),
            None,
            torch.randn(4, 8, 5),
            None,
        ],
        {"activation": "silu"},
    ),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_fixed_buffer_is_the_growing_cache(causal: bool, window: int | None, sinks: bool) -> None:
    """Chunks and single tokens, a row with holes; what lies behind the new tokens is not seen."""
    torch.manual_seed(3)
    buffers = [torch.randn(2, 2, 11, 8) for _ in "kv"]
    past_k, past_v = torch.zeros(2, 2, 0, 8), torch.zeros(2, 2, 0, 8)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 1, 1, 1, 0, 0, 0]])
    options = {"scale": 0.4, "window": window, "causal": causal, "softcap": 3.0}
    given = torch.randn(4) if sinks else None
    for start, stop in ((0, 4), (4, 5), (5, 8)):
        q, k, v = (torch.randn(2, n, stop - start, 8) for n in (4, 2, 2))
        filled = torch.where(torch.arange(11) < stop, mask, 0)
        at = torch.tensor([start])
        got = OPERATIONS.static_attention(q, k, v, *buffers, at, filled, given, **options)
        want, past_k, past_v = OPERATIONS.cached_attention(
            q, k, v, past_k, past_v, mask[:, :stop], given, **options
        )
        torch.testing.assert_close(got, want)
        assert torch.equal(buffers[0][:, :, :stop], past_k)
        again = OPERATIONS.static_attention(q, None, None, *buffers, at, filled, given, **options)
        assert torch.equal(again, got)


@pytest.mark.parametrize("per_token", [False, True])
def test_an_int8_buffer(per_token: bool) -> None:
    """What is written is widened again within half a step; the op reads it as it lies there."""
    torch.manual_seed(4)
    q, k, v = (torch.randn(2, n, 3, 8) for n in (4, 2, 2))
    scales = int8_cache(per_token)
    buffers = [int8(2, 2, 6, 8) for _ in "kv"]
    args = (q, k, v, *buffers, torch.tensor([2]), None)
    copies = *(x.clone() for x in (q, k, v, *buffers)), *args[5:]
    options = {"scale": 0.3, **{name: x.clone() for name, x in scales.items()}}
    torch.library.opcheck(OPS["static_attention"].target, copies, options)
    before = [x.clone() for x in buffers]
    got = OPERATIONS.static_attention(*args, scale=0.3, **scales)
    wide = []
    for x, buffer, old, scale in zip((k, v), buffers, before, scales.values(), strict=True):
        at = scale[:, :, 2:5] if per_token else scale
        reach = 127 * at if not per_token else torch.inf
        held = buffer[:, :, 2:5] * at
        assert ((held - x.clamp(-reach, reach)).abs() <= at / 2 * 1.0001).all()
        assert torch.equal(buffer[:, :, :2], old[:, :, :2])
        wide.append(buffer[:, :, :5] * (scale[:, :, :5] if per_token else scale))
    if per_token:
        torch.testing.assert_close(scales["key_scale"][:, :, 2:5, 0], k.abs().amax(-1) / 127)
    keep = torch.arange(5) <= torch.arange(2, 5)[:, None]
    want = eager_attention(q, wide[0], wide[1], keep, 0.3)
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 2])
def test_pages_are_the_growing_cache(causal: bool, window: int | None) -> None:
    """Rows of unlike lengths, each as alone; pages out of order, and pools that start as NaN."""
    torch.manual_seed(3)
    pools = [torch.full((7, 2, 4, 8), torch.nan) for _ in "kv"]
    table = torch.tensor([[5, 1, 2], [6, 3, -1]]).int()
    lengths = torch.zeros(2, dtype=torch.int64)
    past = [[torch.zeros(1, 2, 0, 8) for _ in "kv"] for _ in range(2)]
    options = {"scale": 0.4, "window": window, "causal": causal, "softcap": 3.0}
    for counts in ([5, 2], [1, 1], [3, 0], [0, 4]):
        q, k, v = (torch.randn(2, n, 5, 8) for n in (4, 2, 2))
        new = torch.tensor(counts)
        got = OPERATIONS.paged_attention(q, k, v, *pools, table, lengths, new, **options)
        again = OPERATIONS.paged_attention(q, None, None, *pools, table, lengths, new, **options)
        assert torch.equal(again, got)
        for row, count in enumerate(counts):
            own = (x[row : row + 1, :, :count] for x in (q, k, v))
            want, *past[row] = OPERATIONS.cached_attention(*own, *past[row], None, **options)
            torch.testing.assert_close(got[row, :count], want[0])
            assert torch.equal(got[row, count:], torch.zeros_like(got[row, count:]))
        lengths = lengths + new
    assert torch.equal(pools[0][[5, 1, 2]].transpose(0, 1).flatten(1, 2)[:, :9], past[0][0][0])
    assert pools[0][[0, 4]].isnan().all()
    assert pools[0][3, :, 3:].isnan().all()


def test_pages_that_are_missing_are_not_seen() -> None:
    """A window lets go of a sequence's first page; nothing is written behind its last."""
    q, k, v = (torch.randn(1, n, 2, 8) for n in (2, 2, 2))
    pools = [torch.randn(3, 2, 4, 8) for _ in "kv"]
    args = (torch.tensor([[-1, 1]]).int(), torch.tensor([7]))
    got = OPERATIONS.paged_attention(q, k, v, *pools, *args, scale=1.0)
    keep = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1]]).bool()
    want = eager_attention(q, pools[0][1:2], pools[1][1:2], keep, 1.0)
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-5)
    assert torch.equal(pools[0][1, :, 3], k[0, :, 0])


def pages(buffer: Tensor) -> Tensor:
    """A buffer (2, K, 6, D) as pages of three slots, (4, K, 3, D)."""
    cut = buffer.view(2, buffer.shape[1], 2, 3, buffer.shape[3])
    return cut.transpose(1, 2).flatten(0, 1).clone()


@pytest.mark.parametrize("per_token", [False, True])
def test_int8_pages(per_token: bool) -> None:
    torch.manual_seed(5)
    q, k, v = (torch.randn(2, n, 3, 8) for n in (4, 2, 2))
    scales = int8_cache(per_token)
    buffers = [int8(2, 2, 6, 8) for _ in "kv"]
    paged = [pages(x) for x in buffers]
    factors = [pages(x) if per_token else x for x in scales.values()]
    table = torch.arange(4).view(2, 2).int()
    lengths, args = torch.tensor([2, 2]), {"scale": 0.3}
    got = OPERATIONS.paged_attention(q, k, v, *paged, table, lengths, None, None, *factors, **args)
    want = OPERATIONS.static_attention(q, k, v, *buffers, lengths[:1], None, **args, **scales)
    torch.testing.assert_close(got, want)
    for x, held in zip([*buffers, *scales.values()], [*paged, *factors], strict=True):
        if x.dim() == 4:
            assert torch.equal(pages(x), held)


def test_int8_product() -> None:
    """By hand, in integers; a row of zeros; a scale that saturates."""
    x, weight, scales = torch.randn(4, 16), int8(5, 16), torch.rand(5)
    x[2] = 0
    for x_scale in (None, torch.tensor([0.01])):
        steps = x.abs().amax(1, keepdim=True) / 127 if x_scale is None else x_scale
        held = torch.round(x / steps).nan_to_num(0).clamp(-127, 127)
        want = (held.long() @ weight.long().t()) * steps.double() * scales.double() + 1
        got = OPERATIONS.int8_linear(x, weight, scales, torch.ones(5), x_scale)
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_product(kind: torch.dtype) -> None:
    x, weight, scales = torch.randn(4, 16), torch.randn(5, 16).to(kind), torch.rand(5)
    x[2] = 0
    got = OPERATIONS.fp8_linear(x, weight, scales, torch.ones(5))
    torch.testing.assert_close(got, x @ (weight.float() * scales[:, None]).t() + 1)
    steps = x.abs().amax(1, keepdim=True) / (448 if kind == torch.float8_e4m3fn else 57344)
    held = (x / steps).nan_to_num(0).to(kind)
    got = OPERATIONS.fp8_linear(x, weight, scales[:1], quantize=True)
    torch.testing.assert_close(got, held.float() @ weight.float().t() * steps * scales[0])
    assert (held.float() * steps - x).abs().max() < x.abs().max() / 8


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_torch_takes_it_for_an_op(name: str) -> None:
    """Schema, fake function and dispatch hold together, and no result shares an input's memory."""
    args, kwargs = ARGUMENTS[name]()
    if name == "fp8_linear":  # torch's check of the schema multiplies, which fp8 cannot on a CPU
        checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(OPS[name].target, args, kwargs, test_utils=checks)
        args[1], kwargs = args[1].float(), {}
    torch.library.opcheck(OPS[name].target, args, kwargs)


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_shape_functions(name: str) -> None:
    """Dtype and shape on fake tensors are those of the real ones."""
    args, kwargs = ARGUMENTS[name]()
    real = OPS[name].target(*args, **kwargs)
    mode = FakeTensorMode()
    fake_args = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
    with mode:
        fake = OPS[name].target(*fake_args, **kwargs)
    results = (real, fake) if isinstance(real, tuple) else ((real,), (fake,))
    for a, b in zip(*results, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_every_op_is_described() -> None:
    assert set(ARGUMENTS) | {"last_tokens"} == set(OPS)
    for operation in OPS.values():
        assert operation.doc.strip().endswith((".", "2019.", "2020.", "2021.", "2022.", "2023."))
