"""Prefill and decode speed of an artifact, alone or in turns with peers in one run."""

from __future__ import annotations

import inspect
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from qopt.artifact import MANIFEST, Artifact, log_folder
from qopt.errors import UsageError
from qopt.report import Table
from qopt.runtime.decoder import Decoder
from qopt.runtime.generate import Model, load
from qopt.runtime.session import Array, default_threads

_THREADS = '{"model": {"decoder": {"session_options": {"intra_op_num_threads": %d}}}}'
ORIGINALS = ("eager", "compile")  # what `vs` takes beside folders
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
    """What was measured; ratios above 1 mean that the artifact is faster than the peer."""

    prompt: int
    new: int
    batch: int
    rounds: int
    artifact: Speeds
    peers: list[Speeds] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what of a target was not run

    def ratios(self, peer: Speeds) -> tuple[float, float]:
        """Ratios of the medians, of prefill and of decode."""
        ours = self.artifact
        return (
            ours.prefill_tok_s / peer.prefill_tok_s,
            ours.decode_tok_s / peer.decode_tok_s,
        )

    def tables(self) -> list[Table]:
        """Medians of all sides, and how many times a peer's speed the artifact has."""
        rows = []
        for side in (self.artifact, *self.peers):
            own = side is self.artifact
            ratios = ("", "") if own else tuple(f"{ratio:.2f}" for ratio in self.ratios(side))
            rows.append(
                (
                    side.engine,
                    str(side.threads or "its own"),
                    f"{side.prefill_tok_s:.0f}",
                    f"{side.decode_tok_s:.1f}",
                    *ratios,
                )
            )
        columns = [
            "engine",
            "threads",
            "prefill tok/s",
            "decode tok/s",
            "prefill ratio",
            "decode ratio",
        ]
        if not self.peers:
            columns, rows = columns[:4], [row[:4] for row in rows]
        title = f"prompt {self.prompt}, {self.new} new, batch {self.batch}, {self.rounds} rounds"
        told = [Table("notes", ("",), [(note,) for note in self.notes])] if self.notes else []
        return [Table(title, columns, rows), *told]

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON; a pair's two runs stand next to each other in time."""
        out = asdict(self)
        for told, side in zip(
            (out["artifact"], *out["peers"]), (self.artifact, *self.peers), strict=True
        ):
            told |= {"prefill_tok_s": side.prefill_tok_s, "decode_tok_s": side.decode_tok_s}
        for told, peer in zip(out["peers"], self.peers, strict=True):
            told["prefill_ratio"], told["decode_ratio"] = self.ratios(peer)
            told["prefill_pairs"] = _pairs(self.artifact.prefill, peer.prefill)
            told["decode_pairs"] = _pairs(self.artifact.decode, peer.decode)
        return out


def bench(
    artifact: str | Path,
    *,
    prompt: int = 512,
    new: int = 64,
    batch: int = 1,
    rounds: int = 5,
    vs: str | Path | Sequence[str | Path] = (),
    threads: int | None = None,
    device: str | None = None,
) -> Bench:
    """Time `artifact`, and each of `vs` in turns with it: A B B A, new random prompts each round.

    `vs` names qopt artifacts, onnxruntime-genai folders, transformers folders (eager loop, SDPA,
    fp32), or, by the words `eager` and `compile`, the model that the artifact was compiled from, in
    its dtype and on its device: as transformers runs it, or under torch.compile with a static
    cache. `threads` holds for all; without it qopt and transformers take the physical cores, at
    most 8, while onnxruntime-genai runs as its folder and its own default say (one thread on some
    machines: give `threads` to compare like with like). The first round is not counted. `device`
    (`cpu`, `cuda`) is for ONNX artifacts, default their targets'.
    """
    if min(prompt, new, batch, rounds) < 1:
        raise UsageError(
            "prompt, new, batch and rounds must all be 1 or more", todo="give numbers above 0"
        )
    others = [vs] if isinstance(vs, str | Path) else list(vs)
    engines = [open_engine(Path(artifact), threads, device)]
    for other in others:
        if str(other) in ORIGINALS:
            engines.append(open_original(engines[0], str(other), threads))
        else:
            engines.append(open_engine(Path(other), threads, device))
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
    told = [line for e in engines if isinstance(e, _Artifact) for line in e.model.session.told()]
    return Bench(prompt, new, batch, rounds, speeds[0], speeds[1:], list(dict.fromkeys(told)))


def time_once(engine: Engine, ids: Array, new: int) -> tuple[float, float]:
    """Prefill and decode tokens a second of one prompt."""
    engine.prepare(ids, new)
    start = perf_counter()
    engine.prefill()
    middle = perf_counter()
    engine.decode()
    end = perf_counter()
    return ids.size / (middle - start), len(ids) * new / (end - middle)


def open_engine(folder: Path, threads: int | None = None, device: str | None = None) -> Engine:
    """What can run this folder; `device` is for an artifact of qopt's."""
    if (folder / MANIFEST).is_file():
        return _Artifact(load(folder, threads=threads, device=device), threads)
    if (folder / "genai_config.json").is_file():
        return _Genai(folder, threads)
    if (folder / "config.json").is_file():
        from qopt.compat import load_original

        return _Torch("transformers", load_original(folder, "sdpa"), threads)
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
        self.model = model

    def prepare(self, ids: Array, new: int) -> None:
        context = self.model.info.context_length
        if context is not None and ids.shape[1] + new > context:
            raise UsageError(
                f"{ids.shape[1]} + {new} tokens exceed the context of {context}",
                todo="time a shorter prompt, or fewer new tokens",
            )
        self._ids, self._new = ids, new
        self._decoder: Decoder = self.model.decoder(len(ids))
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


class _Torch:
    """A transformers model in a greedy loop; `compiled`: under torch.compile, with a static cache.

    On a GPU both calls wait for the device before they return.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        threads: int | None,
        device: str = "cpu",
        compiled: bool = False,
    ) -> None:
        import torch  # only here: the runtime must start without it

        self.name = name
        self.threads: int | None = threads or default_threads()
        torch.set_num_threads(threads or default_threads())
        self._torch: Any = torch
        self._device = device
        self._model = model.to(device)
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self._accepted = inspect.signature(model.forward).parameters
        self._compiled = compiled
        self._cache: Any = None
        self._static: Any = None
        if compiled:
            # launches of so small kernels take longer than the kernels: a CUDA graph replays them
            mode = "reduce-overhead" if device.startswith("cuda") else None
            self._call: Any = torch.compile(model.forward, dynamic=False, mode=mode)
        else:
            self._call = model

    def prepare(self, ids: Array, new: int) -> None:
        self._ids = self._torch.from_numpy(ids).to(self._device)
        self._new, self._done, self._cache = new, 0, None
        if self._compiled:
            self._cache = self._emptied(len(ids), ids.shape[1] + new)

    def prefill(self) -> None:
        self._step(self._ids)
        self._wait()

    def decode(self) -> None:
        for _ in range(self._new):
            self._step(self._next)
        self._wait()

    def _emptied(self, rows: int, room: int) -> Any:
        """The static cache, empty; the same tensors each time, which compiled code knows."""
        if self._static is None or self._static[0] != (rows, room):
            from transformers import StaticCache

            cache: Any = StaticCache(config=self._model.config, max_cache_len=room)
            with self._torch.no_grad():  # eagerly: it is allocated by its first update
                self._model(**self._inputs(self._ids[:, :1], cache))
            self._static = (rows, room), cache
        self._static[1].reset()
        return self._static[1]

    def _inputs(self, ids: Any, cache: Any) -> dict[str, Any]:
        given = {
            "input_ids": ids,
            "cache" if "cache" in self._accepted else "past_key_values": cache,
            "use_cache": True,
        }
        if "logits_to_keep" in self._accepted:
            given["logits_to_keep"] = 1
        if cache is not None and self._compiled and "cache_position" in self._accepted:
            given["cache_position"] = self._torch.arange(  # else asked of the cache's values
                self._done, self._done + ids.shape[1], device=self._device
            )
        return given

    def _step(self, ids: Any) -> None:
        guard: Any = self._torch.no_grad if self._compiled else self._torch.inference_mode
        with guard():
            if self._compiled:
                self._torch.compiler.cudagraph_mark_step_begin()
            out = self._call(**self._inputs(ids, self._cache))
            self._next = out.logits[:, -1].argmax(dim=-1, keepdim=True)
        self._done += ids.shape[1]
        self._cache = out.past_key_values

    def _wait(self) -> None:
        if self._device.startswith("cuda"):
            self._torch.cuda.synchronize()


def open_original(artifact: Engine, how: str, threads: int | None) -> Engine:
    """The model that an artifact was compiled from, in torch: `eager`, or under torch.`compile`."""
    if not isinstance(artifact, _Artifact):
        raise UsageError(
            f"--vs {how} needs an artifact of qopt",
            why="it times the model that the artifact was compiled from",
            todo="name a folder",
        )
    import torch

    manifest, notes = artifact.model.manifest, list[str]()
    folder = artifact.model.folder
    from qopt.final_check import remembered

    name, adapter = remembered(
        Artifact(folder, manifest), log_folder(folder) / "source.json", notes
    )
    if name is None:
        raise UsageError(
            "the model that it was compiled from is not known here",
            where=str(folder),
            why="; ".join(notes) or "its log names none, or another than it was",
            todo="name the model's folder: --vs FOLDER",
        )
    model = _original_model(name, adapter).to(getattr(torch, manifest.dtype))
    device = "cuda" if "cuda" in manifest.target and torch.cuda.is_available() else "cpu"
    compiled = how == "compile"
    label = f"torch.compile, {manifest.dtype}" if compiled else f"transformers, {manifest.dtype}"
    return _Torch(label, model, threads, device, compiled)


def _original_model(name: str, adapter: str | None) -> Any:
    """A decoder as transformers loads it, with SDPA, in fp32."""
    from qopt.compat import load_original, set_attention
    from qopt.final_check import filled_model, whole_checkpoint
    from qopt.sources import open_source

    source: Any = open_source(name, adapter=Path(adapter) if adapter else None)
    if source.kind != "decoder":
        raise UsageError("only a decoder is timed against its model", where=name)
    if source.adapter is None and source.file is not None:
        return load_original(source.file.parent, "sdpa", gguf_file=source.file.name)
    if source.adapter is None and whole_checkpoint(source):
        return load_original(source.folder, "sdpa")
    model = filled_model(source).eval()
    set_attention(model, "sdpa")
    return model


def _pairs(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]
