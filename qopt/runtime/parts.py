"""An ONNX decoder run in parts, so that no more of its weights than one part's are in memory.

The graph is cut between its layers and before the node that reads the last weight (the logits'
matrix). All calls of all sequences go through a part before the next one is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from qopt.errors import UsageError
from qopt.runtime.session import Array, Spec, cast, new_session, read_graph
from qopt.runtime.widened import widen

Calls = Sequence[Mapping[str, Array]]


@dataclass
class Part:
    """Some nodes that follow one another; `needed` is what later parts read."""

    nodes: list[Any]
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    needed: set[str] = field(default_factory=set)


class PartsSession:
    """Runs sequences of calls on an ONNX file, part by part, in onnxruntime.

    `states` names, for each input that carries a state, the output that it is in the next call.
    `wide`: run what is bf16 in fp32.
    """

    def __init__(
        self,
        path: Path,
        states: Mapping[str, str],
        threads: int | None = None,
        *,
        wide: bool = False,
    ) -> None:
        self.path, self.states, self.threads = path, dict(states), threads
        self.model = read_graph(path)
        if wide:
            widen(self.model)
        graph = self.model.graph
        self.inputs = {value.name: declared(value) for value in graph.input}
        self.weights = {t.name: t for t in graph.initializer if t.name not in self.inputs}
        self.results = [output.name for output in graph.output]
        self.parts = self._cut()

    def run(self, sequences: Sequence[Calls]) -> Iterator[list[dict[str, Array]]]:
        """The outputs, without the states, of each sequence's calls; one sequence at a time.

        A first call feeds the states that it starts from, a later one gets those before it.
        """
        values = [[self._typed(call) for call in calls] for calls in sequences]
        for part in self.parts[:-1]:
            session = None
            for calls in values:
                session = self._run_part(part, calls, session)
        session = None
        for calls in values:
            session = self._run_part(self.parts[-1], calls, session)
            yield [{name: call[name] for name in self._asked} for call in calls]
            calls.clear()

    def _typed(self, call: Mapping[str, Array]) -> dict[str, Array]:
        return {name: cast(name, array, self.inputs[name].dtype) for name, array in call.items()}

    @property
    def _asked(self) -> list[str]:
        kept = set(self.states.values())
        return [name for name in self.results if name not in kept]

    def _run_part(self, part: Part, calls: list[dict[str, Array]], session: Any) -> Any:
        carried: dict[str, Array] = {}
        for call in calls:
            call.update(carried)
            feeds = {name: call[name] for name in part.inputs}
            session = session or self._load(part, feeds)
            made = dict(zip(part.outputs, session.run(part.outputs, feeds), strict=True))
            carried = {past: made[new] for past, new in self.states.items() if new in made}
            for name in set(call) - part.needed:
                del call[name]
            call.update({name: made[name] for name in made if name in part.needed})
        return session

    def _load(self, part: Part, feeds: Mapping[str, Array]) -> Any:
        """A session of this part alone; weights are read from the artifact's own data file."""
        import onnx

        read = set().union(*(reads(node) for node in part.nodes))
        graph = onnx.helper.make_graph(
            part.nodes,
            "part",
            [
                onnx.helper.make_tensor_value_info(
                    name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim
                )
                for name, array in feeds.items()
            ],
            [onnx.ValueInfoProto(name=name) for name in part.outputs],
            [tensor for name, tensor in self.weights.items() if name in read],
        )
        model = onnx.helper.make_model(
            graph,
            opset_imports=self.model.opset_import,
            functions=self.model.functions,
            ir_version=self.model.ir_version,
        )
        return new_session(model.SerializeToString(), self.path, self.threads)

    def _cut(self) -> list[Part]:
        nodes = list(self.model.graph.node)
        borders = [0, *self._borders(nodes), len(nodes)]
        spans = pairwise(borders)
        parts = [Part(nodes[start:stop]) for start, stop in spans if start < stop]
        if not parts:
            raise UsageError("the graph has no node", where=str(self.path))
        later: set[str] = set(self.results) - set(self.states.values())
        for part in reversed(parts):
            made = {name for node in part.nodes for name in node.output if name}
            read = set().union(*(reads(node) for node in part.nodes))
            part.needed = set(later)
            part.inputs = sorted(read - made - set(self.weights))
            part.outputs = sorted(made & (later | set(self.states.values())))
            later |= set(part.inputs)
        return parts

    def _borders(self, nodes: list[Any]) -> list[int]:
        """Where to cut: between stretches that hold a layer's state, or the last weight."""
        stretches = merged([*self._layers(nodes), *self._last_weight(nodes)])
        alive = widths(nodes, set(self.inputs) | set(self.weights), set(self.results))
        borders = []
        for (_, before), (after, _) in pairwise(stretches):
            # the last of the places where the fewest values pass
            borders.append(min(range(before + 1, after + 1), key=lambda at: (alive[at], -at)))
        return borders

    def _layers(self, nodes: list[Any]) -> Iterator[tuple[int, int]]:
        """For each state the first and last node that reads or makes it."""
        for past, present in self.states.items():
            at = [i for i, node in enumerate(nodes) if past in reads(node)]
            at += [i for i, node in enumerate(nodes) if present in node.output]
            if at:
                yield min(at), max(at)

    def _last_weight(self, nodes: list[Any]) -> Iterator[tuple[int, int]]:
        stored = {name for name, tensor in self.weights.items() if tensor.external_data}
        at = [i for i, node in enumerate(nodes) if not stored.isdisjoint(reads(node))]
        if at:
            yield at[-1], at[-1]


def declared(value: Any) -> Spec:
    """Type and shape that a graph declares for an input."""
    import onnx

    held = value.type.tensor_type
    shape = tuple(d.dim_param or d.dim_value for d in held.shape.dim)
    return Spec(onnx.helper.tensor_dtype_to_np_dtype(held.elem_type).name, shape)


def reads(node: Any) -> set[str]:
    """The values that a node reads, those of graphs inside it included."""
    found = {name for name in node.input if name}
    for attribute in node.attribute:
        for graph in [attribute.g, *attribute.graphs]:
            made = {i.name for i in graph.input} | {t.name for t in graph.initializer}
            for inner in graph.node:
                found |= reads(inner) - made
                made |= set(inner.output)
            found |= {output.name for output in graph.output} - made
    return found


def merged(stretches: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The stretches in order, those that overlap as one."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(stretches):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def widths(nodes: list[Any], given: set[str], results: set[str]) -> list[int]:
    """For each place before a node, how many computed values are alive there."""
    last: dict[str, int] = dict.fromkeys(results, len(nodes))
    for i, node in enumerate(nodes):
        for name in reads(node):
            last[name] = max(last.get(name, 0), i)
    change = np.zeros(len(nodes) + 2, int)
    for i, node in enumerate(nodes):
        for name in node.output:
            if name and name not in given and last.get(name, -1) > i:
                change[i + 1] += 1
                change[last[name] + 1] -= 1
    return [int(n) for n in change.cumsum()]
