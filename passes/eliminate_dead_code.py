"""Erase what nothing uses."""

from __future__ import annotations

from qopt import canonical
from qopt.graph import Graph
from qopt.rewrite import Pass


class EliminateDeadCode(Pass):
    """Erase calls whose results nobody uses.

    Before::

        a = aten.cos(x)
        b = aten.sin(x)
        return b

    After::

        b = aten.sin(x)
        return b

    Why: other passes leave behind what they replaced.
    Needs: nothing.
    Leaves: inputs (the signature stays what was declared), and calls that mutate or draw random
    numbers, which do more than compute a result.
    """

    name = "eliminate-dead-code"

    def run(self, graph: Graph) -> int:
        """Erase from the end to the start; returns the number of calls erased."""
        return canonical.eliminate_dead_code(graph)
