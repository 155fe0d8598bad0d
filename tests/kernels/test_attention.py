"""Both kernels of `cached_attention`, for few and for many new tokens, against its reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor


@dataclass
class Case:
    """Sizes of a call: new and cached tokens, heads, and what the op is asked for."""

    new: int
    past: int
    heads: int = 4
    kv: int = 2
    size: int = 16
    value_size: int = 16
    batch: int = 2
    window: int | None = None
    softcap: float | None = None
    causal: bool = True
    sinks: bool = False
    masked: bool = False

    def arguments(self, dtype: torch.dtype) -> tuple[list[Tensor | None], dict[str, Any]]:
        torch.manual_seed(self.new + self.past)
        b, k, total = self.batch, self.kv, self.new + self.past
        sizes = [(b, self.heads, self.new, self.size)]
        sizes += [(b, k, n, s) for n in (self.new, self.past) for s in (self.size, self.value_size)]
        tensors: list[Tensor | None] = [torch.randn(s).to(dtype) for s in sizes]
        mask = None
        if self.masked:
            mask = (torch.rand(b, total) < 0.7).long()
            mask[0, : total // 2] = 0  # the first queries of a row see nothing
        sinks = torch.randn(self.heads).to(dtype) if self.sinks else None
        options = {"window": self.window, "softcap": self.softcap, "causal": self.causal}
        return [*tensors, mask, sinks], {"scale": self.size**-0.5, **options}


FEW = [
    Case(1, 0),
    Case(1, 7),
    Case(1, 40, heads=9, kv=3, size=64, value_size=64),
    Case(1, 100, heads=41, kv=1, masked=True),
    Case(3, 41, window=5, masked=True),
    Case(8, 70, heads=6, sinks=True, softcap=3.0, masked=True),
    Case(2, 9, size=41, value_size=24, window=1),
    Case(4, 6, causal=False, window=3, masked=True),
    Case(1, 130, size=192, value_size=128, batch=1),
    Case(1, 0, batch=0),
]
LONG = [
    Case(1, 2047, batch=1, kv=1, heads=2, sinks=True),
    Case(1, 2048, batch=1, kv=1, heads=2, sinks=True, masked=True),
    Case(2, 2600, kv=1, softcap=5.0, masked=True, window=700),
    Case(1, 2100, kv=1, window=3, masked=True),
]
MANY = [
    Case(9, 0),
    Case(41, 30, heads=9, kv=3, masked=True),
    Case(40, 0, window=7, sinks=True, masked=True),
    Case(130, 5, heads=2, kv=1, batch=1, size=64, value_size=64, softcap=4.0),
    Case(33, 90, kv=4, window=1, size=41, value_size=24),
    Case(20, 30, causal=False, sinks=True, masked=True),
    Case(70, 70, batch=1, heads=1, kv=1, size=256, value_size=192, window=40),
]
REDUCED = 256  # the tolerance of sums of so many terms


@pytest.mark.parametrize("case", FEW, ids=str)
def test_few_new_tokens(interpreter: Any, dtype: torch.dtype, case: Case) -> None:
    args, kwargs = case.arguments(dtype)
    launches = int(case.batch > 0)
    interpreter.agrees("cached_attention", *args, reduced=REDUCED, launches=launches, **kwargs)


@pytest.mark.parametrize("case", LONG, ids=str)
def test_a_split_cache(interpreter: Any, dtype: torch.dtype, case: Case) -> None:
    """T9: one program up to 2048 tokens, beyond one for each 512 of them and a combine step."""
    args, kwargs = case.arguments(dtype)
    total = case.new + case.past
    launches = 1 if total <= 2048 else 2
    interpreter.agrees("cached_attention", *args, reduced=REDUCED, launches=launches, **kwargs)
    _, launched = interpreter.run("cached_attention", *args, **kwargs)
    names = {form.function for form in launched}
    assert names == {"_decode_attention_kernel", *(["_combine_kernel"] if total > 2048 else [])}


@pytest.mark.parametrize("case", MANY, ids=str)
def test_many_new_tokens(interpreter: Any, dtype: torch.dtype, case: Case) -> None:
    args, kwargs = case.arguments(dtype)
    interpreter.agrees("cached_attention", *args, reduced=REDUCED, **kwargs)
    _, launched = interpreter.run("cached_attention", *args, **kwargs)
    assert {form.function for form in launched} == {"_prefill_attention_kernel"}


@pytest.mark.parametrize("new", [3, 12])
def test_strides(interpreter: Any, new: int) -> None:
    """H02: slices of a merged projection, a cache that is a slice, and heads that all share."""
    merged = torch.randn(2, new, 8 * 16)
    q, k, v = (x.view(2, new, -1, 16).transpose(1, 2) for x in torch.split(merged, [64, 32, 32], 2))
    past_key, past_value = (
        torch.randn(2, 2, 20, 32)[..., ::2],
        torch.randn(2, 2, 30, 16)[:, :, 5:25],
    )
    args = (q, k, v, past_key, past_value, torch.ones(1, 20 + new).long().expand(2, -1))
    interpreter.agrees("cached_attention", *args, scale=0.3, reduced=REDUCED)
    turned, shared = q.transpose(2, 3).contiguous().transpose(2, 3), k[:, :1].expand(2, 2, new, 16)
    interpreter.agrees(
        "cached_attention", turned, shared, v, None, None, None,
        scale=0.3, window=2, reduced=REDUCED,
    )  # fmt: skip


@pytest.mark.parametrize("new", [3, 12])
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_nothing_are_zero(interpreter: Any, new: int, sinks: bool) -> None:
    """B10: no NaN and no average of hidden values, with sinks and without."""
    q, k, v = (torch.randn(2, 2, new, 16) for _ in range(3))
    mask = torch.ones(2, new).long()
    mask[0, :2] = 0
    levels = torch.randn(2) if sinks else None
    (y, _, _), _ = interpreter.run("cached_attention", q, k, v, None, None, mask, levels, scale=0.3)
    assert torch.equal(y[0, :2], torch.zeros(2, 2, 16))
    assert not y.isnan().any()


@pytest.mark.parametrize("new", [1, 12])
def test_large_scores(interpreter: Any, new: int) -> None:
    """Scores and sinks far beyond what exp can hold, in fp16 too."""
    q, k, v = (torch.randn(1, 2, new, 16).half() * 60 for _ in range(3))
    for sinks in (None, torch.tensor([3e4, -3e4]).half()):
        interpreter.agrees(
            "cached_attention", q, k, v, None, None, None, sinks, scale=1.0, reduced=1024
        )


def test_refuses(interpreter: Any) -> None:
    q, k = torch.randn(1, 2, 9, 320), torch.randn(1, 2, 9, 320)
    told = interpreter.refusal("cached_attention", q, k, k, None, None, None, scale=1.0)
    assert "triton-decode: 9 new tokens exceed 8" in told
    assert "triton-prefill: heads of 320 elements exceed 256" in told
    q, k = torch.randn(1, 2, 2, 16), torch.randn(1, 2, 2, 16).half()
    told = interpreter.refusal("cached_attention", q, k, k, None, None, None, scale=1.0)
    assert "types differ" in told
    told = interpreter.refusal(
        "cached_attention", q, q, q, None, None, None, scale=1.0, softcap=-1.0
    )
    assert "not positive" in told
