"""The written ONNX file: what it holds, that it is valid, small and reproducible.

A second opinion on the numbers comes from onnx's reference evaluator, expected values from eager
transformers.
"""

from __future__ import annotations

import getpass
import json
import math
import platform
import re
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from safetensors.torch import load_file, save_file

from qopt.artifact import Artifact, read_manifest
from qopt.compile import compile
from qopt.errors import UnsupportedError, UsageError
from qopt.runtime import load
from qopt.runtime.session import OnnxSession

Compiled = Callable[..., Path]
Tiny = Callable[..., tuple[Path, Any]]
Distance = Callable[..., float]
CALLS = [[6, 3, 9], [1, 1, 1], [4, 2, 3], [1, 1, 1]]


def graph_of(folder: Path) -> onnx.ModelProto:
    return onnx.load(folder / "model.onnx", load_external_data=False)


def ops_of(folder: Path) -> Counter[str]:
    return Counter(node.op_type for node in graph_of(folder).graph.node)


def opset_of(model: onnx.ModelProto) -> int:
    return next(int(o.version) for o in model.opset_import if o.domain == "")


def size_of(tensor: onnx.TensorProto) -> int:
    kind: Any = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return int(math.prod(tensor.dims) * np.dtype(kind).itemsize)


# Validity ------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["onnx-cpu", "onnx"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_oss"])
def test_versions_are_ours_and_the_file_is_valid(
    family: str, target: str, compiled: Compiled
) -> None:
    folder = compiled(family, target=target)
    model, manifest = graph_of(folder), read_manifest(folder)
    assert model.ir_version == manifest.ir_version == 10
    assert opset_of(model) == manifest.opset
    assert opset_of(model) <= 25
    assert {o.domain for o in model.opset_import} <= {"", "com.microsoft"}
    if target == "onnx":
        assert {node.domain for node in model.graph.node} == {""}
    onnx.checker.check_model(str(folder / "model.onnx"), full_check=True)
    assert OnnxSession(folder / "model.onnx").outputs


def test_an_invalid_file_is_never_an_artifact(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qopt.emit.builder import EMITTERS

    silu = torch.ops.aten.silu.default
    monkeypatch.setitem(EMITTERS, silu, lambda b, node: b.op("Softmax", b.get(node.args[0]), axs=1))
    with pytest.raises(UnsupportedError, match="not valid ONNX") as caught:
        compile(str(tiny("llama")[0]), "baseline", tmp_path / "o", skip=["fuse-silu-mul"])
    assert "axs" in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_reference_evaluator_agrees(family: str, compiled: Compiled, tiny: Tiny) -> None:
    folder, model = compiled(family, target="onnx"), tiny(family)[1]
    evaluator = ReferenceEvaluator(str(folder / "model.onnx"))
    ids = torch.randint(3, 97, (2, 8), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits.numpy()
    past = {
        spec.name: np.zeros([2, spec.type.tensor_type.shape.dim[1].dim_value, 0, 16], np.float32)
        for spec in graph_of(folder).graph.input
        if spec.name.startswith("past")
    }
    done = 0
    for new in (6, 1, 1):
        positions = np.arange(done, done + new)[None].repeat(2, 0)
        feeds = {
            "input_ids": ids[:, done : done + new].numpy(),
            "attention_mask": np.ones((2, done + new), np.int64),
            "position_ids": positions,
            "num_logits_to_keep": np.zeros(1, np.int64),
        }
        values: Any = evaluator.run(None, feeds | past)
        out = dict(zip(evaluator.output_names, values, strict=True))
        np.testing.assert_allclose(out.pop("logits"), want[:, done : done + new], atol=1e-4)
        past = {name.replace("present", "past_key_values"): value for name, value in out.items()}
        done += new


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(pytest.param(f, marks=pytest.mark.slow) for f in ("gemma3_text", "gpt2", "gpt_oss")),
    ],
)
def test_an_older_opset_is_written_with_primitives(
    family: str, compiled: Compiled, tiny: Tiny, distance: Distance
) -> None:
    folder = compiled(family, target="onnx", opset=21)
    assert opset_of(graph_of(folder)) == read_manifest(folder).opset == 21
    kinds = set(ops_of(folder))
    assert not kinds & {"Attention", "RMSNormalization", "RotaryEmbedding"}
    assert distance(folder, tiny(family)[1], CALLS) <= 1e-4


@pytest.mark.parametrize("opset", [20, 26, 7])
def test_an_opset_that_the_target_lacks(opset: int, tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"no opset {opset}") as caught:
        compile(str(tiny("llama")[0]), "baseline", tmp_path / "o", target="onnx", opset=opset)
    assert "21 to 25" in str(caught.value)
    assert not list(tmp_path.iterdir())


# The signature -------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["onnx-cpu", "onnx"])
@pytest.mark.parametrize(("recipe", "rows"), [("baseline", "sequence_length"), ("low-latency", 1)])
def test_signature(target: str, recipe: str, rows: int | str, compiled: Compiled) -> None:
    session = OnnxSession(compiled("llama", recipe, target=target) / "model.onnx")
    assert session.inputs["input_ids"].shape == ("batch_size", "sequence_length")
    assert session.inputs["attention_mask"].dtype == "int64"
    assert session.inputs["attention_mask"].shape == ("batch_size", "total_sequence_length")
    for layer in range(2):
        past = session.inputs[f"past_key_values.{layer}.key"]
        assert past.shape == ("batch_size", 2, "past_sequence_length", 16)
        present = session.outputs[f"present.{layer}.value"]
        assert present.shape == ("batch_size", 2, "total_sequence_length", 16)
    declared = graph_of(compiled("llama", recipe, target=target)).graph.output[0]
    dims = [d.dim_value or d.dim_param for d in declared.type.tensor_type.shape.dim]
    assert (declared.name, dims) == ("logits", ["batch_size", rows, 97])


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.bool_])
def test_masks_of_any_integer_type(kind: Any, compiled: Compiled, tiny: Tiny) -> None:
    session = OnnxSession(compiled("llama") / "model.onnx")
    ids = np.arange(3, 11)[None].repeat(2, 0)
    past = {n: np.zeros((2, 2, 0, 16), np.float32) for n in session.inputs if n.startswith("past")}
    feeds = {"input_ids": ids, "attention_mask": np.ones((2, 8), kind), **past}
    with torch.no_grad():
        want = tiny("llama")[1](input_ids=torch.from_numpy(ids), use_cache=False).logits
    np.testing.assert_allclose(session.run(feeds)["logits"], want.numpy(), atol=1e-4)


@pytest.mark.parametrize("target", ["onnx-cpu", "onnx"])
@pytest.mark.parametrize("recipe", ["baseline", "low-latency"])
@pytest.mark.parametrize("keep", [None, 0, 1, 3, 12])
def test_logits_to_keep(
    keep: int | None, recipe: str, target: str, compiled: Compiled, tiny: Tiny, player: Any
) -> None:
    model, lengths = tiny("llama")[1], [7, 4, 1]
    ids = torch.randint(3, 97, (3, 7), generator=torch.Generator().manual_seed(5))
    got = player(compiled("llama", recipe, target=target), keep)(ids, lengths)
    count = (0 if recipe == "baseline" else 1) if keep is None else keep
    assert got.shape == (3, count or 7, 97)
    for row, length in enumerate(lengths):
        with torch.no_grad():
            want = model(input_ids=ids[row : row + 1, :length], use_cache=False).logits[0]
        real = min(count or length, length)
        have = got[row, :length] if not count else got[row, count - real :]
        torch.testing.assert_close(have, want[length - real :], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_one_buffer_for_past_and_present(family: str, compiled: Compiled, player: Any) -> None:
    folder = compiled(family, "low-latency")
    assert Artifact.load(folder).manifest.shared_buffer
    decoder, plain = load(folder).decoder(3), player(folder, None)
    generator = torch.Generator().manual_seed(6)
    for lengths in ([9, 4, 6], [1, 1, 1], [2, 5, 1], [1, 1, 1]):
        ids = torch.randint(3, 97, (3, max(lengths)), generator=generator)
        shared = decoder.forward(ids.numpy(), np.array(lengths))
        np.testing.assert_allclose(shared, plain(ids, lengths).numpy(), atol=1e-5)


# What the op cannot take ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "op", "why"),
    [
        (4, "Attention", "head size 4 is no multiple of 8"),
        (12, "Attention", "head size 12 is no multiple of 8"),
        (20, "Attention", "head size 20 is no multiple of 8"),
        (8, "GroupQueryAttention", "rotation stays outside"),
        (16, "GroupQueryAttention", None),
    ],
)
def test_head_sizes(
    size: int, op: str, why: str | None, tiny: Tiny, distance: Distance, tmp_path: Path
) -> None:
    folder, model = tiny("llama", head_dim=size)
    result = compile(str(folder), "baseline", tmp_path / "out", check="off")
    assert ops_of(result.out)[op] == 2
    rows = {row.op: row for row in result.report.lowering}
    reasons = " ".join(rows["cached_attention"].reasons)
    assert why in reasons if why else not reasons
    assert distance(result.out, model, CALLS) <= 1e-4


# Weights in the file -------------------------------------------------------------------------


def vocabulary_wide(folder: Path, words: int) -> list[str]:
    return [t.name for t in graph_of(folder).graph.initializer if words in t.dims]


@pytest.mark.parametrize("target", ["onnx-cpu", "onnx"])
@pytest.mark.parametrize("recipe", ["baseline", "low-latency"])
def test_a_tied_embedding_is_stored_once(
    recipe: str, target: str, compiled: Compiled, tiny: Tiny, distance: Distance
) -> None:
    options = {"tie_word_embeddings": True, "vocab_size": 512}
    folder = compiled("llama", recipe, target=target, **options)
    assert len(vocabulary_wide(folder, 512)) == 1
    assert distance(folder, tiny("llama", **options)[1], CALLS) <= 1e-4


def test_unequal_matrices_are_not_tied(tiny: Tiny, tmp_path: Path, distance: Distance) -> None:
    """The config says tied, the checkpoint holds two different matrices."""
    source, model = tiny("llama", vocab_size=512)
    folder = tmp_path / "flag"
    folder.mkdir()
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    assert not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    result = compile(str(folder), "baseline", tmp_path / "out", check="off")
    assert len(vocabulary_wide(result.out, 512)) == 2
    assert any("tied by the config" in note for note in result.notes)
    assert distance(result.out, model, CALLS) <= 1e-4


@pytest.mark.parametrize("target", ["onnx-cpu", "onnx"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_oss", "falcon"])
def test_each_weight_is_written_once(
    family: str, target: str, compiled: Compiled, tiny: Tiny
) -> None:
    folder = compiled(family, target=target)
    model = graph_of(folder)
    read = {name for node in model.graph.node for name in node.input}
    for node in model.graph.node:  # subgraphs read outer values by name
        for attribute in node.attribute:
            read |= {name for inner in attribute.g.node for name in inner.input}
    assert [t.name for t in model.graph.initializer if t.name not in read] == []
    stored = sum(p.numel() * 4 for p in {id(p): p for p in tiny(family)[1].parameters()}.values())
    held = sum(size_of(t) for t in model.graph.initializer)
    assert held <= stored * 1.02 + 3 * 64 * 16 * 4 + 4096  # and two tables of angles


def test_weights_lie_beside_the_graph(compiled: Compiled) -> None:
    """However small the model is: nothing that counts against protobuf's 2 GB."""
    folder = compiled("llama")
    model = graph_of(folder)
    inside = [t for t in model.graph.initializer if not t.external_data]
    assert max(size_of(t) for t in inside) <= 1024
    places = {
        e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"
    }
    assert places == {"model.onnx.data"}
    assert (folder / "model.onnx").stat().st_size < 64 << 10
    assert not (folder / "model.onnx.data").is_symlink()
    assert (folder / "model.onnx.data").stat().st_nlink == 1


PACKED = """
import torch
from torch import nn

class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        draw = torch.randint(-128, 127, (512, 256), generator=generator, dtype=torch.int8)
        self.register_buffer("packed", draw)
        self.register_buffer("scale", torch.rand(512, 1, generator=generator))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.packed.float() * self.scale)

def packed():
    return Packed(), (torch.randn(3, 256),), ({0: torch.export.Dim("rows")},)
"""


@pytest.mark.parametrize("recipe", ["baseline", "low-latency"])
def test_folding_never_unpacks_a_weight(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(PACKED)
    out = compile(f"{tmp_path}/m.py:packed", recipe, tmp_path / "out", check="off").out
    assert (out / "model.onnx.data").stat().st_size < 512 * 256 + 8192
    names: dict[str, Any] = {}
    exec(PACKED, names)
    x = torch.randn(5, 256)
    got = OnnxSession(out / "model.onnx")
    (name,) = got.inputs
    np.testing.assert_allclose(
        next(iter(got.run({name: x.numpy()}).values())),
        names["packed"]()[0](x),
        rtol=1e-4,
        atol=1e-2,
    )


# Same bytes ----------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_same_bytes(family: str, compiled: Compiled, tiny: Tiny, tmp_path: Path) -> None:
    """Also from a copy of the model at another place, and beside another output."""
    first = compiled(family)
    copy = tmp_path / "elsewhere" / "copy"
    copy.mkdir(parents=True)
    for path in tiny(family)[0].iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    second = compile(str(copy), "baseline", tmp_path / "second", check="off").out
    assert contents(first) == contents(second)
    assert (tmp_path / "second.log" / "report.json").is_file()


def test_the_checked_artifact_has_the_same_bytes_again(tiny: Tiny, tmp_path: Path) -> None:
    model = str(tiny("llama")[0])
    outs = [compile(model, "low-latency", tmp_path / n, check="final").out for n in "ab"]
    assert contents(outs[0]) == contents(outs[1])
    assert read_manifest(outs[0]).checks


def test_nothing_names_machine_or_time(compiled: Compiled, tiny: Tiny) -> None:
    folder = compiled("llama")
    names = [str(tiny("llama")[0]), "/tmp/", socket.gethostname(), platform.node()]
    names += [] if getpass.getuser() == "root" else [getpass.getuser()]
    for name, data in contents(folder).items():
        for word in names:
            assert word.encode() not in data, (name, word)
        if name.endswith((".json", ".yaml")):
            assert not re.search(rb"20\d\d-\d\d-\d\d|\d\d:\d\d:\d\d", data), name


def test_initializers_are_readable(compiled: Compiled, tiny: Tiny) -> None:
    """A weight under its own name holds the checkpoint's numbers."""
    model = onnx.load(compiled("llama") / "model.onnx")
    held = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    name = "model.layers.1.self_attn.o_proj.weight"
    want = tiny("llama")[1].state_dict()[name].numpy()
    assert any(np.array_equal(a, want) or np.array_equal(a.T, want) for a in held.values())
