"""Passes: the contract, the registry, the pattern matcher, and the manager that runs them."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import operator
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from importlib.metadata import entry_points
from itertools import permutations
from pathlib import Path
from typing import Any, ClassVar, dataclass_transform

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from qopt.canonical import canonicalize, written
from qopt.errors import QoptError, UsageError
from qopt.graph import Graph, GraphError, describe, target_name
from qopt.info import ModelInfo
from qopt.named import plugin_file

PASSES: dict[str, type[Pass]] = {}


class PassError(QoptError):
    """A pass failed or broke the graph; names the pass, the node, and what ran before."""


@dataclass_transform()
class Pass:
    """A rewrite of a graph, in place. A subclass registers by existing; its fields are its options.

    `exact`: the numbers must not change. `rerounds`: it is exact but for roundings to half
    precision, which it moves. `after`: passes that, where both are in a recipe, run
    before this one. `requires`: passes that must have run. `expect` (option of every pass): the
    number of rewrites, or `all` where every candidate must be rewritten.
    """

    name: ClassVar[str] = ""
    exact: ClassVar[bool] = True
    rerounds: ClassVar[bool] = False
    after: ClassVar[tuple[str, ...]] = ()
    requires: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(cls)
        if not cls.name:
            return
        known = PASSES.get(cls.name)
        if known is not None and known.__qualname__ + known.__module__ != (
            cls.__qualname__ + cls.__module__
        ):
            raise TypeError(f"two passes are named {cls.name}: {known} and {cls}")
        PASSES[cls.name] = cls

    def run(self, graph: Graph) -> int:
        """Rewrite the graph in place; return the number of rewrites."""
        raise NotImplementedError

    def explain(self, graph: Graph) -> list[str]:
        """For each candidate that was left, a line that says why."""
        return []

    @classmethod
    def options(cls) -> dict[str, tuple[Any, Any]]:
        """Type and default of each option, by name."""
        return {
            f.name: (f.type, None if f.default is MISSING else f.default)
            for f in fields(cls)  # type: ignore[arg-type]
        }


# Patterns ------------------------------------------------------------------------------------

# Arguments that a pattern may exchange.
COMMUTATIVE = {torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor}


@dataclass(frozen=True)
class Scalar:
    """A number that a pattern binds: in the example arguments, `Scalar(1e-6)`."""

    example: float


@dataclass(frozen=True)
class Wide:
    """An example tensor that stays fp32 when the pattern is traced in a lower precision."""

    tensor: Tensor


@dataclass
class Pattern:
    """A traced pattern function: `graph` over placeholders, `holes` for the numbers it binds."""

    name: str
    graph: fx.Graph
    holes: dict[float, str]

    @property
    def roots(self) -> list[fx.Node]:
        """The nodes that the function returns, in order."""
        returned = next(iter(reversed(self.graph.nodes))).args[0]
        found = returned if isinstance(returned, list | tuple) else [returned]
        return list(found)


@dataclass
class Match:
    """Where a pattern stands in a graph: `values` by argument name, `nodes` that it covers."""

    pattern: Pattern
    values: dict[str, Any]
    nodes: dict[fx.Node, fx.Node]  # of the pattern -> of the graph

    @property
    def root(self) -> fx.Node:
        """The node that the pattern's (first) result is."""
        return self.nodes[self.pattern.roots[0]]

    @property
    def inner(self) -> list[fx.Node]:
        """Matched nodes that are no result."""
        roots = {self.nodes[r] for r in self.pattern.roots}
        return [n for p, n in self.nodes.items() if p.op == "call_function" and n not in roots]


@dataclass
class Miss:
    """The furthest that a pattern got at a place before it failed."""

    matched: int = -1
    text: str = ""

    def note(self, matched: int, text: str) -> None:
        """Keep the furthest failure."""
        if matched > self.matched:
            self.matched, self.text = matched, text


def trace_pattern(
    function: Callable[..., Any], example: Sequence[Any], dtype: torch.dtype
) -> Pattern:
    """Trace a pattern function on fake example arguments, floats in `dtype`."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    holes = {a.example: n for a, n in zip(example, names, strict=True) if isinstance(a, Scalar)}
    fixed = {n: a.example for a, n in zip(example, names, strict=True) if isinstance(a, Scalar)}
    mode = FakeTensorMode()
    with mode:
        tensors = {
            n: torch.empty(a.tensor.shape)
            if isinstance(a, Wide)
            else torch.empty(a.shape, dtype=dtype if a.is_floating_point() else a.dtype)
            for a, n in zip(example, names, strict=True)
            if isinstance(a, Tensor | Wide)
        }

    def call(*given: Tensor) -> Any:
        return function(**dict(zip(tensors, given, strict=True)), **fixed)

    module = make_fx(call, pre_dispatch=True)(*tensors.values())
    for node, name in zip(list(module.graph.nodes), tensors, strict=False):
        node.name = name
    returned = next(iter(reversed(module.graph.nodes)))
    if isinstance(returned.args[0], fx.Node):
        returned.args = ([returned.args[0]],)
    info = ModelInfo(kind="module")
    graph = Graph(module, {}, info, mode, [str(i) for i in range(len(returned.args[0]))])
    canonicalize(graph)
    return Pattern(function.__name__, module.graph, holes)


def match_at(pattern: Pattern, node: fx.Node, miss: Miss | None = None) -> Match | None:
    """Match the pattern with its first result at `node`."""
    matcher = _Matcher(pattern, miss or Miss())
    for binding in matcher.unify(pattern.roots[0], node, _Binding()):
        found = Match(pattern, binding.values, binding.nodes)
        if all(root in found.nodes for root in pattern.roots):
            return found
    return None


@dataclass
class _Binding:
    values: dict[str, Any] = field(default_factory=dict)
    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def with_value(self, name: str, value: Any) -> _Binding:
        return _Binding({**self.values, name: value}, self.nodes)

    def with_node(self, pattern: fx.Node, node: fx.Node) -> _Binding:
        return _Binding(self.values, {**self.nodes, pattern: node})


@dataclass
class _Matcher:
    """Unifies pattern and graph from the result up, backtracking over exchangeable arguments."""

    pattern: Pattern
    miss: Miss

    def unify(self, want: Any, got: Any, so_far: _Binding) -> Iterator[_Binding]:
        if isinstance(want, fx.Node):
            yield from self._unify_node(want, got, so_far)
        elif isinstance(want, list | tuple):
            if isinstance(got, list | tuple) and len(want) == len(got) and holds_nodes(want):
                yield from self._unify_all(list(want), list(got), so_far)
            elif isinstance(got, list | tuple) and list(want) == list(got):
                yield so_far
            else:
                self.miss.note(len(so_far.nodes), f"{got} stands where the pattern has {want}")
        elif isinstance(want, float) and want in self.pattern.holes:
            name = self.pattern.holes[want]
            if isinstance(got, int | float) and so_far.values.get(name, got) == got:
                yield so_far.with_value(name, got)
            else:
                self.miss.note(len(so_far.nodes), f"{name} is {got}, no single number")
        elif want == got and isinstance(want, bool) == isinstance(got, bool):
            yield so_far
        else:
            self.miss.note(len(so_far.nodes), f"{got} stands where the pattern has {want}")

    def _unify_node(self, want: fx.Node, got: Any, so_far: _Binding) -> Iterator[_Binding]:
        if want in so_far.nodes:
            if so_far.nodes[want] is got:
                yield so_far
            else:
                shown = got.name if isinstance(got, fx.Node) else got
                text = f"{shown} stands where the pattern has {so_far.nodes[want].name} again"
                self.miss.note(len(so_far.nodes), text)
            return
        if want.op == "placeholder":
            if isinstance(got, fx.Node):
                yield so_far.with_value(want.name, got).with_node(want, got)
            return
        if not isinstance(got, fx.Node) or got.target != want.target:
            shown = describe(got) if isinstance(got, fx.Node) else got
            self.miss.note(
                len(so_far.nodes),
                f"{shown} stands where the pattern has {target_name(want.target)}",
            )
            return
        if dict(want.kwargs) != dict(got.kwargs):
            self.miss.note(len(so_far.nodes), f"{describe(got)} has other options")
            return
        for args in self._orders(want):
            yield from self._unify_all(args, list(got.args), so_far.with_node(want, got))

    def _orders(self, want: fx.Node) -> Iterator[list[Any]]:
        if want.target in COMMUTATIVE and len(want.args) == 2:
            yield from (list(order) for order in permutations(want.args))
        else:
            yield list(want.args)

    def _unify_all(self, want: list[Any], got: list[Any], so_far: _Binding) -> Iterator[_Binding]:
        if not want:
            if not got:
                yield so_far
            return
        if not got:
            return
        for binding in self.unify(want[0], got[0], so_far):
            yield from self._unify_all(want[1:], got[1:], binding)


def holds_nodes(values: Sequence[Any]) -> bool:
    """Whether a list among a call's arguments holds tensors, not numbers."""
    return any(isinstance(value, fx.Node) for value in values)


class RewritePass(Pass):
    """A pass that is a list of patterns: ordinary functions, each with what replaces it.

    `patterns` are traced through the same path as models, on `example` arguments (tensors for
    ranks, `Scalar` for the numbers that the pattern binds). `rewrite` makes the replacement;
    `check` says what a pattern cannot.
    """

    patterns: ClassVar[tuple[Callable[..., Any], ...]] = ()
    example: ClassVar[tuple[Any, ...]] = ()
    anchor: ClassVar[tuple[Any, ...]] = ()  # ops that a candidate has, for `explain`

    def check(self, graph: Graph, match: Match) -> str | None:
        """Why a match must not be rewritten; None where it may."""
        return None

    def rewrite(self, graph: Graph, match: Match) -> fx.Node | tuple[fx.Node, ...]:
        """Insert the replacement and return what takes the place of each result."""
        raise NotImplementedError

    def traced(self) -> list[Pattern]:
        """Each pattern, traced without casts and with those of each low precision."""
        cache: dict[type, list[Pattern]] = _TRACED
        if type(self) not in cache:
            cache[type(self)] = [
                trace_pattern(function, self.arguments(function), dtype)
                for function in self.patterns
                for dtype in (torch.float32, torch.float16, torch.bfloat16)
            ]
        return cache[type(self)]

    def arguments(self, function: Callable[..., Any]) -> Sequence[Any]:
        """Example arguments of one pattern: the first of `example` that it takes, by name order."""
        return self.example[: function.__code__.co_argcount]

    def run(self, graph: Graph) -> int:
        """Try every pattern at every node, last node first; rewrite what passes the checks."""
        count = 0
        patterns = self.traced()
        touched = written(graph)
        targets = {p.roots[0].target for p in patterns}
        for node in reversed(graph.nodes):
            if node._erased or node.target not in targets:
                continue
            for pattern in patterns:
                match = match_at(pattern, node)
                if match is not None and self.refusal(graph, match, touched) is None:
                    self.apply(graph, match)
                    count += 1
                    break
        return count

    def refusal(
        self, graph: Graph, match: Match, touched: Set[fx.Node] = frozenset()
    ) -> str | None:
        """Why the match cannot be rewritten: its own check, an inner value in use, a cycle.

        `touched` holds the nodes whose memory some call writes into: no match reaches across that.
        """
        covered = set(match.nodes.values())
        for node in match.inner:
            outside = [user for user in node.users if user not in covered]
            if outside:
                return f"{node.name} is also used by {outside[0].name}"
        inside = [n for p, n in match.nodes.items() if p.op == "call_function"]
        if not graph.convex(inside):
            return f"the match at {match.root.name} is not convex: a path leaves it and comes back"
        written_to = [node.name for node in covered if node in touched]
        if written_to:
            return f"{min(written_to)} is written to in place"
        return self._too_early(graph, match) or self.check(graph, match)

    def _too_early(self, graph: Graph, match: Match) -> str | None:
        """Whether one result is read before all that the match takes in is there."""
        if len(match.pattern.roots) == 1:
            return None
        order = {node: i for i, node in enumerate(graph.fx.nodes)}
        roots = [match.nodes[r] for r in match.pattern.roots]
        last = max(order[root] for root in roots)
        early = [(root, u) for root in roots for u in root.users if order[u] <= last]
        outside = [(root, u) for root, u in early if u not in match.nodes.values()]
        if not outside:
            return None
        root, user = outside[0]
        return f"{user.name} uses {root.name} before the rest of the match"

    def apply(self, graph: Graph, match: Match) -> None:
        """Put the replacement at the last matched result."""
        roots = [match.nodes[r] for r in match.pattern.roots]
        order = {node: i for i, node in enumerate(graph.fx.nodes)}
        last = max(roots, key=order.__getitem__)
        with graph.after(last):
            made = self.rewrite(graph, match)
        for old, new in zip(roots, made if isinstance(made, tuple) else (made,), strict=True):
            if old.meta["val"].dtype != new.meta["val"].dtype:
                raise GraphError(f"{self.name} changes the dtype of {old.name}")
            new.meta.setdefault("stack_trace", old.meta.get("stack_trace"))
            old.replace_all_uses_with(new, delete_user_cb=partial(operator.is_not, new))
        for old in roots:
            if not old._erased:
                graph.erase(old)

    def explain(self, graph: Graph) -> list[str]:
        """The nearest miss at each candidate that is left."""
        return [
            f"{describe(node).split('  #')[0]}: {self._nearest(graph, node)}"
            for node in graph.find(*self.anchor)
        ]

    def _nearest(self, graph: Graph, anchor: fx.Node) -> str:
        best = Miss()
        near, frontier = {anchor}, {anchor}
        for _ in range(8):
            frontier = {user for node in frontier for user in node.users} - near
            near |= frontier
        for pattern in self.traced():
            for node in near:
                if node.target != pattern.roots[0].target:
                    continue
                miss = Miss()
                match = match_at(pattern, node, miss)
                if match is not None and anchor in match.nodes.values():
                    return self.refusal(graph, match, written(graph)) or "it matches"
                best.note(miss.matched, f"pattern {pattern.name}: {miss.text}")
        return best.text or "no pattern comes near"


_TRACED: dict[type, list[Pattern]] = {}


# Registry ------------------------------------------------------------------------------------


def load_builtin_passes() -> None:
    """Import every file in `passes/`, then what other distributions offer as `qopt.passes`."""
    package = importlib.import_module("qopt.passes")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"qopt.passes.{module.name}")
    for entry in entry_points(group="qopt.passes"):
        entry.load()


def load_plugin(plugin: str) -> str:
    """Run a plugin, a Python file or an importable module; returns the SHA-256 of its file.

    Raises `UsageError` where it cannot be found or defines no pass.
    """
    path = plugin_file(plugin)
    if path is not None:
        file = path
        name = f"qopt_plugin_{path.stem}"
        _run_plugin(lambda: _run_file(name, file), plugin)
    else:
        name = plugin
        _run_plugin(lambda: importlib.import_module(plugin), plugin)
        path = Path(str(sys.modules[plugin].__file__))
    if not any(f"{cls.__module__}.".startswith(f"{name}.") for cls in PASSES.values()):
        raise UsageError(
            "the plugin defines no pass",
            where=plugin,
            todo="write a class with a `name`, derived from qopt.rewrite.Pass or RewritePass",
        )
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _run_file(name: str, path: Path) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _run_plugin(run: Callable[[], Any], plugin: str) -> None:
    before = dict(PASSES)
    try:
        run()
    except Exception as error:
        PASSES.clear()
        PASSES.update(before)  # half a plugin is none
        raise UsageError(
            "the plugin fails on import",
            where=plugin,
            why=f"{type(error).__name__}: {error}".rstrip(": "),
            todo="mend it, or give a .py file or a module that can be imported",
        ) from error


# Manager -------------------------------------------------------------------------------------


@dataclass
class PassRecord:
    """What one pass did: rewrites, nodes before and after, milliseconds, and what it left."""

    name: str
    rewrites: int
    before: int
    after: int
    ms: float
    left: list[str] = field(default_factory=list)


@dataclass
class PassManager:
    """Runs passes in order, verifying the graph after each.

    `expect` holds a pass's demanded count or `all`; `on_pass` is called after each pass with its
    object, the graph and its record (checks, progress); `dump` is a folder for listings.
    """

    passes: Sequence[Pass]
    expect: dict[str, str | int] = field(default_factory=dict)
    explain: Sequence[str] = ()
    dump: Path | None = None
    on_pass: Callable[[Pass, Graph, PassRecord], None] | None = None
    records: list[PassRecord] = field(default_factory=list)

    def run(self, graph: Graph) -> list[PassRecord]:
        """Run every pass; raise `PassError` at the first that fails."""
        self._dump(0, "captured", graph)
        for number, item in enumerate(self.passes, 1):
            record = self._run_one(number, item, graph)
            if self.on_pass is not None:
                self.on_pass(item, graph, record)
        return self.records

    def _run_one(self, number: int, item: Pass, graph: Graph) -> PassRecord:
        before, start = len(graph.fx.nodes), time.perf_counter()
        try:
            rewrites = item.run(graph)
            graph.sweep()
            graph.verify()
        except Exception as error:
            broken = self._dump(number, f"{item.name}.failed", graph)
            raise self._failure(item, error, broken) from error
        spent = (time.perf_counter() - start) * 1e3
        left = item.explain(graph) if item.name in (*self.explain, *self.expect) else []
        record = PassRecord(item.name, rewrites, before, len(graph.fx.nodes), spent, left)
        self.records.append(record)
        if rewrites:
            self._dump(number, item.name, graph)
        self._demand(item, record)
        return record

    def _failure(self, item: Pass, error: Exception, dumped: Path | None) -> PassError:
        ran = ", ".join(r.name for r in self.records) or "none"
        what = error.what if isinstance(error, QoptError) else f"{type(error).__name__}: {error}"
        why = f"passes that ran before it: {ran}"
        if getattr(error, "source", None):
            why = f"the node comes from {error.source}; {why}"  # type: ignore[attr-defined]
        graph = f"the graph is in {dumped}" if dumped else "see the graph with --dump DIR"
        return PassError(
            f"pass {item.name} failed: {what}",
            where=getattr(error, "where", None),
            why=why,
            todo=f"{graph}; leave the pass out with --skip {item.name}, and report it",
        )

    def _demand(self, item: Pass, record: PassRecord) -> None:
        wanted = self.expect.get(item.name)
        if wanted is None:
            return
        if wanted == "all":
            short = record.rewrites == 0 or bool(record.left)
        else:
            short = record.rewrites != wanted
        if short:
            nearest = "; ".join(record.left[:3]) or "the graph holds no candidate"
            raise UsageError(
                f"{item.name} made {record.rewrites} rewrites, the recipe expects {wanted}",
                why=nearest,
                todo=f"see all with --explain {item.name}, or change `expect` in the recipe",
            )

    def _dump(self, number: int, name: str, graph: Graph) -> Path | None:
        if self.dump is None:
            return None
        self.dump.mkdir(parents=True, exist_ok=True)
        path = self.dump / f"{number:03d}_{name}.txt"
        path.write_text(graph.listing() + "\n")
        return path


def getitem(graph: Graph, node: fx.Node, index: int) -> fx.Node:
    """Insert the `index`th result of a node with several."""
    return graph.call(operator.getitem, node, index)
