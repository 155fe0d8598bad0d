"""fuse-rotary-embedding: becomes, same numbers, idempotent, leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qopt.rewrite import PASSES

NAME = "fuse-rotary-embedding"
ROTARY = torch.ops.qopt.rotary.default


def angles(positions: Tensor, width: int = 8) -> Tensor:
    frequencies = 1.0 / 10000 ** (torch.arange(0, width, 2).float() / width)
    return positions[:, :, None].float() * frequencies


def halves(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


def pairs(x: Tensor) -> Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def tables(positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    both = angles(positions)
    both = torch.cat([both, both], -1)
    return both.cos().to(dtype), both.sin().to(dtype)


def llama(x: Tensor, positions: Tensor) -> Tensor:
    cos, sin = (t.unsqueeze(1) for t in tables(positions, x.dtype))
    return x * cos + halves(x) * sin


def scaled(x: Tensor, positions: Tensor) -> Tensor:
    """YaRN's factor on the tables."""
    cos, sin = ((t * 1.25).unsqueeze(1) for t in tables(positions, x.dtype))
    return halves(x) * sin + cos * x


def tokens_first(x: Tensor, positions: Tensor) -> Tensor:
    cos, sin = (t.unsqueeze(2) for t in tables(positions, x.dtype))
    x = x.transpose(1, 2)
    return (x * cos + halves(x) * sin).transpose(1, 2)


def at_half_width(x: Tensor, positions: Tensor) -> Tensor:
    """gpt_oss: the tables are at half width."""
    both = angles(positions).unsqueeze(1)
    cos, sin = both.cos().to(x.dtype), both.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def interleaved(x: Tensor, positions: Tensor) -> Tensor:
    both = angles(positions).unsqueeze(1)
    cos = both.cos().repeat_interleave(2, -1).to(x.dtype)
    sin = both.sin().repeat_interleave(2, -1).to(x.dtype)
    return x * cos + pairs(x) * sin


def cut_after_heads(x: Tensor, positions: Tensor) -> Tensor:
    """GLM: the halves of a full table, each number twice."""
    cos, sin = (t.unsqueeze(1) for t in tables(positions, x.dtype))
    cos, sin = (t[..., :4].repeat_interleave(2, dim=-1) for t in (cos, sin))
    return x * cos + pairs(x) * sin


class Rotate(nn.Module):
    def __init__(self, form: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.form(x, positions)


FORMS = {
    llama: False,
    scaled: False,
    tokens_first: False,
    at_half_width: False,
    interleaved: True,
    cut_after_heads: True,
}
POSITIONS = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 10, 5000], [3, 3, 2, 1, 0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_becomes(form: Any, dtype: torch.dtype, exported: Any, run: Any) -> None:
    """B05, B06: one op with tables at half width, right at large positions too."""
    module, x = Rotate(form), torch.randn(3, 2, 5, 8, dtype=dtype)
    graph = exported(module, x, POSITIONS)
    records = run(graph, "canonicalize", NAME, "eliminate-dead-code")
    assert records[1].rewrites == 1
    (node,) = graph.find(ROTARY)
    assert node.args[1].meta["val"].shape[-1] == 4
    assert node.args[3] is FORMS[form]
    assert not graph.find(torch.ops.aten.neg.default, torch.ops.aten.stack.default)
    got = graph.interpret({"x": x, "positions": POSITIONS})["output_0"]
    near = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got, form(x, POSITIONS), atol=near, rtol=near)
    assert PASSES[NAME]().run(graph) == 0


def test_listing(exported: Any, run: Any, body: Any) -> None:
    graph = exported(Rotate(llama), torch.randn(3, 2, 5, 8), POSITIONS)
    run(graph, "canonicalize", "fold-constants", NAME, "eliminate-dead-code")
    assert body(graph) == (
        "unsqueeze = aten.unsqueeze(positions, 2)\n"
        "to_1 = aten.to.dtype(unsqueeze, torch.float32)\n"
        "mul_1 = aten.mul.Tensor(to_1, folded_reciprocal)\n"
        "cos_default = aten.cos(mul_1)\n"
        "sin_default = aten.sin(mul_1)\n"
        "rotary_default = qopt.rotary(x, cos_default, sin_default, False)\n"
        "return [rotary_default]"
    )


def partial(x: Tensor, positions: Tensor) -> Tensor:
    cos, sin = (t.unsqueeze(1) for t in tables(positions, x.dtype))
    first, rest = x[..., :8], x[..., 8:]
    return torch.cat([first * cos + halves(first) * sin, rest], -1)


def partial_pairs(x: Tensor, positions: Tensor) -> Tensor:
    first, rest = x[..., :8], x[..., 8:]
    return torch.cat([interleaved(first, positions), rest], -1)


@pytest.mark.parametrize("form", [partial, partial_pairs])
def test_a_partial_rotation_takes_in_the_rest(form: Any, exported: Any, run: Any) -> None:
    """B06: the first part of a head is rotated, the rest passes through the op."""
    x = torch.randn(3, 2, 5, 12)
    graph = exported(Rotate(form), x, POSITIONS)
    run(graph, "canonicalize", NAME, "eliminate-dead-code")
    (node,) = graph.find(ROTARY)
    assert node.args[0] is graph.inputs[0]
    assert graph.results == [node]
    got = graph.interpret({"x": x, "positions": POSITIONS})["output_0"]
    torch.testing.assert_close(got, form(x, POSITIONS))


def rest_in_front(x: Tensor, positions: Tensor) -> Tensor:
    return torch.cat([x[..., 8:], llama(x[..., :8], positions)], -1)


def last_part(x: Tensor, positions: Tensor) -> Tensor:
    return torch.cat([x[..., :4], llama(x[..., 4:], positions)], -1)


@pytest.mark.parametrize("form", [rest_in_front, last_part])
def test_another_join_stays(form: Any, exported: Any, run: Any) -> None:
    """B06: only a rotated first part joined with what follows it is a partial rotation."""
    x = torch.randn(3, 2, 5, 12)
    graph = exported(Rotate(form), x, POSITIONS)
    run(graph, "canonicalize", NAME, "eliminate-dead-code")
    assert graph.find(torch.ops.aten.cat.default)
    got = graph.interpret({"x": x, "positions": POSITIONS})["output_0"]
    torch.testing.assert_close(got, form(x, POSITIONS))


def wrong_sign(x: Tensor, positions: Tensor) -> Tensor:
    cos, sin = (t.unsqueeze(1) for t in tables(positions, x.dtype))
    turned = torch.cat([x[..., 4:], -x[..., :4]], -1)
    return x * cos + turned * sin


def wrong_order(x: Tensor, positions: Tensor) -> Tensor:
    cos, sin = (t.unsqueeze(1) for t in tables(positions, x.dtype))
    turned = torch.cat([-x[..., :4], x[..., 4:]], -1)
    return x * cos + turned * sin


def uneven_parts(x: Tensor, positions: Tensor) -> Tensor:
    cos, sin = (t.unsqueeze(1) for t in tables(positions, x.dtype))
    turned = torch.cat([-x[..., 6:], x[..., :6]], -1)
    return x * cos + turned * sin


def unequal_halves(x: Tensor, positions: Tensor) -> Tensor:
    both = angles(positions)
    both = torch.cat([both, both * 2], -1)
    cos, sin = both.cos().unsqueeze(1), both.sin().unsqueeze(1)
    return x * cos + halves(x) * sin


def tables_from_outside(x: Tensor, positions: Tensor) -> Tensor:
    cos = positions[:, :, None].float().expand(-1, -1, 8).cumsum(-1).unsqueeze(1)
    return x * cos + halves(x) * cos


@pytest.mark.parametrize(
    "form",
    [wrong_sign, wrong_order, uneven_parts, unequal_halves, tables_from_outside],
    ids=lambda f: f.__name__,
)
def test_leaves(form: Any, exported: Any, run: Any, body: Any) -> None:
    """B06: pairs that the op does not have, and tables whose halves may differ."""
    x = torch.randn(3, 2, 5, 8)
    graph = exported(Rotate(form), x, POSITIONS)
    run(graph, "canonicalize")
    fuse = PASSES[NAME]()
    assert fuse.run(graph) == 0
    assert not graph.find(ROTARY)
    (line,) = fuse.explain(graph)
    assert "joined, but not recognised as a rotation" in line
    got = graph.interpret({"x": x, "positions": POSITIONS})["output_0"]
    torch.testing.assert_close(got, form(x, POSITIONS))


@pytest.mark.parametrize(
    ("family", "interleaved"),
    [("llama", False), ("phi", False), ("gptj", True), ("glm", True), ("gpt_oss", False)],
)
def test_every_rotation_of_a_model(
    family: str, interleaved: bool, captured: Any, tiny: Any, run: Any, worst: Any
) -> None:
    """B06: partial halves (phi), pairs (gptj), partial pairs (glm), tables at half width."""
    graph = captured(family)
    records = run(
        graph, "canonicalize", "eliminate-common-subexpressions", NAME, "eliminate-dead-code"
    )
    assert records[2].rewrites == 4
    assert [n.args[3] for n in graph.find(ROTARY)] == [interleaved] * 4
    assert not PASSES[NAME]().explain(graph)
    assert worst(graph, tiny(family)[1]) < 1e-5
