"""What MODEL may be, and what it gives: config, lazy weights, and where its other files lie."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qopt.adapter import Adapter, read_adapter
from qopt.binding import absent_weight, bind_weights
from qopt.cache import full_disk
from qopt.checkpoint import has_weights, read_folder, read_json
from qopt.compat import TRANSFORMERS_5
from qopt.demo import find_demo
from qopt.errors import ResourceError, UnsupportedError, UsageError
from qopt.gguf_file import materialise, open_gguf, read_gguf
from qopt.named import DEMOS, FORMS, refuse_model
from qopt.pt2 import read_pt2
from qopt.weights import LazyWeight

__all__ = ["ModelSource", "bind_weights", "open_module", "open_source"]

HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]


@dataclass
class ModelSource:
    """A model that nothing has been loaded of: its config and its weights, lazily."""

    kind: Literal["decoder", "module", "program"]
    identity: str = ""  # hub id or demo name; empty for a local path, which no artifact stores
    where: str = ""  # for messages: the path or name as the user gave it
    config: PretrainedConfig | None = None  # of a decoder: the text config
    facts: dict[str, Any] = field(default_factory=dict)  # what `digest` covers beside tensors
    generation_config: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None  # where tokenizer and config files lie
    file: Path | None = None  # the .gguf, where the model is one
    tensors: dict[str, LazyWeight] = field(default_factory=dict)  # by the checkpoint's names
    with_weights: bool = True
    module: nn.Module | None = None
    args: tuple[Any, ...] = ()
    dynamic_shapes: Any = None
    program: ExportedProgram | None = None
    adapter: Adapter | None = None
    notes: list[str] = field(default_factory=list)  # what the user should be told
    training: list[nn.Module] = field(default_factory=list)  # parts that `close` sets back

    def close(self) -> None:
        """Give a module in memory its training mode back."""
        for part in self.training:
            part.training = True

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
        digest = hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode())
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
    try:
        source = _open(model, revision, weights)
    except OSError as error:
        raise ResourceError(
            "cannot read the model",
            where=str(error.filename or model),
            why=error.strerror or str(error),
            todo="check that you may read it, and that its disk is there",
        ) from error
    source.where = model
    source.with_weights = weights
    if adapter is not None:
        _adapt(source, read_adapter(adapter))
    if not weights:
        source.tensors = {name: absent_weight(name, w) for name, w in source.tensors.items()}
    return source


def _open(model: str, revision: str | None, weights: bool) -> ModelSource:
    refuse_model(model, revision)
    file, _, function = model.rpartition(":")
    if Path(model).exists():
        return _open_path(Path(model), weights)
    if function.isidentifier() and Path(file).is_file():
        return open_function(Path(file), function)
    if model in DEMOS:
        source = _open_path(find_demo(model), weights)
        source.identity = model
        return source
    return open_folder(download(model, revision), identity=model, weights=weights)


def _adapt(source: ModelSource, adapter: Adapter) -> None:
    if source.kind == "program":
        raise UnsupportedError(
            "an adapter cannot be merged into a .pt2 file",
            where=source.where,
            todo="merge it with PEFT before exporting, or compile the checkpoint's folder",
        )
    if source.kind == "module":
        source.tensors = adapter.merge(source.tensors)
    else:  # its names are those of the decoder: merged when the weights are bound
        source.adapter = adapter


def _open_path(path: Path, weights: bool) -> ModelSource:
    if path.is_dir():
        return open_folder(path, weights=weights)
    if path.suffix == ".gguf":
        return open_gguf_file(path, weights)
    if path.suffix == ".pt2":
        return open_program(path)
    hint = "give its folder" if path.suffix == ".safetensors" else FORMS
    if path.suffix == ".py":
        hint = f"name the function that makes the model: {path}:FUNCTION"
    raise UsageError("this file is no model", where=str(path), todo=hint)


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
    config, notes = text_config(folder)
    source = ModelSource(
        "decoder",
        identity,
        str(folder),
        config,
        _plain(raw),
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
    if not TRANSFORMERS_5 and any("rope_parameters" in p and "rope_theta" not in p for p in parts):
        raise UnsupportedError(
            "config.json was written by transformers 5",
            where=where,
            why="the installed one would ignore its rope_parameters and rotate wrongly",
            todo="pip install 'transformers>=5'",
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
        f"the installed transformers does not know model type {kind!r}",
        where=where,
        todo="pip install --upgrade transformers, or give the model as file.py:function",
    )


def text_config(folder: Path) -> tuple[PretrainedConfig, list[str]]:
    """Read config.json through transformers' own class; of a multimodal one take the text part."""
    try:
        whole = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            "transformers refuses the config",
            where=str(folder / "config.json"),
            why=str(error),
            todo="mend or fetch the file again",
        ) from None
    config, notes = whole.get_text_config(decoder=True), []
    if config.model_type == whole.model_type:  # for an encoder-decoder it is a changed copy
        config = whole
    else:
        notes.append(
            f"{whole.model_type} is multimodal: only its text part ({config.model_type}) "
            "is compiled"
        )
        # Either may carry the flag, by the age of the checkpoint; the tensors then decide.
        config.tie_word_embeddings = any(
            getattr(part, "tie_word_embeddings", False) for part in (config, whole)
        )
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or (
        whole.is_encoder_decoder and config is not whole
    ):
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
        settings = dict(read_json(path))
    else:
        settings = GenerationConfig.from_model_config(config).to_diff_dict()
    return _plain(settings)


def open_gguf_file(path: Path, weights: bool = True) -> ModelSource:
    """Open a GGUF file; its config and tokenizer are converted by transformers into the cache."""
    file = open_gguf(path)
    folder = materialise(file)
    source = open_folder(folder, weights=False)
    source.where, source.with_weights, source.facts = str(path), weights, {"gguf": file.digest}
    source.file = path
    if weights:
        source.tensors = read_gguf(file, folder)
    return source


# Code and programs ---------------------------------------------------------------------------


def open_function(file: Path, name: str) -> ModelSource:
    """Run `file` and call its function: it gives (module, args) or (module, args, shapes)."""
    where = f"{file}:{name}"
    if file.suffix != ".py":
        raise UsageError(
            "only a .py file is run as code", where=where, todo="give FILE.py:FUNCTION"
        )
    try:
        function = getattr(_run(file), name, None)
        result = function() if callable(function) else None
    except Exception as error:
        raise UsageError(
            "the file raised an error",
            where=where,
            why=f"{type(error).__name__}: {error}".rstrip(": "),
            todo="mend the file; --debug shows where it fails",
        ) from error
    if function is None:
        raise UsageError(
            f"the file has no function {name}", where=str(file), todo="name one that it has"
        )
    match result:
        case (nn.Module() as module, tuple() | list() as args):
            return open_module(module, tuple(args))
        case (nn.Module() as module, tuple() | list() as args, shapes):
            return open_module(module, tuple(args), shapes)
    raise UsageError(
        "the function gives no model",
        where=where,
        why=f"it returned {type(result).__name__}",
        todo="return (module, args) or (module, args, dynamic_shapes), args a tuple of tensors",
    )


def _run(file: Path) -> ModuleType:
    """Import a file by its path, as Python runs a script: its folder can be imported from."""
    spec = importlib.util.spec_from_file_location(f"qopt_model_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and torch look their module up there
    sys.path.insert(0, str(file.parent.resolve()))
    spec.loader.exec_module(module)
    return module


def open_module(
    module: nn.Module, args: tuple[Any, ...] = (), dynamic_shapes: Any = None
) -> ModelSource:
    """Open a module in memory; a decoder of transformers is captured as one."""
    source = ModelSource("module", module=module, args=args, dynamic_shapes=dynamic_shapes)
    source.training = [part for part in module.modules() if part.training]
    module.eval()
    source.tensors = _shared(module.state_dict(keep_vars=True))
    source.facts = {"module": type(module).__qualname__}
    if isinstance(module, PreTrainedModel):
        source.facts = _plain(module.config.to_dict())
        if module.can_generate() and module.config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            source.kind, source.config = "decoder", module.config
            source.generation_config = dict(module.generation_config.to_diff_dict())
    return source


def _shared(state: dict[str, Tensor]) -> dict[str, LazyWeight]:
    """Wrap a module's tensors; names for the same memory get the same lazy weight."""
    seen: dict[tuple[Any, ...], LazyWeight] = {}
    return {
        name: seen.setdefault(
            (tensor.data_ptr() or name, tensor.shape, tensor.stride(), tensor.dtype),
            LazyWeight.memory(tensor),
        )
        for name, tensor in state.items()
    }


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """The config without what depends on the installed transformers or the machine."""
    kept = {
        key: value
        for key, value in config.items()
        if not key.startswith("_") and key != "transformers_version"
    }
    return dict(json.loads(json.dumps(kept, default=str)))


def open_program(path: Path) -> ModelSource:
    """Open a `.pt2` file without unpickling anything."""
    program, tensors, graph = read_pt2(path)
    return ModelSource("program", program=program, tensors=tensors, facts=graph)


# The hub -------------------------------------------------------------------------------------


def download(hub_id: str, revision: str | None = None) -> Path:
    """Fetch a snapshot from the hub; one that is in the cache already needs no network."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    def snapshot(patterns: list[str], **options: Any) -> Path:
        return Path(
            snapshot_download(
                hub_id, revision=revision, allow_patterns=patterns, etag_timeout=5, **options
            )
        )

    try:
        folder = snapshot(HUB_FILES, local_files_only=True)
        if (folder / "config.json").exists() and has_weights(folder):
            return folder
    except LocalEntryNotFoundError:
        pass
    if constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE", "0") not in ("", "0"):
        raise _no_network(hub_id, "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set")
    try:
        folder = snapshot(HUB_FILES)
        return folder if has_weights(folder) else snapshot([*HUB_FILES, "*.bin"])
    except LocalEntryNotFoundError as error:  # in old versions also a HfHubHTTPError
        raise _no_network(hub_id, str(error).splitlines()[0]) from None
    except HfHubHTTPError as error:
        raise UsageError(
            f"the hub refuses {hub_id}",
            why=str(error).splitlines()[0],
            todo="check name and --revision; a gated model wants HF_TOKEN",
        ) from None
    except (OSError, RuntimeError) as error:
        raise full_disk(error) or _no_network(hub_id, str(error).splitlines()[0]) from None


def _no_network(hub_id: str, why: str) -> ResourceError:
    return ResourceError(
        f"cannot fetch {hub_id} from the hub",
        why=why,
        todo="go online, or give a local folder",
    )
