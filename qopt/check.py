"""What a check compares and how far apart it may be, and the check of the graph after each pass.

`GraphCheck` compares the graph with the captured one on two short probes; the artifact itself is
held against the model by `qopt.final_check`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qopt.errors import GateError
from qopt.report import CheckRow, Report
from qopt.runtime.cache import CACHE_POSITION

if TYPE_CHECKING:
    import torch

    from qopt.graph import Graph
    from qopt.rewrite import Pass, PassRecord

Array = NDArray[Any]

# The one table of limits: |difference| of logits, times max(1, largest logit / 10).
# bf16 keeps three bits less than fp16: its error is eight times as large, and rounding a logit
# between 32 and 64 costs 0.125, or a KL of 2.6e-3, by itself.
LIMITS = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1.6e-1}
MAX_KL = {"float16": 1e-3, "bfloat16": 4e-3}
LONGEST = 2048  # tokens of the longest probe; a window or switch beyond it is said and left out
SEED = 20240
REROUNDED = 4  # limits times this where both sides are rounded, each elsewhere
STATIC_SLOTS = 9  # of a cache of a fixed size, in the checks of the graph
PIECE = 8 << 20  # logits that are compared at a time


@dataclass
class Verification:
    """All probes of an artifact."""

    probes: list[CheckRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)  # how: what may differ from run to run

    @property
    def passed(self) -> bool:
        """Whether every probe passed."""
        return all(p.passed for p in self.probes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"passed": self.passed, **asdict(self)}

    def tables(self) -> list[Any]:
        """The probes, and what else there is to say."""
        return Report(checks=self.probes, notes=self.notes + self.ran).tables()


# Metrics -------------------------------------------------------------------------------------


def judge(
    probe: str, got: Sequence[Array], want: Sequence[Array], dtype: str, slack: float = 1
) -> CheckRow:
    """Compare rows of logits (tokens, vocabulary) with the reference's, within the table.

    `slack` multiplies the table's limits.
    """
    highest = max((float(max(w.max(), -w.min())) for w in want if w.size), default=0.0)
    limit = slack * LIMITS[dtype] * max(1.0, highest / 10)
    rows = [compare(g, w, 2 * limit) for g, w in zip(got, want, strict=True)]
    finite = all(bool(np.isfinite(a).all()) for a in (*got, *want))
    figures = {
        "max": max((row.max for row in rows), default=0.0) if finite else float("inf"),
        "mean": float(np.mean([r.mean for r, w in zip(rows, want, strict=True) if w.size] or [0])),
        "kl": float(np.mean([row.kl for row in rows])) if finite else 0.0,
        "top1_wrong": float(sum(row.turned for row in rows)),
    }
    limits = {"max": limit, "top1_wrong": 0.0}
    if dtype in MAX_KL:
        limits["kl"] = slack * MAX_KL[dtype]
    passed = finite and all(figures[name] <= most for name, most in limits.items())
    return CheckRow(probe, figures, limits, passed)


@dataclass
class Difference:
    """How far one row of logits is from the reference's; `kl` is in nats a token."""

    max: float = 0.0
    mean: float = 0.0
    kl: float = 0.0
    turned: int = 0


def compare(got: Array, want: Array, margin: float) -> Difference:
    """Compare one row, some tokens at a time: fp64 copies of a long row may not fit in memory."""
    found = Difference()
    if not want.size:
        return found
    got, want = (a.reshape(-1, a.shape[-1]) for a in (got, want))
    step = max(1, PIECE // want.shape[-1])
    for at in range(0, len(want), step):
        g, w = got[at : at + step], want[at : at + step]
        apart = np.abs(g.astype(np.float64) - w)
        share = len(w) / len(want)
        found.max = max(found.max, float(apart.max()))
        found.mean += float(apart.mean()) * share
        found.kl += divergence(g, w) * share
        found.turned += turned(g, w, margin)
    return found


def divergence(got: Array, want: Array) -> float:
    """Mean over tokens of KL(original || artifact), in nats."""
    if want.shape[-1] < 2 or not np.isfinite(got).all():
        return 0.0
    p, q = log_softmax(want), log_softmax(got)
    return float(np.maximum((np.exp(p) * (p - q)).sum(-1), 0).mean())


def log_softmax(x: Array) -> Array:
    """Log of the softmax over the last dimension, in fp64."""
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))  # type: ignore[no-any-return]


def turned(got: Array, want: Array, margin: float) -> int:
    """Tokens whose best choice differs although the reference's lead exceeds `margin`."""
    if want.shape[-1] < 2:
        return 0
    best = np.partition(want, -2, axis=-1)
    clear = best[..., -1] - best[..., -2] > margin
    return int((clear & (got.argmax(-1) != want.argmax(-1))).sum())


# After each pass -----------------------------------------------------------------------------


class GraphCheck:
    """Holds the captured graph's answers to two short probes, and compares later graphs with them.

    Weights that fit `memory` bytes are kept evaluated between the passes.
    """

    def __init__(self, graph: Graph, memory: int) -> None:
        from qopt.weights import WeightCache

        self.cache = WeightCache(memory)
        self.dtype = str(graph_dtype(graph)).removeprefix("torch.")
        self.want = self._answers(graph)

    def __call__(self, item: Pass, graph: Graph, record: PassRecord) -> CheckRow | None:
        """Compare after an exact pass that changed something; raise `GateError` on a difference.

        One that moves roundings has its own against it and the reference's: a wide limit, and what
        it leaves is what later passes are held to. The artifact is held against the fp32 model.
        """
        if not item.exact or not record.rewrites:
            return None
        answers = self._answers(graph)
        slack = REROUNDED if item.rerounds else 1
        outcome = judge(f"after {item.name}", answers, self.want, self.dtype, slack)
        if not outcome.passed:
            raise GateError(
                f"pass {item.name} changes what the model computes",
                where=f"probe {outcome.probe}",
                why=f"largest difference {outcome.figures['max']:.2e}, "
                f"limit {outcome.limits['max']:.2e}",
                todo=f"leave it out with --skip {item.name}, or look with --dump DIR",
            )
        if item.rerounds:
            self.want = answers
        return outcome

    def _answers(self, graph: Graph) -> list[Array]:
        import torch

        if graph.info.kind != "decoder":
            inputs = example_inputs(graph)
            out = graph.interpret(inputs, load=self.cache.get)
            return [
                flat_rows(t.float().numpy()) for t in out.values() if isinstance(t, torch.Tensor)
            ]
        generator = torch.Generator().manual_seed(SEED)
        high = graph.info.vocab_size or 64
        ids = torch.randint(0, high, (2, 6), generator=generator)
        past: dict[str, Any] = {}
        implied: dict[int, Any] = {}
        rows = []
        for start, stop in ((0, 5), (5, 6)):
            feeds = decoder_feeds(graph, ids[:, start:stop], start, past)
            out = graph.interpret(feeds, implied, load=self.cache.get)
            past |= {past_name(name): t for name, t in out.items() if name.startswith("present")}
            rows += [row.float().numpy() for row in out["logits"]]
        return rows


def flat_rows(array: Array) -> Array:
    """An output as rows."""
    return array.reshape(-1, array.shape[-1]) if array.ndim else array.reshape(1, 1)


def graph_dtype(graph: Graph) -> torch.dtype:
    """The floating type of the graph's first result."""
    import torch

    for node in graph.results:
        held = node.meta["val"]
        if isinstance(held, torch.Tensor) and held.is_floating_point():
            return held.dtype
    return torch.float32


def decoder_feeds(graph: Graph, ids: Any, start: int, past: dict[str, Any]) -> dict[str, Any]:
    """Inputs of one call, by node name; an empty cache where there is none yet.

    Buffers that the graph writes in place stay in `past`.
    """
    import torch

    rows, new = ids.shape
    static = any(node.name == CACHE_POSITION for node in graph.inputs)
    total = start + new
    slots = STATIC_SLOTS if static else total
    feeds: dict[str, Any] = {}
    for node in graph.inputs:
        name = node.meta.get("input", node.name)
        if name == "input_ids":
            feeds[node.name] = ids
        elif name == "attention_mask":
            feeds[node.name] = (torch.arange(slots) < total).long().repeat(rows, 1)
        elif name == CACHE_POSITION:
            feeds[node.name] = torch.tensor([start])
        elif name == "position_ids":
            feeds[node.name] = torch.arange(start, start + new)[None].repeat(rows, 1)
        elif name == "num_logits_to_keep":
            feeds[node.name] = torch.zeros(1, dtype=torch.int64)
        elif name in past:
            feeds[node.name] = past[name]
        else:
            held = node.meta["val"]
            dynamic = slots if static and name.startswith("past_key_values") else 0
            sizes = [d if isinstance(d, int) else dynamic for d in held.shape[1:]]
            feeds[node.name] = torch.zeros((rows, *sizes), dtype=held.dtype)
            if dynamic:
                past[name] = feeds[node.name]
    return feeds


def past_name(present: str) -> str:
    """The input that an output becomes in the next call."""
    if present.startswith("present_state."):
        return present.replace("present", "past", 1)
    return present.replace("present", "past_key_values", 1)


def example_inputs(graph: Graph, batch: int = 3) -> dict[str, Any]:
    """Random inputs for a module, every symbolic dimension of size `batch`."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    feeds: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for node in graph.inputs:
        held = node.meta["val"]
        shape = []
        for dim in held.shape:
            known = isinstance(dim, int)
            shape.append(dim if known else sizes.setdefault(str(dim), batch + 2 * len(sizes)))
        feeds[node.name] = random_input(node.name, shape, held.dtype, generator)
    return feeds


def random_input(name: str, shape: list[int], dtype: Any, generator: Any) -> Any:
    """A plausible random tensor: small integers, ones for masks, normal numbers."""
    import torch

    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    if "mask" in name or dtype == torch.bool:
        return torch.ones(shape, dtype=dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)
