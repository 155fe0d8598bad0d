"""Generation: equal to the reference, rows as if alone, presets, stops, the context, chats."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qopt.errors import QoptError, UsageError
from qopt.runtime import Chat
from qopt.runtime.sampling import Sampling
from qopt.runtime.settings import settle

Build = Callable[..., Any]
FORMS = ["standard", "gqa"]
EOS, SECOND_EOS, CONTEXT = 256, 257, 96


def prompts(lengths: list[int], seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, n).tolist() for n in lengths]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("keep", [True, False])
def test_logits_of_ragged_chunks_are_the_references(tiny: Build, form: str, keep: bool) -> None:
    built = tiny(form, keep=keep)
    decoder = built.load().decoder(3)
    ids = np.array(prompts([20, 20, 20]))
    expected = np.stack([built.reference(row.tolist()) for row in ids])
    done = np.zeros(3, int)
    for new in ([9, 6, 3], [4, 2, 3], [1, 1, 1], [2, 5, 1]):
        lengths = np.array(new)
        fed = np.full((3, lengths.max()), 255)
        for row in range(3):
            fed[row, : new[row]] = ids[row, done[row] : done[row] + new[row]]
        logits = decoder.forward(fed, lengths, keep=0)
        for row in range(3):
            want = expected[row, done[row] : done[row] + new[row]]
            np.testing.assert_allclose(logits[row, : new[row]], want, atol=1e-4)
        done += lengths


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("keep", [True, False])
def test_a_ragged_batch_is_each_row_alone(tiny: Build, form: str, keep: bool) -> None:
    built = tiny(form, keep=keep)
    rows = prompts([5, 17, 1, 30])
    results = built.load().generate_ids(rows, max_new_tokens=25, ignore_eos=True)
    assert [r.tokens for r in results] == [built.greedy(row, 25) for row in rows]
    assert [r.prompt_tokens for r in results] == [5, 17, 1, 30]
    assert results[0].timings.prompt_tokens == 53
    assert results[0].timings.decode_tokens == 4 * 24


@pytest.mark.parametrize("form", FORMS)
def test_A03_left_padded_batches_are_converted(tiny: Build, form: str) -> None:
    built = tiny(form)
    rows = prompts([4, 11])
    padded = np.full((2, 11), 259)
    padded[0, 7:], padded[1] = rows[0], rows[1]
    mask = (padded != 259).astype(np.int32)
    results = built.load().generate_ids(padded, mask, max_new_tokens=8, ignore_eos=True)
    assert [r.tokens for r in results] == [built.greedy(row, 8) for row in rows]


@pytest.mark.parametrize("form", FORMS)
def test_F05_padding_is_what_the_mask_says(tiny: Build, form: str) -> None:
    """The pad id is the EOS id, and the EOS stands inside a prompt too."""
    built = tiny(form, info={"pad_token_id": EOS})
    rows = prompts([6, 9])
    rows[0][2] = rows[1][8] = EOS
    padded = np.full((2, 9), EOS)
    padded[0, :6], padded[1] = rows[0], rows[1]
    mask = np.arange(9) < np.array([[6], [9]])
    results = built.load().generate_ids(padded, mask, max_new_tokens=8, ignore_eos=True)
    assert [r.tokens for r in results] == [built.greedy(row, 8) for row in rows]


def test_F04_masks_of_any_integer_type(tiny: Build) -> None:
    model = tiny("standard").load()
    ids = np.array(prompts([5]))
    feeds = {
        "input_ids": ids.astype(np.int32),
        "position_ids": np.arange(5)[None],
        **{f"past_key_values.{n}.{k}": np.zeros((1, 2, 0, s), np.float32)
           for n, s in ((0, 16), (1, 8)) for k in ("key", "value")},
    }  # fmt: skip
    want = model.forward(**feeds, attention_mask=np.ones((1, 5), np.int64))["logits"]
    for dtype in (np.int32, np.bool_, np.uint8):
        got = model.forward(**feeds, attention_mask=np.ones((1, 5), dtype))["logits"]
        np.testing.assert_array_equal(got, want)
    with pytest.raises(UsageError, match="attention_mask is float32, the model takes int64"):
        model.forward(**feeds, attention_mask=np.ones((1, 5), np.float32))
    with pytest.raises(UsageError, match="missing: attention_mask"):
        model.forward(**feeds)


@pytest.mark.parametrize("form", FORMS)
def test_rows_stop_at_the_context_one_by_one(tiny: Build, form: str) -> None:
    built = tiny(form)
    rows = prompts([90, 40])
    results = built.load().generate_ids(rows, max_new_tokens=50, ignore_eos=True)
    assert [len(r.tokens) for r in results] == [6, 50]
    assert [r.finish_reason for r in results] == ["length", "length"]
    assert results[0].tokens == built.greedy(rows[0], 6)
    assert results[1].tokens == built.greedy(rows[1], 50)


def test_a_prompt_longer_than_the_context_is_refused(tiny: Build) -> None:
    with pytest.raises(UsageError, match=r"prompt of 100 tokens .* context of 96"):
        tiny().load().generate_ids(prompts([3, 100]))


def test_unequal_rows_run_apart_where_the_model_is_not_exact_on_them(tiny: Build) -> None:
    built = tiny("standard", info={"ragged": False})
    model = built.load()
    calls = []
    step = model.session.step

    def spy(feeds: Any, cache: Any) -> Any:
        calls.append(feeds["attention_mask"])
        return step(feeds, cache)

    model.session.step = spy
    rows = prompts([5, 7, 5])
    results = model.generate_ids(rows, max_new_tokens=6, ignore_eos=True)
    assert [r.tokens for r in results] == [built.greedy(row, 6) for row in rows]
    assert all((mask == 1).all() for mask in calls)


@pytest.mark.parametrize("form", FORMS)
def test_float16_artifacts_run(tiny: Build, form: str) -> None:
    built = tiny(form, dtype="float16")
    model = built.load()
    assert model.session.inputs["past_key_values.0.key"].dtype == "float16"
    decoder = model.decoder()
    ids = prompts([12])[0]
    decoder.forward(np.array([ids[:11]]))
    logits = decoder.forward(np.array([ids[11:]]))
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits[0, 0], built.reference(ids)[-1], atol=0.05)


@pytest.mark.parametrize("form", FORMS)
def test_buffers_grow(tiny: Build, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qopt.runtime.cache.FIRST_CAPACITY", 4)
    built = tiny(form)
    decoder = built.load().decoder(2)
    ids = np.array(prompts([70, 70]))
    want = np.stack([built.reference(row.tolist())[-1] for row in ids])
    decoder.forward(ids[:, :3])
    for column in range(3, 70):
        logits = decoder.forward(ids[:, column : column + 1])
    np.testing.assert_allclose(logits[:, 0], want, atol=1e-4)
    assert decoder.cache.capacity == (96 if form == "gqa" else 0)


class TestI07:
    """Every EOS id, min_new_tokens, ignore_eos and stop strings."""

    def eos_after(self, built: Any, row: list[int], at: int) -> int:
        """A token that greedy decoding first writes at this place."""
        tokens = built.greedy(row, at + 1)
        assert tokens[at] not in tokens[:at]
        return int(tokens[at])

    def test_every_eos_id_ends(self, tiny: Build) -> None:
        row = prompts([6])[0]
        probe = tiny(name="probe")
        eos = self.eos_after(probe, row, 3)
        built = tiny(info={"eos_token_ids": [EOS, 300, eos]})
        result = built.load().generate_ids([row], max_new_tokens=20)[0]
        assert result.tokens == probe.greedy(row, 4)
        assert result.finish_reason == "eos"
        assert result.text == built.load().tokenizer.decode(result.tokens[:-1])
        pieces: list[str] = []
        built.load().generate_ids(
            [row], max_new_tokens=20, stream=lambda _, text: pieces.append(text)
        )
        assert "".join(pieces) == result.text  # this EOS is an ordinary token to the tokenizer

    def test_min_new_tokens_forbids_all_of_them(self, tiny: Build) -> None:
        row = prompts([6])[0]
        built = tiny(info={"eos_token_ids": list(range(0, 258))})
        model = built.load()
        result = model.generate_ids([row], max_new_tokens=20, min_new_tokens=4)[0]
        assert result.finish_reason == "eos"
        assert len(result.tokens) == 5
        assert all(token >= 258 for token in result.tokens[:4])

    def test_ignore_eos_wins(self, tiny: Build) -> None:
        row = prompts([6])[0]
        built = tiny(info={"eos_token_ids": list(range(0, 260))})
        options = {"max_new_tokens": 9, "ignore_eos": True, "min_new_tokens": 3}
        result = built.load().generate_ids([row], **options)[0]
        assert result.tokens == built.greedy(row, 9)
        assert result.finish_reason == "length"

    def test_a_stop_string_over_two_tokens_is_cut(self, tiny: Build) -> None:
        built = tiny()
        model = built.load()
        row = next(
            row
            for row in prompts([6] * 50)
            if model.tokenizer.decode(built.greedy(row, 12)).isascii()
            or "\ufffd" not in model.tokenizer.decode(built.greedy(row, 12))[:6]
        )
        whole = model.generate_ids([row], max_new_tokens=12, ignore_eos=True)[0]
        stop = whole.text[3:5]
        at = whole.text.find(stop)
        pieces: list[str] = []
        result = model.generate_ids(
            [row],
            max_new_tokens=12,
            ignore_eos=True,
            stop=stop,
            stream=lambda _, text: pieces.append(text),
        )[0]
        assert result.text == "".join(pieces) == whole.text[:at]
        assert result.finish_reason == "stop"
        assert len(result.tokens) < 12


@pytest.mark.parametrize("options", [{"temperature": 1.5}, {"temperature": 1.2, "top_p": 0.9}])
def test_I06_a_seeded_request_stands_alone(tiny: Build, options: Any) -> None:
    """The same tokens alone, beside an unseeded row, again, and in another place."""
    model = tiny().load()
    mine, other = prompts([7, 12])

    def run(rows: list[list[int]], seeds: list[int | None]) -> list[list[int]]:
        more = {"max_new_tokens": 16, "ignore_eos": True, **options}
        return [r.tokens for r in model.generate_ids(rows, seed=seeds, **more)]

    alone = run([mine], [42])[0]
    assert run([mine], [42])[0] == alone
    assert run([mine, other], [42, None])[0] == alone
    assert run([other, other, mine], [1, None, 42])[2] == alone
    assert run([mine], [43])[0] != alone
    assert run([mine], [None])[0] != run([mine], [None])[0]


def test_I06_a_neighbour_that_ends_changes_nothing(tiny: Build) -> None:
    rows = prompts([7, 12, 9])
    model = tiny(info={"eos_token_ids": list(range(0, 40))}).load()
    options: Any = {"max_new_tokens": 30, "temperature": 2.0}
    together = model.generate_ids(rows, seed=[1, 2, 3], **options)
    alone = [model.generate_ids([row], seed=n, **options)[0] for n, row in enumerate(rows, 1)]
    assert [r.tokens for r in together] == [r.tokens for r in alone]
    assert len({len(r.tokens) for r in together}) > 1


def test_I12_the_penalty_counts_no_padding(tiny: Build) -> None:
    """The id that pads, 0, is one the model likes to write."""
    built = tiny()
    model = built.load()
    rows = prompts([3, 20])
    options: Any = {"max_new_tokens": 20, "repetition_penalty": 1.3, "ignore_eos": True}
    together = model.generate_ids(rows, **options)
    assert [r.tokens for r in together] == [
        model.generate_ids([row], **options)[0].tokens for row in rows
    ]
    # by hand: the penalty of transformers, each token once
    ids = list(rows[0])
    for _ in range(20):
        scores = built.reference(ids)[-1]
        seen = sorted(set(ids))
        scores[seen] = np.where(scores[seen] < 0, scores[seen] * 1.3, scores[seen] / 1.3)
        ids.append(int(scores.argmax()))
    assert together[0].tokens == ids[3:]


def test_broken_logits_are_a_clear_error(tiny: Build) -> None:
    model = tiny().load()
    step = model.session.step
    model.session.step = lambda feeds, cache: step(feeds, cache) * np.float32(np.nan)
    with pytest.raises(QoptError, match="logits are not numbers"):
        model.generate_ids(prompts([4]))


def test_presets() -> None:
    low, high = settle({}, "low-latency"), settle({}, "high-quality")
    assert (low.sampling.temperature, low.max_new_tokens) == (0.0, 128)
    assert (high.sampling.temperature, high.max_new_tokens) == (0.7, 512)
    assert settle({"sample": True}, "low-latency").sampling.temperature == 0.1
    assert settle({"top_p": 0.9}, "low-latency").sampling == Sampling(temperature=0.1, top_p=0.9)
    assert settle({"sample": False}, "high-quality").sampling.temperature == 0.0
    assert (
        settle({"preset": "high-quality", "temperature": 0.0}, "low-latency").max_new_tokens == 512
    )
    with pytest.raises(UsageError, match="choose one of: low-latency, high-quality"):
        settle({}, "fast")


def test_bad_options_are_refused(tiny: Build) -> None:
    model = tiny().load()
    with pytest.raises(UsageError, match=r"top_p is 1\.5"):
        model.generate("x", top_p=1.5)
    with pytest.raises(UsageError, match="2 seeds for 1 prompts"):
        model.generate("x", seed=[1, 2])
    with pytest.raises(UsageError, match="no tokens"):
        model.generate("")
    with pytest.raises(UsageError, match="no such option: temprature"):
        model.generate("x", temprature=1.0)


def test_text_in_text_out(tiny: Build) -> None:
    built = tiny()
    model = built.load()
    text = "Hé, wörld"
    ids = model.tokenizer.encode(text)
    result = model.generate(text, max_new_tokens=10, ignore_eos=True)
    assert result.tokens == built.greedy(ids, 10)
    pieces: dict[int, str] = {0: "", 1: ""}

    def collect(row: int, piece: str) -> None:
        pieces[row] += piece

    both = model.generate([text, "a"], max_new_tokens=10, ignore_eos=True, stream=collect)
    assert [both[0].text, both[1].text] == [pieces[0], pieces[1]]
    assert both[0].text == result.text == model.tokenizer.decode(result.tokens)
    stream = model.stream(text, max_new_tokens=10, ignore_eos=True)
    assert "".join(stream) == result.text == stream.result.text


@pytest.mark.parametrize("form", FORMS)
def test_a_chat_feeds_only_what_is_new(tiny: Build, form: str) -> None:
    built = tiny(form)
    model = built.load()
    chat = Chat(model, system="s", max_new_tokens=4, ignore_eos=True)
    first = chat.send("hi")
    second = chat.send("yo")
    ids = model.tokenizer.encode_chat(chat.messages[:-1])
    assert second.tokens == built.greedy(ids, 4)
    assert first.timings.prompt_tokens == first.prompt_tokens
    assert second.timings.prompt_tokens < second.prompt_tokens == len(ids)
    assert [m["role"] for m in chat.messages] == ["system", *["user", "assistant"] * 2]


@pytest.mark.parametrize("form", FORMS)
def test_a_chat_survives_a_template_that_rewrites_the_past(tiny: Build, form: str) -> None:
    built = tiny(form)
    model = built.load()
    chat = Chat(model, max_new_tokens=4, ignore_eos=True)
    chat.send("one")
    chat.messages[1]["content"] = "zz"  # as a template that drops thoughts would
    second = chat.send("two")
    ids = model.tokenizer.encode_chat(chat.messages[:-1])
    assert second.tokens == built.greedy(ids, 4)


def test_a_chat_keeps_what_came_before_an_interrupt(tiny: Build) -> None:
    built = tiny()
    model = built.load()
    chat = Chat(model, max_new_tokens=30, ignore_eos=True)
    stream = chat.stream("hi")
    for _ in zip(range(2), stream, strict=False):
        pass
    stream.close()
    assert stream.result.finish_reason == "interrupted"
    assert 2 <= len(stream.result.tokens) < 30
    assert chat.messages[-1]["content"] == stream.result.text
    second = chat.send("yo")
    ids = model.tokenizer.encode_chat(chat.messages[:-1])
    assert second.tokens == built.greedy(ids, 30)[: len(second.tokens)]


def test_the_runtime_imports_no_torch() -> None:
    code = (
        "import sys, qopt.runtime.generate, qopt.runtime.terminal, qopt.bench, qopt.evaluate;"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
