"""merge-qkv: becomes, same numbers, idempotent, leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qopt.graph import Graph
from qopt.rewrite import PASSES

NAME = "merge-qkv"
BEFORE = ("canonicalize", "eliminate-common-subexpressions", "fuse-rotary-embedding")
LINEAR = torch.ops.aten.linear.default


def products(graph: Graph) -> list[str]:
    return [str(n.args[1].target) for n in graph.find(LINEAR)]  # type: ignore[union-attr]


def test_becomes(captured: Any, tiny: Any, run: Any, worst: Any, body: Any) -> None:
    graph = captured("llama", num_hidden_layers=1)
    records = run(graph, *BEFORE, NAME)
    assert records[-1].rewrites == 1
    lines = body(graph).splitlines()
    at = next(i for i, line in enumerate(lines) if "qkv" in line)
    assert lines[at].endswith("_layers_0_self_attn_qkv_weight)")
    assert [line.split(" = ")[1] for line in lines[at + 1 : at + 5]] == [
        "aten.split_with_sizes(linear_default, [64, 32, 32], 2)",
        "getitem(split_with_sizes_default, 0)",
        "getitem(split_with_sizes_default, 1)",
        "getitem(split_with_sizes_default, 2)",
    ]
    weight = graph.weights["model.layers.0.self_attn.qkv.weight"]
    state = tiny("llama", num_hidden_layers=1)[1].state_dict()
    parts = [state[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(weight.evaluate(), torch.cat(parts))
    assert not [name for name in graph.weights if "q_proj" in name]
    assert worst(graph, tiny("llama", num_hidden_layers=1)[1]) < 1e-5
    assert PASSES[NAME]().run(graph) == 0


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"head_dim": 32}),
        ("qwen2", {}),  # biases
        ("qwen3", {}),  # norms of q and k
        ("phi", {}),  # partial rotation
        ("opt", {}),  # a scale on q
        ("olmo2", {}),  # norms before the heads are apart
    ],
)
def test_models(
    family: str, overrides: Any, captured: Any, tiny: Any, run: Any, worst: Any
) -> None:
    """B07: a head size of its own; biases are joined as weights are."""
    graph = captured(family, **overrides)
    assert run(graph, *BEFORE, "fuse-rms-norm", NAME)[-1].rewrites == 2
    assert worst(graph, tiny(family, **overrides)[1]) < 1e-5
    assert PASSES[NAME]().run(graph) == 0


def test_is_lazy(captured: Any, run: Any) -> None:
    graph = captured("llama")
    run(graph, *BEFORE, NAME)
    weight = graph.weights["model.layers.0.self_attn.qkv.weight"]
    assert weight.name == "concat"
    assert [part.name for part in weight.inputs] == ["source"] * 3


def test_leaves_a_matrix_that_is_read_twice(captured: Any, run: Any, body: Any) -> None:
    """E01: a projection that something else uses would have to be stored a second time."""
    graph = captured("llama")
    run(graph, *BEFORE)
    linear = graph.find(LINEAR)[0]
    with graph.after(linear):
        again = graph.call(LINEAR, *linear.args)
        total = graph.call(torch.ops.aten.add.Tensor, linear, again)
    users = [user for user in linear.users if user is not total]
    for user in users:
        user.replace_input_with(linear, total)
    graph.verify()
    assert PASSES[NAME]().run(graph) == 1  # the other layer


def test_leaves_a_matrix_that_is_tied(captured: Any, run: Any) -> None:
    """C01: another name for the same tensor would keep it beside the merged one."""
    graph = captured("llama")
    run(graph, *BEFORE)
    first, second = (f"model.layers.{n}.self_attn.v_proj.weight" for n in (0, 1))
    graph.weights[second] = graph.weights[first]
    assert PASSES[NAME]().run(graph) == 0


def test_leaves_half_of_the_biases(captured: Any, run: Any) -> None:
    graph = captured("qwen2")
    run(graph, *BEFORE)
    linear = graph.find(LINEAR)[0]
    linear.args = linear.args[:2]
    assert PASSES[NAME]().run(graph) == 1


def test_leaves_different_inputs(captured: Any, run: Any) -> None:
    graph = captured("llama")
    run(graph, *BEFORE)
    linear = graph.find(LINEAR)[0]
    with graph.before(linear):
        other = graph.call(torch.ops.aten.mul.Tensor, linear.args[0], 2.0)
    linear.replace_input_with(linear.args[0], other)
    assert PASSES[NAME]().run(graph) == 1


def test_one_matrix_already(captured: Any, run: Any) -> None:
    for family in ("gpt2", "phi3"):
        graph = captured(family)
        assert run(graph, *BEFORE, NAME)[-1].rewrites == 0
