"""Whether a captured decoder may run rows of unequal length together: found by calculating.

Padding leaves holes in a row's cache. The integers of a graph (positions, masks, distances) are
computed for rows with holes and for the same requests alone. Where they meet what is not known here
(weights, activations), the two must agree on the real tokens, and the holes must be masked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from qopt.canonical import effect, targets_of_write
from qopt.graph import ATTENTION, Graph

ROWS, NEW = 5, 3  # rows of the batch; new tokens of each
HOLES, REAL = 4, 41  # holes in each row's past; real tokens, beyond the widest window
WIDEST = 1 << 13  # a window beyond this is taken as one that nobody reaches
MASKED = -1e4  # a score below this is a masked one


class Unknown:
    """Stands for a value that depends on weights or activations."""


UNKNOWN = Unknown()


@dataclass
class Integers:
    """What a graph computes from its ids, mask and positions, for one set of rows."""

    graph: Graph
    mask: Tensor
    env: dict[fx.Node, Any] = field(default_factory=dict)
    leaks: list[tuple[Any, Tensor]] = field(default_factory=list)  # known tensors that meet others

    def run(self) -> list[tuple[Any, Tensor]]:
        """Follow the integers through the graph."""
        total = self.mask.shape[1]
        inputs = {
            "input_ids": torch.arange(ROWS * NEW).view(ROWS, NEW) + 3,
            "attention_mask": self.mask,
            "position_ids": (self.mask.cumsum(1) - 1)[:, -NEW:],
        }
        sizes = {"input_ids": (ROWS, NEW), "attention_mask": (ROWS, total)}
        sizes["position_ids"] = (ROWS, NEW)
        self.symbols: dict[Any, int] = {}
        for node in self.graph.inputs:
            self.env[node] = inputs.get(node.name, UNKNOWN)
            past = (ROWS, None, total - NEW, None)
            for dim, size in zip(node.meta["val"].shape, sizes.get(node.name, past), strict=False):
                if isinstance(dim, torch.SymInt) and size is not None:
                    self.symbols.setdefault(dim.node.expr, size)
        for node in self.graph.nodes:
            if node.op == "get_attr":
                self.env[node] = self._weight(node)
            elif node.op == "call_function":
                self.env[node] = self._call(node)
        return self.leaks

    def _weight(self, node: fx.Node) -> Any:
        weight = self.graph.weights[str(node.target)]
        known = weight.source is not None and hasattr(weight.source, "tensor")
        return weight.evaluate() if known and not weight.dtype.is_floating_point else UNKNOWN

    def _call(self, node: fx.Node) -> Any:
        held = node.meta["val"]
        if isinstance(held, torch.SymInt | torch.SymFloat | torch.SymBool):
            number = held.node.expr.subs(self.symbols)
            return type(held.node.hint)(number) if held.node.hint is not None else int(number)
        given = [self.env[source] for source in node.all_input_nodes]
        if any(isinstance(value, Unknown) for value in given) or effect_of_chance(node):
            if node.target is not ATTENTION:  # it goes by the mask and by position
                self.leaks += [(node.target, v) for v in given if isinstance(v, Tensor)]
            for base in targets_of_write(node):
                self.env[base] = UNKNOWN
            return UNKNOWN
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.env.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def effect_of_chance(node: fx.Node) -> bool:
    """Whether a call draws random numbers."""
    return effect(node) and not targets_of_write(node)


def rows_are_independent(graph: Graph, config: Any) -> bool:
    """Whether a row with holes equals the same request alone; False where that is not shown."""
    real = REAL + widest_window(config)
    total = real + HOLES
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(ROWS, total, dtype=torch.int64)
    for row in range(ROWS):
        mask[row, torch.randperm(total - NEW - 1, generator=generator)[:HOLES] + 1] = 0
    alone = torch.ones(ROWS, real, dtype=torch.int64)
    try:
        with torch.no_grad():
            holes, plain = Integers(graph, mask).run(), Integers(graph, alone).run()
            if [target for target, _ in holes] != [target for target, _ in plain]:
                return False
            agree = all(
                same_on_real(a, b, mask) for (_, a), (_, b) in zip(holes, plain, strict=True)
            )
        implied = bool(graph.find(ATTENTION))
        return agree and (implied or any(masks_holes(leak, mask) for _, leak in holes))
    except Exception:  # what cannot be calculated is not shown
        return False


def widest_window(config: Any) -> int:
    """The widest window that a config speaks of."""
    found = [v for k, v in vars(config).items() if "window" in k and isinstance(v, int)]
    return max([v for v in found if v <= WIDEST], default=0)


def row_of(tensor: Tensor, row: int, *lengths: int) -> Tensor:
    """One row's part of a tensor whose first dimension may hold the batch, alone or times heads."""
    if not tensor.dim() or tensor.shape[0] % ROWS or tensor.shape[0] in lengths:
        return tensor
    share = tensor.shape[0] // ROWS
    return tensor[row * share : (row + 1) * share]


def same_on_real(holes: Tensor, plain: Tensor, mask: Tensor) -> bool:
    """Whether two tensors agree row by row, the holes of the first left out."""
    total, real = mask.shape[1], mask.shape[1] - HOLES
    for row in range(ROWS):
        a, b = row_of(holes, row, NEW, total), row_of(plain, row, NEW, real)
        columns = mask[row].nonzero().flatten()
        for dim in range(a.dim()):
            if a.shape[dim] == total:
                a = a.index_select(dim, columns)
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not (torch.allclose(a, b) if a.is_floating_point() else torch.equal(a, b)):
            return False
    return True


def masks_holes(leak: Tensor, mask: Tensor) -> bool:
    """Whether a tensor over the keys marks the holes, and no key that the last query sees."""
    total = mask.shape[1]
    if total not in leak.shape[-1:]:
        return False
    for row in range(ROWS):
        own = row_of(leak, row, NEW, total)
        if own.dim() > 1 and own.shape[-2] == NEW:
            own = own[..., -1:, :]
        own = own.reshape(-1, total)
        seen, hidden = own[:, mask[row].bool()], own[:, ~mask[row].bool()]
        if leak.dtype == torch.bool:
            marks = bool((hidden == hidden[0, 0]).all() and (seen != hidden[0, 0]).all())
        else:
            marks = bool((hidden <= MASKED).all() and (seen > MASKED).all())
        if not marks:
            return False
    return True
