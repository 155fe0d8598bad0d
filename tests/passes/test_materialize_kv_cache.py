"""materialize-kv-cache: becomes, same numbers, idempotent, leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qopt.graph import ATTENTION, CACHED_ATTENTION
from qopt.rewrite import PASSES

NAME = "materialize-kv-cache"


def test_becomes(captured: Any, run: Any, body: Any) -> None:
    graph = captured("llama")
    (record,) = run(graph, NAME)
    assert record.rewrites == 2
    assert [n.meta.get("input", n.name) for n in graph.inputs] == [
        "input_ids",
        "attention_mask",
        "position_ids",
        "past_key_values.0.key",
        "past_key_values.0.value",
        "past_key_values.1.key",
        "past_key_values.1.value",
    ]
    assert graph.outputs == [
        "logits",
        "present.0.key",
        "present.0.value",
        "present.1.key",
        "present.1.value",
    ]
    calls = [line for line in body(graph).splitlines() if "cached_attention(" in line]
    assert [line.partition("past_key")[2] for line in calls] == [
        "_0, past_value_0, attention_mask, scale=0.25)",
        "_1, past_value_1, attention_mask, scale=0.25)",
    ]
    assert not graph.find(ATTENTION)
    assert PASSES[NAME]().run(graph) == 0


def test_shapes_stay_dynamic(captured: Any, run: Any) -> None:
    """A01: batch, new and past length are symbols after the pass; past + new is the present."""
    graph = captured("llama")
    run(graph, NAME)
    past = next(n for n in graph.inputs if "past" in n.name).meta["val"].shape
    ids = graph.inputs[0].meta["val"].shape
    present = graph.results[1].meta["val"].shape
    assert (past[1], past[3]) == (2, 16)
    assert isinstance(past[0], torch.SymInt)
    assert isinstance(past[2], torch.SymInt)
    assert present[2].node.expr == (past[2] + ids[1]).node.expr


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"head_dim": 32}),
        ("gpt2", {}),
        ("gemma2", {}),
        ("gpt_oss", {}),
        ("mistral", {}),
        (
            "gemma3n_text",
            {"num_kv_shared_layers": 2, "num_hidden_layers": 4, "vocab_size_per_layer_input": 97},
        ),
    ],
)
def test_same_numbers(
    family: str, overrides: Any, captured: Any, tiny: Any, run: Any, worst: Any, ragged: Any
) -> None:
    """A04, A05, B09: prefill, decode and chunks at batch 3, and rows of unequal length."""
    try:
        model = tiny(family, **overrides)[1]
    except (KeyError, ValueError):
        pytest.skip(f"this transformers has no {family}")
    graph = captured(family, **overrides)
    run(graph, "canonicalize", NAME)
    assert worst(graph, model) < 1e-5
    assert ragged(graph, model) < 1e-5


def test_the_present_is_what_eager_caches(captured: Any, tiny: Any, run: Any) -> None:
    graph, model = captured("llama"), tiny("llama")[1]
    run(graph, NAME)
    ids = torch.randint(3, 90, (3, 5))
    empty = {
        f"past_{kind}_{n}": torch.zeros(3, 2, 0, 16) for n in (0, 1) for kind in ("key", "value")
    }
    positions = torch.arange(5).expand(3, 5)
    out = graph.interpret(
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": positions,
            **empty,
        }
    )
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    for n in (0, 1):
        torch.testing.assert_close(out[f"present.{n}.key"], cache.layers[n].keys)
        torch.testing.assert_close(out[f"present.{n}.value"], cache.layers[n].values)


def test_leaves_a_cache_that_is_explicit(captured: Any, run: Any, body: Any) -> None:
    graph = captured("bloom")
    before = body(graph)
    (record,) = run(graph, NAME)
    assert record.rewrites == 0
    assert body(graph) == before


def test_leaves_a_module(exported: Any) -> None:
    graph = exported(torch.nn.Linear(8, 4), torch.randn(3, 8))
    assert PASSES[NAME]().run(graph) == 0
    assert not graph.find(CACHED_ATTENTION)
