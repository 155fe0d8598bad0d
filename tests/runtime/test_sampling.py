"""Sampling: filters, penalties, seeds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qopt.errors import QoptError, UsageError
from qopt.runtime.sampling import Sampler, Sampling, sample

Array = np.ndarray[Any, Any]


def random_logits(rows: int = 3, vocabulary: int = 50, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    return (3 * rng.standard_normal((rows, vocabulary))).astype(np.float32)


def allowed_by_hand(row: Array, s: Sampling) -> dict[int, float]:
    """Token -> probability, one token at a time, as transformers' warpers define it."""
    scores = row.astype(np.float64) / s.temperature
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    if s.top_k:
        order = order[: s.top_k]
    p = {i: np.exp(scores[i] - scores[order[0]]) for i in order}
    total = sum(p.values())
    kept: list[int] = []
    mass = 0.0
    for i in order:
        if kept and mass >= s.top_p:
            break
        kept.append(i)
        mass += p[i] / total
    kept = [i for i in kept if p[i] >= s.min_p]
    total = sum(p[i] for i in kept)
    return {i: p[i] / total for i in kept}


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 1.0, "top_k": 500},
    ],
)
def test_draws_follow_the_filtered_distribution(options: dict[str, Any]) -> None:
    sampling = Sampling(**options)
    logits = random_logits()
    draws = 4000
    uniforms = (np.arange(draws) + 0.5) / draws  # a grid: frequencies are the probabilities
    for row in logits:
        tokens = sample(np.tile(row, (draws, 1)), sampling, uniforms)
        want = allowed_by_hand(row, sampling)
        got = {int(t): float((tokens == t).mean()) for t in np.unique(tokens)}
        assert set(got) <= set(want)
        for token, probability in want.items():
            assert got.get(token, 0.0) == pytest.approx(probability, abs=2 / draws + 1e-5)


@pytest.mark.parametrize("top_p", [1e-50, 1e-8, 1e-4, 1e-3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_I05_the_best_token_always_survives(top_p: float, dtype: Any) -> None:
    logits = random_logits(8, 4096).astype(dtype).astype(np.float32)
    sampling = Sampling(temperature=1.0, top_p=top_p)
    for u in (0.0, 0.5, np.nextafter(1.0, 0.0)):
        tokens = sample(logits, sampling, np.full(8, u))
        np.testing.assert_array_equal(tokens, logits.argmax(axis=1))


def test_I05_sums_are_exact_enough_over_a_flat_vocabulary() -> None:
    """In float16 the sum of 65,536 equal weights stops at 2,048."""
    flat = np.zeros((1, 65536), np.float32)
    sampling = Sampling(temperature=1.0, top_p=0.5)
    assert sample(flat, sampling, np.array([np.nextafter(1.0, 0.0)]))[0] == 32767


def test_a_token_that_is_all_but_impossible_is_not_drawn() -> None:
    """In 200,000 draws some are as good as 0, and token 0 has the first place."""
    logits = np.array([[-100.0, 0.0]], np.float32)
    assert sample(logits, Sampling(temperature=1.0), np.array([0.0]))[0] == 1


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([1e-30, 1e-3, 0.7, 5.0]),
    top_k=st.integers(0, 60),
    top_p=st.sampled_from([1e-9, 0.3, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.999]),
    u=st.floats(0, 1, exclude_max=True),
)
def test_a_drawn_token_is_an_allowed_one(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, u: float
) -> None:
    logits = random_logits(2, 50, seed)
    sampling = Sampling(temperature, top_k, top_p, min_p)
    tokens = sample(logits, sampling, np.full(2, u))
    loose = Sampling(temperature, top_k, min(top_p + 1e-5, 1.0), min_p * (1 - 1e-5))
    for row, token in zip(logits, tokens, strict=True):
        assert int(token) in allowed_by_hand(row, loose)


def test_greedy_is_argmax_and_takes_no_randomness() -> None:
    logits = random_logits()
    sampler = Sampler(Sampling(), [None] * 3)
    np.testing.assert_array_equal(sampler.choose(logits), logits.argmax(axis=1))


def test_forbidden_tokens_are_never_chosen() -> None:
    logits = random_logits()
    best = int(logits[0].argmax())
    tokens = Sampler(Sampling(), [None] * 3).choose(logits, [best])
    assert tokens[0] == np.argsort(logits[0])[-2]
    assert logits[0, best] > logits[0, tokens[0]]  # the caller's logits are as they were


def test_I12_a_penalty_counts_each_token_once_and_no_padding() -> None:
    logits = np.array([[2.0, 1.9, -1.0, 0.0], [2.0, 1.9, -1.0, 0.0]], np.float32)
    sampler = Sampler(Sampling(repetition_penalty=1.3), [None, None])
    ids = np.array([[3, 3, 3, 3], [2, 0, 0, 0]])  # row 1 is padded with 0, the best token
    sampler.see_prompts(ids, np.array([4, 1]), 4)
    np.testing.assert_array_equal(sampler.choose(logits), [0, 0])
    np.testing.assert_array_equal(sampler.choose(logits), [1, 1])  # 2.0 / 1.3 < 1.9
    np.testing.assert_array_equal(sampler.choose(logits), [0, 0])  # 2.0 / 1.3 > 1.9 / 1.3


def test_a_negative_score_is_penalised_downwards() -> None:
    logits = np.array([[-1.0, -1.2]], np.float32)
    sampler = Sampler(Sampling(repetition_penalty=1.3), [None])
    sampler.see_prompts(np.array([[0]]), np.array([1]), 2)
    assert sampler.choose(logits)[0] == 1


def test_I06_a_row_draws_from_its_own_generator() -> None:
    sampling = Sampling(temperature=2.0)
    logits = np.repeat(random_logits(1), 3, axis=0)

    def run(seeds: list[int | None], keep: int, steps: int = 600) -> list[int]:
        sampler = Sampler(sampling, seeds)
        return [int(sampler.choose(logits[: len(seeds)])[keep]) for _ in range(steps)]

    alone = run([42], 0)
    assert run([None, 42], 1) == run([7, 9, 42], 2) == alone
    assert run([43], 0) != alone


def test_I06_a_row_that_leaves_takes_its_generator_with_it() -> None:
    sampling = Sampling(temperature=2.0)
    logits = np.repeat(random_logits(1), 3, axis=0)
    alone = Sampler(sampling, [42])
    want = [int(alone.choose(logits[:1])[0]) for _ in range(300)]
    sampler = Sampler(sampling, [1, None, 42])
    got = [int(sampler.choose(logits)[2]) for _ in range(100)]
    sampler.select(np.array([2]))
    got += [int(sampler.choose(logits[:1])[0]) for _ in range(200)]
    assert got == want


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_logits_are_named(value: float) -> None:
    logits = random_logits()
    logits[1, 7] = value
    with pytest.raises(QoptError, match="row 1 of the batch: the model's logits are not numbers"):
        Sampler(Sampling(), [None] * 3).choose(logits)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("top_k", -1), ("top_p", 0), ("min_p", 1), ("repetition_penalty", 0)],
)
def test_values_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"{name} is {value}"):
        Sampling(**{name: value})  # type: ignore[arg-type]
