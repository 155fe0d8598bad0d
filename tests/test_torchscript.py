"""TorchScript artifacts: in plain torch, on any device, the same bytes, one copy of each weight.

That they compute the model is shown with the other targets, in test_families.
"""

from __future__ import annotations

import math
import operator
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qopt.artifact import read_manifest
from qopt.cli import main
from qopt.compile import compile
from qopt.emit import torchscript
from qopt.errors import GateError, ResourceError, UsageError
from qopt.final_check import Checker, Job, run_job
from qopt.ops import OPS
from qopt.runtime import load

Compiled = Callable[..., Path]
Tiny = Callable[..., tuple[Path, Any]]
TARGET = "torchscript-cpu"

PLAIN = """
import sys, torch
module, prompt, steps = torch.jit.load(sys.argv[1]), [5, 9, 11, 40], 12
past = [torch.zeros(1, 2, 0, 16) for _ in range(4)]
ids, tokens = torch.tensor([prompt]), []
for step in range(steps):
    total = past[0].shape[2] + ids.shape[1]
    positions = torch.arange(total - ids.shape[1], total)[None]
    logits, *past = module(ids, torch.ones(1, total, dtype=torch.int64), positions, *past)
    ids = logits[:, -1].argmax(-1, keepdim=True)
    tokens.append(int(ids))
print(*tokens)
"""


def code_of(folder: Path) -> str:
    with zipfile.ZipFile(folder / "model.pt") as file:
        names = [name for name in file.namelist() if name.endswith(".py")]
        return "".join(file.read(name).decode() for name in names)


def test_plain_torch_decodes_as_transformers_does(
    compiled: Compiled, tiny: Tiny, torch_alone: Callable[..., str]
) -> None:
    """A script of ten lines, in a process that finds torch alone: no qopt, no numpy."""
    path = compiled("llama", target=TARGET) / "model.pt"
    printed = torch_alone(PLAIN, str(path))
    prompt = torch.tensor([[5, 9, 11, 40]])
    model = tiny("llama")[1]
    want = model.generate(
        prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None
    )
    assert list(map(int, printed.split())) == want[0, 4:].tolist()


def test_G01_no_device_is_baked_in(compiled: Compiled) -> None:
    """What the code makes lies where its inputs lie."""
    for family in ("llama", "gemma2", "gpt2", "bloom"):
        assert not re.search(r"torch\.device\(|\"cpu\"", code_of(compiled(family, target=TARGET)))


def test_G02_sizes_are_computed(compiled: Compiled) -> None:
    """No size of the trace (2, 3, 5 and 8) is in a view."""
    code = code_of(compiled("llama", target=TARGET))
    views = re.findall(r"torch\.(?:view|reshape|expand)\([^\[]*\[([^\]]*)\]", code)
    assert views
    for view in views:
        assert not {"2", "3", "5", "8"} & set(view.split(", ")[:2]), view


def test_G03_two_loads_share_nothing(compiled: Compiled) -> None:
    folder = compiled("llama", target=TARGET)
    first, second = load(folder), load(folder)
    want = second.generate_ids([[5, 9, 11]], max_new_tokens=6)[0].tokens
    with torch.no_grad():
        for buffer in first.session._module.buffers():  # type: ignore[attr-defined]
            buffer.zero_()
    assert second.generate_ids([[5, 9, 11]], max_new_tokens=6)[0].tokens == want


def test_G04_dropout_is_off(compiled: Compiled, tiny: Tiny) -> None:
    overrides = {"attn_pdrop": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5}
    found = run_job(
        Job(str(tiny("gpt2", **overrides)[0])),
        lambda: str(compiled("gpt2", target=TARGET, **overrides)),
    )
    assert found.passed


@pytest.mark.parametrize("finish", [torch.jit.freeze, torch.jit.optimize_for_inference])
def test_it_stays_right_when_it_is_optimized(finish: Any, compiled: Compiled) -> None:
    module: Any = torch.jit.load(  # type: ignore[no-untyped-call]
        compiled("gemma2", target=TARGET) / "model.pt"
    )
    inputs = feeds(3, 9)
    with torch.no_grad():
        want = module(*inputs)[0]
        made = finish(module.eval())
        for _ in range(3):  # the first calls are profiled, then the code is made anew
            torch.testing.assert_close(made(*inputs)[0], want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            made(*feeds(1, 4))[0], module(*feeds(1, 4))[0], atol=1e-5, rtol=1e-5
        )


def feeds(rows: int, tokens: int) -> list[Tensor]:
    ids = torch.arange(rows * tokens).reshape(rows, tokens) % 80 + 5
    past = [torch.zeros(rows, 2, 0, 16) for _ in range(4)]
    return [ids, torch.ones_like(ids), torch.arange(tokens).expand(rows, -1).contiguous(), *past]


def defined(expression: str) -> Any:
    """A module that returns as many zeros as the expression of two sizes says."""

    class Defined(torch.jit.ScriptModule):  # one a call: instances of a class share its methods
        def __init__(self) -> None:
            super().__init__()

    lines = ("a = torch.ops.aten.size(x, 0)", "b = torch.ops.aten.size(x, 1)", "half = a / 2")
    body = "\n    ".join((*lines, f"return torch.ops.aten.zeros([int({expression})])"))
    module = Defined()
    module.define(f"def forward(self, x: Tensor):\n    {body}\n")
    return module


@pytest.mark.parametrize(
    "operation", [*torchscript.INFIX, *torchscript.CALLS], ids=lambda o: o.__name__
)
def test_arithmetic_on_sizes(operation: Any) -> None:
    """What Python computes of two sizes, the script does."""
    logic = operation in (operator.and_, operator.or_, torch.sym_not)
    for a, b in ((7, 2), (4, 4)):
        if operation in torchscript.INFIX:
            names = ("(a > 2)", "(b > 2)") if logic else ("a", "b")
            expression = f" {torchscript.INFIX[operation]} ".join(names)
            values: tuple[Any, ...] = (a > 2, b > 2) if logic else (a, b)
        else:
            form = torchscript.CALLS[operation]
            rounds = operation in (math.ceil, math.floor, math.trunc, torch.sym_int)
            name, value = ("half", a / 2) if rounds else ("(a > 2)", a > 2) if logic else ("a", a)
            expression = form.format(name, "b")
            values = (value, b)[: form.count("{}")]
        expected = int(operation(*values))
        if operation is operator.neg:
            expression, expected = f"10 + {expression}", 10 + expected
        assert defined(expression)(torch.zeros(a, b)).shape == (expected,)


def test_the_same_bytes_each_time(tiny: Tiny, tmp_path: Path) -> None:
    for name in ("one", "two"):
        compile(str(tiny("llama")[0]), "baseline", tmp_path / name, target=TARGET, check="off")
    left, right = sorted((tmp_path / "one").iterdir()), sorted((tmp_path / "two").iterdir())
    assert [p.name for p in left] == [p.name for p in right]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(left, right, strict=True))


def test_a_tied_weight_is_stored_once(compiled: Compiled) -> None:
    sizes = {
        tied: (compiled("llama", target=TARGET, tie_word_embeddings=tied) / "model.pt")
        .stat()
        .st_size
        for tied in (True, False)
    }
    embedding = 97 * 64 * 4
    assert embedding * 0.9 < sizes[False] - sizes[True] < embedding * 1.2


def test_generate_as_the_onnx_artifact_does(compiled: Compiled) -> None:
    """Rows of unequal length, and one that ends first."""
    prompts = [[5, 9, 11, 40, 7], [8], [33, 34, 35]]
    options: Any = {"max_new_tokens": 9, "ignore_eos": True}
    results = [
        load(compiled("mistral", "low-latency", target=target)).generate_ids(prompts, **options)
        for target in ("onnx-cpu", TARGET)
    ]
    assert [r.tokens for r in results[0]] == [r.tokens for r in results[1]]


def test_the_check_runs_on_it_and_can_fail(
    compiled: Compiled, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checker(Job(str(tiny("mistral")[0]))) as checker:
        found = checker.check(compiled("mistral", "low-latency", target=TARGET))
    assert found.passed
    assert any("window" in probe.probe for probe in found.probes)
    right = torchscript.Script.operator_call

    def wrong(self: Any, node: Any, operation: Any) -> str:
        call = right(self, node, operation)
        return call.replace("rsqrt(", "sqrt(") if "rsqrt" in call else call

    monkeypatch.setattr(torchscript.Script, "operator_call", wrong)
    with pytest.raises(GateError, match="differs from the model"):
        compile(str(tiny("llama")[0]), "baseline", tmp_path / "out", target=TARGET, check="final")
    assert not (tmp_path / "out").exists()


def test_inspect_counts_its_ops(compiled: Compiled, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(compiled("llama", target=TARGET))]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^linear +\d+$", shown, re.M)
    assert "torch>=2.11" in shown


def test_a_damaged_file_is_one_error(compiled: Compiled, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(compiled("llama", target=TARGET), folder)
    data = (folder / "model.pt").read_bytes()
    (folder / "model.pt").write_bytes(b"x" * len(data))
    with pytest.raises(UsageError, match="torch cannot load the model"):
        load(folder)
    (folder / "model.pt").write_bytes(data[:-10])
    with pytest.raises(UsageError, match="truncated"):
        load(folder)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"opset": 21}, "no opsets"),
        ({"no_weights": True}, "without weights"),
    ],
)
def test_what_it_cannot_do_is_refused(
    flags: dict[str, Any], words: str, tiny: Tiny, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=words) as caught:
        compile(str(tiny("llama")[0]), "baseline", tmp_path / "out", target=TARGET, **flags)
    assert type(caught.value).__name__ in ("UsageError", "UnsupportedError")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "taken", "why"),
    [
        ("llama", "scaled_dot_product_attention", None),
        ("mistral", "scaled_dot_product_attention", None),  # a window is a mask
        ("gemma2", "reference", "no soft-cap"),
        ("gpt_oss", "reference", "no sinks"),
    ],
)
def test_attention_is_torchs_own_where_that_can_do_it(
    family: str, taken: str, why: str | None, tiny: Tiny, tmp_path: Path
) -> None:
    model = str(tiny(family)[0])
    result = compile(model, "baseline", tmp_path / "out", target=TARGET, check="final")
    (row,) = [row for row in result.report.lowering if row.op == "cached_attention"]
    assert row.implementation == taken
    assert why is None or why in row.reasons[0]


def test_a_row_without_any_key_is_zero_there_too() -> None:
    """B10: padding in front, as `qopt::cached_attention` has it."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8)
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    given = (q, k, v, None, None, mask)
    for window in (None, 1, 2):
        got = torchscript.GrowingAttention().body(*given, scale=0.3, window=window)
        want = OPS["cached_attention"].reference(*given, scale=0.3, window=window)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


def test_one_row_in_bf16_goes_through_mv(compiled: Compiled) -> None:
    """The same numbers as many rows at once give, to bf16's rounding."""
    folder = compiled("llama", target=TARGET, dtype="bf16")
    assert "mv(" in code_of(folder)
    assert "mv(" not in code_of(compiled("llama", target=TARGET))
    ids = np.array([[5, 9, 11, 40, 7]])
    whole = load(folder).decoder(1).forward(ids, keep=0)
    decoder = load(folder).decoder(1)
    single = [decoder.forward(ids[:, i : i + 1], keep=0) for i in range(5)]
    np.testing.assert_allclose(np.concatenate(single, 1), whole, atol=2e-2)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision_is_checked_and_runs(dtype: str, tiny: Tiny, tmp_path: Path) -> None:
    result = compile(
        str(tiny("llama")[0]), "baseline", tmp_path / "out", target=TARGET, dtype=dtype
    )
    assert all(row.passed for row in result.report.checks)
    rows = {row.probe: row.figures["max"] for row in result.report.checks}
    assert 1e-4 < rows["prefill"] < 2e-2  # half precision it is
    inputs = {spec.name: spec.dtype for spec in read_manifest(tmp_path / "out").inputs}
    assert inputs["past_key_values.0.key"] == {"fp16": "float16", "bf16": "bfloat16"}[dtype]
    assert len(load(tmp_path / "out").generate_ids([[5, 9, 11]], max_new_tokens=4)[0].tokens) > 0


def test_what_it_needs_of_memory_is_said_before_it_starts(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="MB of memory") as caught:
        compile(
            str(tiny("llama")[0]),
            "baseline",
            tmp_path / "out",
            target=TARGET,
            check="off",
            max_ram="100MB",
        )
    assert "saved from memory" in str(caught.value)


def test_the_manifest_names_the_runtime(compiled: Compiled) -> None:
    manifest = read_manifest(compiled("llama", target=TARGET))
    assert (manifest.runtime, manifest.opset, manifest.shared_buffer) == (
        "torch>=2.11",
        None,
        False,
    )
