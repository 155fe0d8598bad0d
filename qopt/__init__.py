"""qopt: a compiler for language-model artifacts."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qopt.compile import compile
    from qopt.runtime import load

__all__ = ["compile", "load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import on first use: `qopt.load` must not wait for torch."""
    homes = {"compile": "qopt.compile", "load": "qopt.runtime"}
    if name in homes:
        return getattr(import_module(homes[name]), name)
    raise AttributeError(f"module 'qopt' has no attribute {name!r}")
