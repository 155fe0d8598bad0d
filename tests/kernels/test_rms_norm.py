from __future__ import annotations

from typing import Any

import pytest
import torch

SHAPES = [(1, 1), (3, 41), (0, 16), (2, 0), (2, 3, 576), (2, 896), (2, 4097), (1, 65537)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference(interpreter: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    launches = int(x.numel() > 0)
    for cast_first in (True, False):
        for w in (weight, None):
            interpreter.agrees(
                "rms_norm", x, w, 1e-6, cast_first, reduced=shape[-1], launches=launches
            )


def test_strides(interpreter: Any) -> None:
    """H02."""
    x, weight = torch.randn(6, 40), torch.randn(80)
    for view in (
        x[:, ::2],
        x.t(),
        x[:, 3:20],
        x[:1].expand(4, 40),
        x.view(2, 3, 40).transpose(0, 1),
    ):
        width = view.shape[-1]
        interpreter.agrees("rms_norm", view, weight[: 2 * width : 2], 1e-5)


def test_rounds_where_the_reference_rounds(interpreter: Any) -> None:
    """B03: in half precision the two orders differ; each is met to the bit, but for few."""
    torch.manual_seed(0)
    x, weight = torch.randn(8, 576).half(), torch.randn(576).half()
    for cast_first in (True, False):
        (got,), _ = interpreter.run("rms_norm", x, weight, 1e-6, cast_first)
        want = torch.ops.qopt.rms_norm(x, weight, 1e-6, cast_first)
        assert (got != want).float().mean() < 0.002


def test_squares_that_overflow_fp16(interpreter: Any) -> None:
    x = torch.full((2, 576), 300.0, dtype=torch.float16)
    (got,), _ = interpreter.run("rms_norm", x, None, 1e-6)
    assert torch.equal(got, torch.ones_like(x))


def test_refuses(interpreter: Any) -> None:
    x = torch.randn(2, 8)
    assert "element types differ" in interpreter.refusal("rms_norm", x, torch.ones(8).half(), 1e-6)
    assert "float64 is none of" in interpreter.refusal("rms_norm", x.double(), None, 1e-6)
    wanted = x.clone().requires_grad_()
    assert "gradient" in interpreter.refusal("rms_norm", wanted, None, 1e-6)
