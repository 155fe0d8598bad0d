"""TorchScript artifacts: `torch.jit.load`, and the tensors of the cache as torch keeps them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from qopt.errors import UsageError
from qopt.runtime.session import Array, Feeds, Spec, cast, default_threads, refuse_other_inputs

if TYPE_CHECKING:
    from qopt.artifact import Artifact
    from qopt.runtime.cache import Cache

FILE = "model.pt"


class TorchTensor:
    """A tensor of the cache."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def numpy(self) -> Array:
        """Its values, in the same memory."""
        return np.asarray(self.tensor.numpy())


class TorchSession:
    """libtorch on a TorchScript file."""

    def __init__(self, artifact: Artifact, *, threads: int | None = None) -> None:
        """`threads`: default the physical cores, at most 8; they are the process's, not its own."""
        path = artifact.folder / FILE
        torch.set_num_threads(threads or default_threads())
        self._module = loaded(path)
        manifest = artifact.manifest
        self.inputs = {s.name: Spec(s.dtype, tuple(s.shape)) for s in manifest.inputs}
        self.outputs = {s.name: Spec(s.dtype, tuple(s.shape)) for s in manifest.outputs}

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """All outputs by name; integers of any width and bool are taken where int64 is declared."""
        refuse_other_inputs(feeds, self.inputs)
        given = {name: self._given(name, array) for name, array in feeds.items()}
        return {name: TorchTensor(made).numpy() for name, made in self._call(given).items()}

    def step(self, feeds: Feeds, cache: Cache) -> Array:
        """Run a decoder on `feeds` and the cache, which it updates; returns the logits."""
        given = {name: self._given(name, array) for name, array in feeds.items()}
        for name, held in cache.values.items():
            assert isinstance(held, TorchTensor)
            given[name] = held.tensor
        made = self._call(given)
        for past, present in cache.loose.items():
            cache.values[past] = TorchTensor(made[present])
        return TorchTensor(made["logits"]).numpy()

    def tensor(self, array: Array) -> TorchTensor:
        """A tensor that shares the array's memory."""
        return TorchTensor(torch.from_numpy(array))

    def _given(self, name: str, array: Array) -> torch.Tensor:
        return torch.from_numpy(cast(name, array, self.inputs[name].dtype))

    def _call(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with torch.inference_mode():
            made = self._module(*(given[name] for name in self.inputs))
        return dict(zip(self.outputs, made, strict=True))


def loaded(path: Path) -> Any:
    """The module in a TorchScript file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.load(path, map_location="cpu")  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            "torch cannot load the model",
            where=str(path),
            why=str(error).strip().splitlines()[0],
            todo="copy or compile the artifact again; `qopt doctor` shows what is installed",
        ) from None
