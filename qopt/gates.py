"""A recipe's `gate:` and `limits:`: what the finished artifact must be, and what it may cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qopt.calibration import first_held_back
from qopt.errors import GateError, LimitError, UnsupportedError, UsageError
from qopt.recipe import Gate, Limits, Recipe, percent, size_in_bytes
from qopt.report import CheckRow
from qopt.runtime.session import device_at_hand
from qopt.target import find_target

if TYPE_CHECKING:
    from qopt.sources import ModelSource

PROMPT, NEW, ROUNDS = 512, 32, 3  # of the measurement behind a limit on milliseconds


def measured(recipe: Recipe) -> bool:
    """Whether the finished artifact is going to be run."""
    return recipe.gate != Gate() or recipe.limits != Limits()


def refuse_impossible(recipe: Recipe, source: ModelSource) -> None:
    """Refuse, before any work, a gate that nothing could be held to."""
    timed = recipe.limits.prefill_ms is not None or recipe.limits.decode_ms is not None
    if timed and device_at_hand(recipe.target) == "cpu":
        raise UsageError(
            f"limits: a time of target {recipe.target} cannot be measured here",
            why="there is no CUDA provider or no GPU, and another device's time says nothing",
            todo="compile where there is one, or leave prefill_ms and decode_ms out",
        )
    if recipe.gate == Gate():
        return
    if recipe.logits == "last" and find_target(recipe.target).format == "torchscript":
        raise UsageError(
            "gate: needs the logits of every position",
            why=f"target {recipe.target} gives what `logits:` says, and that is `last`",
            todo="write logits: all in the recipe",
        )
    text = recipe.calibration.text
    if text == "self" or not Path(text).is_file():
        raise UsageError(
            "gate: needs a text to measure on",
            why=f"calibration.text is {text!r}, which is no file",
            todo="write calibration: {text: FILE} in the recipe",
        )
    if source.kind != "decoder":
        raise UnsupportedError(
            "gate: is measured on a text, which only a decoder reads",
            where=source.where,
            todo="leave gate: out of the recipe",
        )


def hold(
    recipe: Recipe, artifact: Path, source: ModelSource, max_ram: str | None = None
) -> list[CheckRow]:
    """Measure what the recipe limits; raises `GateError` or `LimitError` at the first breach."""
    rows = []
    if recipe.gate != Gate():
        rows.append(quality(recipe, artifact, source, max_ram))
        if not rows[-1].passed:
            raise GateError(
                "the artifact misses the recipe's gate",
                why=breach(rows[-1]),
                todo="loosen the gate, or leave out what costs the quality",
            )
    if recipe.limits != Limits():
        rows.append(cost(recipe.limits, artifact))
        if not rows[-1].passed:
            raise LimitError(
                "the artifact misses the recipe's limits",
                why=breach(rows[-1]),
                todo="raise the limit",
            )
    return rows


def breach(row: CheckRow) -> str:
    """The figures that exceed what they are held to."""
    return ", ".join(
        f"{name} is {row.figures[name]:.4g}, the limit is {most:.4g}"
        for name, most in row.limits.items()
        if row.figures[name] > most
    )


def quality(
    recipe: Recipe, artifact: Path, source: ModelSource, max_ram: str | None = None
) -> CheckRow:
    """Perplexity and KL against the original in fp32, on the last fifth of the text's windows."""
    from qopt.evaluate import count_windows, evaluate

    text, length = Path(recipe.calibration.text), recipe.calibration.length
    total = count_windows(artifact, text, length)
    first = first_held_back(total)
    found = evaluate(
        artifact,
        text,
        against=source,
        windows=total - first,
        length=length,
        first=first,
        max_ram=max_ram,
        device=device_at_hand(recipe.target),
    )
    assert found.against_perplexity is not None
    assert found.kl is not None
    rise = (found.perplexity / found.against_perplexity - 1) * 100
    figures = {"perplexity_%": rise, "kl": found.kl}
    limits = {}
    if recipe.gate.perplexity is not None:
        limits["perplexity_%"] = percent(recipe.gate.perplexity) * 100
    if recipe.gate.kl is not None:
        limits["kl"] = recipe.gate.kl
    return CheckRow("gate", figures, limits, all(figures[n] <= most for n, most in limits.items()))


def cost(limits: Limits, artifact: Path) -> CheckRow:
    """The size of the folder, and the speed of a prompt and of a token where they are limited."""
    figures: dict[str, float] = {}
    most: dict[str, float] = {}
    if limits.size is not None:
        files = [path for path in artifact.rglob("*") if path.is_file()]
        figures["size"], most["size"] = (
            sum(p.stat().st_size for p in files),
            size_in_bytes(limits.size),
        )
    if limits.prefill_ms is not None or limits.decode_ms is not None:
        from qopt.bench import bench

        speeds = bench(artifact, prompt=PROMPT, new=NEW, rounds=ROUNDS).artifact
        measured = {
            "prefill_ms": (PROMPT / speeds.prefill_tok_s * 1e3, limits.prefill_ms),
            "decode_ms": (1e3 / speeds.decode_tok_s, limits.decode_ms),
        }
        for name, (figure, limit) in measured.items():
            if limit is not None:
                figures[name], most[name] = figure, limit
    return CheckRow("limits", figures, most, all(figures[n] <= limit for n, limit in most.items()))
