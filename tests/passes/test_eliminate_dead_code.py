"""eliminate-dead-code: becomes, same numbers, idempotent, leaves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qopt.rewrite import PASSES

NAME = "eliminate-dead-code"


class Dead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        (x * self.weight).cos()
        return x.sin()


def test_becomes(exported: Any, run: Any, body: Any) -> None:
    x = torch.randn(3, 8)
    graph = exported(Dead(), x)
    (record,) = run(graph, NAME)
    assert record.rewrites == 2
    assert body(graph) == "sin = aten.sin(x)\nreturn [sin]"
    assert not graph.weights
    torch.testing.assert_close(graph.interpret({"x": x})["output_0"], x.sin())
    assert PASSES[NAME]().run(graph) == 0


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        h[:, :4].mul_(0.0)
        return h


def test_leaves_a_write(exported: Any, run: Any) -> None:
    """E04: torch.fx removes a write whose result nobody reads; the cache would lose its tokens."""
    x = torch.randn(3, 8)
    graph = exported(Writes(), x)
    run(graph, "canonicalize", NAME)
    want = torch.cat([torch.zeros(3, 4), x[:, 4:] * 2], 1)
    torch.testing.assert_close(graph.interpret({"x": x})["output_0"], want)


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.rand(2)
        return x + torch.rand(8)


def test_leaves_a_random_draw(exported: Any, run: Any) -> None:
    """A draw moves the generator: what is drawn after it would change."""
    graph = exported(Draws(), torch.randn(3, 8))
    run(graph, NAME)
    torch.manual_seed(0)
    want = Draws()(torch.zeros(3, 8))
    torch.manual_seed(0)
    assert torch.equal(graph.interpret({"x": torch.zeros(3, 8)})["output_0"], want)


class Unused(nn.Module):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + 1


def test_leaves_an_input_that_nothing_reads(exported: Any, run: Any) -> None:
    """A06: the signature is what was declared."""
    graph = exported(Unused(), torch.randn(3, 8), torch.randn(3, 8))
    run(graph, "canonicalize", NAME)
    assert [n.name for n in graph.inputs] == ["x", "positions"]
    got = graph.interpret({"x": torch.zeros(3, 8), "positions": torch.zeros(3, 8)})
    assert torch.equal(got["output_0"], torch.ones(3, 8))
