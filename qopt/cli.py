"""The command line: parse, call, print. What the commands do lies elsewhere."""

from __future__ import annotations

import errno
import gc
import json
import math
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from qopt import __version__
from qopt.errors import GateError, QoptError, ResourceError, UsageError

if TYPE_CHECKING:
    from qopt.report import Progress
    from qopt.runtime import Model, Result

BUG = """\
internal error: {error}
  why: this is a bug in qopt {version}, not in what you did
  do:  run the same command with --debug; report its output and that of `qopt doctor --json`"""


# --- what every command has ------------------------------------------------------------------


@dataclass
class State:
    """The flags that every command takes."""

    quiet: bool = False
    json: bool = False
    debug: bool = False

    def show(self, result: object) -> None:
        """Print a result on stdout."""
        from qopt.report import as_json, dumped, show, tables_of

        if self.json:
            print(dumped(as_json(result)))
        else:
            show(tables_of(result))

    def progress(self) -> Progress:
        """Progress on stderr; none when quiet or when a program reads along."""
        from qopt.report import Progress

        return Progress(quiet=self.quiet or self.json)


pass_state = click.make_pass_decorator(State)


def _remember(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    state = context.find_object(State)
    if state is not None and value:
        setattr(state, str(parameter.name), True)


_flag = partial(click.option, is_flag=True, is_eager=True, expose_value=False, callback=_remember)
_COMMON = (
    _flag("-q", "--quiet", help="No progress, no notes."),
    _flag("--json", "json", help="Print the result as JSON."),
    _flag("--debug", help="Print a traceback when something fails."),
)

Function = Callable[..., None]


def _common(function: Function) -> Function:
    for option in reversed(_COMMON):
        function = option(function)
    return function


def _end_unread(error: BrokenPipeError) -> int:
    """End well: the reader of stdout, say `head`, has seen enough; any other pipe is an error."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    if not any(told & (select.POLLERR | select.POLLHUP) for _, told in poll.poll(0)):
        raise RuntimeError("another process went away while it was written to") from error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


class _Group(click.Group):
    """A group that ends well without a reader, where click itself exits with 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            return _end_unread(error)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="qopt")
@_common
def cli() -> None:
    """Compile language models: trace, rewrite, emit, and prove right before shipping."""


def command(
    name: str, example: str, make: Callable[..., Any] = cli.command
) -> Callable[[Function], Any]:
    """A command with the common flags and an example in its help; `make` makes other kinds."""

    def decorate(function: Function) -> Any:
        lines = "\n".join(f"  {line}" for line in example.splitlines())
        return make(name, epilog=f"\b\nExample:\n{lines}")(_common(function))

    return decorate


class _Finite(click.FloatRange):
    """A float within a range; nan passes every comparison, and infinity most."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number", param, ctx)
        return number


_path = click.Path(path_type=Path)
_artifact = click.argument("artifact", metavar="OUT", type=_path)
_threads = click.option("--threads", type=click.IntRange(1), help="Default: one a core, up to 8.")
_device = click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Where an ONNX artifact runs; default: its target's.",
)
_max_ram = click.option(
    "--max-ram", metavar="SIZE", help="Memory that may be used, e.g. 4GB; default: what is free."
)
_plugins = click.option(
    "--plugin", "plugins", multiple=True, help="A file or module of passes; its code is run."
)


# --- compiling -------------------------------------------------------------------------------


@command("compile", "qopt compile smollm2-135m --recipe low-latency -o out")
@click.argument("model")
@click.option("--recipe", "-r", default="low-latency", show_default=True, help="Name or YAML file.")
@click.option("-o", "--out", type=_path, help="Artifact folder; default MODEL-RECIPE/.")
@click.option("--target", help="What the artifact runs on; `qopt doctor` lists the targets.")
@click.option("--dtype", type=click.Choice(["auto", "fp32", "fp16", "bf16"]))
@click.option("--opset", type=int, help="ONNX opset; default: the oldest that the ops need.")
@click.option("--logits", type=click.Choice(["last", "all"]))
@click.option("--check", type=click.Choice(["every-pass", "final", "off"]))
@click.option("--text", type=_path, help="Calibration text, .txt or .jsonl; default: the model's.")
@click.option("--set", "sets", multiple=True, metavar="PASS.OPTION=VALUE", help="Set an option.")
@click.option("--add", multiple=True, metavar="PASS", help="Run one more pass.")
@click.option("--skip", multiple=True, metavar="PASS", help="Leave out a pass.")
@click.option("--stop-after", metavar="PASS", help="Leave out all passes after this one.")
@click.option("--explain", multiple=True, metavar="PASS", help="Say why a pass did not match.")
@click.option("--dump", type=_path, help="Folder for the graph after each pass.")
@_plugins
@click.option("--adapter", type=_path, help="A PEFT LoRA folder to merge in.")
@click.option("--revision", help="Of a hub id: branch, tag or commit.")
@click.option(
    "--portable", is_flag=True, default=None, help="torchscript-cuda without ops of qopt's own."
)
@click.option(
    "--arch",
    "architectures",
    multiple=True,
    type=click.Choice(["sm_80", "sm_90", "sm_100", "gfx942"]),
    help="onnx-cuda-triton: compile kernels for this; default: all four.",
)
@click.option("--no-weights", is_flag=True, help="Write the graph alone.")
@click.option("--keep-rejected", is_flag=True, help="Keep what fails the check in OUT.rejected/.")
@_max_ram
@pass_state
def compile_command(
    state: State, /, model: str, recipe: str, out: Path | None, **flags: Any
) -> None:
    """Compile MODEL to an artifact.

    MODEL is a path (transformers folder, .gguf, .pt2, FILE.py:FUNCTION), a demo name, or a hub id.
    """
    from qopt.artifact import default_output, log_folder
    from qopt.compile import compile
    from qopt.report import tables_of

    progress = state.progress()
    if out is None:
        out = default_output(model, recipe)
        progress.say(f"writing {out}/")
    flags = {name: list(v) if isinstance(v, tuple) else v for name, v in flags.items()}
    flags["architectures"] = flags["architectures"] or None
    result = compile(model, recipe, out, progress=progress, **flags)
    if state.json:
        state.show({"out": result.out, "notes": result.notes, "report": result.report})
    elif not state.quiet:
        from qopt.report import show

        show(tables_of(result.report))
        print(f"\nwrote {result.out}/ (what differs from run to run: {log_folder(out).name}/)")


@command("verify", "qopt verify out smollm2-135m")
@_artifact
@click.argument("model", required=False)
@_device
@_max_ram
@pass_state
def verify_command(state: State, /, artifact: Path, model: str | None, **options: Any) -> None:
    """Check an artifact: its files, and that it still computes MODEL."""
    from qopt.final_check import verify

    result = verify(artifact, model, **options)
    state.show(result.to_dict() if state.json else result)
    if not result.passed:
        failed = [probe.probe for probe in result.probes if not probe.passed]
        raise GateError(
            "the artifact differs from the model",
            where=str(artifact),
            why=f"{len(failed)} of {len(result.probes)} probes fail, the first is {failed[0]}",
            todo="compile it again from this model, or name the one it was compiled from",
        )


@command("inspect", "qopt inspect out")
@_artifact
@pass_state
def inspect_command(state: State, /, artifact: Path) -> None:
    """Show what an artifact holds: facts, signature, ops, files."""
    from qopt.report import inspect

    state.show(inspect(artifact))


# --- running ---------------------------------------------------------------------------------


@command("run", 'qopt run out --prompt "Why is the sky blue?"\nqopt run out      (a chat)')
@_artifact
@click.option("--prompt", "-p", "prompts", multiple=True, help="May be given several times.")
@click.option(
    "--prompt-file",
    multiple=True,
    type=click.File(encoding="utf-8"),
    help="One prompt; - is stdin.",
)
@click.option("--chat/--raw", default=None, help="Chat template or plain text; default: if there.")
@click.option("--system", help="The system message of a chat.")
@click.option("--preset", type=click.Choice(["low-latency", "high-quality"]))
@click.option("--max-new-tokens", type=click.IntRange(1))
@click.option("--temperature", type=_Finite(0), help="0 is greedy.")
@click.option("--top-k", type=click.IntRange(0), help="Draw from so many; 0 is off.")
@click.option("--top-p", type=_Finite(0, 1, min_open=True), help="1 is off.")
@click.option("--min-p", type=_Finite(0, 1, max_open=True), help="0 is off.")
@click.option("--repetition-penalty", type=_Finite(0, min_open=True), help="1 is off.")
@click.option("--seed", type=click.IntRange(0), help="Makes a drawn answer repeatable.")
@click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text.")
@click.option("--inputs", type=_path, metavar="FILE.npz", help="Arrays, for any artifact.")
@click.option("--outputs", type=_path, metavar="FILE.npz", help="Where to write its outputs.")
@_device
@_threads
@pass_state
def run_command(
    state: State,
    /,
    artifact: Path,
    prompts: tuple[str, ...],
    prompt_file: tuple[Any, ...],
    chat: bool | None,
    system: str | None,
    inputs: Path | None,
    outputs: Path | None,
    threads: int | None,
    device: str | None,
    **options: Any,
) -> None:
    """Run an artifact: answer prompts, chat, or feed it arrays."""
    from qopt.runtime import load, terminal

    texts = [*prompts, *map(_read_prompt, prompt_file)]
    _refuse_clashes(texts, inputs, outputs, chat, state)
    with state.progress().step("loading"):
        model = load(artifact, threads=threads, device=device)
    for line in model.session.told():
        state.progress().say(line)
    options["stop"] = options["stop"] or None
    if inputs is not None:
        _run_arrays(state, model, inputs, outputs)
    elif model.info.kind != "decoder":
        raise UsageError("this artifact is no decoder", todo="give its inputs: --inputs FILE.npz")
    elif texts:
        _answer(state, model, [_prompt(model, text, chat, system) for text in texts], options)
    else:
        terminal.chat(model, system=system, quiet=state.quiet, **options)


def _refuse_clashes(
    texts: list[str], inputs: Path | None, outputs: Path | None, chat: bool | None, state: State
) -> None:
    """Refuse flags that would be ignored, before the model is loaded."""
    if inputs is not None:
        if texts:
            raise UsageError("--inputs takes no prompt beside it", todo="leave one of them out")
    elif outputs is not None:
        raise UsageError(
            "--outputs needs --inputs",
            why="it is for what the model computes from arrays; an answer goes to stdout",
            todo="give --inputs FILE.npz, or leave --outputs out",
        )
    elif not texts and (chat is False or state.json):
        raise UsageError(
            f"{'--raw' if chat is False else '--json'} needs a prompt",
            todo="give --prompt TEXT or --prompt-file FILE",
        )


def _read_prompt(file: Any) -> str:
    try:
        return str(file.read()).removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(
            "the prompt is not UTF-8", where=file.name, why=str(error), todo="save it as UTF-8"
        ) from None


def _prompt(model: Model, text: str, chat: bool | None, system: str | None) -> Any:
    """Plain text, or the messages of a chat where there is a template."""
    if chat is None:
        chat = model.tokenizer.has_chat_template
    if not chat:
        if system is not None:
            raise UsageError(
                "--system needs a chat template",
                why="--raw, or an artifact without a template, takes the prompt as it is",
                todo="write it into the prompt, or leave --system out",
            )
        return text
    before = [{"role": "system", "content": system}] if system is not None else []
    return [*before, {"role": "user", "content": text}]


def _answer(state: State, model: Model, prompts: list[Any], options: dict[str, Any]) -> None:
    from qopt.runtime import terminal

    if state.json:
        state.show(model.generate(prompts, **options))
    elif len(prompts) == 1:
        answer = terminal.answer(model, prompts[0], quiet=state.quiet, **options)
        if answer.finish_reason == "interrupted":
            raise click.exceptions.Exit(130)
    else:
        results: list[Result] = model.generate(prompts, **options)
        print("\n\n".join(result.text for result in results))
        if not state.quiet:
            print(terminal.summary(results), file=sys.stderr)


def _run_arrays(state: State, model: Model, inputs: Path, outputs: Path | None) -> None:
    import numpy as np

    try:
        with np.load(inputs, allow_pickle=False) as file:
            feeds = dict(file)
    except (OSError, ValueError) as error:
        # numpy takes whatever it does not know for a pickle, and advises to allow that
        why = str(error) if isinstance(error, OSError) else "it is no .npz of plain arrays"
        raise UsageError(
            "cannot read the inputs",
            where=str(inputs),
            why=why,
            todo="write it with numpy.savez(FILE, NAME=array, ...)",
        ) from None
    results: dict[str, Any] = model.forward(**feeds)
    if outputs is not None:
        try:
            np.savez(outputs, **results)
        except OSError as error:
            from qopt.artifact import resource_error

            raise resource_error(error) or UsageError(
                "cannot write the outputs",
                where=str(outputs),
                why=error.strerror,
                todo="give --outputs a file in a folder that is there",
            ) from None
    if state.json or not state.quiet:
        shapes = {name: f"{a.dtype} {list(a.shape)}" for name, a in results.items()}
        values = {name: a.tolist() for name, a in results.items()}
        state.show(values if state.json and outputs is None else shapes)


@command("eval", "qopt eval out --text wiki.txt --against smollm2-135m-folder")
@_artifact
@click.option("--text", required=True, type=_path, help="The text to score, UTF-8.")
@click.option("--against", metavar="MODEL", help="An artifact or a model to compare with.")
@click.option("--windows", default=16, show_default=True, type=click.IntRange(1))
@click.option("--length", default=512, show_default=True, type=click.IntRange(2))
@click.option("--first", default=0, show_default=True, type=click.IntRange(0), help="First window.")
@_max_ram
@_device
@_threads
@pass_state
def eval_command(state: State, /, artifact: Path, text: Path, **options: Any) -> None:
    """Measure quality on a text: perplexity, KL divergence, top-1 agreement."""
    from qopt.evaluate import evaluate

    with state.progress().step("scoring"):
        result = evaluate(artifact, text, **options)
    state.show(result)


@command("bench", "qopt bench out --vs eager --vs genai-folder")
@_artifact
@click.option(
    "--vs",
    multiple=True,
    help="eager or compile (its model in torch), a transformers or onnxruntime-genai folder, or an "
    "artifact; may be repeated.",
)
@click.option("--prompt", default=512, show_default=True, type=click.IntRange(1))
@click.option("--new", default=64, show_default=True, type=click.IntRange(1), help="New tokens.")
@click.option("--batch", default=1, show_default=True, type=click.IntRange(1))
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
@_device
@_threads
@pass_state
def bench_command(state: State, /, artifact: Path, **options: Any) -> None:
    """Time prefill and decode, in turns with peers."""
    from qopt.bench import bench

    with state.progress().step("timing"):
        result = bench(artifact, **options)
    state.show(result.to_dict() if state.json else result)


# --- looking things up -----------------------------------------------------------------------


@command("passes", "qopt passes fuse-rms-norm\nqopt passes --markdown > docs/passes.md")
@click.argument("name", required=False)
@click.option("--markdown", is_flag=True, help="The pages of all passes, as docs/passes.md.")
@_plugins
@pass_state
def passes_command(
    state: State, name: str | None, markdown: bool, plugins: tuple[str, ...]
) -> None:
    """List the passes, or print the page of one."""
    from qopt import pages

    registry = pages.load_registry(plugins)
    if markdown:
        print(pages.document(registry), end="")
    elif name is None:
        state.show(pages.listing(registry))
    else:
        page = pages.find(name, registry)
        state.show(page) if state.json else print(page.text, end="")


@command(
    "kernels",
    "qopt kernels\nqopt kernels build --arch sm_90 -o cubins\nqopt kernels bench",
    partial(cli.group, invoke_without_command=True),
)
@click.pass_context
@pass_state
def kernels_group(state: State, context: click.Context) -> None:
    """List the ops with their kernels and what each accepts, or build or time the kernels."""
    from qopt.kernel_build import listing

    if context.invoked_subcommand is None:
        state.show(listing())


@command("build", "qopt kernels build --arch sm_90 -o cubins", kernels_group.command)
@click.option("--arch", required=True, help="sm_80, sm_90, sm_100 or gfx942.")
@click.option("-o", "--out", required=True, type=_path, help="Folder for binaries and their index.")
@click.option("--op", help="Build the kernels of one op alone.")
@pass_state
def kernels_build_command(state: State, arch: str, out: Path, op: str | None) -> None:
    """Compile every shipped form of the kernels ahead of time; no GPU is needed."""
    from qopt.kernel_build import build

    with state.progress().step("building") as advance:
        report = build(arch, out, op, lambda _: advance(1))
    state.show(report)


@command("bench", "qopt kernels bench -o times --check", kernels_group.command)
@click.option("--op", help="Time the kernels of one op alone.")
@click.option(
    "--dtype", default="bf16", show_default=True, type=click.Choice(["fp32", "fp16", "bf16"])
)
@click.option("--compiled/--no-compiled", default=True, help="Time torch.compile too; default: do.")
@click.option("--check", is_flag=True, help="Fail, with exit code 5, where a target is missed.")
@click.option("-o", "--out", type=_path, help="Folder for the figures as JSON and a plot.")
@pass_state
def kernels_bench_command(state: State, /, check: bool, out: Path | None, **options: Any) -> None:
    """Check and time each kernel on the GPU, against torch, torch.compile and Liger-Kernel."""
    from qopt import kernel_bench
    from qopt.kernel_build import make_folder

    if out is not None:
        make_folder(out)  # or minutes of timing would be lost
    with state.progress().step("timing") as advance:
        result = kernel_bench.bench(step=lambda _: advance(1), **options)
    if out is not None:
        result.notes += kernel_bench.write(result, out)
    state.show(result.to_dict() if state.json else result)
    kernel_bench.refuse(result, check)


@command("recipes", "qopt recipes low-latency")
@click.argument("name", required=False)
@pass_state
def recipes_command(state: State, name: str | None) -> None:
    """List the built-in recipes, or print one with its comments."""
    from qopt.recipe import builtin_recipes, first_comment, recipe_text

    if name is None:
        state.show({name: first_comment(text) for name, text in builtin_recipes().items()})
    elif state.json:
        state.show({"name": name, "text": recipe_text(name)})
    else:
        print(recipe_text(name), end="")


@command("coverage", "qopt coverage llama mistral")
@click.argument("types", nargs=-1)
@click.option("--sample", is_flag=True, help="The fixed sample that CI runs.")
@click.option("--target", default="onnx-cpu", show_default=True)
@click.option("--markdown", is_flag=True, help="The table, as docs/coverage.md.")
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1))
@pass_state
def coverage_command(
    state: State, /, types: tuple[str, ...], markdown: bool, **options: Any
) -> None:
    """Try every causal-LM type of the installed transformers, tiny and random."""
    from qopt import coverage

    result = coverage.run(list(types) or None, progress=state.progress(), **options)
    print(result.markdown(), end="") if markdown else state.show(result)


@command("fetch", "qopt fetch smollm2-135m --format safetensors -o smollm2")
@click.argument("name")
@click.option("--format", type=click.Choice(["gguf", "safetensors"]))
@click.option("-o", "--out", type=_path, help="Folder; default: the cache.")
@pass_state
def fetch_command(state: State, /, name: str, **options: Any) -> None:
    """Fetch or make a demo model."""
    from qopt.demo import fetch

    with state.progress().step(f"fetching {name}"):
        path = fetch(name, **options)
    state.show({"path": path}) if state.json else print(path)


@command("doctor", "qopt doctor")
@pass_state
def doctor_command(state: State) -> None:
    """Show what is installed, which targets work here, and why the others do not."""
    from qopt.doctor import examine

    findings = examine()
    state.show(findings)
    if findings.problems:
        raise UsageError(
            "; ".join(findings.problems), todo="mend that, then run `qopt doctor` again"
        )


# --- errors and exit codes -------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    state = State()
    given = sys.argv[1:] if arguments is None else arguments
    if threading.current_thread() is threading.main_thread():
        # as an exception, so that what was half written is removed
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        code = cli.main(arguments, prog_name="qopt", standalone_mode=False, obj=state)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError as error:  # of the flush above
        return _end_unread(error)
    except Exception as error:
        if isinstance(error, click.UsageError):  # parsing ended there: a flag may stand behind it
            state.json |= "--json" in given
            state.debug |= "--debug" in given
        if state.debug:
            traceback.print_exc()
        return _tell(error, state)
    except KeyboardInterrupt:
        return _tell(click.Abort(), state)


def _tell(error: Exception, state: State) -> int:
    if isinstance(error, click.Abort):
        click.echo("interrupted", err=True)
        return 130
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return 2
    known = _known(error)
    if known is None:
        click.echo(BUG.format(error=_one_line(error), version=__version__), err=True)
    elif not state.json or not _told_as_json(known):
        click.echo(f"error: {known}", err=True)
    return 1 if known is None else known.exit_code


def _told_as_json(error: QoptError) -> bool:
    """Print an error on stdout; False where that is what is full."""
    parts = {part: getattr(error, part) for part in ("what", "where", "why", "todo")}
    try:
        click.echo(json.dumps({"error": parts | {"exit_code": error.exit_code}}, indent=2))
    except OSError:
        return False
    return True


def _known(error: Exception) -> QoptError | None:
    """The error as one of ours, where its cause is the user's to mend."""
    from qopt.artifact import resource_error

    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        told = f"`{context.command_path} --help` shows what there is" if context else None
        return UsageError(error.format_message().rstrip("."), todo=told)
    if isinstance(error, QoptError):
        return error
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UsageError("the path is too long", why=error.strerror, todo="choose a shorter one")
    if isinstance(error, OSError):
        return resource_error(error)
    texts = ("can't allocate memory", "bad_alloc", "not enough memory")
    if isinstance(error, MemoryError) or any(text in str(error) for text in texts):
        return ResourceError(
            "not enough memory",
            why=str(error) or None,
            todo="close other programs, choose a smaller model, or a smaller --dtype",
        )
    return None


def _one_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def run() -> NoReturn:
    """Run a command and end the process with its exit code.

    At once: taking a captured model down object by object takes longer than a second, and nothing
    is left to be done. Files are synced, child processes have ended.
    """
    gc.set_threshold(100_000, 50, 100)  # walking a large graph over and over takes 0.7 s of 11
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
