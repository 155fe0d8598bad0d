"""Give every computation one spelling."""

from __future__ import annotations

from qopt import canonical, functional
from qopt.complex_pairs import split_complex
from qopt.graph import Graph
from qopt.rewrite import Pass


class Canonicalize(Pass):
    """Write each computation in one way, so that later passes match meaning and not spelling.

    Before::

        a = aten.to.dtype(x, float32)          # x is float32 already
        b = aten.view(a, [2, -1])
        c = aten.addmm(bias, b, weight)

    After::

        b = aten.reshape(x, [2, -1])
        c = aten.linear(b, weight_transposed, bias)

    Why: exporters leave casts to the same type, whole slices, assertions and five ways to reshape;
    each of them stops a pattern from matching.
    Needs: nothing.
    Leaves: casts that change the dtype, views that something writes into, and every op that draws
    random numbers or mutates an input.
    """

    name = "canonicalize"

    def run(self, graph: Graph) -> int:
        """Apply the rules of `qopt.canonical`."""
        values = canonical.functionalize(graph) + functional.functionalize(graph)
        values += canonical.canonicalize(graph)
        pairs = split_complex(graph)
        return values + pairs + (canonical.canonicalize(graph) if pairs else 0)
