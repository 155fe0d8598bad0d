from __future__ import annotations

from typing import Any

import pytest
import torch

SIZES = [
    (1, 1, 1),
    (3, 41, 7),
    (0, 16, 8),
    (1, 576, 96),
    (17, 130, 129),
    (70, 41, 33),
    (2, 4864, 5),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_reference(interpreter: Any, dtype: torch.dtype, size: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    count, width, outputs = size
    x, norm, weight, bias = (
        torch.randn(s).to(dtype) for s in ((count, width), (width,), (outputs, width), (outputs,))
    )
    weight, launches = weight / width**0.5, int(count > 0)
    for args in (
        (x, norm, weight, bias, 1e-6),
        (x, None, weight, None, 1e-6, False, "silu"),
        (x, norm, weight, None, 1e-6, False),
    ):
        interpreter.agrees("rms_norm_linear", *args, launches=launches, reduced=max(256, width))


@pytest.mark.parametrize("size", [SIZES[1], *SIZES[3:5]], ids=str)
def test_a_residual_stream_in_fp32(
    interpreter: Any, dtype: torch.dtype, size: tuple[int, int, int]
) -> None:
    """Rows in fp32 beside weights of any type; the result has the weights'."""
    torch.manual_seed(0)
    count, width, outputs = size
    x, weight = torch.randn(count, width) * 50, torch.randn(outputs, width) / width**0.5
    norm, weight = torch.randn(width).to(dtype), weight.to(dtype)
    for args in ((x, norm, weight, None, 1e-6), (x, None, weight, None, 1e-6, False, "silu")):
        (got,) = interpreter.agrees("rms_norm_linear", *args, reduced=max(256, width))
        assert got.dtype == dtype


def test_strides_and_ranks(interpreter: Any) -> None:
    """H02: x of three dimensions with rows of its own stride; weights sliced and transposed."""
    x, weight = torch.randn(2, 3, 50)[..., 1:42], torch.randn(60, 20)
    for matrix in (weight.t()[:, :41], torch.randn(9, 50)[::2, 3:44]):
        (got,) = interpreter.agrees("rms_norm_linear", x, None, matrix, None, 1e-6, reduced=1024)
        assert got.shape == (2, 3, matrix.shape[0])


def test_squares_that_overflow_fp16(interpreter: Any) -> None:
    x, weight = torch.full((2, 576), 300.0).half(), torch.eye(576).half()[:5]
    (got,), _ = interpreter.run("rms_norm_linear", x, None, weight, None, 1e-6)
    assert torch.equal(got, torch.ones(2, 5).half())


def test_the_normed_row_is_rounded(interpreter: Any) -> None:
    """Against an identity the product shows the norm: to the bit, but for few."""
    torch.manual_seed(0)
    x, norm, weight = torch.randn(9, 64).half(), torch.randn(64).half(), torch.eye(64).half()
    for cast_first in (True, False):
        (got,), _ = interpreter.run("rms_norm_linear", x, norm, weight, None, 1e-6, cast_first)
        want = torch.ops.qopt.rms_norm(x, norm, 1e-6, cast_first)
        assert (got != want).float().mean() < 0.005


def test_refuses(interpreter: Any) -> None:
    x, weight = torch.randn(2, 8), torch.randn(5, 8)
    told = interpreter.refusal("rms_norm_linear", x, None, weight, None, 1e-6, True, "gelu")
    assert "neither None nor silu" in told
    told = interpreter.refusal("rms_norm_linear", x, None, weight.half(), weight[0], 1e-6)
    assert "types differ" in told
    told = interpreter.refusal("rms_norm_linear", x.half(), None, weight, None, 1e-6)
    assert "types differ" in told
