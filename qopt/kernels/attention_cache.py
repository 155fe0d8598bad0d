"""A cache that attention reads in place: where its slots lie, int8 widened, new tokens written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from qopt.kernel import FLOATS, HALVES, Form, forms_of, launch, unfit

SIZES = (64, 128, 256)  # elements of a head that a tile holds


def lacks(arch: str) -> str | None:
    """What this Triton cannot compile for an architecture: 3.6 has a bug that 3.7 has not."""
    old = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7)
    if old and arch.startswith("gfx"):
        return f"int8 caches: Triton {triton.__version__} cannot compile them for {arch}, 3.7 can"
    return None


@triton.jit
def rounded(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """x / scale within ±127, to the nearest even."""
    steps = tl.div_rn(x, tl.where(scale == 0.0, 1.0, scale))
    steps = tl.minimum(tl.maximum(steps, -127.0), 127.0)
    return ((steps + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 * 2 ** 23: no fraction is left


@triton.jit
def _write_row(
    x_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    channel_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    scale_token_stride: tl.tensor,
    size: tl.tensor,
    here: tl.tensor,
    BLOCK_D: tl.constexpr,
) -> None:
    d = tl.arange(0, BLOCK_D)
    width = tl.where(here, size, 0)
    x = tl.load(x_ptr + d, mask=d < width, other=0.0)
    if cache_ptr.dtype.element_ty == tl.int8:
        per_token = scale_token_stride != 0
        wide = x.to(tl.float32)
        own = tl.div_rn(tl.max(tl.abs(wide), axis=0), 127.0)
        channel = tl.load(channel_ptr + d, mask=d < tl.where(per_token, 0, width), other=0.0)
        tl.store(scale_ptr, own, mask=here & per_token)
        x = rounded(wide, tl.where(per_token, own, channel))
    tl.store(cache_ptr + d, x, mask=d < width)


@triton.jit
def _write_cache_kernel(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    key_scale_ptr: tl.tensor,
    value_scale_ptr: tl.tensor,
    table_ptr: tl.tensor,
    length_ptr: tl.tensor,
    count_ptr: tl.tensor,
    k_batch_stride: tl.int64,
    k_head_stride: tl.int64,
    k_token_stride: tl.int64,
    v_batch_stride: tl.int64,
    v_head_stride: tl.int64,
    v_token_stride: tl.int64,
    key_batch_stride: tl.int64,
    key_head_stride: tl.int64,
    key_token_stride: tl.int64,
    value_batch_stride: tl.int64,
    value_head_stride: tl.int64,
    value_token_stride: tl.int64,
    key_scale_batch_stride: tl.int64,
    key_scale_head_stride: tl.int64,
    key_scale_token_stride: tl.int64,
    value_scale_batch_stride: tl.int64,
    value_scale_head_stride: tl.int64,
    value_scale_token_stride: tl.int64,
    kv_heads: tl.int32,
    new: tl.int32,
    slots: tl.int32,
    block: tl.int32,
    size: tl.int32,
    value_size: tl.int32,
    PAGED: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    token, head, batch = row % new, row // new % kv_heads, row // new // kv_heads
    home = batch  # the first index into the cache
    if PAGED:
        slot = tl.load(length_ptr + batch) + token
        here = (slot < slots) & (token < tl.load(count_ptr + batch))
        table_ptr += batch * (slots // block)
        home = tl.load(table_ptr + slot // block, mask=here, other=-1).to(tl.int64)
        here = here & (home >= 0)
        slot = slot % block
    else:
        slot = tl.load(length_ptr) + token
        here = slot < slots
    _write_row(
        k_ptr + batch * k_batch_stride + head * k_head_stride + token * k_token_stride,
        key_ptr + home * key_batch_stride + head * key_head_stride + slot * key_token_stride,
        key_scale_ptr + head * key_scale_head_stride,
        key_scale_ptr
        + home * key_scale_batch_stride
        + head * key_scale_head_stride
        + slot * key_scale_token_stride,
        key_scale_token_stride,
        size,
        here,
        BLOCK_D,
    )
    _write_row(
        v_ptr + batch * v_batch_stride + head * v_head_stride + token * v_token_stride,
        value_ptr
        + home * value_batch_stride
        + head * value_head_stride
        + slot * value_token_stride,
        value_scale_ptr + head * value_scale_head_stride,
        value_scale_ptr
        + home * value_scale_batch_stride
        + head * value_scale_head_stride
        + slot * value_scale_token_stride,
        value_scale_token_stride,
        value_size,
        here,
        BLOCK_D,
    )


@dataclass
class Cache:
    """Keys and values as a launch reads them, and how many of their slots are filled.

    `key` and `value` are (B, K, M, D), or pools (blocks, K, block, D) with a `table`, int32
    (B, pages). `past` is how many tokens lie there before the new ones; None: `lengths` has it, on
    the device, int64 [1], or [B] with a table. `counts` int64 [B] are real new tokens, with a
    table. Scales are fp32, for int8. `mask` (B, M) tells holes, without a table.
    """

    key: Tensor
    value: Tensor
    past: int | None = None
    lengths: Tensor | None = None
    counts: Tensor | None = None
    table: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    mask: Tensor | None = None

    @property
    def slots(self) -> int:
        """Tokens that a sequence can hold."""
        block = self.key.shape[2]
        return block if self.table is None else block * self.table.shape[1]

    def strides(self) -> list[int]:
        """Batch (or page), head and token strides of keys, values, and of the scales of each.

        A token stride of 0 tells scales per channel, which have no batch either.
        """
        given = [*self.key.stride()[:3], *self.value.stride()[:3]]
        for scale in (self.key_scale, self.value_scale):
            if scale is None or scale.dim() == 3:
                given += [0, 0 if scale is None else scale.stride(0), 0]
            else:
                given += [*scale.stride()[:2], max(1, scale.stride(2))]
        return given

    def pointers(self) -> list[Tensor]:
        """Scales of keys and of values, table, lengths, counts; something of its type for each."""

        def given(x: Tensor | None, dtype: torch.dtype) -> Tensor:
            return torch.empty(1, dtype=dtype, device=self.key.device) if x is None else x

        return [
            given(self.key_scale, torch.float32),
            given(self.value_scale, torch.float32),
            given(self.table, torch.int32),
            given(self.lengths, torch.int64),
            given(self.counts, torch.int64),
        ]


def write(k: Tensor, v: Tensor, cache: Cache) -> None:
    """Put new keys and values (B, K, S, D) behind what lies there; int8 with their scales.

    What has no place, behind the last slot or where no page is, is dropped: only the device knows.
    """
    if not k.numel() or not v.numel():
        return
    k, v = side_by_side(k), side_by_side(v)
    launch(
        _write_cache_kernel,
        (k.shape[0] * k.shape[1] * k.shape[2],),
        k,
        v,
        cache.key,
        cache.value,
        *cache.pointers(),
        *k.stride()[:3],
        *v.stride()[:3],
        *cache.strides(),
        k.shape[1],
        k.shape[2],
        cache.slots,
        cache.key.shape[2],
        k.shape[3],
        v.shape[3],
        PAGED=cache.table is not None,
        **WRITE_TILE,
    )


POINTERS = {
    "key_scale_ptr": "fp32",
    "value_scale_ptr": "fp32",
    "table_ptr": "i32",
    "length_ptr": "i64",
    "count_ptr": "i64",
}  # those that are not of the type of q
WRITE_TILE = {"BLOCK_D": SIZES[-1], "num_warps": 1, "num_stages": 1}


def write_forms(paged: bool) -> Iterator[Form]:
    """Every form that `write` asks for."""
    strides = (
        f"{x}_{axis}_stride"
        for x in ("k", "v", "key", "value")
        for axis in ("batch", "head", "token")
    )
    for int8 in (False, True):
        yield from forms_of(
            _write_cache_kernel,
            POINTERS | (dict.fromkeys(("key_ptr", "value_ptr"), "i8") if int8 else {}),
            WRITE_TILE | {"PAGED": paged},
            HALVES if int8 else FLOATS,
            grid="(batch * kv_heads * new, 1, 1)",
            aligned=(*strides, "size", "value_size"),
        )


def side_by_side(x: Tensor) -> Tensor:
    """x as it is where the elements of a head lie side by side, else a copy."""
    return x if x.stride(3) == 1 else x.contiguous()


def unfit_cache(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    key: Tensor,
    value: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    softcap: float | None,
    *others: Tensor | None,
) -> str | None:
    """Why no kernel can read and write this cache in place, or None."""
    reason = unfit_heads(q, key, value, softcap)
    if reason is not None:
        return reason
    if (k is None) != (v is None):
        return "keys are given without values, or values without keys"
    if {key.dtype, value.dtype} >= {torch.int8} and key.dtype != value.dtype:
        return "keys or values alone are int8"
    int8 = key.dtype == torch.int8
    for name, cache, scale in (("keys", key, key_scale), ("values", value, value_scale)):
        reason = unfit_buffer(name, cache) or unfit_scale(name, cache, scale)
        if reason is not None:
            return reason
    if int8 and q.dtype not in HALVES:
        return f"{q.dtype} has no int8 cache: float16 or bfloat16".replace("torch.", "")
    if int8 and torch.version.hip and lacks("gfx942") is not None:
        return lacks("gfx942")
    held = [] if int8 else [key, value]
    laid = [key, value, key_scale, value_scale, *others]
    return unfit(*laid, same=[q, k, v, *held])


def unfit_heads(q: Tensor, key: Tensor, value: Tensor, softcap: float | None) -> str | None:
    """Why no attention kernel takes heads of these sizes, or this soft-cap; None where one does."""
    if q.shape[1] % key.shape[1]:
        return f"{q.shape[1]} heads are no multiple of {key.shape[1]}"
    if max(q.shape[3], value.shape[3]) > SIZES[-1]:
        return f"heads of {max(q.shape[3], value.shape[3])} elements exceed {SIZES[-1]}"
    if softcap is not None and softcap <= 0:
        return f"soft-cap {softcap} is not positive"
    return None


def unfit_buffer(name: str, cache: Tensor) -> str | None:
    """Why a kernel cannot write here in place: unlike an input, a buffer cannot be copied."""
    if cache.shape[3] > 1 and cache.stride(3) != 1:
        return f"elements of cached {name} do not lie side by side"
    if any(n > 1 and s == 0 for n, s in zip(cache.shape, cache.stride(), strict=True)):
        return f"cached {name} are expanded: slots share their memory"
    return None


def unfit_scale(name: str, cache: Tensor, scale: Tensor | None) -> str | None:
    """Why these scales do not serve this cache, or None."""
    if cache.dtype != torch.int8:
        return None if scale is None else f"cached {name} have scales and are not int8"
    if scale is None:
        return f"cached {name} are int8 and have no scales"
    if scale.dtype != torch.float32:
        return f"scales of cached {name} are {scale.dtype}, not float32".replace("torch.", "")
    per_channel = (cache.shape[1], 1, cache.shape[3])
    if tuple(scale.shape) not in (per_channel, (*cache.shape[:3], 1)):
        return f"scales of cached {name} have shape {tuple(scale.shape)}"
    if scale.dim() == 3 and scale.shape[2] > 1 and scale.stride(2) != 1:
        return f"scales of cached {name} do not lie side by side"
    return None if scale.dim() == 3 else unfit_buffer(f"{name}' scales", scale)
