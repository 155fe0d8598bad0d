"""Sessions: the one place where a runtime library is called.

A `Session` runs a model on named arrays, and steps a decoder whose `Cache` it reads and updates.
`OnnxSession` is onnxruntime.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from qopt.errors import UnsupportedError, UsageError
from qopt.runtime.widened import BFLOAT16, TOLD, widen

if TYPE_CHECKING:
    from qopt.runtime.cache import Cache

assert ml_dtypes  # numpy knows `bfloat16` by it

Array = NDArray[Any]
Feeds = Mapping[str, Array]

KEEP = "num_logits_to_keep"  # how many of each row's last logits to compute; 0: all columns
CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
MOST_THREADS = 8  # more rarely pays on the memory-bound decode step

_DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "bfloat16",
    "tensor(double)": "float64",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(int8)": "int8",
    "tensor(uint8)": "uint8",
    "tensor(bool)": "bool",
}


class Tensor(Protocol):
    """A value that a session keeps where it computes."""

    def numpy(self) -> Array:
        """Its values on the host, to be read alone: the memory may be the tensor's own."""
        ...


@dataclass(frozen=True)
class Spec:
    """Type and shape of one input or output; a dimension is a number or a name."""

    dtype: str
    shape: tuple[int | str, ...]


class Session(Protocol):
    """A loaded model."""

    inputs: dict[str, Spec]
    outputs: dict[str, Spec]

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """All outputs by name; int32 and bool arrays are taken where int64 is declared."""
        ...

    def step(self, feeds: Feeds, cache: Cache) -> Array:
        """Run a decoder on `feeds` and the cache, which it updates; returns the logits."""
        ...

    def tensor(self, array: Array) -> Tensor:
        """A tensor for the cache; on a CPU it shares the array's memory."""
        ...

    def told(self) -> list[str]:
        """What is to be said of how it ran until now."""
        ...


def physical_cores() -> int:
    """The physical cores that this process may use."""
    try:
        usable = os.sched_getaffinity(0)
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1
    siblings = set()
    for cpu in usable:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(path.read_text().strip() if path.is_file() else str(cpu))
    return len(siblings)


def default_threads() -> int:
    """Threads where none are asked for: the physical cores, at most 8."""
    return min(physical_cores(), MOST_THREADS)


def import_onnxruntime() -> Any:
    """onnxruntime, or an error that names what to install or to remove."""
    wheels = {"onnxruntime", "onnxruntime-gpu"} & {
        (dist.metadata["Name"] or "").lower().replace("_", "-") for dist in metadata.distributions()
    }
    if len(wheels) == 2:
        raise UsageError(
            "both onnxruntime and onnxruntime-gpu are installed",
            why="they own the same Python module, so which one runs is chance",
            todo="remove one: `pip uninstall onnxruntime` to run on the GPU, else "
            "`pip uninstall onnxruntime-gpu`; then reinstall the other with --force-reinstall",
        )
    try:
        import onnxruntime
    except ImportError as error:
        raise UsageError(
            "onnxruntime is not installed",
            why=str(error),
            todo="pip install 'qopt-compiler[cpu]'",
        ) from None
    return onnxruntime


def providers_for(target: str, device: str | None = None) -> tuple[str, ...]:
    """The execution providers that an ONNX artifact of a target runs on.

    `device`: `cpu` or `cuda`; None is the target's own: the GPU for onnx-cuda, and for
    onnx-cuda-triton where this onnxruntime has it, else the CPU.
    """
    if device is None:
        there = target == "onnx-cuda-triton" and CUDA in cuda_or_cpu()
        device = "cuda" if target == "onnx-cuda" or there else "cpu"
    return (CUDA, CPU) if device == "cuda" else (CPU,)


def device_at_hand(target: str) -> str | None:
    """Where to try an artifact out: one for CUDA on the CPU where there is no GPU."""
    if not target.startswith("onnx-cuda"):
        return None
    return "cuda" if CUDA in cuda_or_cpu() else "cpu"


def cuda_or_cpu() -> tuple[str, ...]:
    """CUDA and CPU, or the CPU alone: what this onnxruntime and this machine have."""
    there = import_onnxruntime().get_available_providers()
    return (CUDA, CPU) if CUDA in there and Path("/dev/nvidiactl").exists() else (CPU,)


def remarks(target: str, dtype: str, providers: Sequence[str]) -> list[str]:
    """What of an artifact's target is not run on these providers."""
    told = []
    if target == "onnx-cuda" and CUDA not in providers:
        told.append(
            "the CUDA provider's kernels were not run: the CPU provider's were, which compute in "
            "fp32 where it has none in fp16"
        )
    if target == "onnx-cuda-triton":
        told.append("no Triton kernel was run: ai.qopt nodes were their functions of standard ops")
    if dtype == "bfloat16" and CUDA not in providers:
        told.append(TOLD)
    return told


class OrtTensor:
    """A value in onnxruntime, on the CPU or on the GPU; numpy has no bf16, onnxruntime has."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def numpy(self) -> Array:
        """Its values on the host, to be read alone: the memory may be the tensor's own."""
        if self.value.data_type() != "tensor(bfloat16)":
            return np.asarray(self.value.numpy())
        bits = np.empty(self.value.shape(), np.uint16)
        if bits.size and self.value.device_name() == "cpu":
            held = (ctypes.c_uint16 * bits.size).from_address(self.value.data_ptr())
            bits[...] = np.ctypeslib.as_array(held).reshape(bits.shape)
        elif bits.size:
            import_onnxruntime().copy_tensors([self.value], [_of_bits(bits)])
        return bits.view(ml_dtypes.bfloat16)


def ort_tensor(array: Array, device: str) -> OrtTensor:
    """An array in onnxruntime; on the CPU it shares the array's memory."""
    ort = import_onnxruntime()
    if array.dtype != ml_dtypes.bfloat16:
        return OrtTensor(ort.OrtValue.ortvalue_from_numpy(array, device, 0))
    held = _of_bits(np.ascontiguousarray(array).view(np.uint16))
    if device == "cpu":
        return OrtTensor(held)
    made = ort.OrtValue.ortvalue_from_shape_and_type(array.shape, BFLOAT16, device, 0)
    if array.size:
        ort.copy_tensors([held], [made])
    return OrtTensor(made)


def _of_bits(bits: Array) -> Any:
    """A bf16 value in the memory of an uint16 array."""
    return import_onnxruntime().OrtValue.ortvalue_from_numpy_with_onnx_type(bits, BFLOAT16)


class OnnxSession:
    """onnxruntime on an ONNX file."""

    def __init__(
        self,
        path: Path,
        *,
        threads: int | None = None,
        providers: Sequence[str] = (CPU,),
        wide: bool = False,
        told: Sequence[str] = (),
    ) -> None:
        """`threads`: default the physical cores, at most 8; `providers`: all must be there.

        `wide`: run what is bf16 in fp32; `told`: what is to be said of how it runs.
        """
        self._ort = import_onnxruntime()
        model, self._keep = _changed(path, wide)
        self._session = new_session(model or str(path), path, threads, providers)
        # onnxruntime drops a provider that fails to start, with no more than a log line
        _refuse_missing(providers, self._session.get_providers(), "the session")
        self._device = "cuda" if CUDA in providers else "cpu"
        self._told = list(told)
        self.inputs = {i.name: _spec(i) for i in self._session.get_inputs()}
        self.outputs = {o.name: _spec(o) for o in self._session.get_outputs()}
        self._binding = self._session.io_binding()
        self._bound: tuple[Cache, int] | None = None  # whose buffers the binding holds

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """All outputs by name; integers of any width and bool are taken where int64 is declared."""
        refuse_other_inputs(feeds, set(self.inputs) - set(self._keep), self._keep)
        given = self._cast(feeds)
        if "bfloat16" in {s.dtype for s in (*self.inputs.values(), *self.outputs.values())}:
            held = {name: ort_tensor(array, "cpu").value for name, array in given.items()}
            made = self._session.run_with_ort_values(list(self.outputs), held)
            return {n: OrtTensor(v).numpy() for n, v in zip(self.outputs, made, strict=True)}
        return dict(zip(self.outputs, self._session.run(None, given), strict=True))

    def step(self, feeds: Feeds, cache: Cache) -> Array:
        """Run a decoder on `feeds` and the cache, which it updates; returns the logits."""
        if self._bound != (cache, cache.version):
            self._bind_shared(cache)
        binding = self._binding
        for name, array in self._cast(feeds).items():
            binding.bind_cpu_input(name, array)
        # Bound anew each step, else onnxruntime writes into the tensors of the step before. What
        # is not shared comes out where onnxruntime put it and goes back in as it is, uncopied.
        binding.bind_output("logits")
        for past, present in cache.loose.items():
            binding.bind_ortvalue_input(past, _value(cache.values[past]))
            binding.bind_output(present, self._device, 0)
        self._session.run_with_iobinding(binding)
        if cache.loose:
            logits, *presents = map(OrtTensor, binding.get_outputs()[: 1 + len(cache.loose)])
            cache.values.update(zip(cache.loose, presents, strict=True))
            return logits.numpy()
        logits = binding.get_outputs_as_ortvaluevector()[0]
        if self.outputs["logits"].dtype == "bfloat16":
            return OrtTensor(self._ort.OrtValue(logits)).numpy()
        return np.asarray(logits.numpy())

    def tensor(self, array: Array) -> OrtTensor:
        """A tensor where the session computes; on the CPU it shares the array's memory."""
        return ort_tensor(array, self._device)

    def told(self) -> list[str]:
        """What of the artifact's target this session did not run."""
        return list(self._told)

    def _bind_shared(self, cache: Cache) -> None:
        """Bind each shared buffer as past and as present: it stays so until the cache moves it."""
        # outputs come back in the order in which they were first bound: logits, loose, shared
        self._binding = self._session.io_binding()
        self._binding.bind_output("logits")
        for name in cache.loose.values():
            self._binding.bind_output(name, self._device, 0)
        for past, present in cache.shared.items():
            held = _value(cache.values[past])
            self._binding.bind_ortvalue_input(past, held)
            self._binding.bind_ortvalue_output(present, held)
        self._bound = (cache, cache.version)

    def _cast(self, feeds: Feeds) -> dict[str, Array]:
        return {
            name: cast(name, array, self.inputs[name].dtype)
            for name, array in (self._keep | dict(feeds)).items()
        }


def _value(held: Tensor) -> Any:
    """The onnxruntime value of a tensor that a session of this kind made."""
    assert isinstance(held, OrtTensor)
    return held.value


def new_session(
    model: str | bytes, path: Path, threads: int | None, providers: Sequence[str] = (CPU,)
) -> Any:
    """An onnxruntime session of a file, or of a graph in memory whose weights lie beside `path`."""
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or default_threads()
    # Work is dealt out in blocks that shrink: no thread waits long for one that was held up.
    # Prefill is a fifth faster for it where the machine is quiet, decode a few per cent.
    options.add_session_config_entry("session.dynamic_block_base", "4")
    if isinstance(model, bytes):  # it has no folder of its own to read external data from
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(path.parent.resolve())
        )
    _refuse_missing(providers, ort.get_available_providers(), "this onnxruntime")
    try:
        return ort.InferenceSession(model, options, providers=list(providers))
    except Exception as error:  # onnxruntime's kinds of error share no base class of its own
        raise UsageError(
            "onnxruntime cannot load the model",
            where=str(path),
            why=str(error).strip().splitlines()[0],
            todo="copy or compile the artifact again; `qopt doctor` shows what is installed",
        ) from None


def read_graph(path: Path) -> Any:
    """The ONNX file as onnx's own ModelProto, without its external weights."""
    import onnx

    try:
        return onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's DecodeError, which onnx does not export
        raise UsageError(
            "not an ONNX file",
            where=str(path),
            why=str(error),
            todo="copy or compile the artifact again",
        ) from None


def _changed(path: Path, wide: bool) -> tuple[bytes | None, dict[str, Array]]:
    """The model with `num_logits_to_keep` as a plain input, and the value that it then needs.

    `wide`: what is bf16 is fp32 in it.
    onnxruntime warns of an initializer that is an input too, and of logits with more columns than
    the one declared for onnxruntime-genai's sake. It cannot be told to drop these two alone: a
    session's severity is one for all its messages, and a logger callback is one for the process,
    whose owner may have set it. So their cause goes, in memory: the initializer becomes an input
    that qopt always feeds, the declared column a name. Whatever else onnxruntime says is printed.
    None: the file as it is will do.
    """
    from onnx import numpy_helper

    model = read_graph(path)
    graph = model.graph
    if wide:
        widen(model)
    default = next((t for t in graph.initializer if t.name == KEEP), None)
    if default is None or KEEP not in {i.name for i in graph.input}:
        return (model.SerializeToString() if wide else None), {}
    graph.initializer.remove(default)
    for output in graph.output:
        if output.name == "logits":
            output.type.tensor_type.shape.dim[1].dim_param = "logits_kept"
    return model.SerializeToString(), {KEEP: numpy_helper.to_array(default)}


def _refuse_missing(asked: Sequence[str], there: Sequence[str], whose: str) -> None:
    missing = [name for name in asked if name not in there]
    if missing:
        raise UsageError(
            f"no {', '.join(missing)}",
            why=f"{whose} offers {', '.join(there)}",
            todo="pip install 'qopt-compiler[gpu]' where there is an NVIDIA GPU, in place of "
            "onnxruntime; or run it on the CPU (--device cpu)",
        )


def _spec(value: Any) -> Spec:
    shape = tuple(d if isinstance(d, int | str) else "?" for d in value.shape)
    dtype = _DTYPES.get(value.type)
    if dtype is None:
        raise UnsupportedError(
            f"{value.name} is a {value.type}, which this runtime does not feed",
            todo="run it with onnxruntime itself",
        )
    return Spec(dtype, shape)


def refuse_other_inputs(feeds: Feeds, needed: Iterable[str], optional: Iterable[str] = ()) -> None:
    """Refuse inputs that a model does not take, and a call that leaves one out."""
    unknown = sorted(set(feeds) - set(needed) - set(optional))
    missing = sorted(set(needed) - set(feeds))
    if unknown or missing:
        raise UsageError(
            "the inputs are not the model's",
            why="; ".join(
                f"{kind}: {', '.join(names)}"
                for kind, names in (("missing", missing), ("unknown", unknown))
                if names
            ),
            todo="`qopt inspect` shows the inputs with their types and shapes",
        )


def cast(name: str, array: Array, dtype: str) -> Array:
    """The array in the type the model declares; refused where numbers would change kind."""
    if array.dtype == dtype:
        return np.ascontiguousarray(array)
    if array.dtype.kind in "bui" or dtype.startswith(("float", "bfloat")):
        return np.ascontiguousarray(array, dtype)
    raise UsageError(f"{name} is {array.dtype}, the model takes {dtype}", todo="convert it")
