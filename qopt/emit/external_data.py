"""The external data file: weights streamed one after the other, equal contents once."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from qopt.emit.builder import DTYPES
from qopt.errors import UsageError
from qopt.weights import LazyWeight, equal_weights, tensor_bytes

DATA = "model.onnx.data"
INLINE_BYTES = 1024  # a weight up to this size is kept in the graph file
ALIGN = 64  # of a weight in the data file; larger ones start at a page
PAGE = 4096
NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)  # how a file system refuses direct writes
BLOCK = 8 << 20  # bytes of one direct write

Weights = Iterable[tuple[ir.Value, LazyWeight]]


@dataclass
class Stored:
    """What was written: bytes, their hash, and bytes saved where an equal weight was there."""

    size: int = 0
    sha256: str = ""
    shared: int = 0


@dataclass
class Piece:
    """A part of a weight's bytes; `first` and `last` say where in the weight it is."""

    made: ir.Value
    weight: LazyWeight
    data: Tensor | None  # None: the weight equals `twin`, which is written already
    first: bool = True
    last: bool = True
    twin: ir.Value | None = None


def place(weights: Weights) -> None:
    """Point every weight at a data file that is not written."""
    at = 0
    for made, weight in weights:
        at = aligned(at, weight.nbytes)
        made.const_value = external(made, weight, at)
        at += weight.nbytes


def write_weights(
    path: Path,
    weights: Weights,
    progress: Callable[[int, int], None] | None = None,
    *,
    direct: bool = False,
) -> Stored:
    """Stream all weights into `path`; small ones stay in the graph file.

    One thread evaluates the next piece and one hashes while a piece is written; no more than three
    are in memory. `direct`: past the page cache, where the file system can.
    """
    stored = Stored()
    large = []
    for made, weight in weights:
        if weight.nbytes <= INLINE_BYTES:
            made.const_value = inline(made, weight)
        else:
            large.append((made, weight))
    if not large:
        return stored
    total, done = sum(weight.nbytes for _, weight in large), 0
    starts: dict[ir.Value, int] = {}
    with ThreadPoolExecutor(2) as workers, Appender(path, direct) as file:
        digest = hashlib.sha256()

        def append(data: bytes | memoryview) -> None:
            hashing = workers.submit(digest.update, data)  # lets go of the interpreter's lock
            file.append(data)
            hashing.result()

        for piece in ahead(workers, pieces(large)):
            made, weight = piece.made, piece.weight
            if piece.data is None:
                assert piece.twin is not None
                made.const_value = external(made, weight, starts[piece.twin])
                stored.shared += weight.nbytes
            else:
                if weight.dtype == torch.float16:
                    refuse_overflow(str(made.name), piece.data)
                if piece.first:
                    starts[made] = aligned(file.size, weight.nbytes)
                    made.const_value = external(made, weight, starts[made])
                    append(b"\0" * (starts[made] - file.size))
                append(tensor_bytes(piece.data))
            done += weight.nbytes if piece.last else 0
            if progress is not None:
                progress(done, total)
    stored.size, stored.sha256 = file.size, digest.hexdigest()
    return stored


class Appender:
    """A new file that is appended to, and on the disk when the block is left.

    `direct` goes past the page cache: filling that with gigabytes which nothing reads soon takes
    longer than computing them.
    """

    def __init__(self, path: Path, direct: bool) -> None:
        self.size = 0
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY
        self.flag = getattr(os, "O_DIRECT", 0) if direct else 0
        try:
            self.file = os.open(path, flags | self.flag, 0o666)
        except OSError as error:
            if not self.flag or error.errno not in NOT_DIRECT:
                raise
            self.flag, self.file = 0, os.open(path, flags, 0o666)
        # Direct writes take whole pages from memory that starts at a page, as that of mmap does.
        self.buffer, self.filled = mmap.mmap(-1, BLOCK if self.flag else PAGE), 0

    def __enter__(self) -> Appender:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None:
                if self.flag:
                    self._leave_direct()  # what is left is no whole page
                    self._flush()
                os.fsync(self.file)
        finally:
            os.close(self.file)

    def append(self, data: bytes | memoryview) -> None:
        """Append the bytes."""
        rest = memoryview(data)
        self.size += len(rest)
        while self.flag and rest:
            taken = min(len(rest), BLOCK - self.filled)
            self.buffer[self.filled : self.filled + taken] = rest[:taken]
            self.filled, rest = self.filled + taken, rest[taken:]
            if self.filled == BLOCK:
                self._flush()
        self._write(rest)

    def _flush(self) -> None:
        with memoryview(self.buffer) as view:
            self._write(view[: self.filled])
        self.filled = 0

    def _write(self, data: memoryview) -> None:
        while data:
            try:
                data = data[os.write(self.file, data) :]
            except OSError as error:
                if not self.flag or error.errno not in NOT_DIRECT:
                    raise
                self._leave_direct()

    def _leave_direct(self) -> None:
        """Go on through the page cache."""
        flags = fcntl.fcntl(self.file, fcntl.F_GETFL)
        fcntl.fcntl(self.file, fcntl.F_SETFL, flags & ~self.flag)
        self.flag = 0


def external(made: ir.Value, weight: LazyWeight, offset: int) -> ir.ExternalTensor:
    """A reference into the data file."""
    return ir.ExternalTensor(
        DATA,
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


def pieces(weights: list[tuple[ir.Value, LazyWeight]]) -> Iterator[Piece]:
    """Every weight in pieces, in order; one that equals an earlier one has no data."""
    made_by = {str(made.name): made for made, _ in weights}
    same = equal_weights({str(made.name): weight for made, weight in weights})
    for made, weight in weights:
        if str(made.name) in same:
            yield Piece(made, weight, None, twin=made_by[same[str(made.name)]])
            continue
        rows = 0
        for chunk in weight.chunks():
            rows += chunk.shape[0] if weight.shape else 1
            first = rows == (chunk.shape[0] if weight.shape else 1)
            yield Piece(
                made, weight, chunk, first, rows >= (weight.shape[0] if weight.shape else 1)
            )


def refuse_overflow(name: str, piece: Tensor) -> None:
    """A weight beyond fp16's range must not become infinite in silence."""
    if not bool(torch.isfinite(piece).all()):
        raise UsageError(f"weight {name} does not fit fp16", todo="compile with --dtype fp32")


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
