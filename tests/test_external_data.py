"""The data file: the same bytes on every road, and a file system that refuses direct writes."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import onnx_ir as ir
import pytest
import torch

from qopt.emit.external_data import BLOCK, write_weights
from qopt.weights import LazyWeight

DIRECT = getattr(os, "O_DIRECT", 0)


def some_weights() -> list[tuple[ir.Value, LazyWeight]]:
    """One that is no whole page, one longer than a block in bf16, one small, and a twin."""
    torch.manual_seed(0)
    odd = torch.randn(1237, 3)
    long = torch.randn(BLOCK // 4 // 1000 + 17, 1000).to(torch.bfloat16)
    made = {
        "odd": LazyWeight.memory(odd),
        "long": LazyWeight.memory(long).cast(torch.float32),
        "small": LazyWeight.memory(torch.ones(3)),
        "twin": LazyWeight.memory(odd.clone()),
        "last": LazyWeight.memory(torch.randn(700, 5)),
    }
    return [(ir.Value(name=name), weight) for name, weight in made.items()]


def check_written(path: Path, weights: list[tuple[ir.Value, LazyWeight]]) -> None:
    data = path.read_bytes()
    for made, weight in weights:
        tensor = made.const_value
        if isinstance(tensor, ir.ExternalTensor):
            assert tensor.offset is not None
            assert tensor.length is not None
            stored = data[tensor.offset : tensor.offset + tensor.length]
        else:
            assert tensor is not None
            stored = tensor.tobytes()
        assert stored == weight.evaluate().numpy().tobytes(), made.name


@pytest.mark.parametrize("direct", [False, True])
def test_every_weight_lies_where_the_graph_says(tmp_path: Path, direct: bool) -> None:
    weights, path = some_weights(), tmp_path / "data"
    stored = write_weights(path, weights, direct=direct)
    check_written(path, weights)
    assert stored.size == path.stat().st_size
    assert stored.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert stored.shared == 1237 * 3 * 4


@pytest.mark.skipif(not DIRECT, reason="this system has no direct writes")
@pytest.mark.parametrize("refused", ["open", "write"])
def test_a_file_system_without_direct_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    weights, path = some_weights(), tmp_path / "data"
    plain_open, plain_write, refusals = os.open, os.write, []

    def refuse() -> None:
        refusals.append(refused)
        raise OSError(errno.EINVAL, "Invalid argument")

    def opened(name: str, flags: int, mode: int = 0o777) -> int:
        if refused == "open" and flags & DIRECT:
            refuse()
        return plain_open(name, flags & ~DIRECT, mode)

    def wrote(file: int, data: memoryview) -> int:
        if refused == "write" and not refusals:
            refuse()
        return plain_write(file, data)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "write", wrote)
    write_weights(path, weights, direct=True)
    assert refusals == [refused]
    check_written(path, weights)


def test_a_full_disk_is_told_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write_weights(tmp_path / "data", some_weights(), direct=True)
