from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qopt import kernel, kernel_build

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def operands(
    count: int, width: int, outputs: int, dtype: torch.dtype, kind: torch.dtype
) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(count, width).to(dtype)
    x[1:2] = 0  # a row without a scale
    weight = torch.randn(outputs, width)
    weight[:, ::3] *= 2.0**-7 if kind == E4M3 else 2.0**-15  # subnormal numbers
    scales = torch.rand(outputs) / width**0.5
    return x, weight.to(kind), scales, torch.randn(outputs).to(dtype)


@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(
    ("count", "width", "outputs"),
    [(1, 576, 96), (3, 41, 7), (0, 64, 8), (17, 130, 129), (33, 896, 5), (1, 4864, 9)],
)
def test_the_reference(
    interpreter: Any, dtype: torch.dtype, kind: torch.dtype, count: int, width: int, outputs: int
) -> None:
    x, weight, scales, bias = operands(count, width, outputs, dtype, kind)
    one, reduced = scales[:1].to(dtype), max(256, width)
    for args, quantize in (((scales, bias), False), ((scales, bias), True), ((one,), True)):
        launches = (2 if quantize else 1) if count else 0
        interpreter.agrees(
            "fp8_linear", x, weight, *args,
            quantize=quantize, launches=launches, reduced=reduced,
        )  # fmt: skip


@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
def test_rounding_is_torchs(interpreter: Any, kind: torch.dtype) -> None:
    """Every number of the grid and all halfway between two: to the even one, subnormal or not."""
    grid = torch.arange(127 if kind == E4M3 else 124, dtype=torch.uint8).view(kind).float()
    x = torch.cat([grid, (grid[1:] + grid[:-1]) / 2])
    x = torch.cat([x, -x])[None]  # its largest is the grid's: a scale of 1
    weight = torch.eye(x.shape[1]).to(kind)
    (got,), _ = interpreter.run("fp8_linear", x, weight, torch.ones(1), quantize=True)
    assert torch.equal(got, x.to(kind).float())


def test_strides(interpreter: Any) -> None:
    """H02: slices of the rows of x and of the weight, and of its scales."""
    x, weight, scales, _ = operands(6, 130, 18, torch.float16, E4M3)
    weight = weight.view(torch.uint8)[::2, 2:].view(E4M3)
    args = (weight, torch.stack([scales, scales], 1)[::2, 1])
    for quantize in (False, True):
        interpreter.agrees(
            "fp8_linear", x.view(2, 3, 130)[:, 1:, 1:129], *args,
            quantize=quantize, launches=1 + quantize, reduced=256,
        )  # fmt: skip


def test_refuses(interpreter: Any) -> None:
    x, weight, scales, _ = operands(2, 64, 5, torch.float16, E4M3)
    told = interpreter.refusal("fp8_linear", x, weight.half(), scales)
    assert "the weight is float16, not float8_e4m3fn or float8_e5m2" in told
    assert "types differ" in interpreter.refusal("fp8_linear", x, weight, scales, scales)


def test_a_gpu_without_the_type(monkeypatch: pytest.MonkeyPatch) -> None:
    from qopt.kernels.fp8_linear import has_e4m3

    assert kernel.load() is None
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, has in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert has_e4m3(torch.device("cuda")) is has


def test_a_build_says_what_it_leaves_out(tmp_path: Path) -> None:
    """sm_80 has no e4m3: the table and the index tell, and what is there is e5m2."""
    (one,) = kernel.KERNELS["fp8_linear"]
    assert one.lacks("sm_90") is None
    made = {t for form in one.forms("sm_80") for _, t in form.types}
    assert "*fp8e5" in made
    assert "*fp8e4nv" not in made
    kernel_build.write_index(tmp_path, "sm_80", [], [{"op": "fp8_linear", "why": "no type"}])
    assert '"why": "no type"' in (tmp_path / "kernels.json").read_text()
    left = [{"op": "fp8_linear", "kernel": "triton", "why": one.lacks("sm_80") or ""}]
    _, table = kernel_build.Report("sm_80", "", [], left).tables()
    assert table.rows == [("fp8_linear", "triton", "float8_e4m3fn: sm_80 has no such type")]
