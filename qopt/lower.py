"""Lowering: each dialect op takes the first implementation that does not refuse it.

An implementation may take in nodes before it (`sources` names what it still needs). An op that all
refuse is replaced by its reference, traced to aten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from qopt import canonical
from qopt.graph import Graph
from qopt.ops import OPS
from qopt.target import Target


class Implementation(Protocol):
    """How a target runs an op."""

    name: str

    def refuses(self, context: Context, node: fx.Node) -> str | None:
        """Why this node cannot be run so; None where it can."""

    def sources(self, node: fx.Node) -> Iterable[fx.Node]:
        """The nodes that it reads, which may stand further up than the node's arguments."""

    def emit(self, builder: Any, node: fx.Node) -> Any:
        """Write it."""


class InAten:
    """An implementation that is a function in torch, of the op's own arguments: it is traced."""

    name: str

    def body(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the op does."""
        raise NotImplementedError

    def sources(self, node: fx.Node) -> Iterable[fx.Node]:
        """Its arguments."""
        return node.all_input_nodes


@dataclass
class Context:
    """What an implementation may ask before it says yes."""

    graph: Graph
    target: Target
    opset: int
    cache: dict[Any, Any] = field(default_factory=dict)


@dataclass
class Choice:
    """How often an op was lowered in one way, and why the ways before it were refused."""

    op: str
    implementation: str
    count: int = 0
    refusals: dict[str, int] = field(default_factory=dict)


Registry = dict[tuple[str, str], list[Implementation]]
IMPLEMENTATIONS: Registry = {}


def implements(op: str, *targets: str) -> Callable[[type[Any]], type[Any]]:
    """Register an implementation of an op for targets; earlier registrations are tried first."""

    def register(cls: type[Any]) -> type[Any]:
        for target in targets:
            IMPLEMENTATIONS.setdefault((target, op), []).append(cls())
        return cls

    return register


def sources(node: fx.Node) -> Iterable[fx.Node]:
    """The nodes that must be there before `node` can be written."""
    implementation = node.meta.get("implementation")
    return implementation.sources(node) if implementation else node.all_input_nodes


def lower(graph: Graph, target: Target, opset: int) -> list[Choice]:
    """Choose an implementation for every dialect op; returns the choices for the report."""
    context = Context(graph, target, opset)
    choices: dict[tuple[str, str], Choice] = {}
    needed = set(graph.results)
    for node in reversed(graph.nodes):
        op = op_of(node)
        if op is None or node not in needed:  # what a later node took in is not lowered by itself
            needed.update(node.all_input_nodes if node in needed else ())
            continue
        refusals = []
        for implementation in IMPLEMENTATIONS.get((target.name, op), []):
            reason = implementation.refuses(context, node)
            if reason is None:
                node.meta["implementation"] = implementation
                break
            refusals.append(f"{implementation.name}: {reason}")
        refusals += node.meta.pop("remarks", [])
        chosen = node.meta.get("implementation")
        name = chosen.name if chosen else "reference"
        choice = choices.setdefault((op, name), Choice(op, name))
        choice.count += 1
        for refusal in refusals:
            choice.refusals[refusal] = choice.refusals.get(refusal, 0) + 1
        needed.update(sources(node))
        if chosen is None or isinstance(chosen, InAten):
            decompose(graph, node, chosen.body if chosen else OPS[op].reference)
    canonical.canonicalize(graph)
    share_sizes(graph)
    return list(choices.values())


def share_sizes(graph: Graph) -> None:
    """Read each size from the first input that has it: no input is kept for its shape alone."""
    first: dict[Any, tuple[fx.Node, int]] = {}
    for node in graph.inputs:
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt):
                first.setdefault(size.node.expr, (node, dim))
    for node in graph.find(torch.ops.aten.sym_size.int):
        size = node.meta["val"]
        if isinstance(size, torch.SymInt) and size.node.expr in first:
            node.args = first[size.node.expr]


def op_of(node: fx.Node) -> str | None:
    """The name of the dialect op that a node calls."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "qopt":
        return None
    return target._schema.name.partition("::")[2]


def decompose(graph: Graph, node: fx.Node, body: Callable[..., Any]) -> None:
    """Replace a dialect op by the aten ops that a function of its arguments runs."""
    sources = node.all_input_nodes

    def call(*values: Any) -> Any:
        given = dict(zip(sources, values, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), given.__getitem__)
        return body(*args, **kwargs)

    with graph.fake_mode:
        traced = make_fx(call, pre_dispatch=True)(*(source.meta["val"] for source in sources))
    inline(graph, node, traced.graph, sources)


def inline(graph: Graph, node: fx.Node, body: fx.Graph, sources: list[fx.Node]) -> None:
    """Put a traced body in a node's place."""
    copies = dict(zip([n for n in body.nodes if n.op == "placeholder"], sources, strict=True))
    with graph.before(node):
        for inner in body.nodes:
            if inner.op == "get_attr":
                held = getattr(body.owning_module, str(inner.target))
                from qopt.weights import LazyWeight

                copies[inner] = graph.add_weight(
                    f"{node.name}.{inner.target}", LazyWeight.memory(held)
                )
            elif inner.op == "call_function":
                copies[inner] = graph.fx.node_copy(inner, copies.__getitem__)
                copies[inner].meta = {"val": inner.meta["val"], **trace_of(node)}
    results = next(iter(reversed(body.nodes))).args[0]
    if isinstance(results, fx.Node):
        graph.replace(node, copies[results])
        return
    for user in list(node.users):
        index = user.args[1]
        made = results[index]
        user.replace_all_uses_with(copies[made])
        graph.fx.erase_node(user)
    graph.erase(node)


def trace_of(node: fx.Node) -> dict[str, Any]:
    """Where a node comes from, for messages."""
    return {k: node.meta[k] for k in ("stack_trace", "nn_module_stack") if k in node.meta}
