"""The page of each pass, made from its docstring and its options."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qopt.errors import UsageError
from qopt.recipe import Registry, did_you_mean, pass_options, type_name
from qopt.report import Table

HEADINGS = ("Before", "After", "Why", "Needs", "Leaves")

HEAD = """\
# Passes

Generated from the docstrings by `qopt passes --markdown`; do not edit.
"""


@dataclass
class Page:
    """What is told of one pass."""

    name: str
    first_line: str
    exact: bool
    options: dict[str, str]  # name -> type and default
    text: str  # the page as markdown


@dataclass
class Listing:
    """All passes."""

    passes: list[Page]

    def tables(self) -> list[Table]:
        """One row a pass."""
        rows = [(p.name, "" if p.exact else "lossy", p.first_line) for p in self.passes]
        return [Table("", ("pass", "", "what it does"), rows)]


def load_registry(plugins: Sequence[str] = ()) -> Registry:
    """The passes that ship with qopt and those of the given files."""
    from qopt import rewrite

    rewrite.load_builtin_passes()
    for plugin in plugins:
        rewrite.load_plugin(plugin)
    registry: Registry = rewrite.PASSES
    return registry


def first_line(cls: type[Any]) -> str:
    """What a pass does, in a line."""
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def page(cls: type[Any]) -> Page:
    """The page of one pass."""
    exact = bool(getattr(cls, "exact", True))
    options = _options(cls)
    lines = [f"## {cls.name}", "", _sections(inspect.getdoc(cls) or ""), ""]
    lines += ["Exact: it must not change the numbers." if exact else _LOSSY, ""]
    if options:
        lines += ["Options:", "", *(f"- `{name}`: {told}" for name, told in options.items()), ""]
    return Page(cls.name, first_line(cls), exact, options, "\n".join(lines))


_LOSSY = "Not exact: it changes the function, judged by the recipe's gate."


def _options(cls: type[Any]) -> dict[str, str]:
    hints = pass_options(cls)
    fields = dataclasses.fields(cls) if hints else ()
    told = {}
    for field in fields:
        if field.name in hints:
            missing = field.default is dataclasses.MISSING
            default = "" if missing else f", default {field.default!r}"
            told[field.name] = f"{type_name(hints[field.name])}{default}"
    return told


def _sections(docstring: str) -> str:
    """The docstring with its headings in bold and the indented parts as code."""
    lines: list[str] = []
    for line in docstring.splitlines():
        heading, colon, rest = line.partition(":")
        if colon and heading in HEADINGS:
            line = f"**{heading}:**{rest.removeprefix(':')}"  # `Before::` before code
            if lines and lines[-1]:
                lines.append("")
        lines.append(line)
    return "\n".join(lines)


def find(name: str, registry: Registry) -> Page:
    """The page of the pass of that name."""
    if name not in registry:
        raise UsageError(
            f"no pass {name!r}{did_you_mean(name, registry)}", todo="`qopt passes` lists them"
        )
    return page(registry[name])


def listing(registry: Registry) -> Listing:
    """All passes by name."""
    return Listing([page(registry[name]) for name in sorted(registry)])


def document(registry: Registry) -> str:
    """docs/passes.md."""
    pages = listing(registry).passes
    rows = [f"| [{p.name}](#{p.name}) | {p.first_line} |" for p in pages]
    table = "\n".join(["| pass | what it does |", "|---|---|", *rows])
    return "\n".join([HEAD, table, "", *(p.text for p in pages)]).rstrip("\n") + "\n"
