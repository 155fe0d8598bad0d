"""What MODEL may be: each road gives the tensors that its own library would load, or says why not.

References are transformers' `from_pretrained`, `torch.export` and dense formulas, never qopt.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import socket
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from qopt import compat
from qopt.compat import TRANSFORMERS_5
from qopt.errors import QoptError, ResourceError, UnsupportedError, UsageError
from qopt.sources import ModelSource, bind_weights, open_module, open_source
from qopt.weights import LazyWeight

AUTO: Any = AutoModelForCausalLM  # transformers leaves its factories without types

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = SIZES | {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}

FAMILIES = ["llama", "gpt2", "opt", "phi3", "gemma3_text", "bloom", "mixtral", "qwen2_moe"]
FAMILIES += ["gpt_oss", "deepseek_v3", "roberta", "mamba"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QOPT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def randomised(model: Any) -> Any:
    """Random everywhere: buffers and norms too, which start as zeros and ones."""
    torch.manual_seed(0)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape) * 0.05)
    return model.eval()


def tiny(kind: str = "llama", **changes: Any) -> Any:
    sizes = EXPERTS if "moe" in kind or kind in ("mixtral", "deepseek_v3") else SIZES
    return randomised(AUTO.from_config(AutoConfig.for_model(kind, **(sizes | changes))))


def saved(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def bound(source: ModelSource) -> dict[str, LazyWeight]:
    with init_empty_weights(include_buffers=False):
        model = AUTO.from_config(source.config)
    return bind_weights(model, source)


def assert_same(weights: Mapping[str, LazyWeight], state: Mapping[str, Tensor]) -> None:
    assert set(weights) == set(state)
    for name, tensor in state.items():
        assert torch.equal(weights[name].evaluate(), tensor), name


def refusal(error: type[QoptError], model: str | Path, **options: Any) -> str:
    def use() -> None:
        source = open_source(str(model), **options)
        if source.kind == "decoder":
            bound(source)

    with pytest.raises(error) as caught:
        use()
    return str(caught.value)


# A transformers folder -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_folder_gives_what_from_pretrained_loads(kind: str, tmp_path: Path) -> None:
    saved(tiny(kind), tmp_path)
    source = open_source(str(tmp_path))
    weights = bound(source)
    assert_same(weights, AUTO.from_pretrained(tmp_path).state_dict())
    assert source.identity == ""
    assert not any("left out" in note for note in source.notes)


@pytest.mark.skipif(not TRANSFORMERS_5, reason="4.57 keeps every expert apart")
def test_merged_experts_are_native_transforms_that_read_rows_apart(tmp_path: Path) -> None:
    saved(tiny("mixtral"), tmp_path)
    weight = bound(open_source(str(tmp_path)))["model.layers.0.mlp.experts.gate_up_proj"]
    assert weight.name == "concat"
    assert len(list(weight.chunks(limit=weight.nbytes // 4))) == 4


@pytest.mark.skipif(not TRANSFORMERS_5, reason="4.57 converts nothing")
@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_a_conversion_unknown_to_qopt_runs_transformers_own(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "_NATIVE", {})
    saved(tiny(kind), tmp_path)
    weights = bound(open_source(str(tmp_path)))
    assert "convert" in {weight.name for weight in weights.values()}
    assert_same(weights, AUTO.from_pretrained(tmp_path).state_dict())


def test_an_explicit_head_dim_survives(tmp_path: Path) -> None:
    """B07."""
    saved(tiny(head_dim=32), tmp_path)
    source = open_source(str(tmp_path))
    assert source.config is not None
    assert source.config.head_dim == 32
    assert bound(source)["model.layers.0.self_attn.q_proj.weight"].shape == (128, 64)


def test_a_list_of_eos_ids_stays_a_list(tmp_path: Path) -> None:
    """F06."""
    saved(tiny(), tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert open_source(str(tmp_path)).generation_config == {"eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").unlink()
    assert open_source(str(tmp_path)).generation_config["eos_token_id"] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_are_the_checkpoint_s(dtype: torch.dtype, tmp_path: Path) -> None:
    saved(tiny().to(dtype), tmp_path)
    source = open_source(str(tmp_path))
    assert source.dtype == dtype
    assert {weight.dtype for weight in bound(source).values()} == {dtype}


def test_shards_equal_the_whole_and_the_digest_follows_content(tmp_path: Path) -> None:
    model = tiny()
    whole = open_source(str(saved(model, tmp_path / "whole")))
    shards = open_source(str(saved(model, tmp_path / "shards", max_shard_size="50KB")))
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert_same(bound(shards), model.state_dict())
    assert whole.digest == shards.digest
    model.lm_head.weight.data[0, 0] += 1
    assert open_source(str(saved(model, tmp_path / "other"))).digest != whole.digest


def test_without_weights_everything_is_absent(tmp_path: Path) -> None:
    saved(tiny(tie_word_embeddings=True), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    weights = bound(open_source(str(tmp_path), weights=False))
    assert all(weight.absent for weight in weights.values())
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]


def test_a_local_folder_never_touches_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """J06."""
    saved(tiny(), tmp_path)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    bound(open_source(str(tmp_path)))


# Ties ----------------------------------------------------------------------------------------


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    tensors = change(load_file(folder / "model.safetensors"))
    save_file({name: t.clone() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def with_head(head: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda t: t | {"lm_head.weight": head(t["model.embed_tokens.weight"])}


def test_a_tied_head_is_the_same_weight(tmp_path: Path) -> None:
    model = tiny(tie_word_embeddings=True)
    weights = bound(open_source(str(saved(model, tmp_path))))
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    assert_same(weights, model.state_dict())


def test_an_explicit_equal_head_is_tied_and_an_unequal_one_kept(tmp_path: Path) -> None:
    """C05.2 and C05.3."""
    saved(tiny(tie_word_embeddings=True), tmp_path)
    source = open_source(str(rewritten(tmp_path, with_head(lambda embedding: embedding))))
    weights = bound(source)
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    assert source.notes == []
    source = open_source(str(rewritten(tmp_path, with_head(lambda embedding: embedding + 1))))
    weights = bound(source)
    assert weights["lm_head.weight"].digest != weights["model.embed_tokens.weight"].digest
    assert_same(weights, load_file(tmp_path / "model.safetensors"))  # 4.57 ignores the head
    assert "differ in the checkpoint" in source.notes[0]
    assert source.config is not None
    assert source.config.tie_word_embeddings is False


def test_an_untied_config_ties_nothing(tmp_path: Path) -> None:
    """C02: what is stored decides, no flag; equal matrices are seen by their digests."""
    saved(tiny(tie_word_embeddings=False), tmp_path)
    weights = bound(open_source(str(tmp_path)))
    assert weights["lm_head.weight"].digest != weights["model.embed_tokens.weight"].digest
    rewritten(tmp_path, with_head(lambda embedding: embedding))
    weights = bound(open_source(str(tmp_path)))
    assert weights["lm_head.weight"].digest == weights["model.embed_tokens.weight"].digest


def test_a_stored_alias_gives_both_names(tmp_path: Path) -> None:
    """C04: a shared tensor is stored once, its other name in the metadata."""
    saved(tiny(tie_word_embeddings=False), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, {"format": "pt", "lm_head.weight": "model.embed_tokens.weight"})
    weights = bound(open_source(str(tmp_path)))
    assert torch.equal(weights["lm_head.weight"].evaluate(), tensors["model.embed_tokens.weight"])


def test_a_head_under_another_prefix_is_found(tmp_path: Path) -> None:
    """C05.1."""
    model = tiny(tie_word_embeddings=True)
    saved(model, tmp_path)
    rewritten(tmp_path, lambda t: {f"language_model.{name}": value for name, value in t.items()})
    assert_same(bound(open_source(str(tmp_path))), model.state_dict())
    rewritten(tmp_path, lambda t: {n.replace("e_model.", "e_model.x."): v for n, v in t.items()})
    assert_same(bound(open_source(str(tmp_path))), model.state_dict())


@pytest.mark.parametrize("kind", ["gemma3", "llava"])
@pytest.mark.parametrize("tied", [True, False])
def test_of_a_multimodal_checkpoint_the_text_part_is_taken(
    kind: str, tied: bool, tmp_path: Path
) -> None:
    text = AutoConfig.for_model(kind).get_text_config().model_type
    vision = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = AutoConfig.for_model(
        kind,
        text_config=SIZES | {"model_type": text},
        vision_config=vision
        | {
            "model_type": AutoConfig.for_model(kind).vision_config.model_type,
            "num_attention_heads": 4,
            "image_size": 28,
            "patch_size": 14,
        },
        tie_word_embeddings=tied,
    )
    factory: Any = AutoModelForImageTextToText
    model = randomised(factory.from_config(config))
    source = open_source(str(saved(model, tmp_path)))
    weights = bound(source)
    decoder = {f"model.{n}": t for n, t in model.model.language_model.state_dict().items()}
    assert_same(weights, decoder | {"lm_head.weight": model.get_output_embeddings().weight})
    assert f"only its text part ({text})" in source.notes[0]
    assert source.config is not None
    assert source.config.model_type == text


# Damage and refusals -------------------------------------------------------------------------


def test_missing_and_unexpected_names_are_listed(tmp_path: Path) -> None:
    saved(tiny(tie_word_embeddings=False), tmp_path)

    def misspell(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.layers.0.self_attn.q_prj.weight"] = tensors.pop(
            "model.layers.0.self_attn.q_proj.weight"
        )
        return tensors

    text = refusal(UsageError, rewritten(tmp_path, misspell))
    assert "1 parameters of the model are not in the checkpoint" in text
    assert "missing: model.layers.0.self_attn.q_proj.weight" in text
    assert "without a place: model.layers.0.self_attn.q_prj.weight" in text


def test_an_extra_tensor_is_said_and_a_wrong_shape_refused(tmp_path: Path) -> None:
    saved(tiny(tie_word_embeddings=False), tmp_path)
    source = open_source(str(rewritten(tmp_path, lambda t: t | {"extra.weight": torch.ones(1)})))
    bound(source)
    assert "extra.weight" in source.notes[0]
    rewritten(tmp_path, with_head(lambda embedding: embedding[:-1]))
    text = refusal(UsageError, tmp_path)
    assert "lm_head.weight has shape [96, 64] in the checkpoint, [97, 64] in the model" in text


@pytest.mark.skipif(not TRANSFORMERS_5, reason="4.57 takes a name without prefix for needless")
def test_a_tensor_given_twice_is_refused(tmp_path: Path) -> None:
    saved(tiny(), tmp_path)
    rewritten(tmp_path, lambda t: t | {"norm.weight": t["model.norm.weight"]})
    assert "fills model.norm.weight twice" in refusal(UsageError, tmp_path)


def damaged_header(data: bytes) -> bytes:
    return data[:8] + b"{" * 40 + data[48:]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:20],
        lambda data: b"",
        lambda data: b"\xff" * 8 + data[8:],
        damaged_header,
        lambda data: data.replace(b'"F32"', b'"F16"', 1),
        lambda data: data.replace(b'"shape"', b'"shipe"', 1),
    ],
    ids=["truncated", "header cut", "empty", "length", "garbage", "dtype", "key"],
)
def test_a_damaged_safetensors_file_is_named(
    damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    file = saved(tiny(), tmp_path) / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    assert f"{file}: damaged safetensors file" in refusal(UsageError, tmp_path)


def test_a_missing_shard_and_a_folder_without_model_are_named(tmp_path: Path) -> None:
    saved(tiny(), tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"{shard}: a shard of the checkpoint is missing" in refusal(UsageError, tmp_path)
    for file in tmp_path.glob("model*"):
        file.unlink()
    assert "holds no weights" in refusal(UsageError, tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "not valid JSON" in refusal(UsageError, tmp_path)
    (tmp_path / "config.json").unlink()
    assert "no config.json" in refusal(UsageError, tmp_path)


def test_a_file_that_may_not_be_read_is_code_6(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("qopt.sources.read_json", refuse)
    text = refusal(ResourceError, saved(tiny(), tmp_path))
    assert "config.json: cannot read the model" in text
    assert "Permission denied" in text


def changed_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: n for key, n in config.items() if n is not None}))
    return folder


def test_remote_code_is_never_run(tmp_path: Path) -> None:
    """J02."""
    saved(tiny(), tmp_path)
    marker = tmp_path / "marker"
    (tmp_path / "theirs.py").write_text(f"open({str(marker)!r}, 'w')\n")
    auto_map = {"AutoConfig": "theirs.C", "AutoModelForCausalLM": "theirs.M"}
    changed_config(tmp_path, auto_map=auto_map, model_type="theirs")
    assert "needs remote code" in refusal(UnsupportedError, tmp_path)
    changed_config(tmp_path, model_type="llama")  # a type the library has: its own class
    bound(open_source(str(tmp_path)))
    assert not marker.exists()


def test_unknown_quantized_and_other_models_are_refused(tmp_path: Path) -> None:
    saved(tiny(), tmp_path)
    changed_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "quantized already (method gptq)" in refusal(UnsupportedError, tmp_path)
    changed_config(tmp_path, quantization_config=None, model_type="t5")
    assert "no causal language model" in refusal(UnsupportedError, tmp_path)
    changed_config(tmp_path, model_type="no-such-type")
    assert "does not know model type 'no-such-type'" in refusal(UnsupportedError, tmp_path)


def test_rotary_settings_of_transformers_5_are_never_ignored(tmp_path: Path) -> None:
    saved(tiny(), tmp_path)
    changed_config(
        tmp_path, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    if not TRANSFORMERS_5:
        assert "written by transformers 5" in refusal(UnsupportedError, tmp_path)
        return
    config = open_source(str(tmp_path)).config
    assert config is not None
    assert config.rope_parameters["rope_theta"] == 5e5


def as_bin(folder: Path, content: Any) -> Path:
    (folder / "model.safetensors").unlink(missing_ok=True)
    torch.save(content, folder / "pytorch_model.bin")
    return folder


def test_a_bin_of_tensors_is_read(tmp_path: Path) -> None:
    model = tiny(tie_word_embeddings=True)
    state = model.state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    strided = state | {name: state[name].T.contiguous().T}
    as_bin(saved(model, tmp_path), strided)
    source = open_source(str(tmp_path))
    assert_same(bound(source), state)
    assert source.tensors[name].rows(3, 5).shape == (2, 64)
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert_same(bound(open_source(str(tmp_path))), state)


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_that_wants_more_is_refused(legacy: bool, tmp_path: Path) -> None:
    """J03."""
    marker = tmp_path / "marker"
    content = {"model.norm.weight": Bomb(marker)}
    as_bin(saved(tiny(), tmp_path), content)
    if legacy:
        (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(content))
    assert "nothing in it was executed" in refusal(UnsupportedError, tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"garbage")
    with pytest.raises(QoptError):
        open_source(str(tmp_path))
    assert not marker.exists()


# Names that are no path ----------------------------------------------------------------------


def test_an_existing_path_comes_before_demo_and_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tiny(), Path("smollm2-135m"))
    source = open_source("smollm2-135m")
    assert source.identity == ""
    assert source.config is not None
    assert source.config.vocab_size == 97
    assert "--revision is for hub ids" in refusal(UsageError, "smollm2-135m", revision="main")


def test_a_hub_id_offline_is_code_6_and_others_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    text = refusal(ResourceError, "no-such-org/no-such-model")
    assert "cannot fetch no-such-org/no-such-model" in text
    for name in ("no-such-model", "./org/name", "a/b/c"):
        assert f"no such model: {name}" in refusal(UsageError, name)


def test_a_full_disk_is_no_missing_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, local_files_only: bool = False, **__: Any) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("not here")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    assert "no space left on the disk" in refusal(ResourceError, "no-such-org/no-such-model")


def test_a_snapshot_in_the_cache_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    repository = tmp_path / "hub" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    model = tiny()
    saved(model, repository / "snapshots" / "abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    source = open_source("org/name")
    assert source.identity == "org/name"
    assert_same(bound(source), model.state_dict())


# GGUF ----------------------------------------------------------------------------------------


def gguf_file(path: Path, model: Any) -> Path:
    """Write a Llama as llama.cpp would: its names, q and k permuted, some tensors quantized."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    letters = [chr(33 + i) for i in range(config.vocab_size - 6)]
    writer.add_token_list(["<unk>", "<s>", "</s>", "Ġ", "ab", "cd", *letters])
    writer.add_token_types([3, 3, 3] + [1] * (config.vocab_size - 3))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = tensor.numpy()
        for part, count in heads.items():
            if part in name:
                shape = (count, 2, data.shape[0] // count // 2, data.shape[1])
                data = data.reshape(shape).swapaxes(1, 2).reshape(data.shape)
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None
        kind = gguf.GGMLQuantizationType.Q8_0 if "mlp" in name else None
        if "self_attn" in name:
            kind = gguf.GGMLQuantizationType.Q4_1
        if kind is not None:
            data = gguf.quants.quantize(data, kind)
        writer.add_tensor(stored, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_gives_what_transformers_loads(tied: bool, tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "tiny.gguf", tiny(tie_word_embeddings=tied))
    source = open_source(str(path))
    weights = bound(source)
    reference = AUTO.from_pretrained(tmp_path, gguf_file=path.name)
    assert_same(weights, reference.state_dict())
    down = weights["model.layers.1.mlp.down_proj.weight"]
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(down.rows(5, 9), reference.state_dict()[name][5:9])
    assert source.dtype == torch.float32
    assert source.config is not None
    assert source.config.tie_word_embeddings is tied


@pytest.mark.parametrize("most", [10, 2000])  # bytes of a file: the config, the tokenizer
def test_a_gguf_on_a_full_disk_leaves_nothing(cache: Path, most: int, tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "tiny.gguf", tiny())
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limit[1]))
    try:
        text = refusal(ResourceError, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "no space left on the disk" in text
    assert not cache.exists()


def test_a_gguf_s_tokenizer_and_config_lie_in_the_cache(cache: Path, tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "tiny.gguf", tiny())
    folder = open_source(str(path)).folder
    assert folder is not None
    assert folder.is_relative_to(cache)
    names = {"tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"}
    assert names <= {file.name for file in folder.iterdir()}
    written = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert open_source(str(path)).folder == folder
    assert written == {file: file.stat().st_mtime_ns for file in folder.iterdir()}


@pytest.mark.parametrize("keep", [0, 3, 100, 2000, -1])
def test_a_damaged_gguf_is_named(keep: int, tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "tiny.gguf", tiny())
    path.write_bytes(path.read_bytes()[:keep])
    assert f"{path}: damaged GGUF file" in refusal(UsageError, path)


# Code ----------------------------------------------------------------------------------------


def test_a_function_gives_a_module_with_arguments(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "import beside\n"
        "def mlp():\n"
        "    return torch.nn.Linear(4, 2), (torch.randn(3, 4),)\n"
        "def dynamic():\n"
        "    return torch.nn.Linear(4, 2), (torch.randn(3, 4),), ({0: 'batch'},)\n"
        "def wrong():\n"
        "    return 3\n"
        "def broken():\n"
        "    raise ValueError('no such file')\n"
    )
    (tmp_path / "beside.py").write_text("")
    source = open_source(f"{file}:mlp")
    assert source.kind == "module"
    assert source.module is not None
    assert not source.module.training
    assert source.args[0].shape == (3, 4)
    assert_same(bind_weights(source.module, source), source.module.state_dict())
    source.close()
    assert source.module.training
    assert open_source(f"{file}:mlp", weights=False).tensors["weight"].absent
    assert open_source(f"{file}:dynamic").dynamic_shapes == ({0: "batch"},)
    assert "returned int" in refusal(UsageError, f"{file}:wrong")
    assert "ValueError: no such file" in refusal(UsageError, f"{file}:broken")
    assert "no function absent" in refusal(UsageError, f"{file}:absent")
    assert "name the function" in refusal(UsageError, file)


def test_a_transformers_decoder_in_memory_is_a_decoder() -> None:
    model = tiny(tie_word_embeddings=True)
    source = open_module(model)
    assert source.kind == "decoder"
    weights = bound(source)
    assert_same(weights, model.state_dict())
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]


# Programs ------------------------------------------------------------------------------------


class Everything(nn.Module):
    """Shared, strided, persistent, lifted and plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)
        self.b.weight = self.a.weight
        self.strided = nn.Parameter(torch.randn(4, 8).t())
        self.register_buffer("kept", torch.randn(4))
        self.register_buffer("computed", torch.randn(4), persistent=False)
        self.plain = torch.randn(4)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x) + self.b(x) * x.shape[0] + x @ self.strided
        return y[: x.shape[0] // 2 * 2] + self.kept + self.computed + self.plain


def program(path: Path) -> tuple[torch.export.ExportedProgram, Path]:
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    exported = torch.export.export(Everything(), (torch.randn(4, 8),), dynamic_shapes=shapes)
    torch.export.save(exported, path)
    return exported, path


def changed_member(path: Path, name: str, change: Callable[[bytes], bytes]) -> Path:
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    changed = {n: change(data) if n.endswith(name) else data for n, data in members.items()}
    assert changed != members
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in changed.items():
            archive.writestr(member, data)
    return path


def test_a_pt2_program_computes_the_same(tmp_path: Path) -> None:
    exported, path = program(tmp_path / "m.pt2")
    changed_member(path, "sample_inputs/model.pt", lambda data: b"never opened")
    source = open_source(str(path))
    assert source.kind == "program"
    assert source.program is not None
    assert_same(source.tensors, {**exported.state_dict, **exported.constants})
    assert source.tensors["a.weight"] is source.tensors["b.weight"]
    x = torch.randn(7, 8)
    specs = source.program.graph_signature.input_specs
    values = [source.tensors[s.target].evaluate() if s.target else x for s in specs]
    assert torch.equal(source.program.graph_module(*values)[0], exported.module()(x))


def test_a_pt2_with_pickles_or_code_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    _, path = program(tmp_path / "weights.pt2")
    changed_member(
        path,
        "weights_config.json",
        lambda d: d.replace(b'"use_pickle": false', b'"use_pickle": true'),
    )
    assert "stored as a pickle" in refusal(UnsupportedError, path)
    attack = f"__import__('os').system('touch {marker}')"
    for expression in (attack, f'Max("{attack}")', "Symbol('s77').__class__", "open('/x')"):
        _, path = program(tmp_path / "expression.pt2")
        changed_member(path, "models/model.json", partial(in_graph, expression))
        assert "shape expression is not known" in refusal(UnsupportedError, path)
    _, path = program(tmp_path / "target.pt2")
    changed_member(
        path,
        "models/model.json",
        lambda d: d.replace(b"torch.ops.aten.linear.default", b"os.system"),
    )
    assert "the program calls os.system" in refusal(UnsupportedError, path)
    assert not marker.exists()


def replacing(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data.replace(old, new)


def in_graph(expression: str, data: bytes) -> bytes:
    """Put `expression` in place of every symbolic size."""

    def walk(tree: Any) -> Any:
        if isinstance(tree, list):
            return [walk(item) for item in tree]
        if isinstance(tree, dict):
            return {k: expression if k == "expr_str" else walk(v) for k, v in tree.items()}
        return tree

    return json.dumps(walk(json.loads(data))).encode()


def test_guards_in_a_pt2_are_dropped(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    _, path = program(tmp_path / "m.pt2")
    code = f"open({str(marker)!r}, 'w')"
    changed_member(
        path,
        "models/model.json",
        lambda d: json.dumps(json.loads(d) | {"guards_code": [code]}).encode(),
    )
    source = open_source(str(path))
    assert source.program is not None
    source.program.module()
    assert not marker.exists()


def test_a_damaged_pt2_is_named(tmp_path: Path) -> None:
    _, path = program(tmp_path / "m.pt2")
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    assert "damaged .pt2 file" in refusal(UsageError, path)
    path.write_bytes(data)
    changed_member(path, "weights/weight_0", lambda d: d[:8])
    assert "the file is damaged" in refusal(UsageError, path)


# Adapters ------------------------------------------------------------------------------------


LAYER = "model.layers.0.self_attn.q_proj"


def lora(folder: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> Path:
    generator = torch.Generator().manual_seed(1)
    if tensors is None:
        tensors = {
            f"{LAYER}.lora_A.weight": torch.randn(4, 64, generator=generator),
            f"{LAYER}.lora_B.weight": torch.randn(64, 4, generator=generator),
        }
    folder.mkdir(exist_ok=True)
    stored = {f"base_model.model.{name}": t.contiguous() for name, t in tensors.items()}
    save_file(stored, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 6} | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 6 / 4),
        ({"use_rslora": True}, 6 / 2),
        ({"alpha_pattern": {"q_proj": 10}}, 10 / 4),
        ({"alpha_pattern": {"k_proj": 10}}, 6 / 4),
        ({"r": 8, "rank_pattern": {"q_proj": 4}}, 6 / 4),
    ],
)
def test_an_adapter_is_merged(config: dict[str, Any], scale: float, tmp_path: Path) -> None:
    model = tiny()
    saved(model, tmp_path / "base")
    folder = lora(tmp_path / "lora", **config)
    source = open_source(str(tmp_path / "base"), adapter=folder)
    weights = bound(source)
    factors = load_file(folder / "adapter_model.safetensors")
    a, b = (factors[f"base_model.model.{LAYER}.lora_{x}.weight"] for x in "AB")
    expected = model.state_dict()[f"{LAYER}.weight"] + scale * (b @ a)
    torch.testing.assert_close(weights.pop(f"{LAYER}.weight").evaluate(), expected)
    rest = {name: t for name, t in model.state_dict().items() if name != f"{LAYER}.weight"}
    assert_same(weights, rest)
    assert source.digest != open_source(str(tmp_path / "base")).digest


def test_an_adapter_of_a_module_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def mlp():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(4, 2)), (torch.randn(3, 4),)\n"
    )
    a, b = torch.randn(4, 4), torch.randn(2, 4)
    adapter = lora(tmp_path / "lora", {"0.lora_A.weight": a, "0.lora_B.weight": b})
    source = open_source(f"{file}:mlp", adapter=adapter)
    assert source.module is not None
    expected = source.module.state_dict()["0.weight"] + 1.5 * (b @ a)
    torch.testing.assert_close(source.tensors["0.weight"].evaluate(), expected)


def test_fan_in_fan_out_embeddings_and_whole_modules(tmp_path: Path) -> None:
    model = tiny("gpt2", n_embd=64, n_layer=1, n_head=4, tie_word_embeddings=False)
    saved(model, tmp_path / "base")
    state = model.state_dict()
    layer = "transformer.h.0.attn.c_attn"
    tensors = {
        f"{layer}.lora_A.weight": torch.randn(4, 64),
        f"{layer}.lora_B.weight": torch.randn(192, 4),
        "transformer.wte.lora_embedding_A": torch.randn(4, 97),
        "transformer.wte.lora_embedding_B": torch.randn(64, 4),
        "lm_head.weight": torch.randn(97, 64),
    }
    adapter = lora(tmp_path / "lora", tensors, fan_in_fan_out=True, modules_to_save=["lm_head"])
    weights = bound(open_source(str(tmp_path / "base"), adapter=adapter))
    a, b, ea, eb, head = tensors.values()
    expected = {
        f"{layer}.weight": state[f"{layer}.weight"] + 1.5 * (b @ a).T,
        "transformer.wte.weight": state["transformer.wte.weight"] + 1.5 * (eb @ ea).T,
        "lm_head.weight": head,
    }
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name].evaluate(), tensor)


def test_adapters_that_cannot_be_merged_are_refused(tmp_path: Path) -> None:
    base, folder = saved(tiny(), tmp_path / "base"), tmp_path / "lora"
    for setting in ({"use_dora": True}, {"lora_bias": True}, {"peft_type": "IA3"}):
        lora(folder, **setting)
        assert next(iter(setting.values())) in (True, "IA3")
        assert "adapter" in refusal(UnsupportedError, base, adapter=folder)
    lora(folder, init_lora_weights="pissa")
    assert "changes the base weights" in refusal(UnsupportedError, base, adapter=folder)
    other = {"model.layers.7.x.lora_A.weight": torch.ones(4, 64)}
    lora(folder, other | {"model.layers.7.x.lora_B.weight": torch.ones(64, 4)})
    text = refusal(UsageError, base, adapter=folder)
    assert "changes model.layers.7.x.weight, which the model does not have" in text
    lora(folder, {f"{LAYER}.lora_A.weight": torch.ones(4, 64)})
    assert "only one factor" in refusal(UsageError, base, adapter=folder)
    wide = {f"{LAYER}.lora_A.weight": torch.ones(4, 32)}
    lora(folder, wide | {f"{LAYER}.lora_B.weight": torch.ones(64, 4)})
    assert "has shape [64, 32], the model's [64, 64]" in refusal(UsageError, base, adapter=folder)
    assert "no adapter here" in refusal(UsageError, base, adapter=tmp_path)
