from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


def table(
    rows: int, width: int, bits: int, group: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    groups = -(-width // group)
    return (
        torch.randint(256, (rows, groups, group * bits // 8), dtype=torch.uint8),
        (torch.rand(rows, groups) + 0.5).to(dtype),
        torch.randint(256, (rows, -(-groups * bits // 8)), dtype=torch.uint8),
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("width", "group"), [(1, 16), (41, 16), (576, 32), (4864, 128), (130, 6)])
def test_the_reference(
    interpreter: Any, dtype: torch.dtype, bits: int, width: int, group: int
) -> None:
    torch.manual_seed(0)
    packed, scales, zeros = table(11, width, bits, group, dtype)
    ids = torch.tensor([[10, 0, 3], [3, 7, 10]])
    for args in ((packed, scales, zeros), (packed, scales)):
        interpreter.agrees("quantized_embedding", ids, *args, bits=bits, width=width)
        for few in (ids[:0], ids[0, 0], ids.int().t()):
            interpreter.agrees(
                "quantized_embedding", few, *args, bits=bits, width=width,
                launches=int(few.numel() > 0),
            )  # fmt: skip


def test_strides(interpreter: Any) -> None:
    """H02."""
    packed, scales, zeros = table(22, 64, 4, 16, torch.float32)
    args = (packed[::2], torch.cat([scales, scales], 1)[::2, :4], zeros[::2])
    ids = torch.tensor([1, 9, 10, 9])[::2]
    interpreter.agrees("quantized_embedding", ids, *args, bits=4, width=50)


def test_an_id_outside_the_table_shows(interpreter: Any) -> None:
    packed, scales, _ = table(4, 32, 4, 32, torch.float32)
    ids = torch.tensor([-1, 0, 4, 2**40])
    (got,), _ = interpreter.run("quantized_embedding", ids, packed, scales, bits=4, width=32)
    assert got.isnan().all(1).tolist() == [True, False, True, True]


def test_refuses(interpreter: Any) -> None:
    packed, scales, _ = table(4, 32, 2, 32, torch.float32)
    ids = torch.tensor([1])
    told = interpreter.refusal("quantized_embedding", ids, packed, scales, bits=2, width=32)
    assert "2 bits are neither 4 nor 8" in told
