"""The rules of the tree: one pass a file, packages that are listed, arrows that point inward."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parent.parent
PASS_FILES = sorted(p for p in (ROOT / "passes").glob("*.py") if p.name != "__init__.py")
HEADINGS = ("Before:", "After:", "Why:", "Needs:", "Leaves:")

each_pass_file = pytest.mark.parametrize("path", PASS_FILES, ids=lambda p: p.stem)


def test_the_wheel_lists_every_folder_of_code() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    homes = tool["package-dir"]
    listed = {homes.get(name, name.replace(".", "/")) for name in tool["packages"]}
    tops = ("qopt", "passes", "recipes")
    folders = {
        path.parent.relative_to(ROOT).as_posix()
        for top in tops
        for path in (ROOT / top).rglob("*.py")
    }
    assert listed == folders


def test_no_folder_hides_a_package_that_others_import() -> None:
    # `python -m` puts the working directory first, and transformers imports a package `kernels`
    assert not (ROOT / "kernels").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))


def passes_in(path: Path) -> list[type[Any]]:
    """The passes that a file defines."""
    from qopt.rewrite import Pass

    module = importlib.import_module(f"qopt.passes.{path.stem}")
    return [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, Pass)
        and value.__module__ == module.__name__
        and value.name
    ]


@each_pass_file
def test_a_pass_file_holds_one_pass_of_its_name(path: Path) -> None:
    (cls,) = passes_in(path)
    assert cls.name == path.stem.replace("_", "-")
    assert cls.__name__.lower() == path.stem.replace("_", "")


@each_pass_file
def test_a_pass_has_a_test_file(path: Path) -> None:
    assert (ROOT / "tests" / "passes" / f"test_{path.stem}.py").is_file()


@each_pass_file
def test_a_pass_has_a_page(path: Path) -> None:
    (cls,) = passes_in(path)
    lines = (cls.__doc__ or "").splitlines()
    assert lines[0].endswith("."), "the first line is a sentence"
    found = [heading for line in lines for heading in HEADINGS if line.strip().startswith(heading)]
    assert found == list(HEADINGS)


@each_pass_file
def test_a_pass_is_in_a_recipe(path: Path) -> None:
    assert path.stem.replace("_", "-") in names_in_recipes()


def names_in_recipes() -> set[str]:
    """Every pass that a shipped recipe names."""
    names: set[str] = set()
    for path in (ROOT / "recipes").glob("*.yaml"):
        data = YAML(typ="safe").load(path)
        for entry in [*(data.get("passes") or []), *data.get("add", [])]:
            names |= set(entry) if isinstance(entry, dict) else {entry}
    return names


def test_recipes_name_only_passes_that_exist() -> None:
    assert names_in_recipes() <= {path.stem.replace("_", "-") for path in PASS_FILES}


def test_shipped_recipes_resolve() -> None:
    from qopt import pages
    from qopt.recipe import Recipe, builtin_recipes

    for name in builtin_recipes():
        assert Recipe.resolve(name, pages.load_registry()).passes


def imports_of(path: Path) -> list[tuple[str, str]]:
    """Every import of a file: where it stands (its outermost function) and what it names."""
    found = []
    for top in ast.parse(path.read_text()).body:
        place = top.name if isinstance(top, ast.FunctionDef | ast.ClassDef) else ""
        for node in ast.walk(top):
            if isinstance(node, ast.Import):
                found += [(place, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found += [(place, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def test_arrows_point_inward() -> None:
    for path in (ROOT / "qopt").rglob("*.py"):
        for _, name in imports_of(path):
            if path.parent.name != "kernels":
                assert not name.startswith(("qopt.passes", "qopt.kernels", "passes")), path
    for path in PASS_FILES:
        for _, name in imports_of(path):
            assert not name.startswith(("passes", "qopt.kernels")), path


@pytest.mark.parametrize("module", ["qopt", "qopt.cli", "qopt.runtime", "qopt.artifact"])
def test_it_imports_without_torch(module: str) -> None:
    load = "import qopt; qopt.load;" if module == "qopt" else ""
    code = f"import sys; import {module}; {load} assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_nothing_is_called_utils() -> None:
    assert not [p for p in ROOT.rglob("*.py") if p.stem in {"utils", "helpers", "misc"}]


def test_the_pages_of_the_passes_are_up_to_date() -> None:
    from qopt import pages

    # not the registry: tests define passes too
    ours = {cls.name: cls for path in PASS_FILES for cls in passes_in(path)}
    assert (ROOT / "docs" / "passes.md").read_text() == pages.document(ours), (
        "run: qopt passes --markdown > docs/passes.md"
    )
