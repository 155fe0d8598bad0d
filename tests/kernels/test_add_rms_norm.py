from __future__ import annotations

from typing import Any

import pytest
import torch

SHAPES = [(1, 1), (3, 41), (0, 16), (2, 3, 576), (2, 896), (2, 4097), (1, 65537)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference(interpreter: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(s).to(dtype) for s in (shape, shape, shape[-1:]))
    launches = int(x.numel() > 0)
    for cast_first in (True, False):
        for w in (weight, None):
            interpreter.agrees(
                "add_rms_norm", x, residual, w, 1e-6, cast_first,
                reduced=shape[-1], launches=launches,
            )  # fmt: skip


def test_the_norm_is_of_the_rounded_sum(interpreter: Any) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(8, 576).half(), torch.randn(8, 576).half() * 100
    (normed, total), _ = interpreter.run("add_rms_norm", x, residual, None, 1e-6)
    assert torch.equal(total, x + residual)
    want, _ = torch.ops.qopt.add_rms_norm(x, residual, None, 1e-6)
    assert (normed != want).float().mean() < 0.002


@pytest.mark.parametrize("shape", [SHAPES[1], *SHAPES[3:5]], ids=str)
def test_a_residual_stream_in_fp32(
    interpreter: Any, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """The sum is not rounded, the norm is."""
    torch.manual_seed(0)
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape) * 100
    weight = torch.randn(shape[-1]).to(dtype)
    for cast_first in (True, False):
        for w in (weight, None):
            given = (x, residual, w, 1e-6, cast_first)
            interpreter.agrees("add_rms_norm", *given, reduced=shape[-1])
    (normed, total), _ = interpreter.run("add_rms_norm", x, residual, None, 1e-6)
    assert (normed.dtype, total.dtype) == (dtype, torch.float32)
    assert torch.equal(total, x.float() + residual)


def test_strides(interpreter: Any) -> None:
    """H02: slices of a wider tensor, and a row that all share."""
    wide = torch.randn(6, 80)
    interpreter.agrees("add_rms_norm", wide[:, :40], wide[:, 40:], torch.randn(40), 1e-5)
    interpreter.agrees("add_rms_norm", wide[:, ::2], wide[:1, 40:].expand(6, 40), None, 1e-5)


def test_refuses(interpreter: Any) -> None:
    x = torch.randn(2, 8)
    assert "differ in shape" in interpreter.refusal("add_rms_norm", x, x[:1], None, 1e-6)
    assert "types differ" in interpreter.refusal("add_rms_norm", x, x.half(), None, 1e-6)
    assert "types differ" in interpreter.refusal("add_rms_norm", x.half(), x.bfloat16(), None, 1e-6)
