"""gate: and limits: of a recipe are measured, and stop the build with their own exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import qopt
from qopt.demo import fetch, find_demo
from qopt.errors import GateError, LimitError, UsageError

TEXT = Path(__file__).parent / "data" / "sample.txt"


def recipe(folder: Path, lines: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(f"schema: 1\nextends: baseline\ncheck: 'off'\n{lines}\n")
    return str(path)


def test_a_size_that_is_missed_withholds_the_artifact(tiny: Any, tmp_path: Path) -> None:
    folder, _ = tiny("llama")
    out = tmp_path / "out"
    with pytest.raises(LimitError, match="misses the recipe's limits") as caught:
        qopt.compile(str(folder), recipe(tmp_path, "limits: {size: 1KB}"), out)
    assert "size is" in str(caught.value)
    assert caught.value.exit_code == 5
    assert not out.exists()


def test_a_size_that_is_kept_is_told(tiny: Any, tmp_path: Path) -> None:
    folder, _ = tiny("llama")
    result = qopt.compile(str(folder), recipe(tmp_path, "limits: {size: 50MB}"), tmp_path / "out")
    row = next(row for row in result.report.checks if row.probe == "limits")
    assert row.passed
    assert 0 < row.figures["size"] < 50e6


def test_a_gate_without_a_text_is_refused_before_any_work(tiny: Any, tmp_path: Path) -> None:
    folder, _ = tiny("llama")
    with pytest.raises(UsageError, match="gate: needs a text"):
        qopt.compile(str(folder), recipe(tmp_path, "gate: {perplexity: +1%}"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_gate_that_is_no_number_is_refused(tiny: Any, tmp_path: Path) -> None:
    folder, _ = tiny("llama")
    with pytest.raises(UsageError, match=r"gate\.kl"):
        qopt.compile(str(folder), recipe(tmp_path, "gate: {kl: .nan}"), tmp_path / "out")


@pytest.mark.slow
def test_a_gate_is_held_on_the_real_model(tmp_path: Path) -> None:
    try:
        find_demo("smollm2-135m")
    except UsageError:
        fetch("smollm2-135m")
    model = fetch("smollm2-135m", "safetensors", tmp_path / "model")
    text = f"calibration: {{text: {TEXT}, length: 64}}"
    kept = recipe(tmp_path, f"{text}\ngate: {{perplexity: +0.1%, kl: 1.0e-6}}")
    result = qopt.compile(str(model), kept, tmp_path / "out")
    row = next(row for row in result.report.checks if row.probe == "gate")
    assert row.passed
    assert abs(row.figures["perplexity_%"]) < 0.01
    missed = recipe(tmp_path, f"{text}\ngate: {{kl: -1.0}}")
    with pytest.raises(GateError, match="misses the recipe's gate"):
        qopt.compile(str(model), missed, tmp_path / "missed")
    assert not (tmp_path / "missed").exists()
