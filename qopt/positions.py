"""How a model counts positions that it is not told: seen on a run whose integers are known."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from qopt import compat
from qopt.compat import call_model
from qopt.export import reason_of, with_fake_parameters


def default_positions_are_plain(model: PreTrainedModel, config: Any) -> bool | str:
    """Whether the model, given no position ids, counts 0, 1, 2, ... as we would.

    Where that cannot be seen, such as where the model asks for values that are not there: why not.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    compat.set_attention(model, "eager")
    try:
        with one_layer_of_a_kind(model):
            given, counted = integers_met(model, config, True), integers_met(model, config, False)
    except Exception:  # whatever a model does on the way, the run of all layers decides
        try:
            given, counted = integers_met(model, config, True), integers_met(model, config, False)
        except Exception as error:
            return reason_of(error)
    return len(given) == len(counted) and all(
        a == b and same_values(x, y) for (a, x), (b, y) in zip(given, counted, strict=True)
    )


def integers_met(model: PreTrainedModel, config: Any, give: bool) -> list[tuple[str, Tensor]]:
    """The known integers that enter the model's computation, with position ids or without."""
    vocabulary = int(getattr(config, "vocab_size", 0) or 64)
    pad = getattr(config, "pad_token_id", None)
    free = [i for i in range(min(vocabulary, 64)) if i != pad][-10:]
    free = (free * 10)[:10]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake_model = with_fake_parameters(model, mode)
    with mode, KnownValues() as known, torch.no_grad():
        tensors = []
        for rows in ([free[:5], free[5:]], [[1] * 5] * 2, [list(range(5))] * 2):
            with _disable_current_modes():
                real = torch.tensor(rows)
            fake = mode.from_tensor(real)
            known.know(fake, real)
            tensors.append(fake)
        ids, mask, positions = tensors
        call_model(fake_model, ids, mask, positions if give else None, None)
    leaks: list[tuple[str, Tensor]] = known.leaks
    return leaks


@contextmanager
def one_layer_of_a_kind(model: nn.Module) -> Iterator[None]:
    """Leave out layers that differ from an earlier one in nothing but their number."""
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    whole = [dict(part._modules) for part in lists]
    try:
        for part in lists:
            kinds = {kind_of(layer): layer for layer in reversed(list(part))}
            kept = [layer for layer in part if any(layer is k for k in kinds.values())]
            part._modules = {str(i): layer for i, layer in enumerate(kept)}
        yield
    finally:
        for part, modules in zip(lists, whole, strict=True):
            part._modules = modules


def kind_of(layer: nn.Module) -> str:
    """All that a module and its parts are, but for the number of the layer."""
    parts = []
    for name, part in layer.named_modules():
        plain = {
            key: value
            for key, value in vars(part).items()
            if isinstance(value, bool | int | float | str | tuple | None)
            and not key.startswith("_")
            and key not in LAYER_NUMBERS
        }
        parts.append((name, type(part), plain))
    return repr((parts, layer))


LAYER_NUMBERS = ("layer_idx", "layer_id", "layer_number", "idx")


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same once broadcast: one row of positions serves every row."""
    try:
        a, b = torch.broadcast_tensors(a, b)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return torch.equal(a, b)


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows, through a run on fake tensors, the integers whose values are known.

    `leaks` lists every known tensor that meets an unknown one, in order: two runs with equal leaks
    compute the same thing from their integers.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: dict[int, tuple[Tensor, Tensor]] = {}
        self.leaks: list[tuple[str, Tensor]] = []

    def know(self, fake: Tensor, real: Tensor) -> None:
        """State that `fake` holds `real`."""
        self.values[id(fake)] = fake, real

    def real(self, tensor: Tensor) -> Tensor | None:
        """What a tensor holds: a fake one that is known, or a small buffer of the model itself."""
        if id(tensor) in self.values:
            return self.values[id(tensor)][1]
        return None if isinstance(tensor, FakeTensor) else tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op on fake tensors, and on the real ones where all of them are known."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        known = [value for value in map(self.real, tensors) if value is not None]
        if len(known) < len(tensors):
            self.leaks += [(str(func), value) for value in known]
            return out
        if not tensors and not isinstance(out, Tensor):
            return out
        self._follow(func, args, kwargs, out)
        return out

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        def given(x: Any) -> Any:
            return self.real(x) if isinstance(x, Tensor) else x

        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
        if sum(sizes) > 1 << 16 or "rand" in str(func) or "empty" in str(func):
            return
        with _disable_current_modes():
            result = func(*tree_map(given, args), **tree_map(given, kwargs))
        for fake, value in zip(tree_leaves(out), tree_leaves(result), strict=True):
            if isinstance(fake, Tensor):
                self.know(fake, value)
