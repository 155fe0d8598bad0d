"""Kernels of dialect ops: the registry, the eager dispatcher, and the one road to a launch.

A file in `kernels/` registers its launcher on an op with `kernel`, together with `refuses` (why it
cannot take these arguments) and `forms` (what is compiled ahead of time). `call` takes the first
kernel that does not refuse, else the op's reference, and `choices` tells what was taken and why.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from qopt import ops
from qopt.lower import Choice

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")  # what kernels are compiled for and sized by
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "u1",
}  # torch's element types as Triton writes them
NARROW = ("*bf16", "*fp8e4nv", "*fp8e5")  # no operands of a dot in the interpreter
_SCALARS = {"tl.int32": "i32", "tl.int64": "i64", "tl.float32": "fp32"}


@dataclass(frozen=True)
class Form:
    """One compiled form of a jit function, as a launch asks for it and as it is built.

    `types` gives Triton's type of every argument that is no constant (`*bf16`, `i64`), `constants`
    the values of the others. `grid` is the rule for its programs, for a reader of the JSON.
    `aligned` names the integers that a build may take for multiples of 16, as it takes pointers.
    """

    function: str
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int
    grid: str = field(default="", compare=False)
    aligned: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Kernel:
    """A launcher that stands in for an op's reference where `refuses` gives no reason.

    Calling it dispatches: the launcher, or the reference where it refuses.
    """

    op: ops.Op
    name: str
    launcher: Callable[..., Any]
    refuses: Callable[..., str | None]
    forms: Callable[[str], Iterable[Form]]
    lacks: Callable[[str], str | None] = lambda _: None

    @property
    def accepts(self) -> str:
        """What it takes, in a sentence."""
        return " ".join((self.refuses.__doc__ or "").partition("\n\n")[0].split())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the launcher, or the op's reference where the kernel refuses."""
        return _run(self.op, [self], args, kwargs)


KERNELS: dict[str, list[Kernel]] = {}
JITS: dict[str, Any] = {}  # jit functions by name
_LAUNCHES: Counter[Form] = Counter()
_CHOICES: dict[tuple[str, str], Choice] = {}


def kernel(
    op: ops.Op,
    name: str,
    *,
    refuses: Callable[..., str | None],
    forms: Callable[[str], Iterable[Form]],
    lacks: Callable[[str], str | None] = lambda _: None,
    first: bool = False,
) -> Callable[[Callable[..., Any]], Kernel]:
    """Register the decorated launcher, which has the op's arguments, as a kernel of the op.

    `refuses` takes the same arguments; its docstring's first paragraph says what the kernel takes.
    `forms` gives, for an architecture, every form that the launcher can ask for, and `lacks` what
    that architecture cannot have of them, and why. Kernels are tried in the order of registration,
    a `first` one before those that are there.
    """

    def register(launcher: Callable[..., Any]) -> Kernel:
        made = Kernel(op, name, launcher, refuses, forms, lacks)
        others = KERNELS.setdefault(op.name, [])
        if any(other.name == name for other in others):
            raise TypeError(f"{op.name} has two kernels named {name}")
        others.insert(0 if first else len(others), made)
        return made

    return register


# --- dispatch --------------------------------------------------------------------------------


def missing() -> str | None:
    """Why no kernel can be loaded here; None where they can."""
    try:
        importlib.import_module("triton")
    except ImportError:
        return "Triton is not installed (Linux: pip install 'qopt-compiler[triton]')"
    return None


@cache
def load() -> str | None:
    """Import every file in `qopt/kernels/`; returns why that cannot be, or None."""
    reason = missing()
    if reason is None:
        package = importlib.import_module("qopt.kernels")
        for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda m: m.name):
            importlib.import_module(f"qopt.kernels.{module.name}")
    return reason


def call(op: str, *args: Any, **kwargs: Any) -> Any:
    """Run a dialect op eagerly: its first kernel that does not refuse, else its reference."""
    reason = load()
    return _run(ops.OPS[op], KERNELS.get(op, []), args, kwargs, [reason] if reason else [])


def explain(op: str, *args: Any, **kwargs: Any) -> tuple[str, list[str]]:
    """Which implementation `call` would take, and why those before it refuse; runs nothing."""
    reason = load()
    told = [reason] if reason else []
    chosen = _choose(KERNELS.get(op, []), args, kwargs, told)
    return chosen.name if chosen else "reference", told


def choices() -> list[Choice]:
    """What this process ran eagerly: op, implementation, how often, and the refusals on the way."""
    return list(_CHOICES.values())


def launched() -> Counter[Form]:
    """The forms that were launched since the last call of this function, and how often."""
    taken = Counter(_LAUNCHES)
    _LAUNCHES.clear()
    return taken


def install(device: str = "CUDA") -> str | None:
    """Make `torch.ops.qopt.*` run the kernels on a device type; returns why not, or None.

    `CPU` serves Triton's interpreter. Ops without a kernel keep their reference.
    """
    reason = load()
    if reason is None:
        _install(device)
    return reason


@cache
def _install(device: str) -> None:
    for name in KERNELS:
        ops.run_on(device, name, partial(call, name))


def _run(
    op: ops.Op,
    kernels: Sequence[Kernel],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    refusals: Sequence[str] = (),
) -> Any:
    told = list(refusals)
    chosen = _choose(kernels, args, kwargs, told)
    _note(op.name, chosen.name if chosen else "reference", told)
    return (chosen.launcher if chosen else op.reference)(*args, **kwargs)


def _choose(
    kernels: Sequence[Kernel], args: Sequence[Any], kwargs: dict[str, Any], told: list[str]
) -> Kernel | None:
    for candidate in kernels:
        reason = candidate.refuses(*args, **kwargs)
        if reason is None:
            return candidate
        told.append(f"{candidate.name}: {reason}")
    return None


def _note(op: str, implementation: str, refusals: Iterable[str]) -> None:
    choice = _CHOICES.setdefault((op, implementation), Choice(op, implementation))
    choice.count += 1
    for refusal in refusals:
        choice.refusals[refusal] = choice.refusals.get(refusal, 0) + 1


# --- what kernels share ----------------------------------------------------------------------


def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter, on tensors of the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def unfit(*tensors: Tensor | None, same: Sequence[Tensor | None] = ()) -> str | None:
    """Why no kernel can read these tensors (None: absent), or None.

    Those in `same` must be of one floating type that kernels have.
    """
    given = [t for t in (*same, *tensors) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return "a gradient is wanted, and kernels have none"
    devices = {str(t.device) for t in given}
    if len(devices) > 1:
        return f"tensors lie on {' and '.join(sorted(devices))}"
    if not interpreting() and not all(t.is_cuda for t in given):
        return f"tensors lie on {given[0].device}, and Triton's interpreter is off"
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in same if t is not None})
    if len(dtypes) > 1:
        return f"element types differ: {', '.join(dtypes)}"
    if same and given[0].dtype not in FLOATS:
        return f"{dtypes[0]} is none of float32, float16, bfloat16"
    return None


def unlike(wide: Tensor, x: Tensor) -> str | None:
    """Why a tensor is neither of the type of x nor of fp32, as a residual stream may be."""
    if wide.dtype in (x.dtype, torch.float32):
        return None
    told = [str(t.dtype).removeprefix("torch.") for t in (wide, x)]
    return f"element types differ: {told[0]} is neither {told[1]} nor float32"


def architecture(device: torch.device) -> str:
    """Whose sizes a launch on this device takes: one of `ARCHITECTURES`."""
    if device.type != "cuda":
        return "sm_80"  # the interpreter
    if torch.version.hip:
        return "gfx942"
    major = torch.cuda.get_device_capability(device)[0]
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")  # sm_12x has the shared memory of sm_86


def launch(
    function: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int,
    num_stages: int,
    **constants: Any,
) -> None:
    """Run a jit function over a grid, and count the form for `launched`.

    A constant `WIDE` is set here: whether operands of a dot must be widened to fp32 first, since
    Triton's interpreter multiplies the bits of bf16 as integers and takes subnormal numbers of e5m2
    for 0. Products are the same.
    """
    form = form_of(
        function,
        [TYPES[a.dtype] if isinstance(a, Tensor) else None for a in args],
        dict(constants, num_warps=num_warps, num_stages=num_stages),
    )
    _LAUNCHES[form] += 1
    if "WIDE" in function.arg_names:
        constants["WIDE"] = interpreting() and any(t in NARROW for _, t in form.types)
    # Triton launches on the current device
    with torch.cuda.device_of(args[0]):  # type: ignore[no-untyped-call]
        function[grid](
            *args,
            **constants,
            num_warps=num_warps,
            num_stages=num_stages,
            enable_fp_fusion=True,  # as built; from Triton 3.10 on the default is another
        )


def form_of(
    function: Any, pointers: Sequence[str | None], options: dict[str, Any], **told: Any
) -> Form:
    """The form of a jit function for arguments of these types (None: no pointer), with options.

    Integers and floats take the types of their annotations.
    """
    names = [n for n in function.arg_names if "constexpr" not in _annotations(function)[n]]
    types = [
        (name, f"*{pointer}" if pointer else _SCALARS[_annotations(function)[name]])
        for name, pointer in zip(names, pointers, strict=True)
    ]
    JITS[function.__name__] = function
    constants = {k: v for k, v in options.items() if k not in ("num_warps", "num_stages")}
    return Form(
        function.__name__,
        tuple(types),
        tuple(sorted(constants.items())),
        options["num_warps"],
        options["num_stages"],
        **told,
    )


@cache
def _annotations(function: Any) -> dict[str, str]:
    given: dict[str, str] = function.fn.__annotations__
    return given


def forms_of(
    function: Any,
    types: dict[str, str],
    options: dict[str, Any],
    dtypes: Iterable[torch.dtype] = FLOATS,
    **told: Any,
) -> list[Form]:
    """One form for each floating type: pointers are of it, but for those that `types` names."""
    annotations = _annotations(function)
    names = [n for n in function.arg_names if "constexpr" not in annotations[n]]
    return [
        form_of(
            function,
            [types.get(n, dtype) if annotations[n] not in _SCALARS else None for n in names],
            options,
            **told,
        )
        for dtype in (TYPES[d] for d in dtypes)
    ]


def rows(x: Tensor) -> Tensor:
    """x as (rows, width), elements of a row side by side; a copy where strides forbid a view."""
    flat = x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.reshape(x.shape[:-1].numel(), 0)
    return flat if flat.shape[1] <= 1 or flat.stride(1) == 1 else flat.contiguous()
