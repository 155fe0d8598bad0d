"""The pipeline, from a model to an artifact that is proven right before it is put into place."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import TYPE_CHECKING, Any

import qopt
from qopt.artifact import (
    ArtifactWriter,
    Manifest,
    SourceInfo,
    TensorSpec,
    Verdict,
    default_output,
    genai_config,
    genai_refusal,
    refuse_foreign,
    write_json,
    write_log,
    write_sidecars,
)
from qopt.calibration import calibration, read_text
from qopt.check import GraphCheck, Verification
from qopt.errors import GateError, UnsupportedError, UsageError
from qopt.final_check import Checker, Job
from qopt.gates import hold, measured, refuse_impossible
from qopt.memory import CHECKER, COMPILER, Plan, Weights, memory_budget, plan, weights_of_source
from qopt.named import plugin_file, refuse_adapter, refuse_dump, refuse_model
from qopt.recipe import Gate, Recipe, pass_options, refuse_damaged
from qopt.report import LoweringRow, PassRow, Progress, Report, as_json
from qopt.target import choose_dtype, choose_opset, find_target, short_name

if TYPE_CHECKING:
    from qopt.emit.written import Written
    from qopt.graph import Graph
    from qopt.rewrite import Pass, PassRecord
    from qopt.sources import ModelSource


@dataclass
class CompileResult:
    """What a compile leaves: the artifact's folder, the report, and what the user should know."""

    out: Path
    report: Report
    notes: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        counts = f"{len(self.report.checks)} checks passed, {len(self.notes)} notes"
        return f"<CompileResult {self.out}: {counts}>"


def compile(
    model: str,
    recipe: str = "low-latency",
    out: str | Path | None = None,
    *,
    target: str | None = None,
    dtype: str | None = None,
    opset: int | str | None = None,
    logits: str | None = None,
    check: str | None = None,
    text: str | Path | None = None,
    sets: Sequence[str] = (),
    add: Sequence[str] = (),
    skip: Sequence[str] = (),
    stop_after: str | None = None,
    explain: Sequence[str] = (),
    dump: str | Path | None = None,
    plugins: Sequence[str] = (),
    adapter: str | Path | None = None,
    revision: str | None = None,
    no_weights: bool = False,
    portable: bool | None = None,
    architectures: Sequence[str] | None = None,
    keep_rejected: bool = False,
    max_ram: str | None = None,
    progress: Progress | None = None,
) -> CompileResult:
    """Compile MODEL by a recipe into the folder `out`.

    Raises a `QoptError` of the kind that fits; whatever happens, `out` is whole or as it was.
    """
    progress = progress or Progress(quiet=True)
    out = Path(out) if out is not None else default_output(model, recipe)
    budget = memory_budget(max_ram)
    refuse_foreign(out)
    refuse_early(model, recipe, revision, adapter, plugins, target, dump)
    with progress.step("starting"):
        from qopt import rewrite
        from qopt.capture import capture
        from qopt.emit.onnx import check_file, write_onnx
        from qopt.emit.torchscript import write_torchscript
        from qopt.sources import open_source

        rewrite.load_builtin_passes()
        digests = [rewrite.load_plugin(plugin) for plugin in plugins]
        chosen = Recipe.resolve(
            recipe,
            rewrite.PASSES,
            add=add,
            sets=sets,
            skip=skip,
            stop_after=stop_after,
            target=target,
            portable=portable,
            architectures=None if architectures is None else list(architectures),
            dtype=dtype,
            opset=opset,
            logits=logits,
            check="off" if no_weights else check,
        )
        chosen = with_text(chosen, text)
        refuse_unknown(explain, chosen)
        place = find_target(chosen.target, chosen.portable, bool(chosen.architectures))
        limit = choose_opset(place, chosen.opset)
    with progress.step("opening the model"):
        source = open_source(
            model,
            revision=revision,
            adapter=Path(adapter) if adapter else None,
            weights=not no_weights,
        )
        element, note = choose_dtype(place, chosen.dtype, source.dtype)
        refuse_impossible(chosen, source)
    weights = weights_of_source(source, element)
    size = weights.nbytes
    if no_weights and place.format != "onnx":
        raise UnsupportedError(
            f"target {place.name} writes no graph without weights", todo="use --target onnx-cpu"
        )
    memory = plan(
        weights,
        budget,
        decoder=source.kind == "decoder",
        streams=place.format == "onnx",
        checked=chosen.check != "off",
        gated=chosen.gate != Gate(),
        without_check="compile with --check off, or " if chosen.check != "off" else "",
        timed=chosen.limits.prefill_ms is not None or chosen.limits.decode_ms is not None,
    )
    for line in memory.notes:
        progress.say(line)
    on_disk = size if place.format == "onnx" else 2 * size  # a script's weights are stored twice
    report = Report(notes=[*source.notes, *([note] if note else [])], timings=progress.timings)
    with (
        ArtifactWriter(out, size=on_disk, keep_rejected=keep_rejected) as writer,
        checking_process(chosen, model, revision, adapter, weights, memory, budget) as checker,
    ):
        if not no_weights:  # hashing lets go of the interpreter's lock, and capturing does not
            Thread(target=lambda: source.digest, daemon=True).start()
        with progress.step("capturing"):
            known = len(source.notes)
            graph = capture(source, element)
            report.notes += source.notes[known:]  # what came to light as the weights were bound
        with progress.step("rewriting"):
            graph.calibration = calibration(
                chosen.calibration, source, lambda: capture(source, element)
            )
            passes = configured(chosen, rewrite.PASSES)
            given = [dict(vars(item)) for item, _ in passes]
            room = max(0, budget - COMPILER - CHECKER) // 2
            watch = Watch(report, graph if chosen.check == "every-pass" else None, room)
            manager = rewrite.PassManager(
                [item for item, _ in passes],
                {item.name: expect for item, expect in passes if expect is not None},
                explain,
                Path(dump) if dump else None,
                watch,
            )
            try:
                manager.run(graph)
            finally:
                watch.check = None  # it keeps evaluated weights
                report.passes = [pass_row(record) for record in manager.records]
            chosen = settled(chosen, passes, given)
        with progress.step("writing", size or None) as advance:
            counted = Counted(advance)
            if place.format == "torchscript":
                written = write_torchscript(graph, writer.folder, place, counted)
            else:
                soon = chosen.check != "off" or measured(chosen)
                written = write_onnx(
                    graph,
                    writer.folder,
                    place,
                    limit,
                    counted,
                    read_soon=soon,
                    architectures=architectures_of(chosen),
                )
                check_file(writer.folder / "model.onnx", weights=not no_weights)
        report.lowering = [
            LoweringRow(c.op, c.implementation, c.count, told(c.refusals)) for c in written.choices
        ]
        report.notes += [*graph.notes, *written.notes, *fallback_notes(written)]
        report.notes += slow_here(chosen.target, str(element).removeprefix("torch."))
        if chosen.check == "off" and not no_weights:
            report.notes.append("not checked: nothing shows that the artifact computes the model")
        resolved = chosen.replace(dtype=short_name(element), opset=written.opset or "auto")
        manifest = manifest_of(
            graph, written, resolved, source, model, digests, report, not no_weights
        )
        if graph.info.layers and not manifest.keeps_cache:
            why = "it keeps no cache, so `qopt run` cannot continue a text with it"
            manifest.notes.append(f"{why}: materialize-kv-cache did not run")
            report.notes.append(manifest.notes[-1])
        report.notes += explained(manager.records, explain)
        write_folder(writer, graph, written, resolved, source, manifest)
        writer.write_manifest(manifest)
        if checker is not None:
            with progress.step("checking"):
                found = checker.check(writer.folder)
            conclude(report, manifest, found)
            writer.write_manifest(manifest)
            refuse_failed(found, out, keep_rejected)
        if not no_weights:
            with progress.step("measuring"):
                report.checks += hold(chosen, writer.folder, source, max_ram)
    write_logs(out, report, model, adapter, source)
    return CompileResult(out, report, report.notes)


def refuse_early(
    model: str,
    recipe: str,
    revision: str | None,
    adapter: str | Path | None,
    plugins: Sequence[str],
    target: str | None,
    dump: str | Path | None,
) -> None:
    """What can be seen to be wrong at once is told before anything slow is imported."""
    refuse_model(model, revision)
    refuse_damaged(recipe)
    if adapter is not None:
        refuse_adapter(Path(adapter))
    for plugin in plugins:
        plugin_file(plugin)
    if dump is not None:
        refuse_dump(Path(dump))
    if target is not None:
        find_target(target)


def architectures_of(recipe: Recipe) -> Sequence[str]:
    """What a recipe's Triton kernels are compiled for."""
    from qopt.kernel import ARCHITECTURES

    return ARCHITECTURES if recipe.architectures is None else recipe.architectures


@dataclass
class Counted:
    """Turns bytes done so far into steps of a progress bar."""

    advance: Any
    seen: int = 0

    def __call__(self, done: int, total: int) -> None:
        """Tell the bar how much more is done."""
        self.advance(done - self.seen)
        self.seen = done


class Watch:
    """What happens after each pass: the check, where the recipe asks for it."""

    def __init__(self, report: Report, graph: Graph | None, room: int) -> None:
        """`room`: bytes of evaluated weights that may be kept from one pass to the next."""
        self.report = report
        self.check = GraphCheck(graph, room) if graph is not None else None

    def __call__(self, item: Pass, graph: Graph, record: PassRecord) -> None:
        """Check the graph and keep the outcome."""
        outcome = self.check(item, graph, record) if self.check else None
        if outcome is not None:
            self.report.checks.append(outcome)


def configured(recipe: Recipe, registry: Any) -> list[tuple[Any, Any]]:
    """The passes with their options; `logits:` decides what the last-token pass keeps."""
    for entry in recipe.passes:
        if entry.name == "last-token-logits":
            entry.options["keep"] = 0 if recipe.logits == "all" else 1
    return recipe.instances(registry)


def with_text(recipe: Recipe, text: str | Path | None) -> Recipe:
    """The recipe with `--text` in it; a file that holds no text is refused before any work."""
    if text is None:
        return recipe
    read_text(Path(text))
    return recipe.replace(
        calibration=recipe.calibration.model_copy(update={"text": str(text)}),
    )


def settled(
    recipe: Recipe, passes: Sequence[tuple[Any, Any]], given: Sequence[dict[str, Any]]
) -> Recipe:
    """The recipe with the options that passes chose for themselves, so that it replays them."""
    entries = []
    for entry, (item, _), before in zip(recipe.passes, passes, given, strict=True):
        names = pass_options(type(item))
        chosen = {n: vars(item)[n] for n in names if vars(item)[n] != before[n]}
        entries.append(entry.model_copy(update={"options": entry.options | chosen}))
    return recipe.replace(passes=entries)


def pass_row(record: PassRecord) -> PassRow:
    """A pass's record as a row of the report."""
    return PassRow(record.name, record.rewrites, record.before, record.after, record.ms / 1e3)


def told(refusals: dict[str, int]) -> list[str]:
    """Reasons with how often each was given."""
    return [f"{reason} ({count}x)" if count > 1 else reason for reason, count in refusals.items()]


def fallback_notes(written: Written) -> list[str]:
    """What went through torchlib, and what was kept once."""
    notes = [f"{name}: written by torchlib ({n}x)" for name, n in written.fallbacks.items()]
    if written.shared:
        notes.append(f"{written.shared / 1e6:,.1f} MB of equal weights are stored once")
    return notes


def slow_here(target: str, dtype: str) -> list[str]:
    """That this CPU is slow in a type, where the artifact is for torch on a CPU."""
    from qopt.doctor import slow_in_torch

    why = slow_in_torch(dtype) if target == "torchscript-cpu" else None
    return [] if why is None else [why]


def refuse_unknown(explain: Sequence[str], recipe: Recipe) -> None:
    """What is to be explained must be a pass that runs."""
    for name in explain:
        if name not in {entry.name for entry in recipe.passes}:
            raise UsageError(
                f"--explain {name}: the recipe runs no such pass",
                todo=f"it runs: {', '.join(entry.name for entry in recipe.passes)}",
            )


def explained(records: Sequence[PassRecord], names: Sequence[str]) -> list[str]:
    """For each pass that was asked about, the candidates that it left, and why."""
    lines = []
    for name in names:
        ran = [record for record in records if record.name == name]
        left = [f"{name} left {line}" for record in ran for line in record.left]
        lines += left or [f"{name} left no candidate"]
    return lines


def manifest_of(
    graph: Graph,
    written: Written,
    recipe: Recipe,
    source: ModelSource,
    model: str,
    plugins: list[str],
    report: Report,
    weights: bool,
) -> Manifest:
    """The manifest, still without files and verdicts."""
    inputs = [TensorSpec(name=n, dtype=d, shape=s) for n, d, s in written.inputs]
    outputs = [TensorSpec(name=n, dtype=d, shape=s) for n, d, s in written.outputs]
    return Manifest(
        target=recipe.target,
        dtype=str({"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[recipe.dtype]),
        opset=written.opset,
        ir_version=written.ir_version,
        runtime=find_target(recipe.target).runtime,
        model=graph.info,
        source=SourceInfo(
            kind=source_kind(source),
            id=source.identity or None,
            digest=source.digest if weights else None,
        ),
        adapter=source.adapter.digest if source.adapter else None,
        plugins=plugins,
        inputs=inputs,
        outputs=outputs,
        shared_buffer=written.shared_buffer,
        batched_chunks=written.batched_chunks,
        logits="last" if given_columns(written) else "all",
        preset=recipe.generation.preset,
        weights=weights,
        notes=[*report.notes],
    )


def given_columns(written: Written) -> int | None:
    """How many of its last columns a graph gives where it is not asked for more; None: all."""
    shapes = [shape for name, _, shape in written.outputs if name == "logits"]
    return next((shape[1] for shape in shapes if isinstance(shape[1], int)), None)


def source_kind(source: ModelSource) -> str:
    """Where the model came from, in a word."""
    if source.program is not None:
        return "pt2"
    if source.module is not None:
        return "function"
    if source.identity:
        return "hub" if "/" in source.identity else "demo"
    return "gguf" if source.where.endswith(".gguf") else "folder"


def write_folder(
    writer: ArtifactWriter,
    graph: Graph,
    written: Written,
    recipe: Recipe,
    source: ModelSource,
    manifest: Manifest,
) -> None:
    """Everything beside the graph: configs, tokenizer, resolved recipe."""
    if written.data_hash:
        writer.add_hash("model.onnx.data", written.data_size, written.data_hash)
    (writer.folder / "recipe.yaml").write_text(recipe.dump(), encoding="utf-8")
    if graph.info.kind != "decoder":
        return
    config = (
        source.config.to_dict() if source.config is not None and source.folder is None else None
    )
    write_sidecars(writer.folder, source.folder, config=config)
    if find_target(recipe.target).format != "onnx":
        return
    refusal = genai_refusal(graph.info, manifest.inputs, manifest.outputs)
    if refusal is not None:
        manifest.notes.append(f"onnxruntime-genai does not load it: {refusal}")
        return
    settings = genai_config(
        graph.info,
        manifest.inputs,
        shared_buffer=written.shared_buffer,
        provider="cuda" if recipe.target == "onnx-cuda" else None,
    )
    write_json(writer.folder / "genai_config.json", settings)


def checking_process(
    recipe: Recipe,
    model: str,
    revision: str | None,
    adapter: str | Path | None,
    weights: Weights,
    memory: Plan,
    budget: int,
) -> AbstractContextManager[Checker | None]:
    """The process that compares the artifact with the model, where the recipe asks for that."""
    if recipe.check == "off":
        return nullcontext()
    early = 2 * COMPILER + 4 * 4 * weights.elements < budget  # in fp32 twice, and room
    job = Job(
        model,
        revision,
        str(adapter) if adapter else None,
        None if recipe.threads == "auto" else recipe.threads,
        early=early or memory.check_in_parts,
        streamed=memory.check_in_parts,
    )
    return Checker(job)


def conclude(report: Report, manifest: Manifest, found: Verification) -> None:
    """Put the check's outcome into report and manifest; the manifest keeps verdicts alone."""
    report.checks += found.probes
    report.notes += found.notes + found.ran
    manifest.notes += found.notes
    manifest.checks = [
        Verdict(probe=p.probe, limits=p.limits, passed=p.passed) for p in found.probes
    ]


def refuse_failed(found: Verification, out: Path, keep: bool) -> None:
    """Withhold an artifact that does not compute the model."""
    failed = [p for p in found.probes if not p.passed]
    if not failed:
        return
    worst = failed[0]
    raise GateError(
        f"the artifact differs from the model in {len(failed)} of {len(found.probes)} probes",
        where=f"probe {worst.probe}",
        why=", ".join(
            f"{name} {worst.figures[name]:.3g} exceeds {most:.3g}"
            for name, most in worst.limits.items()
            if not worst.figures[name] <= most
        ),
        todo=f"it is kept as {out}.rejected" if keep else "--keep-rejected keeps it for a look",
    )


def write_logs(
    out: Path, report: Report, model: str, adapter: str | Path | None, source: ModelSource
) -> None:
    """What belongs to this run and not to the artifact: figures, timings, places."""
    place = Path(model)
    write_log(
        out,
        environment(),
        report=as_json(report),
        source={
            "model": str(place.resolve()) if place.exists() else model,
            "adapter": str(Path(adapter).resolve()) if adapter else None,
        },
    )


def environment() -> dict[str, str]:
    """Versions that decided the output."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"qopt": qopt.__version__}
    for name in ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


class _CallableModule(ModuleType):
    """Python binds a submodule over a name of its package: `qopt.compile` is both."""

    def __call__(self, *args: Any, **kwargs: Any) -> CompileResult:
        return compile(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
