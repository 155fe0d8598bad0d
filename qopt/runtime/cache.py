"""The KV cache of one batch: its tensors, and which of their slots each row has filled."""

from __future__ import annotations

import numpy as np

from qopt.runtime.session import Array, Session, Spec, Tensor

CACHE_POSITION = "cache_position"  # input where buffers have a fixed size: the first new slot
CAPACITY = "cache_length"  # the dimension of those buffers
SLOTS = "past_sequence_length"  # the dimension of a cache that grows with the tokens
FIRST_CAPACITY = 256  # slots of a buffer that no one has reserved


class Cache:
    """Keys, values and states of `rows` sequences.

    `shared` buffers serve as past and as present at once: the model writes its new tokens in place,
    each row's at the row's own length, or, in a `static` cache, all rows' in the same slots.
    `loose` tensors come out of a step and go into the next. By slot they and static ones hold every
    column of every call, holes where rows were padded included.
    """

    def __init__(
        self, session: Session, rows: int, *, share: bool, context: int | None = None
    ) -> None:
        """`share`: past and present may be one buffer; `context`: no buffer need be longer."""
        self.session = session
        self.context = context
        self.specs = {n: s for n, s in session.inputs.items() if n.startswith("past_")}
        presents = {
            n: "present" + n.removeprefix("past").removeprefix("_key_values") for n in self.specs
        }
        grows = {n for n, s in self.specs.items() if SLOTS in s.shape or CAPACITY in s.shape}
        self.static = CACHE_POSITION in session.inputs
        self.shared = {n: presents[n] for n in self.specs if share and n in grows}
        self.loose = {n: presents[n] for n in self.specs if n not in self.shared}
        self.has_states = len(grows) < len(self.specs)
        self.capacity = 0
        self.values: dict[str, Tensor] = {}
        self.version = 0  # a session that has bound the tensors of another one must bind again
        self.clear(rows)

    def clear(self, rows: int) -> None:
        """Forget everything and hold `rows` empty sequences."""
        self.mask = np.zeros((rows, 0), np.int64)  # 1 where a slot holds a token of the row
        self._put(
            {
                n: np.zeros(_shape(s, rows, self.capacity if n in self.shared else 0), s.dtype)
                for n, s in self.specs.items()
            }
        )

    @property
    def lengths(self) -> Array:
        """Tokens of each row."""
        return np.asarray(self.mask.sum(axis=1))

    def reserve(self, slots: int) -> None:
        """Make room for so many slots; grows geometrically, up to the context length."""
        if slots <= self.capacity or not self.shared:
            return
        wanted = max(slots, 2 * self.capacity, FIRST_CAPACITY)
        self.capacity = max(slots, min(wanted, self.context or wanted))
        filled = self.mask.shape[1]
        grown = {}
        for name in self.shared:
            old = self.values[name].numpy()
            grown[name] = np.zeros((*old.shape[:2], self.capacity, old.shape[3]), old.dtype)
            grown[name][:, :, :filled] = old[:, :, :filled]
        self._put(grown)

    def select(self, rows: Array) -> None:
        """Keep only these rows, and close the holes that padding left."""
        mask = self.mask[rows]
        lengths = mask.sum(axis=1)
        width = int(lengths.max())
        order = np.argsort(mask == 0, axis=1, kind="stable")[:, :width]  # real slots come first
        kept = {}
        for name, spec in self.specs.items():
            value = self.values[name].numpy()[rows]
            if name in self.loose and SLOTS in spec.shape:
                value = np.take_along_axis(value, order[:, None, :, None], axis=2)
            elif self.static and name in self.shared:
                value[:, :, :width] = np.take_along_axis(value, order[:, None, :, None], axis=2)
            kept[name] = value
        self.mask = (np.arange(width) < lengths[:, None]).astype(np.int64)
        self._put(kept)

    def truncate(self, length: int) -> int:
        """Forget a single row's tokens from `length` on; returns how many are kept.

        A recurrent state cannot go back, so a model that has one starts again from nothing.
        """
        if length >= self.mask.shape[1]:
            return self.mask.shape[1]
        if self.has_states or length == 0:
            self.clear(1)
            return 0
        self.mask = self.mask[:, :length]
        self._put({n: self.values[n].numpy()[:, :, :length] for n in self.loose})
        return length

    def _put(self, arrays: dict[str, Array]) -> None:
        """Take these as the tensors' new values."""
        for name, array in arrays.items():
            self.values[name] = self.session.tensor(np.ascontiguousarray(array))
        self.version += 1


def _shape(spec: Spec, rows: int, slots: int) -> tuple[int, ...]:
    named = {"batch_size": rows, SLOTS: slots, CAPACITY: slots}
    return tuple(d if isinstance(d, int) else named[d] for d in spec.shape)
