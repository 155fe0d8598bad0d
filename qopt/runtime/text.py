"""Between text and tokens: tokenizer, chat template, streaming decoder and stop strings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as RustTokenizer

from qopt.errors import UsageError

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, and what else the template reads

BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character


class Tokenizer:
    """The tokenizer and the chat template of a folder."""

    def __init__(self, folder: Path) -> None:
        """Read `tokenizer.json` and what stands beside it."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UsageError(
                "the artifact has no tokenizer.json",
                where=str(folder),
                todo="give token ids instead of text, or compile a model with a fast tokenizer",
            )
        self._folder = folder
        self._tokenizer = RustTokenizer.from_file(str(path))
        self._tokenizer.no_padding()  # settings left over from training
        self._tokenizer.no_truncation()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {id_ for id_, token in added.items() if token.special}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; `special`: with the BOS and such that the tokenizer adds to a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        ordinary = [id_ for id_ in ids if not self.is_special(id_)]
        return str(self._tokenizer.decode(ordinary, skip_special_tokens=False))

    def is_special(self, id_: int) -> bool:
        """Whether a token is a mark of the model's, and no text."""
        return id_ in self._special

    @property
    def has_chat_template(self) -> bool:
        """Whether the model can be given messages."""
        return self._template is not None

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the model's answer begins."""
        return self.encode(self.render(messages), special=False)

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as the chat template writes it."""
        if self._template is None:
            raise UsageError(
                "the artifact has no chat template",
                where=str(self._folder),
                todo="give a plain prompt instead of messages",
            )
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,  # templates test both for none, not for being defined
                documents=None,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise UsageError(
                "the chat template refuses these messages",
                why=str(error),
                todo="change the messages, or give a plain prompt (--raw)",
            ) from None

    @cached_property
    def _config(self) -> dict[str, Any]:
        path = self._folder / "tokenizer_config.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        """`bos_token` and its kin: a string, or an entry that holds it."""
        tokens = {k: v for k, v in self._config.items() if k.endswith("_token")}
        named = {k: v.get("content") if isinstance(v, dict) else v for k, v in tokens.items()}
        return {k: v for k, v in named.items() if isinstance(v, str)}

    @cached_property
    def _template(self) -> jinja2.Template | None:
        path = self._folder / "chat_template.jinja"
        source = self._config.get("chat_template")
        if path.is_file():
            source = path.read_text(encoding="utf-8")
        elif isinstance(source, list):  # named templates, one of them the default
            named = {entry["name"]: entry["template"] for entry in source}
            source = named.get("default")
        return None if source is None else _environment().from_string(source)


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's words for training, and changes no text."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Keep the body, drop the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as transformers sets it up for chat templates: templates are untrusted input."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format_: datetime.now().strftime(format_)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """Jinja's own filter escapes HTML, which a prompt must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class StreamDecoder:
    """Text of tokens as they come; joined, the pieces equal the text of all tokens.

    A character whose bytes are split over tokens is held back until it is whole.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the piece before, as context, and what is held back
        self._told = 0  # how many of them are already text

    def feed(self, id_: int) -> str:
        """The text that this token completes, often one word, at times none."""
        if self._tokenizer.is_special(id_):
            return ""
        self._ids.append(id_)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(BROKEN):
            return ""
        return self._tell(text)

    def flush(self) -> str:
        """What is still held back: an incomplete character comes out as a replacement mark."""
        return self._tell(self._tokenizer.decode(self._ids))

    def _tell(self, text: str) -> str:
        # decoded with the piece before: some decoders strip the space before a text's first word
        piece = text[len(self._tokenizer.decode(self._ids[: self._told])) :]
        if piece:
            self._ids = self._ids[self._told :]
            self._told = len(self._ids)
        return piece


class StopStrings:
    """Cuts a stream of text before the first stop string, wherever its pieces end."""

    def __init__(self, strings: Sequence[str]) -> None:
        """`strings`: none of them empty."""
        if not all(strings):
            raise UsageError("a stop string is empty", todo="give text, or none")
        self._strings = tuple(strings)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """The text that is certain to stand before any stop string."""
        if self.stopped:
            return ""
        self._held += text
        found = [at for s in self._strings if (at := self._held.find(s)) >= 0]
        if found:
            self.stopped = True
            told, self._held = self._held[: min(found)], ""
            return told
        keep = max((_overlap(self._held, s) for s in self._strings), default=0)
        at = len(self._held) - keep
        told, self._held = self._held[:at], self._held[at:]
        return told

    def flush(self) -> str:
        """What was held back for a stop string that did not come."""
        told, self._held = self._held, ""
        return told


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class TextStream:
    """The text of one answer as its tokens come, cut before a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        """`stop`: strings that end the answer."""
        self._decoder = StreamDecoder(tokenizer)
        self._stop = StopStrings(stop)
        self.text = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._stop.stopped

    def feed(self, id_: int) -> str:
        """The new text that is certain after this token."""
        return self._told(self._stop.feed(self._decoder.feed(id_)))

    def finish(self) -> str:
        """What was held back; empty when called again."""
        if self.stopped:
            return ""
        return self._told(self._stop.feed(self._decoder.flush()) + self._stop.flush())

    def _told(self, piece: str) -> str:
        self.text += piece
        return piece
