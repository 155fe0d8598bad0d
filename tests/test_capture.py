"""Capture: each fact of a model is what its graph says, against eager transformers."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BertConfig, BertModel

from qopt.capture import capture
from qopt.compat import TRANSFORMERS_5
from qopt.errors import UnsupportedError, UsageError
from qopt.graph import ATTENTION, Graph
from qopt.sources import open_module, open_source

AUTO: Any = AutoModelForCausalLM
DYNAMIC = torch.export.Dim.DYNAMIC


def options(graph: Graph) -> list[dict[str, Any]]:
    """What each attention of a graph was called with, defaults left out."""
    return [dict(node.kwargs) for node in graph.find(ATTENTION)]


# What an attention is ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "overrides", "want"),
    [
        ("llama", {}, {"scale": 0.25}),
        ("llama", {"head_dim": 32}, {"scale": 32**-0.5}),  # B07
        ("mistral", {"sliding_window": 4}, {"scale": 0.25, "window": 4}),
        ("gemma2", {"query_pre_attn_scalar": 64}, {"scale": 0.125, "softcap": 50.0}),  # B12
        ("granite", {"attention_multiplier": 0.7}, {"scale": 0.7}),
        ("gpt2", {"scale_attn_weights": False}, {"scale": 1.0}),
    ],
    ids=str,
)
def test_attention(
    family: str, overrides: Any, want: Any, captured: Any, tiny: Any, worst: Any
) -> None:
    graph = captured(family, **overrides)
    for given in options(graph):
        assert {k: given.get(k) for k in want} == pytest.approx(want)
    assert worst(graph, tiny(family, **overrides)[1]) < 1e-5


def test_windows_of_each_layer(captured: Any, tiny: Any, worst: Any) -> None:
    """B08, B09: rows W - 1, W, W + 1, in prefill, chunks and decode."""
    for family in ("gemma3_text", "gpt_oss", "qwen2"):
        kinds = ["sliding_attention", "full_attention"]
        over: dict[str, Any] = {"layer_types": kinds}
        if family == "qwen2":
            over["use_sliding_window"] = True
        graph = captured(family, **over)
        assert [layer.window for layer in graph.info.layers] == [4, None], family
        assert [o.get("window") for o in options(graph)] == [4, None]
        for chunks in ((3, 1, 1, 1), (4, 4), (5, 1), (12, 1)):
            assert worst(graph, tiny(family, **over)[1], chunks) < 1e-5


def test_sinks(captured: Any, tiny: Any, worst: Any) -> None:
    graph, model = captured("gpt_oss"), tiny("gpt_oss")[1]
    for n, node in enumerate(graph.find(ATTENTION)):
        weight = graph.weight(node.args[4])
        assert weight is not None
        assert torch.equal(weight.evaluate(), model.model.layers[n].self_attn.sinks)
    assert worst(graph, model) < 1e-5


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen2", {}),  # biases of q, k and v
        ("qwen3", {}),  # norms of q and k
        ("phi", {"partial_rotary_factor": 0.5}),
        ("stablelm", {"partial_rotary_factor": 0.25}),
        ("gptj", {}),  # interleaved, partial
        ("glm", {"partial_rotary_factor": 0.5}),
        ("cohere", {"logit_scale": 0.3}),  # interleaved; scaled logits
        ("gemma2", {"final_logit_softcapping": 5.0}),  # B12: of the logits
        ("opt", {}),
        ("gpt_neox", {}),
        ("phi3", {}),
    ],
    ids=str,
)
def test_families(
    family: str, overrides: Any, captured: Any, tiny: Any, worst: Any, ragged: Any
) -> None:
    """A03, A04, A05, B06, B07: one graph for prefill, chunks and decode, positions by row."""
    graph, model = captured(family, **overrides), tiny(family, **overrides)[1]
    assert worst(graph, model) < 1e-5
    assert graph.info.ragged
    assert ragged(graph, model) < 1e-5


@pytest.mark.skipif(not TRANSFORMERS_5, reason="experts need transformers 5")
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"])
def test_experts_are_one_node_a_layer(family: str, captured: Any, tiny: Any, worst: Any) -> None:
    graph = captured(family)
    nodes = graph.find(torch.ops.qopt.experts.default)
    assert len(nodes) == 2
    gate = {"gpt_oss": ("swish", "interleaved")}.get(family, ("silu", "concatenated"))
    found = nodes[0].kwargs
    assert (found["activation"], found.get("layout", "concatenated")) == gate
    assert worst(graph, tiny(family)[1]) < 1e-5


# Rotation ------------------------------------------------------------------------------------

ROPE: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-attention-factor": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.0,
    },
    "yarn-mscale": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "dynamic": {"factor": 2.0},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
    },
}
SWITCH = 16


@pytest.fixture
def rope(tiny: Any, captured: Any) -> Any:
    """A tiny llama with a kind of scaled rotation: its graph and the model."""

    def make(name: str) -> tuple[Graph, Any]:
        kind = name.partition("-")[0]
        parameters = {"rope_type": kind, "rope_theta": 10000.0, **ROPE[name]}
        over: dict[str, Any] = {"max_position_embeddings": 64}
        if kind == "dynamic":
            over["max_position_embeddings"] = SWITCH
        over["rope_parameters" if TRANSFORMERS_5 else "rope_scaling"] = parameters
        return captured("llama", **over), tiny("llama", **over)[1]

    return make


@pytest.mark.parametrize("name", ROPE)
def test_rope_types_below_the_switch(name: str, rope: Any, worst: Any) -> None:
    """B05, B11: an explicit attention factor wins, and is applied once."""
    graph, model = rope(name)
    assert worst(graph, model, (7, 1, 3)) < 1e-5


@pytest.mark.parametrize("name", ["default", "linear", "yarn", "yarn-mscale", "llama3"])
def test_rope_types_at_large_positions(name: str, rope: Any, replay: Any) -> None:
    """B05: frequencies and positions stay in fp32 at position 50,000."""
    graph, model = rope(name)
    ids = torch.randint(3, 90, (2, 6))
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [49995, 49996, 49997, 49998, 49999, 50000]])
    feeds = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions}
    with torch.no_grad():
        want = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(graph.interpret(feeds)["logits"], want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_rope_past_the_switch(name: str, rope: Any, replay: Any) -> None:
    """The same sequence of calls: a prompt below the switch, steps across it; and a long prompt."""
    graph, model = rope(name)
    for chunks in ((14, 1, 1, 1, 1, 3), (30,), (20, 1)):
        ids = torch.randint(3, 90, (3, sum(chunks)), generator=torch.Generator().manual_seed(0))
        fresh = AUTO.from_config(model.config, attn_implementation="eager").eval()
        fresh.load_state_dict(model.state_dict())
        steps, done, cache = replay(graph), 0, None
        for new in chunks:
            part = ids[:, done : done + new]
            with torch.no_grad():
                out = fresh(input_ids=part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            torch.testing.assert_close(steps(part), out.logits, atol=1e-5, rtol=1e-4)
            done += new
    assert not graph.info.ragged  # the longest row of a batch decides for all


# Positions -----------------------------------------------------------------------------------


def uses_positions(graph: Graph) -> bool:
    return bool(next(n for n in graph.inputs if n.name == "position_ids").users)


def test_positions_are_passed_where_the_model_counts_as_we_do(captured: Any) -> None:
    for family in ("llama", "gpt2"):
        assert uses_positions(captured(family)), family
    assert uses_positions(captured("bert", is_decoder=True))


def test_a_model_that_counts_by_itself_keeps_doing_so(
    captured: Any, tiny: Any, worst: Any, ragged: Any
) -> None:
    """roberta counts from its padding index on: positions of ours would be two off."""
    graph, model = captured("roberta", is_decoder=True), tiny("roberta", is_decoder=True)[1]
    assert not uses_positions(graph)
    assert worst(graph, model) < 1e-5
    assert not graph.info.ragged
    assert ragged(graph, model) > 1e-3  # which is why


def test_learned_positions_go_by_row(captured: Any, tiny: Any, ragged: Any) -> None:
    """A03: GPT-2, rows of unequal length."""
    for family in ("gpt2", "opt", "biogpt"):
        assert ragged(captured(family), tiny(family)[1]) < 1e-5, family


# The second road -----------------------------------------------------------------------------

SECOND = {"bloom": True, "mpt": False, "xglm": True}


@pytest.mark.parametrize("family", SECOND)
def test_second_road(family: str, captured: Any, tiny: Any, worst: Any, ragged: Any) -> None:
    """The model's own attention, the cache in sight; `ragged` is claimed where it is true."""
    graph, model = captured(family), tiny(family)[1]
    assert not graph.find(ATTENTION)
    assert graph.outputs[:3] == ["logits", "present.0.key", "present.0.value"]
    assert graph.notes[0].startswith("attention stays as the model writes it")
    assert worst(graph, model) < 1e-5
    assert graph.info.ragged is SECOND[family]
    assert (ragged(graph, model) < 1e-5) is SECOND[family]


@pytest.mark.parametrize("family", ["falcon", "gptj"])
def test_the_road_follows_the_model(
    family: str, captured: Any, tiny: Any, worst: Any, ragged: Any
) -> None:
    """These ask for their attention by name since transformers 5.25; they are right either way."""
    graph, model = captured(family), tiny(family)[1]
    source = Path(inspect.getfile(type(model))).read_text()
    assert bool(graph.find(ATTENTION)) is ("ALL_ATTENTION_FUNCTIONS" in source)
    assert worst(graph, model) < 1e-5
    assert graph.info.ragged is (ragged(graph, model) < 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["codegen", "ctrl", "doge", "megatron-bert", "bart", "gpt_neox_japanese"]
)
def test_ragged_is_never_claimed_wrongly(
    family: str, captured: Any, tiny: Any, worst: Any, ragged: Any
) -> None:
    over = {"is_decoder": True} if family == "megatron-bert" else {}
    graph, model = captured(family, **over), tiny(family, **over)[1]
    assert worst(graph, model) < 1e-5
    assert graph.info.ragged is (ragged(graph, model) < 1e-5)


def test_a_failing_road_is_silent(
    tiny: Any, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny("bloom")[0]
    with caplog.at_level(logging.ERROR):
        capture(open_source(str(folder)), torch.float32)
    assert not caplog.records
    out, err = capfd.readouterr()
    assert "failed while" not in out + err
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled


# Shapes and errors ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_every_declared_dimension_is_symbolic(family: str, captured: Any) -> None:
    """A01."""
    graph = captured(family)
    for node in graph.inputs:
        shape = node.meta["val"].shape
        wanted = (0, 1) if len(shape) == 2 else (0, 2)
        assert all(isinstance(shape[dim], torch.SymInt) for dim in wanted), node.name
        assert node.meta["dynamic"] == wanted
    assert all(isinstance(dim, torch.SymInt) for dim in graph.results[0].meta["val"].shape[:2])


@pytest.mark.parametrize("chunks", [(6, 4), (1, 1, 1), (5, 1, 2)])
def test_sizes_that_were_not_traced(chunks: Any, captured: Any, tiny: Any, worst: Any) -> None:
    """A01, A05: batch, new and past of 0, 1 and more."""
    assert worst(captured("llama"), tiny("llama")[1], chunks) < 1e-5


def test_info(captured: Any) -> None:
    """F06: a list of ids that end a text stays a list; a pad id is one number."""
    info = captured("llama", eos_token_id=[2, 5], pad_token_id=None).info
    assert (info.kind, info.model_type, info.vocab_size) == ("decoder", "llama", 97)
    assert info.eos_token_ids == [2, 5]
    assert info.pad_token_id is None
    assert info.context_length == 64
    assert [(x.kv_heads, x.key_size, x.value_size) for x in info.layers] == [(2, 16, 16)] * 2


def test_no_weights(tiny: Any) -> None:
    graph = capture(open_source(str(tiny("llama")[0]), weights=False), torch.float32)
    graph.verify()
    with pytest.raises(UsageError, match="has no values"):
        graph.weights["lm_head.weight"].evaluate()


def test_a_model_without_a_cache_is_refused(tiny: Any) -> None:
    """The reason of each road is given."""
    folder = tiny("openai-gpt")[0]
    with pytest.raises(UnsupportedError) as raised:
        capture(open_source(str(folder)), torch.float32)
    assert raised.value.exit_code == 3
    assert "takes no KV cache" in str(raised.value)
    assert "second road" in str(raised.value)


# Any module ----------------------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("shift", torch.randn(4))
        self.register_buffer("hidden", torch.randn(4), persistent=False)
        self.constant = torch.randn(4)

    def forward(self, x: Tensor) -> Tensor:
        shift: Tensor = self.get_buffer("shift")
        hidden: Tensor = self.get_buffer("hidden")
        table = torch.tensor([1.0, 2, 3, 4])
        out: Tensor = self.two(self.one(x).relu()) + shift * hidden + self.constant + table
        return out


def of_module(
    module: nn.Module, args: Any, shapes: Any = None, dtype: torch.dtype = torch.float32
) -> Graph:
    graph = capture(open_module(module, args, shapes), dtype)
    graph.verify()
    return graph


def test_weights_buffers_and_constants() -> None:
    module = MLP()
    graph = of_module(module, (torch.randn(3, 8),))
    assert {"one.weight", "one.bias", "two.weight", "two.bias", "shift"} <= set(graph.weights)
    assert torch.equal(graph.weights["shift"].evaluate(), module.state_dict()["shift"])
    for rows in (1, 5):
        x = torch.randn(rows, 8)
        with torch.no_grad():
            torch.testing.assert_close(graph.interpret({"x": x})["output_0"], module(x))


def test_bert_encoder(run: Any) -> None:
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    model: Any = BertModel(config).eval()  # type: ignore[no-untyped-call]
    ids, mask = torch.randint(1, 50, (2, 5)), torch.ones(2, 5, dtype=torch.int64)
    token = {0: DYNAMIC, 1: DYNAMIC}
    graph = of_module(model, (ids, mask), {"input_ids": token, "attention_mask": token})
    assert graph.outputs == ["last_hidden_state", "pooler_output"]
    assert (graph.info.kind, graph.info.model_type) == ("module", "bert")
    run(
        graph,
        "canonicalize",
        "eliminate-common-subexpressions",
        "fuse-layer-norm",
        "fuse-add-rms-norm",
    )
    ids = torch.randint(1, 50, (3, 9))
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    with torch.no_grad():
        want = model(input_ids=ids, attention_mask=mask)
    got = graph.interpret({"input_ids": ids, "attention_mask": mask})
    torch.testing.assert_close(
        got["last_hidden_state"], want.last_hidden_state, atol=1e-5, rtol=1e-4
    )
    torch.testing.assert_close(got["pooler_output"], want.pooler_output, atol=1e-5, rtol=1e-4)


def test_a_convolution() -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten()
    ).eval()
    graph = of_module(module, (torch.randn(2, 3, 6, 6),))
    x = torch.randn(5, 3, 6, 6)
    with torch.no_grad():
        torch.testing.assert_close(next(iter(graph.interpret({"input": x}).values())), module(x))


class Outputs(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"sum": x.sum(-1), "parts": (x + 1, x * 2), "none": None}


def test_outputs_are_named(exported: Any) -> None:
    graph = of_module(Outputs(), (torch.randn(3, 8),))
    assert graph.outputs == ["sum", "parts.0", "parts.1"]
    x = torch.randn(4, 8)
    got = graph.interpret({"x": x})
    assert torch.equal(got["parts.1"], x * 2)


class KeepArgument(nn.Module):
    def forward(self, x: Tensor, keep: int | Tensor = 0) -> Tensor:
        return x[:, -keep:, :] if isinstance(keep, int) else x[:, keep]


def test_a_default_integer_is_a_constant() -> None:
    """A07: `logits_to_keep` becomes no input, and takes no dimension away."""
    graph = of_module(KeepArgument(), (torch.randn(2, 5, 3),))
    assert [n.name for n in graph.inputs] == ["x"]
    assert graph.interpret({"x": torch.randn(2, 5, 3)})["output_0"].shape == (2, 5, 3)


def test_a_function_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "my_model.py"
    path.write_text(
        "import torch\n"
        "def small():\n"
        "    torch.manual_seed(0)\n"
        "    return torch.nn.Linear(8, 4), (torch.randn(2, 8),)\n"
    )
    graph = capture(open_source(f"{path}:small"), torch.float32)
    torch.manual_seed(0)
    want, x = nn.Linear(8, 4), torch.randn(7, 8)
    with torch.no_grad():
        torch.testing.assert_close(graph.interpret({"input": x})["output_0"], want(x))


def test_a_program(tmp_path: Path) -> None:
    module, path = MLP(), tmp_path / "program.pt2"
    batch = torch.export.Dim("batch")
    program = torch.export.export(module, (torch.randn(3, 8),), dynamic_shapes=({0: batch},))
    torch.export.save(program, path)
    graph = capture(open_source(str(path)), torch.float32)
    graph.verify()
    x = torch.randn(6, 8)
    with torch.no_grad():
        torch.testing.assert_close(graph.interpret({"x": x})["output_0"], module(x))


def test_the_dtype_is_taken_and_the_module_left_alone() -> None:
    module = MLP()
    graph = of_module(module, (torch.randn(3, 8),), dtype=torch.float16)
    assert graph.weights["one.weight"].dtype == torch.float16
    assert graph.inputs[0].meta["val"].dtype == torch.float16
    assert module.one.weight.dtype == torch.float32
    x = torch.randn(3, 8)
    with torch.no_grad():
        got = graph.interpret({"x": x.half()})["output_0"].float()
        torch.testing.assert_close(got, module(x), atol=2e-2, rtol=2e-2)


def test_tied_matrices_share_a_weight() -> None:
    """C01."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Any:
            return self.head(self.embedding(ids))

    graph = of_module(Tied(), (torch.ones(2, 3, dtype=torch.int64),))
    assert len({id(w.source) for w in graph.weights.values()}) == 1


# What a module may not do --------------------------------------------------------------------


class TakesALength(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tensor([0.0] * int(x.shape[1]))


class ComparesALength(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.shape[1] == 6 else x - 1


@pytest.mark.parametrize("kind", [TakesALength, ComparesALength])
def test_a_dimension_that_becomes_a_number(kind: Any) -> None:
    """A02: the dimension, the number and the line are named."""
    with pytest.raises(UnsupportedError) as raised:
        of_module(kind(), (torch.randn(3, 6),), ({1: DYNAMIC},))
    text = str(raised.value)
    assert "dimension x.shape[1] is declared dynamic, but the model makes it the constant 6" in text
    assert "test_capture.py:" in text


def test_an_example_of_size_one() -> None:
    """A01: named, not frozen."""
    with pytest.raises(UnsupportedError, match="cannot be exported") as raised:
        of_module(ComparesALength(), (torch.randn(3, 1),), ({1: DYNAMIC},))
    assert "the example has size 1 at x.shape[1]: give it 2 or more" in str(raised.value)
    graph = of_module(nn.Linear(8, 4), (torch.randn(1, 8),))
    assert graph.notes == ["every dimension is fixed: the example gives no batch of 2 or more"]


def test_a_misspelt_input_of_dynamic_shapes() -> None:
    """A09: the names that there are, and the one that is not among them."""
    with pytest.raises(UsageError, match="wrong dynamic_shapes") as raised:
        of_module(ComparesALength(), (torch.randn(3, 5),), {"xs": {0: DYNAMIC}})
    assert "['x']" in str(raised.value)
    assert "['xs']" in str(raised.value)


class WritesAConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k = torch.zeros(1, 2, 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.k[:, :, : x.shape[2]] = x[:1]
        return self.k.sum() + x


class WritesABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        k: Tensor = self.get_buffer("k")
        k.add_(x.sum((0, 1, 2)))
        return k + x


class AssignsState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.k = self.k + x.sum((0, 1, 2))
        return self.k + x


class WritesItsInput(nn.Module):
    def forward(self, k: Tensor) -> Tensor:
        k.mul_(0.0)
        return k


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (WritesAConstant, "the model writes into its own state k"),
        (WritesABuffer, "the model writes into its own state k"),
        (AssignsState, "it assigns self.k in forward"),
        (WritesItsInput, "the model writes into its own input k"),
    ],
)
def test_state_is_refused_by_name(kind: Any, words: str) -> None:
    """A08, E04: what a second call would need to remember is never dropped without a word."""
    with pytest.raises(UnsupportedError) as raised:
        of_module(kind(), (torch.randn(2, 2, 3, 4),))
    assert words in str(raised.value)
    assert raised.value.exit_code == 3
