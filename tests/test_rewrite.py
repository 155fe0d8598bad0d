"""Passes: the registry, the matcher's refusals, `expect`, errors, dumps and plugins."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, fx, nn

from qopt.errors import UsageError
from qopt.graph import Graph
from qopt.rewrite import (
    Match,
    Pass,
    PassError,
    PassManager,
    RewritePass,
    Scalar,
    getitem,
    load_plugin,
    trace_pattern,
)

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("fresh_registry")


class Call(nn.Module):
    def __init__(self, form: Any) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return self.form(x)


# Registry ------------------------------------------------------------------------------------


def test_a_pass_registers_by_existing(fresh_registry: dict[str, type[Pass]]) -> None:
    class Mine(Pass):
        """Mine."""

        name = "mine"
        width: int = 3
        kind: str = "a"

    assert fresh_registry["mine"] is Mine
    assert Mine.options() == {"width": ("int", 3), "kind": ("str", "a")}
    assert Mine(width=5).width == 5  # type: ignore[call-arg, unused-ignore]


def test_two_passes_of_one_name_are_refused(fresh_registry: dict[str, type[Pass]]) -> None:
    with pytest.raises(TypeError, match="two passes are named canonicalize"):

        class Again(Pass):
            """Again."""

            name = "canonicalize"

    assert fresh_registry["canonicalize"].__name__ == "Canonicalize"


def test_every_builtin_is_there(fresh_registry: dict[str, type[Pass]], baseline: Any) -> None:
    assert {*baseline, "fold-norm-weight"} <= set(fresh_registry)


# Matching ------------------------------------------------------------------------------------


def cosine_and_sum(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two results: the second is read by the first."""
    inner = x.cos()
    return inner.sin() + inner, inner


class TwoResults(RewritePass):
    """Replace a sum and what it is made of."""

    patterns = (cosine_and_sum,)
    example = (torch.empty(2, 3),)
    anchor: ClassVar[tuple[Any, ...]] = (aten.cos.default,)

    def rewrite(self, graph: Graph, match: Match) -> tuple[fx.Node, ...]:
        """The same thing."""
        inner = graph.call(aten.cos.default, match.values["x"])
        sine = graph.call(aten.sin.default, inner)
        return graph.call(aten.add.Tensor, sine, inner), inner


def test_several_results(exported: Any) -> None:
    def form(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.cos().sin() + x.cos(), x.cos() * 2

    x = torch.randn(2, 3)
    graph = exported(Call(form), x)
    PassManager([PASS("eliminate-common-subexpressions")]).run(graph)
    assert TwoResults().run(graph) == 1
    graph.verify()
    for got, want in zip(graph.interpret({"x": x}).values(), form(x), strict=True):
        torch.testing.assert_close(got, want)


def PASS(name: str) -> Pass:
    from qopt.rewrite import PASSES

    return PASSES[name]()


def loops_back(x: Tensor) -> Tensor:
    """The sum reads the cosine, and something made of the cosine outside of the match."""
    inner = x.cos()
    outside = inner.exp()
    return (inner.sin() + inner) * outside


def through_itself(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A product of two, one of which may come from the other result."""
    inner = x.cos()
    return inner * y, inner


class Product(RewritePass):
    """A pattern whose second argument may depend on its second result."""

    patterns = (through_itself,)
    example = (torch.empty(2, 3), torch.empty(2, 3))
    anchor: ClassVar[tuple[Any, ...]] = (aten.cos.default,)

    def rewrite(self, graph: Graph, match: Match) -> tuple[fx.Node, ...]:
        """Never reached in these tests."""
        raise AssertionError("rewritten")


def test_a_match_that_is_not_convex_is_refused_with_the_reason(exported: Any, body: Any) -> None:
    """A path leaves the match by the cosine and comes back by the exponential."""
    form = lambda x: x.cos() * x.cos().exp()  # noqa: E731
    graph = exported(Call(form), torch.randn(2, 3))
    PassManager([PASS("eliminate-common-subexpressions")]).run(graph)
    before = body(graph)
    assert Product().run(graph) == 0
    assert body(graph) == before
    (line,) = Product().explain(graph)
    assert line == (
        "cos = aten.cos(x): the match at mul is not convex: a path leaves it and comes back"
    )


def test_a_result_that_is_read_too_early_is_refused(exported: Any) -> None:
    x = torch.randn(2, 3)
    graph = exported(Call(loops_back), x)
    assert TwoResults().run(graph) == 0
    (line,) = TwoResults().explain(graph)
    assert line.endswith("exp uses cos before the rest of the match")
    torch.testing.assert_close(graph.interpret({"x": x})["output_0"], loops_back(x))


def scaled(x: Tensor, factor: float) -> Tensor:
    """x times a number."""
    return x.cos() * factor


class Scale(RewritePass):
    """Bind a number."""

    patterns = (scaled,)
    example = (torch.empty(2, 3), Scalar(1.2345))
    anchor: ClassVar[tuple[Any, ...]] = (aten.cos.default,)
    rewrites: ClassVar[list[float]] = []

    def check(self, graph: Graph, match: Match) -> str | None:
        """Small numbers only."""
        return "the number is large" if match.values["factor"] > 100 else None

    def rewrite(self, graph: Graph, match: Match) -> fx.Node:
        """Note the number."""
        self.rewrites.append(match.values["factor"])
        return graph.call(aten.sin.default, match.values["x"])


def test_numbers_are_bound_and_checked(exported: Any) -> None:
    Scale.rewrites.clear()
    for number in (3.5, 2, 1e3):
        Scale().run(exported(Call(lambda x, n=number: x.cos() * n), torch.randn(2, 3)))
    assert Scale.rewrites == [3.5, 2]
    graph = exported(Call(lambda x: x.cos() * 1e3), torch.randn(2, 3))
    assert Scale().explain(graph) == ["cos = aten.cos(x): the number is large"]


def test_a_rewrite_that_changes_the_dtype_is_an_error(exported: Any) -> None:
    class Wrong(Scale):
        """Wrong."""

        def rewrite(self, graph: Graph, match: Match) -> fx.Node:
            """Of another dtype."""
            return graph.call(aten.to.dtype, match.values["x"], torch.float16)

    graph = exported(Call(lambda x: x.cos() * 2), torch.randn(2, 3))
    with pytest.raises(PassError, match="changes the dtype of mul"):
        PassManager([Wrong()]).run(graph)


def test_patterns_are_traced_as_models_are() -> None:
    pattern = trace_pattern(scaled, Scale.example, torch.bfloat16)
    calls = [n.target for n in pattern.graph.nodes if n.op == "call_function"]
    assert calls == [aten.cos.default, aten.mul.Tensor]
    assert pattern.holes == {1.2345: "factor"}


# The manager ---------------------------------------------------------------------------------


def gate(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x) * x[:, :1]


def manage(graph: Graph, *names: str, **options: Any) -> PassManager:
    manager = PassManager([PASS(name) for name in names], **options)
    manager.run(graph)
    return manager


@pytest.mark.parametrize("expected", [1, "all"])
def test_expect_names_the_nearest_miss(expected: Any, exported: Any) -> None:
    graph = exported(Call(gate), torch.randn(3, 8), shapes=({},))
    with pytest.raises(UsageError) as raised:
        manage(graph, "fuse-silu-mul", expect={"fuse-silu-mul": expected})
    assert str(raised.value) == (
        f"fuse-silu-mul made 0 rewrites, the recipe expects {expected}\n"
        "  why: silu = aten.silu(x): gate and up differ in shape or dtype\n"
        "  do:  see all with --explain fuse-silu-mul, or change `expect` in the recipe"
    )


def test_expect_that_is_met(captured: Any) -> None:
    names = ("canonicalize", "fuse-silu-mul")
    manage(captured("llama"), *names, expect={"fuse-silu-mul": "all"})
    manage(captured("llama"), *names, expect={"fuse-silu-mul": 2})
    with pytest.raises(UsageError, match="made 2 rewrites, the recipe expects 3"):
        manage(captured("llama"), *names, expect={"fuse-silu-mul": 3})


def test_explain_fills_the_record(exported: Any) -> None:
    graph = exported(Call(gate), torch.randn(3, 8), shapes=({},))
    (record,) = manage(graph, "fuse-silu-mul", explain=["fuse-silu-mul"]).records
    assert (record.name, record.rewrites) == ("fuse-silu-mul", 0)
    assert record.left == ["silu = aten.silu(x): gate and up differ in shape or dtype"]


def test_records_and_callback(exported: Any) -> None:
    seen: list[tuple[str, int]] = []
    graph = exported(Call(lambda x: x * 1 + x), torch.randn(3, 8))
    manager = manage(
        graph,
        "canonicalize",
        "eliminate-dead-code",
        on_pass=lambda item, graph, record: seen.append((item.name, record.rewrites)),
    )
    assert seen == [("canonicalize", 1), ("eliminate-dead-code", 0)]
    assert [(r.before, r.after) for r in manager.records] == [(4, 3), (3, 3)]
    assert all(r.ms >= 0 for r in manager.records)


class Breaks(Pass):
    """Leave a node without a value."""

    def run(self, graph: Graph) -> int:
        """Break the first call."""
        del next(n for n in graph.nodes if n.op == "call_function").meta["val"]
        return 1


Breaks.name = "breaks"


def test_the_whole_text_of_a_pass_error(exported: Any, tmp_path: Path) -> None:
    graph = exported(Call(lambda x: x.cos()), torch.randn(3, 8))
    manager = PassManager([PASS("canonicalize"), Breaks()], dump=tmp_path)
    with pytest.raises(PassError) as raised:
        manager.run(graph)
    line = next(n for n in graph.nodes if n.name == "cos").meta["stack_trace"].strip()
    place = [x.strip() for x in line.splitlines() if x.strip().startswith("File ")][-1]
    dump = tmp_path / "002_breaks.failed.txt"
    assert str(raised.value) == (
        'cos = aten.cos(x): pass breaks failed: the node has no meta["val"]\n'
        f"  why: the node comes from {place}; passes that ran before it: canonicalize\n"
        f"  do:  the graph is in {dump}; leave the pass out with --skip breaks, and report it"
    )
    assert "cos = aten.cos(x)" in dump.read_text()
    assert raised.value.exit_code == 1


def test_a_crash_in_a_pass_names_it(exported: Any) -> None:
    class Crashes(Breaks):
        """Crash."""

        def run(self, graph: Graph) -> int:
            """Crash."""
            raise ZeroDivisionError("division by zero")

    Crashes.name = "crashes"
    with pytest.raises(PassError) as raised:
        PassManager([Crashes()]).run(exported(Call(lambda x: x.cos()), torch.randn(3, 8)))
    assert str(raised.value) == (
        "pass crashes failed: ZeroDivisionError: division by zero\n"
        "  why: passes that ran before it: none\n"
        "  do:  see the graph with --dump DIR; leave the pass out with --skip crashes, "
        "and report it"
    )


def test_dumps_are_numbered_by_place_and_only_of_changes(exported: Any, tmp_path: Path) -> None:
    graph = exported(Call(lambda x: (x * 1).cos() + x.cos()), torch.randn(3, 8))
    folder = tmp_path / "dump"
    manage(
        graph,
        "canonicalize",
        "fuse-rms-norm",
        "eliminate-common-subexpressions",
        dump=folder,
    )
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "000_captured.txt",
        "001_canonicalize.txt",
        "003_eliminate-common-subexpressions.txt",
    ]
    assert (folder / names[-1]).read_text() == graph.listing() + "\n"


def test_getitem(exported: Any) -> None:
    graph = exported(Call(lambda x: x.cos()), torch.randn(4, 8))
    with graph.before(graph.output):
        pieces = graph.call(aten.split_with_sizes.default, graph.inputs[0], [3, 5], 1)
        second = getitem(graph, pieces, 1)
    assert second.meta["val"].shape[1] == 5


# Plugins -------------------------------------------------------------------------------------

PLUGIN = '''
import torch
from qopt.rewrite import Pass

class Mine(Pass):
    """Count the calls."""
    name = "mine-from-a-file"
    def run(self, graph):
        return 0
'''


def test_plugin_file(tmp_path: Path, fresh_registry: dict[str, type[Pass]]) -> None:
    path = tmp_path / "my_passes.py"
    path.write_text(PLUGIN)
    assert load_plugin(str(path)) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert fresh_registry["mine-from-a-file"]().run(None) == 0  # type: ignore[arg-type]
    load_plugin(str(path))  # a second compile in one process


def test_plugin_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_registry: dict[str, type[Pass]]
) -> None:
    (tmp_path / "a_plugin_module.py").write_text(
        PLUGIN.replace("mine-from-a-file", "from-a-module")
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    load_plugin("a_plugin_module")
    assert "from-a-module" in fresh_registry
    sys.modules.pop("a_plugin_module")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "the plugin defines no pass"),
        ("import nothing_of_this_name\n", "ModuleNotFoundError: No module named"),
        (PLUGIN + "\n1 / 0\n", "ZeroDivisionError: division by zero"),
        (PLUGIN.replace("mine-from-a-file", "canonicalize"), "two passes are named canonicalize"),
        ("def broken(:\n", "SyntaxError"),
    ],
)
def test_broken_plugins(
    text: str, message: str, tmp_path: Path, fresh_registry: dict[str, type[Pass]]
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    before = dict(fresh_registry)
    with pytest.raises(UsageError, match="the plugin") as raised:
        load_plugin(str(path))
    assert message in str(raised.value)
    assert str(path) in str(raised.value)
    assert fresh_registry == before


def test_no_such_plugin(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such plugin file"):
        load_plugin(str(tmp_path / "absent.py"))
    with pytest.raises(UsageError, match="the plugin fails on import"):
        load_plugin("no_module_of_this_name")
    (tmp_path / "mine.txt").write_text(PLUGIN)
    with pytest.raises(UsageError, match=r"only a \.py file is run"):
        load_plugin(str(tmp_path / "mine.txt"))
