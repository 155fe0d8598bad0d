"""Families of decoders and other modules, compiled and compared with eager transformers or torch.

Expected values come from the model run alone: one row at a time, unpadded and without a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from qopt.artifact import read_manifest
from qopt.compat import TRANSFORMERS_5
from qopt.compile import compile
from qopt.errors import UnsupportedError, UsageError

Compiled = Callable[..., Path]
Tiny = Callable[..., tuple[Path, Any]]
Distance = Callable[..., float]

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
EXPERTS = {"mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"}
TARGETS = ("onnx-cpu", "onnx", "torchscript-cpu")
WAYS = [(t, r) for t in TARGETS for r in ("baseline", "low-latency")]
FAST = {  # one of each kind; -m slow runs the rest
    ("llama", "onnx-cpu", "baseline"),
    ("llama", "onnx", "low-latency"),
    ("gemma3_text", "onnx-cpu", "low-latency"),
    ("gemma2", "onnx", "baseline"),
    ("gpt_neox", "onnx-cpu", "low-latency"),
    ("gpt2", "onnx-cpu", "baseline"),
    ("gptj", "onnx", "baseline"),
    ("opt", "onnx", "low-latency"),
    ("gpt_oss", "onnx-cpu", "low-latency"),
    ("mixtral", "onnx", "baseline"),
    ("falcon", "onnx-cpu", "baseline"),
    ("bloom", "onnx", "low-latency"),
    ("gemma2", "torchscript-cpu", "baseline"),
    ("mistral", "torchscript-cpu", "low-latency"),
}

# Tokens of each row in each call. The window is 4 where a family has one.
PROBES = {
    "one token": [[1]],
    "prefill": [[11]],
    "prefill, batch 3": [[9] * 3],
    "decode, batch 3": [[7] * 3, [1] * 3, [1] * 3],
    "decode from the first token": [[1] * 2, [1] * 2, [1] * 2, [1] * 2, [1] * 2, [1] * 2],
    "chunks": [[6], [4], [1], [3]],
    "chunks, batch 3": [[4] * 3, [6] * 3, [1] * 3],
    "past the window": [[11] * 2, [1] * 2, [1] * 2],
    "up to the window's edge": [[3] * 2, [1] * 2, [1] * 2, [1] * 2],
    "over its edge in one call": [[3] * 2, [5] * 2, [1] * 2],
    "unequal lengths": [[9, 6, 3], [4, 2, 3], [1, 1, 1], [1, 1, 1]],
    "unequal lengths, decode": [[2, 12, 7], *[[1, 1, 1]] * 6],
    "the whole context": [[60], [3], [1]],
}


def ways() -> list[Any]:
    return [
        pytest.param(*way, marks=() if way in FAST else pytest.mark.slow, id="-".join(way))
        for way in ((family, *rest) for family in FAMILIES for rest in WAYS)
    ]


@pytest.mark.parametrize(("family", "target", "recipe"), ways())
def test_family(
    family: str, target: str, recipe: str, compiled: Compiled, tiny: Tiny, distance: Distance
) -> None:
    if family in EXPERTS and not TRANSFORMERS_5:  # its loop over experts depends on the data
        with pytest.raises(UnsupportedError, match="transformers 5"):
            compiled(family, recipe, target=target)
        return
    model = tiny(family)[1]
    # a script cannot be asked for more logits than its recipe says
    scripted = target.startswith("torchscript")
    more = {"logits": "all"} if scripted and recipe == "low-latency" else {}
    out = compiled(family, recipe, target=target, **more)
    assert read_manifest(out).model.ragged
    found = {name: distance(out, model, calls) for name, calls in PROBES.items()}
    assert {name: d for name, d in found.items() if not d <= 1e-4} == {}
    if recipe == "low-latency":  # what it gives when it is not asked for more
        out = compiled(family, recipe, target=target)
        assert distance(out, model, PROBES["unequal lengths"], last=True) <= 1e-4


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **more}}


# What a config may ask for beyond the common: the weights are large enough for it to matter.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "heads wider than the hidden size": ("llama", {"head_dim": 32}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "as many key heads as query heads": ("llama", {"num_key_value_heads": 4}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "linear rope": ("llama", rope("linear")),
    "yarn": ("llama", rope("yarn", original_max_position_embeddings=16)),
    "yarn, its factor given": (
        "llama",
        rope("yarn", original_max_position_embeddings=16, attention_factor=1.0),
    ),
    "llama3 rope": (
        "llama",
        rope(
            "llama3",
            original_max_position_embeddings=16,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
    ),
    "GELU": ("llama", {"hidden_act": "gelu"}),
    "windows in some layers": (
        "gemma3_text",
        {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "soft-caps": ("gemma2", {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}),
    "a scale of its own": ("gemma2", {"query_pre_attn_scalar": 3}),
    "part of the head rotated": ("phi", {"partial_rotary_factor": 0.5}),
    "pairs side by side": ("gptj", {"rotary_dim": 16}),
    "another residual": ("gpt_neox", {"use_parallel_residual": False}),
    "norms behind": ("opt", {"do_layer_norm_before": False}),
    "logits scaled": ("granite", {"logits_scaling": 3.0, "residual_multiplier": 0.3}),
    "a window and sinks": ("gpt_oss", {"sliding_window": 3}),
}
FAST_VARIANTS = {"yarn", "soft-caps", "windows in some layers", "part of the head rotated"}


@pytest.mark.parametrize(
    ("case", "target"),
    [
        pytest.param(
            case,
            target,
            marks=() if case in FAST_VARIANTS and target == "onnx-cpu" else pytest.mark.slow,
            id=f"{case}, {target}",
        )
        for case in VARIANTS
        for target in ("onnx-cpu", "onnx")
    ],
)
def test_variant(
    case: str, target: str, compiled: Compiled, tiny: Tiny, distance: Distance
) -> None:
    family, overrides = VARIANTS[case]
    if family in EXPERTS and not TRANSFORMERS_5:
        pytest.skip("experts need transformers 5")
    loud = {"init_std": 0.1} if family == "opt" else {"initializer_range": 0.1}
    model = tiny(family, **loud, **overrides)[1]
    with torch.no_grad():
        highest = float(model(input_ids=torch.arange(3, 60)[None]).logits.abs().max())
    out = compiled(family, "low-latency", target=target, **loud, **overrides)
    limit = 1e-4 * max(1, highest / 10)
    for name in ("chunks, batch 3", "past the window", "unequal lengths", "the whole context"):
        assert distance(out, model, PROBES[name]) <= limit, name


@pytest.mark.parametrize("target", ["onnx-cpu", "onnx"])
def test_half_precision(target: str, compiled: Compiled, tiny: Tiny, distance: Distance) -> None:
    out = compiled("llama", target=target, dtype="fp16")
    assert read_manifest(out).dtype == "float16"
    for name in ("prefill", "decode, batch 3", "chunks, batch 3", "unequal lengths"):
        assert 0 < distance(out, tiny("llama")[1], PROBES[name]) <= 2e-2


def rewritten(source: Path, folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A copy of a checkpoint with its tensors changed."""
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix == ".json":
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    changed = {name: change(tensor) for name, tensor in tensors.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_bf16_becomes_fp32_and_that_is_said(tiny: Tiny, distance: Distance, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    folder = rewritten(tiny("llama")[0], tmp_path / "bf16", lambda t: t.to(torch.bfloat16))
    result = compile(str(folder), "low-latency", tmp_path / "out", check="off")
    assert any("bf16" in note and "fp32" in note for note in result.notes)
    assert any("bf16" in note for note in read_manifest(result.out).notes)
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    assert distance(result.out, model, PROBES["chunks, batch 3"]) <= 1e-4


@pytest.mark.skipif(not TRANSFORMERS_5, reason="experts are captured from transformers 5 on")
@pytest.mark.parametrize("target", ["onnx-cpu", "onnx"])
@pytest.mark.parametrize("experts", [4, 16])
def test_experts_in_fp16(experts: int, target: str, tiny: Tiny, tmp_path: Path) -> None:
    """onnxruntime adds no fp16 at places: a sum over experts in it must not be what is written."""
    folder, _ = tiny("mixtral", num_local_experts=experts)
    result = compile(str(folder), "baseline", tmp_path / "out", target=target, dtype="fp16")
    assert all(row.passed for row in result.report.checks)
    assert len([row for row in result.report.checks if row.limits]) > 5


def test_fp16_refuses_what_overflows(tiny: Tiny, tmp_path: Path) -> None:
    folder = rewritten(
        tiny("llama")[0], tmp_path / "big", lambda t: t * 1e6 if t.shape == (97, 64) else t
    )
    with pytest.raises(UsageError, match="does not fit fp16"):
        compile(str(folder), "baseline", tmp_path / "out", dtype="fp16", check="off")
    assert not (tmp_path / "out").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["big"]


# Modules that are no decoders ----------------------------------------------------------------

MODULES = """
import torch
from torch import nn

def mlp():
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(12, 40), nn.GELU(), nn.LayerNorm(40), nn.Dropout(0.5), nn.Linear(40, 5)
    )
    return module, (torch.randn(4, 12),), ({0: torch.export.Dim("rows")},)

def conv():
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.SiLU(), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 7),
    )
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.uniform_(-1, 1)
            part.running_var.uniform_(0.5, 2)
    return module, (torch.randn(2, 3, 32, 32),), ({0: torch.export.Dim("rows")},)

def bert():
    from transformers import BertConfig, BertModel
    torch.manual_seed(0)
    config = BertConfig(vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                        num_attention_heads=4, max_position_embeddings=64)
    model = BertModel(config, add_pooling_layer=False).eval()
    ids = torch.randint(3, 97, (2, 9))
    rows, tokens = torch.export.Dim("rows"), torch.export.Dim("tokens", max=64)
    shape = {0: rows, 1: tokens}
    return model, (ids, torch.ones_like(ids)), (shape, shape)
"""


@pytest.fixture(scope="session")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("modules") / "modules.py"
    path.write_text(MODULES)
    return path


def made(path: Path, name: str) -> nn.Module:
    """The module that a function of the file gives, made by running the file here."""
    names: dict[str, Any] = {}
    exec(path.read_text(), names)
    module: nn.Module = names[name]()[0]
    return module.eval()


def run_file(out: Path, *arrays: torch.Tensor) -> list[np.ndarray[Any, Any]]:
    if (out / "model.pt").is_file():
        module: Any = torch.jit.load(out / "model.pt")  # type: ignore[no-untyped-call]
        return [made.numpy() for made in module(*arrays)]
    session = onnxruntime.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])
    names = [spec.name for spec in session.get_inputs()]
    feeds = {name: array.numpy() for name, array in zip(names, arrays, strict=True)}
    results: list[np.ndarray[Any, Any]] = session.run(None, feeds)
    return results


@pytest.mark.parametrize("target", ["onnx-cpu", "onnx", "torchscript-cpu"])
@pytest.mark.parametrize(("name", "shape"), [("mlp", (12,)), ("conv", (3, 32, 32))])
def test_module(
    name: str, shape: tuple[int, ...], target: str, modules: Path, tmp_path: Path
) -> None:
    check = "every-pass" if (name, target) == ("conv", "onnx-cpu") else "off"
    result = compile(f"{modules}:{name}", "baseline", tmp_path / "out", target=target, check=check)
    assert all(row.passed for row in result.report.checks)
    assert (check == "off") == (not result.report.checks)
    module = made(modules, name)
    for rows in (1, 2, 5, 17):
        x = torch.randn(rows, *shape)
        with torch.no_grad():
            want = module(x).numpy()
        (got,) = run_file(result.out, x)
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("target", ["onnx-cpu", "onnx", "torchscript-cpu"])
def test_encoder(target: str, modules: Path, tmp_path: Path) -> None:
    out = compile(f"{modules}:bert", "baseline", tmp_path / "out", target=target, check="off").out
    model = made(modules, "bert")
    for rows, tokens in ((1, 1), (3, 20), (2, 64)):
        ids = torch.randint(3, 97, (rows, tokens))
        mask = torch.ones_like(ids)
        if tokens > 1:
            mask[0, tokens // 2 :] = 0
        with torch.no_grad():
            want = model(ids, mask).last_hidden_state.numpy()
        got = run_file(out, ids, mask)[0]
        np.testing.assert_allclose(got, want, atol=1e-4)
