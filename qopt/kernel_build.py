"""Kernels compiled ahead of time: what `qopt kernels` lists and `qopt kernels build` writes.

No GPU is needed. Registers, shared memory and spills are read from the binary itself: from a cubin
by the cuobjdump in the Triton wheel, from an hsaco out of the notes of its ELF file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qopt import __version__, kernel
from qopt.errors import UnsupportedError, UsageError
from qopt.kernel import ARCHITECTURES, Form, Kernel
from qopt.recipe import did_you_mean
from qopt.report import Table

# Bytes of shared memory that one program may take. What sm_80 takes also serves sm_86, sm_89 and
# sm_12x, which have less.
SHARED_LIMITS = {"sm_80": 101_376, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
INDEX = "kernels.json"
CALL = (
    "The arguments in their order, then two pointers, to global scratch and to profile scratch, "
    "null where `global_scratch` is 0. One program of `threads` threads for each place of the "
    "grid, with `shared` bytes of dynamic shared memory. What `multiples_of_16` names must be one."
)


@dataclass(frozen=True)
class Resources:
    """What a program takes: registers a thread, bytes of shared memory, bytes spilled a thread."""

    registers: int
    shared: int
    spills: int


@dataclass(frozen=True)
class Built:
    """One form, compiled for one architecture."""

    op: str
    kernel: str
    arch: str
    form: Form
    binary: bytes
    symbol: str
    ttir: str  # Triton's own form of the program, before it is laid out for an architecture
    threads: int
    scratch: int  # bytes of global memory that a program wants beside its arguments
    resources: Resources

    @property
    def file(self) -> str:
        """Its file's name, which tells the forms of an op apart."""
        types = "-".join(dict.fromkeys(t.strip("*") for _, t in self.form.types if "*" in t))
        constants = "-".join(f"{k.lower()}_{_plain(v)}" for k, v in self.form.constants)
        suffix = "hsaco" if self.arch.startswith("gfx") else "cubin"
        return f"{self.form.function.strip('_')}.{types}.{constants}.{suffix}"

    def entry(self) -> dict[str, Any]:
        """Its entry in the index."""
        return {
            "file": self.file,
            "op": self.op,
            "kernel": self.kernel,
            "symbol": self.symbol,
            "arguments": [{"name": name, "type": kind} for name, kind in self.form.types],
            "constants": dict(self.form.constants),
            "multiples_of_16": [*(n for n, t in self.form.types if "*" in t), *self.form.aligned],
            "grid": self.form.grid,
            "threads": self.threads,
            "global_scratch": self.scratch,
            "registers": self.resources.registers,
            "shared": self.resources.shared,
            "spills": self.resources.spills,
        }


def _plain(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


# --- listing ---------------------------------------------------------------------------------


@dataclass
class Row:
    """An implementation of an op."""

    op: str
    implementation: str
    forms: int
    accepts: str


@dataclass
class Listing:
    """Every dialect op and what implements it; `missing` tells why kernels cannot be loaded."""

    missing: str | None
    kernels: list[Row]

    def tables(self) -> list[Table]:
        """One row an implementation; the reference comes last, as in dispatch."""
        rows = [(r.op, r.implementation, r.forms or "", r.accepts) for r in self.kernels]
        notes = (
            [Table("", ("kernels cannot be loaded",), [(self.missing,)])] if self.missing else []
        )
        return [*notes, Table("", ("op", "implementation", "forms", "accepts"), rows)]


def listing() -> Listing:
    """The dialect ops, their kernels in the order of dispatch, and what each accepts."""
    from qopt.ops import OPS

    missing = kernel.load()
    rows = []
    for name in sorted(OPS):
        for one in kernel.KERNELS.get(name, []):
            rows.append(Row(name, one.name, len(set(one.forms("sm_90"))), one.accepts))
        rows.append(Row(name, "reference", 0, "Everything, in torch."))
    return Listing(missing, rows)


# --- building --------------------------------------------------------------------------------


@dataclass
class Report:
    """What was built, and where it lies."""

    arch: str
    folder: str
    kernels: list[dict[str, Any]]
    left_out: list[dict[str, str]]

    def tables(self) -> list[Table]:
        """For each op and kernel: forms, and the most that any of them takes; what is left out."""
        groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for entry in self.kernels:
            groups.setdefault((entry["op"], entry["kernel"]), []).append(entry)
        most = [
            (
                *key,
                len(group),
                *(max(e[k] for e in group) for k in ("registers", "shared", "spills")),
            )
            for key, group in groups.items()
        ]
        columns = ("op", "kernel", "forms", "registers", "shared", "spills")
        tables = [Table(f"{self.arch}, the most of each", columns, most)]
        if self.left_out:
            rows = [(x["op"], x["kernel"], x["why"]) for x in self.left_out]
            tables.append(Table("left out", ("op", "kernel", "why"), rows))
        return tables


def build(
    arch: str,
    folder: Path,
    only: str | None = None,
    step: Callable[[str], None] = lambda _: None,
) -> Report:
    """Compile every form of every kernel (or of one op) into `folder`, with an index beside them.

    `step` hears each file's name. Raises `UsageError` where the architecture
    or op is unknown or the folder holds other files, `UnsupportedError` without Triton.
    """
    if arch not in ARCHITECTURES:
        raise UsageError(
            f"no kernels are built for {arch}", todo=f"use one of: {', '.join(ARCHITECTURES)}"
        )
    ready()
    if only is not None and only not in kernel.KERNELS:
        raise UsageError(
            f"no kernel of op {only!r}{did_you_mean(only, kernel.KERNELS)}",
            todo="`qopt kernels` lists them",
        )
    entries = []
    left_out = [
        {"op": name, "kernel": one.name, "why": why}
        for name in sorted(kernel.KERNELS)
        if only in (None, name)
        for one in kernel.KERNELS[name]
        if (why := one.lacks(arch)) is not None
    ]
    with replaced(folder) as new:
        for one, form in all_forms(arch, only):
            built = compile_form(one, form, arch)
            step(built.file)
            (new / built.file).write_bytes(built.binary)
            entries.append(built.entry())
        write_index(new, arch, entries, left_out)
    return Report(arch, str(folder), entries, left_out)


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """An empty folder whose files take the place of those in `folder`, or which is removed.

    Binaries of another architecture or op would stay there beside an index that knows none of them.
    A folder that is there stays the same one: it may be where the user stands, or a mount point.
    """
    place = Path(os.path.realpath(folder))
    before = refuse_foreign(place)
    if not place.is_dir() and place.exists():
        raise UsageError(f"{place} is a file", todo="choose another output folder")
    temporary = f".tmp-{os.getpid()}"
    new = place / temporary if place.is_dir() else place.with_name(f".{place.name}{temporary}")
    make_folder(new)
    try:
        yield new
        if not place.is_dir():
            new.rename(place)
            return
        files = {path.name for path in new.iterdir()}
        for name in [*sorted(files - {INDEX}), INDEX]:  # the index is never ahead of its files
            (new / name).replace(place / name)
        for name in before - files:
            (place / name).unlink(missing_ok=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def refuse_foreign(folder: Path) -> set[str]:
    """The names of what `build` wrote there before; a folder that holds anything else is refused.

    What a killed build left is no one's: it is overlooked.
    """
    if not folder.is_dir():
        return set()
    there = {path.name for path in folder.iterdir() if not path.name.startswith(".tmp-")}
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        own = {INDEX, *(entry["file"] for entry in index["kernels"])}
    except (OSError, ValueError, KeyError, TypeError):
        own = set()
    if foreign := sorted(there - own):
        raise UsageError(
            "the folder holds other files",
            where=str(folder),
            why=f"{', '.join(foreign[:3])}: replacing it would delete them",
            todo="name another",
        )
    return there


def make_folder(folder: Path) -> None:
    """Make a folder that the user named."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(
            "no folder can be made there",
            where=str(folder.parent),
            why=error.strerror,
            todo="choose another output folder",
        ) from None


def write_index(
    folder: Path,
    arch: str,
    entries: list[dict[str, Any]],
    left_out: Sequence[dict[str, str]] = (),
) -> None:
    """Write what a launcher must know of the binaries in a folder, and what is not there, if any.

    What is left out has its op, kernel and why.
    """
    written: dict[str, Any] = {"schema": 1, "qopt": __version__, "arch": arch, "call": CALL}
    written["kernels"] = entries
    if left_out:
        written["left_out"] = list(left_out)
    (folder / INDEX).write_text(json.dumps(written, indent=1) + "\n")


def ready() -> None:
    """Raise `UnsupportedError` where kernels cannot be compiled here."""
    reason = kernel.load()
    if reason is not None:
        raise UnsupportedError("kernels cannot be built here", why=reason)
    if kernel.interpreting():
        raise UnsupportedError(
            "kernels cannot be built here",
            why="TRITON_INTERPRET is set, and Triton then has no compiler",
            todo="unset TRITON_INTERPRET",
        )


def all_forms(arch: str, only: str | None = None) -> Iterator[tuple[Kernel, Form]]:
    """Every shipped form for an architecture, each once, with a kernel that launches it."""
    seen: set[Form] = set()
    for name in sorted(kernel.KERNELS):
        if only in (None, name):
            for one in kernel.KERNELS[name]:
                for form in one.forms(arch):
                    if form not in seen:
                        seen.add(form)
                        yield one, form


def compile_form(one: Kernel, form: Form, arch: str) -> Built:
    """Compile one form for one architecture."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    jit = kernel.JITS[form.function]
    constants = dict(form.constants)
    if "WIDE" in jit.arg_names:
        constants["WIDE"] = False
    types = dict(form.types)
    signature = {name: types.get(name, "constexpr") for name in jit.arg_names}
    aligned = {n for n, t in form.types if t.startswith("*")} | set(form.aligned)
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, n in enumerate(jit.arg_names) if n in aligned
    }
    source = ASTSource(jit, signature=signature, constexprs=constants, attrs=attributes)
    nvidia = arch.startswith("sm_")
    target = GPUTarget("cuda", int(arch[3:]), 32) if nvidia else GPUTarget("hip", arch, 64)
    options = {"num_warps": form.warps, "num_stages": form.stages, "enable_fp_fusion": True}
    knobs = triton.knobs.compilation
    lines, knobs.disable_line_info = (
        knobs.disable_line_info,
        True,
    )  # else it names the source's home
    try:
        compiled = triton.compile(source, target=target, options=options)
    finally:
        knobs.disable_line_info = lines
    binary: bytes = compiled.asm["cubin" if nvidia else "hsaco"]
    metadata = compiled.metadata
    return Built(
        one.op.name,
        one.name,
        arch,
        form,
        binary,
        metadata.name,
        compiled.asm["ttir"],
        form.warps * target.warp_size,
        getattr(metadata, "global_scratch_size", 0),
        cubin_resources(binary, metadata.shared, compiled.asm["ptx"])
        if nvidia
        else hsaco_resources(binary, metadata.shared),
    )


def cubin_resources(binary: bytes, shared: int, ptx: str) -> Resources:
    """What cuobjdump finds; dynamic shared memory, which it does not know, is given.

    A stack frame counts as spilled, but for the arrays that the PTX itself declares: libdevice's
    cos and sin have one for large angles.
    """
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        told = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = {key: int(value) for key, value in re.findall(r"\b([A-Z]+):(\d+)", told)}
    arrays = sum(-(-int(size) // 16) * 16 for size in re.findall(r"__local_depot\d+\[(\d+)\]", ptx))
    spills = max(0, found["STACK"] + found["LOCAL"] - arrays)
    return Resources(found["REG"], max(shared, found["SHARED"]), spills)


def hsaco_resources(binary: bytes, shared: int) -> Resources:
    """What the note NT_AMDGPU_METADATA says of the one kernel; dynamic shared memory is given."""
    (found,) = amdgpu_metadata(binary)["amdhsa.kernels"]
    spilled = 4 * found[".vgpr_spill_count"]
    return Resources(
        found[".vgpr_count"],
        max(shared, found[".group_segment_fixed_size"]),
        max(spilled, found[".private_segment_fixed_size"]),
    )


def amdgpu_metadata(elf: bytes) -> dict[str, Any]:
    """The MessagePack map in an ELF file's AMDGPU note (LLVM, "User Guide for AMDGPU Backend")."""
    (start,) = struct.unpack_from("<Q", elf, 0x20)
    size, count = struct.unpack_from("<HH", elf, 0x36)
    for header in range(start, start + size * count, size):
        (kind,) = struct.unpack_from("<I", elf, header)
        (at,) = struct.unpack_from("<Q", elf, header + 8)
        if kind == 4:  # PT_NOTE
            names, _, note = struct.unpack_from("<III", elf, at)
            if note == 32 and elf[at + 12 : at + 18] == b"AMDGPU":
                found, _ = _unpacked(elf, at + 12 + (names + 3) // 4 * 4)
                return dict(found)
    raise ValueError("no AMDGPU metadata in this file")


def _unpacked(data: bytes, at: int) -> tuple[Any, int]:
    """One MessagePack value and where the next begins; only what LLVM writes into these notes."""
    code = data[at]
    at += 1
    if code < 0x80:
        return code, at
    if code in _FIXED:
        return _FIXED[code], at
    if code in _NUMBERS:
        layout = _NUMBERS[code]
        return struct.unpack_from(layout, data, at)[0], at + struct.calcsize(layout)
    if code in _LENGTHS:
        kind, layout = _LENGTHS[code]
        (length,) = struct.unpack_from(layout, data, at)
        at += struct.calcsize(layout)
    else:
        kind, length = next((k, code - low) for low, high, k in _SHORT if low <= code < high)
    if kind == "text":
        return data[at : at + length].decode(), at + length
    values = []
    for _ in range(length * (2 if kind == "map" else 1)):
        value, at = _unpacked(data, at)
        values.append(value)
    return (dict(zip(values[::2], values[1::2], strict=True)) if kind == "map" else values), at


_FIXED = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i"}
_LENGTHS = {
    0xD9: ("text", ">B"),
    0xDA: ("text", ">H"),
    0xDC: ("list", ">H"),
    0xDE: ("map", ">H"),
}
_SHORT = ((0x80, 0x90, "map"), (0x90, 0xA0, "list"), (0xA0, 0xC0, "text"))
