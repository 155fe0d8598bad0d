"""`qopt doctor`: what is installed, which targets work here, and why the others do not."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from qopt import __version__
from qopt.cache import cache_dir
from qopt.report import Table

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "tokenizers",
    "gguf",
    "numpy",
    "onnx",
    "onnx-ir",
    "onnxscript",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-genai",
    "triton",
    "networkx",
    "click",
    "pydantic",
    "ruamel.yaml",
    "rich",
    "jinja2",
    "platformdirs",
)

# what makes a CPU fast at this work, by the names that Linux has for it
FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_int8",
    "amx_bf16",
    "amx_fp16",
    "amx_tile",
    "asimd",
    "asimddp",
    "asimdhp",
    "i8mm",
    "bf16",
    "sve",
)

# the features with which torch multiplies matrices of a type as fast as it can
NATIVE = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "asimdhp"),
}

NETWORK = (
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_TOKEN",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "PIP_INDEX_URL",
    "QOPT_CACHE_DIR",
)
SECRET = ("HF_TOKEN",)

ORT_FLOOR = (1, 32)
GPU_FLOOR = (1, 31)  # of onnxruntime-gpu, which comes out later


@dataclass
class Findings:
    """What `examine` found."""

    versions: dict[str, str | None]
    machine: dict[str, str]
    targets: dict[str, str | None]  # None: works here; else why not
    environment: dict[str, str]
    problems: list[str]

    def tables(self) -> list[Table]:
        """One table a kind."""
        targets = [(name, why or "works") for name, why in self.targets.items()]
        versions = [(name, version or "-") for name, version in self.versions.items()]
        tables = [
            Table("targets", ("", ""), targets),
            Table("machine", ("", ""), list(self.machine.items())),
            Table("versions", ("", ""), versions),
            Table("environment", ("", ""), list(self.environment.items())),
            Table("problems", ("",), [(problem,) for problem in self.problems]),
        ]
        return [table for table in tables if table.rows]


def examine() -> Findings:
    """Look at this machine; imports none of the heavy packages."""
    installed = {name: _version(name) for name in PACKAGES}
    return Findings(
        versions={"qopt": __version__, "python": platform.python_version(), **installed},
        machine=_machine(),
        targets=_targets(installed["onnxruntime"], installed["onnxruntime-gpu"]),
        environment=_environment(),
        problems=two_runtimes(installed["onnxruntime"], installed["onnxruntime-gpu"])
        + unmet_requirements(metadata.requires("qopt-compiler") or []),
    )


def two_runtimes(cpu: str | None, gpu: str | None) -> list[str]:
    """What to remove when both wheels of onnxruntime are installed."""
    if cpu and gpu:
        return [
            "onnxruntime and onnxruntime-gpu are both installed, and own the same module: "
            "pip uninstall -y onnxruntime onnxruntime-gpu, then install one of them"
            " (onnxruntime, unless this machine has an NVIDIA GPU)"
        ]
    return []


def unmet_requirements(requirements: Sequence[str]) -> list[str]:
    """What is missing, or has a version that qopt was not made for."""
    unmet = []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            unmet.append(f"{requirement} is required, {version or 'none'} is installed")
    return unmet


def _targets(cpu: str | None, gpu: str | None) -> dict[str, str | None]:
    why = _no_runtime(cpu or gpu, ORT_FLOOR)
    return {
        "onnx": why,
        "onnx-cpu": why,
        "onnx-cuda": _no_cuda(cpu, gpu),
        "onnx-cuda-triton": _no_runtime(cpu or gpu, GPU_FLOOR) or _no_binaries(),
        "torchscript-cpu": None,
        "torchscript-cuda": _no_kernels(),
    }


def _no_runtime(version: str | None, floor: tuple[int, int]) -> str | None:
    """Why this onnxruntime does not do."""
    if version is None:
        return "onnxruntime is not installed: pip install 'qopt-compiler[cpu]'"
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < floor:
        wanted = ".".join(map(str, floor))
        return f"onnxruntime {version} is installed, {wanted} or newer is needed"
    return None


def _no_cuda(cpu: str | None, gpu: str | None) -> str | None:
    """Why artifacts for CUDA cannot run here on CUDA; they are compiled and checked."""
    instead = "artifacts are compiled, checked on the CPU and run with --device cpu"
    if gpu is None:
        return f"onnxruntime-gpu is not installed (pip install 'qopt-compiler[gpu]'): {instead}"
    if not Path("/dev/nvidiactl").exists():
        return f"there is no NVIDIA GPU: {instead}"
    return _no_runtime(gpu, GPU_FLOOR)


def _no_binaries() -> str | None:
    """Why no Triton kernel can be compiled into an artifact's folder."""
    if _version("triton") is None:
        return "Triton is not installed, so artifacts hold no kernels: their functions run"
    return None


def _no_kernels() -> str | None:
    """Why the kernels cannot run here; the artifact is compiled and checked."""
    if _version("triton") is None:
        return "Triton is not installed, so ops run as their references in torch"
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists():
        return "there is no GPU, so ops run as their references in torch"
    return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> dict[str, str]:
    cache = cache_dir("models").parent
    there = next(path for path in (cache, *cache.parents) if path.exists())
    writable = "" if os.access(there, os.W_OK) else " (not writable)"
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": sys.executable,
        "CPU": _cpu_name(),
        "CPU features": " ".join(cpu_features()) or "none known",
        "CPU threads": str(os.cpu_count()),
        "memory": f"{_memory() / 1e9:.1f} GB",
        "cache": f"{cache}{writable}",
        "free disk": f"{shutil.disk_usage(there).free / 1e9:.1f} GB",
    }


def _cpu_info(*keys: str) -> str:
    """The first line of /proc/cpuinfo with one of these keys; empty elsewhere than on Linux."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip() in keys), "")


def _cpu_name() -> str:
    return _cpu_info("model name") or platform.processor() or platform.machine()


def cpu_features() -> list[str]:
    """The instruction sets of this CPU that matter here."""
    there = set(_cpu_info("flags", "Features").split())
    return [feature for feature in FEATURES if feature in there]


def slow_in_torch(dtype: str) -> str | None:
    """Why matrix products of this type are slower than fp32's here; None where they are not.

    torch widens and narrows around each product where the CPU has no instructions for the type.
    """
    there, needed = set(cpu_features()), NATIVE.get(dtype, ())
    if not needed or not there or there & set(needed):
        return None
    return (
        f"this CPU has no {dtype} instructions ({', '.join(needed)}), without which torch "
        "multiplies many tokens more slowly than in fp32"
    )


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _environment() -> dict[str, str]:
    both = [name for upper in NETWORK for name in (upper, upper.lower())]
    return {name: _told(name, os.environ[name]) for name in both if name in os.environ}


def _told(name: str, value: str) -> str:
    """A value without its secrets: a token, or the password of a proxy."""
    scheme, separator, rest = value.rpartition("://")
    return "set" if name.upper() in SECRET else scheme + separator + rest.rpartition("@")[2]
