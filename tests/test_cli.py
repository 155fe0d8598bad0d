"""The command line: what it prints where, and its exit codes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import qopt
from qopt import pages
from qopt.artifact import ArtifactWriter, Manifest, SourceInfo, TensorSpec, default_output
from qopt.cli import cli, main
from qopt.compile import slow_here
from qopt.doctor import cpu_features, examine, slow_in_torch, two_runtimes, unmet_requirements
from qopt.errors import GateError, QoptError, UsageError
from qopt.info import ModelInfo
from qopt.report import (
    CheckRow,
    LoweringRow,
    PassRow,
    Progress,
    Report,
    Table,
    _by_layer,
    plain,
    show,
)
from qopt.runtime.batch import Result, Timings

COMMANDS = sorted(cli.commands)


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """y = x + x, of any batch size."""
    value = helper.make_tensor_value_info
    x = value("x", TensorProto.FLOAT, ["batch_size", 2])
    y = value("y", TensorProto.FLOAT, ["batch_size", 2])
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "double", [x], [y])
    spec = {"dtype": "float32", "shape": ["batch_size", 2]}
    with ArtifactWriter(tmp_path / "out") as writer:
        opsets = [helper.make_opsetid("", 21)]
        onnx.save(
            helper.make_model(graph, opset_imports=opsets, ir_version=10),
            writer.folder / "model.onnx",
        )
        writer.write_manifest(
            Manifest(
                target="onnx-cpu",
                dtype="fp32",
                model=ModelInfo(kind="module"),
                source=SourceInfo(kind="function"),
                inputs=[TensorSpec.model_validate({"name": "x", **spec})],
                outputs=[TensorSpec.model_validate({"name": "y", **spec})],
            )
        )
    return tmp_path / "out"


# --- help ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_common_flags_and_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.commands[name].help, "it says what it does"
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    for part in ("-q, --quiet", "--json", "--debug", "Example:", f"qopt {name}"):
        assert part in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert qopt.__version__ in capsys.readouterr().out


@pytest.mark.parametrize("heavy", ["torch", "transformers", "onnx", "numpy", "pydantic"])
def test_help_imports_nothing_heavy(heavy: str) -> None:
    code = "import sys; from qopt.cli import main; main(['--help'])"
    code += f"; assert {heavy!r} not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


# --- errors ----------------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(folder: Path) -> None:
        raise error

    monkeypatch.setattr("qopt.report.inspect", fail)


@pytest.mark.parametrize("kind", QoptError.__subclasses__())
def test_an_error_has_its_own_code(
    kind: type[QoptError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, kind("no bread", where="the kitchen", why="eaten", todo="bake"))
    assert main(["inspect", "x"]) == kind.exit_code
    assert capsys.readouterr().err == "error: the kitchen: no bread\n  why: eaten\n  do:  bake\n"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 6, "not enough memory"),
        (RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory"), 6, "memory"),
        (OSError(errno.ENOSPC, "No space left on device"), 6, "no space left"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/srv/x"),
            6,
            "/srv/x: no permission",
        ),
        (ValueError("odd\nlines"), 1, "internal error: ValueError: odd\n"),
        (AssertionError(), 1, "internal error: AssertionError\n"),
    ],
)
def test_other_errors(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing(monkeypatch, error)
    assert main(["inspect", "x"]) == code
    text = capsys.readouterr().err
    assert message in text
    assert "Traceback" not in text
    assert ("this is a bug in qopt" in text) == (code == 1)


def test_debug_prints_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, ValueError("odd"))
    assert main(["inspect", "x", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_error_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, GateError("too far off", where="node 7"))
    assert main(["inspect", "x", "--json"]) == 4
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["what"], error["where"], error["exit_code"]) == ("too far off", "node 7", 4)


@pytest.mark.parametrize(
    "arguments",
    [
        ["bake"],
        ["compile"],
        ["compile", "m", "--dtype", "fp3"],
        ["run", "out", "--top-p", "2"],
        ["inspect", "out", "--what"],
        ["inspect", "nowhere"],
        ["recipes", "basline"],
        [],
    ],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    "arguments", [["--json", "recipes", "basline"], ["--json"], ["bake", "--json"], ["--json", "x"]]
)
def test_json_stands_anywhere(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err == ""
    assert json.loads(captured.out)["error"]["todo"]


def test_flags_before_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--json", "recipes"]) == 0
    assert "low-latency" in json.loads(capsys.readouterr().out)
    failing(monkeypatch, ValueError("odd"))
    assert main(["--debug", "inspect", "x"]) == 1
    assert "Traceback" in capsys.readouterr().err


INTERRUPTED = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from qopt.__main__ import run
sys.argv[1:] = ["inspect", "x"]
run()
"""


@pytest.mark.parametrize("name", ["click", "pydantic"])
def test_an_interrupt_while_importing(name: str) -> None:
    script = INTERRUPTED.format(name=name)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 130
    assert result.stderr.strip() in ("", "interrupted")


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "qopt", "recipes", "basline"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("error: no recipe 'basline'")


def test_a_terminated_command_cleans_up(tmp_path: Path) -> None:
    # what runs in the background ignores SIGINT, and so would its children
    code = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
import qopt.report
from qopt.artifact import ArtifactWriter
from qopt.cli import main

def write_slowly(folder):
    with ArtifactWriter(Path(folder)):
        print("writing", flush=True)
        time.sleep(60)

qopt.report.inspect = write_slowly
sys.exit(main(["inspect", sys.argv[1]]))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    for sent, expected in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "writing\n"
            process.send_signal(sent)
            assert process.wait() == expected
        assert list(tmp_path.iterdir()) == []


def test_a_reader_that_goes_away_is_no_bug() -> None:
    command = f"{sys.executable} -c 'import sys; from qopt.cli import main; sys.exit(main())'"
    result = subprocess.run(["bash", "-c", f"{command} doctor | true"], capture_output=True)
    assert result.stderr == b""


def run_passes(arguments: str, end: str) -> subprocess.CompletedProcess[bytes]:
    """`qopt passes`, unbuffered: printing fails, where else the flush in the end would."""
    command = f"{sys.executable} -um qopt passes {arguments} {end}"
    return subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True)


def test_a_reader_that_goes_away_while_it_prints_is_no_failure() -> None:
    done = run_passes("--markdown", "| true")
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_process_that_goes_away_is_a_failure(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stdout has its reader: the pipe that broke is another one."""

    def broken(*_: Any, **__: Any) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("qopt.doctor.examine", broken)
    with open(os.devnull, "w") as null:
        monkeypatch.setattr("sys.stdout", null)
        assert main(["doctor"]) == 1
    assert "another process went away" in capfd.readouterr().err


def test_a_full_stdout_is_told_on_stderr() -> None:
    done = run_passes("--json", "> /dev/full")
    assert done.returncode == 6
    assert done.stderr.startswith(b"error: no space left")


@pytest.mark.parametrize(
    ("features", "dtype", "slow"),
    [
        (["avx2"], "bfloat16", True),
        (["avx512_bf16"], "bfloat16", False),
        (["avx512_bf16"], "float16", True),
        (["avx2"], "float32", False),
        ([], "bfloat16", False),  # nothing is known of this CPU
    ],
)
def test_a_type_that_this_cpu_cannot_multiply_is_told(
    features: list[str], dtype: str, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qopt.doctor.cpu_features", lambda: features)
    assert (slow_in_torch(dtype) is not None) is slow
    wanted = int(slow)
    assert len(slow_here("torchscript-cpu", dtype)) == wanted
    assert slow_here("onnx-cpu", dtype) == []


# --- commands --------------------------------------------------------------------------------


def test_inspect(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(artifact)]) == 0
    text = capsys.readouterr().out
    for part in ("ops (1 nodes)", "Add", "batch_size, 2", "model.onnx"):
        assert part in text
    assert main(["inspect", str(artifact), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ops"] == {"Add": 1}


def test_run_arrays(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.array([[1, 2], [3, 4]], np.float32)
    np.savez(tmp_path / "in.npz", x=x)
    arguments = ["run", str(artifact), "--inputs", str(tmp_path / "in.npz")]
    assert main([*arguments, "--outputs", str(tmp_path / "y.npz")]) == 0
    assert "y  float32 [2, 2]" in capsys.readouterr().out
    np.testing.assert_array_equal(np.load(tmp_path / "y.npz")["y"], x + x)
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"y": [[2, 4], [6, 8]]}


def test_run_refuses_what_it_cannot(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(artifact), "--prompt", "hello"]) == 2
    assert "no decoder" in capsys.readouterr().err
    np.savez(tmp_path / "bad.npz", x=np.array([{"a": "pickle"}], object))
    for name in ("bad.npz", "absent.npz"):
        assert main(["run", str(artifact), "--inputs", str(tmp_path / name)]) == 2
        assert "cannot read the inputs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--outputs", "y.npz"], "--outputs needs --inputs"),
        (["--inputs", "x.npz", "--prompt", "hello"], "--inputs takes no prompt"),
        (["--json"], "--json needs a prompt"),
        *(
            ([f"--{name}", value, "--prompt", "x"], f"'--{name}': {value} is no finite number")
            for name, value in [
                ("temperature", "inf"),
                ("temperature", "nan"),
                ("top-p", "nan"),
                ("repetition-penalty", "inf"),
            ]
        ),
        (["--temperature", "-1", "--prompt", "x"], "-1.0 is not in the range"),
    ],
)
def test_run_refuses_flags_before_it_loads(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "nowhere", *flags]) == 2
    told = json.loads(capsys.readouterr().out) if "--json" in flags else capsys.readouterr().err
    assert words in str(told)
    assert "do:" in str(told) or "todo" in str(told)


def test_outputs_that_cannot_be_written(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "in.npz", x=np.ones((1, 2), np.float32))
    arguments = ["run", str(artifact), "--inputs", str(tmp_path / "in.npz")]
    assert main([*arguments, "--outputs", str(tmp_path / "no" / "y.npz")]) == 2
    assert "cannot write the outputs" in capsys.readouterr().err


class FakeModel:
    """Keeps what it is asked; answers with as many letters as the prompt is long."""

    def __init__(self, template: bool) -> None:
        self.info = ModelInfo(kind="decoder")
        self.session = types.SimpleNamespace(told=list)
        self.tokenizer = types.SimpleNamespace(has_chat_template=True if template else None)
        self.asked: list[Any] = []

    def generate(self, prompts: list[Any], **options: Any) -> list[Result]:
        self.asked = [prompts, {k: v for k, v in options.items() if v is not None}]
        return [Result(f"answer {i}", [7], "eos", 1, Timings()) for i in range(len(prompts))]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeModel:
    fake = FakeModel(template=getattr(request, "param", True))
    monkeypatch.setattr("qopt.runtime.load", lambda folder, **_: fake, raising=False)
    return fake


def test_run_several_prompts(model: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "out", "-p", "a", "-p", "b", "--system", "s", "--stop", ".", "-q"]) == 0
    system, a, b = (
        {"role": r, "content": c} for r, c in (("system", "s"), *[("user", c) for c in "ab"])
    )
    assert model.asked == [[[system, a], [system, b]], {"stop": (".",)}]
    assert capsys.readouterr() == ("answer 0\n\nanswer 1\n", "")


def test_run_json(model: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "out", "-p", "a", "--raw", "--json", "--seed", "3", "--top-k", "4"]) == 0
    assert model.asked == [["a"], {"seed": 3, "top_k": 4}]
    assert json.loads(capsys.readouterr().out)[0]["text"] == "answer 0"


@pytest.mark.parametrize("model", [False], indirect=True)
def test_run_without_a_template_takes_plain_text(model: FakeModel, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("two\nlines\n")
    assert main(["run", "out", "-p", "a", "--prompt-file", str(tmp_path / "prompt.txt")]) == 0
    assert model.asked[0] == ["a", "two\nlines"]


def test_run_raw_needs_a_prompt(model: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "out", "--raw"]) == 2
    assert "--raw needs a prompt" in capsys.readouterr().err


def test_inspect_tells_layers_in_one_line() -> None:
    spec = {"dtype": "float32", "shape": ["batch_size", 2]}
    names = ["input_ids", *(f"past.{n}.{kv}" for n in range(30) for kv in ("key", "value"))]
    lines = _by_layer([{"name": name, **spec} for name in names])
    assert [line[0] for line in lines] == ["input_ids", "past.0..29.key", "past.0..29.value"]
    assert _by_layer([{"name": "past.3.key", **spec}])[0][0] == "past.3.key"
    assert (
        _by_layer([{"name": f"past.{n}.key", **spec} for n in (0, 2, 5)])[0][0] == "past.0|2|5.key"
    )


def test_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    assert "low-latency" in capsys.readouterr().out
    assert main(["recipes", "low-latency.yaml"]) == 0
    assert "# a norm's weight goes" in capsys.readouterr().out


@dataclass
class Compiled:
    out: Path
    report: Report
    notes: list[str]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A compile that only keeps what it was called with."""
    calls: list[dict[str, Any]] = []

    def compile(model: str, recipe: str, out: Path, **flags: Any) -> Compiled:
        calls.append({"model": model, "recipe": recipe, "out": out, **flags})
        return Compiled(out, Report(passes=[PassRow("canonicalize", 0, 9, 9, 0.001)]), ["a note"])

    module = types.ModuleType("qopt.compile")
    module.__dict__["compile"] = compile
    monkeypatch.setitem(sys.modules, "qopt.compile", module)
    return calls


def test_compile_as_typed(
    compiled: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", "model", "--recipe", "low-latency.yaml"]) == 0
    assert compiled[0]["out"] == Path("model-low-latency")
    captured = capsys.readouterr()
    assert "writing model-low-latency/" in captured.err
    assert "found nothing to rewrite\ncanonicalize\n" in captured.out


def test_compile_flags(compiled: list[dict[str, Any]]) -> None:
    flags = "--set a.b=1 --set a.c=2 --skip d --explain e --dtype fp16 --opset 21 --no-weights"
    assert main(["compile", "m", "-q", *flags.split(), "--plugin", "p.py"]) == 0
    call = compiled[0]
    assert call["sets"] == ["a.b=1", "a.c=2"]
    assert (call["skip"], call["explain"], call["plugins"]) == (["d"], ["e"], ["p.py"])
    assert (call["dtype"], call["opset"], call["no_weights"]) == ("fp16", 21, True)
    assert call["target"] is None


def test_compile_quiet_and_json(
    compiled: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", "m", "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["compile", "m", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert json.loads(captured.out)["report"]["passes"][0]["rewrites"] == 0


@pytest.mark.parametrize(
    ("model", "recipe", "out"),
    [
        ("model", "low-latency.yaml", "model-low-latency"),
        ("a/b/model/", "recipes/mine.yaml", "model-mine"),
        ("org/name", "baseline", "name-baseline"),
        ("x/model.q4.gguf", "baseline", "model.q4-baseline"),
        ("program.pt2", "baseline", "program-baseline"),
        ("dir/net.py:make", "baseline", "make-baseline"),
        ("model:v2", "baseline", "model:v2-baseline"),
    ],
)
def test_default_output(model: str, recipe: str, out: str) -> None:
    assert default_output(model, recipe) == Path(out)


# --- doctor ----------------------------------------------------------------------------------


def test_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("https_proxy", "http://user:password@proxy:80")
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in ("onnx-cpu", "torch", "free disk", "cache", "http://proxy:80"):
        assert part in text
    assert "secret" not in text
    assert "password" not in text


def test_doctor_names_the_wheel_to_remove() -> None:
    assert two_runtimes("1.32.0", None) == two_runtimes(None, "1.31.1") == []
    assert "pip uninstall -y onnxruntime onnxruntime-gpu" in two_runtimes("1.32.0", "1.31.1")[0]


def test_doctor_fails_when_there_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("qopt.doctor.two_runtimes", lambda *_: ["two wheels"])
    assert main(["doctor"]) == 2
    assert "error: two wheels" in capsys.readouterr().err


def test_requirements() -> None:
    met = ["click", "numpy>=1", "absent; extra == 'gpu'"]
    assert unmet_requirements(met) == []
    assert unmet_requirements(["numpy<1", "absent-package>=2"])[1] == (
        "absent-package>=2 is required, none is installed"
    )


def test_doctor_without_a_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qopt.doctor._version", lambda name: None)
    targets = examine().targets
    assert "pip install 'qopt-compiler[cpu]'" in (targets["onnx-cpu"] or "")
    monkeypatch.setattr("qopt.doctor._version", lambda name: "1.9.0")
    assert "1.32 or newer" in (examine().targets["onnx"] or "")
    assert isinstance(cpu_features(), list)


# --- report ----------------------------------------------------------------------------------


def test_plain_tables(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(
        passes=[PassRow("canonicalize", 2, 342, 340, 0.0123), PassRow("fuse-gelu", 0, 340, 340, 1)],
        lowering=[LoweringRow("attention", "GroupQueryAttention", 30, ["head size 12 % 8"])],
        checks=[CheckRow("prefill", {"max": 1.5e-6}, {"max": 1e-4}, True)],
        notes=["[bold] is no markup"],
    )
    show(report.tables())
    assert capsys.readouterr().out == (
        "passes\n"
        "pass          rewrites  nodes before  after  ms\n"
        "canonicalize         2           342    340  12\n"
        "\n"
        "passes that found nothing to rewrite\n"
        "fuse-gelu\n"
        "\n"
        "lowering\n"
        "op         implementation       count  why no faster one\n"
        "attention  GroupQueryAttention     30  head size 12 % 8\n"
        "\n"
        "check\n"
        "probe    measured     limit\n"
        "prefill  max 1.5e-06  max 0.0001  ok\n"
        "\n"
        "notes\n"
        "[bold] is no markup\n"
    )


class Terminal:
    """A stream that says it is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return True


def test_rich_tables() -> None:
    terminal: Any = Terminal()
    show([Table("notes", ("note",), [("[bold] is no markup",)])], terminal)
    assert "[bold] is no markup" in terminal.text
    assert plain(Table("", ("a",), [])) == "a"


def test_progress_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress()
    with progress.step("quick"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("qopt.report.PATIENCE", 0.0)
    with progress.step("slow", total=3) as advance:
        advance(1)
    assert "slow: 0.0 s" in capsys.readouterr().err
    assert set(progress.timings) == {"quick", "slow"}
    Progress(quiet=True).say("hush")
    assert capsys.readouterr().err == ""


def test_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qopt.report.PATIENCE", 0.0)
    terminal: Any = Terminal()
    with Progress(terminal).step("slow", total=3) as advance:
        advance(1)
    with pytest.raises(ValueError, match="stop"), Progress(terminal).step("failing"):
        raise ValueError("stop")


# --- pages of passes -------------------------------------------------------------------------


@dataclass
class FakePass:
    """Do nothing at all.

    Before: x
    After:  x
    Why: no reason.
    """

    width: int = 4
    name = "fake-pass"
    exact = False


def test_page() -> None:
    page = pages.find("fake-pass", {"fake-pass": FakePass})
    assert page.first_line == "Do nothing at all."
    assert page.text.startswith("## fake-pass\n\nDo nothing at all.\n\n**Before:** x\n\n**After:**")
    assert "- `width`: int, default 4" in page.text
    assert "Not exact" in page.text
    with pytest.raises(UsageError, match="did you mean fake-pass"):
        pages.find("fake-pas", {"fake-pass": FakePass})
    assert "| [fake-pass](#fake-pass) | Do nothing at all. |" in pages.document({"f": FakePass})


def test_alone_it_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert "Commands:" in captured.out + captured.err
    assert "error" not in captured.err
