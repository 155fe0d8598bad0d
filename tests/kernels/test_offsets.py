"""H01: offsets are 64 bits wide, by the code of each kernel and by strides beyond 31 bits."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from qopt import kernel, kernel_build

FAR = """
import torch
from qopt import kernel
from qopt.ops import OPS

def far(x, dim):
    # x as a view with steps of 2 ** 31 + 64 elements along a dimension; pages are touched where
    # x lies, and nowhere else
    strides = list(torch.empty(x.shape).stride())
    strides[dim] = 2**31 + 64
    size = sum(s * (n - 1) for s, n in zip(strides, x.shape)) + 1
    y = torch.empty(size, dtype=x.dtype).as_strided(x.shape, strides)
    y.copy_(x)
    return y

torch.manual_seed(0)
half = lambda *s: torch.randn(*s).half()
byte = lambda *s: torch.randint(256, s, dtype=torch.uint8)
calls = {
    "rms_norm": lambda: ((far(half(2, 40), 0), None, 1e-6), {}),
    "add_rms_norm": lambda: ((half(2, 40), far(half(2, 40), 0), None, 1e-6), {}),
    "gated": lambda: ((far(half(2, 40), 0), half(2, 40)), {}),
    "softmax": lambda: ((far(half(2, 40), 0),), {}),
    "rms_norm_linear": lambda: ((half(2, 40), None, far(half(2, 40), 0), None, 1e-6), {}),
    "linear_silu": lambda: ((half(2, 40), far(half(2, 40), 0), None, True), {}),
    "rotary_from_positions": lambda: (
        (far(half(1, 2, 3, 8), 1), half(1, 1, 3, 8), torch.arange(3)[None], torch.rand(4)), {}
    ),
    "cached_attention": lambda: ((far(half(1, 2, 3, 8), 1), *[half(1, 2, 3, 8)] * 2, None, None,
        None), {"scale": 0.3}),
    "static_attention": lambda: ((half(1, 2, 3, 8), far(half(1, 2, 3, 8), 1), half(1, 2, 3, 8),
        far(half(1, 2, 5, 8), 1), far(half(1, 2, 5, 8), 1), torch.tensor([1]), None),
        {"scale": 0.3}),
    "paged_attention": lambda: ((half(1, 2, 3, 8), half(1, 2, 3, 8), far(half(1, 2, 3, 8), 1),
        far(half(3, 2, 2, 8), 2), far(half(3, 2, 2, 8), 1), torch.tensor([[1, 0, 2]]).int(),
        torch.tensor([2])), {"scale": 0.3}),
    "int8_linear": lambda: ((far(half(2, 40), 0), far(byte(2, 40).view(torch.int8), 0),
        torch.rand(2)), {}),
    "fp8_linear": lambda: ((half(2, 40), far(half(2, 40).to(torch.float8_e5m2), 0),
        torch.rand(2)), {}),
    "quantized_embedding": lambda: (
        (torch.tensor([1, 0]), far(byte(2, 1, 32), 0), half(2, 1)), {"bits": 8, "width": 30}
    ),
    "quantized_linear": lambda: ((half(2, 32), far(byte(2, 1, 32), 0), half(2, 1)), {"bits": 8}),
    "experts": lambda: (
        (half(3, 16), torch.tensor([[0], [1], [1]]), torch.rand(3, 1), far(half(2, 8, 16), 0),
        None, half(2, 16, 4), None), {"activation": "silu"}
    ),
}
for name, make in calls.items():
    args, kwargs = make()
    got = kernel.call(name, *args, **kwargs)
    assert kernel.launched(), kernel.choices()
    want = OPS[name].reference(*args, **kwargs)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want))):
        torch.testing.assert_close(a, b, rtol=4e-3, atol=4e-3, msg=name)
    print(name)
"""


@pytest.mark.slow
def test_steps_of_more_than_31_bits() -> None:
    assert kernel.load() is None
    done = subprocess.run(
        [sys.executable, "-P", "-c", FAR],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted(kernel.KERNELS), "each op with a kernel has a case"


# Products of two sizes in 32 bits that may stand: none of them grows with a stride.
SMALL = {
    "_decode_attention_kernel": 3,  # rows of a group, all heads, a split's first slot
}


def first_forms() -> dict[str, tuple[kernel.Kernel, kernel.Form]]:
    """One form of each jit function."""
    found: dict[str, tuple[kernel.Kernel, kernel.Form]] = {}
    for one, form in kernel_build.all_forms("sm_90"):
        found.setdefault(form.function, (one, form))
    return found


def test_products_are_64_bits_wide() -> None:
    """A row times its width overflows 32 bits long before memory ends: 40000 rows of 65536."""
    kernel_build.ready()
    for name, (one, form) in first_forms().items():
        assert all(kind == "i64" for arg, kind in form.types if arg.endswith("_stride")), name
        code = kernel_build.compile_form(one, form, "sm_90").ttir
        operands = re.findall(r"arith\.muli (%\w+), (%\w+) : (?:i32|tensor<[^>]*xi32>)", code)
        constant = set(re.findall(r"(%\w+) = arith\.constant", code))
        constant |= {
            made
            for made, source in re.findall(r"(%\w+) = tt\.splat (%\w+) ", code)
            if source in constant
        }
        products = [pair for pair in operands if not constant & set(pair)]
        assert len(products) == SMALL.get(name, 0), (name, products)
