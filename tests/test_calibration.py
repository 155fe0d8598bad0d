"""The calibration text: how it is read, split, written by the model itself, and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers

import qopt
from qopt.calibration import calibration, first_held_back, read_text
from qopt.errors import UsageError
from qopt.graph import Graph
from qopt.recipe import Calibration as Settings
from qopt.rewrite import Pass
from qopt.sources import open_source


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QOPT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "calibration"


def no_capture() -> Graph:
    raise AssertionError("nothing is captured")


@pytest.mark.parametrize(("total", "first"), [(10, 8), (32, 25), (2, 1), (1, 0)])
def test_the_split(total: int, first: int) -> None:
    assert first_held_back(total) == first


def test_text_of_its_own(tiny: Any, captured: Any, own_cache: Path) -> None:
    source = open_source(str(tiny("llama")[0]))
    settings = Settings(sequences=5, length=12, seed=3)
    made = calibration(settings, source, lambda: captured("llama"))
    assert made is not None
    assert made.windows.shape == (5, 12)
    assert made.windows.dtype == np.int64
    assert (made.windows[:, 0] == 1).all()  # BOS
    assert len(np.unique(made.windows[:, 1:])) > 10
    assert (len(made.search), len(made.held_back)) == (4, 1)
    assert [p.suffix for p in own_cache.iterdir()] == [".npy"]
    again = calibration(settings, source, no_capture)  # from the cache
    assert again is not None
    assert np.array_equal(again.windows, made.windows)
    other = calibration(settings.model_copy(update={"seed": 4}), source, lambda: captured("llama"))
    assert other is not None
    assert not np.array_equal(other.windows, made.windows)


def test_a_damaged_file_in_the_cache_is_written_anew(
    tiny: Any, captured: Any, own_cache: Path
) -> None:
    source = open_source(str(tiny("llama")[0]))
    settings = Settings(sequences=2, length=6)
    first = calibration(settings, source, lambda: captured("llama"))
    assert first is not None
    ids = first.windows
    (path,) = own_cache.iterdir()
    path.write_bytes(path.read_bytes()[:20])
    again = calibration(settings, source, lambda: captured("llama"))
    assert again is not None
    assert np.array_equal(again.windows, ids)


def test_a_large_model_needs_a_text(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qopt.calibration.MOST_PARAMETERS", 1000)
    made = calibration(Settings(), open_source(str(tiny("llama")[0])), no_capture)
    assert made is not None
    with pytest.raises(UsageError, match="does not write its own") as caught:
        _ = made.windows
    assert "--text" in str(caught.value.todo)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b" \n", "the text is empty"),
        ("a.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("a.jsonl", b'{"body": "x"}\n', "has no text"),
        ("a.jsonl", b'{"text": 3}\n', "has no text"),
        ("a.jsonl", b"[1]\n", "has no text"),
        ("a.jsonl", b"x\n", "no JSON"),
        ("a.jsonl", b"\n", "the text is empty"),
    ],
)
def test_texts_that_are_refused(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=message) as caught:
        read_text(tmp_path / name)
    assert caught.value.exit_code == 2
    assert str(tmp_path / name) in str(caught.value)


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "one\u2028line"}) + "\n\n" + json.dumps({"text": "two"}))
    assert read_text(path) == "one\u2028line\n\ntwo"


@pytest.fixture
def with_words(tiny: Any, tmp_path: Path) -> Path:
    """A tiny model with a tokenizer of 90 words."""
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(tiny("llama")[0], folder)
    words = RustTokenizer(models.WordLevel({f"w{i}": i for i in range(90)}, "w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    return folder


def test_windows_of_a_file(with_words: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i % 90}" for i in range(103)))
    source = open_source(str(with_words))
    made = calibration(Settings(text=str(text), sequences=3, length=10), source, no_capture)
    assert made is not None
    assert made.windows.tolist() == (np.arange(100) % 90).reshape(10, 10).tolist()
    assert np.array_equal(made.search, made.windows[:3])
    assert np.array_equal(made.held_back, made.windows[8:])
    short = calibration(Settings(text=str(text), length=60), source, no_capture)
    assert short is not None
    with pytest.raises(UsageError, match="too few for two windows"):
        _ = short.windows


def test_a_choice_is_written_into_the_recipe(
    with_words: Path, tmp_path: Path, fresh_registry: Any
) -> None:
    """A pass sees the text, sets its own options, and the resolved recipe holds them."""
    seen = []

    class Choose(Pass):
        """Choose a number from the text."""

        name: ClassVar[str] = "choose"
        number: int = 0
        parts: dict[int, list[int]] | None = None

        def run(self, graph: Graph) -> int:
            assert graph.calibration is not None
            seen.append(self.parts)
            if self.parts is None:
                self.number = int(graph.calibration.search.sum())
                self.parts = {1: [0]}
            return 0

    text = tmp_path / "text.txt"
    text.write_text("w1 " * 1024)
    out = tmp_path / "out"
    qopt.compile(str(with_words), "baseline", out, add=["choose"], text=text, check="off")
    resolved = (out / "recipe.yaml").read_text()
    assert f"text: {text}" in resolved
    assert "number: 768" in resolved
    (tmp_path / "again.yaml").write_text(resolved)
    again = tmp_path / "out2"
    qopt.compile(str(with_words), str(tmp_path / "again.yaml"), again, check="off")
    assert seen == [None, {1: [0]}]
    assert (again / "recipe.yaml").read_text() == resolved


def test_an_empty_text_is_refused_before_any_work(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="the text is empty"):
        qopt.compile(str(tiny("llama")[0]), "baseline", out, text=tmp_path / "a.txt")
    assert not out.exists()
