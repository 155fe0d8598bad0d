"""One batch of token sequences on its way through a decoder."""

from __future__ import annotations

import numpy as np

from qopt.artifact import Manifest
from qopt.errors import UnsupportedError
from qopt.runtime.cache import CACHE_POSITION, Cache
from qopt.runtime.session import KEEP, Array, Session


class Decoder:
    """A decoder session and the cache of one batch."""

    def __init__(self, session: Session, manifest: Manifest, rows: int) -> None:
        """`rows`: sequences in the batch, all of them empty."""
        self._session = session
        self._batched_chunks = manifest.batched_chunks
        self.cache = Cache(
            session,
            rows,
            share=manifest.shared_buffer,
            context=manifest.model.context_length,
        )

    def forward(self, ids: Array, lengths: Array | None = None, *, keep: int = 1) -> Array:
        """Append `ids` and return the logits of each row's last `keep` tokens, all when 0.

        `ids` [rows, columns] are padded on the right: row b's tokens are its first `lengths[b]`
        columns; without `lengths` every column counts. Returns float32 [rows, n, vocabulary].
        """
        rows, columns = ids.shape
        if lengths is None:
            lengths = np.full(rows, columns)
        if not self._batched_chunks:
            refuse_chunks(lengths, columns, self.cache.mask.shape[1])
        new = (np.arange(columns) < lengths[:, None]).astype(np.int64)
        mask = np.concatenate([self.cache.mask, new], axis=1)
        self.cache.reserve(mask.shape[1])
        feeds = {"input_ids": ids, "attention_mask": mask}
        if self.cache.static:
            filled = self.cache.mask.shape[1]
            feeds[CACHE_POSITION] = np.array([filled])
            behind = self.cache.capacity - mask.shape[1]
            feeds["attention_mask"] = np.pad(mask, ((0, 0), (0, behind)))
        if "position_ids" in self._session.inputs:
            feeds["position_ids"] = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, -columns:]
        if KEEP in self._session.inputs:
            feeds[KEEP] = np.array([keep])
        logits = self._session.step(feeds, self.cache)
        self.cache.mask = mask
        return _kept(logits, lengths, columns, keep).astype(np.float32, copy=False)


def refuse_chunks(lengths: Array, columns: int, filled: int) -> None:
    """Refuse what an attention that knows no row's number of new tokens would answer wrongly."""
    if filled and len(lengths) > 1 and (columns > 1 or not lengths.all()):
        raise UnsupportedError(
            f"{len(lengths)} rows cannot feed {columns} tokens each to a filled cache",
            why="the artifact's attention takes several rows' tokens from empty caches, and then "
            "one a row",
            todo="feed the rows one by one, or compile for another target",
        )


def _kept(logits: Array, lengths: Array, columns: int, keep: int) -> Array:
    """What was asked for, also from a model that cannot be told how many logits to keep."""
    there = logits.shape[1]
    if there == (keep or columns):
        return logits
    if keep and there == columns:
        at = np.maximum(lengths[:, None] - keep + np.arange(keep), 0)
        return np.take_along_axis(logits, at[:, :, None], axis=1)
    raise UnsupportedError(
        f"the artifact gives {there} of {columns} columns of logits, {keep or columns} are needed",
        todo="compile it with `logits: all`",
    )
