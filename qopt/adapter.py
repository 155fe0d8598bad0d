"""PEFT LoRA folders, merged into the base weights as lazy transforms."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from qopt.checkpoint import read_json, read_safetensors, read_torch_bin
from qopt.errors import UnsupportedError, UsageError
from qopt.named import refuse_adapter
from qopt.weights import LazyWeight

LORA_KEY = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.default)?(?:\.weight)?")

MERGE = "merge it with PEFT, save the model, and compile that"

# Settings under which `B @ A` is not what the adapter adds to the weight.
REFUSED = {
    "use_dora": "DoRA rescales every column of the merged weight",
    "lora_bias": "it also has biases on B",
    "layer_replication": "it repeats layers of the base model",
    "target_parameters": "it changes parameters that are no layer's weight",
    "trainable_token_indices": "it replaces single rows of the embedding",
    "alora_invocation_tokens": "it is active on a part of the tokens only",
    "megatron_config": "its layers are Megatron's",
}


@dataclass
class _Pair:
    """The two factors of one layer."""

    a: LazyWeight | None = None
    b: LazyWeight | None = None
    embedding: bool = False


@dataclass
class Adapter:
    """A LoRA adapter: low-rank updates and whole replacements, by names of the base model."""

    folder: Path
    config: dict[str, Any]
    pairs: dict[str, _Pair] = field(default_factory=dict)  # by the layer's name
    replaced: dict[str, LazyWeight] = field(default_factory=dict)  # `modules_to_save`, biases

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the settings and all tensors."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        tensors = dict(self.replaced)
        for name, pair in self.pairs.items():
            if pair.a and pair.b:
                tensors |= {f"{name}.A": pair.a, f"{name}.B": pair.b}
        for name in sorted(tensors):
            digest.update(f"{name} {tensors[name].digest}\n".encode())
        return digest.hexdigest()

    def merge(self, weights: Mapping[str, LazyWeight]) -> dict[str, LazyWeight]:
        """Give the weights of the merged model; an update that finds no weight is an error."""
        merged = dict(weights)
        for layer, pair in self.pairs.items():
            name = self._find(f"{layer}.weight", weights)
            merged[name] = self._updated(layer, pair, weights[name])
        for name, weight in self.replaced.items():
            target = self._find(name, weights)
            self._check(name, weight.shape, weights[target].shape)
            merged[target] = weight.cast(weights[target].dtype)
        return merged

    def _find(self, name: str, weights: Mapping[str, LazyWeight]) -> str:
        if name in weights:
            return name
        inner = name.replace("language_model.", "", 1)  # trained on the multimodal model
        if inner in weights:
            return inner
        raise UsageError(
            f"the adapter changes {name}, which the model does not have",
            where=str(self.folder),
            todo="give the adapter that was trained on this model",
        )

    def _updated(self, layer: str, pair: _Pair, base: LazyWeight) -> LazyWeight:
        if pair.a is None or pair.b is None:
            raise UsageError(
                f"the adapter has only one factor of {layer}",
                where=str(self.folder),
                todo="fetch or save the adapter again",
            )
        if len(pair.a.shape) != 2:
            raise UnsupportedError(
                f"the adapter's factors of {layer} are no matrices",
                where=str(self.folder),
                todo=MERGE,
            )
        up, down = pair.b, pair.a
        if pair.embedding or self.config.get("fan_in_fan_out"):
            up, down = pair.a.transpose(), pair.b.transpose()
        self._check(layer, (up.shape[0], down.shape[1]), base.shape)
        return base.add_low_rank(down, up, self._scale(layer, pair.a.shape[0]))

    def _scale(self, layer: str, rank: int) -> float:
        patterns = self.config.get("alpha_pattern") or {}
        alpha = next(
            (patterns[key] for key in patterns if re.match(rf"(.*\.)?({key})$", layer)),
            self.config.get("lora_alpha", 8),
        )
        return float(alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank))

    def _check(self, name: str, ours: tuple[int, ...], base: tuple[int, ...]) -> None:
        if tuple(ours) != tuple(base):
            raise UsageError(
                f"the adapter's {name} has shape {list(ours)}, the model's {list(base)}",
                where=str(self.folder),
                todo="give the adapter that was trained on this model",
            )


def read_adapter(folder: Path) -> Adapter:
    """Read a PEFT folder; what cannot be merged exactly is refused with the reason."""
    path = refuse_adapter(folder)
    config = read_json(path)
    _refuse(config, path)
    adapter = Adapter(folder, config)
    for key, weight in _tensors(folder).items():
        name = key.removeprefix("base_model.model.")
        match = LORA_KEY.fullmatch(name)
        if match is None:
            adapter.replaced[name.replace(".modules_to_save.default", "")] = weight
            continue
        pair = adapter.pairs.setdefault(match[1], _Pair(embedding=bool(match[2])))
        setattr(pair, match[3].lower(), weight)
    return adapter


def _refuse(config: Mapping[str, Any], path: Path) -> None:
    kind = str(config.get("peft_type", "LORA")).upper()
    if kind != "LORA":
        raise UnsupportedError(
            f"the adapter is of type {kind}; qopt merges LORA", where=str(path), todo=MERGE
        )
    for setting, why in REFUSED.items():
        if config.get(setting):
            raise UnsupportedError(
                f"the adapter sets {setting}",
                where=str(path),
                why=why,
                todo=MERGE,
            )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and re.match("pissa|olora|corda", start.lower()):
        raise UnsupportedError(
            f"the adapter was started by {start}",
            where=str(path),
            why="that method changes the base weights too",
            todo="convert it with PEFT's path_initial_model_for_weight_conversion",
        )


def _tensors(folder: Path) -> dict[str, LazyWeight]:
    if (folder / "adapter_model.safetensors").exists():
        return read_safetensors(folder / "adapter_model.safetensors")
    if (folder / "adapter_model.bin").exists():
        return read_torch_bin(folder / "adapter_model.bin")
    raise UsageError(
        "the adapter has no adapter_model.safetensors",
        where=str(folder),
        todo="fetch or save the adapter again",
    )
