"""The artifact folder: whole or not there, the same bytes, and nothing read from outside it."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from qopt.artifact import (
    MANIFEST,
    Artifact,
    ArtifactWriter,
    Manifest,
    SourceInfo,
    TensorSpec,
    genai_config,
    genai_refusal,
    repair,
    write_json,
    write_sidecars,
)
from qopt.errors import GateError, QoptError, ResourceError, UsageError
from qopt.info import LayerInfo, ModelInfo

Shape = list[str | int | None]
VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_SIZE = 97, 64, 4, 2, 16


def a_manifest(**changes: object) -> Manifest:
    facts: dict[str, object] = {
        "target": "onnx-cpu",
        "dtype": "fp32",
        "model": ModelInfo(kind="module"),
        "source": SourceInfo(kind="folder", digest="0"),
        "inputs": [TensorSpec(name="x", dtype="float32", shape=["batch_size", 4])],
        "outputs": [TensorSpec(name="y", dtype="float32", shape=["batch_size", 4])],
    }
    return Manifest.model_validate(facts | changes)


def write_artifact(out: Path, content: bytes = b"weights") -> None:
    with ArtifactWriter(out) as writer:
        (writer.folder / "model.bin").write_bytes(content)
        writer.write_manifest(a_manifest())


def siblings(out: Path) -> set[str]:
    return {p.name for p in out.parent.iterdir()}


# --- whole or not there (J01) ----------------------------------------------------------------


def test_written_whole(tmp_path: Path) -> None:
    write_artifact(tmp_path / "out")
    artifact = Artifact.load(tmp_path / "out")
    artifact.verify_files()
    assert set(artifact.manifest.files) == {"model.bin"}
    assert siblings(tmp_path / "out") == {"out"}, "temporary folder and lock are gone"


def test_same_bytes(tmp_path: Path) -> None:
    write_artifact(tmp_path / "a")
    time.sleep(0.02)
    write_artifact(tmp_path / "b")
    assert (tmp_path / "a" / MANIFEST).read_bytes() == (tmp_path / "b" / MANIFEST).read_bytes()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError, GateError])
def test_j01_an_exception_leaves_the_older_artifact(
    tmp_path: Path, error: type[BaseException]
) -> None:
    out = tmp_path / "out"
    write_artifact(out, b"older")

    def write_half() -> None:
        with ArtifactWriter(out) as writer:
            (writer.folder / "model.bin").write_bytes(b"half of a new")
            raise error("stop")

    with pytest.raises(error):
        write_half()
    assert (out / "model.bin").read_bytes() == b"older"
    Artifact.load(out).verify_files()
    assert siblings(out) == {"out"}


def test_replaces_an_older_artifact(tmp_path: Path) -> None:
    write_artifact(tmp_path / "out", b"older")
    write_artifact(tmp_path / "out", b"newer")
    assert (tmp_path / "out" / "model.bin").read_bytes() == b"newer"
    assert siblings(tmp_path / "out") == {"out"}


def test_new_parents_are_removed_again(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stop"), ArtifactWriter(tmp_path / "a" / "b" / "out"):
        raise ValueError("stop")
    assert not (tmp_path / "a").exists()


WRITE_SLOWLY = """
    import sys, time
    from pathlib import Path
    from qopt.artifact import ArtifactWriter
    with ArtifactWriter(Path(sys.argv[1])) as writer:
        (writer.folder / "model.bin").write_bytes(b"half")
        print("writing", flush=True)
        time.sleep(60)
"""


def test_j01_killed_while_writing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_artifact(out, b"older")
    command = [sys.executable, "-c", textwrap.dedent(WRITE_SLOWLY), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        with pytest.raises(ResourceError, match="another qopt is writing"):
            write_artifact(out)
        process.send_signal(signal.SIGKILL)
    Artifact.load(out).verify_files()
    assert len(siblings(out)) == 3, "a kill leaves the temporary folder and the lock file"
    write_artifact(out, b"newer")
    assert siblings(out) == {"out"}
    assert (out / "model.bin").read_bytes() == b"newer"


def test_j01_killed_between_the_two_renames(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_artifact(out, b"older")
    os.rename(out, tmp_path / ".out.old-1")
    (tmp_path / ".out.tmp-1").mkdir()
    assert (Artifact.load(out).folder / "model.bin").read_bytes() == b"older"
    repair(out)
    assert siblings(out) == {"out"}


def test_j01_killed_before_the_older_was_deleted(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_artifact(out, b"newer")
    write_artifact(tmp_path / ".out.old-1", b"older")
    repair(out)
    assert siblings(out) == {"out"}
    assert (out / "model.bin").read_bytes() == b"newer"


def test_a_failing_rename_puts_the_older_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write_artifact(out, b"older")
    rename = os.rename

    def refuse_the_new(source: Path, target: Path) -> None:
        if ".tmp-" in str(source):
            raise OSError(errno.EIO, "broken disk")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse_the_new)
    with pytest.raises(OSError, match="broken disk"):
        write_artifact(out, b"newer")
    assert (out / "model.bin").read_bytes() == b"older"
    assert siblings(out) == {"out"}


def test_j01_full_disk(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_artifact(out, b"older")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))  # a small file-size limit
    try:
        with pytest.raises(ResourceError, match="no space left") as caught:
            write_artifact(out, b"x" * 128 * 1024)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.exit_code == 6
    assert siblings(out) == {"out"}
    assert (out / "model.bin").read_bytes() == b"older"


def test_too_little_space_is_refused_before_starting(tmp_path: Path) -> None:
    with (
        pytest.raises(ResourceError, match="no space left"),
        ArtifactWriter(tmp_path / "out", size=10**18),
    ):
        pytest.fail("entered")
    assert siblings(tmp_path / "out") == set()


def test_unwritable_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(ResourceError, match="no permission"), ArtifactWriter(tmp_path / "out"):
        pytest.fail("entered")


def test_somebody_elses_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="no qopt artifact"):
        write_artifact(out)
    (out / "thesis.txt").unlink()
    write_artifact(out)  # an empty folder is fine
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match=r"other files in it: thesis\.txt"):
        write_artifact(out)
    assert (out / "thesis.txt").read_text() == "years of work"


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UsageError, match="is a file"):
        write_artifact(tmp_path / "out")


def test_rejected(tmp_path: Path) -> None:
    def fail_the_gate(keep: bool) -> None:
        with ArtifactWriter(tmp_path / "out", keep_rejected=keep) as writer:
            (writer.folder / "model.bin").write_bytes(b"wrong")
            writer.write_manifest(a_manifest())
            raise GateError("too far off")

    with pytest.raises(GateError):
        fail_the_gate(keep=False)
    assert siblings(tmp_path / "out") == set()
    with pytest.raises(GateError):
        fail_the_gate(keep=True)
    assert siblings(tmp_path / "out") == {"out.rejected"}


def test_handed_in_hash_is_used_unless_the_file_changed(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "out") as writer:
        (writer.folder / "a").write_bytes(b"1234")
        (writer.folder / "b").write_bytes(b"1234")
        writer.add_hash("a", 4, "handed in")
        writer.add_hash("b", 3, "stale")
        files = writer.write_manifest(a_manifest()).files
    assert files["a"].sha256 == "handed in"
    assert len(files["b"].sha256) == 64


# --- loading ---------------------------------------------------------------------------------


def test_j01_no_manifest(tmp_path: Path) -> None:
    write_artifact(tmp_path / "out")
    (tmp_path / "out" / MANIFEST).unlink()
    with pytest.raises(UsageError, match="no qopt artifact"):
        Artifact.load(tmp_path / "out")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1, "surprise": 2}'])
def test_damaged_manifest(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(UsageError, match="damaged manifest"):
        Artifact.load(tmp_path)


def test_manifest_of_the_future(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"schema": 2, "surprise": 2}')
    with pytest.raises(UsageError, match="schema 2"):
        Artifact.load(tmp_path)


def test_changed_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_artifact(out, b"1234")
    (out / "model.bin").write_bytes(b"4321")
    with pytest.raises(GateError, match=r"model\.bin"):
        Artifact.load(out).verify_files()
    (out / "model.bin").write_bytes(b"123")
    with pytest.raises(UsageError, match="truncated"):
        Artifact.load(out)
    (out / "model.bin").unlink()
    with pytest.raises(UsageError, match="missing"):
        Artifact.load(out)


def external_tensor(location: str) -> onnx.TensorProto:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return tensor


def as_initializer(tensor: onnx.TensorProto) -> onnx.ModelProto:
    return helper.make_model(helper.make_graph([], "g", [], [], [tensor]))


def as_constant_in_a_branch(tensor: onnx.TensorProto) -> onnx.ModelProto:
    branch = helper.make_graph([helper.make_node("Constant", [], ["c"], value=tensor)], "b", [], [])
    node = helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch)
    return helper.make_model(helper.make_graph([node], "g", [], []))


def as_constant_in_a_function(tensor: onnx.TensorProto) -> onnx.ModelProto:
    node = helper.make_node("Constant", [], ["c"], value=tensor)
    function = helper.make_function("d", "f", [], ["c"], [node], [helper.make_opsetid("", 21)])
    return helper.make_model(helper.make_graph([], "g", [], []), functions=[function])


@pytest.mark.parametrize(
    "place", [as_initializer, as_constant_in_a_branch, as_constant_in_a_function]
)
@pytest.mark.parametrize("location", ["../secret.bin", "/etc/hostname", "link.bin", "a/../../x"])
def test_j04_external_data_outside(
    tmp_path: Path, location: str, place: Callable[[onnx.TensorProto], onnx.ModelProto]
) -> None:
    (tmp_path / "secret.bin").write_bytes(b"\0\0\0\0")
    out = tmp_path / "out"
    with ArtifactWriter(out) as writer:
        (writer.folder / "model.onnx").write_bytes(
            place(external_tensor(location)).SerializeToString()
        )
        writer.write_manifest(a_manifest())
    (out / "link.bin").symlink_to(tmp_path / "secret.bin")
    with pytest.raises(UsageError, match="outside the artifact"):
        Artifact.load(out)


@pytest.mark.parametrize("name", ["../secret.bin", "/etc/hostname", "link.bin", "..\\secret.bin"])
def test_j04_manifest_names_outside(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.bin").write_bytes(b"")
    out = tmp_path / "out"
    out.mkdir()
    (out / "link.bin").symlink_to(tmp_path / "secret.bin")
    manifest = a_manifest(files={name: {"size": 0, "sha256": ""}})
    (out / MANIFEST).write_text(manifest.to_json())
    with pytest.raises(UsageError, match="outside the artifact"):
        Artifact.load(out)


def test_external_data_that_the_manifest_does_not_list(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "out") as writer:
        model = as_initializer(external_tensor("model.onnx.data"))
        (writer.folder / "model.onnx").write_bytes(model.SerializeToString())
        writer.write_manifest(a_manifest())
    with pytest.raises(UsageError, match="does not list"):
        Artifact.load(tmp_path / "out")


# --- files beside the graph ------------------------------------------------------------------


def test_sidecars(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    (source / "tokenizer.json").write_bytes(b'{ "odd":  "spacing" }\r\n')
    (source / "config.json").write_text(
        '{"zeta": 1, "_name_or_path": "/home/me/model", "alpha": 2}'
    )
    (source / "model.safetensors").write_bytes(b"weights")
    written = write_sidecars(out, source, generation_config={"eos_token_id": [1, 2]})
    assert set(written) == {"tokenizer.json", "config.json", "generation_config.json"}
    assert (out / "tokenizer.json").read_bytes() == b'{ "odd":  "spacing" }\r\n'
    assert list(json.loads((out / "config.json").read_text())) == ["zeta", "alpha"]
    assert sorted(p.name for p in out.iterdir()) == sorted(written)


def decoder_info(**changes: object) -> ModelInfo:
    layer = LayerInfo(kv_heads=KV_HEADS, key_size=HEAD_SIZE, value_size=HEAD_SIZE)
    facts: dict[str, object] = {
        "kind": "decoder",
        "model_type": "llama",
        "layers": [layer],
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "attention_heads": HEADS,
        "context_length": 64,
    }
    return ModelInfo.model_validate(facts | changes)


def specs(*names: str) -> list[TensorSpec]:
    return [TensorSpec(name=name, dtype="float32", shape=[]) for name in names]


INPUTS = specs("input_ids", "attention_mask", "past_key_values.0.key", "past_key_values.0.value")
OUTPUTS = specs("logits", "present.0.key", "present.0.value")


def test_f06_eos_list_stays_a_list_and_pad_a_scalar() -> None:
    config = genai_config(decoder_info(eos_token_ids=[1, 2]), INPUTS)["model"]
    assert config["eos_token_id"] == [1, 2]
    assert config["pad_token_id"] == 1
    own_pad = genai_config(decoder_info(eos_token_ids=[1, 2], pad_token_id=0), INPUTS)["model"]
    assert own_pad["pad_token_id"] == 0
    with pytest.raises(ValueError, match="pad_token_id"):
        decoder_info(pad_token_id=[1, 2])


@pytest.mark.parametrize(
    ("own", "written"),
    [("llama", "llama"), ("gpt_neox", "decoder"), ("qwen3_moe", "decoder"), ("gpt2", "decoder")],
)
def test_genai_type(own: str, written: str) -> None:
    assert genai_config(decoder_info(model_type=own), INPUTS)["model"]["type"] == written


def layers(*heads: int, **owner: int) -> list[dict[str, int]]:
    return [{"kv_heads": h, "key_size": HEAD_SIZE, "value_size": HEAD_SIZE} | owner for h in heads]


@pytest.mark.parametrize(
    ("info", "inputs", "reason"),
    [
        (decoder_info(kind="module"), INPUTS, "decoders alone"),
        (decoder_info(layers=layers(2, 4)), INPUTS, "different shapes"),
        (
            decoder_info(layers=[{"kv_heads": 2, "key_size": 16, "value_size": 8}]),
            INPUTS,
            "different sizes",
        ),
        (decoder_info(layers=[]), INPUTS, "a key and value cache"),
        (decoder_info(), [*INPUTS, *specs("past_state.0.conv")], "does not feed"),
        (decoder_info(layers=layers(2, 2)), INPUTS, "does not take"),
    ],
)
def test_genai_refusal(info: ModelInfo, inputs: list[TensorSpec], reason: str) -> None:
    assert reason in (genai_refusal(info, inputs, OUTPUTS) or "")


def tiny_decoder(ir_version: int = 10) -> onnx.ModelProto:
    """Embedding, one GroupQueryAttention, head; logits of every position."""
    random = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array(random.standard_normal(shape, np.float32) * 0.1, name)

    cache: Shape = ["batch_size", KV_HEADS, "past", HEAD_SIZE]
    present: Shape = ["batch_size", KV_HEADS, "total", HEAD_SIZE]
    value_info = helper.make_tensor_value_info
    inputs = [
        value_info("input_ids", TensorProto.INT64, ["batch_size", "sequence"]),
        value_info("attention_mask", TensorProto.INT64, ["batch_size", "total"]),
        value_info("past_key_values.0.key", TensorProto.FLOAT, cache),
        value_info("past_key_values.0.value", TensorProto.FLOAT, cache),
    ]
    outputs = [
        value_info("logits", TensorProto.FLOAT, ["batch_size", "sequence", VOCAB]),
        value_info("present.0.key", TensorProto.FLOAT, present),
        value_info("present.0.value", TensorProto.FLOAT, present),
    ]
    node = helper.make_node
    nodes = [
        node("Gather", ["embedding", "input_ids"], ["x"]),
        *(node("MatMul", ["x", f"w_{n}"], [n]) for n in "qkv"),
        node("ReduceSum", ["attention_mask", "one"], ["lengths"], keepdims=0),
        node("Sub", ["lengths", "one"], ["last"]),
        node("Cast", ["last"], ["seqlens"], to=TensorProto.INT32),
        node("Shape", ["attention_mask"], ["total_1d"], start=1),
        node("Cast", ["total_1d"], ["total"], to=TensorProto.INT32),
        node(
            "GroupQueryAttention",
            ["q", "k", "v", "past_key_values.0.key", "past_key_values.0.value", "seqlens", "total"],
            ["y", "present.0.key", "present.0.value"],
            domain="com.microsoft",
            num_heads=HEADS,
            kv_num_heads=KV_HEADS,
        ),
        node("MatMul", ["y", "head"], ["logits"]),
    ]
    weights = [
        weight("embedding", VOCAB, WIDTH),
        weight("w_q", WIDTH, HEADS * HEAD_SIZE),
        weight("w_k", WIDTH, KV_HEADS * HEAD_SIZE),
        weight("w_v", WIDTH, KV_HEADS * HEAD_SIZE),
        weight("head", HEADS * HEAD_SIZE, VOCAB),
        onnx.numpy_helper.from_array(np.array([1]), "one"),
    ]
    graph = helper.make_graph(nodes, "decoder", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("ids", [{}, {"eos_token_ids": [95, 96], "bos_token_id": 1}])
def test_genai_loads_the_config(
    tmp_path: Path, model_type: str, shared: bool, ids: dict[str, object]
) -> None:
    genai = pytest.importorskip("onnxruntime_genai")
    info = decoder_info(model_type=model_type, **ids)
    assert genai_refusal(info, INPUTS, OUTPUTS) is None
    onnx.save(tiny_decoder(), tmp_path / "model.onnx")
    write_json(tmp_path / "genai_config.json", genai_config(info, INPUTS, shared_buffer=shared))
    params = genai.GeneratorParams(genai.Model(str(tmp_path)))
    params.set_search_options(max_length=8)
    generator = genai.Generator(genai.Model(str(tmp_path)), params)
    generator.append_tokens([3, 4, 7])
    while not generator.is_done():
        generator.generate_next_token()
    assert 4 <= len(generator.get_sequence(0)) <= 8


def test_every_error_has_its_code() -> None:
    kinds = [e for e in QoptError.__subclasses__() if e.__module__ == "qopt.errors"]
    assert sorted(kind("x").exit_code for kind in kinds) == [2, 3, 4, 5, 6, 7]
