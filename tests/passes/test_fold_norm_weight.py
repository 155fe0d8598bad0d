"""fold-norm-weight: becomes, same numbers, idempotent, leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qopt.ops import OPS
from qopt.rewrite import PASSES
from qopt.weights import LazyWeight

NAME = "fold-norm-weight"
BEFORE = ("canonicalize", "fuse-rms-norm")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.linspace(0.5, 2, 8))
        self.one = nn.Linear(8, 12)
        self.two = nn.Linear(8, 4, bias=False)

    def normed(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (8,), self.norm, 1e-6)

    def forward(self, x: Tensor) -> Any:
        h = self.normed(x)
        return self.one(h), self.two(h)


def test_becomes(exported: Any, run: Any, body: Any) -> None:
    module, x = Block(), torch.randn(3, 8)
    graph = exported(module, x)
    (record,) = run(graph, *BEFORE, NAME)[2:]
    assert record.rewrites == 1
    assert body(graph) == (
        "rms_norm_default = qopt.rms_norm(x, None, 1e-06, True)\n"
        "linear = aten.linear(rms_norm_default, one_weight_scaled, one_bias)\n"
        "linear_1 = aten.linear(rms_norm_default, two_weight_scaled)\n"
        "return [linear, linear_1]"
    )
    with torch.no_grad():
        want = module(x)
        scaled = module.one.weight * module.norm
    torch.testing.assert_close(graph.weights["one.weight_scaled"].evaluate(), scaled)
    for got, expected in zip(graph.interpret({"x": x}).values(), want, strict=True):
        torch.testing.assert_close(got, expected)
    assert PASSES[NAME]().run(graph) == 0


def test_the_product_is_taken_in_fp32() -> None:
    """B01: gemma's 1 + w in fp32 meets a bf16 matrix, and is rounded once."""
    matrix = torch.randn(4, 8, dtype=torch.bfloat16)
    factor = torch.tensor([16.8125, 1.0009765625] * 4)
    lazy = LazyWeight.memory(matrix).scale(LazyWeight.memory(factor), 1)
    assert torch.equal(lazy.evaluate(), (matrix.float() * factor).to(torch.bfloat16))


class AlsoAResult(Block):
    def forward(self, x: Tensor) -> Any:
        h = self.normed(x)
        return self.one(h), h


class ReadByASum(Block):
    def forward(self, x: Tensor) -> Any:
        h = self.normed(x)
        return self.one(h), h + x


class MatrixReadTwice(Block):
    def forward(self, x: Tensor) -> Any:
        return self.one(self.normed(x)), self.one(x)


class MatrixTied(Block):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.one.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Any:
        return self.one(self.normed(x)), self.embedding(x[:, 0].long().clamp(0, 5))


class NormOfTheOutput(Block):
    """Gemma's second norm feeds the residual, no matrix."""

    def forward(self, x: Tensor) -> Any:
        return self.two(x), x + self.normed(x)


class Unpacked(Block):
    """An int8 matrix, widened in plain sight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("packed", torch.randint(-127, 127, (12, 8), dtype=torch.int8))

    def forward(self, x: Tensor) -> Any:
        packed: Any = self.packed
        return F.linear(self.normed(x), packed.float() * 0.01), x


@pytest.mark.parametrize(
    "kind", [AlsoAResult, ReadByASum, MatrixReadTwice, MatrixTied, NormOfTheOutput, Unpacked]
)
def test_leaves(kind: Any, exported: Any, run: Any, body: Any) -> None:
    """Only where every reader is a matrix of its own, found from the graph and not from names."""
    module, x = kind(), torch.rand(3, 8) * 4
    graph = exported(module, x)
    run(graph, *BEFORE, "fold-constants")
    before = body(graph)
    assert PASSES[NAME]().run(graph) == 0
    assert body(graph) == before
    with torch.no_grad():
        for got, want in zip(graph.interpret({"x": x}).values(), module(x), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_leaves_half_precision(dtype: torch.dtype, captured: Any, run: Any) -> None:
    """A product that is rounded to bf16 is not the matrix and the weight any more."""
    graph = captured("llama", dtype, tie_word_embeddings=False)
    assert run(graph, *BEFORE, NAME)[-1].rewrites == 0


@pytest.mark.parametrize(
    ("family", "overrides", "folded"),
    [
        ("llama", {"tie_word_embeddings": False}, 5),
        ("llama", {"tie_word_embeddings": True}, 4),  # the last norm feeds the embedding
        ("gemma2", {}, 4),  # of nine: four feed the residual, one the embedding
        ("qwen3", {"tie_word_embeddings": False}, 5),  # norms of q and k feed the rotation
    ],
    ids=str,
)
def test_models(
    family: str, overrides: Any, folded: int, captured: Any, tiny: Any, run: Any, worst: Any
) -> None:
    graph = captured(family, **overrides)
    names = ("fold-constants", "eliminate-common-subexpressions", "fuse-rotary-embedding")
    records = run(graph, *BEFORE[:1], *names, "fuse-rms-norm", "merge-qkv", NAME)
    assert records[-1].rewrites == folded
    left = [n for n in graph.find(OPS["rms_norm"].target) if n.args[1] is not None]
    assert len(left) == len(graph.find(OPS["rms_norm"].target)) - folded
    assert worst(graph, tiny(family, **overrides)[1]) < 1e-5
