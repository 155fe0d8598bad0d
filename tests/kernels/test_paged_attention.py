"""Decode and prefill over pages, for sequences of any lengths in one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor


@dataclass
class Case:
    """Most new tokens of a sequence, lengths of each before, and how many each has of its own."""

    new: int
    lengths: tuple[int, ...]
    counts: tuple[int, ...] | None = None
    block: int = 16
    heads: int = 4
    kv: int = 2
    size: int = 16
    value_size: int = 16
    window: int | None = None
    softcap: float | None = None
    causal: bool = True
    sinks: bool = False
    pages: int = 0  # of a sequence's table, at least

    def arguments(
        self, dtype: torch.dtype, scales: str | None = None
    ) -> tuple[list[Tensor | None], dict[str, Any]]:
        torch.manual_seed(self.new + sum(self.lengths))
        b, k, widths = len(self.lengths), self.kv, (self.size, self.value_size)
        counts = self.counts or (self.new,) * b
        used = [-(-(x + y) // self.block) for x, y in zip(self.lengths, counts, strict=True)]
        order = torch.randperm(sum(used) + 2)[: sum(used)].int()
        table = torch.full((b, max([self.pages, 1, *used])), -1, dtype=torch.int32)
        for row, pages in enumerate(torch.split(order, used)):
            table[row, : len(pages)] = pages
        q = torch.randn(b, self.heads, self.new, self.size).to(dtype)
        new = [torch.randn(b, k, self.new, width).to(dtype) for width in widths]
        shape = (sum(used) + 2, k, self.block)
        if scales is None:
            pools = [torch.randn(*shape, width).to(dtype) for width in widths]
            factors: list[Tensor | None] = [None, None]
        else:
            pools = [torch.randint(-127, 128, (*shape, w), dtype=torch.int8) for w in widths]
            factors = [
                torch.rand((*shape, 1) if scales == "token" else (k, 1, w)) / 50 for w in widths
            ]
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        own = None if self.counts is None else torch.tensor(self.counts)
        sinks = torch.randn(self.heads).to(dtype) if self.sinks else None
        options = {"window": self.window, "softcap": self.softcap, "causal": self.causal}
        args = [q, *new, *pools, table, lengths, own, sinks, *factors]
        return args, {"scale": self.size**-0.5, **options}


CASES = [
    Case(1, (0,)),
    Case(1, (15, 16, 40), heads=9, kv=3, size=64, value_size=64),
    Case(3, (41, 2, 7), (3, 1, 0), window=5, sinks=True),
    Case(8, (5, 30), (8, 2), softcap=3.0, size=41, value_size=24, block=5),
    Case(4, (6, 0), causal=False, window=3, block=1),
    Case(41, (30, 0, 3), (41, 17, 1), heads=6, softcap=4.0, sinks=True),
    Case(12, (70, 9), (12, 0), window=20, block=32),
    Case(9, (3, 4), causal=False, kv=4),
]
REDUCED = 256


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference(interpreter: Any, dtype: torch.dtype, case: Case) -> None:
    args, kwargs = case.arguments(dtype)
    interpreter.agrees_in_place("paged_attention", args, launches=2, reduced=REDUCED, **kwargs)


@pytest.mark.parametrize("scales", ["token", "channel"])
@pytest.mark.parametrize("case", [CASES[2], CASES[3], CASES[6]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_int8(interpreter: Any, dtype: torch.dtype, case: Case, scales: str) -> None:
    args, kwargs = case.arguments(dtype, scales)
    interpreter.agrees_in_place("paged_attention", args, launches=2, reduced=REDUCED, **kwargs)


@pytest.mark.parametrize("scales", [None, "token"])
def test_splits_follow_the_table(interpreter: Any, scales: str | None) -> None:
    """Short and long sequences in one launch; most splits of the short one have nothing to do."""
    case = Case(2, (2600, 3), (2, 1), block=64, kv=1, heads=2, sinks=True)
    args, kwargs = case.arguments(torch.float16, scales)
    interpreter.agrees_in_place("paged_attention", args, launches=3, reduced=REDUCED, **kwargs)


@pytest.mark.parametrize("new", [2, 12])
def test_each_sequence_as_alone(interpreter: Any, new: int) -> None:
    """What a batch makes of a sequence is what the growing cache makes of it alone."""
    case = Case(new, (19, 0, 33), (new, 1, 0), block=8)
    args, kwargs = case.arguments(torch.float32)
    q, k, v, keys, values, table, _, counts = args[:8]
    assert isinstance(q, Tensor)
    assert isinstance(k, Tensor)
    assert isinstance(v, Tensor)
    assert isinstance(keys, Tensor)
    assert isinstance(values, Tensor)
    past = [
        [x[table[row]].transpose(0, 1).flatten(1, 2)[None, :, :length] for x in (keys, values)]  # type: ignore[index]
        for row, length in enumerate(case.lengths)
    ]
    (got,), _ = interpreter.run("paged_attention", *args, **kwargs)
    for row, count in enumerate(counts.tolist()):  # type: ignore[union-attr]
        own = (x[row : row + 1, :, :count] for x in (q, k, v))
        want, _, _ = torch.ops.qopt.cached_attention(*own, *past[row], None, **kwargs)
        torch.testing.assert_close(got[row, :count], want[0], rtol=2e-5, atol=2e-5)
        assert torch.equal(got[row, count:], torch.zeros_like(got[row, count:]))


@pytest.mark.parametrize("new", [2, 12])
def test_pages_that_are_missing(interpreter: Any, new: int) -> None:
    """Those that a window has passed are gone; where no page is, nothing is written or read."""
    args, kwargs = Case(new, (21, 5), block=8, window=9).arguments(torch.float32)
    table = args[5]
    assert isinstance(table, Tensor)
    table[0, 0] = -1
    table[1, -1] = -1
    interpreter.agrees_in_place("paged_attention", args, launches=2, reduced=REDUCED, **kwargs)


@pytest.mark.parametrize("new", [2, 12])
def test_strides(interpreter: Any, new: int) -> None:
    """H02: pools of all layers in one, a table that is a slice, q and new tokens transposed."""
    args, kwargs = Case(new, (9, 20), (new, 1), block=8).arguments(torch.float32)
    q, k, v, keys, values, table = args[:6]
    assert isinstance(keys, Tensor)
    assert isinstance(table, Tensor)
    layers = torch.randn(keys.shape[0], 3, 2, *keys.shape[1:])
    wide = torch.cat([table, table], 1)
    args[:3] = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]  # type: ignore[union-attr]
    args[3:6] = [layers[:, 1, 0], layers[:, 1, 1], wide[:, : table.shape[1]]]
    before = layers.clone()
    interpreter.agrees_in_place("paged_attention", args, launches=2, reduced=REDUCED, **kwargs)
    assert torch.equal(layers[:, ::2], before[:, ::2])
    assert not torch.equal(layers, before)
    del values


@pytest.mark.parametrize("lengths", [(), (4,)], ids=str)
def test_nothing_to_do(interpreter: Any, lengths: tuple[int, ...]) -> None:
    args, kwargs = Case(0 if lengths else 1, lengths).arguments(torch.float32)
    interpreter.agrees_in_place("paged_attention", args, launches=0, **kwargs)


def test_refuses(interpreter: Any) -> None:
    args, kwargs = Case(2, (3, 4)).arguments(torch.float16)
    table = args[5]
    assert isinstance(table, Tensor)
    told = interpreter.refusal("paged_attention", *args[:5], table.long(), *args[6:], **kwargs)
    assert "the block table is int64, not int32" in told
    told = interpreter.refusal("paged_attention", *args[:6], torch.rand(2), *args[7:], **kwargs)
    assert "lengths are float32, not int64" in told
    told = interpreter.refusal("paged_attention", *args[:2], None, *args[3:], **kwargs)
    assert "keys are given without values" in told
