"""Kernels run in a child process, in Triton's interpreter: Triton must learn of it at its import.

Each op is compared with its reference; every launch must be of a form that is built ahead of time.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from qopt import kernel
from qopt.kernel import Form
from qopt.ops import OPS

# Two roundings; the interpreter's to bf16 is towards zero.
TOLERANCES = {torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}


@dataclass
class Interpreter:
    """A process that runs kernels in Triton's interpreter."""

    pool: ProcessPoolExecutor
    shipped: set[Form]

    def ask(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of qopt there."""
        return self.pool.submit(function, *args, **kwargs).result()

    def run(self, op: str, *args: Any, **kwargs: Any) -> tuple[tuple[Tensor, ...], Counter[Form]]:
        """The results of `qopt.kernel.call`, and what was launched for them."""
        self.ask(kernel.launched)
        results = self.ask(kernel.call, op, *args, **kwargs)
        launched: Counter[Form] = self.ask(kernel.launched)
        unshipped = [form for form in launched if form not in self.shipped]
        assert not unshipped, "launched in a form that is not built ahead of time"
        return results if isinstance(results, tuple) else (results,), launched

    def agrees(
        self, op: str, *args: Any, reduced: int = 1, launches: int = 1, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        """Run an op's kernel and its reference: as many launches, and the same numbers.

        The tolerance is for a sum of `reduced` terms in fp32 and one rounding to the result's type.
        """
        got, launched = self.run(op, *args, **kwargs)
        assert launched.total() == launches
        want = OPS[op].reference(*args, **kwargs)
        for ours, theirs in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
            tolerance = TOLERANCES[ours.dtype] * max(1.0, reduced**0.5 / 8)
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        return got

    def agrees_in_place(
        self, op: str, args: Sequence[Any], *, reduced: int = 1, launches: int = 1, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        """`agrees`, of what an op writes into its arguments too; they travel as shared memory."""
        copies = [x.clone() if isinstance(x, Tensor) else x for x in args]
        got, launched = self.run(op, *args, **kwargs)
        assert launched.total() == launches
        want = OPS[op].reference(*copies, **kwargs)
        tolerance = TOLERANCES[got[0].dtype] * max(1.0, reduced**0.5 / 8)
        torch.testing.assert_close(got[0], want, rtol=tolerance, atol=tolerance)
        for ours, theirs in zip(args, copies, strict=True):
            if isinstance(ours, Tensor):
                assert torch.equal(ours, theirs), "written otherwise"
        return got

    def refusal(self, op: str, *args: Any, **kwargs: Any) -> str:
        """Why no kernel takes these arguments; the reference then runs."""
        taken, told = self.ask(kernel.explain, op, *args, **kwargs)
        assert taken == "reference"
        return "; ".join(told)


@pytest.fixture(scope="session")
def shipped() -> set[Form]:
    """Every form that is built ahead of time for the sizes that the interpreter takes."""
    reason = kernel.load()
    if reason is not None:
        pytest.skip(reason)
    return {
        form
        for found in kernel.KERNELS.values()
        for one in found
        for arch in (("sm_80", "sm_90") if one.lacks("sm_80") else ("sm_80",))
        for form in one.forms(arch)
    }


@pytest.fixture(scope="session")
def interpreter(shipped: set[Form]) -> Iterator[Interpreter]:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context, torch.set_num_threads, (1,)) as pool:
            pool.submit(torch.get_num_threads).result()  # started, with the environment as it is
            os.environ.pop("TRITON_INTERPRET")
            if before is not None:
                os.environ["TRITON_INTERPRET"] = before
            yield Interpreter(pool, shipped)
    finally:
        os.environ.pop("TRITON_INTERPRET", None)
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


@pytest.fixture(params=list(TOLERANCES), ids=lambda d: str(d).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found
