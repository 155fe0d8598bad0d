"""GGUF files: tensors dequantized row by row at use, config and tokenizer through transformers."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import transformers
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    load_gguf_checkpoint,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from qopt import compat
from qopt.cache import cache_dir, whole_folder
from qopt.errors import UnsupportedError, UsageError
from qopt.weights import FileSource, LazyWeight

# transformers leaves these without types.
MODELS: Any = AutoModelForCausalLM
TOKENIZERS: Any = AutoTokenizer
LOAD_GGUF: Any = load_gguf_checkpoint
PROCESSORS: Any = TENSOR_PROCESSORS

TABLE = "gguf_table.json"  # in the materialised folder: what transformers' tables gave


@dataclass(frozen=True)
class GGUFSource:
    """A tensor in a GGUF file; it is fp32 once read, whatever its blocks are."""

    raw: FileSource  # uint8 [rows, bytes of a row]
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    dtype: torch.dtype = torch.float32

    def read(self, start: int, stop: int) -> Tensor:
        """Read and dequantize the rows; blocks never cross a row."""
        rows = self.shape[1:-1]
        data = self.raw.read(start, stop).numpy().reshape(stop - start, *rows, -1)
        values = np.array(dequantize(data, self.kind), dtype=np.float32)
        return torch.from_numpy(values).reshape(stop - start, *self.shape[1:])

    def digest(self) -> str:
        """Hash the stored bytes, their type and the shape."""
        text = f"{self.kind.name} {self.shape} {self.raw.digest()}"
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class GGUFFile:
    """The header of a GGUF file."""

    path: Path
    architecture: str
    data_offset: int  # where the header ends and the tensors begin
    tensors: dict[str, LazyWeight]  # by the file's own names

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the header: settings, vocabulary, and where which tensor lies."""
        with self.path.open("rb", buffering=0) as raw:
            return hashlib.sha256(os.pread(raw.fileno(), self.data_offset, 0)).hexdigest()


def open_gguf(path: Path) -> GGUFFile:
    """Parse the header of a GGUF file; damage is an error that names the file.

    The gguf package's own reader makes an array of every token and every merge: 2 s against 0.1 s.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            reader = _HeaderReader(file, size)
            header = reader.header()
    except (struct.error, KeyError, ValueError, OverflowError, RecursionError) as error:
        raise _damaged(path, f"its header is not understood: {error}") from None
    tensors: dict[str, LazyWeight] = {}
    for name, shape, kind, offset in header.tensors:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        rows, elements = shape[0], torch.Size(shape).numel()
        nbytes = elements // block * block_bytes
        begin = header.data_offset + offset
        if shape[-1] % block or begin + nbytes > size:
            raise _damaged(path, f"{name} ends at byte {begin + nbytes}, the file at {size}")
        raw = FileSource(path, begin, (rows, nbytes // max(rows, 1)), torch.uint8)
        tensors[name] = LazyWeight.of(GGUFSource(raw, shape, kind))
    return GGUFFile(path, header.architecture, header.data_offset, tensors)


@dataclass
class _Header:
    architecture: str
    data_offset: int
    tensors: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]]


class _HeaderReader:
    """Reads a header's fields in their order, keeping only what `_Header` holds."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size = file, size

    def header(self) -> _Header:
        if self.file.read(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, tensors, fields = self.number("I"), self.number("Q"), self.number("Q")
        if version not in (2, 3):
            raise ValueError(f"version {version}")
        known: dict[str, Any] = {"general.architecture": "", "general.alignment": 32}
        for _ in range(fields):
            key = self.text()
            value = self.value(self.number("I"), keep=key in known)
            if key in known:
                known[key] = value
        entries = [self.tensor() for _ in range(tensors)]
        alignment = int(known["general.alignment"])
        offset = -(-self.file.tell() // alignment) * alignment
        return _Header(str(known["general.architecture"]), offset, entries)

    def number(self, code: str) -> Any:
        (value,) = struct.unpack(f"<{code}", self.file.read(struct.calcsize(code)))
        return value

    def text(self, keep: bool = True) -> str:
        length = self.number("Q")
        if length > self.size:
            raise ValueError(f"a text of {length} bytes")
        if not keep:
            self.file.seek(length, os.SEEK_CUR)
            return ""
        return self.file.read(length).decode("utf-8")

    def value(self, kind: int, keep: bool) -> Any:
        match GGUFValueType(kind):
            case GGUFValueType.STRING:
                return self.text(keep)
            case GGUFValueType.ARRAY:
                inner, count = self.number("I"), self.number("Q")
                if inner in NUMBERS:
                    self.file.seek(count * struct.calcsize(NUMBERS[inner]), os.SEEK_CUR)
                else:
                    for _ in range(count):
                        self.value(inner, keep=False)
                return None
        return self.number(NUMBERS[kind])

    def tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name, rank = self.text(), self.number("I")
        if rank > 8:
            raise ValueError(f"{name} has {rank} dimensions")
        shape = tuple(self.number("Q") for _ in range(rank))[::-1]  # stored innermost first
        return name, shape or (1,), GGMLQuantizationType(self.number("I")), self.number("Q")


NUMBERS = {
    int(kind): code
    for kind, code in {
        GGUFValueType.UINT8: "B",
        GGUFValueType.INT8: "b",
        GGUFValueType.UINT16: "H",
        GGUFValueType.INT16: "h",
        GGUFValueType.UINT32: "I",
        GGUFValueType.INT32: "i",
        GGUFValueType.FLOAT32: "f",
        GGUFValueType.BOOL: "?",
        GGUFValueType.UINT64: "Q",
        GGUFValueType.INT64: "q",
        GGUFValueType.FLOAT64: "d",
    }.items()
}


def _damaged(path: Path, why: str) -> UsageError:
    return UsageError(
        "damaged GGUF file", where=str(path), why=why, todo="fetch or save the file again"
    )


# Through transformers' tables ----------------------------------------------------------------


def materialise(file: GGUFFile) -> Path:
    """Write config and tokenizer of a GGUF file into the cache, once; return their folder."""
    versions = f"{file.digest} {transformers.__version__} {version('gguf')}".encode()
    folder = cache_dir("models") / f"gguf-{hashlib.sha256(versions).hexdigest()[:16]}"
    if not (folder / "config.json").exists():
        with whole_folder(folder) as out:
            _write_config(file, out)
            _write_tokenizer(file.path, out)
    return folder


def _write_config(file: GGUFFile, out: Path) -> None:
    where = str(file.path)
    try:
        metadata = LOAD_GGUF(where, return_tensors=False)["config"]
        config = CONFIG_MAPPING[metadata["model_type"]].from_dict(metadata)
        with torch.device("meta"):
            model = MODELS.from_config(config)
        processor = PROCESSORS.get(file.architecture, TensorProcessor)(config=metadata)
        names = compat.gguf_names(model, processor)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise UnsupportedError(
            "transformers cannot read this GGUF file",
            where=where,
            why=str(error),
            todo="give the checkpoint as a transformers folder, or upgrade transformers",
        ) from None
    config.architectures = [type(model).__name__]
    config.dtype = torch.float32
    config._name_or_path = ""
    config.save_pretrained(out)
    GenerationConfig.from_model_config(config).save_pretrained(out)
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    table = {"config": metadata, "names": names, "shapes": shapes}
    (out / TABLE).write_text(json.dumps(table))


def _write_tokenizer(path: Path, out: Path) -> None:
    tokenizer = TOKENIZERS.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    tokenizer.save_pretrained(out)
    # What transformers 5 writes here no other reader knows; this form all of them do.
    file = out / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    for private in ("backend", "is_local", "local_files_only"):
        settings.pop(private, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["model_max_length"] = json.loads((out / "config.json").read_text()).get(
        "max_position_embeddings", settings["model_max_length"]
    )
    file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def read_gguf(file: GGUFFile, folder: Path) -> dict[str, LazyWeight]:
    """Give the file's tensors transformers' names; its own tables say how each must be changed."""
    table = json.loads((folder / TABLE).read_text())
    processor = PROCESSORS.get(file.architecture, TensorProcessor)(config=table["config"])
    names = table["names"]
    groups: dict[str, list[str]] = {}
    for name in file.tensors:
        target = names.get(name) or names.get(name.removesuffix(".weight"))
        if target is not None:
            groups.setdefault(target, []).append(name)
    return {
        target: _processed(file, processor, names, parts, table["shapes"].get(target))
        for target, parts in groups.items()
    }


def _processed(
    file: GGUFFile,
    processor: Any,
    names: dict[str, str],
    parts: Sequence[str],
    shape: Sequence[int] | None,
) -> LazyWeight:
    """Apply what transformers does to these tensors on loading (rotary permutation, norm - 1)."""
    inputs = [file.tensors[name] for name in parts]
    if len(parts) == 1 and _leaves(processor, parts[0], names):
        return inputs[0]

    def process(values: list[Tensor]) -> Tensor:
        collected: dict[str, Any] = {"tensors": {}}
        result: Any = None
        for name, value in zip(parts, values, strict=True):
            result = processor.process(
                weights=value.numpy(),
                name=name,
                tensor_key_mapping=names,
                parsed_parameters=collected,
            )
        if result.name is None:  # several tensors make one: the processor has put it there
            merged: Tensor = next(iter(collected["tensors"].values()))
            return merged
        return torch.from_numpy(np.copy(result.weights))

    kinds = tuple(re.sub(r"\d+", "", name) for name in parts)
    sizes = sorted((key, n) for key, n in processor.config.items() if isinstance(n, int))
    return LazyWeight.apply(
        "gguf",
        process,
        inputs,
        shape or inputs[0].shape,
        torch.float32,
        (type(processor).__name__, kinds, tuple(sizes)),
    )


class _Untouched:
    """Stands for a tensor of which nothing may be asked."""


def _leaves(processor: Any, name: str, names: dict[str, str]) -> bool:
    """Whether the processor hands this tensor through, found out without reading it."""
    probe = _Untouched()
    try:
        result = processor.process(
            probe, name, tensor_key_mapping=names, parsed_parameters={"tensors": {}}
        )
    except Exception:
        return False  # it wanted to compute with the tensor
    return result.weights is probe and result.name == name
