"""Linear by a weight in fp8: x as it is, or rounded to the same fp8 row by row."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from qopt import ops
from qopt.kernel import FLOATS, TYPES, Form, forms_of, kernel, rows, unfit
from qopt.kernels.int8_linear import (
    ALIGNED,
    FEW,
    GRID,
    PRODUCT,
    _scaled_linear_kernel,
    product,
    quantize_forms,
    quantize_rows,
    tile,
)

KINDS = (torch.float8_e4m3fn, torch.float8_e5m2)


def lacks(arch: str) -> str | None:
    """What an architecture has no type for."""
    return "float8_e4m3fn: sm_80 has no such type" if arch == "sm_80" else None


def has_e4m3(device: torch.device) -> bool:
    """Whether Triton has the type there; sizes go by `architecture`, which is coarser."""
    return bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= (8, 9)


def forms(arch: str) -> Iterator[Form]:
    """Every form that the launcher asks for, but for what an architecture lacks."""
    for kind in KINDS[1:] if lacks(arch) else KINDS:
        held = TYPES[kind]
        yield from quantize_forms(held)
        for count in (1, FEW + 1):
            yield from forms_of(
                _scaled_linear_kernel,
                PRODUCT | {"x_ptr": held, "weight_ptr": held},
                tile(count, kind, arch),
                grid=GRID,
                aligned=ALIGNED,
            )
            for dtype in FLOATS:
                yield from forms_of(
                    _scaled_linear_kernel,
                    PRODUCT | {"weight_ptr": held},
                    tile(count, dtype, arch),
                    [dtype],
                    grid=GRID,
                    aligned=ALIGNED,
                )


def refuses(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    quantize: bool = False,
) -> str | None:
    """A weight in float8_e5m2, or float8_e4m3fn where the GPU has it; x kept or rounded to it.

    x and bias of one type: float32, float16, bfloat16. Any number of rows.
    """
    if weight.dtype not in KINDS:
        return f"the weight is {weight.dtype}, not float8_e4m3fn or float8_e5m2".replace(
            "torch.", ""
        )
    if weight.dtype == KINDS[0] and weight.is_cuda and not has_e4m3(weight.device):
        return "the GPU has no float8_e4m3fn: compute capability 8.9 is the first"
    return unfit(weight, scales, same=[x, bias])


@kernel(ops.fp8_linear, "triton", refuses=refuses, forms=forms, lacks=lacks)
def fp8_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    quantize: bool = False,
) -> Tensor:
    """`qopt::fp8_linear`; summed in fp32, also where tensor cores would keep fewer bits."""
    flat, matrix = rows(x), rows(weight)
    if flat.shape[0] == 0 or matrix.shape[0] == 0:
        return x.new_empty(*x.shape[:-1], matrix.shape[0])
    factors = None
    if quantize:
        flat, factors = quantize_rows(flat, weight.dtype, None)
    y: Tensor = product(flat, matrix, factors, scales, bias, x.dtype)
    return y.view(*x.shape[:-1], matrix.shape[0])
