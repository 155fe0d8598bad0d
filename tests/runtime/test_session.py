"""Sessions: providers, threads, what is printed, what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qopt.errors import UsageError
from qopt.runtime import session as session_module
from qopt.runtime.session import OnnxSession, default_threads, import_onnxruntime, physical_cores

Build = Callable[..., Any]


def test_F03_a_missing_provider_is_refused(tiny: Build) -> None:
    path = tiny().folder / "model.onnx"
    for asked in (["CUDAExecutionProvider"], ["CUDAExecutionProvider", "CPUExecutionProvider"]):
        with pytest.raises(UsageError, match="no CUDAExecutionProvider") as error:
            OnnxSession(path, providers=asked)
        assert "CPUExecutionProvider" in str(error.value)
        assert error.value.exit_code == 2


def test_F03_a_provider_that_fails_to_start_is_refused(
    tiny: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnxruntime lists the provider as available, then runs on the CPU all the same."""
    import onnxruntime

    both = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: both)
    plain = onnxruntime.InferenceSession

    def falls_back(source: Any, options: Any, providers: list[str]) -> Any:
        return plain(source, options, providers=["CPUExecutionProvider"])

    monkeypatch.setattr(onnxruntime, "InferenceSession", falls_back)
    with pytest.raises(UsageError, match="no CUDAExecutionProvider"):
        OnnxSession(tiny().folder / "model.onnx", providers=both)


def test_exactly_two_warnings_are_silent(
    tiny: Build, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import onnxruntime

    path = tiny("standard").folder / "model.onnx"
    model = onnx.load(path)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(1), "nobody_reads_me"))
    onnx.save(model, path)
    feeds = {
        "input_ids": np.arange(4)[None],
        "attention_mask": np.ones((1, 4), np.int64),
        "position_ids": np.arange(4)[None],
        "num_logits_to_keep": np.array([3]),
        **{f"past_key_values.{n}.{k}": np.zeros((1, 2, 0, s), np.float32)
           for n, s in ((0, 16), (1, 8)) for k in ("key", "value")},
    }  # fmt: skip
    plain = onnxruntime.InferenceSession(str(path))
    want = plain.run(["logits"], feeds)[0]
    loud = capfd.readouterr().err
    assert "num_logits_to_keep appears in graph inputs" in loud
    assert "does not match actual shape" in loud
    got = OnnxSession(path).run(feeds)["logits"]
    quiet = capfd.readouterr().err
    np.testing.assert_array_equal(got, want)
    assert "num_logits_to_keep" not in quiet
    assert "does not match" not in quiet
    assert "nobody_reads_me" in quiet  # all other warnings are printed


def test_the_default_of_logits_to_keep_is_the_artifacts(tiny: Build) -> None:
    model = tiny("standard").load()
    feeds = {
        "input_ids": np.arange(8).reshape(2, 4),
        "attention_mask": np.array([[1, 1, 1, 1], [1, 1, 0, 0]]),
        "position_ids": np.array([[0, 1, 2, 3], [0, 1, 1, 1]]),
        **{f"past_key_values.{n}.{k}": np.zeros((2, 2, 0, s), np.float32)
           for n, s in ((0, 16), (1, 8)) for k in ("key", "value")},
    }  # fmt: skip
    assert model.forward(**feeds)["logits"].shape == (2, 1, 260)
    kept = model.forward(**feeds, num_logits_to_keep=np.array([2], np.int32))["logits"]
    assert kept.shape == (2, 2, 260)


@pytest.mark.parametrize("location", ["../secret.bin", "ABSOLUTE", "link.bin"])
@pytest.mark.parametrize("overridable", [True, False])
def test_J04_weights_outside_the_folder_are_refused(
    tmp_path: Path, location: str, overridable: bool
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    secret = tmp_path / "secret.bin"
    secret.write_bytes(np.ones(1024, np.float32).tobytes())
    (folder / "link.bin").symlink_to(secret)
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1024])
    weight.data_location = TensorProto.EXTERNAL
    where = str(secret) if location == "ABSOLUTE" else location
    weight.external_data.add(key="location", value=where)
    keep = numpy_helper.from_array(np.array([1]), "num_logits_to_keep")
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1024])]
    if overridable:
        inputs.append(helper.make_tensor_value_info(keep.name, TensorProto.INT64, [1]))
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "reads_outside",
        inputs,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1024])],
        [weight, *([keep] if overridable else [])],
    )
    opsets = [helper.make_opsetid("", 21)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UsageError, match="cannot load the model"):
        OnnxSession(folder / "model.onnx")


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(UsageError, match="not an ONNX file"):
        OnnxSession(path)


def test_without_onnxruntime_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UsageError) as error:
        import_onnxruntime()
    assert "pip install 'qopt-compiler[cpu]'" in str(error.value)
    assert error.value.exit_code == 2


def test_two_onnxruntimes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wheel:
        def __init__(self, name: str) -> None:
            self.metadata = {"Name": name}

    wheels = [Wheel("onnxruntime"), Wheel("onnxruntime_gpu"), Wheel("numpy")]
    monkeypatch.setattr(metadata, "distributions", lambda: wheels)
    with pytest.raises(UsageError, match="both onnxruntime and onnxruntime-gpu") as error:
        import_onnxruntime()
    assert "pip uninstall onnxruntime-gpu" in str(error.value)


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert physical_cores() >= 1
    monkeypatch.setattr(session_module, "physical_cores", lambda: 64)
    assert default_threads() == 8


def test_a_cache_is_bound_again_when_batches_take_turns(tiny: Build) -> None:
    built = tiny()
    model = built.load()
    a, b = model.decoder(), model.decoder()
    rows = [[1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4]]
    for column in range(6):
        logits = [d.forward(np.array([[row[column]]])) for d, row in zip((a, b), rows, strict=True)]
    for got, row in zip(logits, rows, strict=True):
        np.testing.assert_allclose(got[0, 0], built.reference(row)[-1], atol=1e-4)
