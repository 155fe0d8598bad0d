"""Writes a graph as `model.pt`: TorchScript source in aten ops alone, which needs no Python to run.

`torch.jit.trace` bakes every size in, and `torch.jit.script` of a graph module fails on the names
of overloads; the source of one function, given to `ScriptModule.define`, has neither fault. It is
saved by a process of its own: a second class of one name in a process gets another name, and the
same graph would not give the same bytes.
"""

from __future__ import annotations

import json
import math
import operator
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn import functional as F

from qopt.canonical import arguments, targets_of_write, value, written
from qopt.emit.external_data import Appender, aligned, refuse_overflow
from qopt.emit.save_torchscript import Saving
from qopt.emit.signature import input_shape, output_shape
from qopt.emit.written import Written
from qopt.errors import ResourceError, UnsupportedError
from qopt.graph import Graph, describe
from qopt.lower import Context, InAten, implements, inline, lower, op_of
from qopt.ops import OPS, visible
from qopt.runtime.cache import CACHE_POSITION
from qopt.target import Target
from qopt.weights import LazyWeight, equal_weights, tensor_bytes

FILE = "model.pt"
KEEP = "num_logits_to_keep"

# TorchScript's numbers for types, as `torch.ops` takes them in a script
DTYPE_CODES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.complex64: 9,
    torch.complex128: 10,
    torch.bool: 11,
    torch.bfloat16: 15,
}
LAYOUT_CODES = {torch.strided: 0}
FORMAT_CODES = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
INFIX = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.eq: "==",
    operator.ne: "!=",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.and_: "and",
    operator.or_: "or",
}
CALLS: dict[Any, str] = {
    operator.neg: "-{}",
    operator.pow: "int({} ** {})",
    math.ceil: "torch.ops.aten.ceil({})",
    math.floor: "torch.ops.aten.floor({})",
    math.trunc: "int({})",
    torch.sym_max: "max({}, {})",
    torch.sym_min: "min({}, {})",
    torch.sym_float: "float({})",
    torch.sym_int: "int({})",
    torch.sym_not: "not {}",
}
# The ops that a file in kernels/ runs. Not read from there: a script is written without Triton too.
KERNEL_OPS = (
    "rms_norm",
    "add_rms_norm",
    "gated",
    "softmax",
    "rotary_from_positions",
    "rms_norm_linear",
    "linear_silu",
    "experts",
    "quantized_embedding",
    "quantized_linear",
    "cached_attention",
    "static_attention",
    "paged_attention",
    "int8_linear",
    "fp8_linear",
)
KERNEL_TYPES = (torch.float32, torch.float16, torch.bfloat16)
NO_MEMORY = ("can't allocate memory", "bad_alloc", "MemoryError")
FULL = ("No space left", "inline_container")  # how torch.jit.save tells of a full disk
RENAMED = {"sym_size": "size", "sym_numel": "numel", "sym_stride": "stride"}


def write_torchscript(
    graph: Graph,
    folder: Path,
    target: Target,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Lower `graph` and write it into `folder`; `progress` is told bytes done and in all.

    Raises `UnsupportedError` for an op that TorchScript cannot hold.
    """
    settle_logits(graph)
    choices = lower(graph, target, 0)
    script = Script(graph, target)
    script.run()
    used = {name: graph.weights[name] for name in script.buffers}
    same = equal_weights(used)
    kept = {name: weight for name, weight in used.items() if name not in same}
    data = folder / "weights.tmp"
    try:
        save(folder / FILE, script, data, store(data, kept, progress), same)
    finally:
        data.unlink(missing_ok=True)
    return Written(
        nodes=dict(sorted(script.counts.items())),
        choices=choices,
        inputs=[spec(graph, node, input_shape(graph, node, name)) for node, name in script.inputs],
        outputs=[
            (name, short_dtype(value(node).dtype), known(output_shape(graph, name, value(node))))
            for name, node in zip(graph.outputs, graph.results, strict=True)
        ],
        shared_buffer=any(name == CACHE_POSITION for _, name in script.inputs),
        shared=sum(used[name].nbytes for name in same),
    )


def spec(graph: Graph, node: fx.Node, shape: list[int | str]) -> tuple[str, str, list[int | str]]:
    """Name, dtype and shape of an input."""
    return str(node.meta.get("input", node.name)), short_dtype(value(node).dtype), shape


def known(shape: list[int | str | None]) -> list[int | str]:
    """The shape with a name for what has none."""
    return ["?" if dim is None else dim for dim in shape]


def settle_logits(graph: Graph) -> None:
    """A script takes no default, so the number of logits to keep becomes what the recipe says."""
    for node in graph.find(OPS["last_tokens"].target):
        x, mask, _ = node.args
        assert isinstance(x, fx.Node)
        assert isinstance(mask, fx.Node)
        keep = int(graph.defaults[KEEP])
        if keep == 0:
            graph.replace(node, x)
            continue
        with graph.fake_mode:
            traced = make_fx(last_columns(keep), pre_dispatch=True)(value(x), value(mask))
        inline(graph, node, traced.graph, [x, mask])
    for node in graph.inputs:
        if node.name == KEEP:
            graph.fx.erase_node(node)
    graph.defaults.pop(KEEP, None)
    for node in graph.nodes:
        if node.op == "call_function" and has_unknown_size(node):
            graph.infer(node)


def has_unknown_size(node: fx.Node) -> bool:
    """Whether a size of the node's result was known only at run time, or follows from one."""
    held = value(node)
    sizes = held.shape if isinstance(held, Tensor) else ()
    return any(isinstance(size, torch.SymInt) and free_unbacked_symbols(size) for size in sizes)


def last_columns(keep: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Each row's own last `keep` real columns of x (B, S, W), as `qopt::last_tokens` has them."""

    def function(x: Tensor, mask: Tensor) -> Tensor:
        length = mask[:, mask.shape[1] - x.shape[1] :].sum(1, keepdim=True)
        columns = (length - keep + torch.arange(keep, device=x.device)).clamp(min=0)
        return x.gather(1, columns[:, :, None].expand(-1, -1, x.shape[2]))

    return function


def is_row_bound(node: fx.Node, target: Target) -> bool:
    """Whether a CPU reads the weight of this product slower through `linear` than through `mv`."""
    if target.name != "torchscript-cpu" or node.target is not torch.ops.aten.linear.default:
        return False
    x, weight, *bias = node.args
    plain = not any(bias) and isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    return plain and value(x).dtype == torch.bfloat16 and value(weight).dim() == 2


class KernelOp:
    """A call of a `qopt::` op, which a Triton kernel takes over where it runs on a GPU."""

    name = "qopt op (Triton kernel)"

    def refuses(self, context: Context, node: fx.Node) -> str | None:
        """Where ops of qopt's own are not wanted, and for element types that no kernel has."""
        if not context.target.contrib:
            return "portable: an op of qopt's own does not load without it"
        held = value(node.all_input_nodes[0])
        if isinstance(held, Tensor) and held.dtype not in KERNEL_TYPES:
            return f"no kernel takes {short_dtype(held.dtype)}"
        return None

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """Its arguments."""
        return node.all_input_nodes

    def emit(self, script: Script, node: fx.Node) -> str:
        """The call."""
        assert isinstance(node.target, torch._ops.OpOverload)
        return script.operator_call(node, node.target)


for _op in KERNEL_OPS:
    implements(_op, "torchscript-cuda")(KernelOp)


class FlashAttention(InAten):
    """Torch's own attention, which holds no matrix of scores."""

    name = "scaled_dot_product_attention"

    def refuses(self, context: Context, node: fx.Node) -> str | None:
        """What torch's attention has no argument for."""
        if node.kwargs.get("softcap") is not None:
            return "torch has no soft-cap"
        if given(node, "sinks") is not None:
            return "torch has no sinks"
        if given(node, "key_scale") is not None or given(node, "value_scale") is not None:
            return "torch has no int8 keys"
        return None


@implements("cached_attention", "torchscript-cpu", "torchscript-cuda")
class GrowingAttention(FlashAttention):
    """On past and new keys joined."""

    def body(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past_key: Tensor | None,
        past_value: Tensor | None,
        mask: Tensor | None,
        sinks: None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `qopt::cached_attention`."""
        key = k.clone() if past_key is None else torch.cat([past_key, k], 2)
        value = v.clone() if past_value is None else torch.cat([past_value, v], 2)
        return flash(q, key, value, mask, None, **options), key, value


@implements("static_attention", "torchscript-cpu", "torchscript-cuda")
class StaticAttention(FlashAttention):
    """On a buffer, into which it writes the new keys first."""

    def body(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        key_cache: Tensor,
        value_cache: Tensor,
        past: Tensor,
        mask: Tensor | None,
        sinks: None = None,
        key_scale: None = None,
        value_scale: None = None,
        **options: Any,
    ) -> Tensor:
        """As `qopt::static_attention`."""
        if k is not None and v is not None:
            slots = past + torch.arange(k.shape[2], device=k.device)
            key_cache.index_copy_(2, slots, k)
            value_cache.index_copy_(2, slots, v)
        return flash(q, key_cache, value_cache, mask, past, **options)


def given(node: fx.Node, name: str) -> Any:
    """An argument of a dialect op; None where it is left out or unknown."""
    found = [held for known, held in arguments(node) if known.name == name]
    return found[0] if found else None


def flash(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    past: Tensor | None,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: None = None,
) -> Tensor:
    """Attention of q (B, H, S, D) over all keys (B, K, T, D) that it may see: (B, S, H, D of v)."""
    if mask is None:
        mask = torch.ones_like(key[:, 0, :, 0], dtype=torch.int64)
    keep = visible(mask, q.shape[2], causal, window, past)
    grouped = q.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(q, key, value, keep, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous()


class Script:
    """The source of `forward`, statement by statement."""

    def __init__(self, graph: Graph, target: Target) -> None:
        self.graph, self.target = graph, target
        self.names: dict[fx.Node, str] = {}
        self.inputs: list[tuple[fx.Node, str]] = []
        self.buffers: dict[str, str] = {}  # weight -> attribute
        self.body: list[str] = []
        self.counts: dict[str, int] = {}
        self.own = False  # whether it calls an op that qopt must register first

    @property
    def source(self) -> str:
        """The function."""
        arguments = "".join(f", {self.names[node]}: Tensor" for node, _ in self.inputs)
        return f"def forward(self{arguments}):\n    " + "\n    ".join(self.body) + "\n"

    def run(self) -> None:
        """Write every node that the results need, in order."""
        graph = self.graph
        needed = set(graph.results)
        for node in reversed(graph.fx.nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        static = any(node.name == CACHE_POSITION for node in graph.inputs)
        if not static and not needed.isdisjoint(written(graph)):
            write = next(node for node in graph.fx.nodes if targets_of_write(node))
            raise self.refuse(write, "it writes into a tensor that something else reads")
        for node in graph.fx.nodes:
            if node.op == "placeholder":
                name = str(node.meta.get("input", node.name))
                if node in needed or graph.info.kind != "decoder" or name != "position_ids":
                    self.names[node] = "x_" + node.name
                    self.inputs.append((node, name))
            elif node.op == "get_attr" and node in needed:
                weight = str(node.target)
                attribute = self.buffers.setdefault(weight, f"w{len(self.buffers)}")
                self.names[node] = f"self.{attribute}"
            elif node.op == "call_function" and node in needed:
                self.names[node] = node.name
                self.body.append(f"{node.name} = {self.call(node)}")
        results = ", ".join(self.names[node] for node in graph.results)
        self.body.append(f"return ({results},)" if len(graph.results) == 1 else f"return {results}")

    def call(self, node: fx.Node) -> str:
        """The expression of a node."""
        operation = node.target
        if operation is operator.getitem:
            return f"{self.text(node.args[0])}[{node.args[1]}]"
        if operation in INFIX:
            left, right = map(self.text, node.args)
            return f"{left} {INFIX[operation]} {right}"
        if operation in CALLS:
            return CALLS[operation].format(*map(self.text, node.args))
        own = op_of(node) is not None
        if not isinstance(operation, torch._ops.OpOverload) or (
            own and "implementation" not in node.meta
        ):
            raise self.refuse(node, "it is no operator of TorchScript")
        self.own = self.own or own
        call = self.operator_call(node, operation)
        return self.one_row(node, call) if is_row_bound(node, self.target) else call

    def one_row(self, node: fx.Node, call: str) -> str:
        """A product of few rows and a matrix: a single row goes through `mv`, twice as fast."""
        x, weight = node.args[:2]
        assert isinstance(x, fx.Node)
        rows = "1"
        for dim in range(value(x).dim() - 1):
            rows += f" * {self.names[x]}.size({dim})"
        given = self.text(x), self.text(weight)
        row = f"torch.ops.aten.mv({given[1]}, {given[0]}.reshape(-1))"
        for _ in range(value(x).dim() - 1):
            row = f"{row}.unsqueeze(0)"
        return f"{row} if {rows} == 1 else {call}"

    def operator_call(self, node: fx.Node, operation: torch._ops.OpOverload) -> str:
        """A call of a torch operator, its arguments as the schema names them."""
        name = operation._schema.name.partition("::")[2]
        told = name if operation.namespace == "aten" else f"{operation.namespace}.{name}"
        self.counts[told] = self.counts.get(told, 0) + 1
        given = []
        for argument, held in zip(operation._schema.arguments, node.args, strict=False):
            told = self.argument(argument, held)
            given.append(f"{argument.name}={told}" if argument.kwarg_only else told)
        types = {argument.name: argument for argument in operation._schema.arguments}
        for key, held in node.kwargs.items():
            given.append(f"{key}={self.argument(types[key], held)}")
        call = f"torch.ops.{operation.namespace}.{RENAMED.get(name, name)}({', '.join(given)})"
        made = value(node)
        if isinstance(made, torch.SymInt | int) and name in ("item", "_local_scalar_dense"):
            return f"int({call})"
        if isinstance(made, torch.SymFloat | float) and name in ("item", "_local_scalar_dense"):
            return f"float({call})"
        return call

    def argument(self, argument: Any, held: Any) -> str:
        """An argument, in the type that the schema gives it."""
        kind = str(argument.type)
        if "Device" in kind or isinstance(held, torch.device):
            return self.device()
        if isinstance(held, list | tuple):
            inner = self.text(held)
            if "Optional[Tensor]]" in kind:
                return f"torch.jit.annotate(List[Optional[Tensor]], {inner})"
            if not held:
                return f"torch.jit.annotate(List[{'Tensor' if 'Tensor' in kind else 'int'}], [])"
            return inner
        return self.text(held)

    def device(self) -> str:
        """Where the inputs are: no device is baked in."""
        if not self.inputs:
            raise UnsupportedError("the model takes no tensor, so nothing says where it runs")
        return f"{self.names[self.inputs[0][0]]}.device"

    def text(self, held: Any) -> str:
        """A value as it stands in the source."""
        if isinstance(held, fx.Node):
            return self.names[held]
        if isinstance(held, list | tuple):
            return "[" + ", ".join(map(self.text, held)) + "]"
        for codes in (DTYPE_CODES, LAYOUT_CODES, FORMAT_CODES):
            if isinstance(held, torch.dtype | torch.layout | torch.memory_format) and held in codes:
                return str(codes[held])  # type: ignore[index]
        if isinstance(held, float) and not math.isfinite(held):
            return f"float('{held}')"
        return repr(held)

    def refuse(self, node: fx.Node, why: str) -> UnsupportedError:
        """An error that says which op cannot be written, and why."""
        return UnsupportedError(
            f"{describe(node).split('  #')[0]} cannot be written for target {self.target.name}",
            why=why,
        )


# Saving --------------------------------------------------------------------------------------


def store(
    path: Path,
    weights: dict[str, LazyWeight],
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, int]:
    """Write the weights one after the other; returns where each starts, in bytes."""
    starts, total = {}, sum(weight.nbytes for weight in weights.values())
    with torch.no_grad(), Appender(path, direct=False) as file:
        for name, weight in weights.items():
            starts[name] = aligned(file.size, weight.nbytes)
            file.append(b"\0" * (starts[name] - file.size))
            for chunk in weight.chunks():
                if weight.dtype == torch.float16:
                    refuse_overflow(name, chunk)
                file.append(tensor_bytes(chunk))
            if progress is not None:
                progress(file.size, total)
    return starts


def save(
    path: Path, script: Script, data: Path, starts: dict[str, int], same: dict[str, str]
) -> None:
    """Have a new process define the function, take the weights from `data`, and save both."""
    weights = {
        attribute: (short_dtype(weight.dtype), list(weight.shape), starts[name])
        for name, attribute in script.buffers.items()
        if name not in same
        for weight in [script.graph.weights[name]]
    }
    twins = {script.buffers[name]: script.buffers[other] for name, other in same.items()}
    job = Saving(str(path), script.source, str(data), weights, twins, script.own)
    command = [sys.executable, "-P", "-m", "qopt.emit.save_torchscript"]
    done = subprocess.run(
        command, input=json.dumps(asdict(job)), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise failure(done.returncode, done.stderr, path)


def failure(code: int, said: str, path: Path) -> Exception:
    """What to raise when the saving process ended with an error."""
    if code in (-9, 137) or any(text in said for text in NO_MEMORY):
        return ResourceError("saving the TorchScript file ran out of memory")
    if any(text in said for text in FULL):
        return ResourceError("no space left for the output", where=str(path))
    if "artifact.define(" not in said:
        return RuntimeError(f"the process that saves model.pt ended with {code}: {said.strip()}")
    return UnsupportedError(
        "TorchScript refuses the graph",
        why=first_error(said.strip().splitlines()),
        todo="this is a bug in qopt: report it with this message",
    )


def first_error(lines: list[str]) -> str:
    """What an error's text says first; torch.jit puts it below the name of the error."""
    at = next((i for i, line in enumerate(lines) if "Error" in line), len(lines) - 1)
    told = [line.strip() for line in lines[at : at + 2]]
    return " ".join(line for line in told if line)


def short_dtype(dtype: torch.dtype) -> str:
    """`float32`, `bfloat16`, ..."""
    return str(dtype).removeprefix("torch.")
