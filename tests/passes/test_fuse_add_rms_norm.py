"""fuse-add-rms-norm: becomes, same numbers, idempotent, leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qopt.rewrite import PASSES

NAME = "fuse-add-rms-norm"
BEFORE = ("canonicalize", "fuse-rms-norm")


class Block(nn.Module):
    """A residual sum, its norm, and the sum again for the next residual."""

    def __init__(self, layer_norm: bool = False) -> None:
        super().__init__()
        self.layer_norm = layer_norm
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 8))
        self.bias = nn.Parameter(torch.linspace(-1, 1, 8))

    def norm(self, x: Tensor) -> Tensor:
        if self.layer_norm:
            return F.layer_norm(x, (8,), self.weight, self.bias, 1e-6)
        return F.rms_norm(x, (8,), self.weight, 1e-6)

    def forward(self, x: Tensor, residual: Tensor) -> Any:
        total = x + residual
        return self.norm(total), total * 2, total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer_norm", [False, True])
def test_becomes(layer_norm: bool, dtype: torch.dtype, exported: Any, run: Any, body: Any) -> None:
    """E01, E09: the sum is a result too, and each reader gets its own."""
    module = Block(layer_norm).to(dtype)
    args = torch.randn(3, 5, 8, dtype=dtype), torch.randn(3, 5, 8, dtype=dtype)
    graph = exported(module, *args)
    run(graph, *BEFORE, NAME)
    kind = "add_layer_norm" if layer_norm else "add_rms_norm"
    rest = "bias, 1e-06" if layer_norm else f"1e-06, {dtype == torch.float32}"
    assert body(graph) == (
        f"{kind}_default = qopt.{kind}(x, residual, weight, {rest})\n"
        f"getitem = getitem({kind}_default, 0)\n"
        f"getitem_1 = getitem({kind}_default, 1)\n"
        "mul = aten.mul.Tensor(getitem_1, 2)\n"
        "return [getitem, mul, getitem_1]"
    )
    got = list(graph.interpret(dict(zip(("x", "residual"), args, strict=True))).values())
    with torch.no_grad():
        want = module(*args)
    torch.testing.assert_close(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[2], want[2])
    assert PASSES[NAME]().run(graph) == 0


class Broadcasts(Block):
    def forward(self, x: Tensor, residual: Tensor) -> Any:
        return self.norm(x + residual[:, :1])


class Scaled(Block):
    def forward(self, x: Tensor, residual: Tensor) -> Any:
        return self.norm(torch.add(x, residual, alpha=2))


class WithANumber(Block):
    def forward(self, x: Tensor, residual: Tensor) -> Any:
        return self.norm(x + 1.0)


class TwoDtypes(Block):
    def forward(self, x: Tensor, residual: Tensor) -> Any:
        return self.norm(x.half() + residual)


class TwoAxes(Block):
    def forward(self, x: Tensor, residual: Tensor) -> Any:
        return F.layer_norm(x + residual, (5, 8), None, None, 1e-6)


class WeightFromTheSum(Block):
    """The sum is read before the norm's weight exists: one op cannot stand in both places."""

    def forward(self, x: Tensor, residual: Tensor) -> Any:
        total = x + residual
        weight = total.sum((0, 1)).cos()
        return F.rms_norm(total, (8,), weight, 1e-6)


@pytest.mark.parametrize(
    "kind", [Broadcasts, Scaled, WithANumber, TwoDtypes, TwoAxes, WeightFromTheSum]
)
def test_leaves(kind: Any, exported: Any, run: Any, body: Any) -> None:
    """E08 among them: a sum of two dtypes keeps its cast."""
    module, args = kind(), (torch.randn(3, 5, 8), torch.randn(3, 5, 8))
    graph = exported(module, *args, shapes=({}, {}))
    run(graph, *BEFORE)
    before = body(graph)
    assert PASSES[NAME]().run(graph) == 0
    assert body(graph) == before
    with torch.no_grad():
        got = graph.interpret(dict(zip(("x", "residual"), args, strict=True)))["output_0"]
        torch.testing.assert_close(got, module(*args))


class TwoNorms(Block):
    def forward(self, x: Tensor, residual: Tensor) -> Any:
        total = x + residual
        return self.norm(total), F.rms_norm(total, (8,), self.bias, 1e-6)


def test_a_second_norm_of_the_same_sum_stays(exported: Any, run: Any) -> None:
    module, args = TwoNorms(), (torch.randn(3, 5, 8), torch.randn(3, 5, 8))
    graph = exported(module, *args)
    assert run(graph, *BEFORE, NAME)[-1].rewrites == 1
    got = graph.interpret(dict(zip(("x", "residual"), args, strict=True)))
    with torch.no_grad():
        for a, b in zip(got.values(), module(*args), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("family", "count"), [("llama", 4), ("gpt2", 5), ("gemma2", 4)])
def test_every_residual_of_a_model(family: str, count: int, captured: Any, run: Any) -> None:
    graph = captured(family)
    assert run(graph, "canonicalize", "fold-constants", "fuse-rms-norm", NAME)[-1].rewrites == count
