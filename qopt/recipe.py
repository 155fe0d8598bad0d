"""Recipes: YAML in, an ordered list of passes out, and errors that name the file and the line."""

from __future__ import annotations

import dataclasses
import difflib
import io
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, cast

import networkx as nx
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from qopt.errors import ResourceError, UsageError

SCHEMA = 1

SHOWN = "`qopt recipes baseline` prints a recipe as an example"
USAGE = "`qopt compile --help` shows what there is"

_M = TypeVar("_M", bound=BaseModel)

# a pass class is a dataclass with these names on it; its other fields are its options
Registry = Mapping[str, type[Any]]
_NOT_OPTIONS = frozenset({"name", "exact", "after", "requires", "expect"})

Expect = int | Literal["all"] | None


# --- the schema ------------------------------------------------------------------------------


def percent(text: str) -> float:
    """`+1%` as 0.01."""
    if not re.fullmatch(r"\+?\d+(\.\d+)?\s*%", text):
        raise ValueError("must be a percentage such as +1%")
    return float(text.strip("+% ")) / 100


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size_in_bytes(text: str | int) -> int:
    """`200MB` as 200,000,000; `1GiB` as 2**30."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?i?B)?", str(text), re.IGNORECASE)
    if not found:
        raise ValueError("must be a size such as 200MB or 1GiB")
    return int(float(found[1]) * _UNITS[(found[2] or "B").upper()])


def _percentage(text: str) -> str:
    percent(text)
    return text


def _size(text: object) -> object:
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise ValueError("must be a size such as 200MB or 1GiB")
    size_in_bytes(text)
    return text


def _auto_or_number(value: object) -> object:
    if value != "auto" and (type(value) is not int or value < 1):
        raise ValueError("must be auto or a number above 0")
    return value


_AutoOrNumber = Annotated[int | Literal["auto"], BeforeValidator(_auto_or_number)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Positive = Annotated[int, Field(gt=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Calibration(_Strict):
    """The text that calibration and search see."""

    text: str = "self"
    sequences: _Positive = 32
    length: _Positive = 256
    seed: int = 0


class Gate(_Strict):
    """Quality that the finished artifact must have; exit code 4 otherwise."""

    perplexity: Annotated[str, AfterValidator(_percentage)] | None = None  # rise over fp32
    kl: _Finite | None = None  # mean over tokens, in nats


class Limits(_Strict):
    """What the finished artifact may cost; exit code 5 otherwise."""

    size: Annotated[str | int, BeforeValidator(_size)] | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None


class Generation(_Strict):
    """How the runtime generates unless told otherwise."""

    preset: Literal["low-latency", "high-quality"] = "low-latency"


class Settings(_Strict):
    """Every key of a recipe but its passes."""

    schema_version: int = Field(default=SCHEMA, alias="schema")
    target: str = "onnx-cpu"
    portable: bool = False  # torchscript-cuda: aten ops alone, so that any libtorch loads it
    architectures: list[Literal["sm_80", "sm_90", "sm_100", "gfx942"]] | None = None  # None: all
    dtype: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    opset: _AutoOrNumber = "auto"
    logits: Literal["last", "all"] = "last"
    check: Literal["every-pass", "final", "off"] = "every-pass"
    calibration: Calibration = Calibration()
    gate: Gate = Gate()
    limits: Limits = Limits()
    generation: Generation = Generation()
    threads: _AutoOrNumber = "auto"


class _Document(Settings):
    """One file, as written."""

    extends: str | None = None
    passes: list[Any] | None = None
    add: list[Any] = []
    drop: list[str] = []


class PassEntry(_Strict):
    """One pass of the list with its options, and where it was written."""

    name: str
    options: dict[str, Any] = {}
    expect: Expect = None
    where: str = Field(default="", exclude=True)


class Recipe(Settings):
    """A resolved recipe: what runs is what stands here."""

    name: str = Field(exclude=True)
    passes: list[PassEntry]

    @classmethod
    def resolve(
        cls,
        name: str,
        registry: Registry,
        *,
        add: Sequence[str] = (),
        sets: Sequence[str] = (),
        skip: Sequence[str] = (),
        stop_after: str | None = None,
        **overrides: object,
    ) -> Self:
        """Find, read, merge and check a recipe; the keyword arguments are the command's flags.

        `overrides` are keys of the recipe (target, dtype, opset, logits, check); None means that
        the flag was not given. `sets` holds `pass.option=value`.
        """
        file = _find(name)
        values, passes = _merged(file, registry, ())
        given = {key: value for key, value in overrides.items() if value is not None}
        settings = _validated(Settings, values | given, lambda loc: f"--{loc[0]}", USAGE)
        passes = _placed(passes, [_parsed(entry, registry, "--add") for entry in add], registry)
        passes = _without(passes, skip, lambda dropped: f"--skip {dropped}")
        passes = _cut(passes, stop_after)
        passes = [_with_sets(entry, sets, registry) for entry in passes]
        _refuse_unused_sets(sets, passes)
        check_order([entry.name for entry in passes], registry, {e.name: e.where for e in passes})
        data = settings.model_dump(by_alias=True)
        data["name"] = Path(name).name.removesuffix(".yaml")
        return cls.model_validate(data | {"passes": passes})

    def replace(self, **values: object) -> Self:
        """A copy in which what was `auto` has its value."""
        data = dict(self) | values
        data["schema"] = data.pop("schema_version")
        return type(self).model_validate(data)

    def instances(self, registry: Registry) -> list[tuple[Any, Expect]]:
        """Each pass made with its options, and what it is expected to do."""
        return [(_made(entry, registry), entry.expect) for entry in self.passes]

    def dump(self) -> str:
        """The recipe as YAML: the same bytes for the same recipe."""
        data = self.model_dump(by_alias=True, exclude_none=True, exclude={"passes"})
        data = {key: value for key, value in data.items() if value != {}}
        data["passes"] = CommentedSeq(_flow(entry) for entry in self.passes)
        text = io.StringIO()
        _yaml().dump(data, text)
        return "# resolved: what runs is what is written\n" + text.getvalue()


def _flow(entry: PassEntry) -> str | CommentedMap:
    options = dict(entry.options)
    if entry.expect is not None:
        options["expect"] = entry.expect
    if not options:
        return entry.name
    inner = CommentedMap(json.loads(json.dumps(options)))  # tuples and enums in YAML's own types
    inner.fa.set_flow_style()
    return CommentedMap({entry.name: inner})


# --- finding and reading ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _File:
    shown: str  # its name in messages
    text: str
    folder: Path | None  # None for a built-in recipe


def _find(name: str, folder: Path | None = Path(), where: str | None = None) -> _File:
    """An existing file first, else a built-in recipe with or without its ending."""
    path = None if folder is None or not name else folder / name
    if path is not None and path.is_file():
        return _File(str(path), _text(path), path.parent)
    builtin = builtin_recipes()
    stem = name.removesuffix(".yaml")
    if stem in builtin:
        return _File(f"{stem}.yaml", builtin[stem], None)
    there = "a folder" if path is not None and path.is_dir() else "no file"
    raise UsageError(
        f"no recipe {name!r}{did_you_mean(stem, builtin)}",
        where=where,
        why=f"it is {there}, and the built-in recipes are: {', '.join(builtin)}",
        todo="give a YAML file; `qopt recipes` lists the built-in ones",
    )


def _text(path: Path) -> str:
    where, what = str(path), "cannot read the recipe"
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(what, where=where, why=str(error), todo="save it as UTF-8") from None
    except PermissionError as error:
        todo = "choose a file that you may read"
        raise ResourceError(what, where=where, why=error.strerror, todo=todo) from None
    except OSError as error:
        raise UsageError(what, where=where, why=error.strerror, todo="give a YAML file") from None


def builtin_recipes() -> dict[str, str]:
    """The recipes that ship with qopt: name -> text."""
    files = resources.files("qopt.recipes").iterdir()
    texts = {f.name: f.read_text(encoding="utf-8") for f in files if f.name.endswith(".yaml")}
    return {name.removesuffix(".yaml"): texts[name] for name in sorted(texts)}


def refuse_damaged(name: str) -> None:
    """Refuse what can be seen to be no recipe without knowing the passes, which need torch."""
    _read(_find(name))


def recipe_text(name: str) -> str:
    """A recipe as it was written, with its comments."""
    return _find(name).text


def first_comment(text: str) -> str:
    """The sentence at the top of a recipe."""
    return text.splitlines()[0].lstrip("# ") if text.startswith("#") else ""


def _yaml() -> YAML:
    yaml = YAML(typ="rt")  # round trip: it keeps line numbers
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=4, offset=2)
    return yaml


def _read(file: _File) -> tuple[_Document, CommentedMap]:
    try:
        tree = _yaml().load(file.text)
        data = _plain(tree)
    except DuplicateKeyError as error:
        key = re.search(r'duplicate key "([^"]*)"', str(error.problem))
        raise UsageError(
            f"the key {key[1] if key else ''!r} stands here twice",
            where=_mark(file, error),
            todo="leave one of them out",
        ) from None
    except MarkedYAMLError as error:
        raise UsageError(
            "this is no YAML", where=_mark(file, error), why=str(error.problem), todo=SHOWN
        ) from None
    except (YAMLError, RecursionError) as error:
        raise UsageError("this is no YAML", where=file.shown, why=str(error), todo=SHOWN) from None
    if not isinstance(data, dict):
        kind = {list: "a list", type(None): "empty"}.get(type(data), "a single value")
        raise UsageError(
            "a recipe is a map of keys and values",
            where=file.shown,
            why=f"this file is {kind}",
            todo=SHOWN,
        )
    found = data.get("schema", SCHEMA)
    if isinstance(found, int) and found != SCHEMA:
        raise UsageError(
            f"schema {found} is not known; this qopt reads schema {SCHEMA}",
            where=_where(file, tree, ("schema",)),
            todo="upgrade qopt" if found > SCHEMA else f"write schema: {SCHEMA}",
        )
    return _validated(_Document, data, lambda loc: _where(file, tree, loc)), tree


def _plain(node: Any) -> Any:
    """Plain Python values in place of ruamel's own."""
    plain = getattr(getattr(node, "tag", None), "value", None) is None  # no `!tag` on it
    if plain and isinstance(node, Mapping):
        return {str(key): _plain(value) for key, value in node.items()}
    if plain and isinstance(node, list):
        return [_plain(value) for value in node]
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return kind(node)
    if node is None:
        return None
    raise YAMLError("a recipe holds text, numbers, lists and maps, and no tags")


def _mark(file: _File, error: MarkedYAMLError) -> str:
    mark = error.problem_mark
    return file.shown if mark is None else f"{file.shown}:{mark.line + 1}"


def _where(file: _File, tree: Any, loc: Sequence[int | str]) -> str:
    """File and line of the deepest part of a path that stands in the file."""
    line = None
    for part in loc:
        try:
            found = tree.lc.key(part) if isinstance(tree, CommentedMap) else tree.lc.item(part)
            line, tree = found[0] + 1, tree[part]
        except (AttributeError, KeyError, IndexError, TypeError):
            break
    return file.shown if line is None else f"{file.shown}:{line}"


def _validated(
    model: type[_M],
    data: object,
    where: Callable[[tuple[int | str, ...]], str],
    todo: str = SHOWN,
) -> _M:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
    loc = first["loc"]
    if first["type"] == "extra_forbidden":
        keys = _keys_at(model, loc[:-1])
        what = f"unknown key {loc[-1]!r}{did_you_mean(str(loc[-1]), keys)}"
        raise UsageError(what, where=where(loc), why=f"the keys are: {', '.join(keys)}", todo=todo)
    message = first["msg"].removeprefix("Value error, ").replace("Input should", "should")
    if first["type"] in _KINDS:
        message = f"should be {_KINDS[first['type']]}"
    key = ".".join(str(part) for part in loc)
    raise UsageError(f"{key} {message}, not {first['input']!r}", where=where(loc), todo=todo)


_KINDS = {
    "bool_type": "true or false",
    "dict_type": "a map of keys and values",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "a map of keys and values",
    "string_type": "text",
}


def _keys_at(model: type[BaseModel], loc: Iterable[int | str]) -> list[str]:
    for part in loc:
        model = cast(type[BaseModel], model.model_fields[str(part)].annotation)
    return [field.alias or name for name, field in model.model_fields.items()]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean fuse-rms-norm?`, or nothing when nothing is near."""
    near = difflib.get_close_matches(word, list(known), n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""


# --- merging ---------------------------------------------------------------------------------


def _merged(
    file: _File, registry: Registry, children: tuple[_File, ...]
) -> tuple[dict[str, Any], list[PassEntry]]:
    """The settings and passes of a file on top of its parent's: maps merge, lists replace."""
    if file in children:
        chain = " extends ".join(f.shown for f in (*children[children.index(file) :], file))
        raise UsageError(
            "a recipe extends itself", where=file.shown, why=chain, todo="drop one of the extends"
        )
    document, tree = _read(file)
    values: dict[str, Any] = {}
    passes: list[PassEntry] = []
    if document.extends is not None:
        where = _where(file, tree, ("extends",))
        parent = _find(document.extends, file.folder, where)
        values, passes = _merged(parent, registry, (*children, file))
    own = document.model_dump(by_alias=True, exclude_unset=True)
    listed = {key: own.pop(key, None) for key in ("extends", "passes", "add", "drop")}

    def parsed(key: str) -> list[PassEntry]:
        return [
            _parsed(entry, registry, *_places(file, tree, key, index, entry))
            for index, entry in enumerate(listed[key] or [])
        ]

    if listed["passes"] is not None:
        passes = parsed("passes")
    elif document.extends is None:
        raise UsageError("it lists no passes", where=file.shown, todo="write passes: [...]")
    lines = {name: _where(file, tree, ("drop", i)) for i, name in enumerate(document.drop)}
    passes = _without(passes, document.drop, lambda name: lines[name])
    return _merge_maps(values, own), _placed(passes, parsed("add"), registry)


def _merge_maps(parent: dict[str, Any], child: dict[str, Any]) -> dict[str, Any]:
    merged = dict(parent)
    for key, value in child.items():
        both = isinstance(value, dict) and isinstance(parent.get(key), dict)
        merged[key] = _merge_maps(parent[key], value) if both else value
    return merged


def _places(
    file: _File, tree: CommentedMap, key: str, index: int, entry: object
) -> tuple[str, dict[str, str]]:
    """Where an entry of a list stands, and where each of its options does."""
    places = {}
    if isinstance(entry, dict) and len(entry) == 1:
        [(name, options)] = entry.items()
        for option in options if isinstance(options, dict) else ():
            places[option] = _where(file, tree, (key, index, name, option))
    return _where(file, tree, (key, index)), places


# --- passes and their options ----------------------------------------------------------------


def _parsed(
    entry: object, registry: Registry, where: str, places: Mapping[str, str] | None = None
) -> PassEntry:
    """`name` or `{name: {option: value}}`; `places` says where each option stands."""
    name, options = entry, None
    if isinstance(entry, dict) and len(entry) == 1:
        [(name, options)] = entry.items()
    options = {} if options is None else options
    if not isinstance(name, str) or not isinstance(options, dict):
        raise UsageError(
            f"{json.dumps(entry)} is no pass",
            where=where,
            todo="write NAME or {NAME: {OPTION: VALUE}}",
        )
    parsed = PassEntry(name=name, where=where, options=_defaults(_known(name, where, registry)))
    for option, value in options.items():
        parsed = _with_option(parsed, option, value, (places or {}).get(option, where), registry)
    return parsed


def _known(name: str, where: str, registry: Registry) -> type[Any]:
    if name not in registry:
        raise UsageError(
            f"no pass {name!r}{did_you_mean(name, registry)}",
            where=where,
            todo="`qopt passes` lists them; passes of your own come in by --plugin FILE",
        )
    return registry[name]


def pass_options(cls: type[Any]) -> dict[str, Any]:
    """The options of a pass and their types: its dataclass fields."""
    if not dataclasses.is_dataclass(cls):
        return {}
    hints = typing.get_type_hints(cls)
    fields = (f.name for f in dataclasses.fields(cls) if f.init)
    return {name: hints[name] for name in fields if name not in _NOT_OPTIONS}


def _defaults(cls: type[Any]) -> dict[str, Any]:
    """The options that have a value of their own; written down, since they decide the output."""
    options = pass_options(cls)
    values = {}
    for field in dataclasses.fields(cls) if options else ():
        if field.name in options and field.default is not dataclasses.MISSING:
            values[field.name] = field.default
        elif field.name in options and field.default_factory is not dataclasses.MISSING:
            values[field.name] = field.default_factory()
    return values


def type_name(hint: Any) -> str:
    """A type as a user would write it."""
    if typing.get_origin(hint) is Literal:
        return " | ".join(str(value) for value in typing.get_args(hint))
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _with_option(
    entry: PassEntry, option: str, value: object, where: str, registry: Registry
) -> PassEntry:
    if option == "expect":
        return entry.model_copy(update={"expect": _expected(entry.name, value, where)})
    options = pass_options(registry[entry.name])
    if option not in options:
        listed = ", ".join(f"{name} ({type_name(hint)})" for name, hint in options.items())
        raise UsageError(
            f"{entry.name} has no option {option!r}; "
            + (f"it has: {listed}" if listed else "it has none"),
            where=where,
            todo=f"`qopt passes {entry.name}` tells of its options",
        )
    try:
        typed = _typed(options[option], value)
    except ValidationError:
        kind = type_name(options[option])
        raise UsageError(
            f"{entry.name}.{option} must be {kind}, not {value!r}",
            where=where,
            todo=f"`qopt passes {entry.name}` tells of its options",
        ) from None
    return entry.model_copy(update={"options": entry.options | {option: typed}})


def _typed(hint: Any, value: object) -> Any:
    # as JSON, since strict validation then still takes a list for a tuple
    return TypeAdapter(hint).validate_json(json.dumps(value), strict=True)


def _expected(name: str, value: object, where: str) -> Expect:
    if value == "all" or (type(value) is int and value >= 0):
        return cast(Expect, value)
    raise UsageError(
        f"{name}.expect must be all or a number, not {value!r}",
        where=where,
        todo="write how many rewrites there must be, or all",
    )


def _with_sets(entry: PassEntry, sets: Sequence[str], registry: Registry) -> PassEntry:
    for text in sets:
        name, option, value = _split_set(text)
        if name == entry.name:
            where = f"--set {text}"
            try:
                entry = _with_option(entry, option, _plain(_yaml().load(value)), where, registry)
            except (UsageError, YAMLError) as error:  # text that reads like a number, or like YAML
                if pass_options(registry[name]).get(option) is str:
                    entry = _with_option(entry, option, value, where, registry)
                elif isinstance(error, UsageError):
                    raise
                else:
                    raise UsageError("the value is no YAML", where=where, todo=USAGE) from None
    return entry


def _split_set(text: str) -> tuple[str, str, str]:
    found = re.fullmatch(r"([^=.]+)\.([^=.]+)=(.*)", text, re.DOTALL)
    if not found:
        raise UsageError(
            f"--set {text} is not of the form PASS.OPTION=VALUE",
            todo="`qopt passes PASS` shows a pass's options",
        )
    return found[1], found[2], found[3]


def _refuse_unused_sets(sets: Sequence[str], passes: Sequence[PassEntry]) -> None:
    names = [entry.name for entry in passes]
    for text in sets:
        name = _split_set(text)[0]
        if name not in names:
            raise UsageError(
                f"the recipe has no pass {name!r}{did_you_mean(name, names)}",
                where=f"--set {text}",
                todo=f"it has: {', '.join(names)}",
            )


def _made(entry: PassEntry, registry: Registry) -> Any:
    cls = registry[entry.name]
    missing = [name for name in pass_options(cls) if name not in entry.options]
    if missing:
        needed = f"{missing[0]} ({type_name(pass_options(cls)[missing[0]])})"
        raise UsageError(
            f"{entry.name} needs the option {needed}",
            where=entry.where,
            todo=f"give it a value: --set {entry.name}.{missing[0]}=VALUE, or in the recipe",
        )
    try:
        return cls(**entry.options)
    except ValueError as error:
        raise UsageError(
            f"{entry.name}: {error}",
            where=entry.where,
            todo=f"`qopt passes {entry.name}` tells of its options",
        ) from None


# --- order -----------------------------------------------------------------------------------


def _without(
    passes: Sequence[PassEntry], names: Iterable[str], where: Callable[[str], str]
) -> list[PassEntry]:
    names = list(names)
    there = [entry.name for entry in passes]
    for name in names:
        if name not in there:
            raise UsageError(
                f"the recipe has no pass {name!r}{did_you_mean(name, there)}",
                where=where(name),
                todo=f"it has: {', '.join(there)}",
            )
    return [entry for entry in passes if entry.name not in names]


def _cut(passes: list[PassEntry], stop_after: str | None) -> list[PassEntry]:
    if stop_after is None:
        return passes
    _without(passes, [stop_after], lambda name: f"--stop-after {name}")
    last = max(i for i, entry in enumerate(passes) if entry.name == stop_after)
    return passes[: last + 1]


def _before(name: str, registry: Registry) -> set[str]:
    """The passes that must have run before this one, as far as they run at all."""
    cls = registry[name]
    return {*getattr(cls, "after", ()), *getattr(cls, "requires", ())}


def _placed(
    passes: Sequence[PassEntry], added: Sequence[PassEntry], registry: Registry
) -> list[PassEntry]:
    """Each added pass at the earliest place that its ordering constraints allow."""
    order = [entry.name for entry in added]
    check_no_cycle([*order, *(entry.name for entry in passes)], registry)
    graph = _constraints(order, registry)
    placed = list(passes)
    entries = {entry.name: entry for entry in added}
    for name in nx.lexicographical_topological_sort(graph, key=order.index):
        if any(entry.name == name for entry in placed):
            raise UsageError(
                f"the recipe has {name} already", where=entries[name].where, todo="do not add it"
            )
        before = _before(name, registry)
        index = max((i for i, e in enumerate(placed) if e.name in before), default=-1)
        placed.insert(index + 1, entries[name])
    return placed


def _constraints(names: Sequence[str], registry: Registry) -> nx.DiGraph[str]:
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(names)
    there = set(names)
    for name in graph:
        graph.add_edges_from((other, name) for other in sorted(_before(name, registry) & there))
    return graph


def check_no_cycle(names: Sequence[str], registry: Registry) -> None:
    """Refuse passes each of which must come before the other."""
    try:
        cycle = nx.find_cycle(_constraints(names, registry))
    except nx.NetworkXNoCycle:
        return
    chain = " before ".join([edge[0] for edge in cycle] + [cycle[0][0]])
    raise UsageError(
        "the ordering constraints of these passes form a cycle", why=chain, todo="drop one of them"
    )


def check_order(
    names: Sequence[str], registry: Registry, where: Mapping[str, str] | None = None
) -> None:
    """Refuse a list that breaks a constraint `after` or `requires` of one of its passes."""
    check_no_cycle(names, registry)
    places = where or {}
    first = {name: index for index, name in reversed(list(enumerate(names)))}
    for name in first:
        for other in getattr(registry[name], "requires", ()):
            if other not in first:
                raise UsageError(
                    f"{name} requires {other}, which the recipe does not have",
                    where=places.get(name) or None,
                    todo=f"add {other}, or drop {name}",
                )
        for other in sorted(_before(name, registry)):
            if first.get(other, -1) > first[name]:
                raise UsageError(
                    f"{name} must come after {other}",
                    where=places.get(name) or None,
                    todo=f"move {name} behind {other}",
                )
