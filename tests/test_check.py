"""Checks: a wrong artifact or a lying pass is caught, and what failed is not put into place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from qopt.artifact import Artifact, read_manifest
from qopt.check import LIMITS, MAX_KL, GraphCheck, Verification, judge
from qopt.cli import main
from qopt.compile import compile
from qopt.errors import GateError, ResourceError, UsageError
from qopt.final_check import Checker, Job, probe_tokens, run_job, verify
from qopt.graph import Graph
from qopt.report import CheckRow, joined
from qopt.rewrite import PASSES, PassRecord

Compiled = Callable[..., Path]
Tiny = Callable[..., tuple[Path, Any]]
Change = Callable[[onnx.ModelProto], None]

LYING = """
from qopt.rewrite import Pass
import torch

class Lie(Pass):
    \"\"\"Say that sigmoid is silu.\"\"\"

    name = "lie"
    exact = True

    def run(self, graph):
        nodes = graph.find(torch.ops.aten.silu.default)
        for node in nodes:
            node.target = torch.ops.aten.{other}.default
        return len(nodes)
"""


@pytest.fixture
def lie(tmp_path: Path, fresh_registry: Any) -> Callable[..., list[str]]:
    """Flags of a compile that runs a pass which claims to be exact and is not."""

    def flags(other: str = "sigmoid") -> list[str]:
        path = tmp_path / "liar.py"
        path.write_text(LYING.format(other=other))
        # before the activations are fused away
        return ["--plugin", str(path), "--add", "lie", "--skip", "fuse-silu-mul"]

    return flags


def others(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name not in ("liar.py", "recipe.yaml"))


# A wrong artifact ----------------------------------------------------------------------------


def attribute(op: str, name: str, value: Any) -> Change:
    """Set an attribute of the last node of a kind, or drop it."""

    def change(model: onnx.ModelProto) -> None:
        node = [node for node in model.graph.node if node.op_type == op][-1]
        kept = [a for a in node.attribute if a.name != name]
        assert len(kept) == len(node.attribute) - 1
        del node.attribute[:]
        node.attribute.extend(kept)
        if value is not None:
            node.attribute.append(onnx.helper.make_attribute(name, value))

    return change


def swapped(op: str, first: int, second: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        node = [node for node in model.graph.node if node.op_type == op][-1]
        node.input[first], node.input[second] = node.input[second], node.input[first]

    return change


NORM = "SkipSimplifiedLayerNormalization"
ATTENTION = "GroupQueryAttention"
WINDOW = "local_window_size"
WRONG: dict[str, tuple[str, Change, str]] = {
    "another scale": ("llama", attribute(ATTENTION, "scale", 0.26), "prefill"),
    "another epsilon": ("llama", attribute(NORM, "epsilon", 1e-3), "prefill"),
    "exchanged angles": ("llama", swapped(ATTENTION, 7, 8), "prefill"),
    "no rotation": ("llama", attribute(ATTENTION, "do_rotary", 0), "prefill"),
    "window one too wide": ("mistral", attribute(ATTENTION, WINDOW, 5), "past the window"),
    "window one too narrow": ("mistral", attribute(ATTENTION, WINDOW, 3), "edge of the window"),
    "no window": ("mistral", attribute(ATTENTION, WINDOW, None), "past the window"),
    "no soft-cap": ("gemma2", attribute(ATTENTION, "softcap", None), "prefill"),
}
STRONG = {"gemma2": {"attn_logit_softcapping": 1.0, "initializer_range": 0.2}}


def checked(folder: Path, model: Path) -> Verification:
    """The final check, without a process of its own."""
    return run_job(Job(str(model)), lambda: str(folder))


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_artifact_is_caught(
    case: str, compiled: Compiled, tiny: Tiny, tmp_path: Path
) -> None:
    family, change, probe = WRONG[case]
    folder = tmp_path / "out"
    overrides = STRONG.get(family, {})
    shutil.copytree(compiled(family, **overrides), folder)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    change(model)
    onnx.save(model, folder / "model.onnx")
    resized(folder)
    found = checked(folder, tiny(family, **overrides)[0])
    assert not found.passed
    assert any(probe in p.probe for p in found.probes if not p.passed)


def resized(folder: Path) -> None:
    """Let the manifest state the size that the graph file has now."""
    manifest = json.loads((folder / "qopt_manifest.json").read_text())
    manifest["files"]["model.onnx"]["size"] = (folder / "model.onnx").stat().st_size
    (folder / "qopt_manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("target", ["onnx-cpu", "onnx"])
def test_a_wrong_weight_is_caught(
    target: str, compiled: Compiled, tiny: Tiny, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(compiled("llama", target=target), folder)
    assert checked(folder, tiny("llama")[0]).passed
    path = folder / "model.onnx.data"
    data = np.fromfile(path, np.float32)
    at = len(data) // 2
    data[at : at + 64] += 0.01  # one row of one matrix, by a tenth of its size
    data.tofile(path)
    assert not checked(folder, tiny("llama")[0]).passed


def test_all_probes_are_played_in_a_new_process(compiled: Compiled, tiny: Tiny) -> None:
    with Checker(Job(str(tiny("mistral")[0]), early=True)) as checker:
        found = checker.check(compiled("mistral"))
    assert found.passed
    names = [p.probe for p in found.probes]
    for part in (
        "prefill",
        "decode",
        "chunked prefill, batch 3",
        "unequal",
        "past the window of 4",
    ):
        assert any(part in name for name in names), part
    for probe in found.probes:
        assert 0 < probe.figures["max"] < probe.limits["max"] == LIMITS["float32"]


def test_a_checker_that_is_not_needed_ends(tiny: Tiny) -> None:
    """A compile that fails, or Ctrl-C, leaves no process behind."""
    with Checker(Job(str(tiny("mistral")[0]), early=True)) as checker:
        assert checker.process is not None
        assert checker.process.poll() is None
    assert checker.process.returncode is not None


@pytest.mark.parametrize("target", ["onnx-cpu", "torchscript-cpu"])
@pytest.mark.parametrize("sets", [{"skip": ["last-token-logits"]}, {}], ids=str)
def test_logits_are_compared_where_they_are_given(
    target: str, sets: dict[str, Any], compiled: Compiled, tiny: Tiny
) -> None:
    """All columns, the last alone, or as many as are asked for."""
    folder = compiled("llama", "low-latency", target=target, **sets)
    assert checked(folder, tiny("llama")[0]).passed


def test_what_goes_wrong_in_the_checking_process_is_told(compiled: Compiled) -> None:
    with (
        Checker(Job("no-such-model", early=True)) as checker,
        pytest.raises(UsageError, match="no-such-model"),
    ):
        checker.check(compiled("mistral"))


def test_half_precision_is_held_to_its_own_limits(compiled: Compiled, tiny: Tiny) -> None:
    found = checked(compiled("llama", dtype="fp16"), tiny("llama")[0])
    assert found.passed
    for probe in found.probes:
        assert probe.limits == {"max": 2e-2, "top1_wrong": 0.0, "kl": MAX_KL["float16"]}
        assert probe.figures["max"] > 1e-4


# Limits --------------------------------------------------------------------------------------


def judged(got: list[list[float]], want: list[list[float]], dtype: str = "float32") -> CheckRow:
    return judge("p", [np.array(got)], [np.array(want)], dtype)


def test_the_limit_grows_with_the_logits() -> None:
    assert judged([[1.00009, 0]], [[1, 0]]).passed
    assert not judged([[1.00011, 0]], [[1, 0]]).passed
    assert judged([[50.0004, 0]], [[50, 0]]).passed
    assert not judged([[50.0006, 0]], [[50, 0]]).passed
    assert judged([[50.09, 0]], [[50, 0]], "float16").passed
    assert not judged([[50.11, 0]], [[50, 0]], "float16").passed
    assert judged([[50.79, 0]], [[50, 0]], "bfloat16").passed  # eight times as coarse
    assert not judged([[50.81, 0]], [[50, 0]], "bfloat16").passed


def test_top_1_counts_where_the_lead_is_clear() -> None:
    within = judged([[1.0, 1.00005]], [[1.00004, 1.0]])  # turned, by less than twice the limit
    assert within.passed
    assert within.figures["top1_wrong"] == 0
    turned = judged([[1.0, 1.1]], [[1.1, 1.0]], "float16")
    assert turned.figures["top1_wrong"] == 1
    assert not turned.passed


@pytest.mark.parametrize("log", ["garbage", "[1]", '{"model": 5, "adapter": null}', "{}"])
def test_a_damaged_log_leaves_the_files_to_be_verified(
    log: str, compiled: Compiled, tmp_path: Path
) -> None:
    shutil.copytree(compiled("llama"), tmp_path / "out")
    (tmp_path / "out.log").mkdir()
    (tmp_path / "out.log" / "source.json").write_text(log)
    found = verify(tmp_path / "out")
    assert found.passed
    assert any("cannot be read from source.json" in note for note in found.notes)
    assert any("integrity only" in note for note in found.notes)


def test_verify_does_not_advise_to_leave_the_check_out(compiled: Compiled, tiny: Tiny) -> None:
    with pytest.raises(ResourceError) as caught:
        verify(compiled("llama"), str(tiny("llama")[0]), max_ram="1GB")
    assert "--max-ram" in str(caught.value)
    assert "--check" not in str(caught.value)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_reference_without_numbers_passes_nothing(bad: float) -> None:
    want = [np.full((2, 4), bad, np.float32)]
    assert not judge("p", [np.zeros((2, 4), np.float32)], want, "float32").passed


def test_a_text_of_unknown_words_is_no_probe(compiled: Compiled, tmp_path: Path) -> None:
    """One id again and again hides scale, rotation and mask: random ids serve instead."""
    folder = tmp_path / "out"
    shutil.copytree(compiled("llama"), folder)
    vocabulary = {f"AA{i}": i for i in range(97)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "AA0"}
    split = {"type": "WhitespaceSplit"}
    told = {"version": "1.0", "added_tokens": [], "pre_tokenizer": split, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(told))
    assert len(set(probe_tokens(Artifact.load(folder)).tolist())) > 50


def test_divergence_is_that_of_the_original_from_the_artifact() -> None:
    p, q = np.array([0.5, 0.5]), np.array([0.9, 0.1])
    found = judged([np.log(q).tolist()], [np.log(p).tolist()])
    assert found.figures["kl"] == pytest.approx(float((p * np.log(p / q)).sum()))


def test_half_precision_has_a_limit_on_divergence() -> None:
    rng = np.random.default_rng(0)
    want = rng.standard_normal((4, 8))
    flat = judge("p", [want + 0.019 * np.sign(want)], [want], "float16")
    assert flat.limits["kl"] == 1e-3
    assert flat.passed == (flat.figures["kl"] <= 1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_never_passes(bad: float) -> None:
    found = judged([[bad, 0]], [[1, 0]])
    assert not found.passed
    json.dumps(found.figures)


# A lying pass --------------------------------------------------------------------------------


def test_a_lying_pass_is_named(
    lie: Callable[..., list[str]], tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["compile", str(tiny("llama")[0]), "-o", str(out), "-q", *lie()]) == 4
    told = capsys.readouterr().err
    assert "pass lie changes what the model computes" in told
    assert "probe after lie" in told
    assert "--skip lie" in told
    assert others(tmp_path) == []


def test_the_final_check_catches_it_too(
    lie: Callable[..., list[str]], tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The older artifact stays, and a rejected one is kept where that was asked for."""
    out, model = tmp_path / "out", str(tiny("llama")[0])
    compile(model, "low-latency", out, check="off")
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    command = ["compile", model, "-o", str(out), "-q", "--check", "final", *lie()]
    assert main(command) == 4
    told = capsys.readouterr().err
    assert "differs from the model" in told
    assert "probe prefill" in told
    assert "--keep-rejected" in told
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert others(tmp_path) == ["out", "out.log"]

    assert main([*command, "--keep-rejected"]) == 4
    assert "out.rejected" in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert others(tmp_path) == ["out", "out.log", "out.rejected"]
    checks = read_manifest(tmp_path / "out.rejected").checks
    assert not all(check.passed for check in checks)


def test_an_exact_pass_of_a_plugin_passes(
    lie: Callable[..., list[str]], tiny: Tiny, tmp_path: Path
) -> None:
    result_of = lie("silu")  # the op that it was
    out = tmp_path / "out"
    assert main(["compile", str(tiny("llama")[0]), "-o", str(out), "-q", *result_of]) == 0
    assert len(read_manifest(out).plugins) == 1


def test_what_was_not_checked_says_so(tiny: Tiny, tmp_path: Path) -> None:
    result = compile(str(tiny("llama")[0]), "low-latency", tmp_path / "out", check="off")
    assert read_manifest(result.out).checks == []
    assert result.report.checks == []
    assert any("not checked" in note for note in result.notes)


# verify --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def whole(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with its log, as a user has it."""
    out = tmp_path_factory.mktemp("verify") / "out"
    compile(str(tiny("llama")[0]), "baseline", out, check="off")
    return out


def copied(whole: Path, to: Path, *, log: bool) -> Path:
    shutil.copytree(whole, to / "out")
    if log:
        shutil.copytree(whole.with_name("out.log"), to / "out.log")
    return to / "out"


def test_verify_remembers_the_model(whole: Path, tmp_path: Path) -> None:
    found = verify(copied(whole, tmp_path, log=True))
    assert found.passed
    assert len(found.probes) > 4


def test_verify_without_a_model_is_integrity_only(whole: Path, tmp_path: Path) -> None:
    found = verify(copied(whole, tmp_path, log=False))
    assert found.probes == []
    assert any("integrity only" in note for note in found.notes)


def test_verify_with_a_model(
    whole: Path, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = copied(whole, tmp_path, log=False)
    assert main(["verify", str(out), str(tiny("llama")[0]), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["passed"] is True
    assert main(["verify", str(out), str(tiny("llama", vocab_size=97, rms_norm_eps=0.1)[0])]) == 4
    assert "differs from the model" in capsys.readouterr().err


def test_verify_does_not_trust_a_model_that_changed(whole: Path, tmp_path: Path) -> None:
    """Another model lies where the compiled one lay: the log's place is not used."""
    out = copied(whole, tmp_path, log=True)
    log = tmp_path / "out.log" / "source.json"
    other = tmp_path / "model"
    shutil.copytree(json.loads(log.read_text())["model"], other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    log.write_text(json.dumps({"model": str(other), "adapter": None}))
    assert verify(out).probes == []


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "config.json", "recipe.yaml"])
def test_verify_finds_a_changed_byte(name: str, whole: Path, tmp_path: Path) -> None:
    out = copied(whole, tmp_path, log=False)
    data = bytearray((out / name).read_bytes())
    place = len(data) - 2 if name != "model.onnx" else data.index(b"qopt")
    data[place] ^= 1
    (out / name).write_bytes(data)
    with pytest.raises(GateError, match=name):
        verify(out)


def test_verify_finds_a_missing_end(whole: Path, tmp_path: Path) -> None:
    out = copied(whole, tmp_path, log=False)
    data = (out / "model.onnx.data").read_bytes()
    (out / "model.onnx.data").write_bytes(data[:-4])
    with pytest.raises(UsageError, match="truncated"):
        verify(out)


# --- the graph after each pass ---------------------------------------------------------------


def test_a_pass_that_moves_roundings_is_held_to_both_sides_error(
    captured: Callable[..., Graph],
) -> None:
    """As widen-residual on SmolLM2: 0.117 apart in fp16, either side 0.08 from the model."""
    graph = captured("llama", torch.float16)
    check = GraphCheck(graph, 0)
    check.want = [want + 1.8 * LIMITS["float16"] for want in check.want]
    record = PassRecord("a pass", 1, 0, 0, 0.0)
    with pytest.raises(GateError, match="pass eliminate-dead-code changes"):
        check(PASSES["eliminate-dead-code"](), graph, record)
    widen = PASSES["widen-residual"]()
    assert check(widen, graph, record)
    row = check(PASSES["eliminate-dead-code"](), graph, record)
    assert row is not None, "what it left is the reference now"
    assert row.figures["max"] == 0
    rows = [
        CheckRow("after widen-residual", row.figures, {"max": 4.0}, True),
        CheckRow("after a", row.figures, {"max": 1.0}, True),
        CheckRow("after b", row.figures, {"max": 1.0}, True),
    ]
    assert [r.probe for r in joined(rows)] == ["after each of 2 passes", "after widen-residual"]
    check.want = [want + 10 * LIMITS["float16"] for want in check.want]
    with pytest.raises(GateError, match="pass widen-residual changes"):
        check(widen, graph, record)
