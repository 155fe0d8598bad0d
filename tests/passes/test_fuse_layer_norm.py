"""fuse-layer-norm: becomes, same numbers, idempotent, leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qopt.rewrite import PASSES

Form = Callable[[Tensor, Tensor, Tensor], Tensor]


class Norm(nn.Module):
    def __init__(self, form: Form, weight: int = 8) -> None:
        super().__init__()
        self.form = form
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, weight))
        self.bias = nn.Parameter(torch.linspace(-1.0, 1.0, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, self.weight, self.bias)


def divided(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return weight * (centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)) + bias


def reciprocal(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)
    return bias + centred * scale * weight


def other_axis(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(1, keepdim=True)
    return weight * (centred / torch.sqrt(centred.pow(2).mean(1, keepdim=True) + 1e-5)) + bias


def unbiased(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.pow(2).sum(-1, keepdim=True) / 7
    return weight * (centred / torch.sqrt(variance + 1e-5)) + bias


def epsilon_outside(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return weight * (centred / (torch.sqrt(centred.pow(2).mean(-1, keepdim=True)) + 1e-5)) + bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [divided, reciprocal])
def test_fuses(form: Form, dtype: torch.dtype, exported: Any, run: Any, body: Any) -> None:
    module, x = Norm(form).to(dtype), torch.randn(3, 5, 8, dtype=dtype)
    graph = exported(module, x)
    run(graph, "canonicalize", "fuse-layer-norm")
    assert body(graph) == (
        "layer_norm_default = aten.layer_norm(x, [8], weight, bias, 1e-05)\n"
        "return [layer_norm_default]"
    )
    with torch.no_grad():
        want = module.float()(x.float()).to(dtype)  # in fp32: the written form rounds at each step
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    got = graph.interpret({"x": x})["output_0"]
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    assert PASSES["fuse-layer-norm"]().run(graph) == 0


@pytest.mark.parametrize("form", [other_axis, unbiased, epsilon_outside])
def test_leaves(form: Form, exported: Any, run: Any, body: Any) -> None:
    module, x = Norm(form), torch.randn(3, 5, 8)
    graph = exported(module, x)
    run(graph, "canonicalize")
    before = body(graph)
    fuse = PASSES["fuse-layer-norm"]()
    assert fuse.run(graph) == 0
    assert body(graph) == before
    assert "stands where the pattern has" in fuse.explain(graph)[0]


def test_leaves_a_weight_that_broadcasts(exported: Any, run: Any) -> None:
    """E02."""
    graph = exported(Norm(divided, weight=1), torch.randn(3, 5, 8))
    run(graph, "canonicalize", "fuse-layer-norm")
    assert not graph.find(torch.ops.aten.layer_norm.default)
    (line,) = PASSES["fuse-layer-norm"]().explain(graph)
    assert "weight has another shape than a row of 8" in line
