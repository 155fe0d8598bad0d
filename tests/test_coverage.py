"""`qopt coverage`: the runner tells exact, refused, wrong, hung and crashed types apart."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from qopt import coverage
from qopt.coverage import Attempt, Coverage, attempt, compared, compiled, in_child, make_tiny
from qopt.errors import GateError, UsageError

FEW = ["bloom", "llama"]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


# The parent ----------------------------------------------------------------------------------


def test_a_type_that_hangs_is_stopped_and_told() -> None:
    found = in_child(python("import time; time.sleep(60)"), "slow", 1.0, 1 << 40)
    assert found.outcome == "failed"
    assert "time limit" in found.reason
    assert found.seconds < 30


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; print('noise'); sys.exit('out of luck')", "code 1: out of luck"),
        ("import os; os.kill(os.getpid(), 9)", "code -9"),
        ("print('no outcome')", "code 0"),
    ],
)
def test_a_type_that_crashes_is_told_with_its_last_words(code: str, said: str) -> None:
    found = in_child(python(code), "crash", 30.0, 1 << 40)
    assert (found.type, found.outcome) == ("crash", "failed")
    assert said in found.reason


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_type_that_outgrows_its_memory_is_stopped() -> None:
    code = "import time; held = bytearray(400 << 20); time.sleep(60)"
    found = in_child(python(code), "big", 30.0, 200 << 20)
    assert found.outcome == "failed"
    assert "200 MB" in found.reason


def test_the_last_line_of_a_child_is_its_outcome() -> None:
    told = {"type": "x", "outcome": "refused", "reason": "because"}
    found = in_child(python(f"print('{{noise'); print({json.dumps(told)!r})"), "x", 30.0, 1 << 40)
    assert (found.outcome, found.reason) == ("refused", "because")


def test_unknown_types_are_refused() -> None:
    with pytest.raises(UsageError, match="lama"):
        coverage.run(["lama"])


def test_the_sample_is_fixed_and_known_to_transformers() -> None:
    kinds = coverage.data()["sample"]
    sample = coverage.chosen_types(None, sample=True)
    assert len(sample) == len(set(sample)) == 25
    assert sample == [kind for group in kinds.values() for kind in group]


def test_no_type_is_left_out() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert coverage.chosen_types(None, sample=False) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_settings_of_the_data_file_are_for_types_that_exist() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert [kind for kind in coverage.data()["types"] if kind not in CONFIG_MAPPING] == []


# The child -----------------------------------------------------------------------------------


def test_an_artifact_that_differs_is_wrong(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model")
    road = compiled(str(tmp_path / "model"), tmp_path / "out", "onnx-cpu")
    assert compared("llama", model, tmp_path / "out", road).outcome == "exact"
    with torch.no_grad():
        model.lm_head.weight[3] += 0.01
    found = compared("llama", model, tmp_path / "out", road)
    assert found.outcome == "wrong"
    assert found.difference is not None
    assert found.difference > 1e-4
    assert "prefill" in found.reason
    assert "unequal lengths" in found.reason


def test_a_runtime_that_refuses_the_artifact_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import qopt.final_check

    model = make_tiny("llama", tmp_path / "model")
    compiled(str(tmp_path / "model"), tmp_path / "out", "onnx-cpu")

    def broken(*_: Any) -> Any:
        raise RuntimeError("invalid expand shape")

    monkeypatch.setattr(qopt.final_check.DecoderRun, "play", broken)
    found = compared("llama", model, tmp_path / "out", "")
    assert found.outcome == "wrong"
    assert "invalid expand shape" in found.reason


def test_a_refusal_is_no_coverage(tmp_path: Path) -> None:
    found = attempt("openai-gpt", "onnx-cpu", tmp_path)
    assert found.outcome == "refused"
    assert "no KV cache" in found.reason
    assert Coverage("onnx-cpu", {}, [found]).share == 0


def test_what_transformers_cannot_run_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("no such size")

    monkeypatch.setattr(coverage, "make_tiny", broken)
    found = attempt("llama", "onnx-cpu", tmp_path)
    assert (found.outcome, found.reason) == ("not runnable", "ValueError: no such size")
    assert Coverage("onnx-cpu", {}, [found]).runnable == 0


def test_an_error_that_is_no_refusal_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise GateError("a pass changes what the model computes")

    monkeypatch.setattr(coverage, "compiled", broken)
    assert attempt("llama", "onnx-cpu", tmp_path).outcome == "failed"


def test_a_crash_inside_the_child_is_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(kind: str, target: str, folder: Path) -> Attempt:
        raise KeyError(kind)

    assert coverage.main("llama", "onnx-cpu", broken) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["outcome"], told["reason"]) == ("failed", "KeyError: 'llama'")


def test_tiny_models_hide_no_mistakes(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path)
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    assert all(float(p.detach().std()) > 0.01 for p in norms)
    row = list(range(3, 14))
    early = abs(coverage.eager(model, row) - coverage.eager(model, [50, *row[1:]]))
    assert early[-1].max() > 0.1  # the last token's logits depend on the first token


# The table -----------------------------------------------------------------------------------


def table() -> Coverage:
    attempts = [
        Attempt("a", "exact", difference=2e-6, probes=6, road="one op"),
        Attempt("b", "refused", "x | y"),
        Attempt("c", "not runnable", "no"),
        Attempt("d", "exact", difference=1e-6, probes=6),
    ]
    return Coverage("onnx-cpu", {"torch": "2"}, attempts)


def test_the_share_counts_what_transformers_can_run() -> None:
    found = table()
    assert found.runnable == 3
    assert found.summary().startswith("67 % exact of 3 runnable types (2 exact, 1 refused")


def test_the_page_holds_every_type_and_the_command() -> None:
    page = table().markdown()
    assert "qopt coverage --markdown --target onnx-cpu" in page
    assert "| a | 2.0e-06 | one op |" in page
    assert "| b | x \\| y |" in page
    assert "## Wrong" not in page


def test_docs_tell_of_no_type_that_is_wrong() -> None:
    page = (Path(__file__).parents[1] / "docs" / "coverage.md").read_text()
    assert "## Wrong" not in page
    assert "## Failed" not in page
    share = int(page.split("**")[1].split(" %")[0])
    assert share >= 75


# Whole types ---------------------------------------------------------------------------------


def test_a_few_types() -> None:
    found = coverage.run(FEW, jobs=2)
    assert [(a.type, a.outcome) for a in found.attempts] == [(kind, "exact") for kind in FEW]
    assert [a.road for a in found.attempts] == ["the model's own", "one op"]


@pytest.mark.slow
def test_the_sample() -> None:
    found = coverage.run(sample=True, jobs=2)
    assert [(a.type, a.reason) for a in found.attempts if a.outcome != "exact"] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "bloom", "gemma3_text", "mixtral"])
def test_standard_ops_alone(kind: str) -> None:
    found = coverage.run([kind], target="onnx")
    assert [a.outcome for a in found.attempts] == ["exact"]
