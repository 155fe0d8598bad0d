"""Lowering: the first implementation that does not refuse, else the reference; and reasons told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qopt.compile import compile
from qopt.emit import onnx_dialect
from qopt.graph import Graph
from qopt.lower import IMPLEMENTATIONS, Choice, lower, op_of
from qopt.ops import OPS
from qopt.report import LoweringRow
from qopt.target import TARGETS

assert onnx_dialect  # registers the implementations

Captured = Callable[..., Graph]
Run = Callable[..., Any]
CALLS = [[6, 3, 9], [1, 1, 1], [4, 2, 3]]


@pytest.fixture
def rewritten(captured: Captured, run: Run, baseline: tuple[str, ...]) -> Callable[..., Graph]:
    def get(family: str, **overrides: Any) -> Graph:
        graph = captured(family, **overrides)
        run(graph, *baseline)
        return graph

    return get


def choices(graph: Graph, target: str, opset: int = 25) -> dict[str, Choice]:
    return {choice.op: choice for choice in lower(graph, TARGETS[target], opset)}


def names(found: dict[str, Choice]) -> dict[str, tuple[str, int]]:
    return {op: (choice.implementation, choice.count) for op, choice in found.items()}


def test_choices_of_each_target(rewritten: Callable[..., Graph]) -> None:
    assert names(choices(rewritten("llama"), "onnx-cpu")) == {
        "last_tokens": ("GatherND", 1),
        "rms_norm": ("RMSNormalization", 1),
        "add_rms_norm": ("SkipSimplifiedLayerNormalization", 4),
        "gated": ("activation and Mul", 2),
        "cached_attention": ("GroupQueryAttention", 2),  # the rotation is inside
    }
    found = choices(rewritten("llama"), "onnx")
    assert found["cached_attention"].implementation == "Attention"
    assert found["rotary"].implementation == "RotaryEmbedding"
    assert found["rotary"].count == 4


def test_an_older_opset_takes_references(rewritten: Callable[..., Graph]) -> None:
    graph = rewritten("llama")
    found = choices(graph, "onnx", 21)
    for op in ("rms_norm", "rotary", "cached_attention"):
        assert found[op].implementation == "reference"
        (reason,) = found[op].refusals
        assert "needs opset 23, the limit is 21" in reason
    left = {op_of(node) for node in graph.nodes} - {None}
    assert left == {"last_tokens", "gated"}  # the others are aten now
    graph.verify()


REASONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "head size": ("llama", {"head_dim": 12}, "head size 12 is no multiple of 8"),
    "rotation of a small head": ("llama", {"head_dim": 8}, "multiple of 16, not 8"),
    "partial rotation": (
        "phi",
        {"partial_rotary_factor": 0.5, "head_dim": 16, "hidden_size": 64},
        "the angles' width 4 is no multiple of 8",
    ),
    "angles that switch by length": (
        "phi3",
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [4.0] * 8,
            },
        },
        "the angles of a position depend on the others",
    ),
}


@pytest.mark.parametrize("case", REASONS)
def test_the_report_says_why(case: str, tiny: Any, distance: Any, tmp_path: Path) -> None:
    family, overrides, reason = REASONS[case]
    folder, model = tiny(family, **overrides)
    result = compile(str(folder), "baseline", tmp_path / "out", check="off")
    rows = {row.op: row for row in result.report.lowering}
    assert any(reason in told for told in rows["cached_attention"].reasons), rows
    assert distance(result.out, model, CALLS) <= 1e-4


def test_a_rotation_of_the_whole_head_goes_inside(tiny: Any, tmp_path: Path) -> None:
    """phi3 joins the rotated part with an empty rest."""
    result = compile(str(tiny("phi3")[0]), "baseline", tmp_path / "out", check="off")
    rows = {row.op: row for row in result.report.lowering}
    assert rows["cached_attention"].reasons == []
    assert "rotary" not in rows


def test_reasons_are_counted_once_each(tiny: Any, tmp_path: Path) -> None:
    folder = tiny("llama", head_dim=12)[0]
    result = compile(str(folder), "baseline", tmp_path / "out", check="off")
    (row,) = (row for row in result.report.lowering if row.op == "cached_attention")
    assert row == LoweringRow(
        "cached_attention",
        "Attention",
        2,
        ["GroupQueryAttention: the head size 12 is no multiple of 8 (2x)"],
    )


# References ----------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 8))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * scaled


def test_a_reference_computes_the_same(
    exported: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = exported(Norm(), torch.randn(3, 8), shapes=({0: torch.export.Dim("rows")},))
    run(graph, "canonicalize", "fuse-rms-norm")
    assert [op_of(node) for node in graph.nodes if op_of(node)] == ["rms_norm"]
    monkeypatch.setitem(IMPLEMENTATIONS, ("onnx", "rms_norm"), [])
    (found,) = lower(graph, TARGETS["onnx"], 25)
    assert (found.implementation, found.refusals) == ("reference", {})
    assert not [node for node in graph.nodes if op_of(node)]
    x = torch.randn(5, 8)
    (name,) = (node.name for node in graph.inputs)
    (got,) = graph.interpret({name: x}).values()
    torch.testing.assert_close(got, Norm()(x))


def test_the_first_that_does_not_refuse(
    rewritten: Callable[..., Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Never:
        name = "never"

        def refuses(self, context: Any, node: Any) -> str:
            return "no"

    known = IMPLEMENTATIONS["onnx", "gated"]
    monkeypatch.setitem(IMPLEMENTATIONS, ("onnx", "gated"), [Never(), *known])
    found = choices(rewritten("llama"), "onnx")["gated"]
    assert (found.implementation, found.refusals) == ("activation and Mul", {"never: no": 2})


def test_every_implementation_is_of_a_known_op_and_target() -> None:
    for (target, op), implementations in IMPLEMENTATIONS.items():
        assert target in TARGETS
        assert op in OPS
        assert all(item.name for item in implementations)


def test_no_input_is_kept_for_its_shape(rewritten: Callable[..., Graph]) -> None:
    """Rotation inside needs no positions, so the signature has none."""
    graph = rewritten("llama")
    lower(graph, TARGETS["onnx-cpu"], 25)
    sizes = [node for node in graph.nodes if node.target is torch.ops.aten.sym_size.int]
    assert sizes
    for node in sizes:
        assert str(node.args[0]) in ("input_ids", "attention_mask")


def test_a_choice_is_the_same_for_unequal_layers(tiny: Any, distance: Any, tmp_path: Path) -> None:
    """Windowed and whole layers side by side, each with its own window in the op."""
    import onnx

    folder, model = tiny("gemma3_text", layer_types=["sliding_attention", "full_attention"])
    out = compile(str(folder), "baseline", tmp_path / "out", check="off").out
    nodes = [
        node
        for node in onnx.load(out / "model.onnx", load_external_data=False).graph.node
        if node.op_type == "GroupQueryAttention"
    ]
    windows = [{a.name: a.i for a in node.attribute}.get("local_window_size", -1) for node in nodes]
    assert windows == [4, -1]
    assert distance(out, model, [[11, 3, 6], [1, 1, 1], [5, 5, 5]]) <= 1e-4
    assert np.isfinite(distance(out, model, [[1]]))
