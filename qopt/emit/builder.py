"""Builds an ONNX graph from fx nodes: values, constants, sizes, and one emitter an op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import onnx_ir as ir
import torch
from torch import Tensor, fx

from qopt.canonical import same_size, targets_of_write, value, written
from qopt.emit.signature import input_shape
from qopt.errors import UnsupportedError
from qopt.graph import Graph, describe
from qopt.target import Target
from qopt.weights import LazyWeight

MICROSOFT = "com.microsoft"

DTYPES = {
    torch.float32: ir.DataType.FLOAT,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.float64: ir.DataType.DOUBLE,
    torch.int64: ir.DataType.INT64,
    torch.int32: ir.DataType.INT32,
    torch.int16: ir.DataType.INT16,
    torch.int8: ir.DataType.INT8,
    torch.uint8: ir.DataType.UINT8,
    torch.bool: ir.DataType.BOOL,
}

Made = TypeVar("Made")
Emitted = Any  # an ir.Value, or a list of them for a node with several results
Emitter = Callable[["Builder", fx.Node], Emitted]
EMITTERS: dict[Any, Emitter] = {}


def emits(*targets: Any) -> Callable[[Emitter], Emitter]:
    """Register the decorated emitter for calls of `targets`."""

    def register(function: Emitter) -> Emitter:
        for target in targets:
            EMITTERS[target] = function
        return function

    return register


class Builder:
    """Collects nodes and initializers; every emitter works through it.

    Symbolic numbers are int64 tensors of shape [1]. `opset` is what may be used; `used_opset` what
    was needed so far.
    """

    def __init__(self, graph: Graph, target: Target, opset: int | None) -> None:
        self.graph, self.target = graph, target
        self.limit = opset or target.newest_opset
        self.used_opset = target.opset
        self.nodes: list[ir.Node] = []
        self.values: dict[fx.Node, Emitted] = {}
        self.flat: dict[fx.Node, ir.Value] = {}  # (B, S, H, D) values known as (B, S, H * D)
        self.weights: dict[str, tuple[ir.Value, LazyWeight]] = {}
        self.constants: dict[Any, ir.Value] = {}
        self.inputs: list[ir.Value] = []
        self.once_values: dict[Any, Any] = {}
        self.current = "graph"
        self.names: set[str] = set()
        self.fallbacks: dict[str, int] = {}

    # Nodes

    def op(self, kind: str, *inputs: ir.Value | None, domain: str = "", **attrs: Any) -> ir.Value:
        """Add a node; returns its value."""
        return self.ops(kind, 1, *inputs, domain=domain, **attrs)[0]

    def ops(
        self, kind: str, outputs: int, *inputs: ir.Value | None, domain: str = "", **attrs: Any
    ) -> list[ir.Value]:
        """Add a node with several results; returns their values."""
        given = list(inputs)
        while given and given[-1] is None:
            given.pop()
        made = [ir.Value(name=self.fresh(f"{self.current}/{kind}")) for _ in range(outputs)]
        kept = {k: v for k, v in attrs.items() if v is not None}
        self.nodes.append(
            ir.Node(
                domain,
                kind,
                given,
                ir.convenience.convert_attributes(kept),
                outputs=made,
                name=self.fresh(f"{self.current}/node/{kind}"),
            )
        )
        return made

    def microsoft(self, kind: str, *inputs: ir.Value | None, **attrs: Any) -> ir.Value:
        """Add a `com.microsoft` node."""
        return self.op(kind, *inputs, domain=MICROSOFT, **attrs)

    def microsoft_ops(
        self, kind: str, outputs: int, *inputs: ir.Value | None, **attrs: Any
    ) -> list[ir.Value]:
        """Add a `com.microsoft` node with several results."""
        return self.ops(kind, outputs, *inputs, domain=MICROSOFT, **attrs)

    def needs(self, opset: int) -> None:
        """Note that an op of this opset is used."""
        self.used_opset = max(self.used_opset, opset)

    def fresh(self, name: str) -> str:
        """Make a name unique."""
        count, unique = 0, name
        while unique in self.names:
            count += 1
            unique = f"{name}_{count}"
        self.names.add(unique)
        return unique

    def once(self, key: Any, make: Callable[[], Made]) -> Made:
        """Compute a value that several nodes share at its first use."""
        if key not in self.once_values:
            self.once_values[key] = make()
        made: Made = self.once_values[key]
        return made

    # Constants and weights

    def add_at(
        self, x: ir.Value, places: ir.Value, updates: ir.Value, dtype: torch.dtype
    ) -> ir.Value:
        """x with updates added at places; fp16 is summed in fp32, as onnxruntime's CPU asks."""
        if dtype != torch.float16:
            return self.op("ScatterND", x, places, updates, reduction="add")
        x, updates = (self.op("Cast", v, to=DTYPES[torch.float32]) for v in (x, updates))
        total = self.op("ScatterND", x, places, updates, reduction="add")
        return self.op("Cast", total, to=DTYPES[dtype])

    def const(self, data: Any, dtype: torch.dtype | None = None) -> ir.Value:
        """A small constant, equal ones shared."""
        if isinstance(data, Tensor):
            array = data.detach().cpu()
            dtype = dtype or array.dtype
        else:
            kind = dtype or torch.int64
            array = torch.tensor(data, dtype=kind)
            dtype = kind
        array = array.to(dtype).contiguous()
        numbers = array.view(torch.uint16).numpy() if dtype == torch.bfloat16 else array.numpy()
        key = (dtype, tuple(array.shape), numbers.tobytes())
        if key not in self.constants:
            name = self.fresh(f"const_{len(self.constants)}")
            tensor = ir.Tensor(numbers, DTYPES[dtype], name=name)
            self.constants[key] = ir.Value(
                name=name,
                type=ir.TensorType(DTYPES[dtype]),
                shape=ir.Shape(tuple(array.shape)),
                const_value=tensor,
            )
        return self.constants[key]

    def weight(self, name: str, weight: LazyWeight) -> ir.Value:
        """An initializer that is written to the external data file, the same one for one name."""
        if name not in self.weights:
            made = ir.Value(
                name=self.fresh(name),
                type=ir.TensorType(DTYPES[weight.dtype]),
                shape=ir.Shape(weight.shape),
            )
            self.weights[name] = made, weight
        return self.weights[name][0]

    # Arguments

    def get(self, node: Any, dtype: torch.dtype | None = None) -> ir.Value:
        """The value of an argument: a node, or a number as a constant, cast to `dtype`."""
        if isinstance(node, fx.Node):
            made: ir.Value = self.value_of(node)
            held = value(node)
            if isinstance(held, torch.SymInt | torch.SymFloat | int | float):
                kind = torch.int64 if isinstance(held, torch.SymInt | int) else torch.float32
                scalar = self.op("Squeeze", made, self.const([0]))
                return self.cast(scalar, kind, dtype) if dtype else scalar
            if dtype is not None:
                return self.cast(made, held.dtype, dtype)
            return made
        if isinstance(node, Tensor):
            return self.const(node, dtype)
        return self.const(node, dtype or number_type(node))

    def value_of(self, node: fx.Node) -> Any:
        """What a node became; a weight becomes an initializer at its first use as it stands."""
        if node.op == "get_attr" and node not in self.values:
            name = str(node.target)
            self.values[node] = self.weight(name, self.graph.weights[name])
        return self.values[node]

    def cast(self, made: ir.Value, source: torch.dtype, dtype: torch.dtype) -> ir.Value:
        """Cast a value unless it has the type already."""
        return made if source == dtype else self.op("Cast", made, to=DTYPES[dtype])

    def number(self, item: Any) -> ir.Value:
        """An integer argument as int64 [1]."""
        if isinstance(item, fx.Node):
            held = value(item)
            if isinstance(held, Tensor):
                return self.op("Reshape", self.get(item, torch.int64), self.const([1]))
            size: ir.Value = self.values[item]
            return size
        return self.const([int(item)])

    def shape(self, sizes: Sequence[Any]) -> ir.Value:
        """A list of sizes as one int64 vector."""
        if not any(isinstance(s, fx.Node) for s in sizes):
            return self.const([int(s) for s in sizes])
        parts: list[ir.Value] = []
        run: list[int] = []
        for item in sizes:
            if isinstance(item, fx.Node):
                if run:
                    parts.append(self.const(run))
                    run = []
                parts.append(self.number(item))
            else:
                run.append(int(item))
        if run:
            parts.append(self.const(run))
        return parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=0)

    def size(self, node: fx.Node, dim: int) -> ir.Value:
        """One size of a tensor as int64 [1]."""
        held = value(node).shape[dim]
        if not isinstance(held, torch.SymInt):
            return self.const([held])
        source = self.value_of(node)
        key = ("size", source, dim)
        return self.once(key, lambda: self.op("Shape", source, start=dim, end=dim + 1))

    def sizes(self, node: fx.Node) -> ir.Value:
        """The shape of a tensor as an int64 vector."""
        held = value(node).shape
        if not any(isinstance(s, torch.SymInt) for s in held):
            return self.const([int(s) for s in held] or torch.zeros(0, dtype=torch.int64))
        return self.op("Shape", self.value_of(node))

    def reshape(self, node: fx.Node, source: fx.Node, sizes: Sequence[Any]) -> ir.Value:
        """`source` in the shape of `node`, dimensions copied or inferred where that says it."""
        before, after = value(source).shape, value(node).shape
        target: list[Any] = []
        for i, wanted in enumerate(after):
            if not isinstance(wanted, torch.SymInt):
                target.append(int(wanted))
            elif i < len(before) and same_size(before[i], wanted):
                target.append(0)
            else:
                target.append(None)
        open_dims = [i for i, t in enumerate(target) if t is None]
        if len(open_dims) == 1:
            target[open_dims[0]] = -1
        elif open_dims:
            for i in open_dims:
                target[i] = sizes[i]
        return self.op("Reshape", self.value_of(source), self.shape(target))

    # Driving

    def run(self) -> None:
        """Emit every node that the results need, in order."""
        needed = self._needed()
        if not needed.isdisjoint(written(self.graph)):
            write = next(node for node in self.graph.fx.nodes if targets_of_write(node))
            raise self.refuse(write, "it writes into a tensor that something else reads")
        for node in self.graph.fx.nodes:
            if node in needed or node.op == "placeholder":
                self.current = node.name
                self._emit(node, needed)

    def _needed(self) -> set[fx.Node]:
        from qopt.lower import sources

        needed: set[fx.Node] = set(self.graph.results)
        for node in reversed(self.graph.fx.nodes):
            if node in needed:
                needed.update(sources(node))
        return needed

    def _emit(self, node: fx.Node, needed: set[fx.Node]) -> None:
        if node.op == "placeholder":
            self._input(node, node in needed)
        elif node.op == "call_function":
            self.values[node] = self._call(node)
            self._annotate(node)

    def _call(self, node: fx.Node) -> Emitted:
        implementation = node.meta.get("implementation")
        if implementation is not None:
            return implementation.emit(self, node)
        if any(isinstance(v, Tensor) and v.dtype not in DTYPES for v in held_values(node)):
            raise self.refuse(node, "ONNX does not compute with its element type")
        emitter = EMITTERS.get(node.target)
        if emitter is None:
            from qopt.emit.torchlib import call_torchlib

            return call_torchlib(self, node)
        return emitter(self, node)

    def _input(self, node: fx.Node, needed: bool) -> None:
        name = node.meta.get("input", node.name)
        if not needed and self.graph.info.kind == "decoder" and name in ("position_ids",):
            return
        held = value(node)
        made = ir.Value(
            name=self.fresh(name),
            type=ir.TensorType(DTYPES[held.dtype]),
            shape=ir.Shape(input_shape(self.graph, node, name)),
        )
        default = self.graph.defaults.get(node.name)
        if default is not None:
            made.const_value = ir.Tensor(default.numpy(), name=name)
        self.values[node] = made
        self.inputs.append(made)

    def _annotate(self, node: fx.Node) -> None:
        held, made = value(node), self.values[node]
        pairs = zip(held, made, strict=True) if isinstance(made, list) else [(held, made)]
        for fake, result in pairs:
            if isinstance(fake, Tensor) and isinstance(result, ir.Value) and result.type is None:
                result.type = ir.TensorType(DTYPES[fake.dtype])
                if result.shape is None:
                    dims = [d if isinstance(d, int) else None for d in fake.shape]
                    result.shape = ir.Shape(dims)

    def refuse(self, node: fx.Node, why: str) -> UnsupportedError:
        """An error that says which op cannot be written, where it stands in the model, and why."""
        return UnsupportedError(
            f"{describe(node).split('  #')[0]} cannot be written for target {self.target.name}",
            where=module_path(node),
            why=why,
        )


def held_values(node: fx.Node) -> Sequence[Any]:
    """What a node and its arguments hold."""
    own = value(node)
    return [*(own if isinstance(own, list | tuple) else [own]), *map(value, node.all_input_nodes)]


def number_type(number: Any) -> torch.dtype:
    """The element type of a Python number."""
    if isinstance(number, bool):
        return torch.bool
    return torch.int64 if isinstance(number, int) else torch.float32


def module_path(node: fx.Node) -> str | None:
    """The module of the model that a node comes from."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    path = list(stack.values())[-1][0]
    return str(path).removeprefix("L['self'].").removeprefix("model.") or None
