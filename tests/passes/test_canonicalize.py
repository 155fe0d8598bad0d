"""canonicalize: becomes, same numbers, idempotent, leaves."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qopt.rewrite import PASSES

Form = Callable[[Tensor], Any]


class Call(nn.Module):
    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__()
        self.form = form
        self.weight = nn.Parameter(torch.randn(8, 4))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Any:
        return self.form(self, x)


def becomes(form: Callable[[Any, Tensor], Any], *lines: str) -> Any:
    return pytest.param(form, "\n".join(lines), id=" ".join(lines)[:60])


CASES = [
    # casts and copies
    becomes(lambda m, x: x.float() + 1, "add = aten.add.Tensor(x, 1)", "return [add]"),
    becomes(
        lambda m, x: x.to(torch.float16).type_as(m.weight),
        "to_dtype = aten.to.dtype(x, torch.float16)",
        "to_dtype_1 = aten.to.dtype(to_dtype, torch.float32)",
        "return [to_dtype_1]",
    ),
    becomes(lambda m, x: x.contiguous().clone().detach(), "return [x]"),
    becomes(
        lambda m, x: F.dropout(x, 0.5, training=False) + 1,
        "add = aten.add.Tensor(x, 1)",
        "return [add]",
    ),
    # numbers that change nothing
    becomes(lambda m, x: ((x + 0) * 1) / 1 - 0, "return [x]"),
    becomes(
        lambda m, x: x * x,
        "pow_tensor_scalar = aten.pow.Tensor_Scalar(x, 2)",
        "return [pow_tensor_scalar]",
    ),
    becomes(
        lambda m, x: torch.square(x),
        "pow_tensor_scalar = aten.pow.Tensor_Scalar(x, 2)",
        "return [pow_tensor_scalar]",
    ),
    becomes(
        lambda m, x: x * torch.sigmoid(x), "silu_default = aten.silu(x)", "return [silu_default]"
    ),
    becomes(
        lambda m, x: torch.sigmoid(x) * x, "silu_default = aten.silu(x)", "return [silu_default]"
    ),
    # shapes
    becomes(lambda m, x: x.view(3, 5, 8), "return [x]"),
    becomes(lambda m, x: x.transpose(1, 2).transpose(-2, -1), "return [x]"),
    becomes(lambda m, x: x[:, :, 0:8], "return [x]"),
    becomes(
        lambda m, x: x.view(3, 40).view(3, 10, 4).reshape(3, 2, 20),
        "reshape_default = aten.reshape(x, [3, 2, 20])",
        "return [reshape_default]",
    ),
    becomes(
        lambda m, x: x.flatten(1),
        "reshape_default = aten.reshape(x, [3, 40])",
        "return [reshape_default]",
    ),
    becomes(
        lambda m, x: x.permute(0, 2, 1),
        "transpose_int = aten.transpose.int(x, 1, 2)",
        "return [transpose_int]",
    ),
    becomes(lambda m, x: x.permute(0, 1, 2).expand(3, 5, 8), "return [x]"),
    becomes(
        lambda m, x: torch.cat([x, x], dim=-1).unsqueeze(-1),
        "cat = aten.cat([x, x], 2)",
        "unsqueeze = aten.unsqueeze(cat, 3)",
        "return [unsqueeze]",
    ),
    becomes(
        lambda m, x: x.mean(2, keepdim=True),
        "mean = aten.mean.dim(x, [-1], True)",
        "return [mean]",
    ),
    becomes(
        lambda m, x: x.chunk(2, -1)[1],
        "split_with_sizes_default = aten.split_with_sizes(x, [4, 4], 2)",
        "getitem_1 = getitem(split_with_sizes_default, 1)",
        "return [getitem_1]",
    ),
    becomes(
        lambda m, x: torch.split(x, 8, -1)[0] + 1,
        "add = aten.add.Tensor(x, 1)",
        "return [add]",
    ),
    becomes(
        lambda m, x: torch.tensor_split(x, [3, 6], -1)[1] + torch.tensor_split(x, [5], 2)[1],
        "slice_tensor = aten.slice.Tensor(x, 2, 3, 6)",
        "slice_tensor_1 = aten.slice.Tensor(x, 2, 5, 9223372036854775807)",
        "add = aten.add.Tensor(slice_tensor, slice_tensor_1)",
        "return [add]",
    ),
    # matrices
    becomes(
        lambda m, x: x @ m.weight,
        "linear_default = aten.linear(x, weight_transposed)",
        "return [linear_default]",
    ),
    becomes(
        lambda m, x: torch.addmm(m.bias, x.view(15, 8), m.weight).view(3, 5, 4),
        "linear_default_1 = aten.linear(x, weight_transposed, bias)",
        "return [linear_default_1]",
    ),
    becomes(
        lambda m, x: x @ m.weight.t().contiguous().t(),
        "linear_default = aten.linear(x, weight_transposed)",
        "return [linear_default]",
    ),
    becomes(
        lambda m, x: m.weight[x.long().clamp(0, 7)],
        "to_dtype = aten.to.dtype(x, torch.int64)",
        "clamp = aten.clamp(to_dtype, 0, 7)",
        "embedding_default = aten.embedding(weight, clamp)",
        "return [embedding_default]",
    ),
]


@pytest.mark.parametrize(("form", "want"), CASES)
def test_becomes(form: Any, want: str, exported: Any, run: Any, body: Any) -> None:
    module, x = Call(form), torch.randn(3, 5, 8)
    graph = exported(module, x, shapes=({},))
    run(graph, "canonicalize")
    assert normal(body(graph)) == normal(want)
    with torch.no_grad():
        torch.testing.assert_close(graph.interpret({"x": x})["output_0"], module(x))
    assert PASSES["canonicalize"]().run(graph) == 0


def normal(text: str) -> str:
    """A listing with its names numbered in order: names differ with the spelling that was met."""
    for i, line in enumerate(text.splitlines()):
        name = line.split(" = ")[0]
        if " = " in line:
            text = re.sub(rf"(?<![.\w]){name}(?![.\w])", f"%{i}", text)
    return text


# Leaves --------------------------------------------------------------------------------------

KEPT: dict[str, Callable[[Any, Tensor], Any]] = {
    "a cast that changes the dtype": lambda m, x: x.half(),
    "a product that broadcasts": lambda m, x: x + torch.zeros(2, 1, 1, 1),
    "0 added with another dtype": lambda m, x: x.int() + 0.0,
    "a part of a row": lambda m, x: x[:, :, 1:],
    "every second": lambda m, x: x[..., ::2],
    "a real permutation": lambda m, x: x.permute(2, 0, 1),
    "another exchange": lambda m, x: x.transpose(0, 1).transpose(1, 2),
    "a scaled addmm": lambda m, x: torch.addmm(m.bias, x[0], m.weight, beta=2),
    "mask and sigmoid of another": lambda m, x: x * torch.sigmoid(x + 1),
}


@pytest.mark.parametrize("name", KEPT)
def test_leaves(name: str, exported: Any, run: Any) -> None:
    module, x = Call(KEPT[name]), torch.randn(3, 5, 8)
    graph = exported(module, x, shapes=({},))
    run(graph, "canonicalize")
    with torch.no_grad():
        want = module(x)
    got = graph.interpret({"x": x})["output_0"]
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want)
    assert graph.results[0] is not graph.inputs[0]


# Mutation ------------------------------------------------------------------------------------


def multiplied_by_zero(x: Tensor) -> Tensor:
    h = x * 2
    h.mul_(0.0)
    return h


def half_precision_keeps_its_dtype(x: Tensor) -> Tensor:
    h = x.half()
    h.mul_(x)
    return h


def seen_by_a_view_made_before(x: Tensor) -> Tensor:
    h = x * 2
    view = h.view(15, 8)
    h.add_(1)
    return view + 0


def a_copy_made_before(x: Tensor) -> tuple[Tensor, Tensor]:
    h = x * 2
    kept = h[:, 1:].clone()
    h.add_(1)
    return kept, h


def a_piece_of_a_split(x: Tensor) -> Tensor:
    h = x * 2
    first, _ = torch.split(h, 4, -1)
    first.add_(1)
    return h * 1


def a_slice(x: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    h[:, 1:3] = x[:, :2]
    return h


def twice(x: Tensor) -> Tensor:
    h = x + 0.5
    h.add_(1).mul_(2)
    h += x
    return h


def zero_added_before(x: Tensor) -> Tensor:
    h = x * 3
    y = h + 0
    h.add_(1)
    return y + 5


MUTATIONS = [
    multiplied_by_zero,
    half_precision_keeps_its_dtype,
    seen_by_a_view_made_before,
    a_copy_made_before,
    a_piece_of_a_split,
    a_slice,
    twice,
    zero_added_before,
]


@pytest.mark.parametrize("form", MUTATIONS, ids=lambda f: f.__name__)
def test_writes_are_kept(form: Form, exported: Any, run: Any) -> None:
    """E04, E06: nothing is dropped, and nothing is matched across a write."""
    graph = exported(Call(lambda m, x: form(x)), torch.randn(3, 5, 8), shapes=({},))
    run(graph, "canonicalize", "eliminate-common-subexpressions", "eliminate-dead-code")
    x = torch.randn(3, 5, 8)
    want = form(x.clone())
    want = want if isinstance(want, tuple) else (want,)
    got = graph.interpret({"x": x.clone()})
    for a, b in zip(got.values(), want, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)
    assert PASSES["canonicalize"]().run(graph) == 0


def test_a_plain_write_becomes_a_value(exported: Any, run: Any, body: Any) -> None:
    """E04: `x.mul_(a)` on an intermediate needs no memory."""
    graph = exported(Call(lambda m, x: multiplied_by_zero(x)), torch.randn(3, 5, 8))
    run(graph, "canonicalize")
    assert body(graph) == (
        "mul = aten.mul.Tensor(x, 2)\nmul_ = aten.mul.Tensor(mul, 0.0)\nreturn [mul_]"
    )


def test_dynamic_sizes_stay_symbolic(exported: Any, run: Any) -> None:
    """A01: after the pass too."""
    dynamic = torch.export.Dim.DYNAMIC
    module = Call(lambda m, x: x.flatten(0, 1).unflatten(0, x.shape[:2]).flatten(1))
    graph = exported(module, torch.randn(3, 5, 8), shapes=({0: dynamic, 1: dynamic},))
    run(graph, "canonicalize")
    for shape in ((3, 5), (4, 1), (2, 7)):
        x = torch.randn(*shape, 8)
        torch.testing.assert_close(graph.interpret({"x": x})["output_0"], x.flatten(1))


def test_a_tied_matrix_is_not_stored_twice(captured: Any, run: Any) -> None:
    """C01: the head reads the embedding's own weight after every pass."""
    graph = captured("llama", tie_word_embeddings=True, vocab_size=512)
    run(graph, "canonicalize", "fold-constants", "eliminate-common-subexpressions")
    large = {id(w.source) for w in graph.weights.values() if 512 in w.shape}
    assert len(large) == 1
    assert all(w.name == "source" for w in graph.weights.values() if 512 in w.shape)
