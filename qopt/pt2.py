"""`.pt2` files (torch.export.save) read without unpickling and without evaluating text.

`torch.export.load` unpickles sample inputs, evaluates shape expressions with `eval`, and keeps
guards as source text. Here the sample inputs are never opened, expressions and operators are held
against a list, the guards are dropped, and the weights are read at use from the zip's members.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.utils._sympy.functions
from torch import Tensor
from torch._export.serde import schema
from torch._export.serde.serialize import (
    ExportedProgramDeserializer,
    SerializeError,
    _dict_to_dataclass,
    deserialize_scalar_type,
)
from torch.export import ExportedProgram

from qopt.checkpoint import strided
from qopt.errors import UnsupportedError, UsageError
from qopt.weights import LazyWeight

TARGETS = re.compile(
    r"torch\.ops\.\w+(\.\w+)*|math\.\w+|torch\.(_sym_sqrt|sym_\w+)"
    r"|_operator\.(add|sub|mul|truediv|floordiv|mod|pow|neg|pos|abs|and_|or_|xor|not_|inv|invert"
    r"|lshift|rshift|eq|ne|lt|le|gt|ge|getitem|index|truth)"
)
SYMBOL = re.compile(r"[A-Za-z_]\w*")
REEXPORT = "export a model that is plain torch operators, with sizes that are plain arithmetic"


def read_pt2(path: Path) -> tuple[ExportedProgram, dict[str, LazyWeight], dict[str, Any]]:
    """Read a program whose state holds no values, its weights and constants, and its identity."""
    archive = _Archive(path)
    text = archive.read("models/model.json")
    graph = json.loads(text)
    _refuse_text(graph, path)
    tensors, state = _payloads(archive, "weights")
    constants, constant_state = _payloads(archive, "constants")
    try:
        parse: Any = _dict_to_dataclass
        serialized = parse(schema.ExportedProgram, graph)
        serialized.guards_code = []
        program = ExportedProgramDeserializer().deserialize(serialized, state, constant_state)
    except (SerializeError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(
            "torch cannot read this program",
            where=str(path),
            why=str(error),
            todo="export it again with the installed torch",
        ) from error
    return program, tensors | constants, {"graph": hashlib.sha256(text).hexdigest()}


class _Archive:
    """A zip whose members lie under one folder, tensors among them stored uncompressed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as file:
                members = file.infolist()
        except zipfile.BadZipFile as error:
            raise self.damaged(str(error)) from None
        # The root folder is named after the file that was first saved.
        self.members = {
            str(PurePosixPath(*PurePosixPath(member.filename).parts[1:])): member
            for member in members
        }
        if "archive_format" not in self.members:
            raise self.damaged("it is no archive of torch.export.save, or truncated")
        if "models/model.json" not in self.members:
            raise UnsupportedError(
                "this .pt2 file has no models/model.json",
                where=str(path),
                why="it was written by an old torch, or holds no exported program",
                todo="save it again with torch.export.save of a supported torch",
            )

    def damaged(self, why: str) -> UsageError:
        return UsageError("damaged .pt2 file", where=str(self.path), why=why, todo="save it again")

    def read(self, name: str) -> bytes:
        member = self.members.get(name)
        if member is None:
            raise self.damaged(f"{name} is missing")
        try:
            with zipfile.ZipFile(self.path) as file:
                return file.read(member)
        except (zipfile.BadZipFile, zipfile.zlib.error) as error:  # type: ignore[attr-defined]
            raise self.damaged(str(error)) from None

    def offset(self, name: str) -> tuple[int, int]:
        """Where the bytes of a stored member begin, and how many there are."""
        member = self.members.get(name)
        if member is None or member.compress_type != zipfile.ZIP_STORED:
            raise self.damaged(f"{name} is missing or compressed")
        with self.path.open("rb") as file:
            file.seek(member.header_offset + 26)  # in the member's local header
            name_length = int.from_bytes(file.read(2), "little")
            extra_length = int.from_bytes(file.read(2), "little")
        return member.header_offset + 30 + name_length + extra_length, member.file_size


def _payloads(archive: _Archive, kind: str) -> tuple[dict[str, LazyWeight], dict[str, Tensor]]:
    """Weights or constants as lazy weights, and stand-ins without values for torch's reader."""
    if f"data/{kind}/model.pt" in archive.members:
        raise _pickled(archive.path, f"data/{kind}/model.pt")
    config = json.loads(archive.read(f"data/{kind}/model_{kind}_config.json"))["config"]
    lazy: dict[str, LazyWeight] = {}
    state: dict[str, Tensor] = {}
    shared: dict[str, LazyWeight] = {}
    for name, entry in config.items():
        if entry["use_pickle"] or entry["tensor_meta"] is None:
            raise _pickled(archive.path, name)
        key = json.dumps([entry["path_name"], entry["tensor_meta"]])
        if key not in shared:
            member = f"data/{kind}/{entry['path_name']}"
            shared[key] = _weight(archive, member, entry["tensor_meta"])
        lazy[name] = shared[key]
        empty = torch.empty(lazy[name].shape, dtype=lazy[name].dtype, device="meta")
        trains = bool(entry["tensor_meta"]["requires_grad"])
        state[name] = torch.nn.Parameter(empty, trains) if entry["is_param"] else empty
    return lazy, state


def _weight(archive: _Archive, member: str, meta: dict[str, Any]) -> LazyWeight:
    dtype = deserialize_scalar_type(schema.ScalarType(meta["dtype"]))
    shape = tuple(int(size["as_int"]) for size in meta["sizes"])
    strides = tuple(int(stride["as_int"]) for stride in meta["strides"])
    start = int(meta["storage_offset"]["as_int"])
    offset, nbytes = archive.offset(member)
    return strided(archive.path, offset, nbytes, shape, strides, start, dtype)


def _pickled(path: Path, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} is stored as a pickle",
        where=str(path),
        why="unpickling can run any code, so qopt does not",
        todo="export a model whose weights and constants are plain tensors",
    )


def _refuse_text(graph: Any, path: Path) -> None:
    """Refuse what the deserializer would evaluate or look up outside the known operators."""
    for key, value in _strings(graph):
        if key == "expr_str" and not _is_expression(value):
            raise UnsupportedError(
                f"a shape expression is not known: {value}", where=str(path), todo=REEXPORT
            )
        if key == "target" and not TARGETS.fullmatch(value):
            raise UnsupportedError(f"the program calls {value}", where=str(path), todo=REEXPORT)


def _strings(tree: Any) -> Iterator[tuple[str, str]]:
    """Every expression in the file, and the target of every node."""
    if isinstance(tree, list):
        for item in tree:
            yield from _strings(item)
    if not isinstance(tree, dict):
        return
    for key, item in tree.items():
        if key == "expr_str" or (key == "target" and "inputs" in tree):
            yield key, str(item)
        yield from _strings(item)


def _is_expression(text: str) -> bool:
    """Whether `text` is what sympy's `srepr` writes: classes of sympy, numbers, symbols' names."""
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        return False
    return all(_is_harmless(node) for node in ast.walk(tree))


def _is_harmless(node: ast.AST) -> bool:
    match node:
        case ast.Name(id=name):
            known = getattr(sympy, name, None) or getattr(torch.utils._sympy.functions, name, None)
            return SYMBOL.fullmatch(name) is not None and (
                known is None or (isinstance(known, type) and issubclass(known, sympy.Basic))
            )
        case ast.Constant(value=str() as value):
            return SYMBOL.fullmatch(value) is not None
        case ast.Call(func=ast.Name(id=name)):
            return hasattr(sympy, name) or hasattr(torch.utils._sympy.functions, name)
    allowed = (
        ast.Expression,
        ast.Constant,
        ast.keyword,
        ast.Load,
        ast.BinOp,
        ast.UnaryOp,
        ast.Compare,
        ast.operator,
        ast.unaryop,
        ast.cmpop,
    )
    return isinstance(node, allowed)
