"""The main road on the real model: its graph, its tokens in three runtimes, its perplexity."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import qopt
from qopt.demo import fetch, find_demo
from qopt.errors import UsageError

pytestmark = pytest.mark.slow

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "Water boils at 100 degrees because",
    "The three primary colours are red,",
]
NEW = 48
TEXT = Path(__file__).parent / "data" / "sample.txt"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as an fp32 transformers folder, outside any cache."""
    try:
        find_demo("smollm2-135m")
    except UsageError:
        fetch("smollm2-135m")
    out = tmp_path_factory.mktemp("model") / "smollm2"
    return Path(fetch("smollm2-135m", "safetensors", out))


@pytest.fixture(scope="module")
def baseline(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("baseline") / "out"
    qopt.compile(str(model), "baseline", out)
    return out


@pytest.fixture(scope="module")
def fast(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fast") / "out"
    qopt.compile(str(model), "low-latency", out)
    return out


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return loaded.eval()


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def answers(reference: Any, tokenizer: Any) -> list[list[int]]:
    """What transformers writes, greedily."""
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            out = reference.generate(ids, max_new_tokens=NEW, do_sample=False)
        found.append(out[0, ids.shape[1] :].tolist())
    return found


def test_graph_is_fused(baseline: Path) -> None:
    graph = onnx.load(str(baseline / "model.onnx"), load_external_data=False).graph
    counts = Counter(node.op_type for node in graph.node)
    assert len(graph.node) <= 350
    assert counts["GroupQueryAttention"] == 30
    assert counts["SkipSimplifiedLayerNormalization"] == 60
    inputs = {i.name for i in graph.input}
    assert "position_ids" not in inputs  # the attention rotates by itself
    vocabulary = [i for i in graph.initializer if 49152 in i.dims]
    assert len(vocabulary) == 1  # the tied embedding, once


def test_qopt_run_writes_what_transformers_writes(baseline: Path, answers: list[list[int]]) -> None:
    loaded = qopt.load(baseline)
    results = [loaded.generate(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
    for result, want in zip(results, answers, strict=True):
        assert list(result.tokens) == want


def test_genai_loads_the_folder_and_writes_the_same(
    baseline: Path, tokenizer: Any, answers: list[list[int]]
) -> None:
    og = pytest.importorskip("onnxruntime_genai")
    loaded = og.Model(str(baseline))
    for prompt, want in zip(PROMPTS, answers, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        parameters = og.GeneratorParams(loaded)
        parameters.set_search_options(max_length=len(ids) + NEW, do_sample=False)
        generator = og.Generator(loaded, parameters)
        generator.append_tokens(np.array(ids, np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        got = list(generator.get_sequence(0))[len(ids) :]
        assert got[: len(want)] == want[: len(got)]
        assert abs(len(got) - len(want)) <= 1  # an EOS may or may not be part of the sequence


PLAIN = """
import json, sys, torch
path, prompts, new = json.loads(sys.argv[1])
module, answers = torch.jit.load(path), []
for prompt in prompts:
    ids, tokens = torch.tensor([prompt]), []
    past = [torch.zeros(1, 3, 0, 64) for _ in range(60)]
    while len(tokens) < new and 2 not in tokens:
        total = past[0].shape[2] + ids.shape[1]
        positions = torch.arange(total - ids.shape[1], total)[None]
        with torch.no_grad():
            logits, *past = module(ids, torch.ones(1, total, dtype=torch.int64), positions, *past)
        ids = logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(int(ids))
    answers.append(tokens)
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def script(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("script") / "out"
    qopt.compile(str(model), "baseline", out, target="torchscript-cpu")
    return out


def test_torchscript_writes_the_same_in_plain_torch(
    script: Path, tokenizer: Any, answers: list[list[int]], torch_alone: Callable[..., str]
) -> None:
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    job = json.dumps([str(script / "model.pt"), ids, NEW])
    assert json.loads(torch_alone(PLAIN, job)) == answers


def test_torchscript_writes_the_same_in_cpp(
    script: Path, tokenizer: Any, answers: list[list[int]], decode: Callable[..., Any]
) -> None:
    for prompt, want in zip(PROMPTS, answers, strict=True):
        done = decode(script, NEW, tokenizer(prompt)["input_ids"])
        assert done.returncode == 0, done.stderr
        assert [int(token) for token in done.stdout.split()] == want


def test_ragged_batch_equals_each_request_alone(fast: Path) -> None:
    loaded = qopt.load(fast)
    together = loaded.generate(PROMPTS, max_new_tokens=24)
    alone = [loaded.generate(prompt, max_new_tokens=24) for prompt in PROMPTS]
    assert [list(r.tokens) for r in together] == [list(r.tokens) for r in alone]


def test_perplexity_equals_transformers(baseline: Path, reference: Any, tokenizer: Any) -> None:
    from qopt.evaluate import evaluate

    windows, length = 4, 128
    got = evaluate(baseline, TEXT, windows=windows, length=length).perplexity
    ids = tokenizer(TEXT.read_text(), add_special_tokens=False)["input_ids"]
    losses: list[float] = []
    for start in range(0, windows * length, length):
        row = torch.tensor([ids[start : start + length]])
        with torch.no_grad():
            logits = reference(input_ids=row, use_cache=False).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum")
        losses.append(float(loss))
    want = math.exp(sum(losses) / (windows * (length - 1)))
    assert got == pytest.approx(want, rel=5e-4)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_recipe_for_cuda_passes_its_check(model: Path, dtype: str, tmp_path: Path) -> None:
    """`widen-residual` moves the logits by twice the limit of either side."""
    out = tmp_path / "out"
    result = qopt.compile(str(model), "low-latency-cuda", out, target="onnx-cuda", dtype=dtype)
    assert all(row.passed for row in result.report.checks)
