"""ONNX for CUDA: what the CUDA provider's ops compute, and `ai.qopt` nodes with their functions.

There is no GPU here: the CPU provider runs what is written.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from qopt import kernel
from qopt.artifact import Artifact, read_manifest
from qopt.cli import main
from qopt.compile import CompileResult, compile
from qopt.emit.kernel_binaries import fits, forms_of_calls
from qopt.emit.onnx_cuda import widen_missing
from qopt.emit.onnx_kernels import DOMAIN
from qopt.errors import UnsupportedError, UsageError
from qopt.graph import Graph
from qopt.kernel_build import INDEX
from qopt.runtime.generate import load
from qopt.runtime.session import OnnxSession, providers_for

Tiny = Callable[..., tuple[Path, Any]]

CUDA, TRITON = "onnx-cuda", "onnx-cuda-triton"
# two experts, both taken: rounding to half precision then turns no choice of the router
OVERRIDES: dict[str, dict[str, int]] = {"gpt_oss": {"num_local_experts": 2, "num_experts": 2}}
FAMILIES = ("llama", "gemma2", "gpt_oss", "gpt_neox", "qwen3")
FAST = ("llama", "gemma2", "gpt_oss")  # grouped heads; soft-cap and a window; sinks and experts
# how many tokens each row gets in each call
PROBES = (
    [[9, 9, 9]],
    [[7, 7, 7], [1, 1, 1], [1, 1, 1]],
    [[6], [4], [1]],
    [[9, 6, 3], [1, 1, 1], [1, 1, 1]],
    [[3, 3], [1, 1], [1, 1], [1, 1]],
)
BATCHED_CHUNKS = ([[4, 4, 4], [6, 6, 6], [1, 1, 1]], [[9, 6, 3], [4, 2, 3], [1, 1, 1]])
TOLD = {CUDA: "the CUDA provider's kernels were not run", TRITON: "no Triton kernel was run"}


def checked(
    tiny: Tiny, family: str, out: Path, target: str, dtype: str, recipe: str = "baseline"
) -> CompileResult:
    folder = tiny(family, **OVERRIDES.get(family, {}))[0]
    return compile(
        str(folder), recipe, out, target=target, dtype=dtype, check="final", architectures=()
    )


def nodes_of(folder: Path) -> Counter[str]:
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    return Counter(f"{n.domain}.{n.op_type}".lstrip(".") for n in graph.node)


def check_functions(model: Any) -> None:
    """Every `ai.qopt` node has a function, and functions hold standard ops alone."""
    there = {f.name: f for f in model.functions}
    called = {n.op_type: n for n in model.graph.node if n.domain == DOMAIN}
    assert set(there) == set(called)
    for name, function in there.items():
        assert {n.domain for n in function.node} == {""}
        assert [(o.domain, o.version) for o in function.opset_import] == [
            ("", next(o.version for o in model.opset_import if not o.domain))
        ]
        assert len(called[name].input) <= len(function.input)
        assert {a.name for a in called[name].attribute} == set(function.attribute)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.slow] * (f not in FAST)) for f in FAMILIES]
)
@pytest.mark.parametrize(
    ("target", "dtype", "limit"),
    [(CUDA, "fp16", 2e-2), (TRITON, "fp32", 1e-5)],
    ids=["cuda", "triton"],
)
def test_families_agree(
    family: str,
    target: str,
    dtype: str,
    limit: float,
    compiled: Any,
    tiny: Tiny,
    distance: Any,
) -> None:
    config = OVERRIDES.get(family, {})
    out = compiled(family, target=target, dtype=dtype, architectures=(), **config)
    probes = PROBES + (() if target == CUDA else BATCHED_CHUNKS)
    assert all(distance(out, tiny(family, **config)[1], calls) < limit for calls in probes)
    manifest, taken = read_manifest(out), nodes_of(out)
    if target == CUDA:
        assert taken["com.microsoft.GroupQueryAttention"] == 2
        assert taken["com.microsoft.MoE"] == (2 if family == "gpt_oss" else 0)
        assert not manifest.batched_chunks
        genai = json.loads((out / "genai_config.json").read_text())["model"]["decoder"]
        assert genai["session_options"]["provider_options"] == [{"cuda": {}}]
    else:
        assert taken[f"{DOMAIN}.cached_attention"] + taken[f"{DOMAIN}.cached_attention_v2"] == 2
        assert manifest.batched_chunks
        check_functions(onnx.load(out / "model.onnx", load_external_data=False))


@pytest.mark.parametrize(("target", "dtype"), [(CUDA, "fp16"), (TRITON, "fp32")])
def test_the_check_says_what_it_did_not_run(
    target: str, dtype: str, tiny: Tiny, tmp_path: Path
) -> None:
    result = checked(tiny, "mistral", tmp_path / "out", target, dtype)
    rows = {row.probe: row for row in result.report.checks}
    assert all(row.passed for row in rows.values())
    assert "unequal lengths" in rows
    assert "past the window of 4" in rows
    assert ("chunked prefill, batch 3" in rows) == (target == TRITON)
    assert any(TOLD[target] in note for note in result.notes)
    if target == TRITON:
        assert max(row.figures["max"] for row in rows.values()) < 1e-5


@pytest.mark.parametrize(
    ("target", "family", "recipe"),
    [
        (CUDA, "llama", "low-latency-cuda"),
        pytest.param(TRITON, "llama", "low-latency-gpu", marks=pytest.mark.slow),
        (TRITON, "gpt_oss", "low-latency"),  # onnx has a bf16 TopK from opset 24 on
    ],
)
def test_bf16_is_checked_in_fp32_and_says_so(
    target: str, family: str, recipe: str, tiny: Tiny, tmp_path: Path
) -> None:
    result = checked(tiny, family, tmp_path / "out", target, "bf16", recipe)
    assert read_manifest(tmp_path / "out").dtype == "bfloat16"
    assert any("bf16 was not run" in note for note in result.notes)
    model = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False)
    kinds = {t.data_type for t in model.graph.initializer if t.external_data}
    assert kinds == {TensorProto.BFLOAT16}  # the artifact itself is bf16
    made = load(tmp_path / "out", device="cpu").generate_ids([[5, 9, 11, 40]], max_new_tokens=4)
    assert made[0].tokens


def test_the_recipe_for_gpus_takes_every_kernel(compiled: Any, tiny: Tiny, distance: Any) -> None:
    out = compiled("qwen3", "low-latency-gpu", target=TRITON, dtype="fp32", architectures=())
    taken = nodes_of(out)
    for op in ("rms_norm_linear", "rotary_from_positions", "cached_attention"):
        assert taken[f"{DOMAIN}.{op}"] >= 2
    calls = PROBES[1:2] + BATCHED_CHUNKS[1:]
    assert all(distance(out, tiny("qwen3")[1], c, last=True) < 1e-5 for c in calls)
    check_functions(onnx.load(out / "model.onnx", load_external_data=False))


def test_onnx_s_own_evaluator_runs_the_functions(compiled: Any, tiny: Tiny) -> None:
    model = tiny("mistral")[1]
    out = compiled("mistral", target=TRITON, dtype="fp32", architectures=())
    ids = torch.tensor([[5, 9, 11, 40, 7, 8]])  # past the window of 4
    past = {
        f"past_key_values.{layer}.{kind}": np.zeros((1, 2, 0, 16), np.float32)
        for layer in (0, 1)
        for kind in ("key", "value")
    }
    feeds = {
        "input_ids": ids.numpy(),
        "attention_mask": np.ones((1, 6), np.int64),
        "position_ids": np.arange(6)[None],
        "num_logits_to_keep": np.zeros(1, np.int64),
    }
    file = onnx.load(out / "model.onnx")
    wanted = {i.name for i in file.graph.input}
    given = {name: array for name, array in (feeds | past).items() if name in wanted}
    evaluator: Any = ReferenceEvaluator(file)
    got = evaluator.run(["logits"], given)[0]
    with torch.no_grad():
        want = model(ids).logits.numpy()
    assert np.abs(got - want).max() < 1e-4


def test_binaries_lie_in_the_folder_the_same_each_time(tiny: Tiny, tmp_path: Path) -> None:
    if kernel.load():
        pytest.skip("Triton is for Linux alone")
    files = []
    for name in ("one", "two"):
        compile(
            str(tiny("llama")[0]),
            "baseline",
            tmp_path / name,
            target=TRITON,
            check="off",
            architectures=("sm_90",),
        )
        files.append(read_manifest(tmp_path / name).files)
    assert files[0] == files[1]
    index = json.loads((tmp_path / "one" / "kernels" / "sm_90" / INDEX).read_text())
    listed = {f"kernels/sm_90/{entry['file']}" for entry in index["kernels"]}
    assert listed | {f"kernels/sm_90/{INDEX}"} == {f for f in files[0] if f.startswith("kernels/")}
    ops = {entry["op"] for entry in index["kernels"]}
    assert ops == {"rms_norm", "add_rms_norm", "gated", "cached_attention"}
    assert len(index["kernels"]) == 6
    Artifact.load(tmp_path / "one").verify_files()


def test_without_triton_it_says_that_no_kernels_lie_there(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "load", lambda: "Triton is not installed")
    result = compile(
        str(tiny("llama")[0]), "baseline", tmp_path / "out", target=TRITON, check="off"
    )
    assert "the folder holds no Triton kernels: Triton is not installed" in result.notes
    assert not (tmp_path / "out" / "kernels").exists()


@pytest.mark.parametrize("size", [16, 128])
def test_the_forms_are_those_of_the_head_and_type(size: int, captured: Any, run: Any) -> None:
    if kernel.load():
        pytest.skip("Triton is for Linux alone")
    graph: Graph = captured("llama", torch.float16, head_dim=size)
    run(graph, "canonicalize", "fuse-silu-mul", "materialize-kv-cache")
    calls = [n for n in graph.nodes if str(n.target) in ("qopt.cached_attention.default",)]
    forms = [form for _, form in forms_of_calls(calls, "sm_90")]
    assert {dict(form.constants)["BLOCK_D"] for form in forms} == {max(64, size)}
    assert len(forms) == 3  # few tokens, their join, many tokens
    assert all("*fp16" in dict(form.types).values() for form in forms)
    assert not any(fits(form, "bf16", ()) for form in forms)


def test_without_the_cuda_provider_it_stops_unless_told(
    compiled: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = compiled("llama", target=CUDA, dtype="fp16")
    feeds: dict[str, Any] = {
        f"past_key_values.{layer}.{kind}": np.zeros((1, 2, 0, 16), np.float16)
        for layer in (0, 1)
        for kind in ("key", "value")
    }
    feeds |= {"input_ids": np.array([[5, 9]]), "attention_mask": np.ones((1, 2), np.int64)}
    np.savez(tmp_path / "in.npz", **feeds)
    command = ["run", str(out), "--inputs", str(tmp_path / "in.npz")]
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "no CUDAExecutionProvider" in told
    assert "qopt-compiler[gpu]" in told
    assert "--device cpu" in told
    assert main([*command, "--device", "cpu"]) == 0
    assert "the CUDA provider's kernels were not run" in capsys.readouterr().err
    with pytest.raises(UsageError, match="no CUDAExecutionProvider"):
        load(out)


def test_rows_with_a_filled_cache_take_one_token_each(compiled: Any) -> None:
    decoder = load(compiled("llama", target=CUDA, dtype="fp16"), device="cpu").decoder(2)
    decoder.forward(np.array([[5, 9, 3], [7, 8, 0]]), np.array([3, 2]))
    assert decoder.forward(np.array([[4], [6]])).shape == (2, 1, 97)
    with pytest.raises(UnsupportedError, match="2 rows cannot feed 2 tokens each"):
        decoder.forward(np.array([[4, 5], [6, 7]]))


def test_fp32_is_refused_and_a_checkpoint_in_it_becomes_fp16(compiled: Any) -> None:
    with pytest.raises(UnsupportedError, match="onnx-cuda cannot run fp32"):
        compiled("llama", target=CUDA, dtype="fp32")
    manifest = read_manifest(compiled("llama", "low-latency", target=CUDA))
    assert manifest.dtype == "float16"
    assert any("it becomes fp16" in note for note in manifest.notes)


def test_where_an_artifact_runs() -> None:
    cuda, cpu = "CUDAExecutionProvider", "CPUExecutionProvider"
    assert providers_for(CUDA) == (cuda, cpu)
    assert providers_for(CUDA, "cpu") == providers_for("onnx") == (cpu,)
    assert providers_for("onnx", "cuda") == (cuda, cpu)


def bf16_graph(path: Path, *nodes: Any) -> None:
    sides = [helper.make_tensor_value_info(n, TensorProto.BFLOAT16, [2, 3]) for n in ("x", "y")]
    graph = helper.make_graph(nodes, "g", sides[:1], sides[1:])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path
    )


def test_ops_without_a_bf16_kernel_compute_in_fp32(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    bf16_graph(
        path,
        helper.make_node("Neg", ["x"], ["z"], name="neg"),
        helper.make_node("Floor", ["z"], ["y"], name="floor"),
    )
    assert widen_missing(path) == ["Floor 1x"]
    kinds = [n.op_type for n in onnx.load(path).graph.node]
    assert kinds == ["Neg", "Cast", "Floor", "Cast"]
    onnx.checker.check_model(onnx.load(path), full_check=True)
    x = np.array([[0.5, -1.5, 2.0]] * 2, ml_dtypes.bfloat16)
    got = OnnxSession(path, wide=True).run({"x": x})["y"]
    assert got.tolist() == [[-1.0, 1.0, -2.0]] * 2


def test_bf16_goes_in_and_out_where_the_provider_has_it(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    bf16_graph(path, helper.make_node("Identity", ["x"], ["y"]))
    session = OnnxSession(path)
    x = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    assert np.array_equal(session.run({"x": x})["y"], x)
    assert np.array_equal(session.tensor(x).numpy(), x)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "dtype"), [(CUDA, "fp16"), (TRITON, "fp32")])
def test_smollm2(target: str, dtype: str, tmp_path: Path) -> None:
    result = compile(
        "smollm2-135m",
        "low-latency-cuda" if target == CUDA else "low-latency",
        tmp_path / "out",
        target=target,
        dtype=dtype,
        check="final",
        architectures=(),
    )
    assert all(row.passed for row in result.report.checks)
    answer = load(tmp_path / "out", device="cpu").generate(
        [{"role": "user", "content": "What is the capital of France?"}], temperature=0
    )
    assert "Paris" in answer.text


@pytest.mark.parametrize("target", ["onnx-cuda", "torchscript-cuda"])
def test_architectures_are_for_the_target_that_holds_kernels(
    target: str, tiny: Tiny, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=f"--arch is for onnx-cuda-triton, not {target}"):
        compile(
            str(tiny("llama")[0]),
            "baseline",
            tmp_path / "o",
            target=target,
            architectures=["sm_90"],
        )
    assert not (tmp_path / "o").exists()
