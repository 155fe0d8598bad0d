"""What MODEL may be, and what it gives: config, lazy weights, and where its other files lie."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.export import ExportedProgram
from transformers import AutoConfig, GenerationConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qopt.binding import bind_weights
from qopt.checkpoint import read_folder, read_json
from qopt.errors import UnsupportedError, UsageError
from qopt.weights import LazyWeight

__all__ = ["ModelSource", "bind_weights", "open_source"]


@dataclass
class ModelSource:
    """A model that nothing has been loaded of: its config and its weights, lazily."""

    kind: Literal["decoder", "module", "program"]
    identity: str = ""  # hub id or demo name; empty for a local path, which no artifact stores
    where: str = ""  # for messages: the path or name as the user gave it
    config: PretrainedConfig | None = None  # of a decoder: the text config
    raw_config: dict[str, Any] = field(default_factory=dict)  # as the checkpoint spells it
    generation_config: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None  # where tokenizer and config files lie
    tensors: dict[str, LazyWeight] = field(default_factory=dict)  # by the checkpoint's names
    with_weights: bool = True
    module: nn.Module | None = None
    args: tuple[Any, ...] = ()
    dynamic_shapes: Any = None
    program: ExportedProgram | None = None
    adapter: Any = None
    notes: list[str] = field(default_factory=list)  # what the user should be told

    @property
    def dtype(self) -> torch.dtype:
        """The floating type that most elements of the checkpoint have."""
        sizes: Counter[torch.dtype] = Counter()
        for weight in self.tensors.values():
            if weight.dtype.is_floating_point:
                sizes[weight.dtype] += weight.nbytes // weight.dtype.itemsize
        if sizes:
            return sizes.most_common(1)[0][0]
        declared = getattr(self.config, "dtype", None)
        return declared if isinstance(declared, torch.dtype) else torch.float32

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the config and every tensor, the same wherever the files lie."""
        digest = hashlib.sha256(json.dumps(self.raw_config, sort_keys=True).encode())
        for name in sorted(self.tensors):
            digest.update(f"{name} {self.tensors[name].digest}\n".encode())
        if self.adapter:
            digest.update(self.adapter.digest.encode())
        return digest.hexdigest()


def open_source(
    model: str,
    *,
    revision: str | None = None,
    adapter: Path | None = None,
    weights: bool = True,
) -> ModelSource:
    """Open MODEL: an existing path first, then a demo name, then a hub id.

    `weights=False` reads the config alone: every weight is then absent.
    """
    path = Path(model)
    if path.is_dir():
        return open_folder(path, weights=weights)
    raise UsageError(
        f"no such model: {model}",
        todo="give a folder, a .gguf file, a .pt2 file, file.py:function, or a hub id",
    )


def open_folder(folder: Path, *, identity: str = "", weights: bool = True) -> ModelSource:
    """Open a folder that `save_pretrained` wrote."""
    if not (folder / "config.json").exists():
        raise UsageError(
            "the folder holds no model",
            where=str(folder),
            why="it has no config.json",
            todo="give a folder that save_pretrained wrote",
        )
    raw = read_json(folder / "config.json")
    _refuse_config(raw, folder)
    config, notes = text_config(raw, folder)
    source = ModelSource(
        "decoder",
        identity,
        str(folder),
        config,
        raw,
        _generation_config(folder, config),
        folder,
        with_weights=weights,
        notes=notes,
    )
    if weights:
        source.tensors = read_folder(folder)
    return source


def _refuse_config(raw: dict[str, Any], folder: Path) -> None:
    where, kind = str(folder / "config.json"), raw.get("model_type")
    parts = [raw, *(part for part in raw.values() if isinstance(part, dict))]
    quantized = next(
        (part["quantization_config"] for part in parts if part.get("quantization_config")), None
    )
    if quantized:
        method = quantized.get("quant_method", "unknown")
        raise UnsupportedError(
            f"the checkpoint is quantized already (method {method})",
            where=where,
            why="reading quantized checkpoints is later work",
            todo="give the unquantized checkpoint",
        )
    if kind in CONFIG_MAPPING:
        return
    if "auto_map" in raw:
        raise UnsupportedError(
            f"model type {kind!r} needs remote code",
            where=where,
            why="its classes lie in Python files beside the weights, and qopt never runs those",
            todo="use a transformers release that has this type built in",
        )
    raise UnsupportedError(
        f"the installed transformers does not know model type {kind!r}", where=where
    )


def text_config(raw: dict[str, Any], folder: Path) -> tuple[PretrainedConfig, list[str]]:
    """Read config.json through transformers' own class; of a multimodal one take the text part."""
    try:
        whole = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            "transformers refuses the config", where=str(folder / "config.json"), why=str(error)
        ) from None
    config, notes = whole.get_text_config(decoder=True), []
    if config is not whole:
        notes.append(
            f"{whole.model_type} is multimodal: only its text part ({config.model_type}) "
            "is compiled"
        )
        inner = raw.get("text_config") or {}
        if "tie_word_embeddings" not in inner:  # the head belongs to the whole model
            config.tie_word_embeddings = getattr(whole, "tie_word_embeddings", False)
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedError(
            f"model type {config.model_type!r} is no causal language model",
            where=str(folder / "config.json"),
            why="transformers has no AutoModelForCausalLM class for it",
            todo="give it as file.py:function, which compiles any torch module",
        )
    return config, notes


def _generation_config(folder: Path, config: PretrainedConfig) -> dict[str, Any]:
    path = folder / "generation_config.json"
    if path.exists():
        return dict(read_json(path))
    return dict(GenerationConfig.from_model_config(config).to_diff_dict())
