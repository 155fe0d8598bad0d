"""eliminate-common-subexpressions: becomes, same numbers, idempotent, leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qopt.rewrite import PASSES

NAME = "eliminate-common-subexpressions"


class Call(nn.Module):
    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return self.form(x)


def test_becomes(exported: Any, run: Any, body: Any) -> None:
    def form(x: Tensor) -> Tensor:
        return (x.cos() + 1) * (x.cos() + 1).sin()

    x = torch.randn(3, 8)
    graph = exported(Call(form), x)
    (record,) = run(graph, NAME)
    assert record.rewrites == 2
    assert body(graph) == (
        "cos = aten.cos(x)\nadd = aten.add.Tensor(cos, 1)\nsin = aten.sin(add)\n"
        "mul = aten.mul.Tensor(add, sin)\nreturn [mul]"
    )
    torch.testing.assert_close(graph.interpret({"x": x})["output_0"], form(x))
    assert PASSES[NAME]().run(graph) == 0


def test_reads_of_one_weight_are_one(captured: Any, run: Any) -> None:
    graph = captured("llama", tie_word_embeddings=True)
    run(graph, NAME)
    reads = [n.target for n in graph.nodes if n.op == "get_attr"]
    assert len(reads) == len(set(reads))


KEPT: dict[str, Callable[[Tensor], Any]] = {
    "rand": lambda x: (torch.rand(64), torch.rand(64)),
    "rand_like": lambda x: (torch.rand_like(x), torch.rand_like(x)),
    "randn": lambda x: (torch.randn(64), torch.randn(64)),
    "bernoulli": lambda x: (torch.bernoulli(x.sigmoid()), torch.bernoulli(x.sigmoid())),
    "multinomial": lambda x: (
        torch.multinomial(x.softmax(-1), 6),
        torch.multinomial(x.softmax(-1), 6),
    ),
    "dropout": lambda x: (nn.functional.dropout(x), nn.functional.dropout(x)),
}


@pytest.mark.parametrize("name", KEPT)
def test_leaves_random_draws(name: str, exported: Any, run: Any) -> None:
    """E05."""
    x = torch.randn(8, 8)
    graph = exported(Call(KEPT[name]), x)
    run(graph, "canonicalize", NAME, "eliminate-dead-code")
    first, second = graph.interpret({"x": x}).values()
    assert not torch.equal(first, second)


def two_masks(x: Tensor) -> Tensor:
    """Dropout by hand: allocate, draw, scale, twice."""
    masks = []
    for _ in range(2):
        mask = torch.empty_like(x)
        mask.bernoulli_(0.5)
        mask.div_(0.5)
        masks.append(mask)
    return torch.stack(masks)


def two_buffers(x: Tensor) -> Tensor:
    first, second = torch.empty_like(x), torch.empty_like(x)
    first.fill_(1.0)
    second.fill_(2.0)
    return first[:, :4].contiguous() + second[:, :4]


def before_and_after_a_write(x: Tensor) -> Tensor:
    h = x * 2
    view = h[:, :4]
    one = h.sum()
    view.add_(1)
    return one - h.sum()


def test_two_masks_stay_two(exported: Any, run: Any) -> None:
    """E05: merged buffers would be scaled twice, to a mean of 2."""
    x = torch.ones(256, 256)
    graph = exported(Call(two_masks), x)
    run(graph, "canonicalize", NAME, "eliminate-dead-code")
    first, second = graph.interpret({"x": x})["output_0"]
    assert not torch.equal(first, second)
    for mask in (first, second):
        assert set(mask.unique().tolist()) == {0.0, 2.0}
        assert abs(mask.mean() - 1) < 0.05


@pytest.mark.parametrize("form", [two_buffers, before_and_after_a_write])
def test_leaves_what_is_written(form: Any, exported: Any, run: Any) -> None:
    """E05, E06."""
    x = torch.randn(3, 8)
    graph = exported(Call(form), x)
    run(graph, "canonicalize", NAME, "eliminate-dead-code")
    torch.testing.assert_close(graph.interpret({"x": x})["output_0"], form(x))


def test_numbers_of_two_types_differ(exported: Any, run: Any) -> None:
    """1, 1.0 and True are equal in Python, not in what they compute."""
    form = lambda x: (x + 1, x + 1.0)  # noqa: E731
    x = torch.arange(8).view(2, 4)
    graph = exported(Call(form), x)
    run(graph, NAME)
    got = list(graph.interpret({"x": x}).values())
    assert [t.dtype for t in got] == [torch.int64, torch.float32]
