from __future__ import annotations

from typing import Any

import pytest
import torch

SIZES = [
    (1, 1, 1),
    (3, 41, 7),
    (0, 16, 8),
    (1, 576, 96),
    (17, 130, 65),
    (2, 4864, 5),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_reference(interpreter: Any, dtype: torch.dtype, size: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    count, width, outputs = size
    x, weight = torch.randn(count, width), torch.randn(2 * outputs, width) / width**0.5
    x, weight, bias = x.to(dtype), weight.to(dtype), torch.randn(2 * outputs).to(dtype)
    for args in ((x, weight, None, True), (x, weight, bias, True), (x, weight, bias)):
        (got,) = interpreter.agrees(
            "linear_silu", *args, launches=int(count > 0), reduced=max(256, width)
        )
        assert got.shape == (count, outputs if args[-1] is True else 2 * outputs)


def test_strides_and_ranks(interpreter: Any) -> None:
    """H02: x of three dimensions with rows of its own stride; weights sliced and transposed."""
    x, weight = torch.randn(2, 3, 50)[..., 1:42], torch.randn(60, 20)
    for matrix in (weight.t()[:, :41], torch.randn(12, 50)[::2, 3:44]):
        (got,) = interpreter.agrees("linear_silu", x, matrix, None, True, reduced=4096)
        assert got.shape == (2, 3, matrix.shape[0] // 2)


def test_gate_comes_first(interpreter: Any) -> None:
    x, weight = torch.tensor([[2.0, 3.0]]), torch.eye(2)
    (got,), _ = interpreter.run("linear_silu", x, weight, None, True)
    torch.testing.assert_close(got, torch.sigmoid(torch.tensor([[2.0]])) * 2.0 * 3.0)


def test_refuses(interpreter: Any) -> None:
    x, weight = torch.randn(2, 8), torch.randn(5, 8)
    assert "no halves" in interpreter.refusal("linear_silu", x, weight[:5], None, True)
    assert "types differ" in interpreter.refusal("linear_silu", x, weight, weight[0, :5].half())
