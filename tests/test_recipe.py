"""Recipes: what is merged, what is refused, and that every refusal names its line."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from qopt.errors import ResourceError, UsageError
from qopt.recipe import (
    Recipe,
    builtin_recipes,
    check_order,
    first_comment,
    percent,
    recipe_text,
    size_in_bytes,
)


@dataclass
class Canonicalize:
    name: ClassVar[str] = "canonicalize"
    after: ClassVar[tuple[str, ...]] = ()


@dataclass
class FuseAttention:
    name: ClassVar[str] = "fuse-attention"
    after: ClassVar[tuple[str, ...]] = ("canonicalize",)
    max_head_dim: int = 256
    scale: float | None = None
    mode: Literal["fast", "safe"] = "fast"
    sizes: tuple[int, ...] = (1, 2)
    label: str = ""
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.max_head_dim > 1024:
            raise ValueError("no head is that wide")


@dataclass
class SlidingWindow:
    window: int
    name: ClassVar[str] = "sliding-window"
    requires: ClassVar[tuple[str, ...]] = ("fuse-attention",)


@dataclass
class Clean:
    name: ClassVar[str] = "clean"
    after: ClassVar[tuple[str, ...]] = ("fuse-attention", "sliding-window")


@dataclass
class Egg:
    name: ClassVar[str] = "egg"
    after: ClassVar[tuple[str, ...]] = ("hen",)


@dataclass
class Hen:
    name: ClassVar[str] = "hen"
    after: ClassVar[tuple[str, ...]] = ("egg",)


REGISTRY: dict[str, type[Any]] = {
    cls.name: cls for cls in (Canonicalize, FuseAttention, SlidingWindow, Clean, Egg, Hen)
}


def resolve(folder: Path, text: str, **flags: Any) -> Recipe:
    path = folder / "low-latency.yaml"
    path.write_text(text)
    return Recipe.resolve(str(path), REGISTRY, **flags)


def names(recipe: Recipe) -> list[str]:
    return [entry.name for entry in recipe.passes]


def refusal(folder: Path, text: str, **flags: Any) -> str:
    with pytest.raises(UsageError) as caught:
        resolve(folder, text, **flags).instances(REGISTRY)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(f"{folder}/", "")


FULL = """\
# all keys
schema: 1
target: onnx
dtype: fp16
opset: 23
logits: all
check: off
calibration: {text: self, sequences: 8, length: 64, seed: 3}
passes:
  - canonicalize
  - fuse-attention: {max_head_dim: 128, sizes: [4, 5], expect: all}
  - clean:
gate: {perplexity: +1%, kl: 0.02}
limits: {size: 200MB, decode_ms: 12}
generation: {preset: high-quality}
threads: 2
"""


def test_every_key(tmp_path: Path) -> None:
    recipe = resolve(tmp_path, FULL)
    assert recipe.name == "low-latency"
    assert (recipe.target, recipe.dtype, recipe.opset) == ("onnx", "fp16", 23)
    assert (recipe.logits, recipe.check, recipe.threads) == ("all", "off", 2)
    assert (recipe.calibration.sequences, recipe.calibration.length) == (8, 64)
    assert (recipe.gate.perplexity, recipe.limits.size) == ("+1%", "200MB")
    assert recipe.generation.preset == "high-quality"
    made = recipe.instances(REGISTRY)
    assert made[1] == (FuseAttention(max_head_dim=128, sizes=(4, 5)), "all")
    assert [expect for _, expect in made] == [None, "all", None]


def test_defaults(tmp_path: Path) -> None:
    recipe = resolve(tmp_path, "passes: [canonicalize]")
    assert (recipe.target, recipe.dtype, recipe.opset) == ("onnx-cpu", "auto", "auto")
    assert (recipe.logits, recipe.check) == ("last", "every-pass")


def test_dump_is_stable_and_complete(tmp_path: Path) -> None:
    recipe = resolve(tmp_path, FULL)
    again = resolve(tmp_path, recipe.dump())
    assert again.dump() == recipe.dump()
    assert again.instances(REGISTRY) == recipe.instances(REGISTRY)
    assert "mode: fast" in recipe.dump(), "defaults decide the output too"


def test_replace_what_was_auto(tmp_path: Path) -> None:
    recipe = resolve(tmp_path, "passes: [canonicalize]").replace(dtype="fp32", opset=21)
    assert "dtype: fp32\nopset: 21\n" in recipe.dump()
    with pytest.raises(ValueError, match="dtype"):
        recipe.replace(dtype="fp31")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "  - fuse-attention: {max_headdim: 3}",
            "low-latency.yaml:7: fuse-attention has no option 'max_headdim'; it has: "
            "max_head_dim (int), scale (float | None), mode (fast | safe), "
            "sizes (tuple[int, ...]), label (str), names (list[str])",
        ),
        (
            "  - fuse-attention: {max_head_dim: wide}",
            "low-latency.yaml:7: fuse-attention.max_head_dim must be int, not 'wide'",
        ),
        (
            "  - fuse-attention: {max_head_dim: true}",
            "low-latency.yaml:7: fuse-attention.max_head_dim must be int, not True",
        ),
        (
            "  - fuse-attention: {mode: reckless}",
            "low-latency.yaml:7: fuse-attention.mode must be fast | safe, not 'reckless'",
        ),
        (
            "  - fuse-attention: {expect: some}",
            "low-latency.yaml:7: fuse-attention.expect must be all or a number, not 'some'",
        ),
        (
            "  - fuse-attention: {max_head_dim: 4096}",
            "low-latency.yaml:7: fuse-attention: no head is that wide",
        ),
        ("  - clean: {x: 1}", "low-latency.yaml:7: clean has no option 'x'; it has none"),
        ("  - fuse-atention", "low-latency.yaml:7: no pass 'fuse-atention'; did you mean fuse-att"),
        ("  - {clean: , egg: }", 'low-latency.yaml:7: {"clean": null, "egg": null} is no pass'),
        ("  - 7", "low-latency.yaml:7: 7 is no pass"),
        ("  - clean: 7", 'low-latency.yaml:7: {"clean": 7} is no pass'),
        ("target: onnx", "low-latency.yaml:7: the key 'target' stands here twice"),
        ("chekc: final", "low-latency.yaml:7: unknown key 'chekc'; did you mean check?"),
        (
            "check: never",
            "low-latency.yaml:7: check should be 'every-pass', 'final' or 'off', not 'never'",
        ),
        ("opset: new", "low-latency.yaml:7: opset must be auto or a number above 0, not 'new'"),
        ("gate: {ppl: 1}", "low-latency.yaml:7: unknown key 'ppl'"),
        ("gate: {perplexity: '1'}", "low-latency.yaml:7: gate.perplexity must be a percentage"),
        ("limits: {size: big}", "low-latency.yaml:7: limits.size must be a size such as 200MB"),
        ("calibration: {length: 0}", "low-latency.yaml:7: calibration.length should be greater"),
        ("calibration: {length: '9'}", "low-latency.yaml:7: calibration.length should be a whole"),
        ("drop: clean", "low-latency.yaml:7: drop should be a list, not 'clean'"),
        ("gate: 3", "low-latency.yaml:7: gate should be a map of keys and values, not 3"),
        ("drop: [clene]", "low-latency.yaml:7: the recipe has no pass 'clene'"),
        ("add: [canonicalize]", "low-latency.yaml:7: the recipe has canonicalize already"),
        ("  - sliding-window", "low-latency.yaml:7: sliding-window requires fuse-attention"),
        ("extends: basline", "low-latency.yaml:7: no recipe 'basline'; did you mean baseline?"),
        ("a: [", "low-latency.yaml:8: this is no YAML"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, line: str, message: str) -> None:
    head = "# a recipe\nschema: 1\ntarget: onnx\n\npasses:\n  - canonicalize\n"
    told = refusal(tmp_path, f"{head}{line}\n")
    assert told.startswith(message)
    assert "\n  do:  " in told


def test_the_line_of_an_option_in_block_style(tmp_path: Path) -> None:
    text = "passes:\n- canonicalize\n- fuse-attention:\n    mode: safe\n    scale: big\n"
    assert refusal(tmp_path, text).startswith("low-latency.yaml:5: fuse-attention.scale must be")


@pytest.mark.parametrize("text", ["", "[]", "just text", "passes: !!python/object:os.system []"])
def test_what_is_no_recipe(tmp_path: Path, text: str) -> None:
    told = refusal(tmp_path, text)
    assert told.startswith("low-latency.yaml")
    assert "\n  do:  " in told


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"cannot read the recipe\n.*'utf-8'[^\n]*\n  do:  save"):
        Recipe.resolve(str(path), REGISTRY)
    with pytest.raises(UsageError, match="it is a folder"):
        Recipe.resolve(str(tmp_path), REGISTRY)

    def forbidden(*_: Any, **__: Any) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", forbidden)  # root may read everything
    with pytest.raises(ResourceError, match=r"Permission denied\n  do:  choose a file"):
        Recipe.resolve(str(path), REGISTRY)


def test_a_future_schema(tmp_path: Path) -> None:
    message = refusal(tmp_path, "new_key: 1\nschema: 2\npasses: []")
    assert message.startswith("low-latency.yaml:2: schema 2 is not known; this qopt reads schema 1")
    assert "upgrade qopt" in message


def test_missing_option(tmp_path: Path) -> None:
    message = refusal(tmp_path, "passes:\n- fuse-attention\n- sliding-window\n")
    assert message.startswith("low-latency.yaml:3: sliding-window needs the option window (int)\n")


# --- inheritance -----------------------------------------------------------------------------


def test_maps_merge_and_lists_replace(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(
        "dtype: fp16\ncalibration: {length: 64, seed: 9}\npasses: [canonicalize, clean]\n"
    )
    recipe = resolve(tmp_path, "extends: parent.yaml\ncalibration: {length: 8}\npasses: [clean]")
    assert recipe.dtype == "fp16"
    assert (recipe.calibration.length, recipe.calibration.seed) == (8, 9)
    assert names(recipe) == ["clean"]
    assert names(resolve(tmp_path, "extends: parent.yaml")) == ["canonicalize", "clean"]


def test_add_goes_to_the_earliest_place_and_drop_removes(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text("passes: [canonicalize, clean]\n")
    recipe = resolve(
        tmp_path, "extends: parent.yaml\nadd: [{sliding-window: {window: 4}}, fuse-attention]\n"
    )
    assert names(recipe) == ["canonicalize", "fuse-attention", "sliding-window", "clean"]
    recipe = resolve(tmp_path, "extends: parent.yaml\ndrop: [clean]\nadd: [fuse-attention]")
    assert names(recipe) == ["canonicalize", "fuse-attention"]


def test_an_error_in_the_parent_names_the_parent(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text("passes:\n- canonicalise\n")
    assert refusal(tmp_path, "extends: parent.yaml").startswith("parent.yaml:2: no pass")


def test_a_recipe_that_extends_itself(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text("extends: low-latency.yaml\n")
    message = refusal(tmp_path, "extends: parent.yaml")
    assert "low-latency.yaml extends parent.yaml extends low-latency.yaml" in message


# --- order -----------------------------------------------------------------------------------


def test_a_broken_constraint_names_the_pair(tmp_path: Path) -> None:
    message = refusal(tmp_path, "passes:\n- fuse-attention\n- canonicalize\n")
    assert message.startswith("low-latency.yaml:1: ") is False
    assert message.startswith("low-latency.yaml:2: fuse-attention must come after canonicalize")


def test_a_cycle_is_named(tmp_path: Path) -> None:
    for text in ("passes: [hen, egg]", "passes: [hen]\nadd: [egg]"):
        assert "hen before egg before hen" in refusal(tmp_path, text).replace(
            "egg before hen before egg", "hen before egg before hen"
        )


def test_a_cycle_among_passes_that_do_not_run_is_no_matter() -> None:
    check_order(["canonicalize", "hen"], REGISTRY)


def test_a_pass_may_run_again(tmp_path: Path) -> None:
    again = "passes: [canonicalize, fuse-attention, canonicalize]"
    assert names(resolve(tmp_path, again)) == ["canonicalize", "fuse-attention", "canonicalize"]


# --- flags -----------------------------------------------------------------------------------

THREE = "target: onnx\npasses: [canonicalize, fuse-attention, clean]\n"


def test_flags_override_keys(tmp_path: Path) -> None:
    recipe = resolve(tmp_path, THREE, target="onnx-cpu", dtype="fp16", opset=None, check="off")
    assert (recipe.target, recipe.dtype, recipe.opset) == ("onnx-cpu", "fp16", "auto")
    assert refusal(tmp_path, THREE, dtype="fp3").startswith("--dtype: dtype should be 'auto'")


@pytest.mark.parametrize(
    ("flag", "option", "value"),
    [
        ("max_head_dim=64", "max_head_dim", 64),
        ("scale=0.5", "scale", 0.5),
        ("scale=2", "scale", 2.0),
        ("scale=null", "scale", None),
        ("mode=safe", "mode", "safe"),
        ("sizes=[7, 8]", "sizes", (7, 8)),
        ("label=123", "label", "123"),
        ("label={", "label", "{"),
        ("label=a=b.c", "label", "a=b.c"),
    ],
)
def test_set(tmp_path: Path, flag: str, option: str, value: object) -> None:
    recipe = resolve(tmp_path, THREE, sets=[f"fuse-attention.{flag}"])
    assert recipe.passes[1].options[option] == value


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("fuse-attention.max_head_dim=x", "max_head_dim must be int"),
        ("fuse-attention.width=1", "has no option 'width'"),
        ("fuse-atention.width=1", "did you mean fuse-attention?"),
        ("fuse-attention", "is not of the form PASS.OPTION=VALUE"),
    ],
)
def test_wrong_set(tmp_path: Path, flag: str, message: str) -> None:
    assert f"--set {flag}" in (text := refusal(tmp_path, THREE, sets=[flag]))
    assert message in text


def test_set_expect(tmp_path: Path) -> None:
    assert resolve(tmp_path, THREE, sets=["clean.expect=3"]).passes[2].expect == 3


def test_skip_stop_after_and_add(tmp_path: Path) -> None:
    assert names(resolve(tmp_path, THREE, skip=["fuse-attention"])) == ["canonicalize", "clean"]
    assert names(resolve(tmp_path, THREE, stop_after="canonicalize")) == ["canonicalize"]
    assert names(resolve(tmp_path, "passes: [clean]", add=["fuse-attention"]))[0] != "clean"
    assert "--skip x" in refusal(tmp_path, THREE, skip=["x"])
    assert "--stop-after x" in refusal(tmp_path, THREE, stop_after="x")


# --- finding ---------------------------------------------------------------------------------


def test_builtin_recipes_are_found_with_and_without_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert {"baseline", "low-latency"} <= set(builtin_recipes())
    text = recipe_text("baseline")
    assert recipe_text("baseline.yaml") == text
    (tmp_path / "baseline").mkdir()  # an output folder of that name is no recipe
    assert recipe_text("baseline") == text
    (tmp_path / "baseline.yaml").write_text("# mine\n")
    assert recipe_text("baseline.yaml") == "# mine\n"
    assert recipe_text("baseline") == text


def test_own_recipe_may_extend_the_builtin_of_its_name(tmp_path: Path) -> None:
    registry = {name: type("P", (), {}) for name in [*BASELINE, "fold-norm-weight"]}
    path = tmp_path / "low-latency.yaml"
    path.write_text("extends: low-latency\ndtype: fp32\n")
    recipe = Recipe.resolve(str(path), registry)
    assert recipe.dtype == "fp32"
    assert "fold-norm-weight" in names(recipe)


def test_unknown_recipe() -> None:
    with pytest.raises(UsageError, match="did you mean low-latency") as caught:
        Recipe.resolve("low-latancy.yaml", REGISTRY)
    assert "baseline, low-latency" in str(caught.value)


BASELINE = [
    "canonicalize",
    "fold-constants",
    "eliminate-common-subexpressions",
    "fuse-rms-norm",
    "fuse-layer-norm",
    "fuse-rotary-embedding",
    "fuse-gelu",
    "fuse-silu-mul",
    "merge-qkv",
    "merge-gate-up",
    "last-token-logits",
    "materialize-kv-cache",
    "fuse-add-rms-norm",
    "widen-residual",
    "eliminate-dead-code",
]


def test_shipped_recipes() -> None:
    registry = {name: type("P", (), {}) for name in [*BASELINE, "fold-norm-weight"]}
    baseline = Recipe.resolve("baseline", registry)
    assert (baseline.dtype, baseline.logits) == ("fp32", "all")
    assert names(baseline) == BASELINE
    fast = Recipe.resolve("low-latency", registry)
    assert (fast.dtype, fast.logits) == ("auto", "last")
    assert [name for name in names(fast) if name not in BASELINE] == ["fold-norm-weight"]
    for text in builtin_recipes().values():
        assert first_comment(text).endswith(".")


def test_units() -> None:
    assert percent("+1.5%") == pytest.approx(0.015)
    assert size_in_bytes("200MB") == 200_000_000
    assert size_in_bytes("1GiB") == 2**30
    assert size_in_bytes(12) == 12
