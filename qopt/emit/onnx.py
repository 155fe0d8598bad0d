"""Writes a graph as `model.onnx` and `model.onnx.data`, weights streamed one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from qopt.canonical import value
from qopt.emit import onnx_aten, onnx_cuda, onnx_dialect, onnx_kernels
from qopt.emit.builder import DTYPES, Builder
from qopt.emit.external_data import DATA, place, write_weights
from qopt.emit.kernel_binaries import write_binaries
from qopt.emit.signature import output_shape
from qopt.emit.written import Written
from qopt.errors import UnsupportedError, UsageError
from qopt.graph import Graph
from qopt.lower import lower
from qopt.ops import OPS
from qopt.target import Target

assert onnx_aten
assert onnx_dialect

IR_VERSION = 10  # onnxruntime 1.18 and later load it


def write_onnx(
    graph: Graph,
    folder: Path,
    target: Target,
    opset: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    read_soon: bool = True,
    architectures: Sequence[str] = (),
) -> Written:
    """Lower `graph` and write it into `folder`; `progress` is told bytes done and in all.

    `read_soon`: a check follows, so the weights had better stay in the system's cache.
    `architectures`: what the Triton kernels of `ai.qopt` nodes are compiled for. Raises
    `UnsupportedError` for an op that cannot be written, and lets an `OSError` pass.
    """
    if graph.find(OPS["static_attention"].target):
        raise UnsupportedError(
            f"target {target.name} has no cache of a fixed size",
            where="materialize-kv-cache: {layout: static}",
            todo="use --target torchscript-cpu or torchscript-cuda, or leave the option out",
        )
    choices = lower(graph, target, opset or target.newest_opset)
    builder = Builder(graph, target, opset)
    builder.run()
    if opset is not None and builder.used_opset > opset:
        raise UsageError(
            f"the graph needs opset {builder.used_opset}, not {opset}", todo="use --opset auto"
        )
    model = assemble(builder, opset or builder.used_opset)
    written = Written(
        opset=opset or builder.used_opset,
        ir_version=IR_VERSION,
        nodes=count_nodes(builder.nodes),
        choices=choices,
        fallbacks=builder.fallbacks,
        inputs=specs(model.graph.inputs),
        outputs=specs(model.graph.outputs),
        shared_buffer=in_place(graph, builder),
        batched_chunks=target.name != onnx_cuda.TARGET or not in_place_attentions(builder),
    )
    if any(weight.absent for _, weight in builder.weights.values()):
        written.notes.append("compiled without weights: the graph alone is written")
        place(builder.weights.values())
    else:
        stored = write_weights(
            folder / DATA, list(builder.weights.values()), progress, direct=not read_soon
        )
        written.data_size, written.data_hash = stored.size, stored.sha256
        written.shared = stored.shared
    ir.save(model, folder / "model.onnx")
    if target.name in (onnx_cuda.TARGET, onnx_kernels.TARGET):
        written.notes += onnx_cuda.after_writing(folder / "model.onnx", written.batched_chunks)
    if target.name == onnx_kernels.TARGET:
        calls = [n for n in graph.nodes if n in builder.values and onnx_kernels.is_call(n)]
        written.notes += write_binaries(calls, folder / "kernels", architectures)
    return written


def assemble(builder: Builder, opset: int) -> ir.Model:
    """Put nodes, inputs, outputs and initializers together."""
    outputs = []
    for name, node in zip(builder.graph.outputs, builder.graph.results, strict=True):
        made = builder.value_of(node)
        if made.producer() is None or made.name in builder.graph.outputs:
            made = builder.op("Identity", made)
        held = value(node)
        made.name = name
        made.type = ir.TensorType(DTYPES[held.dtype])
        made.shape = ir.Shape(output_shape(builder.graph, name, held))
        outputs.append(made)
    initializers = [made for made, _ in builder.weights.values()]
    initializers += builder.constants.values()
    initializers += [made for made in builder.inputs if made.const_value is not None]
    graph = ir.Graph(
        builder.inputs,
        outputs,
        nodes=builder.nodes,
        initializers=initializers,
        opset_imports={"": opset} | dict.fromkeys(own_domains(builder), 1),
        name="qopt",
    )
    functions = onnx_kernels.functions(builder, opset)
    return ir.Model(graph, ir_version=IR_VERSION, producer_name="qopt", functions=functions)


def own_domains(builder: Builder) -> list[str]:
    """The domains beside the standard one that nodes are of."""
    return sorted({node.domain for node in builder.nodes if node.domain})


def in_place_attentions(builder: Builder) -> int:
    """How many attentions write their cache into the buffer that they read."""
    return sum(n.op_type == "GroupQueryAttention" for n in builder.nodes)


def in_place(graph: Graph, builder: Builder) -> bool:
    """Whether every layer's attention can write its cache into the buffer that it reads."""
    presents = [name for name in graph.outputs if name.startswith("present.")]
    return bool(presents) and 2 * in_place_attentions(builder) == len(presents)


def count_nodes(nodes: list[ir.Node]) -> dict[str, int]:
    """How often each op was used."""
    counts: dict[str, int] = {}
    for node in nodes:
        name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))


def specs(values: Any) -> list[tuple[str, str, list[int | str]]]:
    """Name, numpy dtype and shape of inputs or outputs."""
    found = []
    for item in values:
        shape = [d if isinstance(d, int) else str(d.value) for d in item.shape]
        found.append((str(item.name), str(item.dtype.numpy()), shape))
    return found


def check_file(path: Path, weights: bool = True) -> None:
    """Have onnx check the file and infer its shapes; a file that is not valid is no artifact."""
    import onnx

    try:
        if weights:  # by path: the weights are not read
            onnx.checker.check_model(str(path), full_check=True)
            return
        model = onnx.load(path, load_external_data=False)
        absent = [t for t in model.graph.initializer if t.external_data]
        for tensor in absent:
            model.graph.initializer.remove(tensor)
            model.graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        why = next((line for line in str(error).splitlines() if line.strip()), "")
        raise UnsupportedError(
            "what was written is not valid ONNX",
            where=path.name,
            why=why,
            todo="this is a bug in qopt: report it with the output of the command with --debug",
        ) from error
