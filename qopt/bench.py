"""Prefill and decode speed of an artifact, alone or interleaved with a peer in one run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from qopt.artifact import MANIFEST
from qopt.errors import UsageError
from qopt.report import Table
from qopt.runtime.decoder import Decoder
from qopt.runtime.generate import Model, load
from qopt.runtime.session import Array, default_threads

_THREADS = '{"model": {"decoder": {"session_options": {"intra_op_num_threads": %d}}}}'
LOWEST_ID = 3  # ids below are special tokens in most vocabularies


class Engine(Protocol):
    """Something that decodes greedily; what is timed is only these two calls."""

    name: str
    vocab_size: int
    threads: int | None

    def prepare(self, ids: Array, new: int) -> None:
        """Get ready for a prompt; not timed."""
        ...

    def prefill(self) -> None:
        """Read the prompt and choose the first token."""
        ...

    def decode(self) -> None:
        """Choose `new` more tokens."""
        ...


@dataclass
class Speeds:
    """Tokens a second in each round, of all rows together."""

    engine: str
    threads: int | None  # None: as the engine's own default has it
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)

    @property
    def prefill_tok_s(self) -> float:
        """Median prompt tokens a second."""
        return statistics.median(self.prefill)

    @property
    def decode_tok_s(self) -> float:
        """Median generated tokens a second."""
        return statistics.median(self.decode)


@dataclass
class Bench:
    """What was measured; ratios above 1 mean that the artifact is faster than its peer."""

    prompt: int
    new: int
    batch: int
    rounds: int
    artifact: Speeds
    peer: Speeds | None = None

    @property
    def prefill_ratio(self) -> float | None:
        """Ratio of the medians."""
        return self.artifact.prefill_tok_s / self.peer.prefill_tok_s if self.peer else None

    @property
    def decode_ratio(self) -> float | None:
        """Ratio of the medians."""
        return self.artifact.decode_tok_s / self.peer.decode_tok_s if self.peer else None

    def tables(self) -> list[Table]:
        """Medians of both sides and their ratios."""
        sides = [side for side in (self.artifact, self.peer) if side]
        rows: list[tuple[str, str, str, str]] = [
            (
                s.engine,
                str(s.threads or "its own"),
                f"{s.prefill_tok_s:.0f}",
                f"{s.decode_tok_s:.1f}",
            )
            for s in sides
        ]
        if self.prefill_ratio is not None and self.decode_ratio is not None:
            rows.append(("ratio", "", f"{self.prefill_ratio:.2f}", f"{self.decode_ratio:.2f}"))
        title = f"prompt {self.prompt}, {self.new} new, batch {self.batch}, {self.rounds} rounds"
        return [Table(title, ("engine", "threads", "prefill tok/s", "decode tok/s"), rows)]

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON; a pair's two runs stand next to each other in time."""
        out = asdict(self)
        for key, speeds in (("artifact", self.artifact), ("peer", self.peer)):
            if speeds:
                out[key] |= {
                    "prefill_tok_s": speeds.prefill_tok_s,
                    "decode_tok_s": speeds.decode_tok_s,
                }
        if self.peer:
            out |= {
                "prefill_ratio": self.prefill_ratio,
                "decode_ratio": self.decode_ratio,
                "prefill_pairs": _pairs(self.artifact.prefill, self.peer.prefill),
                "decode_pairs": _pairs(self.artifact.decode, self.peer.decode),
            }
        return out


def bench(
    artifact: str | Path,
    *,
    prompt: int = 512,
    new: int = 64,
    batch: int = 1,
    rounds: int = 5,
    vs: str | Path | None = None,
    threads: int | None = None,
) -> Bench:
    """Time `artifact`, and `vs` in turns with it: B A A B, each round with new random prompts.

    Either may be a qopt artifact, an onnxruntime-genai folder or a transformers folder (eager loop,
    SDPA, fp32). `threads` holds for both; without it qopt and transformers take the physical cores,
    at most 8, while onnxruntime-genai runs as its folder and its own default say (one thread on
    some machines: give `threads` to compare like with like). The first round is not counted.
    """
    if min(prompt, new, batch, rounds) < 1:
        raise UsageError(
            "prompt, new, batch and rounds must all be 1 or more", todo="give numbers above 0"
        )
    engines = [open_engine(Path(folder), threads) for folder in (artifact, vs) if folder]
    speeds = [Speeds(engine.name, engine.threads) for engine in engines]
    vocab_size = min(engine.vocab_size for engine in engines)
    for round_ in range(rounds + 1):
        ids = np.random.default_rng(round_).integers(LOWEST_ID, vocab_size, (batch, prompt))
        # Whoever comes second in a round is some percent faster here, so the order changes.
        pairs = list(zip(engines, speeds, strict=True))
        for engine, speed in pairs[:: -1 if round_ % 2 else 1]:
            prefill, decode = time_once(engine, ids, new)
            if round_:
                speed.prefill.append(prefill)
                speed.decode.append(decode)
    return Bench(prompt, new, batch, rounds, *speeds)


def time_once(engine: Engine, ids: Array, new: int) -> tuple[float, float]:
    """Prefill and decode tokens a second of one prompt."""
    engine.prepare(ids, new)
    start = perf_counter()
    engine.prefill()
    middle = perf_counter()
    engine.decode()
    end = perf_counter()
    return ids.size / (middle - start), len(ids) * new / (end - middle)


def open_engine(folder: Path, threads: int | None = None) -> Engine:
    """What can run this folder."""
    if (folder / MANIFEST).is_file():
        return _Artifact(load(folder, threads=threads), threads)
    if (folder / "genai_config.json").is_file():
        return _Genai(folder, threads)
    if (folder / "config.json").is_file():
        return _Transformers(folder, threads)
    raise UsageError(
        "nothing to time here",
        where=str(folder),
        why=f"it has none of {MANIFEST}, genai_config.json and config.json",
        todo="name an artifact, an onnxruntime-genai folder or a transformers folder",
    )


class _Artifact:
    """A qopt artifact in qopt's own runtime."""

    name = "qopt"

    def __init__(self, model: Model, threads: int | None) -> None:
        self.threads: int | None = threads or default_threads()
        self.vocab_size = model.info.vocab_size or LOWEST_ID + 1
        self._model = model

    def prepare(self, ids: Array, new: int) -> None:
        context = self._model.info.context_length
        if context is not None and ids.shape[1] + new > context:
            raise UsageError(
                f"{ids.shape[1]} + {new} tokens exceed the context of {context}",
                todo="time a shorter prompt, or fewer new tokens",
            )
        self._ids, self._new = ids, new
        self._decoder: Decoder = self._model.decoder(len(ids))
        self._decoder.cache.reserve(ids.shape[1] + new)

    def prefill(self) -> None:
        self._next = self._decoder.forward(self._ids)[:, -1].argmax(axis=1)

    def decode(self) -> None:
        for _ in range(self._new):
            self._next = self._decoder.forward(self._next[:, None])[:, -1].argmax(axis=1)


class _Genai:
    """A folder in onnxruntime-genai."""

    name = "onnxruntime-genai"

    def __init__(self, folder: Path, threads: int | None) -> None:
        self.threads = threads
        try:
            import onnxruntime_genai as og
        except ImportError as error:
            raise UsageError(
                "onnxruntime-genai is not installed",
                why=str(error),
                todo="pip install 'qopt-compiler[genai]'",
            ) from None
        self._og = og
        config = og.Config(str(folder))
        if threads:
            config.overlay(_THREADS % threads)
        self._model = og.Model(config)
        text = (folder / "genai_config.json").read_text(encoding="utf-8")
        self.vocab_size = int(json.loads(text)["model"]["vocab_size"])

    def prepare(self, ids: Array, new: int) -> None:
        params = self._og.GeneratorParams(self._model)
        params.set_search_options(
            max_length=ids.shape[1] + new + 2,
            min_length=ids.shape[1] + new + 2,  # an EOS must not cut the round short
            do_sample=False,
            batch_size=len(ids),
        )
        self._ids, self._new = ids.astype(np.int32), new
        self._generator = self._og.Generator(self._model, params)

    def prefill(self) -> None:
        self._generator.append_tokens(self._ids if len(self._ids) > 1 else self._ids[0])
        self._generator.generate_next_token()

    def decode(self) -> None:
        for _ in range(self._new):
            self._generator.generate_next_token()


class _Transformers:
    """A transformers folder: eager mode, SDPA, fp32, a greedy loop with its own cache."""

    name = "transformers"

    def __init__(self, folder: Path, threads: int | None) -> None:
        import torch  # only here: the runtime must start without it

        from qopt.compat import load_original

        self.threads: int | None = threads or default_threads()
        torch.set_num_threads(threads or default_threads())
        self._torch = torch
        self._model = load_original(folder, "sdpa")
        self.vocab_size = int(self._model.config.get_text_config().vocab_size)

    def prepare(self, ids: Array, new: int) -> None:
        self._ids, self._new, self._cache = self._torch.from_numpy(ids), new, None

    def prefill(self) -> None:
        self._step(self._ids)

    def decode(self) -> None:
        for _ in range(self._new):
            self._step(self._next)

    def _step(self, ids: Any) -> None:
        with self._torch.inference_mode():
            out = self._model(
                input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1
            )
        self._cache = out.past_key_values
        self._next = out.logits[:, -1].argmax(dim=-1, keepdim=True)


def _pairs(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]
