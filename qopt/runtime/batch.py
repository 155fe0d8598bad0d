"""Generating one batch, step by step: every row as if it ran alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from time import perf_counter

import numpy as np

from qopt.runtime.decoder import Decoder
from qopt.runtime.sampling import Sampler
from qopt.runtime.session import Array
from qopt.runtime.settings import Settings
from qopt.runtime.text import TextStream, Tokenizer


@dataclass
class Timings:
    """What a batch took in the model and the sampler; its rows share one."""

    prompt_tokens: int = 0  # fed in the first call, of all rows
    prefill_s: float = 0.0  # until every row has its first token
    decode_tokens: int = 0  # all later ones
    decode_s: float = 0.0

    @property
    def prefill_tok_s(self) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Generated tokens a second, all rows together."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0


@dataclass
class Result:
    """One answer."""

    text: str  # without special tokens, cut before a stop string
    tokens: list[int]  # as generated, a final EOS included
    finish_reason: str  # eos | stop | length | interrupted
    prompt_tokens: int
    timings: Timings


class Batch:
    """Sequences generated together: `pieces` does the work, `results` tells what came of it."""

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[list[int]],
        settings: Settings,
        *,
        seeds: Sequence[int | None],
        eos: Sequence[int],
        context: int | None,
        tokenizer: Tokenizer | None,
        streaming: bool = False,
        cached: int = 0,
    ) -> None:
        """`cached`: leading tokens of a single prompt that the decoder has already."""
        self._decoder = decoder
        self._prompts = prompts
        self._cached = cached
        self._sampler = Sampler(settings.sampling, seeds)
        self._eos = [] if settings.ignore_eos else list(eos)
        self._min_new = settings.min_new_tokens
        limit = settings.max_new_tokens
        lengths = np.array([len(prompt) for prompt in prompts])
        self._room = np.minimum(limit, context - lengths) if context else lengths * 0 + limit
        self._tokens = np.zeros((len(prompts), int(self._room.max())), np.int64)
        self._counts = np.zeros(len(prompts), np.int64)
        self._reasons = np.full(len(prompts), "interrupted", object)
        self._tokenizer = tokenizer
        self._streams: list[TextStream] | None = None  # None: text is made at the end
        if tokenizer and (streaming or settings.stop):
            self._streams = [TextStream(tokenizer, settings.stop) for _ in prompts]
        self.timings = Timings()
        decoder.cache.reserve(int((lengths + self._room).max()))

    def pieces(self) -> Iterator[tuple[int, str]]:
        """Generate; yields (row, text) as it comes where `streaming` or stop strings ask for it."""
        ids, lengths = right_padded([prompt[self._cached :] for prompt in self._prompts])
        feed, fed = ids, lengths
        alive = np.arange(len(self._prompts))
        for step in count():
            start = perf_counter()
            logits = self._decoder.forward(feed, fed)[:, -1]
            if step == 0:
                self._sampler.see_prompts(*right_padded(self._prompts), logits.shape[1])
            tokens = self._sampler.choose(logits, self._eos if step < self._min_new else ())
            self._time(perf_counter() - start, step, int(lengths.sum()), len(alive))
            self._tokens[alive, step] = tokens
            self._counts[alive] += 1
            yield from self._tell(alive, tokens)
            going = self._judge(alive, tokens)
            yield from self._finish(alive[~going])
            if not going.any():
                return
            if not going.all():  # a finished row costs nothing more, nor does it fill the context
                alive, tokens = alive[going], tokens[going]
                self._decoder.cache.select(np.flatnonzero(going))
                self._sampler.select(np.flatnonzero(going))
            feed, fed = tokens[:, None], np.ones(len(alive), np.int64)

    def results(self) -> list[Result]:
        """One result a row; rows that `pieces` has not finished are "interrupted"."""
        return [self._result(row) for row in range(len(self._prompts))]

    def _time(self, seconds: float, step: int, prompt_tokens: int, rows: int) -> None:
        if step == 0:
            self.timings.prompt_tokens, self.timings.prefill_s = prompt_tokens, seconds
        else:
            self.timings.decode_tokens += rows
            self.timings.decode_s += seconds

    def _judge(self, alive: Array, tokens: Array) -> Array:
        """Note why rows end; returns which go on."""
        ended = np.isin(tokens, self._eos)
        full = self._counts[alive] >= self._room[alive]
        stopped = np.zeros(len(alive), bool)
        if self._streams:
            stopped[:] = [self._streams[row].stopped for row in alive]
        # the last note counts: an EOS in the last place is an EOS
        for over, reason in ((full, "length"), (stopped, "stop"), (ended, "eos")):
            self._reasons[alive[over]] = reason
        return ~(ended | full | stopped)

    def _tell(self, alive: Array, tokens: Array) -> Iterator[tuple[int, str]]:
        if not self._streams:
            return
        for row, token in zip(alive.tolist(), tokens.tolist(), strict=True):
            if token not in self._eos and (piece := self._streams[row].feed(token)):
                yield row, piece

    def _finish(self, rows: Array) -> Iterator[tuple[int, str]]:
        if not self._streams:
            return
        for row in rows.tolist():
            if piece := self._streams[row].finish():
                yield row, piece

    def _result(self, row: int) -> Result:
        tokens = self._tokens[row, : self._counts[row]].tolist()
        reason = str(self._reasons[row])
        if self._streams:
            self._streams[row].finish()
            text = self._streams[row].text
        elif self._tokenizer:
            text = self._tokenizer.decode(tokens[:-1] if reason == "eos" else tokens)
        else:
            text = ""
        return Result(text, tokens, reason, len(self._prompts[row]), self.timings)


def right_padded(rows: Sequence[list[int]]) -> tuple[Array, Array]:
    """Token ids [rows, columns], zeros after each row's own tokens, and the rows' lengths."""
    lengths = np.array([len(row) for row in rows])
    ids = np.zeros((len(rows), int(lengths.max())), np.int64)
    ids[np.arange(ids.shape[1]) < lengths[:, None]] = np.concatenate([*map(np.array, rows)])
    return ids, lengths
