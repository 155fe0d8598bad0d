"""The graph: convexity, verification, the interpreter, the listing, edits."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qopt.graph import Graph, GraphError
from qopt.weights import LazyWeight

aten = torch.ops.aten


class Chain(nn.Module):
    """Four matrices, one after the other, each with its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Diamond(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a = x.cos()
        return a.sin() + a.exp().neg()


@pytest.fixture
def chain(exported: Any) -> Graph:
    graph: Graph = exported(Chain(), torch.randn(3, 16))
    return graph


def named(graph: Graph, *names: str) -> list[Any]:
    found = {n.name: n for n in graph.nodes}
    return [found[name] for name in names]


# Convexity -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "convex"),
    [
        (("cos",), True),
        (("cos", "sin", "exp", "neg", "add"), True),
        (("sin", "exp"), True),  # not connected, and yet no path leaves and comes back
        (("cos", "add"), False),
        (("cos", "sin", "add"), False),  # by way of exp and neg
        (("exp", "add"), False),
        (("exp", "neg", "add"), True),
    ],
)
def test_convex(names: tuple[str, ...], convex: bool, exported: Any) -> None:
    graph = exported(Diamond(), torch.randn(3, 4))
    assert graph.convex(named(graph, *names)) is convex


def test_dataflow(exported: Any) -> None:
    graph = exported(Diamond(), torch.randn(3, 4))
    edges = {(a.name, b.name) for a, b in graph.dataflow().edges}
    assert {("x", "cos"), ("cos", "sin"), ("cos", "exp"), ("exp", "neg"), ("neg", "add")} <= edges


# Verification --------------------------------------------------------------------------------


def no_value(graph: Graph) -> None:
    del graph.find(aten.relu.default)[0].meta["val"]


def no_weight(graph: Graph) -> None:
    del graph.weights["layers.1.weight"]


def weight_of_another_shape(graph: Graph) -> None:
    graph.weights["layers.1.weight"] = LazyWeight.memory(torch.zeros(16, 8))


def foreign_call(graph: Graph) -> None:
    graph.find(aten.relu.default)[0].target = torch.relu


def foreign_kind(graph: Graph) -> None:
    node = graph.find(aten.relu.default)[0]
    node.op, node.target = "call_method", "relu"


def frozen_dimension(graph: Graph) -> None:
    with graph.fake_mode:
        graph.inputs[0].meta["val"] = torch.empty(3, 16)


def missing_name(graph: Graph) -> None:
    graph.outputs.append("more")


def wrong_order(graph: Graph) -> None:
    first, last = graph.find(aten.relu.default)[0], graph.find(aten.relu.default)[-1]
    first.args = (last,)


BROKEN: dict[Callable[[Graph], None], str] = {
    no_value: 'the node has no meta["val"]',
    no_weight: "no weight is named layers.1.weight",
    weight_of_another_shape: "the weight has shape (16, 8), the graph says otherwise",
    foreign_call: "is not an aten or qopt op",
    foreign_kind: "op kind call_method is not allowed",
    frozen_dimension: "dimension 0 is declared dynamic and became 3",
    missing_name: "1 results for 2 output names",
}


@pytest.mark.parametrize("harm", BROKEN, ids=lambda f: f.__name__)
def test_verify_refuses(harm: Callable[[Graph], None], chain: Graph) -> None:
    """A01: a declared dimension that freezes is found here, after every pass."""
    chain.verify()
    harm(chain)
    with pytest.raises(GraphError) as raised:
        chain.verify()
    assert BROKEN[harm] in str(raised.value)


def test_verify_refuses_a_use_before_its_definition(chain: Graph) -> None:
    wrong_order(chain)
    with pytest.raises(RuntimeError):
        chain.verify()


def test_a_broken_node_says_where_it_comes_from(chain: Graph) -> None:
    no_value(chain)
    with pytest.raises(GraphError) as raised:
        chain.verify()
    assert raised.value.where == "relu = aten.relu(linear)"
    assert "test_graph.py" in str(raised.value.source)


# Interpreter ---------------------------------------------------------------------------------


def test_interpret(chain: Graph) -> None:
    torch.manual_seed(0)
    module = Chain()
    for name, parameter in module.named_parameters():
        chain.weights[name] = LazyWeight.memory(parameter)
    for rows in (1, 2, 5):
        x = torch.randn(rows, 16)
        with torch.no_grad():
            torch.testing.assert_close(chain.interpret({"x": x})["output_0"], module(x))


def test_weights_are_read_at_use_and_freed_after(chain: Graph) -> None:
    """Never more than one layer's weight is in memory."""
    live: set[int] = set()
    most: list[int] = []

    def load(weight: LazyWeight) -> Tensor:
        tensor = torch.eye(16)
        live.add(id(tensor))
        weakref.finalize(tensor, live.discard, id(tensor))
        most.append(len(live))
        return tensor

    chain.interpret({"x": torch.randn(2, 16)}, load=load)
    assert most == [1, 1, 1, 1]
    assert not live


def test_many_inputs_share_one_reading_of_each_weight(chain: Graph) -> None:
    """All runs go node by node; only what follows the last weight waits until it is asked for."""
    torch.manual_seed(0)
    read: list[LazyWeight] = []

    def load(weight: LazyWeight) -> Tensor:
        read.append(weight)
        return torch.full((16, 16), 0.5)

    inputs = [{"x": torch.randn(rows, 16)} for rows in (1, 2, 5)]
    alone = [chain.interpret(given, load=load)["output_0"] for given in inputs]
    read.clear()
    runs = chain.interpret_all(inputs, load=load)
    first = next(runs)["output_0"]
    assert len(read) == 4
    found = [first, *(out["output_0"] for out in runs)]
    assert len(read) == 4
    assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))


def test_intermediates_are_freed_after_their_last_use(
    chain: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qopt import graph as module

    held: list[int] = []
    call = module._Interpreter._call

    def count(self: Any, node: Any, run: Any, weights: Any) -> Any:
        held.append(sum(isinstance(v, Tensor) for v in run.env.values()))
        return call(self, node, run, weights)

    monkeypatch.setattr(module._Interpreter, "_call", count)
    chain.interpret({"x": torch.randn(2, 16)})
    assert max(held) == 1


def test_a_missing_input_is_named(chain: Graph) -> None:
    with pytest.raises(GraphError, match="input x is missing"):
        chain.interpret({})


def test_defaults_serve_inputs_that_are_left_out(chain: Graph) -> None:
    chain.defaults["x"] = torch.zeros(2, 16)
    assert torch.equal(chain.interpret({})["output_0"], torch.zeros(2, 16))


# Listing and edits ---------------------------------------------------------------------------


def test_the_listing_is_stable(exported: Any) -> None:
    listings = {exported(Diamond(), torch.randn(3, 4)).listing() for _ in range(2)}
    (listing,) = listings
    lines = listing.splitlines()
    assert lines[0].startswith("x = input  # float32[s")
    assert lines[1].startswith("cos = aten.cos(x)  # float32[s")
    assert lines[-1] == "return [add]"


def test_replace_erases_what_only_the_old_node_used(exported: Any) -> None:
    graph = exported(Diamond(), torch.randn(3, 4))
    (add,) = named(graph, "add")
    with graph.after(add):
        new = graph.call(aten.tanh.default, graph.inputs[0])
    graph.replace(add, new)
    assert [n.name for n in graph.nodes] == ["x", "tanh_default", "output"]
    graph.verify()


def test_erase_spares_what_is_used_and_inputs(exported: Any) -> None:
    graph = exported(Diamond(), torch.randn(3, 4))
    (cos,) = named(graph, "cos")
    graph.erase(cos)
    graph.erase(graph.inputs[0])
    assert named(graph, "x", "cos")


def test_weights_are_added_under_free_names_and_swept(chain: Graph) -> None:
    weight = LazyWeight.memory(torch.ones(16))
    relu = chain.find(aten.relu.default)[0]
    with chain.before(relu):
        nodes = [chain.add_weight(name, weight) for name in ("new", "new", "to")]
    assert [n.target for n in nodes] == ["new", "new_", "to_"]  # `to` is a method of a module
    assert all(chain.weight(n) is weight for n in nodes)
    chain.verify()
    for node in nodes:
        chain.erase(node)
    chain.sweep()
    assert set(chain.weights) == {f"layers.{n}.weight" for n in range(4)}
