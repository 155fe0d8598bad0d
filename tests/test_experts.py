"""Experts in the op that onnxruntime has for them, where it fits; and why not, where it does not.

Expected values come from eager transformers, or from torch written out token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qopt.compat import TRANSFORMERS_5
from qopt.compile import compile
from qopt.emit.onnx import write_onnx
from qopt.emit.onnx_dialect import MoE
from qopt.lower import lower
from qopt.ops import OPS
from qopt.runtime.session import OnnxSession
from qopt.target import TARGETS
from qopt.weights import LazyWeight, MemorySource

EXPERTS, TOP, WIDTH, INNER = MoE.fewest + 1, 3, 24, 20
Exported = Callable[..., Any]
needs_experts = pytest.mark.skipif(not TRANSFORMERS_5, reason="experts need transformers 5")


# Models --------------------------------------------------------------------------------------

MANY = {"num_experts": EXPERTS, "num_local_experts": EXPERTS, "num_experts_per_tok": TOP}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"intermediate_size": 40}),
    "weights that do not add up to 1": (
        "qwen3_moe",
        {"moe_intermediate_size": 40, "norm_topk_prob": False},
    ),
    "one expert a token": ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}),
    "beside a shared expert": ("qwen2_moe", {}),
    "transposed, clamped, with biases": ("gpt_oss", {"intermediate_size": 40}),
    "sigmoid, groups and a factor": (
        "glm4_moe",
        {
            **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 20),
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 2.5,
        },
    ),
}
CALLS = [
    [[1]],
    [[11]],
    [[9] * 3, [1] * 3, [1] * 3],
    [[9, 6, 3], [4, 2, 3], [1, 1, 1]],
    [[60], [3], [1]],
]


@needs_experts
@pytest.mark.parametrize("case", MODELS)
def test_a_model_takes_the_op(case: str, tiny: Any, distance: Any, tmp_path: Path) -> None:
    family, overrides = MODELS[case]
    folder, model = tiny(family, **(MANY | {"initializer_range": 0.1} | overrides))
    result = compile(str(folder), "baseline", tmp_path / "out", check="off")
    (row,) = (row for row in result.report.lowering if row.op == "experts")
    assert (row.implementation, row.count, row.reasons) == ("MoE", 2, [])
    found = [distance(result.out, model, calls) for calls in CALLS]
    assert max(found) <= 1e-4, found


@needs_experts
def test_a_model_of_few_experts_keeps_the_loop(tiny: Any, tmp_path: Path) -> None:
    result = compile(str(tiny("mixtral")[0]), "baseline", tmp_path / "out", check="off")
    (row,) = (row for row in result.report.lowering if row.op == "experts")
    assert row.implementation == "a loop over the experts"
    assert row.reasons == ["MoE: the loop is faster with 4 experts (2x)"]


# Modules -------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """A layer whose router and gate are a test's own."""

    def __init__(
        self,
        route: Callable[[Tensor], tuple[Tensor, Tensor]],
        experts: int = EXPERTS,
        *,
        bias: bool = False,
        spread: float = 1.0,
        **gate: Any,
    ) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(0)
        wide = INNER if gate.get("layout") == "single" else 2 * INNER
        shapes = [(experts, wide, WIDTH), (experts, WIDTH, INNER)]
        up, down = (torch.randn(s, generator=make) * spread / s[-1] ** 0.5 for s in shapes)
        if gate.get("transposed"):
            up, down = (m.transpose(1, 2).contiguous() for m in (up, down))
        biases = [torch.randn(s[:2], generator=make) if bias else None for s in shapes]
        self.router = nn.Parameter(torch.randn(experts, WIDTH, generator=make))
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)
        self.up_bias, self.down_bias = (None if t is None else nn.Parameter(t) for t in biases)
        self.scale = nn.Parameter(torch.randn(experts, generator=make))
        self.route, self.gate = route, {"activation": "silu"} | gate

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(F.linear(x, self.router))
        stored = (self.up, self.up_bias, self.down, self.down_bias)
        found: Tensor = OPS["experts"].target(x, ids, weights, *stored, **self.gate)
        return found

    def token_by_token(self, x: Tensor) -> Tensor:
        ids, weights = self.route(F.linear(x, self.router))
        out = torch.zeros_like(x)
        for token, choice in torch.cartesian_prod(*(torch.arange(n) for n in ids.shape)):
            expert = ids[token, choice]
            up, down = self.up[expert], self.down[expert]
            if self.gate.get("transposed"):
                up, down = up.T, down.T
            inner = up @ x[token] + (0 if self.up_bias is None else self.up_bias[expert])
            interleaved = self.gate.get("layout") == "interleaved"
            gate, lift = (inner[0::2], inner[1::2]) if interleaved else inner.chunk(2)
            limit = self.gate.get("limit", torch.inf)
            gate, lift = gate.clamp(max=limit), lift.clamp(-limit, limit)
            alpha = self.gate["alpha"] if self.gate["activation"] == "swish" else 1.0
            acted = gate * torch.sigmoid(alpha * gate)
            inner = down @ (acted * (lift + self.gate.get("up_offset", 0.0)))
            inner = inner + (0 if self.down_bias is None else self.down_bias[expert])
            out[token] += weights[token, choice] * inner
        return out


def softmax_first(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = torch.topk(logits.softmax(-1), TOP)
    return ids, weights


def softmax_last(logits: Tensor) -> tuple[Tensor, Tensor]:
    best, ids = torch.topk(logits, TOP, dim=1)
    return ids, best.softmax(-1)


def biased_sigmoid(logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.sigmoid(logits)
    ids = torch.topk(scores + logits.cos(), TOP, sorted=False)[1]
    weights = scores.gather(1, ids)
    return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5


def often_zero(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Some weights of a token are 0, or all of them."""
    scores = torch.sigmoid(200 * logits - 200)
    ids = torch.topk(logits.cos(), TOP)[1]
    return ids, scores.gather(1, ids)


OAI: dict[str, Any] = {"activation": "swish", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
MIXTURES: dict[str, Callable[[], Mixture]] = {
    "softmax before the choice": lambda: Mixture(softmax_first),
    "softmax after the choice": lambda: Mixture(softmax_last, bias=True),
    "sigmoid, chosen with a bias": lambda: Mixture(biased_sigmoid, transposed=True),
    "zeros": lambda: Mixture(often_zero),
    "a gate past 7 is not clamped": lambda: Mixture(softmax_last, spread=9.0),
    "a clamped silu": lambda: Mixture(softmax_last, limit=0.5, alpha=1.702),
    "swish": lambda: Mixture(softmax_last, spread=4.0, bias=True, layout="interleaved", **OAI),
    "swish, transposed": lambda: Mixture(
        softmax_last, spread=4.0, bias=True, layout="interleaved", transposed=True, **OAI
    ),
    "swish, gate rows first": lambda: Mixture(
        softmax_last, spread=4.0, bias=True, transposed=True, **OAI
    ),
}


def export(exported: Exported, module: nn.Module) -> Any:
    return exported(module, torch.randn(5, WIDTH), shapes=({0: torch.export.Dim("tokens")},))


@pytest.mark.parametrize("case", MIXTURES)
def test_a_layer_takes_the_op(case: str, exported: Exported, tmp_path: Path) -> None:
    module = MIXTURES[case]()
    written = write_onnx(export(exported, module), tmp_path, TARGETS["onnx-cpu"])
    assert written.nodes["com.microsoft.MoE"] == 1
    session = OnnxSession(tmp_path / "model.onnx")
    ((name, _),) = session.inputs.items()
    for tokens in (1, 3, 70):
        x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))
        with torch.no_grad():
            want = module.token_by_token(x)
        (got,) = session.run({name: x.numpy()}).values()
        error = (torch.from_numpy(got) - want).abs().max() / want.abs().max().clamp(min=1)
        assert error <= 1e-5


def test_tokens_of_weight_zero_are_among_those(exported: Exported) -> None:
    x = torch.randn(70, WIDTH, generator=torch.Generator().manual_seed(70))
    weights = often_zero(F.linear(x, Mixture(often_zero).router))[1]
    zeros = (weights == 0).sum(-1)
    assert {0, 1, TOP} <= set(zeros.tolist())


def negative(logits: Tensor) -> tuple[Tensor, Tensor]:
    ids, weights = softmax_first(logits)
    return ids, weights * torch.tanh(logits.gather(1, ids))


def subtracted(logits: Tensor) -> tuple[Tensor, Tensor]:
    ids, weights = softmax_first(logits)
    return ids, weights - 0.5


def lowered(logits: Tensor) -> tuple[Tensor, Tensor]:
    ids, weights = softmax_first(logits)
    return ids, torch.add(weights, weights.sigmoid(), alpha=-1)


def hashed(logits: Tensor) -> tuple[Tensor, Tensor]:
    """An expert may be chosen twice."""
    weights = softmax_first(logits)[1]
    return (weights * 1000).long() % EXPERTS, weights


def among_the_first(logits: Tensor) -> tuple[Tensor, Tensor]:
    return softmax_first(logits[:, :5])


REFUSED: dict[str, tuple[Callable[[], Mixture], str]] = {
    "no gate": (lambda: Mixture(softmax_first, layout="single"), "the experts have no gate"),
    "gelu": (
        lambda: Mixture(softmax_first, activation="gelu"),
        "the gate is gelu, the op's is silu or swish",
    ),
    **{
        route.__name__: (
            lambda route=route: Mixture(route),  # type: ignore[misc]
            "the weights of the choices may be negative",
        )
        for route in (negative, subtracted, lowered)
    },
    **{
        route.__name__: (
            lambda route=route: Mixture(route),  # type: ignore[misc]
            "the choices are no top-k over the experts",
        )
        for route in (hashed, among_the_first)
    },
    "few": (
        lambda: Mixture(softmax_first, MoE.fewest - 1),
        f"the loop is faster with {MoE.fewest - 1} experts",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_says_why(case: str, exported: Exported) -> None:
    make, reason = REFUSED[case]
    (found,) = lower(export(exported, make()), TARGETS["onnx-cpu"], 25)
    assert found.implementation == "a loop over the experts"
    assert found.refusals == {f"MoE: {reason}": 1}


def test_half_precision_keeps_the_loop(exported: Exported) -> None:
    module, shapes = Mixture(softmax_first).half(), ({0: torch.export.Dim("tokens")},)
    graph = exported(module, torch.randn(5, WIDTH).half(), shapes=shapes)
    (found,) = lower(graph, TARGETS["onnx-cpu"], 25)
    assert found.refusals == {"MoE: it is measured in fp32 only": 1}


class OneByOne(MemorySource):
    def read(self, start: int, stop: int) -> Tensor:
        assert stop - start == 1
        return super().read(start, stop)


def test_rows_are_rearranged_one_expert_at_a_time(exported: Exported, tmp_path: Path) -> None:
    module = Mixture(softmax_last, transposed=True)
    graph = export(exported, module)
    for name in ("up", "down"):
        graph.weights[name] = LazyWeight.of(OneByOne(getattr(module, name).detach()))
    assert write_onnx(graph, tmp_path, TARGETS["onnx-cpu"]).nodes["com.microsoft.MoE"] == 1
