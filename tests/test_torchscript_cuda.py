"""torchscript-cuda: scripts that call qopt's ops, whose Triton kernels run here in its interpreter.

The check is a process of its own, so setting the interpreter for it does not touch this one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qopt import kernel
from qopt.artifact import read_manifest
from qopt.compile import CompileResult, compile
from qopt.emit.torchscript import KERNEL_OPS
from qopt.errors import UsageError
from qopt.final_check import verify
from qopt.runtime.generate import load
from qopt.runtime.torchscript import ELSEWHERE

Tiny = Callable[..., tuple[Path, Any]]

TARGET = "torchscript-cuda"
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "gpt2",
    "gpt_neox",
    "gptj",
    "opt",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "bloom",
    "falcon",
)
RECIPE = "low-latency-gpu"
FAST = ("llama", "gemma2", "gpt_oss")  # grouped heads; soft-cap and a window; sinks and experts


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel.missing():
        pytest.skip("Triton is for Linux alone")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def compiled(model: Path, out: Path, recipe: str = "baseline", **options: Any) -> CompileResult:
    return compile(str(model), recipe, out, target=TARGET, check="final", **options)


def launches(result: CompileResult) -> dict[str, int]:
    """How often each op's kernel ran in the check."""
    told = next(note for note in result.notes if note.startswith("kernels ran"))
    found = re.findall(r"(\w+): (triton[\w-]*) (\d+)x", told)
    assert "reference" not in told
    return {f"{op} {name}": int(count) for op, name, count in found}


@pytest.mark.parametrize(
    ("family", "recipe"),
    [(family, recipe) for family in FAST for recipe in ("baseline", RECIPE)]
    + [pytest.param(f, RECIPE, marks=pytest.mark.slow) for f in FAMILIES if f not in FAST],
)
@pytest.mark.usefixtures("interpreted")
def test_families_are_exact_with_the_kernels(
    family: str, recipe: str, tiny: Tiny, tmp_path: Path
) -> None:
    result = compiled(tiny(family)[0], tmp_path / "out", recipe)
    taken = {row.op for row in result.report.lowering if row.implementation != "reference"}
    rows = [row for row in result.report.checks if row.limits]
    assert rows
    assert all(row.passed and row.figures["max"] <= 1e-4 for row in rows)
    if taken:  # bloom, gpt2 and the like may have none of the ops
        assert taken == {name.split()[0] for name in launches(result)}
    if "cached_attention" in taken:
        ran = launches(result)
        assert ran["cached_attention triton-decode"] > 0
        assert ran["cached_attention triton-prefill"] > 0


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_buffers_of_a_fixed_size(family: str, tiny: Tiny, tmp_path: Path) -> None:
    """Written in place, by kernels that take the length from the device."""
    sets = ("materialize-kv-cache.layout=static",)
    result = compiled(tiny(family)[0], tmp_path / "out", RECIPE, sets=sets)
    assert all(row.passed for row in result.report.checks)
    ran = launches(result)
    assert ran["static_attention triton-decode"] > 0
    assert ran["static_attention triton-prefill"] > 0
    assert not any("cached_attention" in name for name in ran)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("recipe", ["baseline", RECIPE])
def test_half_precision(dtype: str, recipe: str, tiny: Tiny, tmp_path: Path) -> None:
    result = compiled(tiny("llama")[0], tmp_path / "out", recipe, dtype=dtype)
    manifest = read_manifest(tmp_path / "out")
    assert manifest.dtype == {"fp16": "float16", "bf16": "bfloat16"}[dtype]
    norm = "rms_norm triton" if recipe == "baseline" else "rms_norm_linear triton"
    assert launches(result)[norm] > 0
    widened = {row.name: row.rewrites for row in result.report.passes}["widen-residual"]
    assert widened == (4 if dtype == "bf16" else 0)


def test_without_a_gpu_it_compiles_and_says_what_was_not_checked(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = compiled(tiny("llama")[0], tmp_path / "out")
    (told,) = [note for note in result.notes if "Triton kernels were not run" in note]
    assert "their references were" in told
    assert all(row.passed for row in result.report.checks)
    assert any("kernels were not run" in note for note in verify(tmp_path / "out").ran)
    lowered = {row.op: row.implementation for row in result.report.lowering}
    assert lowered["rms_norm"] == "qopt op (Triton kernel)"
    assert lowered["rotary"] == "reference"  # it takes a table, and no kernel does


def test_it_generates_what_the_model_does(tiny: Tiny, tmp_path: Path) -> None:
    folder, model = tiny("llama")
    compiled(folder, tmp_path / "out")
    prompt = torch.tensor([[5, 9, 11, 40]])
    want = model.generate(
        prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None
    )
    made = load(tmp_path / "out").generate_ids([prompt[0].tolist()], max_new_tokens=12)[0]
    assert made.tokens == want[0, 4:].tolist()[: len(made.tokens)]
    assert made.tokens


PLAIN = """
import sys, torch
module = torch.jit.load(sys.argv[1])
ids = torch.tensor([[5, 9, 11]])
past = [torch.zeros(1, 2, 0, 16) for _ in range(4)]
out = module(ids, torch.ones_like(ids), torch.arange(3)[None], *past)
print(out[0].argmax(-1)[0, -1].item())
assert "qopt" not in sys.modules
"""


def plain(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", PLAIN, str(folder / "model.pt")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_portable_loads_in_plain_torch(tiny: Tiny, tmp_path: Path) -> None:
    folder, model = tiny("llama")
    result = compiled(folder, tmp_path / "out", portable=True)
    ways = {row.implementation for row in result.report.lowering}
    assert ways == {"reference", "scaled_dot_product_attention"}
    assert "portable: true" in (tmp_path / "out" / "recipe.yaml").read_text()
    with torch.no_grad():
        want = model(torch.tensor([[5, 9, 11]])).logits[0, -1].argmax().item()
    assert plain(tmp_path / "out").stdout.strip() == str(want)
    if not torch.cuda.is_available():  # it has no kernels that could have been left out
        assert load(tmp_path / "out").session.told() == [ELSEWHERE]
        assert [note for note in result.notes if "GPU" in note] == [ELSEWHERE]


def test_without_portable_it_needs_qopt(tiny: Tiny, tmp_path: Path) -> None:
    compiled(tiny("llama")[0], tmp_path / "out")
    failed = plain(tmp_path / "out")
    assert failed.returncode != 0
    assert "qopt::" in failed.stderr


def test_the_same_bytes_each_time(tiny: Tiny, tmp_path: Path) -> None:
    hashes = []
    for name in ("one", "two"):
        compiled(tiny("llama")[0], tmp_path / name)
        manifest = json.loads((tmp_path / name / "qopt_manifest.json").read_text())
        hashes.append(manifest["files"]["model.pt"]["sha256"])
    assert hashes[0] == hashes[1]


def test_portable_is_for_this_target_alone(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="portable: is for torchscript-cuda"):
        compile(str(tiny("llama")[0]), "baseline", tmp_path / "out", portable=True)
    assert not (tmp_path / "out").exists()


def test_the_target_takes_every_op_that_has_a_kernel() -> None:
    if kernel.load():
        pytest.skip("Triton is for Linux alone")
    assert set(KERNEL_OPS) == set(kernel.KERNELS)
