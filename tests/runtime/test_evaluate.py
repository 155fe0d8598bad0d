"""Perplexity, KL divergence and top-1 agreement against sums made by hand."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from qopt.errors import UnsupportedError, UsageError
from qopt.evaluate import evaluate

Build = Callable[..., Any]
TEXT = "The quick brown fox jumps over the lazy dog. " * 3


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def log_probabilities(built: Any, window: list[int]) -> np.ndarray[Any, Any]:
    logits = built.reference(window)[:-1]
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


@pytest.mark.parametrize("form", ["standard", "gqa"])
@pytest.mark.parametrize("keep", [True, False])
def test_perplexity_kl_and_agreement(tiny: Build, text: Path, form: str, keep: bool) -> None:
    ours, theirs = tiny(form, keep=keep), tiny("standard", seed=3, name="original")
    model = ours.load()
    ids = model.tokenizer.encode(TEXT)
    model.tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 256)]
    )  # a BOS that must not be scored
    windows = [ids[at : at + 20] for at in range(0, 60, 20)]
    nll, kl, same = [], [], []
    for window in windows:
        p, q = log_probabilities(theirs, window), log_probabilities(ours, window)
        nll += [-q[at, window[at + 1]] for at in range(19)]
        kl += list((np.exp(p) * (p - q)).sum(axis=1))
        same += list(p.argmax(axis=1) == q.argmax(axis=1))
    result = evaluate(model, text, against=theirs.folder, windows=3, length=20)
    assert result.perplexity == pytest.approx(np.exp(np.mean(nll)), rel=1e-5)
    assert result.kl == pytest.approx(np.mean(kl), rel=1e-5)
    assert result.top1 == pytest.approx(np.mean(same))
    assert (result.windows, result.length, result.tokens) == (3, 20, 57)
    assert result.text_sha256 == hashlib.sha256(TEXT.encode()).hexdigest()
    assert json.loads(json.dumps(result.to_dict()))["windows"] == 3


def test_an_artifact_against_itself(tiny: Build, text: Path) -> None:
    built = tiny()
    model = built.load()
    result = evaluate(model, text, against=built.folder, windows=2, length=16)
    assert result.kl == pytest.approx(0, abs=1e-9)
    assert result.top1 == 1.0
    assert result.against_perplexity == result.perplexity
    alone = evaluate(model, text, windows=2, length=16)
    assert (alone.perplexity, alone.kl) == (result.perplexity, None)


def test_windows_may_start_later_and_a_broken_one_is_left_out(tiny: Build, text: Path) -> None:
    model = tiny().load()
    every = evaluate(model, text, windows=99, length=16)
    assert every.windows == len(TEXT) // 16
    assert every.notes == ["8 of 99 windows scored, from 0 on: the text has 8 of 16 tokens"]
    assert ("note", every.notes[0]) in every.tables()[0].rows
    assert evaluate(model, text, windows=8, length=16).notes == []
    last = evaluate(model, text, windows=99, length=16, first=every.windows - 1)
    assert last.windows == 1
    with pytest.raises(UsageError, match="window 8 of 16 tokens is not there"):
        evaluate(model, text, length=16, first=8)


def test_bad_input(tiny: Build, text: Path, tmp_path: Path) -> None:
    model = tiny().load()
    with pytest.raises(UsageError, match="cannot read the text"):
        evaluate(model, tmp_path / "none.txt")
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="the text is not UTF-8"):
        evaluate(model, tmp_path / "binary", length=16)
    (tmp_path / "short").write_text("brief")
    with pytest.raises(UsageError, match="the text has 5 tokens, less than one window of 16"):
        evaluate(model, tmp_path / "short", length=16)
    with pytest.raises(UsageError, match="window of 512 tokens exceeds the context of 96"):
        evaluate(model, text)
    with pytest.raises(UsageError, match="the folder holds no model"):
        evaluate(model, text, length=16, against=tmp_path)


class LastOnly:
    """A session as TorchScript's, which cannot be told how many logits to keep."""

    def __init__(self, session: Any) -> None:
        self.inner = session
        self.inputs = {n: s for n, s in session.inputs.items() if n != "num_logits_to_keep"}
        self.tensor = session.tensor

    def step(self, feeds: Any, cache: Any) -> Any:
        return self.inner.step(feeds, cache)


def test_last_logits_alone_cannot_be_scored(tiny: Build, text: Path) -> None:
    model = tiny().load()
    model.session = LastOnly(model.session)
    with pytest.raises(UnsupportedError, match="1 of 16 columns of logits"):
        evaluate(model, text, length=16)


def test_against_a_transformers_folder(tiny: Build, text: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import GPT2Config, GPT2LMHeadModel

    built = tiny()
    folder = tmp_path / "original"
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=260, n_embd=16, n_layer=1, n_head=2, n_positions=96)
    original = GPT2LMHeadModel(config).train(False)
    original.save_pretrained(folder)
    result = evaluate(built.folder, text, against=folder, windows=2, length=16)
    ids = torch.tensor(built.load().tokenizer.encode(TEXT)[:32]).reshape(2, 16)
    with torch.no_grad():
        losses = [original(input_ids=row[None], labels=row[None]).loss.item() for row in ids]
    assert result.against_perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)
    p = [torch.log_softmax(original(input_ids=row[None]).logits[0, :-1], -1) for row in ids]
    q = [log_probabilities(built, row.tolist()) for row in ids]
    kl = [
        (a.exp() * (a - torch.tensor(b))).sum(-1).mean().item() for a, b in zip(p, q, strict=True)
    ]
    assert result.kl == pytest.approx(np.mean(kl), rel=1e-4)


def test_without_another_no_compiler_is_counted(tiny: Build, text: Path) -> None:
    assert evaluate(tiny().folder, text, windows=1, length=16, max_ram="100MB").perplexity > 1
