"""Exported programs become graphs: any module that is no decoder, and what both roads share."""

from __future__ import annotations

import copy
import io
import logging
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from qopt.binding import bind_weights
from qopt.canonical import owners, targets_of_write
from qopt.errors import UnsupportedError, UsageError
from qopt.graph import Graph, set_attribute, source_line
from qopt.info import ModelInfo
from qopt.weights import AbsentSource, LazyWeight

if TYPE_CHECKING:
    from qopt.sources import ModelSource

KEPT = ("val", "stack_trace", "nn_module_stack")  # of what export notes at a node
NOISY = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes", "torch.export")


class DoesNotFit(Exception):
    """The model does something that a road of capture cannot express; the text says what."""


# Any module ----------------------------------------------------------------------------------


def capture_module(source: ModelSource, dtype: torch.dtype) -> Graph:
    """Capture a module that is no decoder, or take a program that was exported before."""
    config = getattr(source.module, "config", None)
    info = ModelInfo(kind="module", model_type=getattr(config, "model_type", None))
    notes: list[str] = []
    if source.program is not None:
        program, bound = source.program, dict(source.tensors)
    else:
        program, notes = export_module(source, dtype)
        assert source.module is not None
        bound = bind_weights(source.module, source)
    try:
        graph = graph_of(program, info, fake_mode_of(program), output_names(program))
    except DoesNotFit as error:
        raise UnsupportedError(
            f"{source.where or 'the module'} cannot be compiled",
            why=str(error),
            todo="take such state as an input, and return its new value",
        ) from None
    graph.notes += notes
    state = {**program.state_dict, **program.constants}
    for name in [str(n.target) for n in graph.nodes if n.op == "get_attr"]:
        if name in bound:
            graph.weights[name] = bound[name].cast(graph.weights[name].dtype)
        elif isinstance(state.get(name), Tensor):
            graph.weights[name] = LazyWeight.memory(state[name])
    return graph


def export_module(source: ModelSource, dtype: torch.dtype) -> tuple[ExportedProgram, list[str]]:
    """Export a module in memory, in `dtype`; also what the user should be told."""
    module, args, shapes = source.module, tuple(source.args), source.dynamic_shapes
    assert module is not None
    module.eval()
    given = [p.dtype for p in module.parameters() if p.is_floating_point()]
    if any(found != dtype for found in given):
        module = copy.deepcopy(module).to(dtype)
        args = pytree.tree_map(lambda a: in_dtype(a, dtype), args)
    notes = []
    if shapes is None:
        shapes = batch_dimension(args)
        if shapes is None:
            notes.append("every dimension is fixed: the example gives no batch of 2 or more")
    try:
        with quiet() as said, torch.no_grad():
            program = torch.export.export(module, args, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        what = f"{type(module).__name__} cannot be exported"
        fixed = fixed_dimension(error, module, args, shapes)
        if fixed:
            todo = "give the example another size, keep that dimension fixed, or mend the module"
            raise UnsupportedError(what, why=fixed, todo=todo) from error
        if "dynamic_shapes" in str(error):
            todo = "mend what the function returns beside the module and its inputs"
            raise UsageError(
                "wrong dynamic_shapes", why=first_sentence(error), todo=todo
            ) from error
        todo = "change its forward so that torch.export takes it; --debug shows where it stops"
        raise UnsupportedError(what, why=reason_of(error), todo=todo) from error
    assigned = [str(w.message) for w in said if "assigned during export" in str(w.message)]
    if assigned:
        names = ", ".join(re.findall(r"self\.[\w.]+", assigned[0]))
        raise UnsupportedError(
            f"{type(module).__name__} keeps state: it assigns {names} in forward",
            why="an artifact has no memory between two calls",
            todo="take the state as an input, and return its new value",
        )
    return program, notes


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """A floating tensor in `dtype`; anything else as it is."""
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def batch_dimension(args: tuple[Any, ...]) -> Any:
    """Dimension 0 of every tensor is the batch, where they agree and it is not 1."""
    tensors = [a for a in pytree.tree_leaves(args) if isinstance(a, Tensor) and a.dim()]
    sizes = {a.shape[0] for a in tensors}
    if len(sizes) != 1 or sizes <= {0, 1}:
        return None
    dynamic = torch.export.Dim.DYNAMIC
    return pytree.tree_map(
        lambda a: {0: dynamic} if isinstance(a, Tensor) and a.dim() else None, tuple(args)
    )


def fixed_dimension(error: Exception, module: nn.Module, args: Any, shapes: Any) -> str | None:
    """Which dynamic dimension the model, or a size of 0 or 1, turned into a number, and where."""
    text = str(error)
    inferred = re.search(
        r"specialized due to hint of (\d+) for dimension inputs\['(\w+)'\]\.(.*?)\.?$", text, re.M
    )
    if inferred:
        size, name, dim = inferred.groups()
        return f"the example has size {size} at {name}.{dim}: give it 2 or more to keep it dynamic"
    constant = re.search(r"You marked (.+?) as dynamic but .* constant \((\d+)\)", text)
    if not constant:
        return None
    name, size = constant.groups()
    name = re.sub(r"L\['(\w+)'\]\.size\(\)\[(\d+)\]", r"\1.shape[\2]", name)
    place = place_of_guard(module, args, shapes, int(size))
    where = f", at {place}" if place else ""
    return (
        f"dimension {name} is declared dynamic, but the model makes it the constant {size}{where}"
    )


def place_of_guard(module: nn.Module, args: Any, shapes: Any, size: int) -> str | None:
    """The line of the model that compares a dimension with `size` or takes it as a number."""

    def relaxed(given: Any) -> Any:
        if isinstance(given, dict):
            return {key: relaxed(value) for key, value in given.items()}
        if isinstance(given, list | tuple):
            return type(given)(relaxed(value) for value in given)
        return None if given is None else torch.export.Dim.AUTO

    try:
        with quiet(), torch.no_grad():
            program = torch.export.export(
                module, args, dynamic_shapes=relaxed(shapes), strict=False
            )
        guards = fake_mode_of(program).shape_env.guards  # type: ignore[union-attr]
    except Exception:  # the line is a help, no more
        return None
    for guard in guards:
        frame = guard.sloc.framework_loc
        if size in guard.expr.args and isinstance(frame, traceback.FrameSummary):
            return f"{frame.filename}:{frame.lineno}"
    return None


def output_names(program: ExportedProgram) -> list[str]:
    """Names of the tensors that a program returns: a dict's keys, else `output_0`, `output_1`."""
    spec = program.call_spec.out_spec
    returned = [s for s in program.graph_signature.output_specs if s.kind.name == "USER_OUTPUT"]
    names = [f"output_{i}" for i in range(len(returned))]
    if spec is not None and spec.num_leaves == len(returned):
        tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
        for path, index in pytree.tree_flatten_with_path(tree)[0]:
            keys = [getattr(part, "key", getattr(part, "idx", None)) for part in path]
            if keys and isinstance(keys[0], str):
                names[index] = ".".join(map(str, keys))
    results = program.graph.output_node().args[0]
    kept = dict(zip(names, results, strict=True))
    return [name for name, result in kept.items() if isinstance(result, fx.Node)]


# Programs ------------------------------------------------------------------------------------


def fake_mode_of(program: ExportedProgram) -> FakeTensorMode:
    """The mode that the program's values belong to."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if hasattr(value, "fake_mode"):
            return value.fake_mode  # type: ignore[no-any-return]
    raise UsageError("the program has no tensor", todo="export a model that computes with some")


def graph_of(
    program: ExportedProgram, info: ModelInfo, mode: FakeTensorMode, names: list[str]
) -> Graph:
    """Turn an exported program into a `Graph`: parameters become `get_attr`, results keep order."""
    signature = program.graph_signature
    lifted = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
        raise DoesNotFit(f"the model writes into its own state: {', '.join(changed)}")
    module = fx.GraphModule({}, fx.Graph())
    graph = Graph(module, {}, info, mode, names)
    copies: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in lifted:
            copies[node] = parameter(graph, program, node, lifted[node.name])
        elif node.op == "output":
            results = [n for n in node.args[0] if isinstance(n, fx.Node)]
            copies[node] = module.graph.output([copies[n] for n in results])
        elif node.op == "placeholder" and not node.users and node.meta.get("val") is None:
            continue  # an argument that was None
        else:
            copies[node] = module.graph.node_copy(node, copies.__getitem__)
        if node.op == "placeholder" and node.name not in lifted:
            copies[node].name = node.name  # fx would call an argument `input` input_1
        copies[node].meta = {k: v for k, v in node.meta.items() if k in KEPT}
    for node in graph.inputs:
        shape = getattr(node.meta.get("val"), "shape", ())
        node.meta["dynamic"] = tuple(
            i for i, dim in enumerate(shape) if isinstance(dim, torch.SymInt)
        )
    refuse_state(graph)
    module.recompile()
    return graph


def parameter(graph: Graph, program: ExportedProgram, node: fx.Node, name: str) -> fx.Node:
    """A lifted parameter, buffer or constant as `get_attr`, its weight absent or a constant."""
    constant, value = program.constants.get(name), node.meta["val"]
    if graph.info.kind == "decoder":  # the step module holds the model under this name
        name = name.removeprefix("model.")
    set_attribute(graph.module, name, value)
    graph.weights[name] = LazyWeight.of(AbsentSource(tuple(value.shape), value.dtype, name))
    if isinstance(constant, Tensor) and not hasattr(constant, "fake_mode"):
        graph.weights[name] = LazyWeight.memory(constant)
    return graph.fx.get_attr(name)


def refuse_state(graph: Graph) -> None:
    """Refuse a model that writes into a buffer, a constant or an input: no artifact can do that."""
    writes = [(node, base) for node in graph.nodes for base in targets_of_write(node)]
    if not writes:
        return
    owner = owners(graph)
    for node, base in writes:
        state = owner[base]
        if state.op in ("get_attr", "placeholder"):
            kind, name = (
                ("input", state.name) if state.op == "placeholder" else ("state", state.target)
            )
            place = source_line(node)
            where = f" ({place})" if place else ""
            raise DoesNotFit(f"the model writes into its own {kind} {name}{where}")


def with_fake_parameters(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Give the model fake parameters of this mode; its small buffers stay real."""
    with mode:
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                    module._parameters[name] = nn.Parameter(empty, requires_grad=False)
            for name, buffer in list(module._buffers.items()):
                if buffer is not None and buffer.device.type == "meta":
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return model


# Noise and reasons ---------------------------------------------------------------------------


@contextmanager
def quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Silence what torch.export warns about and logs on every model; yields the warnings."""
    loggers = [logging.getLogger(name) for name in NOISY]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        # A failed trace prints its whole graph besides.
        with warnings.catch_warnings(record=True) as said, told_nobody():
            warnings.simplefilter("always")
            yield said
    finally:
        for logger, was in zip(loggers, before, strict=True):
            logger.disabled = was


@contextmanager
def told_nobody() -> Iterator[None]:
    """Drop what Python code prints inside the block."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield


def reason_of(error: Exception) -> str:
    """The first line of an error, with its kind where it says little by itself."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = str(cause).strip().splitlines()
    text = lines[0] if lines else type(cause).__name__
    return text if isinstance(cause, DoesNotFit) else f"{type(cause).__name__}: {text}"


def first_sentence(error: Exception) -> str:
    """The first sentence of a message of torch."""
    return str(error).strip().splitlines()[0].partition(". ")[0]
