"""Generating text with an artifact: `load`, `Model`, `Chat`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack, overload

import numpy as np

from qopt.artifact import Artifact, Manifest
from qopt.errors import UnsupportedError, UsageError
from qopt.info import ModelInfo
from qopt.runtime.batch import Batch, Result
from qopt.runtime.decoder import Decoder
from qopt.runtime.session import CPU, Array, OnnxSession, Session, providers_for, remarks
from qopt.runtime.settings import Options, Settings, settle
from qopt.runtime.text import Tokenizer

__all__ = ["Chat", "Model", "Result", "Stream", "load"]

Message = dict[str, Any]  # {"role": ..., "content": ...}
Callback = Callable[[int, str], None]  # row of the batch, new text


def load(
    folder: str | Path,
    *,
    threads: int | None = None,
    device: str | None = None,
    providers: Sequence[str] | None = None,
) -> Model:
    """Load the artifact in `folder`; `threads`: default the physical cores, at most 8.

    `device`: `cpu` or `cuda` for an ONNX artifact, default its target's; `providers` names
    onnxruntime's own instead.
    """
    artifact = Artifact.load(folder)
    if not artifact.manifest.weights:
        raise UsageError(
            "the artifact has no weights", where=str(folder), todo="compile without --no-weights"
        )
    session = open_session(artifact, threads=threads, device=device, providers=providers)
    return Model(session, artifact.manifest, artifact.folder)


def open_session(
    artifact: Artifact,
    *,
    threads: int | None = None,
    device: str | None = None,
    providers: Sequence[str] | None = None,
) -> Session:
    """The session that runs an artifact's target."""
    target, dtype = artifact.manifest.target, artifact.manifest.dtype
    if target.startswith("onnx"):
        chosen = tuple(providers or providers_for(target, device))
        return OnnxSession(
            artifact.folder / "model.onnx",
            threads=threads,
            providers=chosen,
            wide=dtype == "bfloat16" and chosen == (CPU,),
            told=remarks(target, dtype, chosen),
        )
    if target.startswith("torchscript"):
        from qopt.runtime.torchscript import TorchSession

        if tuple(providers or (CPU,)) != (CPU,) or device is not None:
            raise UsageError(
                f"no {', '.join(providers or [f'device {device}'])}",
                where=str(artifact.folder),
                why=f"{target} runs in torch, which has no execution providers",
                todo="leave it out",
            )
        return TorchSession(artifact, threads=threads)
    raise UnsupportedError(
        f"this runtime cannot run target {target}",
        where=str(artifact.folder),
        todo="upgrade qopt, or compile for another target: `qopt doctor` lists them",
    )


class Model:
    """An artifact, ready to run."""

    def __init__(self, session: Session, manifest: Manifest, folder: Path) -> None:
        self.session = session
        self.manifest = manifest
        self.folder = folder

    @property
    def info(self) -> ModelInfo:
        """Facts about the model."""
        return self.manifest.model

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The artifact's tokenizer."""
        return Tokenizer(self.folder)

    def forward(self, **inputs: Array) -> dict[str, Array]:
        """Run the model once on named arrays, as it is: no cache, no tokenizer."""
        return self.session.run(inputs)

    def decoder(self, rows: int = 1) -> Decoder:
        """A fresh decoder for a batch of `rows` sequences: logits, call by call."""
        if self.info.kind != "decoder":
            raise UsageError("the artifact is no decoder", todo="call `forward` with its inputs")
        if self.info.layers and not self.manifest.keeps_cache:
            raise UsageError(
                "the artifact keeps no cache, so it cannot continue a text",
                where=str(self.folder),
                todo="compile it with the pass materialize-kv-cache",
            )
        return Decoder(self.session, self.manifest, rows)

    @overload
    def generate(
        self,
        prompts: str | list[Message],
        *,
        stream: Callback | None = None,
        **options: Unpack[Options],
    ) -> Result: ...
    @overload
    def generate(
        self,
        prompts: list[str] | list[list[Message]],
        *,
        stream: Callback | None = None,
        **options: Unpack[Options],
    ) -> list[Result]: ...
    def generate(
        self,
        prompts: str | list[Message] | list[str] | list[list[Message]],
        *,
        stream: Callback | None = None,
        **options: Unpack[Options],
    ) -> Result | list[Result]:
        """Continue a prompt, or answer a chat (a list of messages), or a list of either.

        `stream` gets (row, new text) as it comes. Prompts of unequal length are one batch, each row
        as if it ran alone. Chats go through the chat template, plain prompts do not.
        """
        one = isinstance(prompts, str) or isinstance(prompts[0] if prompts else "", dict)
        batch: list[Any] = [prompts] if one else list(prompts)
        ids = [self._encode(prompt) for prompt in batch]
        results = self._run(ids, settle(options, self.manifest.preset), stream)
        return results[0] if one else results

    def generate_ids(
        self,
        input_ids: Sequence[Sequence[int]] | Array,
        attention_mask: Array | None = None,
        *,
        stream: Callback | None = None,
        **options: Unpack[Options],
    ) -> list[Result]:
        """Continue rows of token ids; `attention_mask` is 0 at padding, on whichever side it is.

        Padding is what the mask says, never a token that looks like it: the pad id may be the EOS.
        """
        ids = [list(map(int, row)) for row in input_ids]
        if attention_mask is not None:
            mask = np.asarray(attention_mask) != 0
            if mask.shape != np.shape(input_ids):
                raise UsageError(
                    f"the mask has shape {mask.shape}, the ids {np.shape(input_ids)}",
                    todo="give one mask value a token id",
                )
            ids = [np.array(row)[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
        return self._run(ids, settle(options, self.manifest.preset), stream)

    def stream(self, prompt: str | list[Message], **options: Unpack[Options]) -> Stream:
        """Iterate over the text of one answer as it comes; `.result` has the whole."""
        settings = settle(options, self.manifest.preset)
        ids = self._encode(prompt)
        return Stream(
            self.batch(self.decoder(), [ids], settings, settings.seeds(1), streaming=True)
        )

    def batch(
        self,
        decoder: Decoder,
        prompts: Sequence[list[int]],
        settings: Settings,
        seeds: Sequence[int | None],
        *,
        streaming: bool,
        cached: int = 0,
    ) -> Batch:
        """A batch of this model, not yet run; refuses prompts that leave no room for an answer."""
        self._check_lengths(prompts)
        needs_text = streaming or bool(settings.stop)
        has_tokenizer = needs_text or (self.folder / "tokenizer.json").is_file()
        return Batch(
            decoder,
            prompts,
            settings,
            seeds=seeds,
            eos=self.info.eos_token_ids,
            context=self.info.context_length,
            tokenizer=self.tokenizer if has_tokenizer else None,
            streaming=streaming,
            cached=cached,
        )

    def _encode(self, prompt: str | list[Message]) -> list[int]:
        if not isinstance(prompt, str):
            return self.tokenizer.encode_chat(prompt)
        ids = self.tokenizer.encode(prompt)
        if not ids and self.info.bos_token_id is not None:
            return [self.info.bos_token_id]
        return ids

    def _check_lengths(self, prompts: Sequence[list[int]]) -> None:
        if not all(prompts):
            raise UsageError("a prompt has no tokens", todo="give at least one token")
        longest, context = max(map(len, prompts)), self.info.context_length
        if context is not None and longest >= context:
            raise UsageError(
                f"a prompt of {longest} tokens leaves no room in the context of {context}",
                todo="shorten the prompt",
            )

    def _run(
        self, prompts: list[list[int]], settings: Settings, stream: Callback | None
    ) -> list[Result]:
        self._check_lengths(prompts or [[]])
        seeds = settings.seeds(len(prompts))
        results: dict[int, Result] = {}
        for rows in self._groups(prompts):
            batch = self.batch(
                self.decoder(len(rows)),
                [prompts[row] for row in rows],
                settings,
                [seeds[row] for row in rows],
                streaming=stream is not None,
            )
            for row, piece in batch.pieces():
                if stream:
                    stream(rows[row], piece)
            results |= zip(rows, batch.results(), strict=True)
        return [results[row] for row in range(len(prompts))]

    def _groups(self, prompts: list[list[int]]) -> list[list[int]]:
        """Rows that run together: all, unless the model is only exact on rows of one length."""
        if self.info.ragged:
            return [list(range(len(prompts)))]
        lengths = sorted({len(prompt) for prompt in prompts})
        return [[r for r, prompt in enumerate(prompts) if len(prompt) == n] for n in lengths]


class Stream:
    """The text of one answer, piece by piece."""

    def __init__(self, batch: Batch, done: Callable[[Result], None] | None = None) -> None:
        """`done` is told the result, once, also when the stream is closed early."""
        self._batch = batch
        self._done = done
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def close(self) -> None:
        """Stop generating; the result then holds what came so far."""
        self._pieces.close()

    @property
    def result(self) -> Result:
        """The answer so far."""
        return self._batch.results()[0]

    def _run(self) -> Generator[str, None, None]:
        try:
            for _, piece in self._batch.pieces():
                yield piece
        finally:
            if self._done:
                self._done(self.result)


class Chat:
    """A conversation whose history stays in the KV cache: a turn feeds only its new tokens."""

    def __init__(
        self, model: Model, *, system: str | None = None, **options: Unpack[Options]
    ) -> None:
        """`system`: the system message, if any; `options` hold for every answer."""
        self.messages: list[Message] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self._model = model
        self._settings = settle(options, model.manifest.preset)
        self._decoder = model.decoder()
        self._cached: list[int] = []  # the tokens whose keys and values the decoder holds

    def stream(self, text: str) -> Stream:
        """Say something; iterate over the answer as it comes. Closing it keeps what came so far."""
        said = {"role": "user", "content": text}
        ids = self._model.tokenizer.encode_chat([*self.messages, said])
        # A template may render the past anew (drop its thoughts, trim a space): what is cached
        # serves as far as it agrees. One token at least is fed, for the logits after it.
        cached = self._decoder.cache.truncate(min(_common(ids, self._cached), len(ids) - 1))
        self._cached = ids[:cached]
        batch = self._model.batch(
            self._decoder,
            [ids],
            self._settings,
            self._settings.seeds(1),
            streaming=True,
            cached=cached,
        )

        def done(result: Result) -> None:
            self._cached = (ids + result.tokens)[: int(self._decoder.cache.lengths[0])]
            if result.tokens:
                self.messages += [said, {"role": "assistant", "content": result.text}]

        return Stream(batch, done)

    def send(self, text: str, stream: Callable[[str], None] | None = None) -> Result:
        """Say something and get the whole answer; `stream` gets its pieces."""
        answer = self.stream(text)
        for piece in answer:
            if stream:
                stream(piece)
        return answer.result


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
