"""The fallback for aten ops without an emitter: onnxscript's torchlib functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, fx

from qopt.canonical import value
from qopt.emit.builder import DTYPES, Builder


def call_torchlib(b: Builder, node: fx.Node) -> Any:
    """Emit a call through torchlib; raises `UnsupportedError` where it has no such op."""
    function = find(node.target)
    if function is None:
        raise b.refuse(node, "neither qopt nor torchlib knows the op")
    from onnxscript import evaluator

    name = str(node.target)
    b.fallbacks[name] = b.fallbacks.get(name, 0) + 1
    recorder = recorder_class()(b)
    try:
        with evaluator.default_as(recorder):
            args, kwargs = arguments(b, node)
            return unpack(function(*args, **kwargs), value(node))
    except Exception as error:
        raise b.refuse(
            node, f"torchlib: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error


def find(target: Any) -> Any:
    """The torchlib function for an op, its overload first."""
    from onnxscript.function_libs.torch_lib import ops, registration

    assert ops
    if not isinstance(target, torch._ops.OpOverload):
        return None
    registry = registration.default_registry
    base = target._schema.name
    names = [f"{base}.{target._overloadname}", base]
    for name in names:
        found = registry._registry.get(name) if hasattr(registry, "_registry") else None
        if found is not None and found.overloads:
            return found.overloads[0]
    return None


def arguments(b: Builder, node: fx.Node) -> tuple[list[Any], dict[str, Any]]:
    """The call's arguments as torchlib takes them: values, numbers, and lists of them."""

    def convert(item: Any) -> Any:
        if isinstance(item, fx.Node):
            made = b.value_of(item)
            held = value(item)
            if isinstance(made, ir.Value):
                describe(made, held)
            return made
        if isinstance(item, list | tuple):
            return [convert(i) for i in item]
        if isinstance(item, torch.dtype):
            return int(DTYPES[item])
        if isinstance(item, torch.device | torch.layout | torch.memory_format):
            return None
        return item

    kept = {
        k: v
        for k, v in node.kwargs.items()
        if k not in ("device", "layout", "pin_memory", "memory_format")
    }
    return [convert(a) for a in node.args], {k: convert(v) for k, v in kept.items()}


def describe(made: ir.Value, held: Any) -> None:
    """Give a value the type and rank that torchlib asks for."""
    if isinstance(held, Tensor):
        if made.type is None:
            made.type = ir.TensorType(DTYPES[held.dtype])
        if made.shape is None:
            made.shape = ir.Shape([d if isinstance(d, int) else None for d in held.shape])
    elif made.type is None:
        made.type, made.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([1])


def unpack(result: Any, held: Any) -> Any:
    """One value, or a list where the op has several results."""
    if isinstance(held, list | tuple):
        return list(result) if isinstance(result, list | tuple) else [result]
    return result


def recorder_class() -> type:
    """An onnxscript evaluator that adds nodes to a builder instead of running them."""
    from onnxscript import evaluator

    class Recorder(evaluator.Evaluator):
        def __init__(self, builder: Builder) -> None:
            self.builder = builder

        def eval(self, schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            b = self.builder
            b.needs(schema.since_version)
            inputs, attributes = self._sort(schema, args, dict(kwargs))
            count = outputs_of(schema, attributes)
            made = b.ops(schema.name, count, *inputs, domain=schema.domain, **attributes)
            propagate(schema, inputs, attributes, made)
            return made[0] if count == 1 else made

        def eval_function(
            self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
        ) -> Any:
            return function.function(*args, **kwargs)

        def _sort(
            self, schema: Any, args: Sequence[Any], kwargs: dict[str, Any]
        ) -> tuple[list[ir.Value | None], dict[str, Any]]:
            b = self.builder
            types = known_types(schema, args)
            inputs: list[ir.Value | None] = []
            for place, item in enumerate(args):
                formal = schema.inputs[min(place, len(schema.inputs) - 1)]
                inputs.append(as_value(b, item, types.get(formal.type_str)))
            attributes = dict(kwargs)
            for name in list(attributes):
                item = attributes[name]
                if name not in schema.attributes or isinstance(item, ir.Value):
                    inputs.append(as_value(b, attributes.pop(name), None))
            return inputs, {k: v for k, v in attributes.items() if v is not None}

    return Recorder


def known_types(schema: Any, args: Sequence[Any]) -> dict[str, ir.DataType]:
    """The element type that each of the schema's type variables takes."""
    types: dict[str, ir.DataType] = {}
    for place, item in enumerate(args):
        formal = schema.inputs[min(place, len(schema.inputs) - 1)]
        if isinstance(item, ir.Value) and item.dtype is not None:
            types.setdefault(formal.type_str, item.dtype)
    return types


def as_value(b: Builder, item: Any, dtype: ir.DataType | None) -> ir.Value | None:
    """An argument as a value: numbers become constants of the wanted type."""
    if item is None or isinstance(item, ir.Value):
        return item
    if isinstance(item, ir.TensorProtocol):
        return b.const(torch.from_numpy(item.numpy().copy()))
    if isinstance(item, list | tuple) and any(isinstance(i, ir.Value) for i in item):
        parts = [i if isinstance(i, ir.Value) else b.const([int(i)]) for i in item]
        parts = [
            p if p.shape is not None and p.shape.rank() == 1 else b.op("Reshape", p, b.const([1]))
            for p in parts
        ]
        return b.op("Concat", *parts, axis=0)
    kind = next((k for k, v in DTYPES.items() if v == dtype), None)
    if kind is None:
        sample = item[0] if isinstance(item, list | tuple) and item else item
        kind = torch.bool if isinstance(sample, bool) else torch.int64
        if isinstance(sample, float):
            kind = torch.float32
    return b.const(list(item) if isinstance(item, tuple) else item, kind)


def outputs_of(schema: Any, attributes: dict[str, Any]) -> int:
    """How many results a call has."""
    if schema.name == "Split" and "num_outputs" in attributes:
        return int(attributes["num_outputs"])
    return sum(1 for o in schema.outputs if o.option != o.option.Optional) or 1


def propagate(
    schema: Any, inputs: list[ir.Value | None], attributes: dict[str, Any], made: list[ir.Value]
) -> None:
    """Give results a type, which torchlib asks for: an input's of the same type variable."""
    for formal, result in zip(schema.outputs, made, strict=False):
        if "to" in attributes:
            result.type = ir.TensorType(ir.DataType(int(attributes["to"])))
            continue
        for place, item in enumerate(inputs):
            source = schema.inputs[min(place, len(schema.inputs) - 1)]
            if item is not None and source.type_str == formal.type_str and item.dtype is not None:
                result.type = ir.TensorType(item.dtype)
                break
        else:
            if formal.type_str in ("tensor(bool)", "tensor(int64)"):
                kind = ir.DataType.BOOL if "bool" in formal.type_str else ir.DataType.INT64
                result.type = ir.TensorType(kind)
