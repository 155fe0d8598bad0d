"""Whether an exported decoder holds at every size: the branches that its trace took, at others."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch.export import ExportedProgram

from qopt.export import DoesNotFit, fake_mode_of

BATCHES, NEWS, PASTS = (2, 5), (2, 7, 11, 300, 1031, 1999), (2, 13, 2048)


class FrozenSize(DoesNotFit):
    """A trace took a branch that only some sizes take."""


def check_guards(program: ExportedProgram, least: int = 2, most: int | None = None) -> None:
    """Raise `FrozenSize` where the trace took a branch that other sizes would not take.

    Sizes of 0 and 1 are left out: what is dynamic serves them too. So are fewer new tokens than
    `least`, and more than `most` in all.
    """
    shapes = fake_mode_of(program).shape_env
    symbols = input_symbols(program)
    if shapes is None or symbols is None:
        return
    for guard in shapes.guards:
        if degenerate(guard.expr) or not guard.expr.free_symbols <= set().union(*symbols):
            continue
        news = [new for new in NEWS if new >= least]
        for batch, new, past in product(BATCHES, news, PASTS):
            if most is not None and past + new > most:
                continue
            sizes = (batch, new, past, past + new)
            values = {s: size for group, size in zip(symbols, sizes, strict=True) for s in group}
            if guard.expr.subs(values) == False:  # noqa: E712, a sympy truth value
                raise FrozenSize(
                    f"its graph holds only where {guard.expr}, not for {new} tokens after {past}"
                )


def degenerate(expression: Any) -> bool:
    """Whether a guard only says that something is not 0 or not 1, which its graph serves too."""
    name, sides = type(expression).__name__, expression.args
    bounds = {"Unequality": (0, 1), "StrictGreaterThan": (1,), "StrictLessThan": (0,)}
    return any(sides[place] in (0, 1) for place in bounds.get(name, ()))


def input_symbols(program: ExportedProgram) -> tuple[set[Any], ...] | None:
    """The symbols of batch, new, past and all tokens among the program's inputs."""
    found: dict[str, set[Any]] = {name: set() for name in ("batch", "new", "past", "total")}
    for node in program.graph.nodes:
        if node.op != "placeholder" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        dims = {i: d for i, d in enumerate(node.meta["val"].shape) if isinstance(d, torch.SymInt)}
        second = "total" if node.name == "attention_mask" else "new"
        names = {0: "batch", 1: second, 2: "past"}
        for i, dim in dims.items():
            expr = dim.node.expr
            if i not in names or not expr.is_symbol:
                return None
            found[names[i]].add(expr)
    return tuple(found.values())
