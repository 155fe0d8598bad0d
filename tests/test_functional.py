"""Writes in place, complex numbers and frozen sizes: what the graph computes is what torch does."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qopt.canonical import targets_of_write
from qopt.emit.onnx import write_onnx
from qopt.guards import FrozenSize, check_guards, degenerate
from qopt.target import TARGETS


class Apply(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(x, y)


def onnx_run(graph: Any, folder: Path, *inputs: Tensor) -> list[np.ndarray[Any, Any]]:
    import onnxruntime

    write_onnx(graph, folder, TARGETS["onnx"])
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options)
    names = [i.name for i in session.get_inputs()]
    feeds = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
    return list(session.run(None, feeds))


# Writes --------------------------------------------------------------------------------------


def through_slice(x: Tensor, y: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], 6)
    out[:, :4] = x
    out[:, 4:] = y[:, :2]
    return out


def through_two_views(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    z = x * 1.5
    view = z.t()[1:3]
    before = view + 0
    view[0] += 10
    return z, before + view


def strided(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z[:, 1::2] = y[:, :2]
    return z


def last_column(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z[..., -1].fill_(7)
    return z * 2


def through_reshape(x: Tensor, y: Tensor) -> Tensor:
    z = x * 2
    z.view(-1, 2, 2)[:, 0] = 3
    return z + z.reshape(-1, 4)


def copy_is_no_view(x: Tensor, y: Tensor) -> Tensor:
    z = x * 2
    other = z.t().reshape(-1)  # another layout: a copy, which the write does not reach
    z += 100
    return other.sum() + z


def pieces(x: Tensor, y: Tensor) -> Tensor:
    z = x * 1
    a, b = torch.split(z, 2, dim=1)
    b.mul_(a)
    a.zero_()
    both: Tensor = z + b.repeat(1, 2)
    return both


def by_mask(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z[y > 0] = -1.0
    return z


def by_index(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    rows = torch.tensor([0, 1])
    z[rows, torch.tensor([3, 0])] = 9.0
    return z


WRITES = [
    through_slice,
    through_two_views,
    strided,
    last_column,
    through_reshape,
    copy_is_no_view,
    pieces,
    by_mask,
    by_index,
]


@pytest.mark.parametrize("function", WRITES, ids=lambda f: f.__name__)
def test_writes_become_values(function: Any, exported: Any, run: Any, tmp_path: Path) -> None:
    graph = exported(Apply(function), torch.randn(3, 4), torch.randn(3, 4))
    run(graph, "canonicalize")
    assert [n for n in graph.nodes if targets_of_write(n)] == []
    x, y = torch.randn(5, 4), torch.randn(5, 4)  # a batch that was not traced
    want = function(x.clone(), y.clone())
    want = list(want) if isinstance(want, tuple) else [want]
    names = [node.name for node in graph.inputs]
    got = list(graph.interpret(dict(zip(names, (x, y), strict=True))).values())
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    for c, b in zip(onnx_run(graph, tmp_path, x, y), want, strict=True):
        np.testing.assert_allclose(c, b.numpy(), atol=1e-6)


def test_a_write_that_stays_is_not_emitted(exported: Any, run: Any, tmp_path: Path) -> None:
    from qopt.errors import UnsupportedError

    def expanded(x: Tensor, y: Tensor) -> Tensor:
        z = x * 2
        z.as_strided((2, 2), (1, 1)).add_(1)
        return z

    graph = exported(Apply(expanded), torch.randn(3, 4), torch.randn(3, 4))
    run(graph, "canonicalize")
    with pytest.raises(UnsupportedError, match="add_"):
        write_onnx(graph, tmp_path, TARGETS["onnx"])


# Complex numbers -----------------------------------------------------------------------------


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.reshape(x.shape[0], 2, 2))
    factor = torch.polar(torch.ones_like(angle), angle)[:, None] * 1.25
    return torch.view_as_real(turned * factor).flatten(1)


def parts(x: Tensor, angle: Tensor) -> Tensor:
    z = torch.complex(x[:, :2], x[:, 2:])
    return torch.cat([(z * z.conj()).real, z.imag], 1)


@pytest.mark.parametrize("function", [rotate, parts], ids=lambda f: f.__name__)
def test_complex_numbers_are_pairs(function: Any, exported: Any, run: Any, tmp_path: Path) -> None:
    graph = exported(Apply(function), torch.randn(3, 4), torch.randn(3))
    run(graph, "canonicalize")
    held = [node.meta["val"] for node in graph.nodes if "val" in node.meta]
    assert not any(isinstance(v, Tensor) and v.is_complex() for v in held)
    x, angle = torch.randn(5, 4), torch.randn(5)
    got = onnx_run(graph, tmp_path, x, angle)[0]
    np.testing.assert_allclose(got, function(x, angle).numpy(), atol=1e-5)


# Frozen sizes --------------------------------------------------------------------------------


class Step(nn.Module):
    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        if input_ids.shape[1] * 2 > self.limit:
            return input_ids + 1
        return input_ids * 2


def exported_step(limit: int) -> Any:
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    ids, mask = torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64)
    return torch.export.export(
        Step(limit), (ids, mask, ids.clone()), dynamic_shapes=(dynamic,) * 3, strict=False
    )


def test_a_branch_by_length_is_refused() -> None:
    with pytest.raises(FrozenSize, match="holds only where"):
        check_guards(exported_step(64))


def test_a_branch_that_every_size_takes_is_fine() -> None:
    check_guards(exported_step(2))


def test_sizes_beyond_the_context_do_not_count() -> None:
    check_guards(exported_step(2), most=64)
    with pytest.raises(FrozenSize):
        check_guards(exported_step(64), most=4096)
    check_guards(exported_step(64), most=30)


def test_small_sizes_may_be_left_out() -> None:
    check_guards(exported_step(2), least=300)


def test_not_zero_and_not_one_are_no_branches() -> None:
    sympy: Any = importlib.import_module("sympy")  # it has no types

    size = sympy.Symbol("s", integer=True, positive=True)
    assert degenerate(sympy.Ne(size % 8, 0))
    assert degenerate(sympy.Ne(size // 8, 1))
    assert degenerate(sympy.Gt(size % 8, 0))
    assert not degenerate(sympy.Gt(size, 8))
    assert not degenerate(sympy.Eq(size // 8, 1))
