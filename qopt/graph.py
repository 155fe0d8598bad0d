"""The one form of a model from capture to emission: an fx module, lazy weights, what is known."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import networkx as nx
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node

from qopt.errors import QoptError
from qopt.info import ModelInfo
from qopt.ops import OPS
from qopt.weights import LazyWeight, equal_weights

if TYPE_CHECKING:
    from qopt.calibration import Calibration

ATTENTION = OPS["attention"].target
CACHED_ATTENTION = OPS["cached_attention"].target


class GraphError(QoptError):
    """A graph that breaks its own rules: a bug in capture or in a pass."""

    source: str | None = None  # the line of the model that the node at fault comes from


@dataclass
class Graph:
    """A model: `module` of core aten and `qopt::` ops, its `weights` by name, and `info`.

    Parameters stand in the module as `get_attr` nodes over fake tensors (shape and dtype only).
    `outputs` names the results in order; `defaults` gives the inputs that a caller may leave out.
    """

    module: GraphModule
    weights: dict[str, LazyWeight]
    info: ModelInfo
    fake_mode: FakeTensorMode
    outputs: list[str]
    defaults: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    calibration: Calibration | None = None  # the text that passes which search or measure see

    @property
    def fx(self) -> fx.Graph:
        """The fx graph itself."""
        return self.module.graph

    @property
    def nodes(self) -> list[Node]:
        """All nodes in order, as a list that may be iterated while the graph changes."""
        return list(self.fx.nodes)

    @property
    def inputs(self) -> list[Node]:
        """The graph's inputs in order."""
        return [node for node in self.fx.nodes if node.op == "placeholder"]

    @property
    def output(self) -> Node:
        """The output node."""
        last: Node = next(iter(reversed(self.fx.nodes)))
        return last

    @property
    def results(self) -> list[Node]:
        """The nodes that the outputs are, in the order of `outputs`."""
        return list(self.output.args[0])  # type: ignore[arg-type]

    def find(self, *targets: Any) -> list[Node]:
        """Every call of one of `targets`, in order."""
        return [n for n in self.fx.nodes if n.op == "call_function" and n.target in targets]

    def weight(self, node: Any) -> LazyWeight | None:
        """The weight that `node` reads, or None where it is something else."""
        if isinstance(node, Node) and node.op == "get_attr":
            return self.weights.get(str(node.target))
        return None

    def shared(self, names: Sequence[str]) -> bool:
        """Whether weights beside `names` are made from the same tensors, as tied ones are."""
        own = set().union(*(root_sources(self.weights[name]) for name in names))
        others = (weight for name, weight in self.weights.items() if name not in names)
        return any(not own.isdisjoint(root_sources(other)) for other in others)

    def add_weight(self, name: str, weight: LazyWeight) -> Node:
        """Add a weight and a node that reads it, at the current place of insertion."""
        while name in self.weights or hasattr(torch.nn.Module, name.rpartition(".")[2]):
            name += "_"
        self.weights[name] = weight
        with self.fake_mode:
            value = torch.empty(weight.shape, dtype=weight.dtype)
        set_attribute(self.module, name, value)
        node = self.fx.get_attr(name)
        node.meta["val"] = value
        return node

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Insert a call at the current place of insertion, its shape computed on fake tensors."""
        node = self.fx.call_function(target, args, kwargs)
        self.infer(node)
        return node

    def infer(self, node: Node) -> None:
        """Compute `node.meta["val"]` from its arguments'."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        shapes = self.fake_mode.shape_env
        # A size that only the running graph knows (last_tokens) is nobody's to resolve here.
        fresh = shapes.ignore_fresh_unbacked_symbols() if shapes is not None else nullcontext()
        with self.fake_mode, fresh:
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]

    @contextmanager
    def before(self, node: Node) -> Iterator[None]:
        """Insert before `node` inside the block."""
        with self.fx.inserting_before(node):
            yield

    @contextmanager
    def after(self, node: Node) -> Iterator[None]:
        """Insert after `node` inside the block."""
        following = node.next
        with self.fx.inserting_before(following):
            yield

    def replace(self, old: Node, new: Node) -> None:
        """Let every user of `old` use `new`, and erase `old` with what only it used."""
        old.replace_all_uses_with(new)
        self.erase(old)

    def erase(self, node: Node) -> None:
        """Erase a node without users, then those of its inputs that nobody uses any more."""
        stack = [node]
        while stack:
            dead = stack.pop()
            if dead.users or dead.op in ("placeholder", "output") or dead._erased:
                continue
            sources = dead.all_input_nodes
            self.fx.erase_node(dead)
            stack.extend(sources)

    def sweep(self) -> None:
        """Forget weights that no node reads."""
        used = {str(node.target) for node in self.fx.nodes if node.op == "get_attr"}
        for name in [name for name in self.weights if name not in used]:
            del self.weights[name]

    def share_weights(self) -> None:
        """Let weights of equal content, whatever their names, be one weight with one node."""
        same = equal_weights(self.weights)
        readers = {str(node.target): node for node in self.fx.nodes if node.op == "get_attr"}
        for name, first in same.items():
            if name in readers and first in readers:
                order = {node: i for i, node in enumerate(self.fx.nodes)}
                if order[readers[first]] > order[readers[name]]:
                    readers[name].prepend(readers[first])
                readers[name].replace_all_uses_with(readers[first])
                self.fx.erase_node(readers[name])
        self.sweep()

    def listing(self) -> str:
        """One node a line, in order, with shapes: stable from run to run."""
        return "\n".join(describe(node) for node in self.fx.nodes)

    def convex(self, nodes: Iterable[Node]) -> bool:
        """Whether no path leaves `nodes` and comes back: only such a set can become one node."""
        inside = set(nodes)
        frontier = [user for node in inside for user in node.users if user not in inside]
        seen = set(frontier)
        while frontier:
            for user in frontier.pop().users:
                if user in inside:
                    return False
                if user not in seen:
                    seen.add(user)
                    frontier.append(user)
        return True

    def dataflow(self) -> nx.DiGraph[Node]:
        """The nodes as a networkx graph, an edge from each value to its user."""
        graph: nx.DiGraph[Node] = nx.DiGraph()
        for node in self.fx.nodes:
            graph.add_node(node)
            graph.add_edges_from((source, node) for source in node.all_input_nodes)
        return graph

    def verify(self) -> None:
        """Raise `GraphError` unless the graph is whole: order, values, ops, dynamic dimensions."""
        self.fx.lint()
        for node in self.fx.nodes:
            problem = self._problem(node)
            if problem:
                error = GraphError(problem, where=describe(node))
                error.source = source_line(node)
                raise error
        if len(self.results) != len(self.outputs):
            raise GraphError(f"{len(self.results)} results for {len(self.outputs)} output names")

    def _problem(self, node: Node) -> str | None:
        if node.op == "output":
            return None
        if "val" not in node.meta:
            return 'the node has no meta["val"]'
        if node.op == "get_attr":
            weight = self.weights.get(str(node.target))
            if weight is None:
                return f"no weight is named {node.target}"
            if tuple(node.meta["val"].shape) != tuple(weight.shape):
                return f"the weight has shape {weight.shape}, the graph says otherwise"
        elif node.op not in ("placeholder", "call_function"):
            return f"op kind {node.op} is not allowed"
        elif node.op == "call_function" and not allowed(node.target):
            return f"{node.target} is not an aten or qopt op"
        frozen = node.meta.get("dynamic", ())
        for dim in frozen:
            if not isinstance(node.meta["val"].shape[dim], torch.SymInt):
                return (
                    f"dimension {dim} is declared dynamic and became {node.meta['val'].shape[dim]}"
                )
        return None

    def interpret(
        self,
        inputs: dict[str, Tensor],
        cache: dict[int, tuple[Tensor, Tensor]] | None = None,
        load: Callable[[LazyWeight], Tensor] = LazyWeight.evaluate,
    ) -> dict[str, Tensor]:
        """Run the graph on real tensors, reading each weight at its use and freeing after last use.

        `cache` serves a graph whose KV cache is still implied: keys and values by layer, read and
        extended in place. `load` evaluates a weight.
        """
        return next(self.interpret_all([inputs], [{} if cache is None else cache], load))

    def interpret_all(
        self,
        inputs: Sequence[dict[str, Tensor]],
        caches: Sequence[dict[int, tuple[Tensor, Tensor]]] | None = None,
        load: Callable[[LazyWeight], Tensor] = LazyWeight.evaluate,
    ) -> Iterator[dict[str, Tensor]]:
        """Run the graph on each of `inputs`, all of them node by node, and yield their outputs.

        A node's weights are loaded once for all and let go: beside them only what is alive of every
        run is in memory. What follows the last weight (the logits) is computed run by run, as the
        outputs are asked for.
        """
        runs = [_Run(given, {} if caches is None else caches[i]) for i, given in enumerate(inputs)]
        for results in _Interpreter(self, load).run(runs):
            yield dict(zip(self.outputs, results, strict=True))


@dataclass
class _Run:
    """One set of inputs on its way through the graph."""

    inputs: dict[str, Tensor]
    cache: dict[int, tuple[Tensor, Tensor]]
    env: dict[Node, Any] = field(default_factory=dict)
    extended: set[int] = field(default_factory=set)  # layers whose new keys are in the cache


class _Interpreter:
    """Runs nodes in order; a value lives until its last user ran, a weight as long as its node."""

    def __init__(self, graph: Graph, load: Callable[[LazyWeight], Tensor]) -> None:
        self.graph, self.load = graph, load
        self.last = last_uses(graph.fx)

    def run(self, runs: list[_Run]) -> Iterator[list[Tensor]]:
        nodes = self.graph.nodes
        readers = [i for i, node in enumerate(nodes) if self._read_by(node)]
        tail = readers[-1] if readers else len(nodes) - 1
        for node in nodes[:tail]:
            held = self._weights(node)
            for run in runs:
                self._step(node, run, held)
        held = {weight: t for node in nodes[tail:] for weight, t in self._weights(node).items()}
        for run in runs:
            for node in nodes[tail:-1]:
                self._step(node, run, held)
            yield [run.env[n] if n in run.env else held[n] for n in self.graph.results]
            run.env.clear()

    def _read_by(self, node: Node) -> list[Node]:
        return [source for source in node.all_input_nodes if source.op == "get_attr"]

    def _weights(self, node: Node) -> dict[Node, Tensor]:
        """The weights that a node reads; read anew at each use, so that none outlives it."""
        return {n: self.load(self.graph.weights[str(n.target)]) for n in self._read_by(node)}

    def _step(self, node: Node, run: _Run, held: dict[Node, Tensor]) -> None:
        if node.op == "placeholder":
            given = run.inputs.get(node.name, self.graph.defaults.get(node.name))
            if given is None:
                raise GraphError(f"input {node.name} is missing")
            run.env[node] = given
        elif node.op != "get_attr":
            with torch.no_grad():  # not around a yield, where the caller's code would run inside
                run.env[node] = self._call(node, run, held)
        for dead in self.last.get(node, ()):
            run.env.pop(dead, None)

    def _call(self, node: Node, run: _Run, held: dict[Node, Tensor]) -> Any:
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda n: held[n] if n.op == "get_attr" else run.env[n]
        )
        if node.target is ATTENTION:
            return self._attend(run, args, dict(kwargs))
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _attend(self, run: _Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        q, k, v, mask, *rest = args
        layer = kwargs.pop("layer")
        if k is None:  # another layer's cache is read
            raise GraphError("attention without keys")
        past_k, past_v = run.cache.get(layer, (None, None))
        if layer in run.extended:  # a later layer that reads the same cache
            k, v, past_k, past_v = past_k, past_v, None, None
        out, key, value = CACHED_ATTENTION(q, k, v, past_k, past_v, mask, *rest, **kwargs)
        run.cache[layer] = key, value
        run.extended.add(layer)
        return out  # type: ignore[no-any-return]


def root_sources(weight: LazyWeight) -> set[int]:
    """The identities of the sources that a weight is made of."""
    if weight.source is not None:
        return {id(weight.source)}
    return set().union(*(root_sources(part) for part in weight.inputs))


def last_uses(graph: fx.Graph) -> dict[Node, list[Node]]:
    """For each node, the values that nobody needs after it."""
    last: dict[Node, Node] = {}
    for node in graph.nodes:
        last[node] = node
        for source in node.all_input_nodes:
            last[source] = node
    dead: dict[Node, list[Node]] = {}
    for value, node in last.items():
        if value.op != "output":
            dead.setdefault(node, []).append(value)
    return dead


SYMBOLIC = {
    operator.add,
    operator.sub,
    operator.mul,
    operator.floordiv,
    operator.mod,
    operator.neg,
    operator.truediv,
    operator.pow,
    operator.getitem,
    operator.eq,
    operator.ne,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
    torch.sym_max,
    torch.sym_min,
    torch.sym_int,
    torch.sym_float,
    torch.sym_ite,
    torch.sym_not,
    torch.sym_sum,
}


def allowed(target: Any) -> bool:
    """Whether a graph may call `target`."""
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace in ("aten", "qopt", "prims")
    return target in SYMBOLIC


def set_attribute(module: GraphModule, name: str, value: Any) -> None:
    """Hang `value` on the module under a dotted name, making the modules on the way."""
    *path, leaf = name.split(".")
    owner: torch.nn.Module = module
    for part in path:
        if part not in owner._modules:
            owner.add_module(part, torch.nn.Module())
        owner = getattr(owner, part)
    owner.register_buffer(leaf, value, persistent=False)


def describe(node: Node) -> str:
    """One line for a node: name, target, arguments, dtype and shape."""
    if node.op == "output":
        return f"return {format_argument(node.args[0])}"
    value = node.meta.get("val")
    shape = f"  # {describe_value(value)}" if value is not None else ""
    if node.op == "placeholder":
        return f"{node.name} = input{shape}"
    if node.op == "get_attr":
        return f"{node.name} = weight {node.target}{shape}"
    args = [format_argument(a) for a in node.args]
    args += [f"{k}={format_argument(v)}" for k, v in node.kwargs.items()]
    return f"{node.name} = {target_name(node.target)}({', '.join(args)}){shape}"


def source_line(node: Node) -> str | None:
    """File and line of the model's code that made a node, where they are known."""
    lines = str(node.meta.get("stack_trace") or "").strip().splitlines()
    found = [line.strip() for line in lines if line.strip().startswith("File ")]
    return found[-1] if found else None


def describe_value(value: Any) -> str:
    """Dtype and shape of a value, symbols as they are named."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(describe_value, value)) + ")"
    return str(value)


def format_argument(argument: Any) -> str:
    """An argument as the listing shows it."""
    if isinstance(argument, Node):
        return argument.name
    if isinstance(argument, list | tuple):
        return "[" + ", ".join(map(format_argument, argument)) + "]"
    return repr(argument)


def target_name(target: Any) -> str:
    """`aten.add.Tensor`, `qopt.rms_norm`, `getitem`."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    return getattr(target, "__name__", str(target))


def symbols(value: Any) -> Sequence[Any]:
    """The dimensions of a fake tensor that are symbolic."""
    if not isinstance(value, FakeTensor):
        return ()
    return [dim for dim in value.shape if isinstance(dim, torch.SymInt)]
