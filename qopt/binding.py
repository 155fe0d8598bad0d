"""Bind a checkpoint's tensors to a module's parameters and buffers, each exactly once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel

from qopt import compat
from qopt.errors import UsageError
from qopt.weights import AbsentSource, LazyWeight

if TYPE_CHECKING:
    from qopt.sources import ModelSource

SHOWN = 5  # names listed in a message


def bind_weights(model: nn.Module, source: ModelSource) -> dict[str, LazyWeight]:
    """Give a lazy weight for every parameter and persistent buffer of `model`, by its name there.

    `model` holds no values (meta or fake tensors). Tied names get the same `LazyWeight` object.
    What the user should know is appended to `source.notes`.
    """
    expected = model.state_dict(keep_vars=True)
    if not source.with_weights:
        bound = {name: absent_weight(name, tensor) for name, tensor in expected.items()}
        if isinstance(model, PreTrainedModel):
            bound |= {name: bound[owner] for name, owner in compat.tied_names(model).items()}
        return bound
    if isinstance(model, PreTrainedModel) and source.module is None:
        bound = _bind_checkpoint(model, expected, source)
    else:
        bound = {name: source.tensors[name] for name in expected if name in source.tensors}
        _refuse_missing(set(expected) - set(bound), [], source)
    _check_shapes(bound, expected, source)
    return source.adapter.merge(bound) if source.adapter else bound


def absent_weight(name: str, like: Tensor | LazyWeight) -> LazyWeight:
    """Stand for a weight whose values were not asked for."""
    return LazyWeight.of(AbsentSource(tuple(like.shape), like.dtype, name))


def _bind_checkpoint(
    model: PreTrainedModel, expected: Mapping[str, Tensor], source: ModelSource
) -> dict[str, LazyWeight]:
    tensors = dict(source.tensors)
    tied = {name: owner for name, owner in compat.tied_names(model).items() if name != owner}
    converted = compat.convert_names(model, tensors)
    missing = _missing(expected, converted.weights, tied)
    if missing:
        moved = _move_prefixes(tensors, expected, missing)
        if moved != tensors:
            converted = compat.convert_names(model, moved)
    if converted.twice:
        raise UsageError(
            f"the checkpoint fills {converted.twice[0][0]} twice",
            where=source.where,
            why=f"the second time with {converted.twice[0][1]}",
            todo="remove one of the two",
        )
    bound = converted.weights
    _tie(bound, tied, source)
    ignored_missing, ignored_unexpected = compat.ignored_patterns(model)
    unexpected = _unlike(converted.unexpected, ignored_unexpected)
    _fill_computed(bound, expected, ignored_missing, source)
    _refuse_missing(set(expected) - set(bound), unexpected, source)
    if unexpected:
        source.notes.append(
            f"{len(unexpected)} tensors of the checkpoint have no place in the model and were "
            f"left out: {_some(unexpected)}"
        )
    return bound


def _missing(
    expected: Iterable[str], weights: Mapping[str, LazyWeight], tied: Mapping[str, str]
) -> set[str]:
    partner = dict(tied) | {owner: name for name, owner in tied.items()}
    return {name for name in expected if name not in weights and partner.get(name) not in weights}


def _unlike(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    pattern = re.compile("|".join(f"({p})" for p in patterns) or "$^")
    return [name for name in names if not pattern.search(name)]


def _tie(bound: dict[str, LazyWeight], tied: Mapping[str, str], source: ModelSource) -> None:
    """Share what the config ties, unless the checkpoint holds two different tensors."""
    for name, owner in tied.items():
        if name in bound and owner in bound:
            if bound[name].digest != bound[owner].digest:
                source.notes.append(
                    f"{name} and {owner} are tied by the config but differ in the checkpoint: "
                    "both are kept"
                )
                if source.config is not None:
                    source.config.tie_word_embeddings = False
                continue
            bound[name] = bound[owner]
        elif owner in bound:
            bound[name] = bound[owner]
        elif name in bound:
            bound[owner] = bound[name]
    # Several names may share an owner that only a later pair filled.
    bound |= {
        name: bound[owner] for name, owner in tied.items() if name not in bound and owner in bound
    }


def _fill_computed(
    bound: dict[str, LazyWeight],
    expected: Mapping[str, Tensor],
    ignorable: list[str],
    source: ModelSource,
) -> None:
    """Take from the module what a checkpoint need not hold because the module computes it."""
    may_miss = set(expected) - set(_unlike(expected, ignorable))
    for name, tensor in expected.items():
        has_value = tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)
        computed = name in may_miss or not isinstance(tensor, nn.Parameter)
        if name not in bound and has_value and computed:
            bound[name] = LazyWeight.memory(tensor)
            source.notes.append(f"{name} is not in the checkpoint: the model computes it")


def _refuse_missing(missing: set[str], unexpected: list[str], source: ModelSource) -> None:
    if not missing:
        return
    extra = f"; it has, without a place: {_some(unexpected)}" if unexpected else ""
    raise UsageError(
        f"{len(missing)} parameters of the model are not in the checkpoint",
        where=source.where,
        why=f"missing: {_some(sorted(missing))}{extra}",
        todo="check that config.json belongs to these weights",
    )


def _check_shapes(
    bound: Mapping[str, LazyWeight], expected: Mapping[str, Tensor], source: ModelSource
) -> None:
    for name, tensor in expected.items():
        if bound[name].shape != tuple(tensor.shape):
            raise UsageError(
                f"{name} has shape {list(bound[name].shape)} in the checkpoint, "
                f"{list(tensor.shape)} in the model",
                where=source.where,
                why="config.json does not fit the weights",
                todo="check that config.json belongs to these weights",
            )


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest


# A text model inside a larger checkpoint ---------------------------------------------------


def _move_prefixes(
    tensors: Mapping[str, LazyWeight], expected: Mapping[str, Tensor], missing: set[str]
) -> dict[str, LazyWeight]:
    """Find the prefix under which a larger checkpoint keeps the model, and take it away.

    A prefix pair (theirs, ours) earns a vote for each missing parameter that it finds, shape
    included; the pair with most votes is applied, until none finds anything.
    """
    tensors, missing = dict(tensors), set(missing)
    while missing:
        votes = _prefix_votes(tensors, expected, missing)
        if not votes:
            break
        (best, count), *others = votes.most_common(2)
        if others and others[0][1] == count and count > 1:
            raise UsageError(
                "the checkpoint holds more than one model of this shape",
                why=f"under the prefixes {best[0]!r} and {others[0][0][0]!r}",
                todo="save the one that is meant with its own save_pretrained",
            )
        theirs, ours = best
        moved = {
            name: ours + name.removeprefix(theirs) for name in tensors if name.startswith(theirs)
        }
        if set(moved.values()) & (set(tensors) - set(moved)):
            break
        tensors = {moved.get(name, name): weight for name, weight in tensors.items()}
        missing -= set(moved.values())
    return tensors


def _prefix_votes(
    tensors: Mapping[str, LazyWeight], expected: Mapping[str, Tensor], missing: set[str]
) -> Counter[tuple[str, str]]:
    by_suffix: dict[str, list[tuple[str, str]]] = {}
    for name in tensors:
        for prefix, suffix in _splits(name):
            by_suffix.setdefault(suffix, []).append((prefix, name))
    votes: Counter[tuple[str, str]] = Counter()
    for name in missing:
        for ours, suffix in _splits(name):
            found = [
                (theirs, ours)
                for theirs, candidate in by_suffix.get(suffix, [])
                if tensors[candidate].shape == tuple(expected[name].shape)
            ]
            votes.update(found)
            if found:
                break  # the longest suffix that is found says the shortest prefixes
    return votes


def _splits(name: str) -> list[tuple[str, str]]:
    """Cut `name` at each dot so that at least module and parameter name stay in the suffix."""
    parts = name.split(".")
    return [
        ("".join(f"{part}." for part in parts[:at]), ".".join(parts[at:]))
        for at in range(min(4, len(parts) - 1))
    ]
