from __future__ import annotations

from typing import Any

import pytest
import torch

SHAPES = [(1, 1), (3, 41), (0, 16), (2, 0), (2, 3, 576), (2, 4097), (1, 128256)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference(interpreter: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, launches = (torch.randn(shape) * 5).to(dtype), int(torch.Size(shape).numel() > 0)
    (got,) = interpreter.agrees("softmax", x, reduced=shape[-1], launches=launches)
    if launches and dtype == torch.float32:
        exact = x.double().softmax(-1).float()
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-7)
    mask = torch.rand(shape) < 0.5
    interpreter.agrees("softmax", x, mask, reduced=shape[-1], launches=launches)


@pytest.mark.parametrize("width", [41, 5000])
def test_rows_without_any_element(interpreter: Any, width: int) -> None:
    """B10: 0 and never NaN, whether a mask or -inf took the elements away."""
    x = torch.randn(4, width)
    x[0] = float("-inf")
    x[1, : width - 1] = float("-inf")
    mask = torch.ones(4, width).bool()
    mask[2] = False
    mask[3, :-1] = False
    (got,) = interpreter.agrees("softmax", x, mask)
    assert torch.equal(got[[0, 2]], torch.zeros(2, width))
    assert got[[1, 3], -1].tolist() == [1.0, 1.0]


def test_large_numbers(interpreter: Any) -> None:
    x = torch.tensor([[1e30, 1e30, -1e30], [6e4, 0.0, -6e4]])
    interpreter.agrees("softmax", x)
    interpreter.agrees("softmax", torch.cat([x, torch.zeros(2, 5000)], 1))


def test_strides_and_broadcast(interpreter: Any) -> None:
    """H02."""
    x = torch.randn(2, 3, 5, 14)
    causal = torch.ones(5, 7).tril().bool()
    interpreter.agrees("softmax", x[..., ::2], causal)
    interpreter.agrees("softmax", x.transpose(0, 2)[..., 3:], torch.rand(3, 1, 11) < 0.7)
    interpreter.agrees("softmax", x.transpose(2, 3), torch.rand(2, 1, 1, 5) < 0.7)


def test_refuses(interpreter: Any) -> None:
    assert "scalar" in interpreter.refusal("softmax", torch.tensor(1.0).bfloat16())
    assert "float64 is none of" in interpreter.refusal("softmax", torch.randn(2, 8).double())
