"""fuse-gelu: becomes, same numbers, idempotent, leaves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qopt.rewrite import PASSES

Form = Callable[[Tensor], Tensor]
ROOT = math.sqrt(2 / math.pi)


class Act(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return self.form(x)


def gpt2(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0))))


def fast(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def exact(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


@pytest.mark.parametrize(
    ("form", "kind"), [(gpt2, "tanh"), (fast, "tanh"), (exact, "none")], ids=["gpt2", "fast", "erf"]
)
def test_fuses(form: Form, kind: str, exported: Any, run: Any, body: Any) -> None:
    x = torch.randn(3, 5, 8) * 3
    graph = exported(Act(form), x)
    run(graph, "canonicalize", "fuse-gelu")
    assert body(graph) == (
        f"gelu_default = aten.gelu(x, approximate='{kind}')\nreturn [gelu_default]"
    )
    got = graph.interpret({"x": x})["output_0"]
    torch.testing.assert_close(got, F.gelu(x, approximate=kind), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(got, form(x), atol=2e-6, rtol=2e-6)
    assert PASSES["fuse-gelu"]().run(graph) == 0


def other_constant(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.05 * torch.pow(x, 3.0))))


def inner_used(x: Tensor) -> Any:
    inner = torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))
    return 0.5 * x * (1.0 + inner), inner


@pytest.mark.parametrize("form", [other_constant, inner_used], ids=["constant", "inner-value-used"])
def test_leaves(form: Form, exported: Any, run: Any, body: Any) -> None:
    graph = exported(Act(form), torch.randn(3, 5, 8))
    run(graph, "canonicalize")
    before = body(graph)
    assert PASSES["fuse-gelu"]().run(graph) == 0
    assert body(graph) == before
    assert PASSES["fuse-gelu"]().explain(graph)


def test_gpt2_and_phi_have_one_in_each_layer(captured: Any, run: Any) -> None:
    for family in ("gpt2", "phi"):
        graph = captured(family)
        run(graph, "canonicalize")
        assert PASSES["fuse-gelu"]().run(graph) == len(graph.info.layers)
