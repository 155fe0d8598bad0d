"""The gate of a gated MLP: one program a block of a row, gate and up read once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qopt import ops
from qopt.kernel import Form, forms_of, kernel, launch, rows, unfit

TILE: dict[str, Any] = {"BLOCK": 1024, "num_warps": 4, "num_stages": 1}  # elements of a row
MAX_BLOCKS = 65535  # programs along the second axis of a grid


@triton.jit
def _gated_kernel(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    y_ptr: tl.tensor,
    gate_stride: tl.int64,
    up_stride: tl.int64,
    width: tl.int32,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + row * gate_stride + cols, mask=cols < width, other=0.0)
    up = tl.load(up_ptr + row * up_stride + cols, mask=cols < width, other=0.0)
    x = gate.to(tl.float32)
    if ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # tanh(u) = 2 sigmoid(2u) - 1, so 0.5 (1 + tanh(u)) is sigmoid(2u)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    x = x.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(y_ptr + row * width + cols, x.to(gate.dtype), mask=cols < width)


def forms(arch: str) -> Iterator[Form]:
    """Every form that the launcher asks for; all architectures take the same."""
    for activation in ops.ACTIVATIONS:
        yield from forms_of(
            _gated_kernel,
            {},
            TILE | {"ACTIVATION": activation},
            grid="(rows, ceil(width / BLOCK), 1)",
            aligned=("gate_stride", "up_stride", "width"),
        )


def refuses(gate: Tensor, up: Tensor, activation: str = "silu") -> str | None:
    """Rows of any stride, as those of a merged projection; gate and up of one shape and type.

    Types: float32, float16, bfloat16.
    """
    if gate.shape != up.shape:
        return "gate and up differ in shape"
    if gate.dim() and gate.shape[-1] > MAX_BLOCKS * TILE["BLOCK"]:
        return f"rows of {gate.shape[-1]} elements exceed {MAX_BLOCKS * TILE['BLOCK']}"
    return unfit(same=[gate, up])


@kernel(ops.gated, "triton", refuses=refuses, forms=forms)
def gated(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """`qopt::gated`; the activation is rounded before it multiplies, as the reference does."""
    first, second = rows(gate), rows(up)
    y = torch.empty(first.shape, dtype=gate.dtype, device=gate.device)
    count, width = first.shape
    if gate.numel():
        launch(
            _gated_kernel,
            (count, triton.cdiv(width, TILE["BLOCK"])),
            first,
            second,
            y,
            first.stride(0),
            second.stride(0),
            width,
            ACTIVATION=activation,
            **TILE,
        )
    return y.view(gate.shape)
