"""fuse-linear-silu: becomes, same numbers, idempotent, leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qopt.rewrite import PASSES

NAME = "fuse-linear-silu"
BEFORE = ("canonicalize", "fuse-silu-mul", "merge-gate-up")
FUSED = torch.ops.qopt.linear_silu.default


class MLP(nn.Module):
    """A gated MLP, its parts to be chosen."""

    def __init__(self, bias: bool = False, act: Any = F.silu) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(8, 6, bias=bias) for _ in "gu")
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        out: Tensor = self.act(gate) * up
        return out


class Lone(nn.Module):
    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.linear, self.twice = nn.Linear(8, 6), twice

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return F.silu(y) + y if self.twice else F.silu(y)


class Swapped(nn.Module):
    """Up comes first: the halves are not in the op's order."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.linear(x).chunk(2, -1)
        out: Tensor = F.silu(gate) * up
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [MLP, lambda: MLP(bias=True), Lone], ids=["mlp", "bias", "lone"])
def test_becomes(make: Any, dtype: torch.dtype, exported: Any, run: Any) -> None:
    torch.manual_seed(0)
    module, x = make().to(dtype), torch.randn(3, 5, 8, dtype=dtype)
    graph = exported(module, x)
    run(graph, *BEFORE, NAME, "eliminate-dead-code")
    (node,) = [n for n in graph.nodes if n.op == "call_function"]
    assert node.target is FUSED
    assert node.args[3] is isinstance(module, MLP)
    with torch.no_grad():
        torch.testing.assert_close(graph.interpret({"x": x})["output_0"], module(x))
    assert PASSES[NAME]().run(graph) == 0
    graph.verify()


@pytest.mark.parametrize(
    "make",
    [Swapped, lambda: Lone(twice=True), lambda: MLP(act=F.gelu)],
    ids=["swapped", "twice", "gelu"],
)
def test_leaves(make: Any, exported: Any, run: Any, body: Any) -> None:
    graph = exported(make(), torch.randn(3, 8))
    run(graph, *BEFORE)
    before = body(graph)
    item = PASSES[NAME]()
    assert item.run(graph) == 0
    assert body(graph) == before
    (line,) = item.explain(graph)
    assert "of one linear" in line


def test_every_mlp_of_a_decoder(captured: Any, tiny: Any, run: Any, worst: Any) -> None:
    graph = captured("llama")
    run(graph, *BEFORE)
    (record,) = run(graph, NAME)
    assert record.rewrites == 2
    assert worst(graph, tiny("llama")[1]) < 1e-5
