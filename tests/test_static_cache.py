"""materialize-kv-cache with `layout: static`: buffers of a fixed size, written in place."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qopt.artifact import Artifact, read_manifest
from qopt.compile import compile
from qopt.errors import UnsupportedError
from qopt.final_check import Job, run_job
from qopt.graph import Graph
from qopt.rewrite import PASSES
from qopt.runtime import load

Compiled = Callable[..., Path]
Tiny = Callable[..., tuple[Path, Any]]
STATIC = ("materialize-kv-cache.layout=static",)
TARGET = "torchscript-cpu"
SHARING = {"num_kv_shared_layers": 2, "num_hidden_layers": 4, "vocab_size_per_layer_input": 97}


@pytest.mark.parametrize(
    ("family", "recipe", "config"),
    [
        ("llama", "baseline", {}),
        ("llama", "low-latency", {}),
        ("gemma2", "low-latency", {}),  # soft-cap, and a window on every second layer
        ("gpt_oss", "low-latency", {}),  # sinks
        ("opt", "baseline", {}),  # positions of its own
        ("gemma3n_text", "baseline", SHARING),  # layers that read another's buffer
    ],
)
def test_it_computes_the_model(
    family: str, recipe: str, config: Any, compiled: Compiled, tiny: Tiny
) -> None:
    """A04, A05, B08, B09: every probe, unequal lengths and the edges of windows among them."""
    folder = compiled(family, recipe, target=TARGET, sets=STATIC, **config)
    found = run_job(Job(str(tiny(family, **config)[0])), lambda: str(folder))
    assert found.passed
    assert max(row.figures["max"] for row in found.probes) <= 1e-4
    assert any(row.probe == "unequal lengths" for row in found.probes)


def test_the_signature(compiled: Compiled) -> None:
    manifest = read_manifest(compiled("llama", target=TARGET, sets=STATIC))
    assert [(spec.name, spec.shape) for spec in manifest.inputs[1:5]] == [
        ("attention_mask", ["batch_size", "cache_length"]),
        ("position_ids", ["batch_size", "sequence_length"]),
        ("cache_position", [1]),
        ("past_key_values.0.key", ["batch_size", 2, "cache_length", 16]),
    ]
    assert [spec.name for spec in manifest.outputs] == ["logits"]
    assert manifest.shared_buffer


def test_a_step_copies_nothing(compiled: Compiled) -> None:
    """The buffers are the caller's, and only the new slots change; no shape tells the length."""
    folder = compiled("llama", target=TARGET, sets=STATIC)
    module: Any = torch.jit.load(folder / "model.pt")  # type: ignore[no-untyped-call]
    buffers = [torch.full((1, 2, 12, 16), 7.0) for _ in range(4)]
    before = [buffer.clone() for buffer in buffers]
    mask = (torch.arange(12) < 5).long()[None]
    (made,) = module(
        torch.tensor([[3, 4]]), mask, torch.tensor([[3, 4]]), torch.tensor([3]), *buffers
    )
    assert made.shape == (1, 2, 97)
    for buffer, old in zip(buffers, before, strict=True):
        same = (buffer == old).all(-1).all(1)[0]
        assert same.tolist() == [True] * 3 + [False] * 2 + [True] * 7
    assert not re.search(r"cat\(.*, 2\)", module.code)


def test_it_generates_as_the_growing_cache_does(compiled: Compiled) -> None:
    """Rows of unequal length, rows that end first, and a buffer that must grow on the way."""
    prompts = [[5, 9, 11, 40, 7], [8], [33, 34, 35]]
    models = [
        load(compiled("mistral", "low-latency", target=TARGET, sets=sets)) for sets in ((), STATIC)
    ]
    eos = models[0].generate_ids(prompts, max_new_tokens=3, ignore_eos=True)[1].tokens[1]
    for model in models:
        model.info.eos_token_ids[:] = [eos]  # the second row ends early, and is dropped
    results = [model.generate_ids(prompts, max_new_tokens=9) for model in models]
    assert [r.tokens for r in results[0]] == [r.tokens for r in results[1]]
    assert len({len(r.tokens) for r in results[0]}) > 1
    logits = []
    for model in models:
        decoder = model.decoder(2)
        ids = np.random.default_rng(0).integers(3, 90, (2, 270))
        parts = [decoder.forward(ids[:, a:b]) for a, b in ((0, 250), (250, 257), (257, 270))]
        logits.append(np.concatenate(parts))
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)


def test_a_single_row_goes_back(compiled: Compiled) -> None:
    """`truncate` forgets tokens: what stood behind them is not seen again."""
    decoder = load(compiled("llama", target=TARGET, sets=STATIC)).decoder(1)
    ids = np.array([[5, 9, 11, 40, 7, 8]])
    first = decoder.forward(ids)
    decoder.forward(np.array([[60, 61, 62]]))
    assert decoder.cache.truncate(4) == 4
    np.testing.assert_allclose(decoder.forward(ids[:, 4:]), first, atol=1e-5)


def test_onnx_has_none(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="onnx-cpu has no cache of a fixed size"):
        compile(str(tiny("llama")[0]), "baseline", tmp_path / "out", sets=STATIC, check="off")
    assert not (tmp_path / "out").exists()


def test_a_cache_of_the_models_own_is_said(tiny: Tiny, tmp_path: Path) -> None:
    options: Any = {"target": TARGET, "sets": STATIC, "check": "off"}
    result = compile(str(tiny("bloom")[0]), "baseline", tmp_path / "out", **options)
    assert any("not made static" in note for note in result.notes)
    assert Artifact.load(tmp_path / "out").manifest.inputs[-1].shape[2] == "past_sequence_length"


def test_a_mask_that_something_else_reads_is_refused(captured: Callable[..., Graph]) -> None:
    graph = captured("llama")
    mask = next(node for node in graph.inputs if node.name == "attention_mask")
    with graph.before(graph.output):
        graph.call(torch.ops.aten.sum.default, mask)
    with pytest.raises(UnsupportedError, match="cannot be static"):
        PASSES["materialize-kv-cache"](layout="static").run(graph)  # type: ignore[call-arg]
