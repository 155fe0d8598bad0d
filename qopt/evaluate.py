"""Quality of an artifact on a text: perplexity, and how far it is from the original."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qopt.artifact import MANIFEST, Artifact
from qopt.calibration import read_text
from qopt.errors import UsageError
from qopt.memory import Plan, memory_budget, plan, weights_of_artifact
from qopt.report import Table
from qopt.runtime.generate import Model, load
from qopt.runtime.session import Array
from qopt.runtime.text import Tokenizer

if TYPE_CHECKING:
    from qopt.sources import ModelSource

# token ids [windows, length] -> float32 logits [length, vocabulary] of one window after the other
Scorer = Callable[[Array], Iterable[Array]]
TOKENS = 64  # whose probabilities are computed at a time: a window's are several copies of it


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
    notes: list[str] = field(default_factory=list)

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
        rows += [("note", note) for note in self.notes]
        return [Table("", ("", ""), rows)]

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def evaluate(
    artifact: str | Path | Model,
    text_file: str | Path,
    *,
    against: str | Path | Model | ModelSource | None = None,
    windows: int = 16,
    length: int = 512,
    first: int = 0,
    threads: int | None = None,
    max_ram: str | None = None,
    device: str | None = None,
) -> Evaluation:
    """Score windows `first` to `first + windows` of a text, each of `length` tokens.

    The text is tokenized whole, without BOS; a window's first token is not scored. `against` is
    another artifact, or a model (what `qopt compile` takes): run in fp32, eager. What does not fit
    `max_ram` (as `4GB`; default: the memory that is free) runs part by part, and the model's
    captured graph then stands for it. `device`: `cpu` or `cuda`, default the artifact's target's.
    """
    subject = artifact if isinstance(artifact, Model) else Artifact.load(artifact)
    text = read_text(Path(text_file))
    memory = Plan()
    if against is not None and not isinstance(artifact, Model):
        memory = plan(
            weights_of_artifact(subject),
            memory_budget(max_ram),
            decoder=True,
            streams=subject.manifest.target.startswith("onnx"),
            checked=False,
            gated=True,
        )
    room = subject.folder.parent if memory.gate_in_parts else None
    ids = _windows(subject, text, windows, length, first)
    notes = list(memory.notes)
    if len(ids) < windows:
        there = f"the text has {first + len(ids)} of {length} tokens"
        notes.append(f"{len(ids)} of {windows} windows scored, from {first} on: {there}")
    original = None if against is None else _scorer(against, threads, room, device)
    if room is not None or isinstance(artifact, Model):
        score = _scorer(artifact, threads, room)
    else:
        loaded = load(artifact, threads=threads, device=device)
        notes += loaded.session.told()
        score = _scorer(loaded, threads, room)
    found = []
    theirs = repeat(None) if original is None else original(ids)  # streamed, it runs here
    for window, logits, other in zip(ids, score(ids), theirs, strict=False):
        found.append(_compare(window, logits, other))
    mean = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
    return Evaluation(
        perplexity=math.exp(mean["nll"]),
        windows=len(ids),
        length=length,
        tokens=len(ids) * (length - 1),
        text_sha256=hashlib.sha256(text.encode()).hexdigest(),
        against_perplexity=math.exp(mean["other"]) if original else None,
        kl=max(0.0, mean["kl"]) if original else None,  # rounding may leave -1e-8
        top1=mean["same"] if original else None,
        notes=notes,
    )


def count_windows(artifact: str | Path | Model, text_file: str | Path, length: int) -> int:
    """How many whole windows of `length` tokens a text has."""
    subject = artifact if isinstance(artifact, Model) else Artifact.load(artifact)
    tokens = len(Tokenizer(subject.folder).encode(read_text(Path(text_file)), special=False))
    if tokens < length:
        raise _too_short(tokens, length)
    return tokens // length


def _too_short(tokens: int, length: int) -> UsageError:
    return UsageError(
        f"the text has {tokens} tokens, less than one window of {length}",
        todo="give a longer text, or shorter windows with --length",
    )


def _windows(subject: Model | Artifact, text: str, windows: int, length: int, first: int) -> Array:
    """Token ids [windows, length]; a last window that is not full is left out."""
    if length < 2 or windows < 1:
        raise UsageError(
            f"{windows} windows of {length} tokens leave nothing to score",
            todo="take at least 1 window of at least 2 tokens",
        )
    context = subject.manifest.model.context_length
    if context is not None and length > context:
        raise UsageError(
            f"a window of {length} tokens exceeds the context of {context}",
            todo=f"give --length {context} or less",
        )
    ids = np.array(Tokenizer(subject.folder).encode(text, special=False), np.int64)
    whole = ids[: len(ids) // length * length].reshape(-1, length)
    if not len(whole):
        raise _too_short(len(ids), length)
    if len(whole) <= first:
        raise UsageError(
            f"the text has {len(ids)} tokens, window {first} of {length} tokens is not there",
            todo=f"it has {len(whole)}: give --first {len(whole) - 1} or less, or a longer text",
        )
    return whole[first : first + windows]


def _scorer(
    model: str | Path | Model | ModelSource,
    threads: int | None,
    room: Path | None,
    device: str | None = None,
) -> Scorer:
    """`room`: a folder for what does not fit in memory; None where all of it does."""
    if isinstance(model, Model):
        return _artifact_scorer(model)
    if isinstance(model, str | Path) and (Path(model) / MANIFEST).is_file():
        if room is not None:
            return _parts_scorer(Artifact.load(model), threads)
        return _artifact_scorer(load(model, threads=threads, device=device))
    return _model_scorer(model, room)


def _artifact_scorer(model: Model) -> Scorer:
    return lambda ids: (model.decoder().forward(row[None], keep=0)[0] for row in ids)


def _parts_scorer(artifact: Artifact, threads: int | None) -> Scorer:
    from qopt.final_check import DecoderRun, Probe

    def score(ids: Array) -> Iterator[Array]:
        run = DecoderRun(artifact, threads, in_parts=True)
        for (logits,) in run.play_all([Probe("window", [row], [[len(row)]]) for row in ids]):
            yield logits

    return score


def _model_scorer(model: str | Path | ModelSource, room: Path | None) -> Scorer:
    from qopt.final_check import Reference  # only here: the runtime must start without torch
    from qopt.sources import open_source

    source = open_source(str(model)) if isinstance(model, str | Path) else model
    if source.kind != "decoder":
        raise UsageError(
            "only a decoder can be compared on a text",
            where=source.where,
            why=f"this is a {source.kind}",
            todo="give --against a language model, or leave it out",
        )
    if room is not None:
        from qopt.streamed import StreamedReference

        return lambda ids: StreamedReference(source).answers(list(ids), room)
    return lambda ids: Reference(source).stream(list(ids))


def _compare(window: Array, logits: Array, other: Array | None) -> dict[str, float]:
    """Means over the window's tokens but the first, some of them at a time."""
    total = dict.fromkeys(("nll", "other", "kl", "same"), 0.0)
    count = len(window) - 1
    for at in range(0, count, TOKENS):
        stop = min(at + TOKENS, count)
        chosen = window[at + 1 : stop + 1]
        ours = _log_softmax(logits[at:stop])
        total["nll"] -= _sum_of(ours, chosen)
        if other is None:
            continue
        theirs = _log_softmax(other[at:stop])
        _refuse_other_vocabulary(ours, theirs)
        total["other"] -= _sum_of(theirs, chosen)
        total["kl"] += float((np.exp(theirs) * (theirs - ours)).sum(dtype=np.float64))
        total["same"] += float((ours.argmax(axis=1) == theirs.argmax(axis=1)).sum())
    return {name: value / count for name, value in total.items()}


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=1, keepdims=True)
    if not np.isfinite(shifted).all():
        raise UsageError(
            "the logits are not numbers (NaN or infinite): nothing to score",
            todo="check the artifact with `qopt verify`; float16 may be too narrow for this model",
        )
    total = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    return np.asarray(shifted - np.log(total).astype(np.float32))


def _sum_of(log_probabilities: Array, chosen: Array) -> float:
    """The sum of the log-probabilities of the tokens that came."""
    found = np.take_along_axis(log_probabilities, chosen[:, None], axis=1)
    return float(found.sum(dtype=np.float64))


def _refuse_other_vocabulary(ours: Array, theirs: Array) -> None:
    if ours.shape != theirs.shape:
        raise UsageError(
            f"the two models differ in vocabulary: {ours.shape[1]} and {theirs.shape[1]} tokens",
            todo="give --against a model of the same vocabulary",
        )
