from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


def quantized(
    outputs: int, width: int, bits: int, group: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    groups = -(-width // group)
    return (
        torch.randint(256, (outputs, groups, group * bits // 8), dtype=torch.uint8),
        ((torch.rand(outputs, groups) + 0.5) / 2**bits / width**0.5).to(dtype),
        torch.randint(256, (outputs, -(-groups * bits // 8)), dtype=torch.uint8),
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("count", "width", "outputs", "group"),
    [
        (1, 576, 96, 32),
        (3, 41, 7, 64),
        (0, 64, 8, 32),
        (17, 130, 129, 32),
        (33, 896, 5, 128),
        (2, 97, 33, 96),
    ],
)
def test_the_reference(
    interpreter: Any,
    dtype: torch.dtype,
    bits: int,
    count: int,
    width: int,
    outputs: int,
    group: int,
) -> None:
    torch.manual_seed(0)
    packed, scales, zeros = quantized(outputs, width, bits, group, dtype)
    x, bias = torch.randn(count, width).to(dtype), torch.randn(outputs).to(dtype)
    launches = int(count > 0)
    for args in ((packed, scales, zeros, bias), (packed, scales)):
        interpreter.agrees(
            "quantized_linear", x, *args, bits=bits, launches=launches, reduced=max(256, width)
        )


def test_strides(interpreter: Any) -> None:
    """H02: slices of the rows of x, of the weight's rows and of its scales."""
    packed, scales, zeros = quantized(18, 128, 4, 32, torch.float32)
    x = torch.randn(2, 3, 260)[..., 1::2][..., :128]
    args = (packed[::2], torch.cat([scales, scales], 1)[::2, :4], zeros[::2])
    interpreter.agrees("quantized_linear", x, *args, bits=4, reduced=256)


def test_padding_of_the_last_group_counts_for_nothing(interpreter: Any) -> None:
    packed, scales, zeros = quantized(5, 41, 4, 32, torch.float32)
    x = torch.randn(3, 41)
    (first,), _ = interpreter.run("quantized_linear", x, packed, scales, zeros, bits=4)
    packed[:, 1, 5:] = 255  # elements 42 on; byte 4 of the group holds 40 and 41
    (second,), _ = interpreter.run("quantized_linear", x, packed, scales, zeros, bits=4)
    assert torch.equal(first, second)


def test_refuses(interpreter: Any) -> None:
    x = torch.randn(2, 64)
    packed, scales, _ = quantized(5, 64, 4, 16, torch.float32)
    told = interpreter.refusal("quantized_linear", x, packed, scales, bits=4)
    assert "groups of 16 are no multiple of 32" in told
    told = interpreter.refusal("quantized_linear", x, packed, scales, bits=2)
    assert "2 bits are neither 4 nor 8" in told
    told = interpreter.refusal(
        "quantized_linear", x.half(), *quantized(5, 64, 4, 32, torch.float32)[:2], bits=4
    )
    assert "types differ" in told
