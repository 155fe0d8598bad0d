"""Give the implied KV cache a form: graph inputs and outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from qopt.canonical import value
from qopt.graph import ATTENTION, CACHED_ATTENTION, Graph
from qopt.info import LayerInfo
from qopt.rewrite import Pass, getitem


def layer_of(attention: fx.Node) -> int:
    """The layer whose cache an attention reads."""
    layer: Any = attention.kwargs["layer"]
    return int(layer)


class MaterializeKVCache(Pass):
    """Make past keys and values inputs, and present ones outputs, of every layer that owns a cache.

    Before::

        out = qopt.attention(q, k, v, mask, layer=3)

    After::

        out, present_key, present_value = qopt.cached_attention(q, k, v, past_key, past_value, mask)

    Why: how the cache is kept is a decision of the compiler, taken here and nowhere else.
    Needs: the implied form, as the first road of capture leaves it.
    Leaves: graphs whose cache is explicit already. The layout is contiguous, (batch, heads, tokens,
    size); where the target writes in place, past and present may be one buffer. A layer that reads
    another's cache gets no input of its own.
    """

    name = "materialize-kv-cache"
    after = (
        "canonicalize",
        "fuse-rotary-embedding",
        "merge-qkv",
        "eliminate-common-subexpressions",
    )

    def run(self, graph: Graph) -> int:
        """Rewrite every attention; returns how many."""
        attentions = graph.find(ATTENTION)
        if not attentions:
            return 0
        layers = sorted({layer_of(n) for n in attentions})
        place = {layer: i for i, layer in enumerate(layers)}
        presents: dict[int, tuple[fx.Node, fx.Node]] = {}
        first = next(n for n in graph.nodes if n.op == "call_function")
        for node in attentions:
            index = place[layer_of(node)]
            options = {k: v for k, v in node.kwargs.items() if k != "layer"}
            q, k, v, mask, *rest = node.args
            if index in presents:
                arguments = [q, *presents[index], None, None, mask, *rest]
            else:
                past = self._inputs(graph, first, node, index, graph.info.layers[index])
                arguments = [q, k, v, *past, mask, *rest]
            with graph.before(node):
                new = graph.call(CACHED_ATTENTION, *arguments, **options)
                out = getitem(graph, new, 0)
                if index not in presents:
                    presents[index] = getitem(graph, new, 1), getitem(graph, new, 2)
            new.meta["stack_trace"] = node.meta.get("stack_trace")
            graph.replace(node, out)
        results = list(graph.results)
        for index in sorted(presents):
            results += presents[index]
            graph.outputs += [f"present.{index}.key", f"present.{index}.value"]
        graph.output.args = (results,)
        return len(attentions)

    def _inputs(
        self, graph: Graph, first: fx.Node, node: fx.Node, index: int, layer: LayerInfo
    ) -> list[fx.Node]:
        key, mask = value(node.args[1]), value(node.args[3])
        past = mask.shape[1] - key.shape[2]
        made = []
        for name, size in (("key", layer.key_size), ("value", layer.value_size)):
            with graph.before(first):
                new = graph.fx.placeholder(f"past_{name}_{index}")
            with graph.fake_mode:
                new.meta["val"] = torch.empty(
                    (key.shape[0], layer.kv_heads, past, size), dtype=key.dtype
                )
            new.meta["input"] = f"past_key_values.{index}.{name}"
            new.meta["dynamic"] = (0, 2)
            made.append(new)
        return made
