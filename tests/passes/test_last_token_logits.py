"""last-token-logits: becomes, same numbers, idempotent, leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qopt.rewrite import PASSES

NAME = "last-token-logits"


def test_becomes(captured: Any, run: Any, body: Any) -> None:
    graph = captured("llama", num_hidden_layers=1)
    (record,) = run(graph, NAME)
    assert record.rewrites == 1
    last = [line.split(" = ")[1] for line in body(graph).splitlines()[-3:-1]]
    assert last == [
        "qopt.last_tokens(slice_6, attention_mask, num_logits_to_keep)",
        "aten.linear(last_tokens_default, lm_head_weight)",
    ]
    assert graph.inputs[-1].name == "num_logits_to_keep"
    assert graph.defaults["num_logits_to_keep"].tolist() == [1]
    assert graph.results[0].meta["val"].shape[2] == 97
    assert isinstance(graph.results[0].meta["val"].shape[1], torch.SymInt)
    assert PASSES[NAME]().run(graph) == 0


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "cohere"])
def test_each_row_gets_its_own_last_tokens(
    family: str, captured: Any, tiny: Any, run: Any, replay: Any
) -> None:
    """Never simply the last slots; soft-caps and scales stand behind the head (B12)."""
    graph, model = captured(family), tiny(family)[1]
    run(graph, "canonicalize", "fold-constants", "fuse-rms-norm", NAME)
    lengths = (7, 3, 5)
    ids = torch.randint(3, 90, (3, 7), generator=torch.Generator().manual_seed(0))
    keep = torch.arange(7)[None] < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        want = [model(input_ids=ids[row, :n][None]).logits[0] for row, n in enumerate(lengths)]
    for count in (1, 2, 3):
        got = replay(graph)(ids, keep, num_logits_to_keep=torch.tensor([count]))
        assert got.shape == (3, count, 97)
        for row in range(3):
            torch.testing.assert_close(got[row], want[row][-count:], atol=1e-5, rtol=1e-4)
    whole = replay(graph)(ids, keep, num_logits_to_keep=torch.tensor([0]))
    assert whole.shape == (3, 7, 97)
    torch.testing.assert_close(whole[0], want[0], atol=1e-5, rtol=1e-4)
    default = replay(graph)(ids, keep)
    torch.testing.assert_close(default[1, 0], want[1][-1], atol=1e-5, rtol=1e-4)


def test_decode_and_more_than_there_is(captured: Any, run: Any, replay: Any) -> None:
    """In a step of one token, n beyond it repeats the first column, and never fails."""
    graph = captured("llama")
    run(graph, NAME)
    steps = replay(graph)
    ids = torch.randint(3, 90, (3, 7))
    steps(ids)
    one = steps(ids[:, :1], num_logits_to_keep=torch.tensor([1]))
    assert one.shape == (3, 1, 97)
    five = replay(graph)(ids[:, :2], num_logits_to_keep=torch.tensor([5]))
    assert five.shape == (3, 5, 97)
    assert torch.equal(five[:, 0], five[:, 3])


def test_option_keep(captured: Any, replay: Any) -> None:
    graph = captured("llama")
    assert PASSES[NAME](keep=0).run(graph) == 1  # type: ignore[call-arg]
    assert replay(graph)(torch.ones(3, 4, dtype=torch.int64)).shape == (3, 4, 97)


def test_leaves_a_module(exported: Any) -> None:
    graph = exported(torch.nn.Linear(8, 4), torch.randn(3, 5, 8))
    assert PASSES[NAME]().run(graph) == 0


def test_leaves_logits_that_are_no_linear(captured: Any) -> None:
    """Where columns are mixed behind the head, leaving some out would change the rest."""
    graph = captured("llama")
    logits = graph.results[0]
    with graph.after(logits):
        mixed = graph.call(torch.ops.aten.cumsum.default, logits, 1)
    graph.output.args = ([mixed],)
    assert PASSES[NAME]().run(graph) == 0
    assert "logits are no linear of the hidden states" in graph.notes[-1]
