"""fuse-silu-mul: becomes, same numbers, idempotent, leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qopt.rewrite import PASSES

Form = Callable[[Tensor, Tensor], Tensor]


class Gate(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form

    def forward(self, gate: Tensor, up: Tensor) -> Any:
        return self.form(gate, up)


FORMS: dict[str, tuple[Form, str]] = {
    "silu": (lambda g, u: F.silu(g) * u, "silu"),
    "silu-behind": (lambda g, u: u * F.silu(g), "silu"),
    "swish": (lambda g, u: (g * torch.sigmoid(g)) * u, "silu"),
    "gelu": (lambda g, u: F.gelu(g) * u, "gelu"),
    "gelu-tanh": (lambda g, u: F.gelu(g, approximate="tanh") * u, "gelu_tanh"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_fuses(name: str, dtype: torch.dtype, exported: Any, run: Any, body: Any) -> None:
    form, activation = FORMS[name]
    gate, up = torch.randn(3, 5, 8, dtype=dtype) * 3, torch.randn(3, 5, 8, dtype=dtype)
    graph = exported(Gate(form), gate, up)
    run(graph, "canonicalize", "fuse-silu-mul")
    assert body(graph) == (
        f"gated_default = qopt.gated(gate, up, '{activation}')\nreturn [gated_default]"
    )
    got = graph.interpret({"gate": gate, "up": up})["output_0"]
    near = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(got, form(gate, up), atol=near, rtol=near)  # swish rounds twice
    assert PASSES["fuse-silu-mul"]().run(graph) == 0


def test_the_two_gelus_are_told_apart(exported: Any, run: Any) -> None:
    gate, up = torch.linspace(-4, 4, 64).view(1, 8, 8), torch.ones(1, 8, 8)
    got = {}
    for name in ("gelu", "gelu-tanh"):
        graph = exported(Gate(FORMS[name][0]), gate, up)
        run(graph, "canonicalize", "fuse-silu-mul")
        got[name] = graph.interpret({"gate": gate, "up": up})["output_0"]
    assert (got["gelu"] - got["gelu-tanh"]).abs().max() > 1e-4


def used_elsewhere(gate: Tensor, up: Tensor) -> Any:
    activated = F.silu(gate)
    return activated * up, activated


def broadcast(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up[:, :1]


def two_dtypes(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate.half()) * up


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (used_elsewhere, "silu is also used by output"),
        (broadcast, "gate and up differ in shape or dtype"),
        (two_dtypes, "gate and up differ in shape or dtype"),
    ],
)
def test_leaves(form: Form, reason: str, exported: Any, run: Any, body: Any) -> None:
    """E02, E08: broadcasting and two dtypes stay as they are."""
    graph = exported(Gate(form), torch.randn(3, 5, 8), torch.randn(3, 5, 8))
    run(graph, "canonicalize")
    before = body(graph)
    fuse = PASSES["fuse-silu-mul"]()
    assert fuse.run(graph) == 0
    assert body(graph) == before
    (line,) = fuse.explain(graph)
    assert reason in line


def test_every_gate_of_a_model_is_taken(captured: Any, run: Any) -> None:
    for family, activation in {"llama": "silu", "gemma": "gelu_tanh"}.items():
        graph = captured(family)
        run(graph, "canonicalize", "fuse-silu-mul")
        gates = graph.find(torch.ops.qopt.gated.default)
        assert [node.args[2] for node in gates] == [activation] * 2
