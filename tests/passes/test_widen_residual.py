"""widen-residual: becomes, closer to the model, idempotent, leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qopt.ops import OPS
from qopt.passes.widen_residual import WidenResidual

NAME = "widen-residual"
BEFORE = ("canonicalize", "fuse-rms-norm", "fuse-add-rms-norm")


def test_becomes(captured: Any, run: Any, body: Any) -> None:
    graph = captured("llama", torch.bfloat16)
    run(graph, *BEFORE)
    (record,) = run(graph, NAME)
    assert record.rewrites == 4  # two layers, an attention and an MLP each
    sums = graph.find(OPS["add_rms_norm"].target)
    for node in sums:
        normed, total = node.meta["val"]
        assert (normed.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    branch, residual = sums[1].args[:2]
    assert "linear" in branch.name
    assert residual.meta["val"].dtype == torch.float32
    assert body(graph).count("aten.to.dtype(embedding") == 1
    assert WidenResidual().run(graph) == 0


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2_moe", "gptj"])
def test_it_comes_closer(family: str, captured: Any, tiny: Any, run: Any, worst: Any) -> None:
    """Norms before and behind the layers, experts beside a shared one, layers side by side."""
    model = tiny(family)[1]
    found = []
    for passes in (BEFORE, (*BEFORE, NAME)):
        graph = captured(family, torch.bfloat16)
        run(graph, *passes, "materialize-kv-cache")
        found.append(worst(graph, model))
    assert found[1] <= found[0] * 1.1  # a random model's sums are small: no worse is what counts
    assert found[1] < 0.1


def test_large_sums_lose_nothing(captured: Any, run: Any) -> None:
    """A residual of a thousand swallows what is added to it in bf16, and not in fp32."""
    x, residual = torch.full((1, 1, 8), 0.25).bfloat16(), torch.full((1, 1, 8), 1000.0)
    _, total = OPS["add_rms_norm"].reference(x, residual, None, 1e-6)
    assert torch.equal(total, torch.full((1, 1, 8), 1000.25))
    _, narrow = OPS["add_rms_norm"].reference(x, residual.bfloat16(), None, 1e-6)
    assert torch.equal(narrow, torch.full((1, 1, 8), 1000.0).bfloat16())


def test_other_types_are_left(captured: Any, run: Any, body: Any) -> None:
    for dtype in (torch.float32, torch.float16):
        graph = captured("llama", dtype)
        run(graph, *BEFORE)
        before = body(graph)
        assert WidenResidual().run(graph) == 0
        assert body(graph) == before
    assert WidenResidual(fp16=True).run(graph) == 4


def test_a_sum_of_two_branches_is_left(captured: Any, run: Any) -> None:
    """gptj adds attention and MLP side by side: of three terms one is the residual."""
    graph = captured("gptj", torch.bfloat16)
    run(graph, *BEFORE)
    item = WidenResidual()
    assert item.run(graph) == 2
    assert any("neither term" in line for line in item.explain(graph))


def test_a_sum_with_a_size_is_no_sum(captured: Any, run: Any) -> None:
    """bloom and falcon add a number of the graph to a tensor; LayerNorm's sums are left."""
    graph = captured("bloom", torch.bfloat16)
    run(graph, *BEFORE)
    assert WidenResidual().run(graph) == 0
