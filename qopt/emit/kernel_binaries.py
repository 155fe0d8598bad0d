"""The Triton kernels that an ONNX file's `ai.qopt` nodes can launch, compiled into its folder.

`kernels/ARCH/kernels.json` says how each binary is launched, as `qopt kernels build` has it. Of the
forms of an op's kernels those are left out that no call in the graph can ask for.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from qopt import kernel, kernel_build
from qopt.canonical import operands, options, value
from qopt.kernel import Form, Kernel


def write_binaries(
    calls: Sequence[fx.Node], folder: Path, architectures: Sequence[str]
) -> list[str]:
    """Compile what `calls` can launch for each architecture; returns what is to be said of it."""
    if not calls:
        return ["no op of this model has a Triton kernel: the folder holds none"]
    if not architectures:
        return ["no Triton kernels were asked for: the folder holds none"]
    reason = kernel.load()
    if reason is None and kernel.interpreting():
        reason = "TRITON_INTERPRET is set, and Triton then has no compiler"
    if reason is not None:
        return [f"the folder holds no Triton kernels: {reason}"]
    counts = [write_for(calls, folder / arch, arch) for arch in architectures]
    told = ", ".join(f"{arch} {n}" for arch, n in zip(architectures, counts, strict=True))
    return [f"Triton kernels compiled into kernels/, not run: {told} forms"]


def write_for(calls: Sequence[fx.Node], folder: Path, arch: str) -> int:
    """Compile the forms for one architecture, with their index; returns how many there are."""
    folder.mkdir(parents=True)
    entries = []
    for one, form in forms_of_calls(calls, arch):
        built = kernel_build.compile_form(one, form, arch)
        (folder / built.file).write_bytes(built.binary)
        entries.append(built.entry())
    kernel_build.write_index(folder, arch, entries)
    return len(entries)


def forms_of_calls(calls: Iterable[fx.Node], arch: str) -> Iterator[tuple[Kernel, Form]]:
    """The forms that any of the calls can launch, each once, in the order of their kernels."""
    wanted: dict[str, set[Any]] = {}
    for node in calls:
        assert isinstance(node.target, torch._ops.OpOverload)
        op = node.target._schema.name.partition("::")[2]
        wanted.setdefault(op, set()).add((element_type(node), constants(op, node)))
    for one, form in kernel_build.all_forms(arch):
        if any(fits(form, *want) for want in wanted.get(one.op.name, ())):
            yield one, form


def fits(form: Form, dtype: str, fixed: tuple[tuple[str, frozenset[Any]], ...]) -> bool:
    """Whether a launch on tensors of a type, with these values of constants, can ask for a form."""
    floats = {t.strip("*") for _, t in form.types if t in ("*fp32", "*fp16", "*bf16")}
    held = dict(form.constants)
    return (
        dtype in floats
        and floats <= {dtype, "fp32"}
        and all(held.get(name) in (None, *values) for name, values in fixed)
    )


def element_type(node: fx.Node) -> str:
    """The narrowest floating type of a call's tensors, as Triton writes it: others may be fp32."""
    held = (value(n).dtype for n in node.all_input_nodes)
    floats = (dtype for dtype in held if dtype.is_floating_point)
    return kernel.TYPES[min(floats, key=lambda dtype: dtype.itemsize)]


def constants(op: str, node: fx.Node) -> tuple[tuple[str, frozenset[Any]], ...]:
    """The values that a call can give to a kernel's constants, for those that follow from it."""
    given = _CONSTANTS[op](node) if op in _CONSTANTS else {}  # every form, for one not told here
    return tuple((name, frozenset(values)) for name, values in given.items())


def _tiles(op: str, node: fx.Node, *names: str) -> dict[str, set[Any]]:
    """The tile for the width of the first operand; any where that is not known."""
    width = value(operands(node)[0]).shape[-1]
    if not isinstance(width, int):
        return {}
    options = importlib.import_module(f"qopt.kernels.{op}").tile(width)
    return {name: {options[name]} for name in names}


def _attention(node: fx.Node) -> dict[str, set[Any]]:
    sizes = importlib.import_module("qopt.kernels.prefill_attention").SIZES
    heads = [int(value(n).shape[-1]) for n in (operands(node)[0], operands(node)[2])]
    blocks = {next((block for block in sizes if head <= block), None) for head in heads}
    return {"BLOCK_D": blocks, "CAPPED": {options(node).get("softcap") is not None}}


def _rotary(node: fx.Node) -> dict[str, set[Any]]:
    pairs = int(value(operands(node)[3]).shape[-1])
    tile = importlib.import_module("qopt.kernels.rotary_from_positions").tile(pairs)
    interleaved = operands(node)[5] if len(operands(node)) > 5 else False
    return {"PAIRS": {tile["PAIRS"]}, "INTERLEAVED": {bool(interleaved)}}


def _given(node: fx.Node, place: int, name: str, default: Any) -> Any:
    held = operands(node)[place] if len(operands(node)) > place else None
    return options(node).get(name, default) if held is None else held


_CONSTANTS: dict[str, Any] = {
    "rms_norm": lambda node: _tiles("rms_norm", node, "BLOCK", "WHOLE"),
    "add_rms_norm": lambda node: _tiles("add_rms_norm", node, "BLOCK", "WHOLE"),
    "softmax": lambda node: (
        _tiles("softmax", node, "BLOCK", "WHOLE")
        | {"MASKED": {_given(node, 1, "mask", None) is not None}}
    ),
    "gated": lambda node: {"ACTIVATION": {_given(node, 2, "activation", "silu")}},
    "rms_norm_linear": lambda node: {"SILU": {_given(node, 6, "activation", None) == "silu"}},
    "linear_silu": lambda node: {"GATED": {bool(_given(node, 3, "gated", False))}},
    "experts": lambda node: {"TRANSPOSED": {bool(options(node).get("transposed", False))}},
    "quantized_embedding": lambda node: {"BITS": {options(node)["bits"]}},
    "quantized_linear": lambda node: {"BITS": {options(node)["bits"]}},
    "cached_attention": _attention,
    "rotary_from_positions": _rotary,
}
