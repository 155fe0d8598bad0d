"""fuse-rms-norm: becomes, same numbers, idempotent, leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qopt.graph import Graph
from qopt.rewrite import PASSES


class Norm(nn.Module):
    """An RMSNorm as `form` writes it, its weight not all ones."""

    def __init__(self, form: Callable[[Tensor, Tensor, float], Tensor], eps: float = 1e-5) -> None:
        super().__init__()
        self.form, self.eps = form, eps
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, self.weight, self.eps)


def normed(x: Tensor, eps: float) -> Tensor:
    h = x.to(torch.float32)
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)


def llama(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * normed(x, eps).to(x.dtype)


def weight_behind(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return normed(x, eps).to(x.dtype) * weight


def gemma(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (normed(x, eps) * weight.float()).type_as(x)


def promoted(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (weight * normed(x, eps)).to(x.dtype)


def divided(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = x.float()
    return weight * (h / torch.sqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def eps_first(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = x.float()
    return weight * (h * torch.rsqrt(eps + (h * h).mean(dim=2, keepdim=True))).to(x.dtype)


def square(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = x.float()
    return weight * (h * torch.rsqrt(torch.square(h).mean(-1, keepdim=True) + eps)).to(x.dtype)


def no_weight(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return normed(x, eps).to(x.dtype)


def of_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (8,), weight, eps)


ROUND_FIRST = (llama, weight_behind, divided, eps_first, square)
ROUND_LAST = (gemma, promoted, of_torch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [*ROUND_FIRST, *ROUND_LAST, no_weight], ids=lambda f: f.__name__)
def test_fuses(form: Any, dtype: torch.dtype, exported: Any, run: Any, body: Any) -> None:
    """B02, E03: the place of the rounding and the epsilon are those of the graph."""
    module = Norm(form).to(dtype)
    x = torch.randn(3, 5, 8, dtype=dtype)
    graph = exported(module, x)
    run(graph, "canonicalize", "fuse-rms-norm")
    weight = "None" if form is no_weight else "weight"
    first = form in ROUND_FIRST or dtype == torch.float32
    cast = str(first) if form is not no_weight else str(dtype == torch.float32)
    assert body(graph) == (
        f"rms_norm_default = qopt.rms_norm(x, {weight}, 1e-05, {cast})\nreturn [rms_norm_default]"
    )
    with torch.no_grad():
        torch.testing.assert_close(graph.interpret({"x": x})["output_0"], module(x))
    assert PASSES["fuse-rms-norm"]().run(graph) == 0


def test_rounding_stays_where_the_model_has_it(exported: Any, run: Any) -> None:
    """B02: in bf16 Llama's form and Gemma's are far apart, and each is met exactly."""
    torch.manual_seed(0)
    x = torch.randn(1, 64, 8, dtype=torch.bfloat16) * 7
    got = []
    for form in (llama, gemma):
        module = Norm(form).to(torch.bfloat16)
        graph = exported(module, x)
        run(graph, "canonicalize", "fuse-rms-norm")
        got.append(graph.interpret({"x": x})["output_0"])
        with torch.no_grad():
            assert torch.equal(got[-1], module(x))
    assert not torch.equal(*got)


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 0.1, 1e-12])
def test_epsilon_is_the_graphs(eps: float, exported: Any, run: Any) -> None:
    """E03; B04: small in fp16 too, where a zero row must stay zero."""
    module = Norm(llama, eps).half()
    x = torch.zeros(2, 3, 8, dtype=torch.float16)
    x[0] = 1e-3
    graph = exported(module, x)
    run(graph, "canonicalize", "fuse-rms-norm")
    (node,) = [n for n in graph.nodes if "rms_norm" in n.name]
    assert node.args[2] == eps
    got = graph.interpret({"x": x})["output_0"]
    assert torch.equal(got[1], torch.zeros(3, 8, dtype=torch.float16))
    with torch.no_grad():
        torch.testing.assert_close(got, module(x))


def test_large_fp16_rows_do_not_overflow(exported: Any, run: Any) -> None:
    """B03: the mean of squares is taken in fp32."""
    module = Norm(llama).half()
    x = torch.full((2, 3, 8), 300.0, dtype=torch.float16)
    graph = exported(module, x)
    run(graph, "canonicalize", "fuse-rms-norm")
    want = module.weight.detach().expand(2, 3, 8)
    torch.testing.assert_close(graph.interpret({"x": x})["output_0"], want)


def test_wide_weight_under_low_precision(exported: Any, run: Any) -> None:
    """B01, E08: an fp32 weight over bf16 activations multiplies before the rounding."""

    class Wide(Norm):
        def forward(self, x: Tensor) -> Tensor:
            return (normed(x, self.eps) * (1.0 + self.weight.float())).to(x.dtype)

    module = Wide(llama).to(torch.bfloat16)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([15.8125, 2**-10] * 4))
    x = torch.randn(2, 3, 8, dtype=torch.bfloat16)
    graph = exported(module, x)
    run(graph, "canonicalize", "fold-constants", "fuse-rms-norm")
    (node,) = [n for n in graph.nodes if "rms_norm" in n.name]
    weight = graph.weight(node.args[1])
    assert weight is not None
    assert weight.dtype == torch.float32
    torch.testing.assert_close(weight.evaluate()[:2], torch.tensor([16.8125, 1.0009765625]))
    with torch.no_grad():
        assert torch.equal(graph.interpret({"x": x})["output_0"], module(x))


# Leaves --------------------------------------------------------------------------------------


class Leaves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 8))


class OtherAxis(Leaves):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-5))


class InnerValueUsed(Leaves):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * (x * scale), scale


class TwoOfEpsilon(Leaves):
    def forward(self, x: Tensor) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(torch.add(mean, 1e-5, alpha=2)))


class EpsilonIsATensor(Leaves):
    def __init__(self) -> None:
        super().__init__()
        self.eps = nn.Parameter(torch.tensor(1e-5))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class OtherPower(Leaves):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-5))


class TwoAxes(Leaves):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + 1e-5))


class WrittenTo(Leaves):
    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        part = h[..., :4]
        scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        part.mul_(3)
        return self.weight * (h * scale)


LEFT = {
    OtherAxis: "[-2] stands where the pattern has [-1]",
    InnerValueUsed: "rsqrt is also used by output",
    TwoOfEpsilon: "other options",
    EpsilonIsATensor: "eps is eps, no single number",
    OtherPower: "4 stands where the pattern has 2",
    TwoAxes: "[-2, -1] stands where the pattern has [-1]",
    WrittenTo: "again",
}


@pytest.mark.parametrize("kind", LEFT, ids=lambda k: k.__name__)
def test_leaves_and_explains(kind: Any, exported: Any, run: Any, body: Any) -> None:
    module, x = kind(), torch.randn(3, 5, 8)
    graph = exported(module, x)
    run(graph, "canonicalize")
    before = body(graph)
    fuse = PASSES["fuse-rms-norm"]()
    assert fuse.run(graph) == 0
    assert body(graph) == before
    (line,) = fuse.explain(graph)
    assert LEFT[kind] in line
    with torch.no_grad():
        want = module(x.clone())
    got = graph.interpret({"x": x})["output_0"]
    torch.testing.assert_close(got, want[0] if isinstance(want, tuple) else want)


def test_no_match_across_a_write(exported: Any) -> None:
    """E06: where the write still stands in the graph, that is the reason."""
    module, x = WrittenTo(), torch.randn(3, 5, 8)
    graph = exported(module, x)
    fuse = PASSES["fuse-rms-norm"]()
    assert fuse.run(graph) == 0
    (line,) = fuse.explain(graph)
    assert "is written to in place" in line
    with torch.no_grad():
        torch.testing.assert_close(graph.interpret({"x": x})["output_0"], module(x))


@pytest.mark.parametrize("size", [1, (5, 1), (2, 1, 1, 8)], ids=str)
def test_a_weight_that_broadcasts_is_left_outside(size: Any, exported: Any, run: Any) -> None:
    """E02: only a weight of one number a column is taken in."""

    class Broadcasts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(size))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * normed(x, 1e-5)

    module, x = Broadcasts(), torch.randn(3, 5, 8)
    graph = exported(module, x)
    run(graph, "canonicalize", "fuse-rms-norm")
    nodes = [n for n in graph.nodes if "rms_norm" in n.name]
    assert [n.args[1] for n in nodes] in ([], [None])
    with torch.no_grad():
        torch.testing.assert_close(graph.interpret({"x": x})["output_0"], module(x))


def test_a_dynamic_length_stays_dynamic(exported: Any, run: Any) -> None:
    graph = exported(Norm(llama), torch.randn(2, 8))
    run(graph, "canonicalize", "fuse-rms-norm")
    assert graph.find(torch.ops.qopt.rms_norm.default)
    x = torch.randn(9, 8)
    torch.testing.assert_close(
        graph.interpret({"x": x})["output_0"],
        (normed(x, 1e-5) * torch.linspace(0.5, 2.0, 8)),
    )
    assert isinstance(graph.results[0].meta["val"].shape[0], torch.SymInt)


def test_every_norm_of_a_model_is_taken(captured: Any, run: Any) -> None:
    for family, norms in {"llama": 5, "gemma2": 9, "qwen3": 9}.items():
        graph: Graph = captured(family)
        records = run(graph, "canonicalize", "fold-constants", "fuse-rms-norm")
        assert records[-1].rewrites == norms, family
        assert not PASSES["fuse-rms-norm"]().explain(graph)
