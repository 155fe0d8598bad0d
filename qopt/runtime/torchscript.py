"""TorchScript artifacts: `torch.jit.load`, and the tensors of the cache as torch keeps them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch

from qopt.errors import UsageError
from qopt.runtime.session import Array, Feeds, Spec, cast, default_threads, refuse_other_inputs

if TYPE_CHECKING:
    from qopt.artifact import Artifact
    from qopt.runtime.cache import Cache

FILE = "model.pt"
ELSEWHERE = "the script was run on the CPU: there is no GPU"


class TorchTensor:
    """A tensor of the cache."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def numpy(self) -> Array:
        """Its values, in the same memory where that is the host's."""
        return to_numpy(self.tensor)


class TorchSession:
    """libtorch on a TorchScript file."""

    def __init__(self, artifact: Artifact, *, threads: int | None = None) -> None:
        """`threads`: default the physical cores, at most 8; they are the process's, not its own."""
        torch.set_num_threads(threads or default_threads())
        manifest = artifact.manifest
        self.kernels = manifest.target == "torchscript-cuda"
        self.device = "cuda" if self.kernels and torch.cuda.is_available() else "cpu"
        self.elsewhere = self.kernels and self.device == "cpu"
        self._missing = registered(self.device) if self.kernels else None
        self._module = loaded(artifact.folder / FILE, self.device)
        self.kernels &= calls_kernels(self._module)
        self.inputs = {s.name: Spec(s.dtype, tuple(s.shape)) for s in manifest.inputs}
        self.outputs = {s.name: Spec(s.dtype, tuple(s.shape)) for s in manifest.outputs}

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """All outputs by name; integers of any width and bool are taken where int64 is declared."""
        refuse_other_inputs(feeds, self.inputs)
        given = {name: self._given(name, array) for name, array in feeds.items()}
        return {name: TorchTensor(made).numpy() for name, made in self._call(given).items()}

    def told(self) -> list[str]:
        """How the ops of qopt's own ran until now, and whether what is for a GPU ran there."""
        if not self.kernels:
            return [ELSEWHERE] if self.elsewhere else []
        from qopt.kernel import choices

        if self._missing is not None:
            return [f"the Triton kernels were not run ({self._missing}): their references were"]
        where = "on the GPU" if self.device == "cuda" else "in Triton's interpreter, on the CPU"
        lines = [f"{c.op}: {c.implementation} {c.count}x" for c in choices()]
        return [f"kernels ran {where}: {', '.join(lines)}"] if lines else []

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
        return TorchTensor(to_torch(array).to(self.device))

    def _given(self, name: str, array: Array) -> torch.Tensor:
        return to_torch(cast(name, array, self.inputs[name].dtype)).to(self.device)

    def _call(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with torch.inference_mode():
            made = self._module(*(given[name] for name in self.inputs))
        return dict(zip(self.outputs, made, strict=True))


def to_torch(array: Array) -> torch.Tensor:
    """A tensor in the array's memory; numpy's bfloat16 is ml_dtypes', which torch does not know."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> Array:
    """An array in the tensor's memory, or in new memory where that is a GPU's."""
    tensor = tensor.cpu()
    if tensor.dtype == torch.bfloat16:
        array: Array = tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return array
    return np.asarray(tensor.numpy())


def registered(device: str) -> str | None:
    """Register qopt's ops, and their kernels where they can run; returns why they cannot."""
    from qopt import kernel, ops

    assert ops
    if device == "cuda":
        return kernel.install("CUDA")
    if kernel.interpreting():
        return kernel.install("CPU")
    return kernel.missing() or "there is no GPU"


def calls_kernels(module: Any) -> bool:
    """Whether a script has ops of qopt's own; a portable one has none."""
    return any(node.kind().startswith("qopt::") for node in module.inlined_graph.nodes())


def loaded(path: Path, device: str = "cpu") -> Any:
    """The module in a TorchScript file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.load(path, map_location=device)  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            "torch cannot load the model",
            where=str(path),
            why=str(error).strip().splitlines()[0],
            todo="copy or compile the artifact again; `qopt doctor` shows what is installed",
        ) from None
