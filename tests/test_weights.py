"""Lazy weights: every transform equals torch's, by rows as well as whole, and reads only at use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from qopt.errors import UsageError
from qopt.weights import AbsentSource, FileSource, LazyWeight, tensor_bytes


class Counting:
    """A source that notes which rows are read."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.reads = tensor, list[tuple[int, int]]()
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def read(self, start: int, stop: int) -> Tensor:
        self.reads.append((start, stop))
        return self.tensor[start:stop]

    def digest(self) -> str:
        return "counting"


@pytest.fixture
def tensor() -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(0))


def flip(values: list[Tensor]) -> Tensor:
    return values[0].flip(0)


def cases(t: Tensor) -> dict[str, tuple[LazyWeight, Tensor]]:
    w = LazyWeight.memory(t)
    rows, columns = torch.arange(1.0, 13.0), torch.arange(1.0, 9.0)
    a, b = torch.randn(3, 8), torch.randn(12, 3)
    lazy = LazyWeight.memory
    return {
        "source": (w, t),
        "cast": (w.cast(torch.float16), t.half()),
        "transpose": (w.transpose(), t.T),
        "reshape": (w.reshape(4, 3, 8), t.reshape(4, 3, 8)),
        "slice rows": (w.slice(0, 3, 9), t[3:9]),
        "slice columns": (w.slice(1, 2, 7), t[:, 2:7]),
        "scale rows": (w.scale(lazy(rows), 0), t * rows[:, None]),
        "scale columns plus 1": (w.scale(lazy(columns), 1, 1.0), t * (columns + 1)),
        "concat rows": (LazyWeight.concat([w, w.slice(0, 0, 2)]), torch.cat([t, t[:2]])),
        "concat columns": (LazyWeight.concat([w, w], 1), torch.cat([t, t], 1)),
        "stack": (
            LazyWeight.concat([w.reshape(1, 12, 8), w.reshape(1, 12, 8)]),
            torch.stack([t, t]),
        ),
        "low rank": (w.add_low_rank(lazy(a), lazy(b), 0.5), t + 0.5 * (b @ a)),
        "apply": (
            LazyWeight.apply("flip", lambda v: v[0].flip(0), [w], t.shape, t.dtype),
            t.flip(0),
        ),
    }


@pytest.mark.parametrize("name", cases(torch.zeros(12, 8)))
def test_transforms_equal_torch(tensor: Tensor, name: str) -> None:
    weight, expected = cases(tensor)[name]
    assert weight.shape == tuple(expected.shape)
    assert weight.dtype == expected.dtype
    torch.testing.assert_close(weight.evaluate(), expected)
    middle = slice(1, weight.shape[0] - 1) if weight.shape[0] > 2 else slice(1, 2)
    torch.testing.assert_close(weight.rows(middle.start, middle.stop), expected[middle])
    torch.testing.assert_close(torch.cat(list(weight.chunks(limit=64))), expected)


def test_nothing_is_read_before_use_and_rows_read_no_more(tensor: Tensor) -> None:
    source = Counting(tensor)
    weight = LazyWeight.concat([LazyWeight.of(source).cast(torch.float64)] * 2).slice(0, 10, 20)
    assert source.reads == []
    weight.rows(0, 3)  # rows 10 to 13 of the two: the end of the first, the start of the second
    assert source.reads == [(10, 12), (0, 1)]


def test_a_merged_stack_of_experts_is_read_one_expert_at_a_time(tensor: Tensor) -> None:
    sources = [Counting(tensor), Counting(tensor)]
    stacks = [LazyWeight.of(source).reshape(1, 12, 8) for source in sources]
    stack = LazyWeight.concat(stacks)
    merged = LazyWeight.concat([stack, stack], 1)
    first = next(iter(merged.chunks(limit=2 * tensor.nbytes)))
    assert first.shape == (1, 24, 8)
    assert sources[1].reads == []


def test_digest_follows_bytes_shape_and_transforms(tensor: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"head" + bytes(tensor_bytes(tensor)))
    memory = LazyWeight.memory(tensor)
    stored = LazyWeight.of(FileSource(path, 4, (12, 8), torch.float32))
    assert stored.digest == memory.digest == LazyWeight.memory(tensor.T.contiguous().T).digest
    variants = [
        memory,
        LazyWeight.memory(tensor.reshape(8, 12)),
        LazyWeight.memory(tensor + 1),
        memory.cast(torch.float16),
        memory.transpose(),
        memory.slice(0, 0, 2),
        memory.slice(0, 0, 3),
    ]
    assert len({weight.digest for weight in variants}) == len(variants)


def test_file_source_reads_rows_and_names_a_truncated_file(tensor: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(tensor_bytes(tensor)))
    assert torch.equal(FileSource(path, 0, (12, 8), torch.float32).read(4, 6), tensor[4:6])
    scalar = FileSource(path, 4, (), torch.float32).read(0, 1)
    assert torch.equal(scalar, tensor[0, 1])
    with pytest.raises(UsageError, match="weights: the file ends 32 bytes before"):
        FileSource(path, 0, (13, 8), torch.float32).read(0, 13)


def test_an_absent_weight_says_so() -> None:
    weight = LazyWeight.of(AbsentSource((2, 2), torch.float32, "a"))
    assert weight.transpose().absent
    assert not LazyWeight.memory(torch.zeros(1)).absent
    with pytest.raises(UsageError, match="weight a has no values"):
        weight.cast(torch.float16).evaluate()
