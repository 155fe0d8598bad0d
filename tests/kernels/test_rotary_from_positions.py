from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


def rates(pairs: int) -> Tensor:
    return 1e4 ** -(torch.arange(pairs) / pairs)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "kv", "tokens", "size", "pairs"),
    [
        (1, 1, 1, 1, 2, 1),
        (2, 9, 3, 5, 64, 32),
        (1, 5, 1, 3, 41, 7),
        (2, 3, 3, 2, 80, 16),
        (1, 4, 1, 2, 256, 128),
        (0, 4, 1, 2, 64, 32),
        (2, 4, 2, 0, 64, 32),
    ],
)
def test_the_reference(
    interpreter: Any,
    dtype: torch.dtype,
    interleaved: bool,
    batch: int,
    heads: int,
    kv: int,
    tokens: int,
    size: int,
    pairs: int,
) -> None:
    torch.manual_seed(0)
    q = torch.randn(batch, heads, tokens, size).to(dtype)
    k = torch.randn(batch, kv, tokens, size).to(dtype)
    positions = torch.randint(0, 5000, (batch, tokens))
    launches = int(batch * tokens > 0)
    args = (q, k, positions, rates(pairs), 1.25, interleaved)
    interpreter.agrees("rotary_from_positions", *args, launches=launches, reduced=256)


def test_far_positions(interpreter: Any) -> None:
    """Angles of 1e5 and more keep the precision of fp32's products; one row serves the batch."""
    q, k = torch.randn(2, 4, 4, 64), torch.randn(2, 1, 4, 64)
    positions = torch.tensor([[0, 1, 100_000, 1_048_575]])
    interpreter.agrees("rotary_from_positions", q, k, positions, rates(32), reduced=256)


def test_slices_of_a_merged_projection(interpreter: Any) -> None:
    """H02: heads inside (B, S, (H + 2 K) D); outputs have strides of their own."""
    merged = torch.randn(2, 5, 8 * 16)
    q, k, _ = (x.view(2, 5, -1, 16).transpose(1, 2) for x in torch.split(merged, [64, 32, 32], 2))
    positions = torch.randint(0, 99, (5, 2)).t()
    got = interpreter.agrees("rotary_from_positions", q, k, positions, rates(6), reduced=256)
    assert [x.shape for x in got] == [q.shape, k.shape]
    q, k = torch.randn(2, 4, 16, 5).transpose(2, 3), torch.randn(2, 1, 5, 32)[..., ::2]
    interpreter.agrees("rotary_from_positions", q, k, positions, rates(8)[::2], reduced=256)


def test_refuses(interpreter: Any) -> None:
    q, positions = torch.randn(1, 2, 3, 320), torch.zeros(1, 3).long()
    told = interpreter.refusal("rotary_from_positions", q, q, positions, rates(160))
    assert "160 pairs a head exceed 128" in told
    told = interpreter.refusal("rotary_from_positions", q, q, positions.int(), rates(16))
    assert "not int64" in told
    told = interpreter.refusal("rotary_from_positions", q, q, positions, rates(16).half())
    assert "inv_freq" in told
