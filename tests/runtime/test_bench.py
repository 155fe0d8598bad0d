"""Timing: what is counted, who runs when."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qopt import bench as bench_module
from qopt.bench import Bench, Speeds, bench, open_engine, time_once
from qopt.compat import load_original
from qopt.errors import UsageError

Build = Callable[..., Any]
SMALL: Any = {"prompt": 12, "new": 4, "rounds": 3}


def test_an_artifact_alone(tiny: Build) -> None:
    result = bench(tiny().folder, batch=2, threads=1, **SMALL)
    assert result.artifact.engine == "qopt"
    assert result.artifact.threads == 1
    assert len(result.artifact.prefill) == len(result.artifact.decode) == 3
    assert result.peers == []
    assert result.tables()[0].columns == ["engine", "threads", "prefill tok/s", "decode tok/s"]
    assert json.loads(json.dumps(result.to_dict()))["artifact"]["decode_tok_s"] > 0


class Clocked:
    """An engine that only lets a fake clock run."""

    vocab_size = 50
    threads: int | None = None

    def __init__(self, name: str, seconds: tuple[float, float], log: list[Any]) -> None:
        self.name, self.seconds, self.log = name, seconds, log

    def prepare(self, ids: Any, new: int) -> None:
        Clocked.now += 100.0  # not timed
        self.log.append((self.name, ids.tolist()))

    def prefill(self) -> None:
        Clocked.now += self.seconds[0]

    def decode(self) -> None:
        Clocked.now += self.seconds[1]

    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    Clocked.now = 0.0
    monkeypatch.setattr(bench_module, "perf_counter", lambda: Clocked.now)


@pytest.mark.usefixtures("clock")
def test_tokens_a_second() -> None:
    engine = Clocked("a", (0.5, 2.0), [])
    assert time_once(engine, np.zeros((3, 10), np.int64), 8) == (60.0, 12.0)


@pytest.mark.usefixtures("clock")
def test_runs_alternate_with_new_prompts_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    seconds = {"a": (0.5, 1.0), "b": (1.0, 4.0), "c": (0.25, 0.5)}
    engines = {name: Clocked(name, taken, log) for name, taken in seconds.items()}
    monkeypatch.setattr(bench_module, "open_engine", lambda path, *_: engines[str(path)])
    result = bench("a", vs=["b", "c"], batch=1, **SMALL)
    order = ["a", "b", "c", "c", "b", "a"] * 2  # a round to warm up, three that count
    assert [name for name, _ in log] == order
    assert all(log[i][1] == log[i + 1][1] == log[i + 2][1] for i in range(0, 12, 3))
    assert len({str(ids) for _, ids in log}) == 4
    assert [result.ratios(peer) for peer in result.peers] == [(2.0, 4.0), (0.5, 0.5)]
    assert result.to_dict()["peers"][0]["decode_pairs"] == [4.0, 4.0, 4.0]
    assert [row[-2:] for row in result.tables()[0].rows] == [
        ("", ""),
        ("2.00", "4.00"),
        ("0.50", "0.50"),
    ]


def test_ratios_are_of_medians() -> None:
    ours = Speeds("a", None, prefill=[1.0, 100.0, 3.0], decode=[2.0, 2.0, 2.0])
    theirs = Speeds("b", None, prefill=[1.0, 1.0, 1.5], decode=[1.0, 4.0, 1.0])
    result = Bench(1, 1, 1, 3, ours, [theirs])
    assert result.ratios(theirs) == (3.0, 2.0)
    assert result.to_dict()["peers"][0]["prefill_pairs"] == [1.0, 100.0, 2.0]


def test_against_a_transformers_folder(tiny: Build, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=260, n_embd=16, n_layer=1, n_head=2, n_positions=96)
    original = GPT2LMHeadModel(config).train(False)
    original.save_pretrained(tmp_path / "original")
    result = bench(tiny().folder, vs=tmp_path / "original", batch=2, **SMALL)
    assert [peer.engine for peer in result.peers] == ["transformers"]
    engine: Any = open_engine(tmp_path / "original", 1)
    ids = np.random.default_rng(0).integers(3, 260, (1, 9))
    engine.prepare(ids, 3)
    engine.prefill()
    engine.decode()
    row = torch.from_numpy(ids)
    for _ in range(4):
        row = torch.cat([row, original(row).logits[:, -1:].argmax(-1)], dim=1)
    assert engine._next.item() == row[0, -1].item()


def test_the_artifact_engine_decodes_greedily(tiny: Build) -> None:
    built = tiny()
    engine: Any = open_engine(built.folder)
    ids = np.random.default_rng(0).integers(3, 256, (1, 9))
    engine.prepare(ids, 3)
    engine.prefill()
    engine.decode()
    assert engine._next[0] == built.greedy(ids[0].tolist(), 4)[-1]


def test_the_model_must_be_known(tiny: Build) -> None:
    folder = tiny().folder
    with pytest.raises(UsageError, match="the model that it was compiled from is not known here"):
        bench(folder, vs="eager", **SMALL)


def test_bad_input(tiny: Build, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to time here"):
        bench(tmp_path / "empty")
    folder = tiny().folder
    with pytest.raises(UsageError, match="must all be 1 or more"):
        bench(folder, rounds=0)
    with pytest.raises(UsageError, match=r"90 \+ 10 tokens exceed the context of 96"):
        bench(folder, prompt=90, new=10)


def test_loading_a_gguf_file_shows_no_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, modeling_gguf_pytorch_utils

    def read(*_: Any, **__: Any) -> torch.nn.Module:
        reader: Any = modeling_gguf_pytorch_utils
        list(reader.tqdm([1, 2]))
        return torch.nn.Identity()

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read)
    load_original(tmp_path, gguf_file="model.gguf")
    assert capsys.readouterr().err == ""
