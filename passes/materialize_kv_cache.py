"""Give the implied KV cache a form: graph inputs and outputs."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import fx

from qopt.canonical import value
from qopt.errors import UnsupportedError
from qopt.graph import ATTENTION, CACHED_ATTENTION, Graph, describe
from qopt.ops import OPS
from qopt.rewrite import Pass, getitem
from qopt.runtime.cache import CACHE_POSITION

aten = torch.ops.aten
LAST_TOKENS = OPS["last_tokens"].target
STATIC_ATTENTION = OPS["static_attention"].target


def layer_of(attention: fx.Node) -> int:
    """The layer whose cache an attention reads."""
    layer: Any = attention.kwargs["layer"]
    return int(layer)


def places(attentions: list[fx.Node]) -> dict[int, int]:
    """The number of each layer's cache, counted without the layers that have none."""
    return {layer: i for i, layer in enumerate(sorted({layer_of(n) for n in attentions}))}


def options(attention: fx.Node) -> dict[str, Any]:
    """How an attention attends."""
    return {key: held for key, held in attention.kwargs.items() if key != "layer"}


class MaterializeKVCache(Pass):
    """Make past keys and values inputs, and present ones outputs, of every layer that owns a cache.

    Before::

        out = qopt.attention(q, k, v, mask, layer=3)

    After::

        out, present_key, present_value = qopt.cached_attention(q, k, v, past_key, past_value, mask)

    Why: how the cache is kept is a decision of the compiler, taken here and nowhere else.
    Needs: the implied form, as the first road of capture leaves it.
    Leaves: graphs whose cache is explicit already. The `contiguous` layout is (batch, heads,
    tokens, size); where the target writes in place, past and present may be one buffer. `static`,
    for TorchScript, takes buffers of any fixed size and a mask as long as they are, writes them in
    place from slot `cache_position` (int64 [1]) on, and has no present: a step has the shapes of
    the step before, as CUDA graphs want it. A layer that reads another's cache gets no input of its
    own.
    """

    name = "materialize-kv-cache"
    after = (
        "canonicalize",
        "fuse-rotary-embedding",
        "merge-qkv",
        "eliminate-common-subexpressions",
        "last-token-logits",
    )

    layout: Literal["contiguous", "static"] = "contiguous"

    def run(self, graph: Graph) -> int:
        """Rewrite every attention; returns how many."""
        attentions = graph.find(ATTENTION)
        if self.layout == "contiguous":
            self._contiguous(graph, attentions)
        elif attentions:
            self._static(graph, attentions)
        elif graph.info.kind == "decoder":
            graph.notes.append("the model's own code writes its cache: it is not made static")
        return len(attentions)

    def _contiguous(self, graph: Graph, attentions: list[fx.Node]) -> None:
        place = places(attentions)
        presents: dict[int, tuple[fx.Node, fx.Node]] = {}
        first = next(n for n in graph.nodes if n.op == "call_function")
        for node in attentions:
            index = place[layer_of(node)]
            q, k, v, mask, *rest = node.args
            if index in presents:
                arguments = [q, *presents[index], None, None, mask, *rest]
            else:
                past = self._inputs(graph, first, node, index)
                arguments = [q, k, v, *past, mask, *rest]
            with graph.before(node):
                new = graph.call(CACHED_ATTENTION, *arguments, **options(node))
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

    def _static(self, graph: Graph, attentions: list[fx.Node]) -> None:
        place = places(attentions)
        buffers: dict[int, list[fx.Node]] = {}
        first = next(n for n in graph.nodes if n.op == "call_function")
        with graph.before(first):
            length = graph.fx.placeholder(CACHE_POSITION)
        with graph.fake_mode:
            length.meta["val"] = torch.zeros(1, dtype=torch.int64)
        self._settle_mask(graph, attentions, length)
        for node in attentions:
            index = place[layer_of(node)]
            q, k, v, mask, *rest = node.args
            if index in buffers:
                k = v = None  # the layer that owns them has written already
            else:
                buffers[index] = self._inputs(graph, first, node, index)
            arguments = [q, k, v, *buffers[index], length, mask, *rest]
            with graph.before(node):
                new = graph.call(STATIC_ATTENTION, *arguments, **options(node))
            new.meta["stack_trace"] = node.meta.get("stack_trace")
            graph.replace(node, new)

    def _settle_mask(self, graph: Graph, attentions: list[fx.Node], length: fx.Node) -> None:
        """The new tokens are no longer the mask's last columns: who reads those reads others."""
        for mask in {node.args[3]: None for node in attentions}:
            assert isinstance(mask, fx.Node)
            for user in list(mask.users):
                if user.target is ATTENTION:
                    continue
                if user.target is not LAST_TOKENS:
                    raise UnsupportedError(
                        "the cache of this model cannot be static",
                        where=describe(user),
                        why="it reads a mask whose length is that of the tokens so far",
                        todo="leave out `layout: static`",
                    )
                with graph.before(user):
                    new = graph.call(aten.sym_size.int, user.args[0], 1)
                    columns = graph.call(aten.arange.default, new, device=value(mask).device)
                    slots = graph.call(aten.add.Tensor, columns, length)
                    rows = graph.call(aten.index_select.default, mask, 1, slots)
                user.replace_input_with(mask, rows)

    def _inputs(self, graph: Graph, first: fx.Node, node: fx.Node, index: int) -> list[fx.Node]:
        layer = graph.info.layers[index]
        key, mask = value(node.args[1]), value(node.args[3])
        static = self.layout == "static"
        slots = mask.shape[1] if static else mask.shape[1] - key.shape[2]
        made = []
        for name, size in (("key", layer.key_size), ("value", layer.value_size)):
            with graph.before(first):
                new = graph.fx.placeholder(f"past_{name}_{index}")
            with graph.fake_mode:
                new.meta["val"] = torch.empty(
                    (key.shape[0], layer.kv_heads, slots, size), dtype=key.dtype
                )
            new.meta["input"] = f"past_key_values.{index}.{name}"
            new.meta["dynamic"] = (0, 2)
            made.append(new)
        return made
