"""Choosing the next token of every row at once: greedy, or from a filtered distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qopt.errors import QoptError, UsageError
from qopt.runtime.session import Array

RESOLUTION = np.float32(2**-25)  # half a step of a float32 number below 1
BLOCK = 256  # random numbers drawn ahead for each row


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen; temperature 0 is greedy, and the other defaults filter nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        allowed = {
            "temperature": (self.temperature >= 0, "0 (greedy) or more"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0, at most 1 (off)"),
            "min_p": (0 <= self.min_p < 1, "from 0 (off) to below 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0; 1 is off"),
        }
        for name, (good, range_) in allowed.items():
            if not (good and math.isfinite(getattr(self, name))):
                raise UsageError(
                    f"{name} is {getattr(self, name)}, it must be {range_}",
                    todo="give it such a value",
                )


class Sampler:
    """Chooses tokens for a batch; every row draws from a generator of its own.

    So a seeded row gets the same tokens wherever it stands, whatever runs beside it.
    """

    def __init__(self, sampling: Sampling, seeds: Sequence[int | None]) -> None:
        """One seed a row; None is fresh randomness."""
        self.sampling = sampling
        self._generators = [np.random.default_rng(seed) for seed in seeds]
        self._draws = np.empty((len(seeds), 0))
        self._drawn = 0
        self._seen: Array | None = None  # bool [rows, vocabulary], for the repetition penalty

    def see_prompts(self, ids: Array, lengths: Array, vocab_size: int) -> None:
        """Let the repetition penalty count the prompts' tokens, their padding excepted."""
        if self.sampling.repetition_penalty == 1.0:
            return
        self._seen = np.zeros((len(ids), vocab_size), bool)
        row, column = np.nonzero(np.arange(ids.shape[1]) < lengths[:, None])
        self._seen[row, ids[row, column]] = True

    def select(self, rows: Array) -> None:
        """Keep only these rows."""
        self._generators = [self._generators[row] for row in rows]
        self._draws = self._draws[rows]
        if self._seen is not None:
            self._seen = self._seen[rows]

    def choose(self, logits: Array, forbidden: Sequence[int] = ()) -> Array:
        """One token for each row of float32 `logits` [rows, vocabulary], never a forbidden one."""
        _refuse_broken(logits)
        if self._seen is not None:
            penalty = np.float32(self.sampling.repetition_penalty)
            penalised = np.where(logits > 0, logits / penalty, logits * penalty)
            logits = np.where(self._seen, penalised, logits)
        if len(forbidden):
            logits = logits.copy()
            logits[:, list(forbidden)] = -np.inf
        if self.sampling.temperature == 0:
            tokens = logits.argmax(axis=1)
        else:
            tokens = sample(logits, self.sampling, self._uniforms())
        if self._seen is not None:
            self._seen[np.arange(len(tokens)), tokens] = True
        return np.asarray(tokens)

    def _uniforms(self) -> Array:
        """One number in [0, 1) for each row."""
        if self._drawn == self._draws.shape[1]:
            self._draws = np.stack([g.random(BLOCK) for g in self._generators])
            self._drawn = 0
        self._drawn += 1
        return self._draws[:, self._drawn - 1]


def sample(logits: Array, sampling: Sampling, uniforms: Array) -> Array:
    """Draw from each row's filtered distribution, `uniforms` deciding; the best always survives."""
    with np.errstate(over="ignore"):  # a tiny temperature leaves only the best
        scores = (logits - logits.max(axis=1, keepdims=True)) / np.float32(sampling.temperature)
    ids = None  # the vocabulary as it stands
    if 0 < sampling.top_k < scores.shape[1] or sampling.top_p < 1:
        ids = _best_first(scores, sampling.top_k)
        scores = np.take_along_axis(scores, ids, axis=1)
    weights = np.exp(scores, dtype=np.float32)
    if sampling.top_p < 1:
        before = weights.cumsum(axis=1, dtype=np.float32)
        total = before[:, -1:].copy()
        before -= weights  # the probability of all better tokens
        beyond = before >= np.float32(sampling.top_p) * total
        beyond[:, 0] = False
        weights[beyond] = 0
    if sampling.min_p > 0:
        weights[weights < sampling.min_p] = 0  # the best token's weight is 1
    cumulative = weights.cumsum(axis=1, dtype=np.float32)
    # float32 may round u * total up to total, which no token exceeds; and at u = 0 a token of
    # probability 1e-44 would be drawn because it comes first
    marks = np.clip(
        uniforms[:, None].astype(np.float32) * cumulative[:, -1:],
        RESOLUTION * cumulative[:, -1:],
        np.nextafter(cumulative[:, -1:], np.float32(0)),
    )
    chosen = (cumulative > marks).argmax(axis=1)
    return chosen if ids is None else np.take_along_axis(ids, chosen[:, None], axis=1)[:, 0]


def _best_first(scores: Array, top_k: int) -> Array:
    """Ids by falling score, ties by rising id; only the `top_k` best when it is not 0."""
    if not 0 < top_k < scores.shape[1]:
        return np.argsort(-scores, axis=1, kind="stable")
    ids = np.sort(np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k], axis=1)
    order = np.argsort(-np.take_along_axis(scores, ids, axis=1), axis=1, kind="stable")
    return np.take_along_axis(ids, order, axis=1)


def _refuse_broken(logits: Array) -> None:
    best = logits.max(axis=1)
    if not np.isfinite(best).all():
        raise QoptError(
            "the model's logits are not numbers (NaN or infinite)",
            where=f"row {int(np.flatnonzero(~np.isfinite(best))[0])} of the batch",
            todo="check the artifact with `qopt verify`; float16 may be too narrow for this model",
        )
