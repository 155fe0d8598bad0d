"""merge-gate-up: becomes, same numbers, idempotent, leaves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qopt.rewrite import PASSES

NAME = "merge-gate-up"
BEFORE = ("canonicalize", "fuse-silu-mul")


class MLP(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 12, bias)
        self.up = nn.Linear(8, 12, bias)

    def forward(self, x: Tensor) -> Any:
        return F.silu(self.gate(x)) * self.up(x)


def test_becomes(exported: Any, run: Any, body: Any) -> None:
    for bias in (False, True):
        module, x = MLP(bias), torch.randn(3, 5, 8)
        graph = exported(module, x)
        run(graph, *BEFORE, NAME)
        assert body(graph) == (
            f"linear_default = aten.linear(x, gate_up_weight{', gate_up_bias' if bias else ''})\n"
            "split_with_sizes_default = aten.split_with_sizes(linear_default, [12, 12], 2)\n"
            "getitem = getitem(split_with_sizes_default, 0)\n"
            "getitem_1 = getitem(split_with_sizes_default, 1)\n"
            "gated_default = qopt.gated(getitem, getitem_1, 'silu')\n"
            "return [gated_default]"
        )
        assert set(graph.weights) == {"gate_up.weight"} | ({"gate_up.bias"} if bias else set())
        with torch.no_grad():
            torch.testing.assert_close(graph.interpret({"x": x})["output_0"], module(x))
        assert PASSES[NAME]().run(graph) == 0


class SharedMatrix(MLP):
    """One matrix for both."""

    def forward(self, x: Tensor) -> Any:
        return F.silu(self.gate(x)) * self.gate(x + 1)


class TwoInputs(MLP):
    def forward(self, x: Tensor) -> Any:
        return F.silu(self.gate(x)) * self.up(x + 1)


class UpIsRead(MLP):
    def forward(self, x: Tensor) -> Any:
        up = self.up(x)
        return F.silu(self.gate(x)) * up, up


class OneBias(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12, True)


class Tied(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 12, False)
        self.other.weight = self.up.weight

    def forward(self, x: Tensor) -> Any:
        return F.silu(self.gate(x)) * self.up(x) + self.other(x)


def test_leaves(exported: Any, run: Any, body: Any) -> None:
    """E01, C01: a matrix that is read elsewhere, or a projection of something else."""
    for kind in (SharedMatrix, TwoInputs, UpIsRead, OneBias, Tied):
        module, x = kind(), torch.randn(3, 5, 8)
        graph = exported(module, x)
        run(graph, *BEFORE)
        before = body(graph)
        assert PASSES[NAME]().run(graph) == 0, kind
        assert body(graph) == before
        with torch.no_grad():
            want = module(x)
        got = graph.interpret({"x": x})["output_0"]
        torch.testing.assert_close(got, want[0] if isinstance(want, tuple) else want)


def test_models(captured: Any, tiny: Any, run: Any, worst: Any) -> None:
    for family in ("llama", "gemma"):
        graph = captured(family)
        assert run(graph, *BEFORE, NAME)[-1].rewrites == 2
        assert worst(graph, tiny(family)[1]) < 1e-5
