"""What `qopt run` prints, and where."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest

from qopt.runtime import terminal
from qopt.runtime.generate import Stream

Build = Callable[..., Any]


def test_an_answer_goes_to_stdout_and_its_speed_to_stderr(
    tiny: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny().load()
    result = terminal.answer(model, "hi", max_new_tokens=8, ignore_eos=True)
    out, err = capsys.readouterr()
    assert out == result.text + "\n"
    line = r"\[prompt 2 tokens, \d+ tok/s; answer 8 tokens, [\d.]+ tok/s; length\]\n"
    assert re.fullmatch(line, err)
    terminal.answer(model, "hi", quiet=True, max_new_tokens=8, ignore_eos=True)
    assert capsys.readouterr() == (out, "")


def test_ctrl_c_stops_the_answer(tiny: Build, capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted(Stream):
        def __iter__(self) -> Any:
            yield next(self._pieces)
            raise KeyboardInterrupt

    stream = tiny().load().stream("hi", max_new_tokens=30, ignore_eos=True)
    result = terminal.show(Interrupted(stream._batch))
    assert result.finish_reason == "interrupted"
    assert "interrupted]" in capsys.readouterr().err


def test_a_chat_ends_with_its_input(
    tiny: Build, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n\nyo\n"))
    terminal.chat(tiny().load(), quiet=True, max_new_tokens=3, ignore_eos=True)
    out, err = capsys.readouterr()
    assert len(out) > 2
    assert err == ""
    monkeypatch.setattr("sys.stdin", io.StringIO("/exit\nhi\n"))
    terminal.chat(tiny(name="again").load(), quiet=True)
    assert capsys.readouterr().out == ""


def test_ctrl_c_at_the_prompt_drops_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(_: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    assert terminal._ask() == ""
