"""fuse-norm-linear: becomes, same numbers, idempotent, leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qopt.rewrite import PASSES

NAME = "fuse-norm-linear"
BEFORE = ("canonicalize", "fuse-rms-norm", "fuse-add-rms-norm")
FUSED = torch.ops.qopt.rms_norm_linear.default


class Block(nn.Module):
    """A norm and what reads it."""

    def __init__(self, bias: bool = False, silu: bool = False, twice: bool = False) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.linspace(0.5, 2, 8))
        self.linear = nn.Linear(8, 6, bias=bias)
        self.silu, self.twice = silu, twice

    def forward(self, x: Tensor) -> Any:
        normed = F.rms_norm(x, (8,), self.norm, 1e-6)
        y = self.linear(normed)
        y = F.silu(y) if self.silu else y
        return (y, normed * 2) if self.twice else y


class Residual(Block):
    def forward(self, x: Tensor) -> Any:
        total = x + x.sin()
        return self.linear(F.rms_norm(total, (8,), self.norm, 1e-6)), total * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("silu", [False, True])
def test_becomes(
    bias: bool, silu: bool, dtype: torch.dtype, exported: Any, run: Any, body: Any
) -> None:
    torch.manual_seed(0)
    module = Block(bias, silu).to(dtype)
    x = torch.randn(3, 5, 8, dtype=dtype)
    graph = exported(module, x)
    run(graph, *BEFORE, NAME)
    (node,) = [n for n in graph.nodes if n.op == "call_function"]
    assert node.target is FUSED
    assert node.args[-1] == ("silu" if silu else None)
    assert (node.args[3] is not None) == bias
    with torch.no_grad():
        torch.testing.assert_close(graph.interpret({"x": x})["output_0"], module(x))
    assert PASSES[NAME]().run(graph) == 0
    graph.verify()


def test_the_sum_of_an_add_rms_norm_stays_its_own_node(exported: Any, run: Any, body: Any) -> None:
    torch.manual_seed(0)
    module, x = Residual(), torch.randn(3, 5, 8)
    graph = exported(module, x)
    run(graph, *BEFORE)
    assert "add_rms_norm" in body(graph)
    run(graph, NAME, "eliminate-dead-code")
    assert body(graph) == (
        "sin = aten.sin(x)\n"
        "add_tensor = aten.add.Tensor(x, sin)\n"
        "rms_norm_linear_default = "
        "qopt.rms_norm_linear(add_tensor, norm, linear_weight, None, 1e-06, True, None)\n"
        "mul = aten.mul.Tensor(add_tensor, 2)\n"
        "return [rms_norm_linear_default, mul]"
    )
    with torch.no_grad():
        for got, want in zip(graph.interpret({"x": x}).values(), module(x), strict=True):
            torch.testing.assert_close(got, want)


def test_leaves_a_norm_that_others_read(exported: Any, run: Any) -> None:
    module, x = Block(twice=True), torch.randn(3, 8)
    graph = exported(module, x)
    run(graph, *BEFORE)
    assert PASSES[NAME]().run(graph) == 0
    (line,) = PASSES[NAME]().explain(graph)
    assert "not one linear alone reads it" in line


class AsWeight(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.linear(y, F.rms_norm(x, (8,), None, 1e-6))


def test_leaves_a_norm_that_is_the_matrix(exported: Any, run: Any) -> None:
    graph = exported(AsWeight(), torch.randn(6, 8), torch.randn(3, 8))
    run(graph, *BEFORE)
    assert PASSES[NAME]().run(graph) == 0
