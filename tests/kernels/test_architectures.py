"""The tiles of each architecture compute the same; elsewhere the interpreter takes sm_80's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from qopt import kernel
from qopt.kernel import ARCHITECTURES

EACH = """
import sys
import torch
from qopt import kernel
from qopt.ops import OPS

assert kernel.load() is None
shipped = set()
for found in kernel.KERNELS.values():
    for one in found:
        shipped |= set(one.forms(sys.argv[1]))
        module = sys.modules[one.launcher.__module__]
        if hasattr(module, "architecture"):
            module.architecture = lambda device: sys.argv[1]

def byte(*size):
    return torch.randint(256, size, dtype=torch.uint8)

torch.manual_seed(0)
for dtype in (torch.float32, torch.float16):
    def some(*size):
        return torch.randn(*size).to(dtype)
    calls = []
    for rows in (3, 70):
        calls += [
            ("rms_norm_linear", (some(rows, 97), some(97), some(33, 97) / 8, None, 1e-6), {}),
            ("linear_silu", (some(rows, 97), some(34, 97) / 8, some(34), True), {}),
            ("quantized_linear", (some(rows, 96), byte(33, 3, 16), some(33, 3) / 99), {"bits": 4}),
            ("quantized_linear", (some(rows, 96), byte(33, 2, 64), some(33, 2) / 999), {"bits": 8}),
            ("experts", (some(rows, 16), torch.randint(2, (rows, 2)), torch.rand(rows, 2),
             some(2, 10, 16) / 4, None, some(2, 16, 5) / 4, None), {"activation": "silu"}),
        ]
        calls.append(("int8_linear", (some(rows, 96), byte(33, 96).view(torch.int8),
            torch.rand(33) / 999), {}))
        weight = (some(33, 96) / 8).to(torch.float8_e4m3fn)
        args = (some(rows, 96), weight, torch.rand(33))
        calls.append(("fp8_linear", args, {"quantize": True}))
    for new in (2, 150):
        for size in (64, 100, 200):
            heads = some(1, 2, new, size), some(1, 1, new, size), some(1, 1, new, size)
            past = some(1, 1, 9, size), some(1, 1, 9, size)
            options = {"scale": size**-0.5}
            calls.append(("cached_attention", (*heads, *past, None), options))
            if size == 200 and dtype == torch.float16:
                at, table = torch.tensor([9]), torch.arange(11)[None].int()
                pools = [some(11, 1, 16, size) for _ in "kv"]
                calls.append(("paged_attention", (*heads, *pools, table, at), options))
                held = [byte(1, 1, 160, size).view(torch.int8) for _ in "kv"]
                scales = [torch.rand(1, 1, size) / 99, torch.rand(1, 1, 160, 1) / 99]
                args = (*heads, *held, at, None, None, *scales)
                calls.append(("static_attention", args, options))
    for name, args, kwargs in calls:
        got = kernel.call(name, *args, **kwargs)
        want = OPS[name].reference(*args, **kwargs)
        launched = kernel.launched()
        assert launched and set(launched) <= shipped, (name, launched)
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want))):
            tolerance = 2e-5 if dtype == torch.float32 else 4e-3
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
print("same")
"""


@pytest.mark.parametrize(
    "arch",
    [pytest.param(a, marks=[] if a == "sm_90" else pytest.mark.slow) for a in ARCHITECTURES[1:]],
)
def test_the_reference(arch: str) -> None:
    assert kernel.load() is None
    done = subprocess.run(
        [sys.executable, "-P", "-c", EACH, arch],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "same", done.stderr
