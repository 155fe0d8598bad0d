"""Lazy weights: where a tensor comes from and what was done to it, evaluated when it is needed.

A `LazyWeight` is a small expression: a source (bytes in a checkpoint, or a tensor in memory) under
a chain of named transforms. Nothing is read until `evaluate` or `rows`; nothing read is kept.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from qopt.errors import UsageError

# Evaluated at a time where a transform can work row by row. What is this small, malloc takes from
# memory that it holds already; larger pieces cost page faults, half the time of writing.
CHUNK_BYTES = 8 << 20


class Source(Protocol):
    """Bytes that become a tensor: a slice of a file, or a tensor in memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the tensor."""

    def read(self, start: int, stop: int) -> Tensor:
        """Read rows `start` to `stop` of dimension 0 (a scalar has one row) as a new tensor."""

    def digest(self) -> str:
        """Hash the bytes (hexadecimal SHA-256), the same wherever the file lies."""


@dataclass(frozen=True)
class MemorySource:
    """A tensor that is in memory already: a small buffer, or a module that was given whole."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the tensor."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the tensor."""
        return self.tensor.dtype

    def read(self, start: int, stop: int) -> Tensor:
        """Rows of the tensor itself, not copied: transforms never write in place."""
        return self.tensor if self.tensor.dim() == 0 else self.tensor[start:stop]

    def digest(self) -> str:
        """Hash shape, dtype and bytes."""
        return _hash_tensor(self.tensor)


@dataclass(frozen=True)
class FileSource:
    """A tensor stored plainly in a file, read with `pread`: it never counts as mapped memory."""

    path: Path
    offset: int  # bytes from the start of the file
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, start: int, stop: int) -> Tensor:
        """Read the rows; a file that ends early is an error that names it."""
        rows = self.shape[0] if self.shape else 1
        row_bytes = self._nbytes // rows if rows else 0
        count, offset = row_bytes * (stop - start), self.offset + row_bytes * start
        buffer = torch.empty(count, dtype=torch.uint8)  # a bytearray would be filled with zeros
        with self.path.open("rb", buffering=0) as file:
            view, done = buffer.numpy().data, 0
            while done < count:
                got = os.preadv(file.fileno(), [view[done:]], offset + done)
                if not got:
                    raise UsageError(
                        f"the file ends {count - done} bytes before the tensor does",
                        where=str(self.path),
                        why="it is truncated",
                        todo="fetch or save the file again",
                    )
                done += got
        shape = (stop - start, *self.shape[1:]) if self.shape else ()
        if not count:
            return torch.empty(shape, dtype=self.dtype)
        return buffer.view(self.dtype).reshape(shape)

    def digest(self) -> str:
        """Hash shape, dtype and bytes, a piece at a time."""
        digest = _hash_header(self.shape, self.dtype)
        with self.path.open("rb", buffering=0) as file:
            at, end = self.offset, self.offset + self._nbytes
            while at < end:
                piece = os.pread(file.fileno(), min(1 << 22, end - at), at)
                if not piece:
                    break
                digest.update(piece)
                at += len(piece)
        return str(digest.hexdigest())

    @property
    def _nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class AbsentSource:
    """Stands for a weight whose values were not asked for (`--no-weights`)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str

    def read(self, start: int, stop: int) -> Tensor:
        """Refuse: there is nothing to read."""
        raise UsageError(
            f"weight {self.name} has no values", why="the graph was captured without weights"
        )

    def digest(self) -> str:
        """Hash the name: two absent weights are never the same."""
        return hashlib.sha256(f"absent {self.name}".encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class LazyWeight:
    """A tensor that is not there yet: `source`, or transform `name` of `inputs` with `params`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Source | None = None
    name: str = "source"
    inputs: tuple[LazyWeight, ...] = ()
    params: tuple[Any, ...] = ()
    function: Callable[[list[Tensor]], Tensor] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, source: Source) -> LazyWeight:
        """Wrap a source."""
        return cls(tuple(source.shape), source.dtype, source)

    @classmethod
    def memory(cls, tensor: Tensor) -> LazyWeight:
        """Wrap a tensor that is in memory."""
        return cls.of(MemorySource(tensor.detach()))

    @classmethod
    def concat(cls, parts: Sequence[LazyWeight], dim: int = 0) -> LazyWeight:
        """Join `parts` along `dim`; they agree in dtype and in every other dimension.

        Casts move outwards, here and in `transpose`: half the bytes are joined and moved.
        """
        inner = [part.inputs[0] for part in parts if part.name == "cast"]
        if len(inner) == len(parts) and len({part.dtype for part in inner}) == 1:
            return cls.concat(inner, dim).cast(parts[0].dtype)
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        return cls(tuple(shape), parts[0].dtype, None, "concat", tuple(parts), (dim,))

    @property
    def nbytes(self) -> int:
        """Size of the evaluated tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def cast(self, dtype: torch.dtype) -> LazyWeight:
        """Convert the elements to `dtype`."""
        if dtype == self.dtype:
            return self
        return LazyWeight(self.shape, dtype, None, "cast", (self,), (dtype,))

    def transpose(self, dim0: int = 0, dim1: int = 1) -> LazyWeight:
        """Exchange two dimensions."""
        if self.name == "cast":
            return self.inputs[0].transpose(dim0, dim1).cast(self.dtype)
        if self.name == "transpose" and set(self.params) == {dim0, dim1}:
            return self.inputs[0]
        shape = list(self.shape)
        shape[dim0], shape[dim1] = shape[dim1], shape[dim0]
        return LazyWeight(tuple(shape), self.dtype, None, "transpose", (self,), (dim0, dim1))

    def reshape(self, *shape: int) -> LazyWeight:
        """View the elements under another shape."""
        return LazyWeight(shape, self.dtype, None, "reshape", (self,), tuple(shape))

    def slice(self, dim: int, start: int, stop: int) -> LazyWeight:
        """Keep `start` to `stop` of dimension `dim`."""
        shape = list(self.shape)
        shape[dim] = stop - start
        return LazyWeight(tuple(shape), self.dtype, None, "slice", (self,), (dim, start, stop))

    def scale(self, factor: LazyWeight, dim: int, offset: float = 0.0) -> LazyWeight:
        """Multiply by a vector along `dim`, plus `offset` each, in fp32 or wider; round once."""
        return LazyWeight(self.shape, self.dtype, None, "scale", (self, factor), (dim, offset))

    def add_low_rank(self, down: LazyWeight, up: LazyWeight, scale: float) -> LazyWeight:
        """Add `scale * up @ down` (LoRA, Hu et al. 2021), computed in fp32."""
        return LazyWeight(self.shape, self.dtype, None, "low_rank", (self, down, up), (scale,))

    @classmethod
    def apply(
        cls,
        name: str,
        function: Callable[[list[Tensor]], Tensor],
        inputs: Sequence[LazyWeight],
        shape: Sequence[int],
        dtype: torch.dtype,
        params: tuple[Any, ...] = (),
    ) -> LazyWeight:
        """Any function of whole tensors; `name` and `params` say all that decides its result."""
        return cls(tuple(shape), dtype, None, name, tuple(inputs), params, function)

    def evaluate(self) -> Tensor:
        """Read and compute the tensor; nothing is kept."""
        return self.rows(0, self.shape[0] if self.shape else 1)

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of dimension 0, reading no more than they need where possible."""
        if self.source is not None:
            return self.source.read(start, stop)
        if self.function is not None:
            whole = self.function([part.evaluate() for part in self.inputs])
            return whole[start:stop] if self.shape else whole
        return _ROWS[self.name](self, start, stop)

    def chunks(self, limit: int = CHUNK_BYTES) -> Iterator[Tensor]:
        """Yield the tensor in pieces along dimension 0, of at most `limit` bytes where it can."""
        if self.nbytes <= limit or not self.shape or not self._by_rows:
            yield self.evaluate()
            return
        step = max(1, limit // max(1, self.nbytes // self.shape[0]))
        for start in range(0, self.shape[0], step):
            yield self.rows(start, min(start + step, self.shape[0]))

    @cached_property
    def _by_rows(self) -> bool:
        """Whether `rows` costs only the rows asked for."""
        if self.source is not None:
            return True
        if self.name == "concat":
            return all(part._by_rows for part in self.inputs)
        if self.name == "reshape" and self.shape[:1] == (1,):
            return True  # its one row is the whole: a stack of experts is a concat of such
        return self.name in ("cast", "slice", "scale", "low_rank") and self.inputs[0]._by_rows

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the source's bytes and the chain of transforms."""
        if self.source is not None:
            return self.source.digest()
        text = f"{self.name} {self.params} {[part.digest for part in self.inputs]}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def absent(self) -> bool:
        """Whether a value below is missing (`--no-weights`)."""
        if self.source is not None:
            return isinstance(self.source, AbsentSource)
        return any(part.absent for part in self.inputs)


def _rows_concat(weight: LazyWeight, start: int, stop: int) -> Tensor:
    (dim,) = weight.params
    if dim != 0:
        return torch.cat([part.rows(start, stop) for part in weight.inputs], dim)
    pieces, at = [], 0
    for part in weight.inputs:
        low, high = max(start - at, 0), min(stop - at, part.shape[0])
        if low < high:
            pieces.append(part.rows(low, high))
        at += part.shape[0]
    return torch.cat(pieces) if len(pieces) != 1 else pieces[0]


def _rows_slice(weight: LazyWeight, start: int, stop: int) -> Tensor:
    dim, first, last = weight.params
    if dim == 0:
        return weight.inputs[0].rows(first + start, first + stop)
    return weight.inputs[0].rows(start, stop).narrow(dim, first, last - first)


def _rows_scale(weight: LazyWeight, start: int, stop: int) -> Tensor:
    dim, offset = weight.params
    base, factor = weight.inputs
    x = base.rows(start, stop)
    wide = torch.promote_types(torch.promote_types(x.dtype, factor.dtype), torch.float32)
    by = factor.evaluate().to(wide) + offset
    if dim == 0:
        by = by[start:stop]
    shape = [1] * x.dim()
    shape[dim] = -1
    scaled: Tensor = x.to(wide) * by.view(shape)
    return scaled.to(weight.dtype)


def _rows_low_rank(weight: LazyWeight, start: int, stop: int) -> Tensor:
    base, down, up = weight.inputs
    delta = up.rows(start, stop).float() @ down.evaluate().float() * weight.params[0]
    merged: Tensor = base.rows(start, stop).float() + delta
    return merged.to(weight.dtype)


def _rows_whole(function: Callable[[LazyWeight], Tensor]) -> Callable[..., Tensor]:
    return lambda weight, start, stop: function(weight)[start:stop]


def _rows_cast(weight: LazyWeight, start: int, stop: int) -> Tensor:
    return weight.inputs[0].rows(start, stop).to(weight.dtype)


_ROWS: dict[str, Callable[[LazyWeight, int, int], Tensor]] = {
    "cast": _rows_cast,
    "concat": _rows_concat,
    "slice": _rows_slice,
    "scale": _rows_scale,
    "low_rank": _rows_low_rank,
    "transpose": _rows_whole(lambda w: w.inputs[0].evaluate().transpose(*w.params).contiguous()),
    "reshape": lambda w, start, stop: (
        w.inputs[0].evaluate().reshape(w.shape)[start:stop]
        if w.shape
        else w.inputs[0].evaluate().reshape(())
    ),
}


def _hash_header(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    return hashlib.sha256(f"{tuple(shape)} {dtype} ".encode())


def _hash_tensor(tensor: Tensor) -> str:
    digest = _hash_header(tuple(tensor.shape), tensor.dtype)
    digest.update(tensor_bytes(tensor))
    return str(digest.hexdigest())


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The elements in row-major order as bytes, without a copy where the tensor is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def fingerprint(weight: LazyWeight) -> str:
    """A cheap hash: weights made alike of equal bytes agree in it, others hardly ever do."""
    if weight.absent:
        return weight.digest
    if not weight._by_rows:
        return f"{weight.name} {weight.params} {[fingerprint(part) for part in weight.inputs]}"
    rows = weight.shape[0] if weight.shape else 1
    digest = hashlib.sha256()
    for row in sorted({0, rows // 2, max(rows - 1, 0)}) if rows else ():
        digest.update(tensor_bytes(weight.rows(row, row + 1)))
    return digest.hexdigest()


def equal_weights(weights: dict[str, LazyWeight]) -> dict[str, str]:
    """Names whose weight equals an earlier one, decided by content: name -> the earlier name."""
    seen: dict[Any, list[str]] = {}
    same: dict[str, str] = {}
    for name, weight in weights.items():
        key = weight.shape, weight.dtype, fingerprint(weight)
        for other in seen.get(key, []):
            if weight is weights[other] or weight.digest == weights[other].digest:
                same[name] = other
                break
        else:
            seen.setdefault(key, []).append(name)
    return same


class WeightCache:
    """Evaluated weights, at most `limit` bytes of them, the least recently used going first."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self.kept: dict[int, tuple[LazyWeight, Tensor]] = {}

    def get(self, weight: LazyWeight) -> Tensor:
        """The tensor, evaluated now unless it is kept."""
        found = self.kept.pop(id(weight), None)
        if found is None:
            found = weight, weight.evaluate()
            self.used += weight.nbytes
        self.kept[id(weight)] = found
        while self.used > self.limit and self.kept:
            oldest, _ = self.kept.pop(next(iter(self.kept)))
            self.used -= oldest.nbytes
        return found[1]
