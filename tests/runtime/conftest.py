"""A tiny decoder written node by node, in the two forms a compiler emits, and its numpy reference.

Two layers of unequal head size, learned positions (rotation would hide wrong ones).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from qopt.artifact import MANIFEST, FileInfo, Manifest, SourceInfo, TensorSpec, sha256_of
from qopt.info import LayerInfo, ModelInfo
from qopt.runtime.generate import Model, load

WIDTH, HEADS, HEAD_SIZES, CONTEXT = 32, 2, (16, 8), 96
EOS, SECOND_EOS, END_OF_TURN, PAD = 256, 257, 258, 259
VOCABULARY = 260  # one token a byte, and these four
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eot>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass
class Tiny:
    """A tiny artifact and what it must compute."""

    folder: Path
    weights: dict[str, np.ndarray[Any, Any]]

    def load(self, **options: Any) -> Model:
        return load(self.folder, **options)

    def reference(self, ids: list[int]) -> np.ndarray[Any, Any]:
        """Logits of every position of one sequence, in float64, without a cache."""
        w = {name: value.astype(np.float64) for name, value in self.weights.items()}
        h = w["embed"][ids] + w["positions"][: len(ids)]
        for layer, size in enumerate(HEAD_SIZES):
            q, k, v = (
                (h @ w[f"{n}{layer}"]).reshape(len(ids), HEADS, size).swapaxes(0, 1) for n in "qkv"
            )
            scores = q @ k.swapaxes(1, 2) / np.sqrt(size)
            scores[:, np.triu_indices(len(ids), 1)[0], np.triu_indices(len(ids), 1)[1]] = -np.inf
            p = np.exp(scores - scores.max(axis=-1, keepdims=True))
            mixed = (p / p.sum(axis=-1, keepdims=True)) @ v
            h = h + mixed.swapaxes(0, 1).reshape(len(ids), -1) @ w[f"o{layer}"]
        return np.asarray(h @ w["head"])

    def greedy(self, ids: list[int], new: int, eos: tuple[int, ...] = ()) -> list[int]:
        """Tokens that greedy decoding appends."""
        out: list[int] = []
        while len(out) < new and not (out and out[-1] in eos):
            out.append(int(self.reference(ids + out)[-1].argmax()))
        return out


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Tiny]:
    """Builds a tiny artifact: `tiny("standard")` or `tiny("gqa")`, with options of `_Graph`."""

    def build(form: str = "gqa", *, seed: int = 0, name: str = "tiny", **options: Any) -> Tiny:
        folder = tmp_path / f"{name}-{form}"
        folder.mkdir()
        weights = _weights(seed)
        info = options.pop("info", {})
        graph = _Graph(weights, form, **options)
        onnx.save(graph.model(), folder / "model.onnx")
        _write_tokenizer(folder)
        _write_manifest(folder, graph, info)
        return Tiny(folder, weights)

    return build


def _weights(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    shapes = {
        "embed": (VOCABULARY, WIDTH),
        "positions": (CONTEXT, WIDTH),
        "head": (WIDTH, VOCABULARY),
    }
    for layer, size in enumerate(HEAD_SIZES):
        shapes |= {f"{n}{layer}": (WIDTH, HEADS * size) for n in "qkv"}
        shapes[f"o{layer}"] = (HEADS * size, WIDTH)
    return {
        name: ((0.2 if name[-1].isdigit() else 0.4) * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


@dataclass
class _Graph:
    weights: dict[str, np.ndarray[Any, Any]]
    form: str  # standard: past and new are concatenated; gqa: written in place
    keep: bool = True  # has `num_logits_to_keep`
    dtype: str = "float32"
    nodes: list[Any] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)

    @property
    def float(self) -> int:
        """ONNX's number for the dtype."""
        return int(helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype)))

    def add(self, op: str, *inputs: str, out: str | None = None, **attributes: Any) -> str:
        """Append a node and name its output."""
        out = out or f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, [*inputs], [out], **attributes))
        return out

    def const(self, value: Any, dtype: Any = np.int64) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = numpy_helper.from_array(np.array(value, dtype), name)
        return name

    def model(self) -> onnx.ModelProto:
        self.one = self.const([1])
        self.columns = self.add("Gather", self.add("Shape", "input_ids"), self.one)  # [1]
        self.total = self.add("Gather", self.add("Shape", "attention_mask"), self.one)
        h = self.add(
            "Add",
            self.add("Gather", "embed", "input_ids"),
            self.add("Gather", "positions", "position_ids"),
        )
        for layer, size in enumerate(HEAD_SIZES):
            attend = self._standard if self.form == "standard" else self._gqa
            h = self.add("Add", h, self.add("MatMul", attend(h, layer, size), f"o{layer}"))
        if self.keep:
            h = self._last(h)
        self.add("MatMul", h, "head", out="logits")
        initializers = [
            numpy_helper.from_array(v.astype(self.dtype), k) for k, v in self.weights.items()
        ]
        if self.keep:
            initializers.append(numpy_helper.from_array(np.array([1]), "num_logits_to_keep"))
        graph = helper.make_graph(
            self.nodes,
            "tiny",
            self.inputs(),
            self.outputs(),
            initializers + list(self.constants.values()),
        )
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def inputs(self) -> list[Any]:
        ints = {
            "input_ids": ["batch_size", "sequence_length"],
            "attention_mask": ["batch_size", "total_sequence_length"],
            "position_ids": ["batch_size", "sequence_length"],
        }
        if self.keep:
            ints["num_logits_to_keep"] = [1]  # type: ignore[list-item]
        return [helper.make_tensor_value_info(n, TensorProto.INT64, s) for n, s in ints.items()] + [
            helper.make_tensor_value_info(
                f"past_key_values.{layer}.{kind}",
                self.float,
                ["batch_size", HEADS, "past_sequence_length", size],
            )
            for layer, size in enumerate(HEAD_SIZES)
            for kind in ("key", "value")
        ]

    def outputs(self) -> list[Any]:
        columns = 1 if self.keep else "sequence_length"
        logits = ["batch_size", columns, VOCABULARY]
        return [helper.make_tensor_value_info("logits", self.float, logits)] + [
            helper.make_tensor_value_info(
                f"present.{layer}.{kind}",
                self.float,
                ["batch_size", HEADS, "total_sequence_length", size],
            )
            for layer, size in enumerate(HEAD_SIZES)
            for kind in ("key", "value")
        ]

    def _standard(self, h: str, layer: int, size: int) -> str:
        split = self.const([0, 0, HEADS, size])
        q, k, v = (
            self.add(
                "Transpose",
                self.add("Reshape", self.add("MatMul", h, f"{n}{layer}"), split),
                perm=[0, 2, 1, 3],
            )
            for n in "qkv"
        )
        key = self.add(
            "Concat", f"past_key_values.{layer}.key", k, axis=2, out=f"present.{layer}.key"
        )
        value = self.add(
            "Concat", f"past_key_values.{layer}.value", v, axis=2, out=f"present.{layer}.value"
        )
        scale = self.const(size**-0.5, self.dtype)
        scores = self.add(
            "Mul", self.add("MatMul", q, self.add("Transpose", key, perm=[0, 1, 3, 2])), scale
        )
        start, step = self.const(0), self.const(1)
        slots = self.add("Range", start, self.add("Squeeze", self.total), step)
        mine = self.add("Slice", slots, self.add("Neg", self.columns), self.const([2**31]))
        causal = self.add("LessOrEqual", slots, self.add("Unsqueeze", mine, self.one))
        real = self.add("Cast", "attention_mask", to=TensorProto.BOOL)
        visible = self.add("And", causal, self.add("Unsqueeze", real, self.const([1, 2])))
        masked = self.add("Where", visible, scores, self.const(-6e4, self.dtype))
        mixed = self.add("MatMul", self.add("Softmax", masked, axis=-1), value)
        back = self.add("Transpose", mixed, perm=[0, 2, 1, 3])
        return self.add("Reshape", back, self.const([0, 0, HEADS * size]))

    def _gqa(self, h: str, layer: int, size: int) -> str:
        q, k, v = (self.add("MatMul", h, f"{n}{layer}") for n in "qkv")
        int32: Any = {"to": TensorProto.INT32}
        last = self.add(
            "Sub", self.add("ReduceSum", "attention_mask", self.one, keepdims=0), self.one
        )
        new = self.add("ReduceSum", self._new_mask(), self.one, keepdims=0)
        pasts = [f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"]
        sizes = [
            self.add("Cast", last, **int32),
            self.add("Cast", self.add("Squeeze", self.total), **int32),
        ]
        inputs = [q, k, v, *pasts, *sizes, *[""] * 9, self.add("Cast", new, **int32)]
        outputs = [f"attended{layer}", f"present.{layer}.key", f"present.{layer}.value"]
        self.nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                inputs,
                outputs,
                domain="com.microsoft",
                num_heads=HEADS,
                kv_num_heads=HEADS,
            )
        )
        return outputs[0]

    def _new_mask(self) -> str:
        end = self.const([2**31])
        return self.add("Slice", "attention_mask", self.add("Neg", self.columns), end, self.one)

    def _last(self, h: str) -> str:
        """Each row's own last n columns, all when n is 0."""
        n, one, zero = "num_logits_to_keep", self.one, self.const([0])
        lengths = self.add("ReduceSum", self._new_mask(), one)
        everything = self.add("Equal", n, zero)
        count = self.add("Where", everything, self.columns, n)
        end = self.add("Where", everything, self.columns, lengths)
        steps = self.add("Range", self.const(0), self.add("Squeeze", count), self.const(1))
        at = self.add("Max", self.add("Add", self.add("Sub", end, count), steps), zero)
        return self.add("GatherND", h, self.add("Unsqueeze", at, self.const([2])), batch_dims=1)


def _write_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<eos2>", "<eot>", "<pad>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<eos>", "pad_token": {"content": "<pad>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def _write_manifest(folder: Path, graph: _Graph, info: dict[str, Any]) -> None:
    facts: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "context_length": CONTEXT,
        "eos_token_ids": [EOS, SECOND_EOS],
        "pad_token_id": PAD,
    }
    layers = [LayerInfo(kv_heads=HEADS, key_size=s, value_size=s) for s in HEAD_SIZES]
    manifest = Manifest(
        target="onnx-cpu" if graph.form == "gqa" else "onnx",
        dtype=graph.dtype,
        source=SourceInfo(kind="folder"),
        model=ModelInfo(kind="decoder", layers=layers, **(facts | info)),
        inputs=[_tensor_spec(i) for i in graph.inputs() if i.name != "num_logits_to_keep"],
        outputs=[_tensor_spec(o) for o in graph.outputs()],
        shared_buffer=graph.form == "gqa",
        logits="last" if graph.keep else "all",
        files={
            path.name: FileInfo(size=path.stat().st_size, sha256=sha256_of(path))
            for path in sorted(folder.iterdir())
        },
    )
    (folder / MANIFEST).write_text(manifest.to_json())


def _tensor_spec(value: Any) -> TensorSpec:
    kind = value.type.tensor_type
    dtype = str(np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type)))
    dims = [d.dim_param or d.dim_value for d in kind.shape.dim]
    return TensorSpec(name=value.name, dtype=dtype, shape=dims)
