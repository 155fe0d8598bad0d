"""Writes a graph as `model.onnx` and `model.onnx.data`, weights streamed one at a time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import onnx_ir as ir
import torch
from torch import Tensor

from qopt.canonical import value
from qopt.emit import onnx_aten, onnx_dialect
from qopt.emit.builder import DTYPES, Builder
from qopt.errors import UnsupportedError, UsageError
from qopt.graph import Graph
from qopt.lower import Choice, lower
from qopt.target import Target
from qopt.weights import LazyWeight, fingerprint, tensor_bytes

assert onnx_aten
assert onnx_dialect

INLINE_BYTES = 1024  # a weight up to this size is kept in the graph file
ALIGN = 64  # of a weight in the data file; larger ones start at a page
PAGE = 4096
IR_VERSION = 10  # onnxruntime 1.18 and later load it


@dataclass
class Written:
    """What was written: the opset and nodes used, and each file's hash."""

    opset: int
    ir_version: int
    nodes: dict[str, int]
    choices: list[Choice]
    fallbacks: dict[str, int]
    inputs: list[tuple[str, str, list[int | str]]]
    outputs: list[tuple[str, str, list[int | str]]]
    shared_buffer: bool
    data_size: int = 0
    data_hash: str = ""
    shared: int = 0  # bytes not written since an equal weight was there already
    notes: list[str] = field(default_factory=list)


def write_onnx(
    graph: Graph,
    folder: Path,
    target: Target,
    opset: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Lower `graph` and write it into `folder`; `progress` is told bytes done and in all.

    Raises `UnsupportedError` for an op that cannot be written, and lets an `OSError` pass.
    """
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
    )
    if any(weight.absent for _, weight in builder.weights.values()):
        written.notes.append("compiled without weights: the graph alone is written")
        place_nothing(builder)
    else:
        DataFile(folder / "model.onnx.data", written, progress).write(builder.weights)
    ir.save(model, folder / "model.onnx")
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
        opset_imports={"": opset, **({"com.microsoft": 1} if uses_contrib(builder) else {})},
        name="qopt",
    )
    return ir.Model(graph, ir_version=IR_VERSION, producer_name="qopt")


def uses_contrib(builder: Builder) -> bool:
    """Whether any node is of `com.microsoft`."""
    return any(node.domain for node in builder.nodes)


def output_shape(graph: Graph, name: str, held: Tensor) -> list[int | str | None]:
    """The declared shape of an output."""
    if graph.info.kind != "decoder":
        return [d if isinstance(d, int) else str(d) for d in held.shape]
    if name.startswith("present."):
        return ["batch_size", int(held.shape[1]), "total_sequence_length", int(held.shape[3])]
    if name.startswith("present_state."):
        sizes = [int(d) if isinstance(d, int) else "total_sequence_length" for d in held.shape[1:]]
        return ["batch_size", *sizes]
    keep = graph.defaults.get("num_logits_to_keep")
    rows: int | str = "sequence_length"
    if keep is not None and int(keep) > 0:
        rows = int(keep)  # onnxruntime-genai allocates by this number
    return ["batch_size", rows, int(held.shape[-1])]


def in_place(graph: Graph, builder: Builder) -> bool:
    """Whether every layer's attention can write its cache into the buffer that it reads."""
    presents = [name for name in graph.outputs if name.startswith("present.")]
    writers = sum(node.op_type == "GroupQueryAttention" for node in builder.nodes)
    return bool(presents) and 2 * writers == len(presents)


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


def place_nothing(builder: Builder) -> None:
    """Point every weight at a data file that is not written."""
    at = 0
    for made, weight in builder.weights.values():
        at = aligned(at, weight.nbytes)
        made.const_value = external(made, weight, at)
        at += weight.nbytes


def external(made: ir.Value, weight: LazyWeight, offset: int) -> ir.ExternalTensor:
    """A reference into the data file."""
    return ir.ExternalTensor(
        "model.onnx.data",
        offset,
        weight.nbytes,
        DTYPES[weight.dtype],
        shape=ir.Shape(weight.shape),
        name=str(made.name),
    )


def aligned(at: int, size: int) -> int:
    """The next place at which a weight of this size may start."""
    step = PAGE if size >= PAGE else ALIGN
    return -(-at // step) * step


@dataclass
class Piece:
    """A part of a weight's bytes; `first` and `last` say where in the weight it is."""

    made: ir.Value
    weight: LazyWeight
    data: Tensor | None  # None: the weight equals `twin`, which is written already
    first: bool = True
    last: bool = True
    twin: ir.Value | None = None


class DataFile:
    """The external data file: weights one after the other, equal contents once.

    A thread evaluates the next piece while one is hashed and written; no more than three are in
    memory.
    """

    def __init__(
        self, path: Path, written: Written, progress: Callable[[int, int], None] | None
    ) -> None:
        self.path, self.written, self.progress = path, written, progress
        self.digest = hashlib.sha256()
        self.end = 0
        self.starts: dict[ir.Value, int] = {}

    def write(self, weights: dict[str, tuple[ir.Value, LazyWeight]]) -> None:
        """Stream all weights; small ones stay in the graph file."""
        large = []
        for made, weight in weights.values():
            if weight.nbytes <= INLINE_BYTES:
                made.const_value = inline(made, weight)
            else:
                large.append((made, weight))
        if not large:
            return
        total, done = sum(weight.nbytes for _, weight in large), 0
        with self.path.open("w+b") as file, ThreadPoolExecutor(2) as workers:
            for piece in ahead(workers, pieces(large)):
                self._put(file, workers, piece)
                done += piece.weight.nbytes if piece.last else 0
                if self.progress is not None:
                    self.progress(done, total)
            file.flush()
            os.fsync(file.fileno())
        self.written.data_size, self.written.data_hash = self.end, self.digest.hexdigest()

    def _put(self, file: BinaryIO, workers: ThreadPoolExecutor, piece: Piece) -> None:
        made, weight = piece.made, piece.weight
        if piece.data is None:
            assert piece.twin is not None
            made.const_value = external(made, weight, self.starts[piece.twin])
            self.written.shared += weight.nbytes
            return
        if weight.dtype == torch.float16:
            refuse_overflow(made, piece.data)
        if piece.first:
            start = aligned(self.end, weight.nbytes)
            self._append(file, workers, b"\0" * (start - self.end))
            self.starts[made] = start
            made.const_value = external(made, weight, start)
        self._append(file, workers, tensor_bytes(piece.data))

    def _append(
        self, file: BinaryIO, workers: ThreadPoolExecutor, data: bytes | memoryview
    ) -> None:
        hashing = workers.submit(self.digest.update, data)  # both let go of the interpreter's lock
        file.write(data)
        hashing.result()
        self.end += len(data)


def pieces(weights: list[tuple[ir.Value, LazyWeight]]) -> Iterator[Piece]:
    """Every weight in pieces, in order; one that equals an earlier one has no data."""
    seen: dict[Any, list[tuple[ir.Value, LazyWeight]]] = {}
    for made, weight in weights:
        key = weight.shape, weight.dtype, fingerprint(weight)
        twins = [m for m, w in seen.get(key, []) if w is weight or w.digest == weight.digest]
        if twins:
            yield Piece(made, weight, None, twin=twins[0])
            continue
        seen.setdefault(key, []).append((made, weight))
        rows = 0
        for chunk in weight.chunks():
            rows += chunk.shape[0] if weight.shape else 1
            first = rows == (chunk.shape[0] if weight.shape else 1)
            yield Piece(
                made, weight, chunk, first, rows >= (weight.shape[0] if weight.shape else 1)
            )


def refuse_overflow(made: ir.Value, piece: Tensor) -> None:
    """A weight beyond fp16's range must not become infinite in silence."""
    if not bool(torch.isfinite(piece).all()):
        raise UsageError(f"weight {made.name} does not fit fp16", todo="compile with --dtype fp32")


def ahead(workers: ThreadPoolExecutor, items: Iterator[Piece]) -> Iterator[Piece]:
    """The items, the next one made while one is used."""

    def step() -> Piece | None:
        with torch.no_grad():
            return next(items, None)

    pending = workers.submit(step)
    while (item := pending.result()) is not None:
        pending = workers.submit(step)
        yield item


def inline(made: ir.Value, weight: LazyWeight) -> ir.TensorProtocol:
    """A small weight as part of the graph file."""
    tensor = weight.evaluate().contiguous()
    if tensor.dtype == torch.bfloat16:
        return ir.Tensor(tensor.view(torch.uint16).numpy(), ir.DataType.BFLOAT16, name=made.name)
    return ir.Tensor(tensor.numpy(), name=made.name)
