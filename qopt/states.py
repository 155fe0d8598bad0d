"""What a decoder keeps beside keys and values: convolution and recurrent states, indexer keys.

Each becomes an input `past_state.N.NAME` and an output `present_state.N.NAME` of the second road. A
state of zeros is no state, so that one graph serves the first call and every later one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qopt.export import DoesNotFit


@dataclass(frozen=True)
class StateShape:
    """A state without its batch; `grows` marks one that holds a slot for each token, in dim 2."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grows: bool = False


Key = tuple[int, str]  # layer, name


def state_name(key: Key) -> str:
    """`N.NAME`."""
    return f"{key[0]}.{key[1]}"


class NoLayers(list[Any]):
    """Stands for the cache's own layers, of which a graph has none."""

    def __getitem__(self, index: Any) -> Any:
        raise DoesNotFit("the model reaches into its cache, past `update`")


class NoStates:
    """A cache of keys and values alone: whoever asks for more does not fit."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise DoesNotFit("the model keeps recurrent state")

    get_conv_state = get_recurrent_state = has_previous_state = _refuse
    update_conv_state = update_recurrent_state = _refuse

    def is_recording_past(self, layer_idx: int) -> bool:
        """No: a graph never goes back to an earlier token."""
        return False

    def get_recurrent_states_to_keep(self, layer_idx: int | None = None) -> int:
        """None of the states between."""
        return 0

    def update_indexer(self, *_: Any, **__: Any) -> Any:
        """Keys of an indexer are not kept on this road."""
        raise DoesNotFit("the model keeps keys of an indexer")


@dataclass
class SeenStates:
    """Notes which states a first call makes, and their shapes; there is no past."""

    shapes: dict[Key, StateShape] = field(default_factory=dict)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: this is the first call."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: this is the first call."""

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """This is the first call."""
        return False

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Note a window over the last tokens."""
        if conv_kernel_size is None:
            raise DoesNotFit("a convolution does not say how many tokens its state holds")
        shape = (*(int(d) for d in conv_states.shape[1:-1]), int(conv_kernel_size))
        key = layer_idx, numbered("conv", state_idx)
        self.shapes[key] = StateShape(shape, conv_states.dtype)
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Note a state of fixed size."""
        shape = tuple(int(d) for d in recurrent_states.shape[1:])
        key = layer_idx, numbered("recurrent", state_idx)
        self.shapes[key] = StateShape(shape, recurrent_states.dtype)
        return recurrent_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Note keys (B, T, D) of an indexer."""
        size = int(indexer_key_states.shape[-1])
        self.shapes[layer_idx, "indexer"] = StateShape((1, 0, size), indexer_key_states.dtype, True)
        return indexer_key_states


class KeptStates:
    """States come from the graph's inputs, and what they become are its outputs."""

    past_states: dict[Key, Tensor]
    new_states: dict[Key, Tensor]

    def _past(self, key: Key) -> Tensor:
        if key not in self.past_states:
            raise DoesNotFit(f"state {state_name(key)} appears only in a later call")
        return self.past_states[key]

    def _keep(self, key: Key, state: Tensor) -> None:
        if key in self.new_states:
            raise DoesNotFit(f"state {state_name(key)} is written twice")
        self.new_states[key] = state

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """The last tokens before this call."""
        return self._past((layer_idx, numbered("conv", state_idx)))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The state that the last call left."""
        return self.past_states.get((layer_idx, numbered("recurrent", state_idx)))

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """There is always one: of zeros at first."""
        return True

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Past and new together; the last of them are kept."""
        key = layer_idx, numbered("conv", state_idx)
        joined = torch.cat([self._past(key), conv_states], -1)
        self._keep(key, joined[..., -int(conv_kernel_size or 1) :])
        return joined

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Keep the new state."""
        key = layer_idx, numbered("recurrent", state_idx)
        self._keep(key, recurrent_states.to(self._past(key).dtype))
        return recurrent_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Past and new keys, (B, T, D); the state has a dimension of heads, as a cache has."""
        key = layer_idx, "indexer"
        joined = torch.cat([self._past(key).squeeze(1), indexer_key_states], 1)
        self._keep(key, joined.unsqueeze(1))
        return joined


def numbered(name: str, index: int) -> str:
    """A state's name; the second of a layer is `conv1`."""
    return name if index == 0 else f"{name}{index}"
