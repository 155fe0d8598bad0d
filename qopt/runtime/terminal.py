"""What `qopt run` prints: the answer as it comes on stdout, everything else on stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Unpack

from qopt.runtime.batch import Result
from qopt.runtime.generate import Chat, Message, Model, Stream
from qopt.runtime.settings import Options

LEAVE = ("/exit", "/quit")


def answer(
    model: Model, prompt: str | list[Message], *, quiet: bool = False, **options: Unpack[Options]
) -> Result:
    """Print one answer as it is generated, then how fast it came unless `quiet`."""
    return show(model.stream(prompt, **options), quiet=quiet)


def chat(
    model: Model, *, system: str | None = None, quiet: bool = False, **options: Unpack[Options]
) -> None:
    """Talk at the terminal: Ctrl-C stops an answer, Ctrl-D or /exit leaves."""
    conversation = Chat(model, system=system, **options)
    if not quiet:
        _note("Ctrl-C stops an answer, Ctrl-D leaves.")
    while (said := _ask()) is not None:
        if said:
            show(conversation.stream(said), quiet=quiet)


def show(stream: Stream, *, quiet: bool = False) -> Result:
    """Print a stream; Ctrl-C ends it there, and what came so far is the answer."""
    try:
        for piece in stream:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        stream.close()
    print(flush=True)
    if not quiet:
        _note(summary([stream.result]))
    return stream.result


def summary(results: Sequence[Result]) -> str:
    """One line on the answers of one batch: tokens in all, tokens a second, why they ended."""
    timings = results[0].timings
    tokens = sum(len(result.tokens) for result in results)
    answers = "answer" if len(results) == 1 else f"{len(results)} answers"
    ends = ", ".join(dict.fromkeys(result.finish_reason for result in results))
    return (
        f"[prompt {timings.prompt_tokens} tokens, {timings.prefill_tok_s:.0f} tok/s; "
        f"{answers} {tokens} tokens, {timings.decode_tok_s:.1f} tok/s; {ends}]"
    )


def _ask() -> str | None:
    """The next line typed, None to leave; Ctrl-C drops the line."""
    try:
        said = input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        _note("")
        return ""
    return None if said in LEAVE else said


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
