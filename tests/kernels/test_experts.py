from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


def mixture(
    count: int, experts: int, top: int, width: int, inner: int, dtype: torch.dtype, gates: int = 2
) -> list[Tensor]:
    """x, ids, weights, up, its bias, down, its bias."""
    torch.manual_seed(count + experts)
    choices = [torch.randperm(experts)[:top] for _ in range(count)]
    ids = torch.stack(choices) if count else torch.zeros(0, top).long()
    return [
        torch.randn(count, width).to(dtype),
        ids,
        torch.rand(count, top),
        (torch.randn(experts, gates * inner, width) / width**0.5).to(dtype),
        torch.randn(experts, gates * inner).to(dtype),
        (torch.randn(experts, width, inner) / inner**0.5).to(dtype),
        torch.randn(experts, width).to(dtype),
    ]


@pytest.mark.parametrize(
    ("count", "experts", "top", "width", "inner"),
    [
        (1, 4, 2, 64, 41),
        (3, 8, 2, 41, 33),
        (0, 4, 2, 16, 8),
        (50, 4, 3, 33, 96),
        (7, 1, 1, 1, 1),
        (5, 64, 4, 8, 8),
    ],
)
def test_the_reference(
    interpreter: Any,
    dtype: torch.dtype,
    count: int,
    experts: int,
    top: int,
    width: int,
    inner: int,
) -> None:
    args = mixture(count, experts, top, width, inner, dtype)
    launches = 2 * int(count > 0)
    interpreter.agrees("experts", *args, activation="silu", launches=launches, reduced=2048)


@pytest.mark.parametrize("layout", ["concatenated", "interleaved", "single"])
@pytest.mark.parametrize("transposed", [False, True])
def test_layouts(interpreter: Any, layout: str, transposed: bool) -> None:
    x, ids, weights, up, _, down, _ = mixture(
        9, 4, 2, 20, 12, torch.float32, 1 if layout == "single" else 2
    )
    options: dict[str, Any] = {"activation": "gelu_tanh", "layout": layout}
    if layout != "single":
        options |= {"activation": "swish", "alpha": 1.7, "limit": 1.0, "up_offset": 1.0}
    if transposed:
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    interpreter.agrees(
        "experts", x, ids, weights, up, None, down, None,
        transposed=transposed, launches=2, reduced=2048, **options,
    )  # fmt: skip


def test_uneven_choices(interpreter: Any) -> None:
    """All tokens at one expert, one expert twice for a token, and ids that are no expert's."""
    args = mixture(40, 6, 2, 16, 16, torch.float32)
    for ids in (
        torch.full((40, 2), 5),
        torch.tensor([0, 3]).expand(40, 2),
        torch.randint(-1, 8, (40, 2)),
        torch.full((40, 2), 6),
    ):
        interpreter.agrees(
            "experts", args[0], ids, *args[2:], activation="silu", launches=2, reduced=2048
        )


def test_strides(interpreter: Any) -> None:
    """H02: slices of x, of the choices and of the matrices; fp16 with weights in fp32."""
    x, ids, weights, up, up_bias, down, down_bias = mixture(9, 4, 2, 20, 12, torch.float16)
    interpreter.agrees(
        "experts", torch.cat([x, x], 1)[:, 7:27], torch.cat([ids, ids], 1)[:, 1:3],
        torch.cat([weights, weights], 1)[:, ::2], torch.cat([up, up], 2)[..., :20], up_bias,
        torch.cat([down, down], 1)[:, ::2], down_bias,
        activation="silu", launches=2, reduced=2048,
    )  # fmt: skip


def test_refuses(interpreter: Any) -> None:
    x, ids, weights, up, _, down, _ = mixture(3, 4, 2, 20, 12, torch.float32)
    told = interpreter.refusal(
        "experts", x, ids, weights, up.repeat_interleave(2, 2)[..., ::2], None, down, None,
        activation="silu",
    )  # fmt: skip
    assert "neither rows nor columns of up" in told
    told = interpreter.refusal(
        "experts", x.half(), ids, weights, up, None, down, None, activation="silu"
    )
    assert "types differ" in told
