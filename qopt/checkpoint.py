"""Readers of checkpoint files: each gives lazy weights by name, and loads no tensor to do so."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qopt.errors import UnsupportedError, UsageError
from qopt.weights import FileSource, LazyWeight

HEADER_LIMIT = 100_000_000  # bytes; the format's own limit on a safetensors header
REFETCH = "fetch or save the checkpoint again"

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_json(path: Path) -> Any:
    """Read a JSON file of the model; damage is an error that names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(
            "not valid JSON", where=str(path), why=str(error), todo="mend or fetch the file again"
        ) from None


def read_folder(folder: Path) -> dict[str, LazyWeight]:
    """Read the weights of a transformers folder: safetensors first, else `.bin`."""
    for stem, read in (
        ("model.safetensors", read_safetensors),
        ("pytorch_model.bin", read_torch_bin),
    ):
        index = folder / f"{stem}.index.json"
        if (folder / stem).exists():
            return read(folder / stem)
        if index.exists():
            return _read_shards(index, read)
    raise UsageError(
        "the folder holds no weights",
        where=str(folder),
        why="it has neither model.safetensors nor pytorch_model.bin, whole or with an index",
        todo="give a folder that save_pretrained wrote, or a .gguf file",
    )


def has_weights(folder: Path) -> bool:
    """Say whether all weight files that the folder names are there."""
    for stem in ("model.safetensors", "pytorch_model.bin"):
        if (folder / stem).exists():
            return True
        index = folder / f"{stem}.index.json"
        if index.exists():
            return all((folder / shard).exists() for shard in _shards(index).values())
    return False


def _shards(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UsageError("the index has no weight_map", where=str(index), todo=REFETCH)
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise UsageError(
                f"the index names a shard outside its folder: {shard}",
                where=str(index),
                todo=REFETCH,
            )
    return weight_map


def _read_shards(index: Path, read: Any) -> dict[str, LazyWeight]:
    weight_map = _shards(index)
    tensors: dict[str, LazyWeight] = {}
    for shard in sorted(set(weight_map.values())):
        path = index.parent / shard
        if not path.exists():
            raise UsageError(
                "a shard of the checkpoint is missing",
                where=str(path),
                why=f"{index.name} names it",
                todo=REFETCH,
            )
        tensors.update(read(path))
    absent = sorted(set(weight_map) - set(tensors))
    if absent:
        raise UsageError(
            f"{len(absent)} tensors of the index are in no shard",
            where=str(index),
            why=f"for example {', '.join(absent[:3])}",
            todo=REFETCH,
        )
    return tensors


def read_safetensors(path: Path) -> dict[str, LazyWeight]:
    """Parse the header of a safetensors file and check every offset against the file's size."""
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        length = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
        if size < 8 or not 2 <= length <= min(size - 8, HEADER_LIMIT):
            raise _damaged(path, f"its header says {length} bytes, the file has {size}")
        text = os.pread(file.fileno(), length, 8)
    try:
        header = json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _damaged(path, f"its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no JSON object")
    start = 8 + length
    aliases = header.pop("__metadata__", None) or {}
    tensors = {name: _entry(path, name, entry, start, size) for name, entry in header.items()}
    # A writer that stores a shared tensor once may record its other names: alias -> stored name.
    for alias, stored in aliases.items():
        if stored in tensors and alias not in tensors:
            tensors[alias] = tensors[stored]
    return tensors


def _entry(path: Path, name: str, entry: Any, start: int, size: int) -> LazyWeight:
    try:
        first, last = (int(offset) for offset in entry["data_offsets"])
        shape = tuple(int(n) for n in entry["shape"])
        code = str(entry["dtype"])
    except (KeyError, TypeError, ValueError):
        raise _damaged(path, f"the header's entry for {name} is not understood") from None
    dtype = SAFETENSORS_DTYPES.get(code)
    if dtype is None:
        raise UnsupportedError(
            f"tensor {name} has element type {code}",
            where=str(path),
            why=f"qopt reads {', '.join(SAFETENSORS_DTYPES)}",
            todo="save the checkpoint in one of these",
        )
    wanted = torch.Size(shape).numel() * dtype.itemsize
    if min(shape, default=0) < 0 or first < 0 or last - first != wanted:
        raise _damaged(path, f"{name} takes {last - first} bytes, its shape {wanted}")
    if start + last > size:
        raise _damaged(path, f"{name} ends at byte {start + last}, the file at {size}")
    return LazyWeight.of(FileSource(path, start + first, shape, dtype))


def _damaged(path: Path, why: str) -> UsageError:
    return UsageError("damaged safetensors file", where=str(path), why=why, todo=REFETCH)


def read_torch_bin(path: Path) -> dict[str, LazyWeight]:
    """Read a `.bin` through torch's weights-only unpickler; a file that wants more is refused.

    On the meta device that gives shapes and offsets, and the tensors are then read at use.
    """
    zipped = zipfile.is_zipfile(path)
    try:
        state = torch.load(path, map_location="meta" if zipped else "cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsupportedError(
            "the checkpoint is a pickle that asks for more than tensors",
            where=str(path),
            why=str(error).splitlines()[0] + " (nothing in it was executed)",
            todo="save it as safetensors",
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise UsageError(
            "damaged checkpoint file", where=str(path), why=str(error), todo=REFETCH
        ) from None
    if not isinstance(state, Mapping):
        raise UsageError(
            "the checkpoint is no mapping of names to tensors",
            where=str(path),
            todo="save it with save_pretrained, as safetensors",
        )
    tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    if zipped:
        return {name: _in_archive(path, tensor) for name, tensor in tensors.items()}
    return {name: LazyWeight.memory(tensor) for name, tensor in tensors.items()}


def _in_archive(path: Path, tensor: Tensor) -> LazyWeight:
    storage: Any = tensor.untyped_storage()
    return strided(
        path,
        int(storage._checkpoint_offset),  # left there by torch.load for tensors without values
        storage.nbytes(),
        tensor.shape,
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
    )


def strided(
    path: Path,
    offset: int,
    nbytes: int,
    shape: Sequence[int],
    strides: Sequence[int],
    start: int,
    dtype: torch.dtype,
) -> LazyWeight:
    """Give the view of a storage that lies at `offset` of a file; rows are read where they can."""
    shape, strides = tuple(shape), tuple(strides)
    count = torch.Size(shape).numel()
    reach = start + 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if count and reach * dtype.itemsize > nbytes:
        raise UsageError(
            f"a tensor of shape {list(shape)} goes beyond its {nbytes} bytes",
            where=str(path),
            why="the file is damaged",
            todo=REFETCH,
        )
    if not count or torch.empty(shape, device="meta").stride() == strides:
        return LazyWeight.of(FileSource(path, offset + start * dtype.itemsize, shape, dtype))
    flat = FileSource(path, offset, (nbytes // dtype.itemsize,), dtype)

    def view(values: list[Tensor]) -> Tensor:
        return values[0].as_strided(shape, strides, start)

    return LazyWeight.apply(
        "as_strided", view, [LazyWeight.of(flat)], shape, dtype, (shape, strides, start)
    )
