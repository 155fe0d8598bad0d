"""`qopt bench OUT --vs eager --vs compile`: the model that an artifact came from, in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from qopt.bench import bench, open_engine, open_original
from qopt.errors import UsageError

Build = Callable[..., Any]
SMALL: Any = {"prompt": 12, "new": 4, "rounds": 2, "threads": 1}


@pytest.mark.parametrize("how", ["eager", "compile"])
def test_against_the_model_in_torch(
    how: str, compiled: Build, tiny: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The artifact's own model, found by its log; compiled code keeps one cache for all rounds."""
    traced: list[Any] = []
    original = torch.compile

    def traced_alone(call: Any, **options: Any) -> Any:  # Inductor takes half a minute to wake up
        traced.append(options)
        return original(call, backend="eager", **options)

    monkeypatch.setattr(torch, "compile", traced_alone)
    folder = compiled("llama", target="torchscript-cpu")
    result = bench(folder, vs=[how], batch=2, **SMALL)
    label = {"eager": "transformers, float32", "compile": "torch.compile, float32"}[how]
    assert [peer.engine for peer in result.peers] == [label]
    assert len(traced) == (how == "compile")
    engine: Any = open_original(open_engine(folder), how, 1)
    for seed in (0, 1):
        ids = np.random.default_rng(seed).integers(3, 97, (2, 9))
        engine.prepare(ids, 3)
        engine.prefill()
        engine.decode()
        rows = torch.from_numpy(ids)
        for _ in range(4):
            with torch.no_grad():
                logits = tiny("llama")[1](rows, use_cache=False).logits
            rows = torch.cat([rows, logits[:, -1:].argmax(-1)], dim=1)
        assert engine._next.tolist() == rows[:, -1:].tolist()


def test_only_an_artifact_knows_its_model(tiny: Build) -> None:
    with pytest.raises(UsageError, match="--vs eager needs an artifact of qopt"):
        bench(tiny("llama")[0], vs="eager", **SMALL)
