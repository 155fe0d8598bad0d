"""All that differs between transformers 4.57 and 5.x, so that nothing else asks for a version.

Weights: what a checkpoint's names become in the module (`convert_names`), and which of the
module's parameters are one and the same (`tied_names`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from qopt.errors import UnsupportedError
from qopt.weights import LazyWeight

TRANSFORMERS_5 = int(transformers.__version__.split(".")[0]) >= 5


# Ties ----------------------------------------------------------------------------------------


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Map each tied parameter to the one it shares, as the config asks for it."""
    if TRANSFORMERS_5:
        return dict(model.all_tied_weights_keys)
    # 4.57 ties by sharing parameters, which a model made by `init_empty_weights` has lost.
    with torch.device("meta"):
        twin = type(model)(model.config)
    owners: dict[int, str] = {}
    state = twin.state_dict(keep_vars=True)
    names = {name: owners.setdefault(id(tensor), name) for name, tensor in state.items()}
    return {name: owner for name, owner in names.items() if name != owner}


# Names ---------------------------------------------------------------------------------------


@dataclass
class Converted:
    """Lazy weights under the module's names, and what the module has no place for."""

    weights: dict[str, LazyWeight]
    unexpected: list[str]
    twice: list[tuple[str, str]] = field(default_factory=list)  # (parameter, checkpoint name)


def convert_names(model: PreTrainedModel, tensors: Mapping[str, LazyWeight]) -> Converted:
    """Give checkpoint tensors the module's names and shapes, as `from_pretrained` would.

    Renamings cost nothing. A conversion (split, merge, transpose) becomes lazy transforms; what
    qopt has no transform for runs transformers' own function when the weight is evaluated.
    """
    return _convert_5(model, tensors) if TRANSFORMERS_5 else _convert_4(model, tensors)


def ignored_patterns(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Patterns of names that may be missing from, or needless in, a checkpoint."""
    missing = list(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    unexpected = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    # Old checkpoints hold these in every layer; they are computed today.
    return missing, [*unexpected, r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]


def _convert_4(model: PreTrainedModel, tensors: Mapping[str, LazyWeight]) -> Converted:
    expected = model.state_dict()
    prefix = f"{model.base_model_prefix}."
    of_base = not any(name.startswith(prefix) or name in expected for name in tensors)
    into_base = not any(name.startswith(prefix) for name in expected)
    v4: Any = model
    renamed = v4._get_key_renaming_mapping(
        list(tensors),
        getattr(model, "_checkpoint_conversion_mapping", None) or None,
        loading_base_model_from_task_state_dict=into_base and not of_base,
        loading_task_model_from_base_state_dict=of_base and not into_base,
    )
    out = Converted({}, [])
    for name, weight in tensors.items():
        target = name if name in expected else renamed.get(name, name)
        if target not in expected:
            out.unexpected.append(name)
        elif target in out.weights:
            out.twice.append((target, name))
        else:
            out.weights[target] = weight
    return out


@dataclass
class _Group:
    """Checkpoint tensors that one converter turns into parameters of the module."""

    converter: Any
    sources: dict[str, list[LazyWeight]] = field(default_factory=dict)  # by source pattern


def _convert_5(model: PreTrainedModel, tensors: Mapping[str, LazyWeight]) -> Converted:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    expected, prefix = model.state_dict(), model.base_model_prefix
    out, groups = Converted({}, []), dict[str, _Group]()
    for name in sorted(tensors, key=dot_natural_key):  # experts in the order of their numbers
        target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
        if target not in expected and name in expected:
            target, pattern = rename_source_key(name, [], [], prefix, expected)
        if target not in expected:
            out.unexpected.append(name)
        elif pattern is not None:
            group = groups.setdefault(target, _Group(by_pattern[pattern]))
            group.sources.setdefault(pattern, []).append(tensors[name])
        elif target in out.weights:
            out.twice.append((target, name))
        else:
            out.weights[target] = tensors[name]
    for first, group in groups.items():
        for target, weight in _convert_group(model, first, group).items():
            if target in out.weights:
                out.twice.append((target, first))
            out.weights[target] = weight
    return out


def _convert_group(model: PreTrainedModel, first: str, group: _Group) -> dict[str, LazyWeight]:
    # Run on meta tensors the converter says names and shapes without touching a byte.
    shapes = _run_converter(
        model,
        first,
        group,
        {
            pattern: [torch.empty(w.shape, dtype=w.dtype, device="meta") for w in weights]
            for pattern, weights in group.sources.items()
        },
    )
    native = _native(group, list(shapes.values()))
    if native is not None:
        return dict(zip(shapes, native, strict=True))
    inputs = [weight for weights in group.sources.values() for weight in weights]

    def convert(index: int, values: list[Tensor]) -> Tensor:
        rest = iter(values)
        given = {
            pattern: [next(rest) for _ in weights] for pattern, weights in group.sources.items()
        }
        values.clear()  # the converter frees what it has merged
        return list(_run_converter(model, first, group, given).values())[index]

    return {
        target: LazyWeight.apply(
            "convert",
            partial(convert, index),
            inputs,
            meta.shape,
            meta.dtype,
            (
                repr(group.converter.operations),
                {pattern: len(weights) for pattern, weights in group.sources.items()},
                index,
            ),
        )
        for index, (target, meta) in enumerate(shapes.items())
    }


def _run_converter(
    model: PreTrainedModel, first: str, group: _Group, given: dict[str, list[Tensor]]
) -> dict[str, Tensor]:
    converter = deepcopy(group.converter)
    converter.collected_tensors = given
    results = converter.convert(first, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}


def _native(group: _Group, wanted: list[Tensor]) -> list[LazyWeight] | None:
    """Write a chain of the common operations as lazy transforms, which read rows apart."""
    state = [
        group.sources[pattern]
        for pattern in group.converter.source_patterns
        if pattern in group.sources
    ]
    if len({weight.dtype for weights in state for weight in weights}) != 1:
        return None
    for operation in group.converter.operations:
        step = _NATIVE.get(type(operation).__name__)
        after = step(operation, state, wanted) if step else None
        if after is None:
            return None
        state = after
    flat = [weight for weights in state for weight in weights]
    fits = [weight.shape for weight in flat] == [tuple(meta.shape) for meta in wanted]
    return flat if fits else None


_State = list[list[LazyWeight]]


def _merge(operation: Any, state: _State, wanted: list[Tensor]) -> _State | None:
    if operation.dim != 0:
        return None
    return [
        [LazyWeight.concat([part.reshape(1, *part.shape) for part in weights])] for weights in state
    ]


def _concatenate(operation: Any, state: _State, wanted: list[Tensor]) -> _State | None:
    return [[LazyWeight.concat([w for weights in state for w in weights], operation.dim)]]


def _chunk(operation: Any, state: _State, wanted: list[Tensor]) -> _State | None:
    whole, dim, count = state[0][0], operation.dim, len(wanted)
    if len(state) != 1 or len(state[0]) != 1 or whole.shape[dim] % count:
        return None
    size = whole.shape[dim] // count
    return [[whole.slice(dim, i * size, (i + 1) * size) for i in range(count)]]


def _transpose(operation: Any, state: _State, wanted: list[Tensor]) -> _State | None:
    if len(state) != 1 or len(state[0]) != 1:
        return None
    if operation.check_dims and state[0][0].shape == tuple(wanted[0].shape):
        return state
    return [[state[0][0].transpose(operation.dim0, operation.dim1)]]


_NATIVE = {
    "MergeModulelist": _merge,
    "Concatenate": _concatenate,
    "Chunk": _chunk,
    "Transpose": _transpose,
}


def gguf_names(model: PreTrainedModel, processor: Any) -> dict[str, str]:
    """Map a GGUF file's tensor names to the module's, by transformers' own table."""
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    table: Any = get_gguf_hf_weights_map
    return dict(table(model, processor) if TRANSFORMERS_5 else table(model))


# The original, to compare with -----------------------------------------------------------------


def load_original(folder: Path, attention: str = "eager", **options: Any) -> Any:
    """The model as transformers itself loads it, in fp32: no network, no remote code, no bar."""
    from transformers import AutoModelForCausalLM, modeling_gguf_pytorch_utils
    from transformers.utils import logging

    quiet: Any = logging  # transformers leaves these without types
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    factory: Any = AutoModelForCausalLM
    bar: Any = modeling_gguf_pytorch_utils  # its bar does not ask transformers' own switch
    with patch.object(bar, "tqdm", partial(bar.tqdm, disable=True)):
        return factory.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
            **options,
        ).eval()


# Capture -------------------------------------------------------------------------------------


def empty_decoder(config: Any, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """Make the decoder that `config` describes without values: parameters on meta, buffers real."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM  # without types in transformers
    config = deepcopy(config)
    config._attn_implementation = attention
    with init_empty_weights(include_buffers=False):
        try:
            model: PreTrainedModel = factory.from_config(config, dtype=dtype)
        except (KeyError, ValueError):  # a model that chooses its attention class by this name
            config._attn_implementation = "eager"
            model = factory.from_config(config, dtype=dtype)
    if TRANSFORMERS_5:
        for part in model.modules():
            part_config = getattr(part, "config", None)
            if part_config is not None:
                part_config._experts_implementation = attention
    return model


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Let every part of the model use the attention registered as `name`."""
    for part in model.modules():
        config = getattr(part, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = name


def register_experts(name: str, forward: Any) -> None:
    """Register an implementation of expert layers; transformers 4.57 has no place for one."""
    if TRANSFORMERS_5:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(name, forward)


@contextmanager
def no_autocast() -> Iterator[None]:
    """Make a disabled `torch.autocast` nothing inside the block.

    4.57 wraps its rotary embeddings in one, and export would make a subgraph of it.
    """
    original: Any = torch.autocast

    def plain(*args: Any, enabled: bool = True, **kwargs: Any) -> Any:
        return original(*args, enabled=enabled, **kwargs) if enabled else nullcontext()

    with patch.object(torch, "autocast", plain):
        yield


def layer_count(config: Any) -> int:
    """The number of layers whose cache a model may ask about."""
    text = config.get_text_config(decoder=True)
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"):
        value = getattr(text, name, None)
        if isinstance(value, int):
            return value
    return 0


def call_model(
    model: nn.Module, ids: Tensor, mask: Tensor | None, positions: Tensor | None, cache: Any
) -> Tensor:
    """Call a transformers decoder under this version's names of arguments; returns its logits."""
    accepted = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in accepted else "past_key_values"
    if name not in accepted:
        raise UnsupportedError(
            f"{type(model).__name__} takes no KV cache",
            why="it is not an autoregressive decoder with attention",
            todo="give it as file.py:function, which compiles any torch module",
        )
    given = {"input_ids": ids, "attention_mask": mask, name: cache, "use_cache": cache is not None}
    if positions is not None:
        given["position_ids"] = positions
    if "logits_to_keep" in accepted:
        given["logits_to_keep"] = 0
    given = {k: v for k, v in given.items() if k in accepted or k == "use_cache"}
    return model(**given, return_dict=True).logits  # type: ignore[no-any-return]
