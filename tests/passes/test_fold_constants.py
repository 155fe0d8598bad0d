"""fold-constants: becomes, same numbers, idempotent, leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qopt.rewrite import PASSES


class PlusOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 + self.weight.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_folds(dtype: torch.dtype, exported: Any, run: Any, body: Any) -> None:
    """B01: 1 + w is taken in fp32, and stays fp32."""
    module, x = PlusOne().to(dtype), torch.randn(3, 8)
    graph = exported(module, x, shapes=({},))
    run(graph, "canonicalize", "fold-constants")
    assert body(graph) == "mul = aten.mul.Tensor(x, folded_add)\nreturn [mul]"
    (weight,) = graph.weights.values()
    assert weight.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(graph.interpret({"x": x})["output_0"], module(x))
    assert PASSES["fold-constants"]().run(graph) == 0


def test_is_lazy(exported: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folding adds a transform and reads nothing."""
    from qopt.weights import LazyWeight

    graph = exported(PlusOne(), torch.randn(3, 8))

    def refuse(self: LazyWeight) -> Tensor:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(LazyWeight, "evaluate", refuse)
    run(graph, "canonicalize", "fold-constants")


def test_a_table_is_folded(exported: Any, run: Any, body: Any) -> None:
    class Table(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.arange(8).float().cos()

    graph = exported(Table(), torch.randn(3, 8))
    run(graph, "canonicalize", "fold-constants")
    assert body(graph) == "mul = aten.mul.Tensor(x, folded_cos)\nreturn [mul]"


class Packed(nn.Module):
    """An int4 matrix and its scales, unpacked in plain sight."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        packed = torch.randint(0, 256, (rows, 16), dtype=torch.uint8)
        self.register_buffer("packed", packed)
        self.register_buffer("scale", torch.rand(rows, 1))

    def forward(self, x: Tensor) -> Tensor:
        packed: Any = self.packed
        scale: Any = self.scale
        low, high = packed & 15, packed >> 4
        both = torch.stack([low, high], -1).flatten(1)
        table: Tensor = (both.float() - 8) * scale
        return x @ table.t()


@pytest.mark.parametrize("rows", [64, 4096])
def test_never_unpacks_a_weight(rows: int, exported: Any, run: Any) -> None:
    """E07: of whatever size, a packed weight stays packed."""
    module, x = Packed(rows), torch.randn(3, 32)
    graph = exported(module, x)
    before = sum(w.nbytes for w in graph.weights.values())
    run(graph, "canonicalize", "fold-constants")
    assert sum(w.nbytes for w in graph.weights.values()) <= before
    assert any(w.dtype == torch.uint8 for w in graph.weights.values())
    torch.testing.assert_close(graph.interpret({"x": x})["output_0"], module(x))


class Grows(nn.Module):
    """A shared matrix, read as it is and widened."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.weight[x.long()], self.weight * 2


def test_never_copies_a_shared_matrix(exported: Any, run: Any) -> None:
    """C01, E07: what else reads the weight would keep the first copy beside the second."""
    graph = exported(Grows(), torch.ones(3))
    before = sum(w.nbytes for w in graph.weights.values())
    run(graph, "canonicalize", "fold-constants")
    assert sum(w.nbytes for w in graph.weights.values()) == before


class Random(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(8)


class Filled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        memory = torch.empty(8)
        memory[2:] = 1.0
        memory[:2] = 0.0
        return x + memory


@pytest.mark.parametrize("kind", [Random, Filled], ids=lambda k: k.__name__)
def test_leaves_chance_and_memory(kind: Any, exported: Any, run: Any, body: Any) -> None:
    """E05: a random draw is made at each run, and what is written later is no constant."""
    graph = exported(kind(), torch.randn(3, 8))
    run(graph, "canonicalize")
    run(graph, "fold-constants")
    x = torch.zeros(3, 8)
    if kind is Random:
        one, two = (graph.interpret({"x": x})["output_0"] for _ in range(2))
        assert not torch.equal(one, two)
    else:
        want = torch.tensor([0.0, 0, 1, 1, 1, 1, 1, 1]).expand(3, 8)
        assert torch.equal(graph.interpret({"x": x})["output_0"], want)


def test_budget(exported: Any, run: Any) -> None:
    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.ones(4096) * 2

    graph = exported(Wide(), torch.randn(3, 4096))
    run(graph, "canonicalize")
    assert PASSES["fold-constants"](budget=1024).run(graph) == 0  # type: ignore[call-arg]
    assert PASSES["fold-constants"]().run(graph) > 0
