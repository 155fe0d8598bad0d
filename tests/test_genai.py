"""onnxruntime-genai loads the folder unchanged and writes what transformers writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qopt.artifact import read_manifest

genai = pytest.importorskip("onnxruntime_genai")

Compiled = Callable[..., Path]
Tiny = Callable[..., tuple[Path, Any]]
NEW = 12
# Larger random weights: else the lead of the best token is too small for a test of tokens.
LOUD = {"initializer_range": 0.2, "eos_token_id": None}


def greedy(model: Any, prompt: list[int], new: int = NEW) -> list[int]:
    """What transformers' own eager model appends, one whole forward a token, without a cache."""
    ids = list(prompt)
    for _ in range(new):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        best = logits.topk(2).values
        assert best[0] - best[1] > 1e-4  # else another order of sums may choose otherwise
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def generated(folder: Path, prompts: list[list[int]], new: int = NEW) -> list[list[int]]:
    """Greedy tokens that onnxruntime-genai appends, all prompts of one length."""
    model = genai.Model(str(folder))
    parameters = genai.GeneratorParams(model)
    length = len(prompts[0])
    parameters.set_search_options(do_sample=False, max_length=length + new, batch_size=len(prompts))
    generator = genai.Generator(model, parameters)
    generator.append_tokens(np.array(prompts, np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [
        [int(t) for t in generator.get_sequence(row)[length : length + new]]
        for row in range(len(prompts))
    ]


def prompt_of(length: int, seed: int = 7) -> list[int]:
    drawn = torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(seed))
    return [int(token) for token in drawn]


@pytest.mark.parametrize("recipe", ["baseline", "low-latency"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "opt", "qwen3"])
def test_same_tokens_as_transformers(
    family: str, recipe: str, compiled: Compiled, tiny: Tiny
) -> None:
    options = LOUD if family != "opt" else {"init_std": 0.2, "eos_token_id": None}
    folder = compiled(family, recipe, **options)
    prompt = prompt_of(9)
    assert generated(folder, [prompt]) == [greedy(tiny(family, **options)[1], prompt)]
    told = json.loads((folder / "genai_config.json").read_text())["model"]
    known = {"llama", "gemma2", "qwen3"}
    assert told["type"] == (family if family in known else "decoder")


def test_a_batch(compiled: Compiled, tiny: Tiny) -> None:
    prompts = [prompt_of(7, seed) for seed in (1, 2, 3)]
    model = tiny("llama", **LOUD)[1]
    want = [greedy(model, prompt) for prompt in prompts]
    assert generated(compiled("llama", "low-latency", **LOUD), prompts) == want


def test_a_right_padded_batch(compiled: Compiled, tiny: Tiny) -> None:
    """It takes the pad id for padding, and each row's own last token for the first logits."""
    prompts = [prompt_of(9, 1), prompt_of(5, 2), prompt_of(7, 3)]
    model = tiny("llama", **LOUD)[1]
    padded = [prompt + [0] * (9 - len(prompt)) for prompt in prompts]
    got = generated(compiled("llama", "low-latency", **LOUD), padded)
    assert got == [greedy(model, prompt) for prompt in prompts]


def test_a_prompt_in_pieces(compiled: Compiled, tiny: Tiny) -> None:
    folder, model = compiled("llama", "low-latency", **LOUD), tiny("llama", **LOUD)[1]
    loaded = genai.Model(str(folder))
    parameters = genai.GeneratorParams(loaded)
    parameters.set_search_options(do_sample=False, max_length=40)
    generator = genai.Generator(loaded, parameters)
    first, second = prompt_of(6, 14), prompt_of(5, 15)
    generator.append_tokens(np.array(first, np.int32))
    generator.append_tokens(np.array(second, np.int32))
    for _ in range(NEW):
        generator.generate_next_token()
    want = [*first, *second]
    assert [int(t) for t in generator.get_sequence(0)] == [*want, *greedy(model, want)]


def test_what_it_cannot_load_is_said(compiled: Compiled) -> None:
    """A cache of unequal layers has no place in its config."""
    folder = compiled("llama", "baseline", stop_after="fuse-rms-norm")
    assert not (folder / "genai_config.json").exists()
    assert any("onnxruntime-genai does not load it" in n for n in read_manifest(folder).notes)
