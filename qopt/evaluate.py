"""Quality of an artifact on a text: perplexity, and how far it is from the original."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qopt.artifact import MANIFEST
from qopt.errors import UsageError
from qopt.report import Table
from qopt.runtime.generate import Model, load
from qopt.runtime.session import Array

Scorer = Callable[[Array], Array]  # token ids of one window -> float32 logits [columns, vocabulary]


@dataclass(frozen=True)
class Evaluation:
    """How well an artifact predicts a text, and where asked, how it differs from the original."""

    perplexity: float
    windows: int
    length: int
    tokens: int  # scored
    text_sha256: str
    against_perplexity: float | None = None
    kl: float | None = None  # mean KL(original || artifact) a token, in nats
    top1: float | None = None  # share of tokens where both find the same token the likeliest

    def tables(self) -> list[Table]:
        """What was measured, one figure a line."""
        rows = [
            ("perplexity", f"{self.perplexity:.5f}"),
            ("scored", f"{self.tokens} tokens in {self.windows} windows of {self.length}"),
            ("text SHA-256", self.text_sha256),
        ]
        if self.against_perplexity is not None:
            rows[1:1] = [
                ("perplexity of the other", f"{self.against_perplexity:.5f}"),
                ("KL divergence", f"{self.kl:.3g} nats a token"),
                ("same likeliest token", f"{100 * (self.top1 or 0):.2f} %"),
            ]
        return [Table("", ("", ""), rows)]

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def evaluate(
    artifact: str | Path | Model,
    text_file: str | Path,
    *,
    against: str | Path | Model | None = None,
    windows: int = 16,
    length: int = 512,
    first: int = 0,
    threads: int | None = None,
) -> Evaluation:
    """Score windows `first` to `first + windows` of a text, each of `length` tokens.

    The text is tokenized whole, without BOS; a window's first token is not scored. `against` is
    another artifact, or a transformers folder: run in fp32, eager.
    """
    model = artifact if isinstance(artifact, Model) else load(artifact, threads=threads)
    text = _read(Path(text_file))
    ids = _windows(model, text.decode("utf-8"), windows, length, first)
    score = _artifact_scorer(model)
    original = None if against is None else _scorer(against, threads)
    nll, other_nll, kl, same = [], [], [], []
    for window in ids:
        ours = _log_softmax(score(window)[:-1])
        nll.append(_nll(ours, window))
        if original is None:
            continue
        theirs = _log_softmax(original(window)[:-1])
        _refuse_other_vocabulary(ours, theirs)
        other_nll.append(_nll(theirs, window))
        kl.append((np.exp(theirs) * (theirs - ours)).sum(axis=1, dtype=np.float64).mean())
        same.append((ours.argmax(axis=1) == theirs.argmax(axis=1)).mean())
    return Evaluation(
        perplexity=math.exp(np.mean(nll)),
        windows=len(ids),
        length=length,
        tokens=len(ids) * (length - 1),
        text_sha256=hashlib.sha256(text).hexdigest(),
        against_perplexity=math.exp(np.mean(other_nll)) if original else None,
        kl=max(0.0, float(np.mean(kl))) if original else None,  # rounding may leave -1e-8
        top1=float(np.mean(same)) if original else None,
    )


def count_windows(artifact: str | Path | Model, text_file: str | Path, length: int) -> int:
    """How many whole windows of `length` tokens a text has."""
    model = artifact if isinstance(artifact, Model) else load(artifact)
    text = _read(Path(text_file)).decode("utf-8")
    found = len(model.tokenizer.encode(text, special=False)) // length
    if not found:
        raise UsageError(f"the text has no window of {length} tokens", where=str(text_file))
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError("cannot read the text", where=str(path), why=error.strerror) from None


def _windows(model: Model, text: str, windows: int, length: int, first: int) -> Array:
    """Token ids [windows, length]; a last window that is not full is left out."""
    if length < 2 or windows < 1:
        raise UsageError(f"{windows} windows of {length} tokens leave nothing to score")
    context = model.info.context_length
    if context is not None and length > context:
        raise UsageError(f"a window of {length} tokens exceeds the context of {context}")
    ids = np.array(model.tokenizer.encode(text, special=False), np.int64)
    whole = ids[: len(ids) // length * length].reshape(-1, length)
    if len(whole) <= first:
        raise UsageError(
            f"the text has {len(ids)} tokens, window {first} of {length} tokens is not there",
            todo="give a longer text or shorter windows",
        )
    return whole[first : first + windows]


def _scorer(against: str | Path | Model, threads: int | None) -> Scorer:
    if isinstance(against, Model):
        return _artifact_scorer(against)
    if (Path(against) / MANIFEST).is_file():
        return _artifact_scorer(load(against, threads=threads))
    return _transformers_scorer(Path(against))


def _artifact_scorer(model: Model) -> Scorer:
    return lambda window: model.decoder().forward(window[None], keep=0)[0]


def _transformers_scorer(folder: Path) -> Scorer:
    import torch  # only here: the runtime must start without it

    from qopt.compat import load_original

    if not (folder / "config.json").is_file():
        raise UsageError(
            "neither an artifact nor a transformers folder",
            where=str(folder),
            why=f"it has neither {MANIFEST} nor config.json",
        )
    model = load_original(folder)

    def score(window: Array) -> Array:
        with torch.inference_mode():
            logits = model(input_ids=torch.from_numpy(window[None]), use_cache=False).logits
        return np.asarray(logits[0].float().numpy())

    return score


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=1, keepdims=True)
    if not np.isfinite(shifted).all():
        raise UsageError("the logits are not numbers (NaN or infinite): nothing to score")
    total = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    return np.asarray(shifted - np.log(total).astype(np.float32))


def _nll(log_probabilities: Array, window: Array) -> float:
    """Mean over the window's tokens but the first."""
    chosen = np.take_along_axis(log_probabilities, window[1:, None], axis=1)
    return float(-chosen.mean(dtype=np.float64))


def _refuse_other_vocabulary(ours: Array, theirs: Array) -> None:
    if ours.shape != theirs.shape:
        raise UsageError(
            f"the two models differ in vocabulary: {ours.shape[1]} and {theirs.shape[1]} tokens"
        )
