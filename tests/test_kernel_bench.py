"""`qopt kernels bench` without a GPU: its cases, its arithmetic, what it tells and where it fails.

Kernels run in Triton's interpreter, at small sizes; times come from timers of the tests' own.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from qopt import kernel, kernel_bench, kernel_cases
from qopt.cli import main
from qopt.errors import GateError, LimitError, UsageError
from qopt.kernel_bench import KernelBench, Rates, Row, measure
from qopt.kernel_cases import Case, Peer, cases
from qopt.ops import OPS

CPU = torch.device("cpu")
SMALL = {
    **{"tokens": 12, "width": 64, "outputs": 48, "rows": 40, "past": 30, "room": 40},
    **{"batch": 3, "block": 8},
    **{"heads": 4, "kv_heads": 2, "size": 16, "inner": 32, "count": 4, "top": 2, "group": 32},
}
RATES = Rates(copy=1e12, matmul=1e14)


class Clock:
    """A timer by the host's clock: each call once."""

    def copies(self, size: int) -> int:
        return 2

    def median(self, calls: Sequence[Callable[[], object]]) -> float:
        start = perf_counter()
        for call in calls:
            call()
        return (perf_counter() - start) / len(calls)


class Told(Clock):
    """A timer that answers what it was told, in turn."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)

    def median(self, calls: Sequence[Callable[[], object]]) -> float:
        super().median(calls)
        return self.seconds.pop(0)


@pytest.fixture(scope="module")
def interpreting() -> Iterator[Callable[..., Any]]:
    """Runs a function in a process whose Triton interprets."""
    reason = kernel.load()
    if reason is not None:
        pytest.skip(reason)
    with patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(1, context, torch.set_num_threads, (1,))
        pool.submit(torch.get_num_threads).result()
    with pool:
        # the child cannot import this file by name
        ask = "__import__('runpy').run_path(file)[name](*args)"
        yield lambda function, *args: pool.submit(
            eval, ask, {"file": __file__, "name": function.__name__, "args": args}
        ).result()


# Cases ---------------------------------------------------------------------------------------


def measured(dtype: torch.dtype) -> list[Row]:
    kernel.load()
    every = kernel_bench.chosen(cases(dtype, SMALL), None)
    distinct = list({(case.op, case.name): case for case in every}.values())
    return [measure(case, dtype, CPU, Clock(), RATES, compiled=False) for case in distinct]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_kernel_has_a_case_and_computes_it(
    dtype: torch.dtype, interpreting: Callable[..., Any]
) -> None:
    rows = interpreting(measured, dtype)
    assert {(row.op, row.kernel) for row in rows} == {
        (op, one.name) for op, found in kernel.KERNELS.items() for one in found
    }
    for row in rows:
        assert row.correct, (row.op, row.case, row.notes)
        assert {"kernel", "eager"} <= set(row.seconds), row.notes
        assert not row.notes


def every_case() -> list[Case]:
    found = {(case.op, case.name): case for case in cases(torch.float32, SMALL)}
    return list(found.values())


@pytest.mark.parametrize("case", every_case(), ids=lambda case: f"{case.op} {case.name}")
def test_peers_compute_the_same(case: Case) -> None:
    arguments = case.arguments(torch.Generator().manual_seed(1), CPU)
    want = kernel_bench.evaluated(OPS[case.op].reference, arguments)
    for peer in filter(None, (case.eager, case.compiled)):
        args, kwargs = case.arguments(torch.Generator().manual_seed(1), CPU)
        got = kernel_bench.evaluated(peer.call, (peer.prepare(*args, **kwargs), {}), want)
        assert kernel_bench.difference(got, want) < 1e-5


def test_real_sizes_are_lowered_by_name_alone() -> None:
    real, small = cases(torch.bfloat16), cases(torch.bfloat16, {"width": 8})
    assert len(real) == len(small)
    assert "4096 x 8192" in {case.name for case in real if case.op == "rms_norm"}
    assert {case.name for case in small if case.op == "rms_norm"} == {
        "1 x 8",
        "512 x 8",
        "4096 x 8",
    }


@pytest.mark.parametrize(
    ("make", "sizes", "moved", "flops"),
    [
        # x, weight and result
        (kernel_cases.rms_norm, {"tokens": 3, "width": 8}, (24 + 8 + 24) * 2, 0),
        # x, residual, weight, norm and sum
        (kernel_cases.add_rms_norm, {"tokens": 3, "width": 8}, (4 * 24 + 8) * 2, 0),
        (kernel_cases.gated, {"tokens": 3, "width": 8}, 3 * 24 * 2, 0),
        (
            kernel_cases.rms_norm_linear,
            {"tokens": 3, "width": 8, "outputs": 5},
            (24 + 8 + 40 + 15) * 2,
            2 * 3 * 8 * 5,
        ),
        # ids, three rows of 4 bytes with a scale, three rows of the result
        (
            kernel_cases.quantized_embedding,
            {"tokens": 3, "width": 8, "rows": 50, "bits": 4},
            3 * 8 + 3 * (4 + 2) + 24 * 2,
            0,
        ),
        # q, k, v, both caches; result and the longer caches; 6 keys for each of 2 heads
        (
            kernel_cases.cached_attention,
            {"tokens": 1, "past": 5, "heads": 2, "kv_heads": 1, "size": 4},
            (8 + 4 + 4 + 2 * 20 + 8 + 2 * 24) * 2,
            2 * 2 * 2 * 4 * 6,
        ),
        # 1 + 2 + 3 pairs
        (
            kernel_cases.cached_attention,
            {"tokens": 3, "past": 0, "heads": 2, "kv_heads": 1, "size": 4},
            (24 + 12 + 12 + 24 + 12 + 12) * 2,
            2 * 2 * 2 * 4 * 6,
        ),
        # q, k, v, 5 of 7 slots read and one written in both buffers, a place, a mask; result
        (
            kernel_cases.static_attention,
            {"tokens": 1, "past": 5, "room": 7, "heads": 2, "kv_heads": 1, "size": 4},
            (8 + 4 + 4 + 2 * 20 + 2 * 4 + 8) * 2 + 8 + 7 * 8,
            2 * 2 * 2 * 4 * 6,
        ),
        # the same of two sequences in pages of 4 slots, a table of 2 x 2 and two lengths
        (
            kernel_cases.paged_attention,
            {"batch": 2, "tokens": 1, "past": 5, "block": 4, "heads": 2, "kv_heads": 1, "size": 4},
            2 * (8 + 4 + 4 + 2 * 20 + 2 * 4 + 8) * 2 + 4 * 4 + 2 * 8,
            2 * 2 * 2 * 2 * 4 * 6,
        ),
        # x, a byte a weight, scales and result
        (
            kernel_cases.int8_linear,
            {"tokens": 3, "width": 8, "outputs": 5},
            24 * 2 + 40 + 5 * 2 + 15 * 2,
            2 * 3 * 8 * 5,
        ),
        # x, ids and shares, two experts of three matrices, result
        (
            kernel_cases.experts,
            {"tokens": 1, "width": 8, "inner": 4, "count": 6, "top": 2},
            (8 + 2 + 2 * 3 * 8 * 4 + 8) * 2 + 2 * 8,
            2 * 2 * 3 * 8 * 4,
        ),
    ],
)
def test_bytes_and_flops(
    make: Callable[..., Case], sizes: dict[str, int], moved: int, flops: int
) -> None:
    case = make(torch.bfloat16, **sizes)
    arguments = case.arguments(torch.Generator().manual_seed(0), CPU)
    want = kernel_bench.evaluated(OPS[case.op].reference, arguments)
    assert kernel_bench.traffic(arguments, want) - case.untouched == moved
    assert case.flops == flops


# Judging -------------------------------------------------------------------------------------


def taken(name: str = "triton") -> Any:
    """Makes `measure` believe that a kernel takes the arguments; the reference runs."""
    return patch.multiple(
        kernel,
        explain=lambda *_, **__: (name, []),
        call=lambda op, *args, **kwargs: OPS[op].reference(*args, **kwargs),
    )


def norm() -> Case:
    return kernel_cases.rms_norm(torch.float32, tokens=1024, width=1024)


def test_share_ratios_and_targets() -> None:
    moved = (2 * 1024 * 1024 + 1024) * 4
    rates = Rates(copy=moved / 100e-6, matmul=1e14)  # 100 us at best
    with taken(), patch.object(torch, "compile", lambda call, **_: call):
        row = measure(norm(), torch.float32, CPU, Told(125e-6, 250e-6, 120e-6), rates)
        fast = measure(norm(), torch.float32, CPU, Told(110e-6, 250e-6, 120e-6), rates)
    assert (row.bound, row.moved, row.correct, row.error < 1) == ("memory", moved, True, True)
    assert row.share == pytest.approx(0.8)
    assert row.ratio("eager") == pytest.approx(2.0)
    assert row.ratio("compile") == pytest.approx(0.96)
    assert row.targets == {"85% of the copy rate": False, "torch.compile": False}
    assert fast.targets == {"85% of the copy rate": True, "torch.compile": True}


def test_what_is_bound_by_its_products_is_held_to_the_rate_of_matmul() -> None:
    case = kernel_cases.rms_norm_linear(torch.float32, tokens=512, width=64, outputs=64)
    rates = Rates(copy=1e15, matmul=case.flops / 70e-6)
    with taken():
        row = measure(case, torch.float32, CPU, Told(99e-6, 1.0), rates, compiled=False)
    assert row.bound == "matmul"
    assert row.share == pytest.approx(70 / 99)
    assert row.targets == {"70% of the matmul rate": True}


def test_a_small_case_is_held_to_torch_compile_alone() -> None:
    with taken(), patch.object(torch, "compile", lambda call, **_: call):
        row = measure(norm(), torch.float32, CPU, Told(1.0, 1.0, 1.0), Rates(1e13, 1e15))
    assert row.targets == {"torch.compile": True}


def test_measured_rates() -> None:
    rates = kernel_bench.measured_rates(torch.float32, CPU, Told(2.0, 4.0), size=32)
    assert rates == Rates(copy=2 * 16 * 32 * 32 / 2.0, matmul=2 * 32**3 / 4.0)


def wrong_norm() -> Row:
    kernel.load()
    (one,) = kernel.KERNELS["rms_norm"]
    wrong = kernel.Kernel(
        one.op, one.name, lambda *a, **k: one.launcher(*a, **k) * 1.02, one.refuses, one.forms
    )
    with patch.dict(kernel.KERNELS, {"rms_norm": [wrong]}):
        case = kernel_cases.rms_norm(torch.float32, tokens=3, width=40)
        return measure(case, torch.float32, CPU, Clock(), RATES, compiled=False)


def test_a_wrong_kernel_is_told_and_fails(interpreting: Callable[..., Any]) -> None:
    row = interpreting(wrong_norm)
    assert not row.correct
    assert row.error > 100
    assert row.seconds == {}  # not timed
    result = KernelBench("gpu", {}, RATES, [row])
    assert "WRONG" in str(result.tables())
    with pytest.raises(GateError, match="times as far off as is allowed"):
        kernel_bench.refuse(result, check=False)


def test_what_no_kernel_takes_is_a_failure() -> None:
    row = measure(norm(), torch.float32, CPU, Clock(), RATES)  # the interpreter is off here
    assert not row.correct
    assert "no kernel takes it: " in row.notes[0]


def test_difference_sees_what_is_small_missing_or_no_number() -> None:
    want = [torch.full((4096,), 1 / 4096)]
    assert kernel_bench.difference([torch.zeros(4096)], want) == pytest.approx(0.5)
    assert kernel_bench.difference([torch.full((4096,), math.nan)], want) == math.inf
    assert kernel_bench.difference([], want) == math.inf
    assert kernel_bench.difference([want[0].double()], want) == math.inf


def test_what_a_peer_raises_or_computes_is_told() -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no such thing\nat all")

    case = Case(
        "gated", "tiny", lambda g, d: ((torch.ones(2, 3), torch.ones(2, 3)), {}), Peer(fails)
    )
    other = Case("gated", "tiny", case.arguments, Peer(lambda gate, up: gate * up))
    with taken():
        row = measure(case, torch.float32, CPU, Clock(), RATES, compiled=False)
        off = measure(other, torch.float32, CPU, Clock(), RATES, compiled=False)
    assert row.notes == ["eager failed: RuntimeError: no such thing"]
    assert "eager" not in row.seconds
    assert off.notes[0].startswith("eager computes something else")


def test_liger_is_timed_where_it_is_installed() -> None:
    functional = SimpleNamespace(liger_swiglu=lambda gate, up: torch.nn.functional.silu(gate) * up)
    names = {"liger_kernel.transformers": SimpleNamespace(functional=functional)}
    with (
        patch.dict("sys.modules", names),
        patch.object(kernel_cases, "find_spec", lambda _: True),
        taken(),
    ):
        case = kernel_cases.gated(torch.float32, tokens=2, width=8)
        row = measure(case, torch.float32, CPU, Told(1.0, 2.0, 3.0), RATES, compiled=False)
    assert row.ratio("liger") == 3.0
    assert kernel_cases.gated(torch.float32, tokens=2, width=8).liger is None


def test_torch_compile_is_timed() -> None:
    traced = partial(torch.compile, backend="eager")  # Inductor takes half a minute to wake up
    with taken(), patch.object(torch, "compile", traced):
        row = measure(norm(), torch.float32, CPU, Clock(), RATES)
    assert not row.notes
    assert row.seconds["compile"] > 0


# Telling -------------------------------------------------------------------------------------


def result() -> KernelBench:
    facts: Any = ("gated", "triton", "1 x 8", "bfloat16", True, 0.1, "memory", 48, 0)
    met: Any = {"kernel": 1e-5, "eager": 2e-5, "compile": 1e-5}, 0.5, {"torch.compile": True}
    missed: Any = {"kernel": 1e-5}, 0.5, {"85% of the copy rate": False}
    rows = [Row(*facts, *met), Row(*facts, *missed)]
    return KernelBench("a GPU", {"torch": "2"}, RATES, rows)


def test_tables_and_json() -> None:
    shown = result().tables()
    assert [table.title for table in shown] == ["a GPU", "times of peers are ratios"]
    assert shown[1].rows[0] == (
        *("gated", "triton", "1 x 8", "yes", "10.0", "memory", "50%", "2.00", "1.00", "-"),
        "torch.compile: met",
    )
    told = json.loads(json.dumps(result().to_dict()))
    assert told["schema"] == 1
    assert told["rows"][0]["ratios"] == {"eager": 2.0, "compile": 1.0}
    assert told["rates"] == {"copy": 1e12, "matmul": 1e14}


def test_check_fails_where_a_target_is_missed() -> None:
    kernel_bench.refuse(result(), check=False)
    with pytest.raises(LimitError, match=r"1 targets were missed: gated .*85% of the copy rate"):
        kernel_bench.refuse(result(), check=True)


def test_files(tmp_path: Path) -> None:
    assert kernel_bench.write(result(), tmp_path / "times") == []
    told = json.loads((tmp_path / "times" / "kernels.json").read_text())
    assert len(told["rows"]) == 2
    assert (tmp_path / "times" / "kernels.png").read_bytes()[1:4] == b"PNG"
    assert "<svg" in (tmp_path / "times" / "kernels.svg").read_text()


def test_without_matplotlib_the_plot_is_missing_and_said(tmp_path: Path) -> None:
    with patch.dict("sys.modules", {"matplotlib.figure": None}):
        (note,) = kernel_bench.write(result(), tmp_path)
    assert "qopt-compiler[plot]" in note
    assert (tmp_path / "kernels.json").is_file()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "bench", "--check"]) == 0
    assert capsys.readouterr().out == "nothing was timed: there is no GPU here\n"
    assert main(["kernels", "bench", "--json", "-o", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["skipped"], told["rows"]) == ("there is no GPU here", [])
    assert json.loads((tmp_path / "kernels.json").read_text())["skipped"] == told["skipped"]


def test_bad_input() -> None:
    with pytest.raises(UsageError, match=r"no op 'rms_nrom'.*rms_norm"):
        kernel_bench.bench(op="rms_nrom")
    with pytest.raises(UsageError, match="rotary has no kernel"):
        kernel_bench.chosen(cases(torch.float32), "rotary")


# Timing --------------------------------------------------------------------------------------


class Device:
    """Stands in for torch.cuda: a clock that calls move on, and events that note it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.busy = 0  # copies enqueued

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at=math.nan)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda other: (other.at - event.at) * 1e3  # milliseconds
        return event

    def copy(self, count: int) -> None:
        self.now += count * 1e-3
        self.busy += count


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    properties = SimpleNamespace(L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: SimpleNamespace())
    monkeypatch.setattr(torch, "empty_like", lambda _: SimpleNamespace())
    monkeypatch.setattr(kernel_bench.DeviceTimer, "_hold", lambda _, count: made.copy(count))
    return made


def test_device_times_are_medians_of_single_calls_in_turns(device: Device) -> None:
    timer = kernel_bench.DeviceTimer(CPU)
    made: list[int] = []

    def call(index: int, seconds: float) -> None:
        made.append(index)
        device.now += seconds

    seconds = (1e-5, 3e-5, 2e-5, 9e-5, 4e-5)
    busy = device.busy
    got = timer.median([partial(call, i, s) for i, s in enumerate(seconds)])
    assert got == pytest.approx(3e-5)  # copies that keep the device busy do not count
    assert device.busy > busy
    assert made[6:] == [0, 1, 2, 3, 4] * 10  # 3 that compile, 3 that the host's time is taken of


def test_arguments_outgrow_the_cache(device: Device) -> None:
    timer = kernel_bench.DeviceTimer(CPU)
    assert timer.copies(1 << 20) == 100
    assert timer.copies(1 << 40) == 2  # even so no call finds what the one before it left
    assert timer.copies(16) == 512
