"""The streamed check: what does not fit the memory allowed is checked part by part."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from qopt import streamed
from qopt.artifact import Artifact
from qopt.check import Verification
from qopt.compile import compile
from qopt.errors import ResourceError
from qopt.evaluate import evaluate
from qopt.final_check import Job, run_job, verify
from qopt.memory import Weights, plan, weights_of_artifact, weights_of_source
from qopt.runtime.parts import PartsSession
from qopt.sources import open_source
from qopt.streamed import Spill, StreamedReference, assembled
from qopt.weights import LazyWeight

Compiled = Callable[..., Path]
Tiny = Callable[..., tuple[Path, Any]]

FAMILIES = ("llama", "mistral", "gemma2", "gpt2", "gpt_neox", "phi", "bloom", "falcon", "opt")
MORE = ("qwen3", "gemma3_text", "gptj", "phi3", "mixtral", "qwen2_moe", "gpt_oss", "lfm2")


def checked(folder: Path, model: Path) -> Verification:
    return run_job(Job(str(model), streamed=True), lambda: str(folder))


@pytest.mark.parametrize(
    ("family", "target"),
    [(family, "onnx-cpu") for family in FAMILIES]
    + [pytest.param(family, "onnx-cpu", marks=pytest.mark.slow) for family in MORE]
    + [pytest.param(f, "onnx", marks=pytest.mark.slow) for f in FAMILIES + MORE]
    + [("llama", "torchscript-cpu")],
)
def test_a_right_artifact_passes_and_figures_are_those_of_the_whole_check(
    family: str, target: str, compiled: Compiled, tiny: Tiny
) -> None:
    folder, model = compiled(family, target=target), tiny(family)[0]
    found = checked(folder, model)
    assert found.passed
    assert "streamed check" in found.ran[0]
    whole = run_job(Job(str(model)), lambda: str(folder))
    assert [p.probe for p in found.probes] == [p.probe for p in whole.probes]
    for ours, theirs in zip(found.probes, whole.probes, strict=True):
        assert ours.limits == pytest.approx(theirs.limits, rel=1e-3)
        assert ours.figures["max"] == pytest.approx(theirs.figures["max"], abs=2e-5)


def scale(node: Any) -> None:
    (attribute,) = [a for a in node.attribute if a.name == "scale"]
    attribute.f = 0.26


def epsilon(node: Any) -> None:
    (attribute,) = [a for a in node.attribute if a.name == "epsilon"]
    attribute.f = 1e-2


WRONG = {"GroupQueryAttention": scale, "SkipSimplifiedLayerNormalization": epsilon}


@pytest.mark.parametrize("op", WRONG)
def test_a_wrong_artifact_is_caught(
    op: str, compiled: Compiled, tiny: Tiny, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(compiled("llama"), folder)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    WRONG[op]([node for node in model.graph.node if node.op_type == op][-1])
    onnx.save(model, folder / "model.onnx")
    manifest = json.loads((folder / "qopt_manifest.json").read_text())
    manifest["files"]["model.onnx"]["size"] = (folder / "model.onnx").stat().st_size
    (folder / "qopt_manifest.json").write_text(json.dumps(manifest))
    assert not checked(folder, tiny("llama")[0]).passed


def test_no_more_than_one_weight_of_the_reference_is_in_memory(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(str(tiny("llama")[0]))
    loads: list[LazyWeight] = []

    def load(weight: LazyWeight) -> torch.Tensor:
        loads.append(weight)
        return assembled(weight)

    monkeypatch.setattr(streamed, "assembled", load)
    reference = StreamedReference(source)
    rows = [np.arange(length) % 97 for length in (3, 9, 1)]
    answers = list(reference.stream(rows))
    assert [answer.shape for answer in answers] == [(3, 97), (9, 97), (1, 97)]
    large = [weight for weight in loads if len(weight.shape) == 2]
    assert len(large) == 2 * 7 + 2  # seven matrices a layer, embedding and logits, each once
    model = tiny("llama")[1]
    for row, answer in zip(rows, answers, strict=True):
        with torch.no_grad():
            want = model(torch.from_numpy(row[None])).logits[0].numpy()
        np.testing.assert_allclose(answer, want, atol=1e-5)


def test_the_artifact_is_cut_at_its_layers(compiled: Compiled) -> None:
    session = parts_of(compiled("llama", num_hidden_layers=4))
    attention = [sum(n.op_type == "GroupQueryAttention" for n in p.nodes) for p in session.parts]
    assert attention == [1, 1, 1, 1, 0]
    held = [
        {name for node in part.nodes for name in node.input if is_large(session, name)}
        for part in session.parts
    ]
    assert all(held)
    layers = [{name for name in names if ".layers." in name} for names in held]
    assert sum(map(len, layers)) == len(set.union(*layers)) == 16  # merged q/k/v and gate/up
    assert max(map(len, layers)) <= 5
    assert all(len(set(part.inputs) - set(session.inputs)) <= 6 for part in session.parts)


def parts_of(folder: Path) -> PartsSession:
    manifest = Artifact.load(folder).manifest
    names = [spec.name for spec in manifest.outputs if spec.name.startswith("present")]
    states = {name.replace("present", "past_key_values"): name for name in names}
    return PartsSession(folder / "model.onnx", states)


def is_large(session: PartsSession, name: str) -> bool:
    return name in session.weights and bool(session.weights[name].external_data)


def test_a_compile_that_is_short_of_memory_says_how_it_checked(tiny: Tiny, tmp_path: Path) -> None:
    model = str(tiny("llama")[0])
    weights = weights_of_source(open_source(model), torch.float32)
    budget = (weights.checked_whole + weights.checked_in_parts) // 2
    result = compile(model, "baseline", tmp_path / "out", max_ram=f"{budget}B")
    assert any("streamed check" in note for note in result.notes)
    assert any(re.search(r"run in 3 parts", note) for note in result.notes)
    assert all(row.passed for row in result.report.checks)
    found = verify(tmp_path / "out", max_ram=f"{budget}B")
    assert found.passed
    assert any("part by part" in note for note in found.notes)


def test_a_gate_is_measured_in_parts(tiny: Tiny, compiled: Compiled, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(compiled("llama"), folder)
    (folder / "tokenizer.json").write_text(TOKENIZER)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(str(i * 7 % 97) for i in range(200)))
    model = tiny("llama")[0]
    whole = evaluate(folder, text, against=model, windows=4, length=16)
    weights = weights_of_artifact(Artifact.load(folder))
    budget = (weights.measured_whole + weights.checked_in_parts) // 2
    least = max(budget, weights.checked_in_parts)
    parts = evaluate(folder, text, against=model, windows=4, length=16, max_ram=f"{least}B")
    assert parts.perplexity == pytest.approx(whole.perplexity, rel=1e-5)
    assert parts.against_perplexity == pytest.approx(whole.against_perplexity, rel=1e-5)


TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {str(i): i for i in range(97)},
            "unk_token": "0",
        },
    }
)

GB = 10**9
BIG = Weights(elements=8 * GB, heaviest=GB // 2, itemsize=4)


def test_the_plan_chooses_by_the_memory_allowed() -> None:
    roomy = plan(BIG, 100 * GB, decoder=True, streams=True, checked=True)
    assert not roomy.check_in_parts
    assert "the check needs about" in roomy.notes[0]
    tight = plan(BIG, 8 * GB, decoder=True, streams=True, checked=True)
    assert tight.check_in_parts
    assert "8.0 may be used" in tight.notes[0]
    assert not plan(BIG, 2 * GB, decoder=True, streams=True, checked=False).check_in_parts


def test_a_script_is_run_whole_and_its_reference_in_parts() -> None:
    found = plan(BIG, 40 * GB, decoder=True, streams=False, checked=True)
    assert found.check_in_parts
    with pytest.raises(ResourceError, match="needed"):
        plan(BIG, 30 * GB, decoder=True, streams=False, checked=True)


@pytest.mark.parametrize(
    ("budget", "words", "options"),
    [
        (3 * GB, "largest layer", {"decoder": True, "streams": True, "checked": True}),
        (8 * GB, "the whole module", {"decoder": False, "streams": True, "checked": True}),
        (8 * GB, "saved from memory", {"decoder": True, "streams": False, "checked": False}),
        (
            8 * GB,
            "milliseconds",
            {"decoder": True, "streams": True, "checked": False, "timed": True},
        ),
    ],
)
def test_what_cannot_be_done_even_in_parts_is_refused_with_the_number(
    budget: int, words: str, options: dict[str, Any]
) -> None:
    with pytest.raises(ResourceError, match=r"about [\d,]+ MB of memory are needed") as caught:
        plan(BIG, budget, **options)
    assert words in str(caught.value)
    assert "--max-ram" in str(caught.value)


def test_a_weight_is_assembled_from_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(37, 5).bfloat16()
    weight = LazyWeight.memory(tensor).cast(torch.float32)
    monkeypatch.setattr(LazyWeight.chunks, "__defaults__", (64,))
    assert len(list(weight.chunks())) > 10
    assert torch.equal(assembled(weight), tensor.float())
    assert torch.equal(assembled(LazyWeight.memory(torch.tensor(3.0))), torch.tensor(3.0))


def test_answers_lie_in_a_file_without_a_name(tmp_path: Path) -> None:
    spill = Spill(tmp_path)
    first, second = np.arange(10, dtype=np.float32), np.ones((3, 4), np.float32)
    kept = [spill.keep(first), spill.keep(second), spill.keep(np.empty((0, 4), np.float32))]
    assert np.array_equal(kept[0], first)
    assert np.array_equal(kept[1], second)
    assert kept[2].shape == (0, 4)
    assert not os.listdir(tmp_path)


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spill = Spill(tmp_path)
    with open("/dev/full", "r+b", buffering=0) as full:
        monkeypatch.setattr(spill, "file", full)
        with pytest.raises(ResourceError, match="no room for the logits"):
            spill.keep(np.ones(10, np.float32))
