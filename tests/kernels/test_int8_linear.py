from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


def operands(count: int, width: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(count, width).to(dtype)
    x[1:2] = 0  # a row without a scale
    weight = torch.randint(-127, 128, (outputs, width), dtype=torch.int8)
    return x, weight, torch.rand(outputs) / width**0.5 / 70, torch.randn(outputs).to(dtype)


@pytest.mark.parametrize(
    ("count", "width", "outputs"),
    [(1, 576, 96), (3, 41, 7), (0, 64, 8), (17, 130, 129), (33, 896, 5), (2, 4864, 33)],
)
def test_the_reference(
    interpreter: Any, dtype: torch.dtype, count: int, width: int, outputs: int
) -> None:
    x, weight, scales, bias = operands(count, width, outputs, dtype)
    launches = 2 if count else 0
    fixed = torch.tensor([0.01])  # saturates
    for args in ((scales, bias), (scales.to(dtype),), (scales, None, fixed)):
        interpreter.agrees("int8_linear", x, weight, *args, launches=launches)


@pytest.mark.parametrize(
    ("width", "outputs"),
    [(128256, 3), pytest.param(16, 128256, marks=pytest.mark.slow)],
)
def test_wide(interpreter: Any, width: int, outputs: int) -> None:
    """H03: sums near the end of what 32 bits hold, and a vocabulary of outputs."""
    x, weight, scales, _ = operands(1, width, outputs, torch.float16)
    x[:], weight[0] = 1, -127
    interpreter.agrees("int8_linear", x, weight, scales, launches=2)


def test_strides(interpreter: Any) -> None:
    """H02: slices of the rows of x and of the weight, of its columns, and of its scales."""
    x, weight, scales, _ = operands(6, 130, 18, torch.float32)
    args = (weight[::2, 2:], torch.stack([scales, scales], 1)[::2, 1])
    interpreter.agrees("int8_linear", x.view(2, 3, 130)[:, 1:, 1:129], *args, launches=2)
    args = (weight[::2, ::2], scales[::2])
    interpreter.agrees("int8_linear", x[:, ::2], *args, launches=2)


def test_refuses(interpreter: Any) -> None:
    x, weight, scales, _ = operands(2, 64, 5, torch.float16)
    told = interpreter.refusal("int8_linear", x, weight.float(), scales)
    assert "the weight is float32, not int8" in told
    told = interpreter.refusal("int8_linear", x, weight, scales, None, torch.rand(2))
    assert "the scale of x is not one float32" in told
    wide = torch.zeros(1, 2**17 + 1, dtype=torch.int8)
    told = interpreter.refusal("int8_linear", wide.half(), wide, scales[:1])
    assert "sums of 131073 products may exceed 32 bits" in told
