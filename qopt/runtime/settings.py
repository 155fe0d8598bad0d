"""How to generate: the options a caller may give, the presets, and the blanks filled in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from qopt.errors import UsageError
from qopt.runtime.sampling import Sampling


class Options(TypedDict, total=False):
    """What `generate` and its kin take; what is absent or None comes from the preset."""

    preset: str | None  # low-latency | high-quality; default: the artifact's
    max_new_tokens: int | None
    sample: bool | None  # draw at the preset's temperature; implied by the filters and by a seed
    temperature: float | None  # 0 is greedy
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | Sequence[int | None] | None  # one for all rows, or one each
    stop: str | Sequence[str] | None
    min_new_tokens: int | None  # no EOS before so many
    ignore_eos: bool | None


@dataclass(frozen=True)
class Preset:
    """Defaults of a generation."""

    temperature: float  # where nothing is said
    sampling_temperature: float  # where sampling is asked for
    max_new_tokens: int


PRESETS = {
    "low-latency": Preset(temperature=0.0, sampling_temperature=0.1, max_new_tokens=128),
    "high-quality": Preset(temperature=0.7, sampling_temperature=0.7, max_new_tokens=512),
}


@dataclass(frozen=True)
class Settings:
    """Options with every blank filled in."""

    sampling: Sampling
    max_new_tokens: int
    min_new_tokens: int
    seed: int | Sequence[int | None] | None
    stop: tuple[str, ...]
    ignore_eos: bool

    def seeds(self, rows: int) -> list[int | None]:
        """One seed a row."""
        if self.seed is None or isinstance(self.seed, int):
            return [self.seed] * rows
        if len(self.seed) != rows:
            raise UsageError(f"{len(self.seed)} seeds for {rows} prompts", todo="give one each")
        return list(self.seed)


def settle(options: Options, default_preset: str) -> Settings:
    """Fill in the blanks from the preset."""
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    unknown = sorted(set(given) - set(Options.__annotations__))
    if unknown:
        raise UsageError(
            f"no such option: {', '.join(unknown)}",
            todo=f"there are: {', '.join(Options.__annotations__)}",
        )
    name = given.get("preset", default_preset)
    if name not in PRESETS:
        raise UsageError(f"no preset {name!r}", todo=f"choose one of: {', '.join(PRESETS)}")
    preset = PRESETS[name]
    implied = any(option in given for option in ("top_k", "top_p", "min_p", "seed"))
    temperature = preset.temperature
    if given.get("sample", implied):
        temperature = preset.sampling_temperature
    elif "sample" in given:
        temperature = 0.0
    filters = {k: given[k] for k in ("top_k", "top_p", "min_p", "repetition_penalty") if k in given}
    stop = given.get("stop", ())
    settings = Settings(
        sampling=Sampling(temperature=given.get("temperature", temperature), **filters),
        max_new_tokens=given.get("max_new_tokens", preset.max_new_tokens),
        min_new_tokens=given.get("min_new_tokens", 0),
        seed=given.get("seed"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        ignore_eos=given.get("ignore_eos", False),
    )
    if settings.max_new_tokens < 1:
        raise UsageError(
            f"max_new_tokens is {settings.max_new_tokens}, it must be 1 or more",
            todo="give at least 1",
        )
    return settings
