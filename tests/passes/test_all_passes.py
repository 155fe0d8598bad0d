"""Every pass on tiny models of several families: exact, whole, and with nothing left to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qopt.rewrite import PASSES, PassManager, load_builtin_passes

load_builtin_passes()
NAMES = sorted(name for name, cls in PASSES.items() if cls.__module__.startswith("qopt.passes."))

FAMILIES = ["llama", "gemma2", "gpt2", "phi", "gptj", "qwen3", "gpt_oss", "bloom", "opt"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_baseline_is_exact(
    family: str, captured: Any, tiny: Any, run: Any, worst: Any, ragged: Any, baseline: Any
) -> None:
    """A04, A05: one graph serves prefill, chunks and decode, at batch 3; run again, 0 rewrites."""
    graph, model = captured(family), tiny(family)[1]
    dynamic = {n.name: n.meta.get("dynamic") for n in graph.inputs}
    run(graph, *baseline)  # verifies after each pass
    assert worst(graph, model) < 1e-5
    if graph.info.ragged:
        assert ragged(graph, model) < 1e-5
    assert {name: d for name, d in dynamic.items() if d} == {
        n.name: n.meta["dynamic"] for n in graph.inputs if n.name in dynamic and n.meta["dynamic"]
    }
    listing = graph.listing()
    for name in baseline:
        assert PASSES[name]().run(graph) == 0, name
        graph.verify()
    assert graph.listing() == listing


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_each_pass_alone_is_exact(
    name: str, family: str, captured: Any, tiny: Any, worst: Any
) -> None:
    """A pass needs no other to be right; whatever it finds uncanonical, it leaves."""
    graph = captured(family)
    PassManager([PASSES[name]()]).run(graph)
    assert worst(graph, tiny(family)[1], (5, 2)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_low_precision(
    family: str, dtype: torch.dtype, captured: Any, tiny: Any, run: Any, worst: Any, baseline: Any
) -> None:
    """Captured in fp16 or bf16, the passes change no more than rounding does."""
    graph = captured(family, dtype)
    run(graph, *baseline)
    assert graph.find(torch.ops.qopt.rms_norm.default) or family == "gpt2"
    assert worst(graph, tiny(family)[1]) < (4e-3 if dtype == torch.float16 else 3e-2)


def test_windows_that_alternate(
    captured: Any, tiny: Any, run: Any, worst: Any, ragged: Any, baseline: Any
) -> None:
    """B09: windows [4, none, 4, none], a prompt of 12 and 12 steps, and a prompt of 3."""
    kinds = ["sliding_attention", "full_attention"] * 2
    over = {"num_hidden_layers": 4, "layer_types": kinds}
    graph, model = captured("gemma2", **over), tiny("gemma2", **over)[1]
    assert [layer.window for layer in graph.info.layers] == [4, None, 4, None]
    run(graph, *baseline)
    assert worst(graph, model, (12, *([1] * 12))) < 1e-5
    assert worst(graph, model, (3, 1)) < 1e-5
    assert ragged(graph, model) < 1e-5
