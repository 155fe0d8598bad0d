"""Bad input and bad luck: one clear error, the right exit code, and nothing left behind."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from qopt.cli import main
from qopt.compile import compile

Tiny = Callable[..., tuple[Path, Any]]
Refused = Callable[..., str]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, so that whatever is left behind is seen."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("QOPT_CACHE_DIR", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def refused(place: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Compile to `out` and expect one error of this code, which leaves nothing; returns it."""

    def call(code: int, model: object, *flags: str) -> str:
        before = sorted(place.rglob("*"))
        assert main(["compile", str(model), "-o", "out", "-q", *flags]) == code
        said = capsys.readouterr()
        assert said.out == ""
        one_error(said.err)
        assert sorted(place.rglob("*")) == before
        return said.err

    return call


def one_error(text: str) -> None:
    assert text.count("error: ") == 1
    assert text.startswith("error: ")
    assert "Traceback" not in text
    assert "\n  do:  " in text
    assert len(text.splitlines()) <= 4


@pytest.fixture
def model(tiny: Tiny, tmp_path: Path) -> Path:
    """A copy of a tiny model that a test may damage."""
    shutil.copytree(tiny("llama")[0], tmp_path / "model")
    return tmp_path / "model"


def with_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


# The model -----------------------------------------------------------------------------------


def test_no_such_model(refused: Refused) -> None:
    assert "no such model: nowhere" in refused(2, "nowhere")
    assert "no such model: /no/such/path" in refused(2, "/no/such/path")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "MODEL is empty"),
        ("./nosuch.gguf", "there is no file or folder ./nosuch.gguf"),
        ("nosuch.pt2", "there is no file or folder nosuch.pt2"),
        ("nosuch.py:make", "there is no file or folder nosuch.py"),
        (f"{__file__}:no such", "there is no file or folder"),
        ("../mine.txt:make", "only a .py file is run as code"),
    ],
)
def test_a_model_that_is_not_there(name: str, words: str, refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("")
    assert words in refused(2, name)


def test_a_demo_that_is_not_fetched(refused: Refused) -> None:
    assert "qopt fetch smollm2-135m" in refused(2, "smollm2-135m")


def test_a_folder_without_a_model(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refused(2, tmp_path / "empty")


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


def test_a_pickle_is_never_opened(refused: Refused, model: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(marker)))
    refused(3, model)
    torch.save({"x": Evil(marker)}, model / "pytorch_model.bin")
    assert "pytorch_model.bin" in refused(3, model)
    assert not marker.exists()


def test_a_truncated_safetensors(refused: Refused, model: Path) -> None:
    path = model / "model.safetensors"
    data = path.read_bytes()
    for length in (len(data) - 1, len(data) // 2, 100, 7, 0):
        path.write_bytes(data[:length])
        assert "model.safetensors" in refused(2, model)


def test_a_missing_shard(refused: Refused, tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    tiny("llama")[1].save_pretrained(folder, max_shard_size="100KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1
    shards[1].unlink()
    assert shards[1].name in refused(2, folder)


def test_a_missing_tensor(refused: Refused, model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in refused(2, model)


def test_a_config_that_is_no_json(refused: Refused, model: Path) -> None:
    (model / "config.json").write_text("{")
    assert "config.json" in refused(2, model)


def test_a_recurrent_architecture(refused: Refused, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    config = AutoConfig.for_model(
        "mamba", vocab_size=97, hidden_size=32, num_hidden_layers=1, state_size=8
    )
    auto.from_config(config).save_pretrained(tmp_path / "mamba")
    assert "recurrent state" in refused(3, tmp_path / "mamba", "--check", "off")


def test_an_encoder(refused: Refused, model: Path) -> None:
    assert "t5" in refused(3, with_config(model, model_type="t5"))


def test_an_unknown_type(refused: Refused, model: Path) -> None:
    assert "does not know model type 'warp9'" in refused(3, with_config(model, model_type="warp9"))


def test_remote_code_is_never_run(refused: Refused, model: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    code = f"open({str(marker)!r}, 'w')\n"
    (model / "modeling_evil.py").write_text(code)
    (model / "configuration_evil.py").write_text(code)
    auto = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    with_config(model, model_type="evil", auto_map=auto)
    assert "needs remote code" in refused(3, model)
    assert not marker.exists()


def test_code_beside_a_known_type_is_not_run(model: Path, tmp_path: Path, place: Path) -> None:
    marker = tmp_path / "marker"
    (model / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    with_config(model, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    assert main(["compile", str(model), "-o", "out", "-q"]) == 0  # with its check
    assert not marker.exists()


# The recipe and the flags --------------------------------------------------------------------


def test_an_unknown_recipe(refused: Refused, model: Path) -> None:
    text = refused(2, model, "--recipe", "low-latncy")
    assert "low-latncy" in text
    assert "low-latency" in text


def test_a_misspelt_option_names_its_line(refused: Refused, model: Path, place: Path) -> None:
    recipe = place / "mine.yaml"
    recipe.write_text(
        "schema: 1\nextends: baseline\npasses:\n  - canonicalize\n"
        "  - {fold-constants: {max_byts: 3}}\n"
    )
    text = refused(2, model, "--recipe", "mine.yaml")
    assert re.match(r"error: mine\.yaml:5: fold-constants has no option 'max_byts'", text)
    recipe.write_text("schema: 1\nextends: baseline\nchekc: off\n")
    assert "mine.yaml:3" in refused(2, model, "--recipe", "mine.yaml")
    recipe.write_text("schema: 1\nextends: baseline\npasses: [canonicalise]\n")
    assert "mine.yaml:3" in refused(2, model, "--recipe", "mine.yaml")


@pytest.mark.parametrize(
    ("code", "flags", "words"),
    [
        (2, ["--opset", "26"], "21 to 25"),
        (2, ["--target", "onnx", "--opset", "9"], "21 to 25"),
        (2, ["--target", "onxn"], "use one of: onnx, onnx-cpu"),
        (3, ["--dtype", "bf16"], "fp32 or fp16"),
        (2, ["--skip", "nope"], "no pass 'nope'"),
        (2, ["--stop-after", "nope"], "no pass 'nope'"),
        (2, ["--add", "nope"], "nope"),
        (2, ["--set", "merge-qkv"], "PASS.OPTION=VALUE"),
        (2, ["--set", "merge-qkv.nope=1"], "has no option 'nope'"),
        (2, ["--explain", "nope"], "no such pass"),
        (2, ["--plugin", "nope.py"], "no such plugin file"),
        (2, ["--plugin", "../mine.txt"], "only a .py file is run"),
        (2, ["--plugin", "no_such_module"], "No module named 'no_such_module'"),
        (2, ["--adapter", "nope"], "nope: no adapter here"),
        (2, ["--adapter", "."], "there is no adapter_config.json"),
        (2, ["--revision", "main"], "neither a path nor a demo has revisions"),
        (2, ["--recipe", "."], "it is a folder"),
        (2, ["--dump", "../mine.txt"], "mine.txt is a file"),
        (2, ["--dump", "../mine.txt/deeper"], "mine.txt is a file"),
        (6, ["--dump", "/proc/x"], "/proc: --dump: no files can be written here"),
        (2, ["--set", "merge-qkv.nope=["], "the value is no YAML"),
        (6, ["--max-ram", "10MB"], "may be used"),
    ],
)
def test_flags(
    code: int, flags: list[str], words: str, refused: Refused, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text(f"open({str(tmp_path / 'work' / 'ran')!r}, 'w')")
    assert words in refused(code, model, *flags)


@pytest.mark.parametrize(
    "flags",
    [
        ["--plugin", "nope.py"],
        ["--adapter", "nope"],
        ["--target", "onxn"],
        ["--recipe", "list.yaml"],
    ],
)
def test_wrong_usage_is_told_before_anything_starts(
    flags: list[str], model: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No `starting ...` first, which stands for the import of all that a compile needs."""
    (place / "list.yaml").write_text("- canonicalize\n")
    code = "import qopt.report; qopt.report.PATIENCE = 0.0"
    done = in_process(code, "compile", str(model), "-o", "out", *flags)
    assert done.returncode == 2
    one_error(done.stderr)


CYCLE = '''
"""Two passes that each want to be last."""
from qopt.rewrite import Pass

class Egg(Pass):
    """An egg."""

    name = "egg"
    after = ("hen",)

    def run(self, graph):
        return 0

class Hen(Pass):
    """A hen."""

    name = "hen"
    after = ("egg",)

    def run(self, graph):
        return 0
'''


def test_a_cycle_of_constraints(
    refused: Refused, model: Path, tmp_path: Path, fresh_registry: Any
) -> None:
    (tmp_path / "cycle.py").write_text(CYCLE)
    (tmp_path / "r.yaml").write_text(
        "schema: 1\nextends: baseline\npasses: [canonicalize, egg, hen]\n"
    )
    flags = ["--plugin", str(tmp_path / "cycle.py"), "--recipe", str(tmp_path / "r.yaml")]
    text = refused(2, model, *flags)
    assert "form a cycle" in text
    assert "egg before hen before egg" in text or "hen before egg before hen" in text


NOT_CONVEX = '''
"""A pattern whose match has a path that leaves it and comes back."""
import torch
from qopt.rewrite import RewritePass

aten = torch.ops.aten

def both(x, z):
    y = torch.cos(x)
    return y + z, y

class Joined(RewritePass):
    """Two results at once."""

    name = "joined"
    patterns = (both,)
    example = (torch.empty(2, 3), torch.empty(2, 3))
    anchor = (aten.cos.default,)

    def rewrite(self, graph, match):
        y = graph.call(aten.cos.default, match.values["x"])
        return graph.call(aten.add.Tensor, y, match.values["z"]), y
'''

WINDING = """
import torch
from torch import nn

class Winding(nn.Module):
    def forward(self, x):
        y = torch.cos(x)
        return y + torch.sin(y)

def winding():
    return Winding(), (torch.randn(2, 3),)
"""


def test_a_match_that_is_not_convex(refused: Refused, tmp_path: Path, fresh_registry: Any) -> None:
    (tmp_path / "joined.py").write_text(NOT_CONVEX)
    (tmp_path / "m.py").write_text(WINDING)
    (tmp_path / "r.yaml").write_text("schema: 1\npasses: [canonicalize, {joined: {expect: all}}]\n")
    flags = ["--plugin", str(tmp_path / "joined.py"), "--recipe", str(tmp_path / "r.yaml")]
    text = refused(2, f"{tmp_path}/m.py:winding", *flags)
    assert "joined made 0 rewrites" in text
    assert "not convex" in text


# The output ----------------------------------------------------------------------------------


def test_an_output_folder_with_someones_files(refused: Refused, model: Path, place: Path) -> None:
    (place / "out").mkdir()
    (place / "out" / "thesis.txt").write_text("ten years of work")
    assert "not empty and is no qopt artifact" in refused(2, model)
    assert (place / "out" / "thesis.txt").read_text() == "ten years of work"


def test_an_artifact_with_someones_files(refused: Refused, model: Path, place: Path) -> None:
    assert main(["compile", str(model), "-o", "out", "-q", "--check", "off"]) == 0
    (place / "out" / "thesis.txt").write_text("ten years of work")
    assert "thesis.txt" in refused(2, model)


def test_an_output_that_is_a_file(refused: Refused, model: Path, place: Path) -> None:
    (place / "out").write_text("mine")
    assert "is a file" in refused(2, model)


@pytest.mark.parametrize("kind", ["a folder", "a file"])
def test_logs_that_someone_else_wrote(
    kind: str, refused: Refused, model: Path, place: Path
) -> None:
    mine = place / "out.log"
    if kind == "a folder":
        mine.mkdir()
        mine = mine / "report.json"
    mine.write_text("ten years of work")
    assert "work/out.log " in refused(2, model)
    assert mine.read_text() == "ten years of work"


def test_a_lock_that_someone_else_wrote(refused: Refused, model: Path, place: Path) -> None:
    (place / "out.lock").write_text("ten years of work")
    assert "is not a lock of qopt's" in refused(2, model)
    assert (place / "out.lock").read_text() == "ten years of work"


@pytest.mark.parametrize(
    ("out", "code", "words"),
    [
        ("/proc/x", 6, "/proc: no "),
        (".", 2, "is the current folder"),
        ("", 2, "is the current folder"),
        ("x" * 254, 2, "File name too long"),
    ],
)
def test_an_output_in_a_strange_place(
    out: str, code: int, words: str, model: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "mine").write_text("")
    assert main(["compile", str(model), "-o", out, "-q", "--check", "off"]) == code
    said = capsys.readouterr().err
    one_error(said)
    assert words in said
    assert [p.name for p in place.iterdir()] == ["mine"]


def test_an_unwritable_output(
    refused: Refused, model: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() == 0:  # root may write everywhere
        monkeypatch.setattr("qopt.artifact.os.access", lambda path, mode: False)
    place.chmod(0o555)
    try:
        assert "no permission" in refused(6, model)
    finally:
        place.chmod(0o755)


def in_process(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run qopt in a process of its own, after some lines of Python."""
    script = f"{code}\nimport sys\nfrom qopt.cli import main\nsys.exit(main(sys.argv[1:]))\n"
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


FULL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
KILLED = """
import os, signal
from qopt.compile import Counted
whole, calls = Counted.__call__, []
def interrupted(*arguments):  # told after each weight that was written
    calls.append(1)
    if len(calls) == 5:
        os.kill(os.getpid(), signal.{signal})
    return whole(*arguments)
Counted.__call__ = interrupted
"""
IN_CHECK = """
import os, signal, threading
from qopt.final_check import Checker
whole = Checker.check
def interrupted(*arguments):
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    return whole(*arguments)
Checker.check = interrupted
"""
WRITING = KILLED.format(signal="SIGINT")
TERMINATED = KILLED.format(signal="SIGTERM")
BAD_LUCK = {
    "a full disk": (FULL, [], 6, "no space left"),
    "Ctrl-C while writing": (WRITING, [], 130, "interrupted"),
    "Ctrl-C while checking": (IN_CHECK, ["--check", "final"], 130, "interrupted"),
    "a request to stop": (TERMINATED, [], 128 + signal.SIGTERM, ""),
}


SLOW = {("Ctrl-C while checking", True), ("a request to stop", True), ("a full disk", False)}


@pytest.mark.parametrize(
    ("case", "older"),
    [
        pytest.param(
            case,
            older,
            marks=pytest.mark.slow if (case, older) in SLOW else (),
            id=f"{case}, {'over an older one' if older else 'new'}",
        )
        for case in BAD_LUCK
        for older in (False, True)
    ],
)
def test_bad_luck(case: str, older: bool, model: Path, place: Path) -> None:
    """Nothing is left of the new artifact, everything of the one that was there; and it mends."""
    code, flags, expected, words = BAD_LUCK[case]
    out = place / "out"
    if older:
        compile(str(model), "baseline", out, check="off")
    before = {p: p.read_bytes() for p in place.rglob("*") if p.is_file()}
    done = in_process(code, "compile", str(model), "-o", "out", "--check", "off", *flags)
    assert done.returncode == expected, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert {p: p.read_bytes() for p in place.rglob("*") if p.is_file()} == before
    assert [p.name for p in place.iterdir() if p.name not in ("out", "out.log")] == []


def test_after_a_kill_the_next_command_mends(model: Path, place: Path) -> None:
    killed = KILLED.format(signal="SIGKILL")
    flags = ["compile", str(model), "-o", "out", "-q", "--check", "off"]
    assert in_process(killed, *flags).returncode == -signal.SIGKILL
    assert not (place / "out").exists()
    assert main(flags) == 0
    assert sorted(p.name for p in place.iterdir()) == ["out", "out.log"]


# Running -------------------------------------------------------------------------------------


def add_tokenizer(folder: Path, words: int) -> None:
    """One token a word: w0, w1, ..."""
    vocabulary = {f"w{i}": i for i in range(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_a_prompt_longer_than_the_context(
    model: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_tokenizer(model, 97)
    assert main(["compile", str(model), "-o", "out", "-q", "--check", "off"]) == 0
    capsys.readouterr()
    assert main(["run", "out", "--raw", "-q", "--prompt", " ".join(["w5"] * 65)]) == 2
    text = capsys.readouterr().err
    one_error(text)
    assert "65" in text
    assert "64" in text
    assert main(["run", "out", "--raw", "-q", "--prompt", "w5 w6", "--max-new-tokens", "3"]) == 0


@pytest.mark.parametrize("command", ["run", "verify", "inspect", "eval", "bench"])
def test_no_artifact(command: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = {"run": ["--prompt", "x"], "eval": ["--text", "x"]}.get(command, [])
    assert main([command, "nowhere", *more]) == 2
    one_error(capsys.readouterr().err)


def test_no_network_for_a_local_folder(
    model: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the checking process either, which cannot be patched: it finds a dead proxy."""
    import socket

    add_tokenizer(model, 97)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert main(["compile", str(model), "-o", "out", "-q"]) == 0
    assert main(["verify", "out", "-q"]) == 0
    assert main(["run", "out", "--raw", "-q", "--prompt", "w5", "--max-new-tokens", "2"]) == 0


@pytest.mark.parametrize("words", [["x" * 5000], ["smollm2-135m", "-o", "y" * 300]])
def test_a_path_that_is_too_long(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", *words]) == 2
    assert "too long" in capsys.readouterr().err
