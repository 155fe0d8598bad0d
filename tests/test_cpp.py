"""examples/cpp/decode.cpp, built with the libtorch inside the torch wheel, on tiny models.

SmolLM2 goes through the same program in test_smollm2.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

Compiled = Callable[..., Path]
Decode = Callable[..., subprocess.CompletedProcess[str]]
PROMPT = [5, 9, 11, 40, 7, 33]


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom"])  # positions, a window, neither
def test_cpp_decodes_as_transformers_does(
    family: str, compiled: Compiled, tiny: Any, decode: Decode
) -> None:
    folder, model = compiled(family, target="torchscript-cpu"), tiny(family)[1]
    want = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)
    done = decode(folder, 12, PROMPT)
    assert done.returncode == 0, done.stderr
    assert list(map(int, done.stdout.split())) == want[0, len(PROMPT) :].tolist()


def test_cpp_stops_at_an_end_of_sequence(
    compiled: Compiled, tiny: Any, decode: Decode, tmp_path: Path
) -> None:
    folder, model = compiled("llama", target="torchscript-cpu"), tiny("llama")[1]
    answer = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)
    tokens = answer[0, len(PROMPT) :].tolist()
    stop = next(i for i, token in enumerate(tokens) if i and token not in tokens[:i])
    shutil.copytree(folder, tmp_path / "out")
    manifest = tmp_path / "out" / "qopt_manifest.json"
    text = manifest.read_text()
    changed = text.replace(
        '"eos_token_ids": [\n      2\n', f'"eos_token_ids": [\n {tokens[stop]}\n'
    )
    assert changed != text
    manifest.write_text(changed)
    assert decode(tmp_path / "out", 12, PROMPT).stdout.split() == [*map(str, tokens[: stop + 1])]


def test_cpp_says_what_is_wrong(decode: Decode, tmp_path: Path) -> None:
    done = decode(tmp_path / "nothing", 1, PROMPT)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no qopt_manifest.json" in done.stderr
