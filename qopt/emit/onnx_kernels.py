"""ONNX for `onnx-cuda-triton`: nodes of domain `ai.qopt`, each with a function of standard ops.

A node has the tensors of its dialect op as inputs, absent ones empty, and the numbers as
attributes. The function beside it is the op's meaning: what runs where no library has the op. Nodes
whose bodies are alike share one; a second body of an op is `OP_1`, since not every runtime tells
the overloads of one name apart.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, fx

from qopt.canonical import operands, options, value
from qopt.emit.builder import DTYPES, Builder
from qopt.emit.onnx_dialect import (
    ExpertLoop,
    Gated,
    LastTokens,
    StandardAttention,
    StandardRMSNorm,
    StandardRotary,
)
from qopt.emit.torchscript import KERNEL_OPS, KERNEL_TYPES
from qopt.graph import Graph
from qopt.info import ModelInfo
from qopt.lower import Context, implements, lower
from qopt.ops import OPS
from qopt.target import TARGETS, short_name

TARGET = "onnx-cuda-triton"
DOMAIN = "ai.qopt"
BODY = TARGETS["onnx"]


class KernelNode:
    """A node of `ai.qopt`, which a library that launches the Triton kernels may take over."""

    name = "ai.qopt node (Triton kernel), a function of standard ops beside it"

    def refuses(self, context: Context, node: fx.Node) -> str | None:
        """Element types that no kernel has, and numbers that the graph computes."""
        held = value(main_tensor(node))
        if held.dtype not in KERNEL_TYPES:
            return f"no kernel takes {short_name(held.dtype)}"
        if any(isinstance(number, fx.Node) for number in arguments(node)[1].values()):
            return "one of its numbers is computed"
        return None

    def sources(self, node: fx.Node) -> Iterable[fx.Node]:
        """The node's own inputs."""
        return node.all_input_nodes

    def emit(self, b: Builder, node: fx.Node) -> Any:
        """One node, and its function where none like it is there."""
        tensors, numbers = arguments(node)
        made = b.ops(
            function_of(b, node),
            len(results(node)),
            *(None if held is None else b.get(held) for held in tensors.values()),
            domain=DOMAIN,
            **numbers,
        )
        return made if isinstance(value(node), list | tuple) else made[0]


class GivenExperts(ExpertLoop):
    """Each expert on the tokens that chose it, its matrices cut from the function's inputs."""

    def refuses(self, context: Context, node: fx.Node) -> str | None:
        """Nothing is refused."""
        return None

    def sources(self, node: fx.Node) -> Iterable[fx.Node]:
        """The node's own inputs."""
        return node.all_input_nodes

    def linear(self, b: Builder, node: fx.Node, x: ir.Value, expert: int, place: int) -> ir.Value:
        """The product with one expert's part of the stack at `place`, and its bias."""
        matrix, bias = operands(node)[place : place + 2]
        own = b.op("Gather", b.get(matrix), b.const(expert), axis=0)
        if not options(node).get("transposed", False):
            own = b.op("Transpose", own, perm=[1, 0])
        out = b.op("MatMul", x, own)
        if bias is None:
            return out
        return b.op("Add", out, b.op("Gather", b.get(bias), b.const(expert), axis=0))


for _op in KERNEL_OPS:
    implements(_op, TARGET)(KernelNode)
for _op, _class in {
    "rms_norm": StandardRMSNorm,
    "gated": Gated,
    "last_tokens": LastTokens,
    "rotary": StandardRotary,
    "cached_attention": StandardAttention,
    "experts": ExpertLoop,
}.items():
    implements(_op, TARGET)(_class)


def arguments(node: fx.Node) -> tuple[dict[str, fx.Node | None], dict[str, Any]]:
    """The tensors of a dialect call, up to the last that is there, and its numbers by name."""
    assert isinstance(node.target, torch._ops.OpOverload)
    tensors: dict[str, fx.Node | None] = {}
    numbers: dict[str, Any] = {}
    given = dict(enumerate(node.args))
    for place, argument in enumerate(node.target._schema.arguments):
        held: Any = given.get(place, node.kwargs.get(argument.name))
        if place not in given and argument.name not in node.kwargs:
            held = argument.default_value
        if "Tensor" in str(argument.type):
            tensors[argument.name] = held
        elif held is not None:
            numbers[argument.name] = int(held) if isinstance(held, bool) else held
    while tensors and next(reversed(tensors.values())) is None:
        tensors.popitem()
    return tensors, numbers


def main_tensor(node: fx.Node) -> fx.Node:
    """The first tensor of a call that is of a floating type: its type is the kernel's."""
    return next(n for n in node.all_input_nodes if value(n).dtype.is_floating_point)


def is_call(node: fx.Node) -> bool:
    """Whether a node is written as one of `ai.qopt`."""
    return isinstance(node.meta.get("implementation"), KernelNode)


def results(node: fx.Node) -> list[Tensor]:
    """What a call gives, as a list."""
    held = value(node)
    return list(held) if isinstance(held, list | tuple) else [held]


# Functions -----------------------------------------------------------------------------------


class Library:
    """The functions of a file."""

    def __init__(self) -> None:
        self.functions: list[ir.Function] = []
        self.names: dict[Any, str] = {}  # of a call's signature
        self.bodies: dict[bytes, str] = {}  # of the functions themselves


def library_of(b: Builder) -> Library:
    """The functions that a builder's nodes call."""
    return b.once("functions", Library)


def function_of(b: Builder, node: fx.Node) -> str:
    """The name of the function that is this call's meaning."""
    library, key = library_of(b), signature(node)
    if key not in library.names:
        tensors, numbers = arguments(node)
        body = BodyBuilder(call_alone(b.graph, node, tensors), b.limit)
        body.run()
        b.needs(body.used_opset)
        for name, count in body.fallbacks.items():
            b.fallbacks[name] = b.fallbacks.get(name, 0) + count
        assert isinstance(node.target, torch._ops.OpOverload)
        op = node.target._schema.name.partition("::")[2]
        count = sum(f.name == op or f.name.startswith(f"{op}_v") for f in library.functions)
        function = body.function(f"{op}_v{count + 1}" if count else op, tensors, numbers)
        same = ir.serde.serialize_function(function)
        same.name = op
        content = same.SerializeToString(deterministic=True)
        if content not in library.bodies:
            library.bodies[content] = function.name
            library.functions.append(function)
        library.names[key] = library.bodies[content]
    return library.names[key]


def signature(node: fx.Node) -> Any:
    """What a body depends on: op, numbers, and the tensors' types and sizes up to their names."""
    tensors, numbers = arguments(node)
    symbols: dict[Any, Any] = {}

    def size(dim: Any) -> str:
        if not isinstance(dim, torch.SymInt):
            return str(dim)
        expr = dim.node.expr
        for symbol in sorted(expr.free_symbols, key=str):
            symbols.setdefault(symbol, type(symbol)(f"d{len(symbols)}"))
        return str(expr.xreplace(symbols))

    held = [
        None if n is None else (value(n).dtype, tuple(map(size, value(n).shape)))
        for n in tensors.values()
    ]
    return node.target, tuple(tensors), tuple(held), tuple(numbers.items())


def call_alone(graph: Graph, node: fx.Node, tensors: dict[str, fx.Node | None]) -> Graph:
    """A graph of this call, its tensors the inputs, on the fake tensors of the whole."""
    module = fx.GraphModule({}, fx.Graph())
    inputs: dict[fx.Node, fx.Node] = {}
    for name, held in tensors.items():
        if held is None:
            continue
        made = module.graph.placeholder(name)
        made.meta["val"] = value(held)
        inputs.setdefault(held, made)
    args, kwargs = fx.map_arg((node.args, node.kwargs), inputs.__getitem__)
    assert callable(node.target)
    call = module.graph.call_function(node.target, args, kwargs)
    call.meta["val"] = node.meta["val"]
    outputs = [call]
    if isinstance(value(node), list | tuple):
        outputs = []
        for place, held in enumerate(value(node)):
            part = module.graph.call_function(operator.getitem, (call, place))
            part.meta["val"] = held
            outputs.append(part)
    module.graph.output(tuple(outputs))
    names = [f"result_{place}" for place in range(len(outputs))]
    return Graph(module, {}, ModelInfo(kind="module"), graph.fake_mode, names)


class BodyBuilder(Builder):
    """Builds a function's body: sizes come from its own inputs, constants are nodes."""

    def __init__(self, graph: Graph, limit: int) -> None:
        experts = graph.find(OPS["experts"].target)
        for node in experts:
            node.meta["implementation"] = GivenExperts()
        if not experts:
            lower(graph, BODY, limit)
        super().__init__(graph, BODY, limit)
        self.used_opset = 0

    def _input(self, node: fx.Node, needed: bool) -> None:
        made = ir.Value(name=self.fresh(node.name))
        self.values[node] = made
        self.inputs.append(made)

    def function(self, name: str, tensors: Iterable[str], numbers: dict[str, Any]) -> ir.Function:
        """The function, its inputs and attributes those of the nodes that call it."""
        outputs = []
        for node in self.graph.results:
            made = self.value_of(node)
            if made.producer() is None or made in outputs:
                made = self.op("Identity", made)
            outputs.append(made)
        constants: list[tuple[ir.Value, Any]]
        constants = [(made, made.const_value) for made in self.constants.values()]
        for made, weight in self.weights.values():
            tensor = weight.evaluate().contiguous()
            constants.append((made, ir.Tensor(tensor.numpy(), DTYPES[tensor.dtype])))
        for made in (v for node in self.nodes for v in node.outputs):
            made.type = made.shape = None  # sizes would keep bodies apart that are alike
        nodes = [
            ir.Node("", "Constant", [], [ir.AttrTensor("value", held)], outputs=[made])
            for made, held in constants
        ]
        given = {made.name: made for made in self.inputs}
        inputs = [given.get(name) or ir.Value(name=name) for name in tensors]
        body = ir.Graph(inputs, outputs, nodes=[*nodes, *self.nodes], opset_imports={"": 1})
        declared = [ir.Attr(key, ir.AttributeType.UNDEFINED, None) for key in numbers]
        return ir.Function(DOMAIN, name, graph=body, attributes=declared)


def functions(b: Builder, opset: int) -> list[ir.Function]:
    """The functions of a file that is written in this opset; none where no node calls one."""
    found = library_of(b).functions
    for function in found:
        function.opset_imports[""] = opset
    return found
