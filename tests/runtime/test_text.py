"""Text: streaming without broken characters, stop strings, chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models

from qopt.errors import UsageError
from qopt.runtime.text import StopStrings, StreamDecoder, TextStream, Tokenizer

Build = Callable[..., Any]


@pytest.fixture
def tokenizer(tiny: Build) -> Tokenizer:
    return Tokenizer(tiny().folder)


def test_I09_a_split_character_is_held_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀b")
    assert len(ids) == 6  # one token a byte
    stream = StreamDecoder(tokenizer)
    assert [stream.feed(id_) for id_ in ids] == ["a", "", "", "", "😀", "b"]


def test_I09_an_incomplete_tail_is_flushed_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀")[:-1]
    stream = StreamDecoder(tokenizer)
    assert "".join(map(stream.feed, ids)) == "a"
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(ids=st.lists(st.integers(0, 259), max_size=30))
def test_I09_the_joined_stream_is_the_whole_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Any bytes, special tokens in between."""
    stream = StreamDecoder(tokenizer)
    pieces = [stream.feed(id_) for id_ in ids]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)


def test_I09_spaces_of_a_sentencepiece_tokenizer_survive(tmp_path: Path) -> None:
    vocabulary = {"▁Hello": 0, "▁world": 1, "!": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5}
    rust = RustTokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    rust.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    rust.add_special_tokens(["<s>"])
    rust.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    stream = StreamDecoder(tokenizer)
    ids = [6, 0, 1, 6, 1, 3, 4, 5, 2]
    pieces = [stream.feed(id_) for id_ in ids]
    assert "".join(pieces) == "Hello world world€!" == tokenizer.decode(ids)
    assert pieces == ["", "Hello", " world", "", " world", "", "", "€", "!"]


def test_I07_a_stop_string_over_two_pieces_is_cut_and_nothing_before_it() -> None:
    stop = StopStrings(["###", "END"])
    assert [stop.feed(t) for t in ("one #", "# two E", "N", "D three")] == [
        "one ",
        "## two ",
        "",
        "",
    ]
    assert stop.stopped
    assert stop.flush() == ""


def test_I07_text_held_back_for_nothing_comes_out() -> None:
    stop = StopStrings(["aab"])
    assert [stop.feed(t) for t in ("xa", "a", "a", "c")] == ["x", "", "a", "aac"]
    assert StopStrings([]).feed("all of it") == "all of it"
    held = StopStrings(["##"])
    assert held.feed("a#") + held.flush() == "a#"


@settings(max_examples=100, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_I07_a_stream_is_the_text_before_the_first_stop(
    pieces: list[str], stops: list[str]
) -> None:
    stop = StopStrings(stops)
    out = ""
    for piece in pieces:
        out += stop.feed(piece)
        if stop.stopped:
            break
    out += stop.flush()
    whole = "".join(pieces)
    assert whole.startswith(out)
    assert not any(s in out for s in stops)
    assert stop.stopped == any(s in whole for s in stops)
    assert stop.stopped or out == whole


def test_a_stop_string_may_end_inside_a_character(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["é"])
    told = [stream.feed(id_) for id_ in tokenizer.encode("aéb")]
    assert told == ["a", "", "", ""]
    assert stream.stopped
    assert stream.text == "a"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="stop string is empty"):
        StopStrings([""])


def test_chat_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi <b>"}]
    assert tokenizer.render(messages) == "<user>hi <b><eot><assistant>"
    ids = tokenizer.encode_chat(messages)
    assert ids.count(258) == 1  # the marks become special tokens


def with_template(folder: Path, template: str) -> Tokenizer:
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(folder)


def test_chat_template_helpers(tiny: Build) -> None:
    folder = tiny().folder
    source = (
        "{{ eos_token }}{{ pad_token }}{{ messages[0] | tojson }}{{ strftime_now('%Y') | length }}"
        "{% if tools is not none %}tools{% endif %}"
        "{% generation %}{{ messages[0].content }}{% endgeneration %}"
        "{% for m in messages %}{% break %}{% endfor %}"
    )
    rendered = with_template(folder, source).render([{"role": "user", "content": "<é>"}])
    assert rendered == '<eos><pad>{"role": "user", "content": "<é>"}4<é>'


def test_a_template_may_refuse(tiny: Build) -> None:
    tokenizer = with_template(tiny().folder, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UsageError, match="roles must alternate"):
        tokenizer.render([])


def test_a_template_is_untrusted(tiny: Build) -> None:
    tokenizer = with_template(tiny().folder, "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(UsageError, match="refuses these messages"):
        tokenizer.render([])


def test_a_template_in_the_config(tiny: Build) -> None:
    folder = tiny().folder
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    for template in ("yes", named):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        assert Tokenizer(folder).render([]) == "yes"
    (folder / "tokenizer_config.json").unlink()
    assert not Tokenizer(folder).has_chat_template
    with pytest.raises(UsageError, match="no chat template"):
        Tokenizer(folder).render([])


def test_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
