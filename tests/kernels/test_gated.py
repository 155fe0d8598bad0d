from __future__ import annotations

from typing import Any

import pytest
import torch

SHAPES = [(1, 1), (3, 41), (0, 16), (2, 3, 4864), (1, 65537)]


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference(
    interpreter: Any, dtype: torch.dtype, shape: tuple[int, ...], activation: str
) -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(shape).to(dtype) * 3, torch.randn(shape).to(dtype)
    interpreter.agrees("gated", gate, up, activation, launches=int(gate.numel() > 0))


def test_large_gates_do_not_overflow(interpreter: Any) -> None:
    gate = torch.tensor([[-1e4, -100.0, -20.0, 20.0, 100.0, 1e4]])
    for activation in ("silu", "gelu", "gelu_tanh"):
        interpreter.agrees("gated", gate, torch.ones_like(gate), activation)


def test_halves_of_a_merged_projection(interpreter: Any) -> None:
    """H02: rows with a stride of their own, columns that are not side by side, stride 0."""
    wide = torch.randn(2, 5, 34)
    gate, up = wide.chunk(2, -1)
    interpreter.agrees("gated", gate, up)
    interpreter.agrees("gated", wide[..., ::2], wide[..., 1::2])
    interpreter.agrees("gated", gate.transpose(0, 1), up[:, :1].expand(2, 5, 17).transpose(0, 1))


def test_refuses(interpreter: Any) -> None:
    x = torch.randn(2, 8)
    assert "differ in shape" in interpreter.refusal("gated", x, x[0])
    assert "types differ" in interpreter.refusal("gated", x, x.half())
