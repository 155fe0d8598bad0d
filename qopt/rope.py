"""Stateless rotary embeddings for models whose frequencies depend on the length so far.

transformers keeps the frequencies of `dynamic` and `longrope` scaling in a buffer and branches on
the length; a graph can do neither. Here they are a function of the positions of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

LENGTH_DEPENDENT = ("dynamic", "longrope")


def depends_on_length(module: nn.Module) -> bool:
    """Whether a rotary module recomputes its frequencies while running."""
    kinds = getattr(module, "rope_type", None)
    found = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(k, str) and any(s in k for s in LENGTH_DEPENDENT) for k in found)


@contextmanager
def stateless(model: nn.Module) -> Iterator[bool]:
    """Replace the forward of such modules inside the block; yields whether there are any."""
    changed = [m for m in model.modules() if depends_on_length(m)]
    for module in changed:
        original = getattr(type(module).forward, "__wrapped__", type(module).forward)
        module.forward = partial(_forward, module, original)
    try:
        yield bool(changed)
    finally:
        for module in changed:
            del module.forward


def _forward(
    module: Any,
    original: Callable[..., Any],
    x: Tensor,
    position_ids: Tensor,
    layer_type: str | None = None,
) -> Any:
    kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
    given = {} if layer_type is None else {"layer_type": layer_type}
    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    if not any(s in kind for s in LENGTH_DEPENDENT):
        return original(module, x, position_ids, **given)
    kept, scaling = module._buffers[name], getattr(module, "attention_scaling", None)
    module._buffers[name] = _frequencies(module, kind, position_ids, kept, layer_type)
    try:
        return original(module, x, position_ids, **given)
    finally:
        module._buffers[name] = kept
        if scaling is not None:
            module.attention_scaling = scaling


def _frequencies(
    module: Any, kind: str, positions: Tensor, kept: Tensor, layer_type: str | None
) -> Tensor:
    """The inverse frequencies for the longest position of this call."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    compute = ROPE_INIT_FUNCTIONS[kind]
    given = {} if layer_type is None else {"layer_type": layer_type}
    length = positions.max() + 1
    parameters = _parameters(module.config, layer_type)
    if kind == "longrope":
        switch = int(
            parameters.get("original_max_position_embeddings")
            or getattr(module.config, "original_max_position_embeddings", 0)
            or module.config.max_position_embeddings
        )
        long, _ = compute(module.config, None, seq_len=switch + 1, **given)
        short, _ = compute(module.config, None, seq_len=switch, **given)
        return torch.where(length > switch, long, short)
    trained = int(module.config.max_position_embeddings)
    factor, base = float(parameters["factor"]), float(parameters["rope_theta"])
    width = 2 * kept.shape[0]
    longest = length.clamp(min=trained).float()
    grown = base * (factor * longest / trained - (factor - 1)) ** (width / (width - 2))
    exponent = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    return 1.0 / (grown**exponent)


def _parameters(config: Any, layer_type: str | None) -> dict[str, Any]:
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if layer_type is not None and layer_type in found:
        found = found[layer_type]
    return {"rope_theta": getattr(config, "rope_theta", 10000.0), **found}
