"""`qopt compile` from the command line: what its flags do, and what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from ruamel.yaml import YAML

import qopt
from qopt.artifact import read_manifest
from qopt.cli import main
from qopt.compile import CompileResult, compile
from qopt.errors import UsageError
from qopt.report import Report

Tiny = Callable[..., tuple[Path, Any]]
Distance = Callable[..., float]
CALLS = [[6, 3, 9], [1, 1, 1], [4, 2, 3]]


@pytest.fixture
def run_compile(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Compile the tiny llama to `out` with some flags and the check off; returns what is said."""

    def call(*flags: str, code: int = 0) -> str:
        command = ["compile", str(tiny("llama")[0]), "-o", str(tmp_path / "out"), *flags]
        assert main([*command, "--check", "off"]) == code
        said = capsys.readouterr()
        return said.out + said.err

    return call


def recipe_of(out: Path) -> dict[str, Any]:
    data: dict[str, Any] = YAML(typ="safe").load((out / "recipe.yaml").read_text())
    return data


def passes_of(out: Path) -> list[Any]:
    return list(recipe_of(out)["passes"])


def names_of(out: Path) -> list[str]:
    return [
        name if isinstance(name, str) else next(iter(name)) for name in recipe_of(out)["passes"]
    ]


def ops_of(out: Path) -> list[str]:
    graph = onnx.load(out / "model.onnx", load_external_data=False).graph
    return [node.op_type for node in graph.node]


def test_it_says_what_it_did(run_compile: Callable[..., str], tmp_path: Path) -> None:
    text = run_compile()
    for part in ("fuse-rms-norm", "rewrites", "lowering", "GroupQueryAttention", "not checked"):
        assert part in text
    assert f"wrote {tmp_path / 'out'}/" in text
    files = {p.name for p in (tmp_path / "out").iterdir()}
    assert files == {
        "model.onnx",
        "model.onnx.data",
        "config.json",
        "generation_config.json",
        "genai_config.json",
        "qopt_manifest.json",
        "recipe.yaml",
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "out.log"]


def test_json(run_compile: Callable[..., str], tmp_path: Path) -> None:
    told = json.loads(run_compile("--json"))
    assert told["out"] == str(tmp_path / "out")
    assert told["report"]["passes"][0]["name"] == "canonicalize"
    log = json.loads((tmp_path / "out.log" / "report.json").read_text())
    assert log["passes"] == told["report"]["passes"]


def test_quiet(run_compile: Callable[..., str]) -> None:
    assert run_compile("-q") == ""


def test_as_the_issue_types_it(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`qopt compile model --recipe low-latency.yaml`, with nothing but a folder `model`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(tiny("llama")[0])
    assert main(["compile", "model", "--recipe", "low-latency.yaml", "--check", "off"]) == 0
    said = capsys.readouterr()
    assert "writing model-low-latency/" in said.err
    assert "wrote model-low-latency/" in said.out
    assert read_manifest(tmp_path / "model-low-latency").logits == "last"


def test_the_resolved_recipe_compiles_to_the_same_bytes(
    run_compile: Callable[..., str], tiny: Tiny, tmp_path: Path
) -> None:
    run_compile("--logits", "all", "--skip", "merge-qkv", "--target", "onnx")
    out = tmp_path / "out"
    again = compile(str(tiny("llama")[0]), str(out / "recipe.yaml"), tmp_path / "again").out
    kept = {p.name for p in out.iterdir()} - {"qopt_manifest.json", "recipe.yaml"}
    assert {n: (out / n).read_bytes() for n in kept} == {n: (again / n).read_bytes() for n in kept}
    assert (out / "recipe.yaml").read_bytes() == (again / "recipe.yaml").read_bytes()


def test_flags_override_the_recipe(run_compile: Callable[..., str], tmp_path: Path) -> None:
    run_compile("--target", "onnx", "--dtype", "fp16", "--logits", "all", "--opset", "24")
    told = recipe_of(tmp_path / "out")
    assert (told["target"], told["dtype"], told["logits"]) == ("onnx", "fp16", "all")
    assert (told["opset"], told["check"]) == (24, "off")
    assert read_manifest(tmp_path / "out").dtype == "float16"


def test_skip(
    run_compile: Callable[..., str], tmp_path: Path, tiny: Tiny, distance: Distance
) -> None:
    run_compile("--skip", "merge-qkv", "--skip", "fuse-add-rms-norm")
    assert "merge-qkv" not in names_of(tmp_path / "out")
    assert "SkipSimplifiedLayerNormalization" not in ops_of(tmp_path / "out")
    assert distance(tmp_path / "out", tiny("llama")[1], CALLS) <= 1e-4


@pytest.mark.parametrize("last", ["canonicalize", "fuse-rms-norm", "materialize-kv-cache"])
def test_stop_after(
    last: str, run_compile: Callable[..., str], tmp_path: Path, tiny: Tiny, distance: Distance
) -> None:
    text = run_compile("--stop-after", last)
    assert names_of(tmp_path / "out")[-1] == last
    cached = last == "materialize-kv-cache"
    assert ("keeps no cache" in text) == (not cached)
    assert read_manifest(tmp_path / "out").keeps_cache == cached
    if cached:
        assert distance(tmp_path / "out", tiny("llama")[1], CALLS) <= 1e-4
        return
    with pytest.raises(UsageError, match="keeps no cache"):
        qopt.load(tmp_path / "out").decoder()


def test_a_cacheless_artifact_is_right_on_whole_prompts(tiny: Tiny, tmp_path: Path) -> None:
    result = compile(
        str(tiny("llama")[0]),
        "baseline",
        tmp_path / "o",
        stop_after="fold-constants",
    )
    probes = [row.probe for row in result.report.checks if not row.probe.startswith("after ")]
    assert probes == ["prefill", "prefill, batch 3"]
    assert any("whole prompts alone" in note for note in result.notes)


def test_add_places_a_pass(run_compile: Callable[..., str], tmp_path: Path) -> None:
    run_compile("--recipe", "baseline", "--add", "fold-norm-weight")
    assert "fold-norm-weight" in names_of(tmp_path / "out")


PLUGIN = '''
"""Passes of a test."""
from qopt.rewrite import Pass

class Counts(Pass):
    """Count the nodes."""

    name = "counts"
    least: int = 3

    def run(self, graph):
        assert len(graph.nodes) > self.least, f"fewer than {self.least} nodes"
        return 0
'''


def test_set_and_plugin(
    run_compile: Callable[..., str], tmp_path: Path, fresh_registry: Any
) -> None:
    plugin = tmp_path / "counts.py"
    plugin.write_text(PLUGIN)
    flags = ["--plugin", str(plugin), "--add", "counts"]
    run_compile(*flags, "--set", "counts.least=7")
    assert {"counts": {"least": 7}} in recipe_of(tmp_path / "out")["passes"]
    assert len(read_manifest(tmp_path / "out").plugins) == 1
    text = run_compile(*flags, "--set", "counts.least=100000", code=1)
    assert "pass counts failed" in text
    assert "fewer than 100000 nodes" in text
    assert "Traceback" not in text


def test_explain(run_compile: Callable[..., str], tiny: Tiny, tmp_path: Path) -> None:
    """An activation without a gate is told as left, with the reason; a wrong name is refused."""
    assert "fuse-layer-norm left no candidate" in run_compile("--explain", "fuse-layer-norm")
    result = compile(
        str(tiny("gpt2")[0]), "baseline", tmp_path / "o", check="off", explain=["fuse-silu-mul"]
    )
    told = [note for note in result.notes if note.startswith("fuse-silu-mul left ")]
    assert any("gelu" in note or "tanh" in note for note in told)
    assert not any(note in read_manifest(result.out).notes for note in told)  # same bytes
    assert "--explain nope: the recipe runs no such pass" in run_compile(
        "--explain", "nope", code=2
    )


def test_dump(run_compile: Callable[..., str], tmp_path: Path) -> None:
    run_compile("--dump", str(tmp_path / "dump"))
    names = sorted(p.name for p in (tmp_path / "dump").iterdir())
    assert names[0] == "000_captured.txt"
    assert any(name.endswith("_fuse-rms-norm.txt") for name in names)
    assert "qopt.rms_norm(" in (tmp_path / "dump" / names[-1]).read_text()


def test_no_weights(run_compile: Callable[..., str], tmp_path: Path, tiny: Tiny) -> None:
    text = run_compile()
    whole = ops_of(tmp_path / "out")
    text = run_compile("--no-weights")
    out = tmp_path / "out"
    assert "compiled without weights" in text
    assert not (out / "model.onnx.data").exists()
    assert not read_manifest(out).weights
    assert ops_of(out) == whole
    assert main(["verify", str(out)]) == 0
    assert main(["inspect", str(out)]) == 0
    assert main(["run", str(out), "--prompt", "x"]) == 2


def test_no_weights_needs_none(tiny: Tiny, tmp_path: Path) -> None:
    """The config alone is enough."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes((tiny("llama")[0] / "config.json").read_bytes())
    assert main(["compile", str(folder), "-o", str(tmp_path / "o"), "-q", "--no-weights"]) == 0
    assert "GroupQueryAttention" in ops_of(tmp_path / "o")


def test_an_older_artifact_is_replaced(run_compile: Callable[..., str], tmp_path: Path) -> None:
    run_compile("--logits", "all")
    run_compile("--logits", "last")
    assert read_manifest(tmp_path / "out").logits == "last"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "out.log"]


def test_python_api(tiny: Tiny, tmp_path: Path) -> None:
    result = qopt.compile(str(tiny("llama")[0]), recipe="baseline", out=tmp_path / "o", check="off")
    assert result.out == tmp_path / "o"
    assert [row.name for row in result.report.passes][-1] == "eliminate-dead-code"
    model = qopt.load(result.out)
    (answer,) = model.generate_ids([[3, 4, 5]], max_new_tokens=4)
    assert 1 <= len(answer.tokens) <= 4


def test_a_result_is_told_in_a_line(tmp_path: Path) -> None:
    result = CompileResult(tmp_path / "out", Report(notes=["one"]), ["one"])
    assert repr(result) == f"<CompileResult {tmp_path / 'out'}: 0 checks passed, 1 notes>"
