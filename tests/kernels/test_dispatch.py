"""The dispatcher: what ran, and why nothing faster did, is always told."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from qopt import kernel, kernel_build
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


@pytest.mark.slow
def test_launches_bind_and_compile_as_on_a_gpu() -> None:
    """What the interpreter leaves out: Triton's own reading of arguments, and its compiler.

    A driver that names a target and no device takes every launch as far as the binary: odd widths,
    sizes of 1, absent weights, whatever is then taken for a constant or a multiple of 16.
    """
    code = """
import importlib
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from qopt import kernel

class NoDevice:
    launcher_cls = None
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_active_torch_device(self): return torch.device("cpu")
    def map_python_to_cpp_type(self, name): return name

driver.set_active(NoDevice())
names = set()

def launch(function, grid, *args, **options):
    if "WIDE" in function.arg_names:
        options["WIDE"] = False
    made = function.run(*args, grid=grid, warmup=True, enable_fp_fusion=True, **options)
    names.add(made.metadata.name)
    assert made.asm["cubin"]

assert kernel.load() is None
for found in kernel.KERNELS.values():
    for one in found:
        importlib.import_module(one.launcher.__module__).launch = launch
importlib.import_module("qopt.kernels.attention_cache").launch = launch

def run(op, *args, **kwargs):
    for one in kernel.KERNELS[op]:
        one.launcher(*args, **kwargs)

def half(*size):
    return torch.randn(*size).bfloat16()

def byte(*size):
    return torch.randint(256, size, dtype=torch.uint8)

for width in (1, 41, 576):
    run("rms_norm", half(2, width), None, 1e-6)
    run("add_rms_norm", half(2, width), half(2, width), half(width), 1e-6)
    run("gated", half(2, width), half(2, width))
    run("softmax", half(2, width), torch.rand(2, width) < 0.5)
    run("rms_norm_linear", half(1, width), None, half(7, width), None, 1e-6)
    run("linear_silu", half(1, width), half(8, width), None, True)
turned = half(1, 9, 1, 64), half(1, 1, 1, 64)
run("rotary_from_positions", *turned, torch.zeros(1, 1).long(), torch.rand(32))
new = half(1, 3, 1, 64), half(1, 3, 1, 64)
past = (half(1, 3, 2100, 64) for _ in range(2))
run("cached_attention", turned[0], *new, *past, None, scale=0.1, softcap=2.0)
buffers = half(1, 3, 1, 64), half(1, 3, 1, 64)
run("static_attention", turned[0], *new, *buffers, torch.zeros(1).long(), None, scale=0.1)
pools, lengths = (half(200, 3, 16, 64) for _ in range(2)), torch.zeros(1).long()
run("paged_attention", turned[0], *new, *pools, torch.zeros(1, 200).int(), lengths, scale=0.1)
pools = (byte(9, 3, 1, 64).view(torch.int8) for _ in range(2))
scales = torch.rand(9, 3, 1, 1), torch.rand(3, 1, 64)
run("paged_attention", turned[0], *new, *pools, torch.zeros(1, 9).int(), lengths, None, None,
    *scales, scale=0.1, window=2, softcap=1.0)
for width in (1, 41):
    run("int8_linear", half(1, width), byte(1, width).view(torch.int8), torch.rand(1))
    run("fp8_linear", half(1, width), half(3, width).to(torch.float8_e4m3fn), torch.rand(3),
        quantize=width > 1)
run("quantized_embedding", torch.tensor([1]), byte(4, 1, 16), half(4, 1), bits=4, width=30)
run("quantized_linear", half(1, 64), byte(4, 2, 16), half(4, 2), bits=4)
ids = torch.tensor([[0], [1], [1]])
matrices = half(2, 8, 16), None, half(2, 16, 4), None
run("experts", half(3, 16), ids, torch.rand(3, 1), *matrices, activation="silu")
print(*sorted(names))
"""
    kernel_build.ready()
    shipped = {form.function for _, form in kernel_build.all_forms("sm_90")}
    assert python(code).split() == sorted(shipped)
