"""Compute the angles of a rotation where queries and keys are turned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from qopt.canonical import value
from qopt.graph import ATTENTION, CACHED_ATTENTION, Graph, describe
from qopt.ops import OPS
from qopt.rewrite import Pass, getitem

aten = torch.ops.aten
ROTARY = OPS["rotary"].target


class FuseRopeQK(Pass):
    """Replace the rotations of q and k by tables of cos and sin with one op that takes positions.

    Before::

        angles = positions[:, :, None].float() * inv_freq
        q = qopt.rotary(q, angles.cos() * scaling, angles.sin() * scaling)
        k = qopt.rotary(k, angles.cos() * scaling, angles.sin() * scaling)

    After::

        q, k = qopt.rotary_from_positions(q, k, positions, inv_freq, scaling)

    Why: a kernel turns both in one launch, and no table is written or read.
    Needs: `fuse-rotary-embedding`.
    Leaves: tables that are no cos and sin of a position times one frequency a pair, and rotations
    of queries alone, as where a layer reads another one's keys.
    """

    name = "fuse-rope-qk"
    after = ("fuse-rotary-embedding", "merge-qkv")

    def run(self, graph: Graph) -> int:
        """Fuse at each attention; returns how many pairs were fused."""
        return sum(self._fuse(graph, node) for node in graph.find(ATTENTION, CACHED_ATTENTION))

    def explain(self, graph: Graph) -> list[str]:
        """Candidates are rotations that are left."""
        left = []
        for node in graph.find(ROTARY):
            why = "turned by other angles than the keys, or alone"
            if table_of(node) is None:
                why = "its tables are no cos and sin of positions times frequencies"
            left.append(f"{describe(node)}: {why}")
        return left

    def _fuse(self, graph: Graph, attention: fx.Node) -> int:
        q: Any = attention.args[0]
        k: Any = attention.args[1]
        if not (is_rotary(q) and is_rotary(k)) or q is k:
            return 0
        table, other = table_of(q), table_of(k)
        if table is None or table != other:
            return 0
        order = {node: i for i, node in enumerate(graph.fx.nodes)}
        first, last = sorted((q, k), key=order.__getitem__)
        if any(order[user] <= order[last] for user in first.users):
            return 0
        with graph.before(last):
            call = graph.call(
                OPS["rotary_from_positions"].target,
                q.args[0],
                k.args[0],
                table.positions,
                table.inv_freq,
                table.scaling,
                table.interleaved,
            )
            call.meta["stack_trace"] = q.meta.get("stack_trace")
            turned = getitem(graph, call, 0), getitem(graph, call, 1)
        for node, new in zip((q, k), turned, strict=True):
            graph.replace(node, new)
        return 1


@dataclass(frozen=True)
class Table:
    """What a rotation's cos and sin are made of."""

    positions: fx.Node  # int64 (B or 1, S)
    inv_freq: fx.Node  # float32 (R)
    scaling: float
    interleaved: bool


def is_rotary(node: Any) -> bool:
    """Whether a node turns by tables."""
    return isinstance(node, fx.Node) and node.target is ROTARY


def table_of(node: fx.Node) -> Table | None:
    """Positions and frequencies behind the tables of a rotation; None where they are others."""
    cos, sin = angles(node.args[1], aten.cos), angles(node.args[2], aten.sin)
    if cos is None or cos != sin:
        return None
    angle, scaling = cos
    interleaved = bool(node.args[3]) if len(node.args) > 3 else False
    found = factors(angle)
    return None if found is None else Table(*found, scaling, interleaved)


def angles(node: Any, op: Any) -> tuple[fx.Node, float] | None:
    """The argument of cos or sin, and the number that the result is multiplied by."""
    scaling = 1.0
    while isinstance(node, fx.Node) and node.target in (aten.to.dtype, aten.mul.Tensor):
        if node.target is aten.mul.Tensor:
            if not isinstance(node.args[1], int | float) or scaling != 1.0:
                return None
            scaling = float(node.args[1])
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target is not op.default:
        return None
    (angle,) = node.args
    return (angle, scaling) if isinstance(angle, fx.Node) else None


def factors(angle: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Positions (B or 1, S) and frequencies (R) whose product the angles are, in fp32."""
    if angle.target is not aten.mul.Tensor or value(angle).dtype != torch.float32:
        return None
    for wide, inv_freq in (angle.args, angle.args[::-1]):
        positions = columns(wide)
        if positions is not None and is_vector(inv_freq):
            return positions, inv_freq  # type: ignore[return-value]
    return None


def columns(node: Any) -> fx.Node | None:
    """Int64 positions (B or 1, S) that a node holds as fp32 (B or 1, S, 1)."""
    if not isinstance(node, fx.Node) or node.target is not aten.to.dtype:
        return None
    column = node.args[0]
    if not isinstance(column, fx.Node) or column.target is not aten.unsqueeze.default:
        return None
    positions, dim = column.args
    held = value(positions)
    is_plain = isinstance(held, Tensor) and held.dtype == torch.int64 and held.dim() == 2
    return positions if is_plain and dim in (2, -1) else None  # type: ignore[return-value]


def is_vector(node: Any) -> bool:
    """Whether a node is fp32 of one dimension."""
    if not isinstance(node, fx.Node):
        return False
    held = value(node)
    return isinstance(held, Tensor) and held.dtype == torch.float32 and held.dim() == 1
