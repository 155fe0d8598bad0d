"""The text that calibration and search see: a file's, or what the model writes itself.

One place says how a text is split: calibration and search see the first windows, gates the last.
Only what generates text needs torch; the runtime reads texts without it.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qopt.cache import cache_dir, full_disk
from qopt.errors import ResourceError, UnsupportedError, UsageError
from qopt.runtime.session import Array
from qopt.runtime.text import Tokenizer

if TYPE_CHECKING:
    from qopt.graph import Graph
    from qopt.recipe import Calibration as Settings
    from qopt.sources import ModelSource

HELD_BACK = 0.2  # of a text's windows, at its end: gates see them, calibration and search do not
MOST_PARAMETERS = 10**9  # of a model that writes its own text
SELF = "self"


def first_held_back(total: int) -> int:
    """The number of the first of `total` windows that only gates see; one is always theirs."""
    return min(int(total * (1 - HELD_BACK)), total - 1)


@dataclass(frozen=True)
class Calibration:
    """Windows of token ids, int64 (windows, length), made when they are first asked for.

    All windows are equally long and hold text alone: padding never enters a statistic.
    """

    make: Callable[[], Array]
    most: int  # windows that calibration and search take

    @cached_property
    def windows(self) -> Array:
        """All windows of the text in order."""
        return self.make()

    @property
    def search(self) -> Array:
        """What calibration and search see: of the first 80 %, as many as the recipe says."""
        return self.windows[: min(first_held_back(len(self.windows)), self.most)]

    @property
    def held_back(self) -> Array:
        """What only gates see: the last 20 %."""
        return self.windows[first_held_back(len(self.windows)) :]


def calibration(
    settings: Settings, source: ModelSource, capture: Callable[[], Graph]
) -> Calibration | None:
    """The calibration text of a decoder by a recipe's `calibration:`; None for another model.

    `capture` gives the model's graph as captured: only a text of the model's own needs it.
    """
    if source.kind != "decoder" or not source.with_weights:
        return None
    if settings.text == SELF:
        return Calibration(lambda: own_text(settings, source, capture), settings.sequences)
    path = Path(settings.text)
    return Calibration(lambda: windows_of(path, source, settings.length), settings.sequences)


def read_text(path: Path) -> str:
    """The text of a .txt file, or of a .jsonl file's `text` fields, a blank line between them.

    Raises `UsageError` where it cannot be read, is not UTF-8, has no `text` or is empty.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            "the text is not UTF-8", where=str(path), why=str(error), todo="save it as UTF-8"
        ) from None
    except OSError as error:
        raise UsageError(
            "cannot read the text",
            where=str(path),
            why=error.strerror,
            todo="give --text a file that you may read",
        ) from None
    if path.suffix == ".jsonl":
        lines = enumerate(text.split("\n"), 1)
        text = "\n\n".join(_field(path, n, line) for n, line in lines if line.strip())
    if not text.strip():
        raise UsageError("the text is empty", where=str(path), todo="give --text a file with text")
    return text


def _field(path: Path, number: int, line: str) -> str:
    where = f"{path}:{number}"
    try:
        data = json.loads(line)
    except ValueError as error:
        raise UsageError(
            "the line is no JSON", where=where, why=str(error), todo="write one JSON object a line"
        ) from None
    text = data.get("text") if isinstance(data, dict) else None
    if not isinstance(text, str):
        raise UsageError(
            "the line has no text",
            where=where,
            why="a .jsonl file holds one object a line, with a string under `text`",
            todo="rename the field to `text`, or give --text a .txt file",
        )
    return text


def windows_of(path: Path, source: ModelSource, length: int) -> Array:
    """A file's tokens as windows, int64 (windows, length), without BOS; the rest is left out."""
    text = read_text(path)
    if source.folder is None:
        raise UsageError(
            "the model has no tokenizer", where=source.where, todo="compile a folder that has one"
        )
    ids = np.array(Tokenizer(source.folder).encode(text, special=False), np.int64)
    if len(ids) < 2 * length:
        raise UsageError(
            f"the text has {len(ids)} tokens, too few for two windows of {length}",
            where=str(path),
            why="one is for calibration, and one is held back",
            todo="give --text a longer text, or write a smaller calibration.length in the recipe",
        )
    return ids[: len(ids) // length * length].reshape(-1, length)


def own_text(settings: Settings, source: ModelSource, capture: Callable[[], Graph]) -> Array:
    """What the model writes from a fixed seed, int64 (sequences, length), kept in the cache."""
    size = sum(int(np.prod(w.shape)) for w in source.tensors.values())
    if size > MOST_PARAMETERS:
        raise UsageError(
            f"a model of {size / 1e9:.1f} B parameters does not write its own calibration text",
            where=source.where,
            why="above 1 B parameters that takes too long",
            todo="give --text FILE, or write calibration: {text: FILE} in the recipe",
        )
    wanted = f"1 {source.digest} {settings.seed} {settings.sequences} {settings.length}"
    name = hashlib.sha256(wanted.encode()).hexdigest()
    path = cache_dir("calibration") / f"{name}.npy"
    shape = settings.sequences, settings.length
    if (kept := _kept(path, shape)) is not None:
        return kept
    ids = _written(capture(), *shape, settings.seed)
    _keep(path, ids)
    return ids


def _kept(path: Path, shape: tuple[int, int]) -> Array | None:
    try:
        ids = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):  # none there, or damaged: it is written anew
        return None
    return ids if ids.shape == shape and ids.dtype == np.int64 else None


def _keep(path: Path, ids: Array) -> None:
    """Put a file into the cache, whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                np.save(file, ids)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise full_disk(error, path) or ResourceError(
            "cannot keep the calibration text",
            where=str(path),
            why=error.strerror,
            todo="QOPT_CACHE_DIR moves the cache to a place that you may write to",
        ) from None


def _written(graph: Graph, sequences: int, length: int, seed: int) -> Array:
    """Sample tokens at temperature 1, all sequences in one batch, the cache implied."""
    import torch

    from qopt.graph import ATTENTION
    from qopt.weights import WeightCache

    if not graph.find(ATTENTION) or not graph.info.vocab_size:
        raise UnsupportedError(
            "this model cannot write its own calibration text",
            why="its own code keeps the cache",
            todo="give --text FILE",
        )
    generator = torch.Generator().manual_seed(seed)
    start = graph.info.bos_token_id
    if start is None:
        ids = torch.randint(graph.info.vocab_size, (sequences, 1), generator=generator)
    else:
        ids = torch.full((sequences, 1), start)
    cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    load = WeightCache(8 * MOST_PARAMETERS).get
    for step in range(1, length):
        inputs = {
            "input_ids": ids[:, -1:],
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.full((sequences, 1), step - 1),
        }
        logits = graph.interpret(inputs, cache, load)[graph.outputs[0]][:, -1].float()
        chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, chosen], 1)
    return np.asarray(ids.numpy(), np.int64)
