"""What each target can run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from qopt.errors import UnsupportedError, UsageError


@dataclass(frozen=True)
class Target:
    """A runtime to compile for: its operator domains, opsets and element types."""

    name: str
    runs_on: str
    hot_ops: str
    contrib: bool  # whether ops beside the standard ones (`com.microsoft`, `qopt::`) may be used
    opset: int  # the oldest that is written
    newest_opset: int
    dtypes: tuple[torch.dtype, ...]
    runtime: str  # the oldest runtime that loads what is written
    format: str = "onnx"  # onnx | torchscript
    automatic: tuple[torch.dtype, ...] = (torch.float32, torch.float16)  # kept where none is asked
    otherwise: torch.dtype = torch.float32  # what a type that is not kept becomes


TARGETS = {
    "onnx": Target(
        "onnx",
        "any ONNX runtime",
        "standard ops only",
        False,
        21,
        25,
        (torch.float32, torch.float16),
        "onnxruntime>=1.32",
    ),
    "onnx-cpu": Target(
        "onnx-cpu",
        "onnxruntime, onnxruntime-genai",
        "com.microsoft ops where faster",
        True,
        21,
        25,
        (torch.float32, torch.float16),
        "onnxruntime>=1.32",
    ),
    "onnx-cuda": Target(
        "onnx-cuda",
        "onnxruntime-gpu, onnxruntime-genai-cuda",
        "com.microsoft ops of the CUDA provider",
        True,
        23,
        25,
        (torch.float16, torch.bfloat16),
        "onnxruntime-gpu>=1.31",
        automatic=(torch.float16, torch.bfloat16),
        otherwise=torch.float16,
    ),
    "onnx-cuda-triton": Target(
        "onnx-cuda-triton",
        "any ONNX runtime; with a library of ai.qopt ops, CUDA",
        "ai.qopt nodes with functions, Triton binaries beside them",
        False,
        21,
        25,
        (torch.float32, torch.float16, torch.bfloat16),
        "onnxruntime>=1.31",
        automatic=(torch.float32, torch.float16, torch.bfloat16),
    ),
    "torchscript-cpu": Target(
        "torchscript-cpu",
        "libtorch, torch.jit.load",
        "aten ops",
        False,
        0,
        0,
        (torch.float32, torch.float16, torch.bfloat16),
        "torch>=2.11",
        "torchscript",
    ),
    "torchscript-cuda": Target(
        "torchscript-cuda",
        "torch with Triton (`qopt.load`)",
        "qopt:: ops with Triton kernels",
        True,
        0,
        0,
        (torch.float32, torch.float16, torch.bfloat16),
        "torch>=2.11",
        "torchscript",
        (torch.float32, torch.float16, torch.bfloat16),
    ),
}

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def find_target(name: str, portable: bool = False, kernels: bool = False) -> Target:
    """Look a target up; an unknown one is refused with the list.

    `portable` leaves out ops that only qopt registers; `kernels`: architectures are named for them.
    """
    if portable and name != "torchscript-cuda":
        raise UsageError(
            f"portable: is for torchscript-cuda, not {name}", todo="leave it out: the others are"
        )
    if kernels and name in TARGETS and name != "onnx-cuda-triton":
        raise UsageError(
            f"--arch is for onnx-cuda-triton, not {name}",
            why="kernels are compiled into no other artifact",
            todo="leave it out (in a recipe: `architectures`)",
        )
    if name in TARGETS:
        return replace(TARGETS[name], contrib=TARGETS[name].contrib and not portable)
    there = ", ".join(TARGETS)
    raise UsageError(f"no target is named {name}", todo=f"use one of: {there}")


def choose_dtype(
    target: Target, wanted: str, stored: torch.dtype
) -> tuple[torch.dtype, str | None]:
    """The element type to compile in, and what to tell the user where it is not the stored one."""
    if wanted != "auto":
        dtype = DTYPES.get(wanted)
        if dtype is None:
            raise UsageError(f"no dtype is named {wanted}", todo="use auto, fp32, fp16 or bf16")
        if dtype not in target.dtypes:
            able = " or ".join(short_name(d) for d in target.dtypes)
            raise UnsupportedError(
                f"target {target.name} cannot run {short_name(dtype)}",
                why="its hot ops have no kernels for it",
                todo=f"use --dtype {able}",
            )
        return dtype, None
    if stored in target.automatic:
        return stored, None
    name, other = short_name(stored), target.otherwise
    if stored in target.dtypes:
        note = f"the checkpoint is {name}, which moves the logits: it becomes {short_name(other)}"
        return other, f"{note} (--dtype {name} keeps it)"
    note = f"the checkpoint is {name}, which {target.name} cannot run"
    return other, f"{note}: it becomes {short_name(other)}"


def short_name(dtype: torch.dtype) -> str:
    """`fp32`, `fp16`, `bf16`."""
    return next((k for k, v in DTYPES.items() if v == dtype), str(dtype).removeprefix("torch."))


def choose_opset(target: Target, wanted: int | str) -> int | None:
    """The opset that was asked for, or None where the ops decide."""
    if wanted == "auto":
        return None
    if target.format != "onnx":
        raise UsageError(f"target {target.name} has no opsets", todo="leave --opset out")
    if not target.opset <= int(wanted) <= target.newest_opset:
        raise UsageError(
            f"target {target.name} has no opset {wanted}",
            todo=f"use auto, or {target.opset} to {target.newest_opset}",
        )
    return int(wanted)
