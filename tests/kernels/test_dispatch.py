"""The dispatcher: what ran, and why nothing faster did, is always told."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from qopt import kernel
from qopt.ops import OPS


def choice(interpreter: Any, op: str, implementation: str) -> Any:
    found = interpreter.ask(kernel.choices)
    return next((c for c in found if (c.op, c.implementation) == (op, implementation)), None)


def test_choices_are_counted_with_their_reasons(interpreter: Any) -> None:
    x = torch.randn(2, 8)
    before = choice(interpreter, "rms_norm", "triton")
    interpreter.ask(kernel.call, "rms_norm", x, None, 1e-6)
    after = choice(interpreter, "rms_norm", "triton")
    assert after.count == (before.count if before else 0) + 1
    interpreter.ask(kernel.call, "rms_norm", x.double(), None, 1e-6)
    told = choice(interpreter, "rms_norm", "reference").refusals
    assert told["triton: float64 is none of float32, float16, bfloat16"] >= 1


def test_an_op_without_a_kernel_runs_its_reference(interpreter: Any) -> None:
    x = torch.randn(2, 8)
    (got, _), launched = interpreter.run("add_layer_norm", x, x, None, None, 1e-5)
    assert not launched
    assert torch.equal(got, OPS["add_layer_norm"].reference(x, x, None, None, 1e-5)[0])


def python(code: str, **environment: str) -> str:
    """What a fresh process prints."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_torch_ops_run_kernels_where_they_are_installed() -> None:
    code = """
import torch
from qopt import kernel
x = torch.randn(3, 41)
want = torch.ops.qopt.rms_norm(x, None, 1e-6)
assert kernel.install("CPU") is None and kernel.install("CPU") is None and not kernel.launched()
got = torch.ops.qopt.rms_norm(x, None, 1e-6)
torch.testing.assert_close(got, want)
print(*kernel.launched().values())
"""
    assert python(code, TRITON_INTERPRET="1") == "1"


def test_on_the_cpu_the_reason_is_told() -> None:
    code = """
import torch
from qopt import kernel
x = torch.randn(3, 41)
assert torch.equal(kernel.call("rms_norm", x, None, 1e-6), torch.ops.qopt.rms_norm(x, None, 1e-6))
(choice,) = kernel.choices()
print(choice.implementation, choice.count, *choice.refusals, sep="; ")
"""
    told = "triton: tensors lie on cpu, and Triton's interpreter is off"
    assert python(code) == f"reference; 1; {told}"


def test_without_triton_everything_runs_and_says_so() -> None:
    code = """
import sys, torch
sys.modules["triton"] = None
import qopt
from qopt import kernel
x = torch.randn(3, 41)
assert torch.equal(kernel.call("rms_norm", x, None, 1e-6), torch.ops.qopt.rms_norm(x, None, 1e-6))
print(kernel.explain("rms_norm", x, None, 1e-6), kernel.install())
"""
    told = "Triton is not installed (Linux: pip install 'qopt-compiler[triton]')"
    assert python(code) == f"{('reference', [told])} {told}"


def test_a_name_is_taken_once() -> None:
    first = kernel.KERNELS["rms_norm"][0]
    with pytest.raises(TypeError, match="two kernels named triton"):
        kernel.kernel(first.op, "triton", refuses=first.refuses, forms=first.forms)(first.launcher)


def test_every_kernel_says_what_it_takes() -> None:
    assert kernel.load() is None
    for name, found in kernel.KERNELS.items():
        for one in found:
            assert one.accepts.endswith("."), name
            assert one.launcher.__doc__, name
            assert list(one.forms("sm_90")), name
