"""What a command tells: tables for a terminal, plain lines for a file, JSON for a program."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import threading
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from pydantic import BaseModel

from qopt.artifact import Artifact
from qopt.errors import UsageError


@dataclass(frozen=True)
class Table:
    """A title, column heads and rows; numbers are set to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass
class PassRow:
    """What one pass did."""

    name: str
    rewrites: int
    nodes_before: int
    nodes_after: int
    seconds: float


@dataclass
class LoweringRow:
    """What became of one kind of op: which implementation, how often, and why no faster one."""

    op: str
    implementation: str
    count: int
    reasons: list[str] = field(default_factory=list)


@dataclass
class CheckRow:
    """One probe of a check: figures, what they were held to, and the verdict."""

    probe: str
    figures: dict[str, float]
    limits: dict[str, float]
    passed: bool


@dataclass
class Report:
    """All that a compile has to tell; goes to OUT.log/report.json."""

    passes: list[PassRow] = field(default_factory=list)
    lowering: list[LoweringRow] = field(default_factory=list)
    checks: list[CheckRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)  # seconds a step took

    def tables(self) -> list[Table]:
        """The tables that have something in them."""
        idle = [p.name for p in self.passes if not p.rewrites]
        tables = [self._pass_table()]
        if idle:
            tables.append(
                Table("passes that found nothing to rewrite", ("",), [(", ".join(idle),)])
            )
        tables += [self._lowering_table(), self._check_table()]
        timings = [(n, f"{seconds:.1f}") for n, seconds in self.timings.items() if seconds > 0.05]
        tables.append(Table("time", ("step", "s"), timings))
        tables.append(Table("notes", ("",), [(note,) for note in self.notes]))
        return [table for table in tables if table.rows]

    def _pass_table(self) -> Table:
        rows = [
            (p.name, p.rewrites, p.nodes_before, p.nodes_after, f"{p.seconds * 1e3:.0f}")
            for p in self.passes
            if p.rewrites
        ]
        return Table("passes", ("pass", "rewrites", "nodes before", "after", "ms"), rows)

    def _lowering_table(self) -> Table:
        rows = [
            (row.op, row.implementation, row.count, "; ".join(row.reasons)) for row in self.lowering
        ]
        columns = ("op", "implementation", "count", "why no faster one")
        if not any(row.reasons for row in self.lowering):
            return Table("lowering", columns[:3], [row[:3] for row in rows])
        return Table("lowering", columns, rows)

    def _check_table(self) -> Table:
        rows = [
            (row.probe, _figures(row.figures), _figures(row.limits), "ok" if row.passed else "FAIL")
            for row in joined(self.checks)
        ]
        return Table("check", ("probe", "measured", "limit", ""), rows)


def joined(checks: Sequence[CheckRow]) -> list[CheckRow]:
    """The checks after passes that passed as one row, with the largest of their figures.

    One with wider limits stands by itself.
    """
    after = [row for row in checks if row.probe.startswith("after ") and row.passed]
    least = min((row.limits["max"] for row in after), default=0.0)
    after = [row for row in after if row.limits["max"] < 2 * least]  # they move with the logits
    if len(after) < 2:
        return list(checks)
    figures = {name: max(row.figures[name] for row in after) for name in after[0].figures}
    first = CheckRow(f"after each of {len(after)} passes", figures, after[0].limits, True)
    return [first, *(row for row in checks if row not in after)]


def _figures(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in figures.items())


# --- showing ---------------------------------------------------------------------------------


def show(tables: Sequence[Table], stream: TextIO | None = None) -> None:
    """Print tables: with lines and colours on a terminal, aligned plain text elsewhere."""
    stream = sys.stdout if stream is None else stream
    if stream.isatty():
        _show_rich(tables, stream)
    else:
        stream.write("\n\n".join(plain(table) for table in tables) + "\n" if tables else "")


def plain(table: Table) -> str:
    """A table as aligned lines."""
    cells = [[str(cell) for cell in row] for row in (table.columns, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = _number_columns(table)
    lines = [
        "  ".join(
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join(line for line in (table.title, *lines) if line)


def _number_columns(table: Table) -> list[bool]:
    return [
        bool(table.rows) and all(_is_number(row[index]) for row in table.rows)
        for index in range(len(table.columns))
    ]


def _is_number(cell: object) -> bool:
    return str(cell).lstrip("+-").replace(".", "", 1).replace(",", "").isdigit()


def _show_rich(tables: Sequence[Table], stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(file=stream)
    for table in tables:
        rich = RichTable(title=table.title, title_justify="left", show_header=any(table.columns))
        for name, is_number in zip(table.columns, _number_columns(table), strict=True):
            rich.add_column(name, justify="right" if is_number else "left")
        for row in table.rows:
            rich.add_row(*(Text(str(cell)) for cell in row))  # Text: brackets are no markup
        console.print(rich)


def tables_of(result: object) -> list[Table]:
    """The tables of a result: its own, or one of its names and values."""
    own = getattr(result, "tables", None)
    if callable(own):
        return list(own())
    data = as_json(result)
    if isinstance(data, dict):
        return [Table("", ("", ""), [(key, _short(value)) for key, value in data.items()])]
    return [Table("", ("",), [(_short(data),)])]


def _short(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def dumped(data: object) -> str:
    """JSON for people and programs: indented, a list of numbers on one line."""
    text = json.dumps(data, indent=2, ensure_ascii=False)
    return re.sub(r"\[\n[-+\d.,eE\s]+\]", lambda m: f"[{' '.join(m[0][1:-1].split())}]", text)


def as_json(result: object) -> Any:
    """A result as what JSON can hold."""
    if isinstance(result, BaseModel):
        return result.model_dump(mode="json", by_alias=True)
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return {f.name: as_json(getattr(result, f.name)) for f in dataclasses.fields(result)}
    if isinstance(result, Mapping):
        return {str(key): as_json(value) for key, value in result.items()}
    if isinstance(result, list | tuple):
        return [as_json(value) for value in result]
    return result if isinstance(result, str | int | float | bool | None) else str(result)


# --- an artifact -----------------------------------------------------------------------------


@dataclass
class Inspection:
    """What an artifact folder holds."""

    manifest: dict[str, Any]
    nodes: int | None
    ops: dict[str, int]

    def tables(self) -> list[Table]:
        """Facts, signature, ops and files."""
        told = {"model", "inputs", "outputs", "checks", "notes", "files"}
        facts = _flat({key: value for key, value in self.manifest.items() if key not in told})
        model = _flat({k: v for k, v in self.manifest["model"].items() if k != "layers"})
        model.append(("layers", str(len(self.manifest["model"]["layers"]))))
        signature = [
            (kind, name, *rest)
            for kind in ("inputs", "outputs")
            for name, *rest in _by_layer(self.manifest[kind])
        ]
        checks = [
            (check["probe"], _figures(check["limits"]), "ok" if check["passed"] else "FAIL")
            for check in self.manifest["checks"]
        ]
        files = [(name, f"{info['size']:,}") for name, info in self.manifest["files"].items()]
        tables = [
            Table("artifact", ("", ""), facts),
            Table("model", ("", ""), model),
            Table("signature", ("", "name", "dtype", "shape"), signature),
            Table(f"ops ({self.nodes} nodes)", ("op", "count"), list(self.ops.items())),
            Table("check", ("probe", "limit", ""), checks),
            Table("files", ("file", "bytes"), files),
            Table("notes", ("",), [(note,) for note in self.manifest["notes"]]),
        ]
        return [table for table in tables if table.rows]


def _flat(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Names and values, those of a map one by one; what is not set is left out."""
    rows: list[tuple[str, str]] = []
    for key, value in data.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{key}.")
        elif isinstance(value, bool):
            rows.append((prefix + key, "yes" if value else "no"))
        elif isinstance(value, list):
            rows += [(prefix + key, ", ".join(map(str, value)))] if value else []
        elif value is not None:
            rows.append((prefix + key, str(value)))
    return rows


def _by_layer(specs: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Name, dtype and shape; tensors that differ only in their layer's number in one line."""
    layers: dict[tuple[str, str, str], list[str]] = {}
    for spec in specs:
        name, number = re.sub(r"\.\d+", ".N", spec["name"]), re.search(r"\.(\d+)", spec["name"])
        key = (name, spec["dtype"], ", ".join(map(str, spec["shape"])))
        layers.setdefault(key, []).append(number[1] if number else "")
    return [
        (name.replace(".N", f".{'|'.join(_ends(numbers))}"), dtype, shape)
        for (name, dtype, shape), numbers in layers.items()
    ]


def _ends(numbers: Sequence[str]) -> Sequence[str]:
    """`0..29` for the numbers of all layers in a row; else each of them."""
    whole = list(range(int(numbers[0] or 0), int(numbers[0] or 0) + len(numbers)))
    if len(numbers) > 2 and [int(number) for number in numbers] == whole:
        return [f"{numbers[0]}..{numbers[-1]}"]
    return numbers


def inspect(folder: Path) -> Inspection:
    """Read an artifact without running it."""
    artifact = Artifact.load(folder)
    path = artifact.folder / "model.onnx"
    ops: Counter[str] = Counter()
    if path.is_file():
        import onnx

        graph = onnx.load(path, load_external_data=False).graph
        ops.update(f"{n.domain}::{n.op_type}" if n.domain else n.op_type for n in graph.node)
    script = artifact.folder / "model.pt"
    if script.is_file():
        ops.update(scripted_ops(script))
    manifest = artifact.manifest.model_dump(mode="json", by_alias=True)
    return Inspection(manifest, sum(ops.values()) or None, dict(ops.most_common()))


def scripted_ops(path: Path) -> list[str]:
    """The operators that a TorchScript file calls, read from the code in it; no weight is read."""
    try:
        with zipfile.ZipFile(path) as file:
            code = [file.read(name).decode() for name in file.namelist() if name.endswith(".py")]
    except (zipfile.BadZipFile, zlib.error, UnicodeDecodeError) as error:
        raise UsageError(
            "no TorchScript file",
            where=str(path),
            why=str(error),
            todo="copy or compile the artifact again",
        ) from None
    return re.findall(r"\b(?:torch|ops\.\w+)\.(\w+)\(", "".join(code))


# --- progress --------------------------------------------------------------------------------

Advance = Callable[[int], None]
PATIENCE = 2.0  # seconds before a step is worth a word


class Progress:
    """Says what takes long: a bar on a terminal, plain lines elsewhere, nothing when quiet."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._quiet = quiet
        self.timings: dict[str, float] = {}  # seconds by step, for the report

    def say(self, text: str) -> None:
        """A line for the user, unless quiet."""
        if not self._quiet:
            print(text, file=self._stream, flush=True)

    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[Advance]:
        """Time a step, and tell of it when it takes long; yields a function that counts on."""
        start = time.perf_counter()
        try:
            if self._quiet:
                yield _ignore
            elif self._stream.isatty():
                with self._bar(name, total) as advance:
                    yield advance
            else:
                with self._lines(name, start):
                    yield _ignore
        finally:
            self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - start

    @contextmanager
    def _bar(self, name: str, total: int | None) -> Iterator[Advance]:
        from rich.console import Console
        from rich.progress import Progress as Bar

        bar = Bar(console=Console(file=self._stream), transient=True)
        task = bar.add_task(name, total=total)
        with _after(PATIENCE, bar.start):
            try:
                yield lambda amount: bar.update(task, advance=amount)
            finally:
                bar.stop()

    @contextmanager
    def _lines(self, name: str, start: float) -> Iterator[None]:
        with _after(PATIENCE, lambda: self.say(f"{name} ...")):
            yield
        seconds = time.perf_counter() - start
        if seconds > PATIENCE:
            self.say(f"{name}: {seconds:.1f} s")


@contextmanager
def _after(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _ignore(amount: int) -> None:
    """Count nothing."""
