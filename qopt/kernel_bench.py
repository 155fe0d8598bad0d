"""`qopt kernels bench`: each kernel against its reference, and its time against torch and Liger.

Two rates are measured first, on the same device and in the same type: bytes a second of a copy and
FLOP/s of `torch.matmul`. A case's bound is what takes longer at these rates, moving its bytes or
doing its products; its share is that time over the kernel's. Cases whose bound is below
`SMALL` seconds are governed by the launch and are held to torch.compile alone.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from qopt import kernel
from qopt.errors import GateError, LimitError, UsageError
from qopt.kernel_build import make_folder
from qopt.kernel_cases import Arguments, Case, Peer, cases
from qopt.ops import OPS
from qopt.recipe import did_you_mean
from qopt.report import Table

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Of a result's own size plus the results' root mean square: two roundings to the type, more for a
# longer chain, and what another order makes of a sum of n terms in fp32, `SUMMED * sqrt(n)`.
ROUNDED = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SUMMED = 5e-7
SMALL = 20e-6
TARGETS = {"memory": 0.85, "matmul": 0.70}  # share of the measured rate
MARGIN = 1.02  # times closer than this are the same
JSON_FILE, PLOTS = "kernels.json", ("kernels.png", "kernels.svg")


class Timer(Protocol):
    """Takes the time of calls on a device."""

    def copies(self, size: int) -> int:
        """How many sets of arguments of `size` bytes a call must go through to find none cached."""
        ...

    def median(self, calls: Sequence[Callable[[], object]]) -> float:
        """Median seconds of one call on the device; the calls are made in turns."""
        ...


class DeviceTimer:
    """Times by device events around each call.

    The device is kept busy with copies while the calls are enqueued, so that what lies between two
    events is the call's own time and not the time of its launch on the host.
    """

    REPEATS = 50

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self.cache = int(properties.L2_cache_size)
        size = max(256 << 20, 4 * self.cache)
        self._source = torch.empty(size, dtype=torch.uint8, device=device)
        self._target = torch.empty_like(self._source)
        self._hold(3)
        self._copy_seconds = self._timed(lambda: self._hold(10)) / 10

    def copies(self, size: int) -> int:
        """Twice the cache in all, as long as that is no more than 512 sets."""
        return min(512, max(2, math.ceil(2 * self.cache / max(1, size))))

    def median(self, calls: Sequence[Callable[[], object]]) -> float:
        """Median of 50 events or more."""
        for call in calls[:3]:  # compiles
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for call in calls[:3]:
            call()
        host = (time.perf_counter() - start) / len(calls[:3])
        torch.cuda.synchronize()
        turns = [calls[i % len(calls)] for i in range(max(self.REPEATS, min(len(calls), 200)))]
        pairs = [(_event(), _event()) for _ in turns]
        self._hold(math.ceil(1.5 * host * len(turns) / self._copy_seconds) + 1)
        for call, (before, after) in zip(turns, pairs, strict=True):
            before.record()
            call()
            after.record()
        torch.cuda.synchronize()
        return statistics.median([float(a.elapsed_time(b)) for a, b in pairs]) / 1e3

    def _hold(self, count: int) -> None:
        for _ in range(count):
            self._target.copy_(self._source)

    def _timed(self, call: Callable[[], object]) -> float:
        before, after = _event(), _event()
        before.record()
        call()
        after.record()
        torch.cuda.synchronize()
        return float(before.elapsed_time(after)) / 1e3


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


# --- results ---------------------------------------------------------------------------------


@dataclass
class Rates:
    """What the device does at best: bytes a second, read and written, and FLOP a second."""

    copy: float
    matmul: float


@dataclass
class Row:
    """One case: is it right, how long does it take, and how long do its peers."""

    op: str
    kernel: str
    case: str
    dtype: str
    correct: bool
    error: float  # largest difference, in units of what is allowed
    bound: str  # memory or matmul
    moved: int  # bytes that must be read and written
    flops: int
    seconds: dict[str, float]  # kernel, eager, compile, liger
    share: float | None = None  # of the measured rate that bounds it
    targets: dict[str, bool] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def ratio(self, peer: str) -> float | None:
        """A peer's time over the kernel's: above 1 the kernel is faster."""
        if peer not in self.seconds or "kernel" not in self.seconds:
            return None
        return self.seconds[peer] / self.seconds["kernel"]


PEERS = ("eager", "compile", "liger")


@dataclass
class KernelBench:
    """What was measured; `skipped` tells why nothing was."""

    device: str
    versions: dict[str, str]
    rates: Rates | None = None
    rows: list[Row] = field(default_factory=list)
    skipped: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[Row]:
        """Cases that the kernel computes wrongly, or that no kernel takes."""
        return [row for row in self.rows if not row.correct]

    @property
    def missed(self) -> list[str]:
        """Targets that were not met."""
        return [
            f"{row.op} ({row.case}): {name}"
            for row in self.rows
            for name, met in row.targets.items()
            if not met
        ]

    def tables(self) -> list[Table]:
        """One line where nothing was timed; else the rates, and one row a case."""
        if self.skipped:
            return [Table("", ("",), [(f"nothing was timed: {self.skipped}",)])]
        out = []
        if self.rates:
            figures = (
                ("copy", f"{self.rates.copy / 1e9:.0f} GB/s"),
                ("matmul", f"{self.rates.matmul / 1e12:.1f} TFLOP/s"),
            )
            out.append(Table(self.device, ("", ""), figures))
        columns = ("op", "kernel", "case", "right", "us", "of", "share", *PEERS, "targets")
        out.append(Table("times of peers are ratios", columns, [_cells(row) for row in self.rows]))
        notes = [(f"{row.op} ({row.case}): {note}",) for row in self.rows for note in row.notes]
        notes += [(note,) for note in self.notes]
        return [*out, Table("notes", ("",), notes)] if notes else out

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON; times in seconds."""
        out: dict[str, Any] = {"schema": 1, **asdict(self)}
        for entry, row in zip(out["rows"], self.rows, strict=True):
            entry["ratios"] = {peer: r for peer in PEERS if (r := row.ratio(peer)) is not None}
        return out


def _cells(row: Row) -> tuple[str, ...]:
    taken = f"{row.seconds['kernel'] * 1e6:.1f}" if "kernel" in row.seconds else "-"
    share = "-" if row.share is None else f"{row.share:.0%}"
    ratios = [row.ratio(peer) for peer in PEERS]
    told = ", ".join(f"{name}: {'met' if met else 'MISSED'}" for name, met in row.targets.items())
    return (
        row.op,
        row.kernel,
        row.case,
        "yes" if row.correct else "WRONG",
        taken,
        row.bound,
        share,
        *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        told or "-",
    )


# --- measuring -------------------------------------------------------------------------------


def bench(
    *,
    op: str | None = None,
    dtype: str = "bf16",
    compiled: bool = True,
    step: Callable[[str], None] = lambda _: None,
) -> KernelBench:
    """Check and time every kernel (or those of one op) on this machine's GPU.

    Without a GPU or Triton the result says so and holds no rows. `compiled`: time torch.compile
    too, which takes seconds a case. `step` hears each case's name.
    """
    if op is not None and op not in OPS:
        raise UsageError(
            f"no op {op!r}{did_you_mean(op, OPS)}", todo="`qopt kernels` lists what there is"
        )
    versions = _versions()
    reason = kernel.load() or ("" if torch.cuda.is_available() else "there is no GPU here")
    if not reason and kernel.interpreting():
        reason = "TRITON_INTERPRET is set, and kernels then run on the CPU"
    if reason:
        return KernelBench("none", versions, skipped=reason)
    device = torch.device("cuda", torch.cuda.current_device())
    timer = DeviceTimer(device)
    rates = measured_rates(DTYPES[dtype], device, timer)
    result = KernelBench(torch.cuda.get_device_name(device), versions, rates)
    with torch.inference_mode():
        for case in chosen(cases(DTYPES[dtype]), op):
            step(f"{case.op} {case.name}")
            result.rows.append(measure(case, DTYPES[dtype], device, timer, rates, compiled))
            torch.cuda.empty_cache()
    if not any("liger" in row.seconds for row in result.rows):
        result.notes.append("Liger-Kernel was not timed: it is not installed or has no such op")
    return result


def chosen(every: Iterable[Case], op: str | None) -> list[Case]:
    """The cases of ops that have a kernel, of one op where it is named."""
    found = [case for case in every if case.op in kernel.KERNELS and op in (None, case.op)]
    if not found:
        raise UsageError(f"{op} has no kernel", todo="`qopt kernels` lists those that do")
    return found


def measured_rates(
    dtype: torch.dtype, device: torch.device, timer: Timer, size: int = 8192
) -> Rates:
    """Bytes a second of a copy of `16 * size**2` bytes; FLOP/s of a product of size x size."""
    source = torch.empty(16 * size * size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    moved = timer.median([lambda: target.copy_(source)])
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    multiplied = timer.median([lambda: torch.matmul(left, right)])
    return Rates(2 * source.numel() / moved, 2 * size**3 / multiplied)


def measure(
    case: Case,
    dtype: torch.dtype,
    device: torch.device,
    timer: Timer,
    rates: Rates,
    compiled: bool = True,
) -> Row:
    """Check one case, then time it and its peers."""
    generator = torch.Generator(device).manual_seed(0)
    arguments = case.arguments(generator, device)
    taken, told = kernel.explain(case.op, *arguments[0], **arguments[1])
    want = evaluated(OPS[case.op].reference, arguments)
    moved = traffic(arguments, want) - case.untouched
    by_bytes, by_flops = moved / rates.copy, case.flops / rates.matmul
    row = Row(
        op=case.op,
        kernel=taken,
        case=case.name,
        dtype=str(dtype).removeprefix("torch."),
        correct=False,
        error=math.inf,
        bound="matmul" if by_flops > by_bytes else "memory",
        moved=moved,
        flops=case.flops,
        seconds={},
    )
    if taken == "reference":
        row.notes.append(f"no kernel takes it: {'; '.join(told)}")
        return row
    tolerance = ROUNDED[dtype] * case.rounded**0.5 + SUMMED * case.reduced**0.5

    def ours(*args: Any, **kwargs: Any) -> Any:
        return kernel.call(case.op, *args, **kwargs)

    row.error = difference(evaluated(ours, arguments), want) / tolerance
    row.correct = row.error <= 1
    if not row.correct:
        row.notes.append(f"the kernel is {row.error:.3g} times as far off as is allowed")
        return row
    sets = [_copied(arguments) for _ in range(timer.copies(traffic(arguments, ())))]
    row.seconds["kernel"] = timer.median([_bound(ours, *given) for given in sets])
    for name, peer in _peers(case, compiled):
        off = _time_peer(row, name, peer, arguments, sets, timer, want) / tolerance
        if off > 4:
            row.notes.append(f"{name} computes something else: {off:.3g} times what is allowed")
    row.share = max(by_bytes, by_flops) / row.seconds["kernel"]
    row.targets = judged(row, max(by_bytes, by_flops))
    return row


def judged(row: Row, bound: float) -> dict[str, bool]:
    """The targets that a case has, and whether it meets them; `bound` in seconds."""
    found = {}
    if bound >= SMALL and row.share is not None:
        wanted = TARGETS[row.bound]
        found[f"{wanted:.0%} of the {'copy' if row.bound == 'memory' else 'matmul'} rate"] = (
            row.share >= wanted
        )
    ratio = row.ratio("compile")
    if ratio is not None and row.bound == "memory":
        found["torch.compile"] = ratio * MARGIN >= 1
    return found


def _peers(case: Case, compiled: bool) -> list[tuple[str, Peer]]:
    found = [("eager", case.eager)]
    if compiled:
        source = case.compiled or case.eager
        torch.compiler.reset()  # no case may inherit another's shapes as dynamic ones
        found.append(("compile", Peer(torch.compile(source.call, dynamic=False), source.prepare)))
    if case.liger is not None:
        found.append(("liger", case.liger))
    return found


def _time_peer(
    row: Row,
    name: str,
    peer: Peer,
    arguments: Arguments,
    sets: Sequence[Arguments],
    timer: Timer,
    want: Sequence[Tensor],
) -> float:
    """Add a peer's time, and return how far off its results are; what fails is told of."""
    try:
        args, kwargs = _copied(arguments)  # of `sets` some are written to
        off = difference(evaluated(peer.call, (peer.prepare(*args, **kwargs), {}), want), want)
        calls = [_bound(peer.call, peer.prepare(*args, **kwargs), {}) for args, kwargs in sets]
        row.seconds[name] = timer.median(calls)
    except Exception as error:  # whatever a peer raises is its own
        first = str(error).strip().partition("\n")[0]
        row.notes.append(f"{name} failed: {type(error).__name__}: {first}")
        return 0.0
    return off


def _bound(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], object]:
    return lambda: call(*args, **kwargs)


def _copied(arguments: Arguments) -> Arguments:
    args, kwargs = arguments
    return tuple(a.clone() if isinstance(a, Tensor) else a for a in args), dict(kwargs)


def evaluated(
    call: Callable[..., Any], arguments: Arguments, like: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """The results of a call on a copy of its arguments, and the arguments that it wrote to.

    `like`: only as many results as these.
    """
    args, kwargs = _copied(arguments)
    made = call(*args, **kwargs)
    results = list(made) if isinstance(made, tuple | list) else [made]
    for before, after in zip(arguments[0], args, strict=True):
        if isinstance(after, Tensor) and not torch.equal(before, after):
            results.append(after)
    return results if like is None else results[: len(like)]


def difference(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Largest difference, each as a part of the wanted value plus all values' root mean square."""
    if len(got) != len(want):
        return math.inf
    worst = 0.0
    for ours, theirs in zip(got, want, strict=True):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return math.inf
        wide = theirs.float()
        scale = wide.abs() + wide.square().mean().sqrt() + torch.finfo(torch.float32).tiny
        off = ((ours.float() - wide).abs() / scale).nan_to_num(math.inf)
        worst = max(worst, float(off.max()) if off.numel() else 0.0)
    return worst


def traffic(arguments: Arguments, results: Iterable[Tensor]) -> int:
    """Bytes of the tensors among the arguments, and of the results."""
    tensors = [a for a in (*arguments[0], *results) if isinstance(a, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "triton", "liger-kernel"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


# --- writing ---------------------------------------------------------------------------------


def write(result: KernelBench, folder: Path) -> list[str]:
    """Write the figures as JSON and, where there are some, a plot; returns what could not be."""
    make_folder(folder)
    (folder / JSON_FILE).write_text(json.dumps(result.to_dict(), indent=1) + "\n")
    if not any(row.seconds for row in result.rows):
        return ["no plot: there is nothing to show"]
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return ["no plot: matplotlib is not installed (pip install 'qopt-compiler[plot]')"]
    rows = [row for row in result.rows if row.seconds][::-1]
    names = ("kernel", *(peer for peer in PEERS if any(peer in row.seconds for row in rows)))
    figure = Figure(figsize=(9, 1.2 + 0.16 * len(rows) * (len(names) + 1)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(names)
    for index, name in enumerate(names):
        places, widths = [], []
        for at, row in enumerate(rows):
            if name in row.seconds and row.share is not None:
                places.append(at + 0.4 - (index + 0.5) * height)
                widths.append(100 * row.share * row.seconds["kernel"] / row.seconds[name])
        axes.barh(places, widths, height, label="qopt" if name == "kernel" else name)
    axes.set_yticks(range(len(rows)), [f"{row.op}\n{row.case}" for row in rows], fontsize=7)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.axvline(100, color="black", linewidth=0.8)
    axes.set_xlabel("% of the measured copy bandwidth or matmul rate")
    axes.set_title(f"{result.device}, {rows[0].dtype}")
    axes.legend(loc="upper right", fontsize=7)
    for file in PLOTS:
        figure.savefig(folder / file, metadata={"Date": None} if file.endswith("svg") else None)
    return []


def refuse(result: KernelBench, check: bool) -> None:
    """Raise `GateError` where a kernel is wrong, `LimitError` where `check` and a target is missed.

    Where nothing was timed neither is known, and nothing is raised.
    """
    if result.wrong:
        raise GateError(
            "; ".join(f"{row.op} ({row.case}): {'; '.join(row.notes)}" for row in result.wrong),
            todo="run `qopt kernels bench --op OP`, and the kernel's tests",
        )
    if check and result.missed:
        raise LimitError(
            f"{len(result.missed)} targets were missed: {'; '.join(result.missed)}",
            todo="leave --check out to see the figures alone",
        )
