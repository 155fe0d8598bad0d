"""fuse-rope-qk: becomes, same numbers, idempotent, leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qopt.rewrite import PASSES

NAME = "fuse-rope-qk"
BEFORE = ("canonicalize", "fuse-rms-norm", "fuse-rotary-embedding")
FUSED = torch.ops.qopt.rotary_from_positions.default
ROTARY = torch.ops.qopt.rotary.default

SCALED: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "yarn": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
}


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_rope_type_becomes_frequencies_and_a_factor(
    kind: str, dtype: torch.dtype, captured: Any, tiny: Any, run: Any, worst: Any
) -> None:
    """Past 0 and not, one token and many, against eager transformers in fp32."""
    graph = captured("llama", dtype, **SCALED[kind])
    run(graph, *BEFORE)
    assert len(graph.find(ROTARY)) == 4
    run(graph, NAME)
    found = graph.find(FUSED)
    assert (len(found), len(graph.find(ROTARY))) == (2, 0)
    assert {node.args[4] != 1.0 for node in found} == {kind == "yarn"}
    limit = 1e-5 if dtype == torch.float32 else 3e-2
    assert worst(graph, tiny("llama", **SCALED[kind])[1]) < limit
    assert PASSES[NAME]().run(graph) == 0
    graph.verify()


@pytest.mark.parametrize(
    ("family", "pairs", "interleaved"),
    [
        ("gptj", 2, True),
        ("phi", 2, False),
        ("gpt_neox", 2, False),
        ("qwen3", 2, False),
        ("gemma3_text", 2, False),
        ("gpt_oss", 2, False),
        ("cohere", 2, True),
    ],
)
def test_families(
    family: str, pairs: int, interleaved: bool, captured: Any, tiny: Any, run: Any, worst: Any
) -> None:
    """Partial, interleaved, normed before, two bases by layer."""
    graph = captured(family)
    run(graph, *BEFORE, NAME)
    found = graph.find(FUSED)
    if not found:  # gptj reads its angles from a table of positions
        assert family == "gptj"
        assert any("no cos and sin" in line for line in PASSES[NAME]().explain(graph))
        return
    assert len(found) == pairs
    assert {node.args[5] for node in found} == {interleaved}
    assert worst(graph, tiny(family)[1]) < 1e-5


def test_materialized_or_not(captured: Any, tiny: Any, run: Any, worst: Any) -> None:
    graph = captured("llama")
    run(graph, *BEFORE, "materialize-kv-cache", NAME)
    assert len(graph.find(FUSED)) == 2
    assert worst(graph, tiny("llama")[1]) < 1e-5


def test_leaves_other_angles_for_keys(captured: Any, run: Any) -> None:
    graph = captured("llama")
    run(graph, *BEFORE)
    q, k = graph.find(ROTARY)[:2]
    with graph.before(k):
        other = graph.call(torch.ops.aten.mul.Tensor, k.args[1], 2.0)
    k.args = (k.args[0], other, *k.args[2:])
    assert PASSES[NAME]().run(graph) == 1
    assert q in graph.nodes
    assert len(PASSES[NAME]().explain(graph)) == 2
