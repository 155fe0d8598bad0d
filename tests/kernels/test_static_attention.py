"""Decode and prefill over buffers of a fixed size, and the kernel that writes into them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from qopt import kernel


@dataclass
class Case:
    """Sizes of a call, slots of the buffers, and what the op is asked for."""

    new: int
    past: int
    slots: int
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

    def arguments(
        self, dtype: torch.dtype, scales: str | None = None
    ) -> tuple[list[Tensor | None], dict[str, Any]]:
        torch.manual_seed(self.new + self.past)
        b, k, m = self.batch, self.kv, self.slots
        widths = (self.size, self.value_size)
        q = torch.randn(b, self.heads, self.new, self.size).to(dtype)
        new = [torch.randn(b, k, self.new, width).to(dtype) for width in widths]
        mask = None
        if self.masked:
            mask = (torch.rand(b, m) < 0.7).long()
            mask[0, : self.past // 2] = 0
            mask[:, self.past + self.new :] = 0
        sinks = torch.randn(self.heads).to(dtype) if self.sinks else None
        options = {"window": self.window, "softcap": self.softcap, "causal": self.causal}
        if scales is None:
            held = [torch.randn(b, k, m, width).to(dtype) for width in widths]
            factors: list[Tensor | None] = [None, None]
        else:
            held = [torch.randint(-127, 128, (b, k, m, w), dtype=torch.int8) for w in widths]
            factors = [
                torch.rand((b, k, m, 1) if scales == "token" else (k, 1, w)) / 50 for w in widths
            ]
        args = [q, *new, *held, torch.tensor([self.past]), mask, sinks, *factors]
        return args, {"scale": self.size**-0.5, **options}


CASES = [
    Case(1, 0, 1),
    Case(3, 41, 45, heads=9, kv=3, window=5, masked=True),
    Case(8, 3, 70, softcap=3.0, sinks=True, size=41, value_size=24),
    Case(4, 6, 12, causal=False, window=3, masked=True),
    Case(9, 0, 130, window=4),
    Case(41, 30, 100, heads=6, sinks=True, softcap=4.0, masked=True, size=64, value_size=64),
    Case(12, 5, 17, causal=False, masked=True, kv=4),
]
REDUCED = 256


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference(interpreter: Any, dtype: torch.dtype, case: Case) -> None:
    args, kwargs = case.arguments(dtype)
    interpreter.agrees_in_place("static_attention", args, launches=2, reduced=REDUCED, **kwargs)


@pytest.mark.parametrize("scales", ["token", "channel"])
@pytest.mark.parametrize("case", [CASES[2], CASES[5]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_int8(interpreter: Any, dtype: torch.dtype, case: Case, scales: str) -> None:
    """What is written is rounded as the reference does, to the bit, with its scale a token."""
    args, kwargs = case.arguments(dtype, scales)
    interpreter.agrees_in_place("static_attention", args, launches=2, reduced=REDUCED, **kwargs)


@pytest.mark.parametrize(
    ("scales", "masked"), [(None, False), (None, True), ("token", True), ("channel", False)]
)
@pytest.mark.parametrize("past", [5, 2600])
def test_splits_follow_the_slots(
    interpreter: Any, scales: str | None, masked: bool, past: int
) -> None:
    """The host knows no length: as many programs for 5 tokens as for 2600, and the same result."""
    case = Case(2, past, 2700, kv=1, heads=2, batch=1, sinks=True, masked=masked)
    args, kwargs = case.arguments(torch.float16, scales)
    interpreter.agrees_in_place("static_attention", args, launches=3, reduced=REDUCED, **kwargs)
    _, launched = interpreter.run("static_attention", *args, **kwargs)
    names = {form.function for form in launched}
    assert names == {"_write_cache_kernel", "_decode_attention_kernel", "_combine_kernel"}


@pytest.mark.parametrize("new", [2, 12])
def test_strides(interpreter: Any, new: int) -> None:
    """H02: slices of a merged projection, buffers that are slices of larger ones."""
    merged = torch.randn(2, new, 8 * 16)
    q, k, v = (x.view(2, new, -1, 16).transpose(1, 2) for x in torch.split(merged, [64, 32, 32], 2))
    whole = [torch.randn(2, 30, 2, 40) for _ in "kv"]
    buffers = [x.transpose(1, 2)[:, :, 3:28, 8:24] for x in whole]
    before = [x.clone() for x in whole]
    args = [q, k[..., ::1], v, *buffers, torch.tensor([9]), None]
    interpreter.agrees_in_place("static_attention", args, launches=2, reduced=REDUCED, scale=0.3)
    for x, old in zip(whole, before, strict=True):
        changed = (x != old).nonzero()
        assert changed[:, 1].min() == 12, "slot 9 of a slice that begins at 3"
        assert changed[:, 1].max() == 11 + new
        assert changed[:, 3].min() >= 8
        assert changed[:, 3].max() < 24


def test_a_layer_that_reads_anothers_cache(interpreter: Any) -> None:
    args, kwargs = Case(2, 9, 20, masked=True).arguments(torch.float32)
    args[1] = args[2] = None
    interpreter.agrees_in_place("static_attention", args, reduced=REDUCED, **kwargs)


@pytest.mark.parametrize("case", [Case(1, 4, 9, batch=0), Case(0, 4, 9)], ids=str)
def test_nothing_to_do(interpreter: Any, case: Case) -> None:
    args, kwargs = case.arguments(torch.float32)
    interpreter.agrees_in_place("static_attention", args, launches=0, **kwargs)


def test_behind_the_last_slot_nothing_is_written(interpreter: Any) -> None:
    """Only the device knows; memory behind the buffers stays as it is."""
    (q, k, v, _, _, _, *_), kwargs = Case(3, 0, 8).arguments(torch.float32)
    whole = [torch.randn(2, 2, 12, 16) for _ in "kv"]
    before = [x.clone() for x in whole]
    buffers = [x[:, :, :8] for x in whole]
    interpreter.run("static_attention", q, k, v, *buffers, torch.tensor([6]), None, **kwargs)
    for x, old, new in zip(whole, before, (k, v), strict=True):
        assert new is not None
        old[:, :, 6:8] = new[:, :, :2]
        assert torch.equal(x, old)


def test_refuses(interpreter: Any) -> None:
    args, kwargs = Case(2, 3, 9).arguments(torch.float16)
    turned = args[3].transpose(2, 3).contiguous().transpose(2, 3)  # type: ignore[union-attr]

    def told(**changed: Any) -> str:
        names = ("q", "k", "v", "key", "value", "past", "mask", "sinks", "key_scale", "value_scale")
        given = dict(zip(names, args, strict=True)) | changed
        return str(interpreter.refusal("static_attention", *given.values(), **kwargs))

    assert "elements of cached keys do not lie side by side" in told(key=turned)
    assert "cached values are expanded" in told(value=args[4][:, :1].expand(2, 2, 9, 16))  # type: ignore[index]
    assert "past is 2 of int64, not one int64" in told(past=torch.tensor([1, 2]))
    assert "types differ" in told(key=torch.randn(2, 2, 9, 16))
    int8 = dict.fromkeys(("key", "value"), torch.zeros(2, 2, 9, 16, dtype=torch.int8))
    assert "int8 and have no scales" in told(**int8)
    scales = dict.fromkeys(("key_scale", "value_scale"), torch.zeros(2, 1, 16))
    assert "have scales and are not int8" in told(**scales)
    assert "have shape (2, 1, 15)" in told(
        **int8, **scales | {"value_scale": torch.zeros(2, 1, 15)}
    )
    assert "are float16, not float32" in told(**int8, **{k: x.half() for k, x in scales.items()})
    wide = {n: torch.zeros(2, 2, 2, 16) for n in "kv"} | {"q": torch.zeros(2, 4, 2, 16)}
    assert "float32 has no int8 cache" in told(**int8, **scales, **wide)
    assert "keys or values alone are int8" in told(key=int8["key"], key_scale=torch.zeros(2, 1, 16))


def test_an_old_triton_has_no_int8_on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    assert kernel.load() is None

    def held(one: kernel.Kernel) -> set[str]:
        return {t for form in one.forms("gfx942") for name, t in form.types if name == "k_ptr"}

    for one in kernel.KERNELS["static_attention"]:
        monkeypatch.setattr(triton, "__version__", "3.7.0")
        assert "*i8" in held(one)
        assert one.lacks("gfx942") is None
        monkeypatch.setattr(triton, "__version__", "3.6.0")
        assert "*i8" not in held(one)
        assert "Triton 3.6.0 cannot compile them" in (one.lacks("gfx942") or "")
        assert one.lacks("sm_90") is None
