"""Shared fixtures: tiny random models, their graphs, and calls of a graph as a runtime makes them.

Reference numbers always come from eager transformers or from torch written out in a test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import onnxruntime
import pytest
import torch
import transformers
from torch import Tensor, fx, nn

from qopt import rewrite
from qopt.capture import capture
from qopt.compile import compile
from qopt.export import capture_module
from qopt.graph import Graph
from qopt.info import ModelInfo
from qopt.rewrite import PASSES, Pass, PassManager, PassRecord
from qopt.sources import open_module, open_source

AUTO_CONFIG: Any = transformers.AutoConfig  # transformers leaves its factories without types
AUTO_MODEL: Any = transformers.AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 4,
    "max_position_embeddings": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 64,
    "n_positions": 64,
    "n_ctx": 64,
    "rotary_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "ffn_dim": 128,
    "word_embed_proj_dim": 64,
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "num_layers": 2,
    "attention_heads": 4,
    "dff": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

BASELINE = (
    "canonicalize",
    "fold-constants",
    "eliminate-common-subexpressions",
    "fuse-rms-norm",
    "fuse-layer-norm",
    "fuse-rotary-embedding",
    "fuse-silu-mul",
    "merge-qkv",
    "merge-gate-up",
    "last-token-logits",
    "materialize-kv-cache",
    "fuse-add-rms-norm",
    "widen-residual",
    "eliminate-dead-code",
)


@pytest.fixture(scope="session", autouse=True)
def registry() -> None:
    rewrite.load_builtin_passes()
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()


@pytest.fixture
def fresh_registry() -> Iterator[dict[str, type[Pass]]]:
    """The registry of passes, put back after a test that adds to it."""
    before = dict(PASSES)
    yield PASSES
    PASSES.clear()
    PASSES.update(before)


# Models --------------------------------------------------------------------------------------


class Tiny(Protocol):
    def __call__(self, family: str, **overrides: Any) -> tuple[Path, Any]: ...


def make_tiny(family: str, overrides: dict[str, Any]) -> Any:
    known = AUTO_CONFIG.for_model(family)
    sizes = {k: v for k, v in SIZES.items() if hasattr(known, k)}
    sizes = {
        k: v for k, v in sizes.items() if not isinstance(getattr(type(known), k, None), property)
    }
    config = AUTO_CONFIG.for_model(family, **(sizes | overrides))
    torch.manual_seed(0)
    model = AUTO_MODEL.from_config(config).eval()
    generator = torch.Generator().manual_seed(1)
    state = model.state_dict()
    buffers = [b for name, b in model.named_buffers() if name in state]
    with torch.no_grad():  # weights of 1 and buffers of 0 would hide mistakes
        for tensor in [*model.parameters(), *buffers]:
            if tensor.is_floating_point() and tensor.dim() == 1:
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
    model.config.architectures = [type(model).__name__]
    return model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny random model of a family: its folder, and the model itself, loaded back from there."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(family: str, **overrides: Any) -> tuple[Path, Any]:
        key = f"{family} {sorted(overrides.items())}"
        if key not in made:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                folder = tmp_path_factory.mktemp(family)
                make_tiny(family, overrides).save_pretrained(folder)
                model = AUTO_MODEL.from_pretrained(folder, attn_implementation="eager")
                made[key] = folder, model.eval()
        return made[key]

    return get


class Captured(Protocol):
    def __call__(
        self, family: str, dtype: torch.dtype = torch.float32, **overrides: Any
    ) -> Graph: ...


@pytest.fixture(scope="session")
def captured(tiny: Tiny) -> Captured:
    """The graph of a tiny model, captured once; each call gives a copy that may be changed."""
    made: dict[str, Graph] = {}

    def get(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Graph:
        key = f"{family} {dtype} {sorted(overrides.items())}"
        if key not in made:
            made[key] = capture(open_source(str(tiny(family, **overrides)[0])), dtype)
        return copy_of(made[key])

    return get


def copy_of(graph: Graph) -> Graph:
    module = fx.GraphModule({}, fx.Graph())
    copies: dict[fx.Node, fx.Node] = {}
    for name, buffer in graph.module.named_buffers():
        rewrite_attribute(module, name, buffer)
    for node in graph.nodes:
        copies[node] = module.graph.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    return Graph(
        module,
        dict(graph.weights),
        ModelInfo(**graph.info.model_dump()),
        graph.fake_mode,
        list(graph.outputs),
        dict(graph.defaults),
        list(graph.notes),
    )


def rewrite_attribute(module: nn.Module, name: str, value: Tensor) -> None:
    *path, leaf = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_buffer(leaf, value, persistent=False)


class Exported(Protocol):
    def __call__(
        self, module: nn.Module, *args: Any, shapes: Any = None, dtype: torch.dtype | None = None
    ) -> Graph: ...


@pytest.fixture(scope="session")
def exported() -> Exported:
    """The graph of a module called with `args`, canonical."""

    def get(
        module: nn.Module, *args: Any, shapes: Any = None, dtype: torch.dtype | None = None
    ) -> Graph:
        floats = [p.dtype for p in module.parameters() if p.is_floating_point()]
        wanted = dtype or (floats[0] if floats else torch.float32)
        return capture_module(open_module(module, args, shapes), wanted)

    return get


# Running -------------------------------------------------------------------------------------


@dataclass
class Replay:
    """Calls a decoder's graph as a runtime does: mask, positions and cache are kept between calls.

    `keep` (B, S) says which of the new tokens are real; the rest is padding.
    """

    graph: Graph
    mask: Tensor | None = None
    implied: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    past: list[Tensor] = field(default_factory=list)

    def __call__(self, ids: Tensor, keep: Tensor | None = None, **inputs: Tensor) -> Tensor:
        rows, new = ids.shape
        kept = torch.ones_like(ids) if keep is None else keep.long()
        self.mask = kept if self.mask is None else torch.cat([self.mask, kept], 1)
        positions = (self.mask.cumsum(1) - 1)[:, -new:].clamp(min=0)
        feeds = {"input_ids": ids, "attention_mask": self.mask, "position_ids": positions, **inputs}
        names = [n.name for n in self.graph.inputs if "input" in n.meta]
        dtype = next((n.meta["val"].dtype for n in self.graph.inputs if "input" in n.meta), None)
        if names and not self.past:
            self.past = [
                torch.zeros(rows, layer.kv_heads, 0, size, dtype=dtype)
                for layer in self.graph.info.layers
                if layer.owner is None
                for size in (layer.key_size, layer.value_size)
            ]
        feeds |= dict(zip(names, self.past, strict=True)) if names else {}
        out = self.graph.interpret(feeds, self.implied)
        if names:
            self.past = [out[name] for name in self.graph.outputs if name.startswith("present")]
        return out["logits"]


class Worst(Protocol):
    def __call__(self, graph: Graph, model: Any, chunks: tuple[int, ...] = ...) -> float: ...


@pytest.fixture(scope="session")
def worst() -> Worst:
    """Largest logit difference between a graph and an eager model: prefill, decode, chunks."""

    def compare(graph: Graph, model: Any, chunks: tuple[int, ...] = (7, 1, 1, 3)) -> float:
        generator = torch.Generator().manual_seed(2)
        ids = torch.randint(3, 90, (3, sum(chunks)), generator=generator)
        with torch.no_grad():
            want = model(input_ids=ids, use_cache=False).logits
        replay, done, found = Replay(graph), 0, 0.0
        for new in chunks:
            part = slice(done, done + new)
            extra = {"num_logits_to_keep": torch.tensor([0])}
            got = replay(ids[:, part], **extra)
            found = max(found, float((got.float() - want[:, part].float()).abs().max()))
            done += new
        return found

    return compare


@pytest.fixture(scope="session")
def ragged() -> Callable[[Graph, Any], float]:
    """The same for rows of unequal length: a right-padded prefill, then steps that leave holes."""

    def compare(graph: Graph, model: Any) -> float:
        generator = torch.Generator().manual_seed(3)
        lengths, steps, width = (9, 4, 6), 3, 9
        ids = torch.randint(3, 90, (3, width + steps), generator=generator)
        keep = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
        replay = Replay(graph)
        extra = {"num_logits_to_keep": torch.tensor([0])}
        got = [replay(ids[:, :width], keep, **extra)]
        got += [replay(ids[:, width + i : width + i + 1], **extra) for i in range(steps)]
        found = 0.0
        for row, length in enumerate(lengths):
            alone = torch.cat([ids[row, :length], ids[row, width:]])[None]
            with torch.no_grad():
                want = model(input_ids=alone, use_cache=False).logits[0]
            have = torch.cat([got[0][row, :length], *[step[row] for step in got[1:]]])
            found = max(found, float((have - want).abs().max()))
        return found

    return compare


@pytest.fixture(scope="session")
def replay() -> type[Replay]:
    return Replay


# Passes --------------------------------------------------------------------------------------


class Run(Protocol):
    def __call__(self, graph: Graph, *names: str) -> list[PassRecord]: ...


@pytest.fixture(scope="session")
def run() -> Run:
    """Run passes by name, the graph verified after each; returns the records."""

    def apply(graph: Graph, *names: str) -> list[PassRecord]:
        return PassManager([PASSES[name]() for name in names]).run(graph)

    return apply


@pytest.fixture(scope="session")
def baseline() -> tuple[str, ...]:
    """The exact passes in the order of the shipped recipe."""
    return BASELINE


@pytest.fixture(scope="session")
def body() -> Callable[[Graph], str]:
    """The calls of a graph and what it returns, without shapes: what a pass test compares."""

    def text(graph: Graph) -> str:
        lines = [line.split("  #")[0] for line in graph.listing().splitlines()]
        return "\n".join(x for x in lines if " = weight " not in x and not x.endswith("= input"))

    return text


# Artifacts -----------------------------------------------------------------------------------


class Compiled(Protocol):
    def __call__(self, family: str, recipe: str = ..., /, **options: Any) -> Path: ...


FLAGS = (
    "target",
    "dtype",
    "opset",
    "logits",
    "sets",
    "skip",
    "add",
    "stop_after",
    "plugins",
    "architectures",
)


@pytest.fixture(scope="session")
def compiled(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The artifact of a tiny model, compiled once with the check off; not to be changed.

    Options are those of `compile`, the rest go into the model's config.
    """
    made: dict[str, Path] = {}

    def get(family: str, recipe: str = "baseline", /, **options: Any) -> Path:
        key = f"{family} {recipe} {sorted(options.items())}"
        if key not in made:
            flags = {k: v for k, v in options.items() if k in FLAGS}
            config = {k: v for k, v in options.items() if k not in FLAGS}
            out = tmp_path_factory.mktemp(family) / "out"
            compile(str(tiny(family, **config)[0]), recipe, out, check="off", **flags)
            made[key] = out
        return made[key]

    return get


class Script:
    """A TorchScript file in plain torch, with the methods of an onnxruntime session."""

    def __init__(self, folder: Path) -> None:
        self.module: Any = torch.jit.load(folder / "model.pt")  # type: ignore[no-untyped-call]
        self.manifest = json.loads((folder / "qopt_manifest.json").read_text())

    def get_inputs(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(name=s["name"], shape=s["shape"], type=s["dtype"])
            for s in self.manifest["inputs"]
        ]

    def get_outputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=spec["name"]) for spec in self.manifest["outputs"]]

    def run(self, _: None, feeds: dict[str, np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        with torch.no_grad():
            made = self.module(*(torch.from_numpy(feeds[s.name]) for s in self.get_inputs()))
        return [tensor.numpy() for tensor in made]


class Player:
    """Calls an artifact through onnxruntime or torch alone, present passed along as past.

    `lengths` says how many of a call's tokens are real in each row; the rest is padding on the
    right. `keep` is fed where it is given, else the artifact's own default holds.
    """

    def __init__(self, folder: Path, keep: int | None = 0) -> None:
        self.session: Any
        if (folder / "model.pt").is_file():
            self.session = Script(folder)
        else:
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 3
            path = str(folder / "model.onnx")
            self.session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
        self.keep = keep
        self.mask: np.ndarray[Any, Any] | None = None
        self.past: dict[str, np.ndarray[Any, Any]] = {}

    def __call__(self, ids: Tensor, lengths: list[int] | None = None) -> Tensor:
        rows, new = ids.shape
        real = np.arange(new) < np.array(lengths or [new] * rows)[:, None]
        if self.mask is None:
            self.mask = np.zeros((rows, 0), np.int64)
            for spec in self.session.get_inputs():
                if spec.name.startswith("past"):
                    kind = np.float16 if "16" in spec.type else np.float32
                    self.past[spec.name] = np.zeros((rows, spec.shape[1], 0, spec.shape[3]), kind)
        self.mask = np.concatenate([self.mask, real.astype(np.int64)], 1)
        positions = np.maximum(self.mask.cumsum(1) - 1, 0)[:, -new:]
        feeds = {"input_ids": ids.numpy(), "attention_mask": self.mask, **self.past}
        if "position_ids" in {spec.name for spec in self.session.get_inputs()}:
            feeds["position_ids"] = positions
        if self.keep is not None and not isinstance(self.session, Script):
            feeds["num_logits_to_keep"] = np.array([self.keep])
        names = [spec.name for spec in self.session.get_outputs()]
        out = dict(zip(names, self.session.run(None, feeds), strict=True))
        logits = torch.from_numpy(out.pop("logits")).float()
        self.past = {name.replace("present", "past_key_values"): v for name, v in out.items()}
        return logits


@pytest.fixture(scope="session")
def player() -> type[Player]:
    return Player


class Distance(Protocol):
    def __call__(
        self, folder: Path, model: Any, calls: list[list[int]], *, last: bool = False
    ) -> float: ...


@pytest.fixture(scope="session")
def distance() -> Distance:
    """Largest logit difference between an artifact and an eager model.

    `calls[i][b]` is how many tokens row b gets in call i; the model runs each row alone, whole and
    without a cache. `last`: only what the artifact gives by default is compared.
    """

    def measure(folder: Path, model: Any, calls: list[list[int]], *, last: bool = False) -> float:
        vocabulary = model.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(sum(map(sum, calls)))
        totals = [sum(call[row] for call in calls) for row in range(len(calls[0]))]
        ids = [torch.randint(3, vocabulary, (n,), generator=generator) for n in totals]
        with torch.no_grad():
            want = [model(input_ids=row[None], use_cache=False).logits[0].float() for row in ids]
        play = Player(folder, None if last else 0)
        done, found = [0] * len(ids), 0.0
        for call in calls:
            fed = torch.zeros(len(ids), max(call), dtype=torch.int64)
            for row, length in enumerate(call):
                fed[row, :length] = ids[row][done[row] : done[row] + length]
            got = play(fed, call)
            for row, length in enumerate(call):
                start, stop = done[row], done[row] + length
                wanted = want[row][stop - 1 : stop] if last else want[row][start:stop]
                given = got[row] if last else got[row, :length]
                assert given.shape == wanted.shape
                found = max(found, float((given - wanted).abs().nan_to_num(1e9).max()))
                done[row] = stop
        return found

    return measure


# Without qopt --------------------------------------------------------------------------------


REFUSING = """
import sys, importlib.abc

class Refusing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refusing())
"""


@pytest.fixture(scope="session")
def torch_alone() -> Callable[..., str]:
    """Runs a script as an environment would that holds torch and what torch asks for alone."""
    needed, asked = set[str](), ["torch"]
    while asked:
        name = re.sub(r"[-_.]+", "-", asked.pop()).lower()
        if name not in needed:
            needed.add(name)
            found = metadata.packages_distributions().values()
            there = {re.sub(r"[-_.]+", "-", n).lower() for names in found for n in names}
            for line in (metadata.requires(name) or ()) if name in there else ():
                if "extra ==" not in line:
                    asked.append(re.split(r"[^\w.-]", line)[0])
    refused = {"qopt"} | {
        module
        for module, names in metadata.packages_distributions().items()
        if not needed & {re.sub(r"[-_.]+", "-", name).lower() for name in names}
    }

    def run_script(script: str, *arguments: str) -> str:
        text = f"REFUSED = {refused!r}\n{REFUSING}\n{script}"
        command = [sys.executable, "-I", "-W", "ignore", "-c", text, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_script


@pytest.fixture(scope="session")
def decode(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Path, int, list[int]], subprocess.CompletedProcess[str]]:
    """Runs examples/cpp/decode.cpp, built with the libtorch that lies in the torch wheel."""
    from torch.utils.cpp_extension import include_paths, library_paths

    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler here: neither g++ nor clang++ is installed")
    program = tmp_path_factory.mktemp("cpp") / "decode"
    source = Path(__file__).parent.parent / "examples" / "cpp" / "decode.cpp"
    flags = [
        "-std=c++20",
        "-O0",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    includes = [f"-I{path}" for path in include_paths()]
    libraries = [flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    command = [compiler, *flags, str(source), "-o", str(program), *includes, *libraries]
    built = subprocess.run(
        [*command, "-ltorch", "-ltorch_cpu", "-lc10"], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr

    def run_program(folder: Path, new: int, ids: list[int]) -> subprocess.CompletedProcess[str]:
        words = [str(program), str(folder), str(new), *map(str, ids)]
        one = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that spin starve one another
        return subprocess.run(words, env=one, capture_output=True, text=True, check=False)

    return run_program
