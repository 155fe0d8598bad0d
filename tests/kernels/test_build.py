"""Ahead of time: what is launched is what is built, for each architecture, without a spill."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from qopt import kernel, kernel_build
from qopt.cli import State, cli, main
from qopt.errors import UnsupportedError, UsageError
from qopt.kernel import ARCHITECTURES, Form


def first_forms(arch: str) -> list[tuple[kernel.Kernel, Form]]:
    """One form of each jit function."""
    found: dict[str, tuple[kernel.Kernel, Form]] = {}
    for one, form in kernel_build.all_forms(arch):
        found.setdefault(form.function, (one, form))
    return list(found.values())


def check(one: kernel.Kernel, form: Form, arch: str) -> str | None:
    """What is wrong with a build; None where nothing is."""
    built = kernel_build.compile_form(one, form, arch)
    if built.resources.spills:
        return f"{built.file} spills {built.resources.spills} bytes"
    if built.resources.shared > kernel_build.SHARED_LIMITS[arch]:
        return f"{built.file} wants {built.resources.shared} bytes of shared memory"
    if not 0 < built.resources.registers <= 512:
        return f"{built.file} has {built.resources.registers} registers"
    return None


@pytest.fixture(autouse=True)
def ready() -> None:
    kernel_build.ready()


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_one_form_of_each_function_builds(arch: str) -> None:
    faults = [fault for one, form in first_forms(arch) if (fault := check(one, form, arch))]
    assert not faults


def one_of_twins(arch: str) -> list[tuple[kernel.Kernel, Form]]:
    """Every form, but of two that differ in fp16 and bf16 alone one, now this and now that."""
    groups: dict[Any, list[tuple[kernel.Kernel, Form]]] = {}
    for one, form in kernel_build.all_forms(arch):
        types = tuple(kind.replace("bf16", "fp16") for _, kind in form.types)
        twins = form.function, types, form.constants, form.warps, form.stages
        groups.setdefault(twins, []).append((one, form))
    return [group[i % len(group)] for i, group in enumerate(groups.values())]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_shipped_form_spills(arch: str) -> None:
    """Twins are as wide as each other; `qopt kernels build` shows the spills of all."""
    assert not [fault for one, form in one_of_twins(arch) if (fault := check(one, form, arch))]


def test_twins_are_of_both_types() -> None:
    taken, every = one_of_twins("sm_90"), list(kernel_build.all_forms("sm_90"))
    assert len(every) * 0.6 < len(taken) < len(every) * 0.7
    for half in ("*fp16", "*bf16"):
        assert sum(half in (t for _, t in form.types) for _, form in taken) > len(taken) / 4
    assert {form.function for _, form in taken} == {form.function for _, form in every}


def test_files_have_names_of_their_own() -> None:
    """Forms of one architecture lie in one folder."""
    for arch in ARCHITECTURES:
        names = [
            kernel_build.Built(
                "", "", arch, form, b"", "", "", 0, 0, kernel_build.Resources(0, 0, 0)
            ).file
            for _, form in kernel_build.all_forms(arch)
        ]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(("arch", "block"), [("sm_90", 16384), ("gfx942", 32768)])
def test_a_spill_is_seen(arch: str, block: int) -> None:
    """The rule above would be empty if binaries were misread: a row too long for one warp."""
    one = kernel.KERNELS["softmax"][0]
    form = next(iter(one.forms(arch)))
    constants = (("BLOCK", block), ("MASKED", False), ("WHOLE", True))
    wide = Form(form.function, form.types, constants, 1, 1, aligned=form.aligned)
    assert "spills" in (check(one, wide, arch) or "")


def test_the_folder(tmp_path: Path) -> None:
    out = tmp_path / "cubins"
    done = CliRunner().invoke(
        cli,
        ["kernels", "build", "--arch", "sm_90", "-o", str(out), "--op", "gated", "--json"],
        obj=State(),
    )
    assert done.exit_code == 0, done.output
    index = json.loads((out / "kernels.json").read_text())
    assert {k["op"] for k in index["kernels"]} == {"gated"}
    assert {p.name for p in out.iterdir()} == {
        "kernels.json",
        *(k["file"] for k in index["kernels"]),
    }
    entry = index["kernels"][0]
    assert entry["arguments"][0] == {"name": "gate_ptr", "type": "*fp32"}
    assert entry["grid"] == "(rows, ceil(width / BLOCK), 1)"
    assert entry["spills"] == 0
    assert entry["registers"] > 8
    first = {p.name: p.read_bytes() for p in out.iterdir()}
    kernel_build.build("sm_90", out, "gated")
    assert {p.name: p.read_bytes() for p in out.iterdir()} == first, "the same bytes each time"
    assert not any(os.fsencode(Path.cwd()) in data for data in first.values())


def test_a_folder_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "new" / "cubins"
    kernel_build.build("sm_90", out, "gated")
    before = {p.name: p.read_bytes() for p in out.iterdir()}

    def interrupted(file: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kernel_build.build("sm_80", out, "gated", interrupted)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert list(out.parent.iterdir()) == [out]
    kernel_build.build("sm_80", out, "softmax")
    names = {p.name for p in out.iterdir()}
    assert not [name for name in names if name.startswith("gated")], "nothing of the build before"
    (out / "mine.txt").touch()
    with pytest.raises(UsageError, match="holds other files"):
        kernel_build.build("sm_80", out, "softmax")
    assert {p.name for p in out.iterdir()} == {*names, "mine.txt"}


def test_a_folder_that_is_there_stays_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `.` is, or a mount point, or behind a link."""
    out, link = tmp_path / "cubins", tmp_path / "link"
    out.mkdir()
    link.symlink_to(out)
    same = out.stat().st_ino
    kernel_build.build("sm_90", link, "gated")
    monkeypatch.chdir(out)
    kernel_build.build("sm_90", Path("."), "softmax")
    index = json.loads((out / "kernels.json").read_text())
    files = {"kernels.json", *(entry["file"] for entry in index["kernels"])}
    assert {path.name for path in out.iterdir()} == files
    assert out.stat().st_ino == same
    assert link.is_symlink()


@pytest.mark.parametrize("command", [["build", "--arch", "sm_90", "--op", "gated"], ["bench"]])
@pytest.mark.parametrize("where", ["file", "file/new", "/proc/new"])
def test_where_no_folder_can_be(
    command: list[str], where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["kernels", *command, "-o", str(tmp_path / where)]) == 2
    told = capsys.readouterr().err
    assert "no folder can be made there" in told or "is a file" in told


def test_the_listing() -> None:
    done = CliRunner().invoke(cli, ["kernels", "--json"], obj=State())
    assert done.exit_code == 0, done.output
    rows = json.loads(done.output)["kernels"]
    gated = [row for row in rows if row["op"] == "gated"]
    assert [row["implementation"] for row in gated] == ["triton", "reference"]
    assert "Rows of any stride" in gated[0]["accepts"]


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no kernels are built for sm_70"):
        kernel_build.build("sm_70", tmp_path)
    with pytest.raises(UsageError, match="no kernel of op 'gate'"):
        kernel_build.build("sm_90", tmp_path, "gate")
    (tmp_path / "mine.txt").touch()
    with pytest.raises(UsageError, match="holds other files"):
        kernel_build.build("sm_90", tmp_path, "gated")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UnsupportedError, match="cannot be built"):
        kernel_build.build("sm_90", tmp_path / "new", "gated")


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x07", 7),
        (b"\xcd\x01\x00", 256),
        (b"\xce\x00\x01\x00\x00", 65536),
        (b"\xd0\xff", -1),
        (b"\x82\xa1a\x01\xa1b\x93\xc0\xc2\xc3", {"a": 1, "b": [None, False, True]}),
        (b"\xd9\x03abc", "abc"),
        (b"\xda\x00\x02hi", "hi"),
        (b"\xdc\x00\x01\x05", [5]),
        (b"\xde\x00\x01\xa1k\x09", {"k": 9}),
    ],
)
def test_messagepack(data: bytes, value: Any) -> None:
    assert kernel_build._unpacked(data, 0) == (value, len(data))


def test_a_file_without_the_note() -> None:
    header = bytearray(64)
    struct.pack_into("<Q", header, 0x20, 64)
    struct.pack_into("<HH", header, 0x36, 56, 0)
    with pytest.raises(ValueError, match="no AMDGPU metadata"):
        kernel_build.amdgpu_metadata(bytes(header))
