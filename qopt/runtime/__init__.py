"""Running an artifact: sessions, KV cache, sampling, text and generation; imports no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qopt.runtime.generate import Chat, Model, Result, load

__all__ = ["Chat", "Model", "Result", "load"]


def __getattr__(name: str) -> Any:
    """Import on first use: a part of the runtime must not wait for the whole of it."""
    if name in __all__:
        return getattr(import_module("qopt.runtime.generate"), name)
    raise AttributeError(f"module 'qopt.runtime' has no attribute {name!r}")
