"""Checks: that a graph still computes what was captured, and an artifact what the model does.

`GraphCheck` compares the graph after each pass with the captured one, on two short probes. The
final check compares the artifact, loaded in a new process, with the model run by transformers in
fp32, one request at a time, without padding and without a cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qopt.errors import GateError, QoptError, ResourceError, UsageError

if TYPE_CHECKING:
    import torch

    from qopt.artifact import Artifact
    from qopt.graph import Graph
    from qopt.rewrite import Pass, PassRecord

Array = NDArray[Any]

# The one table of limits: |difference| of logits, times max(1, largest logit / 10).
LIMITS = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-2}
MAX_KL = {"float16": 1e-3, "bfloat16": 1e-3}
LONGEST = 2048  # tokens of the longest probe; a window or switch beyond it is said and left out
SEED = 20240


@dataclass
class Outcome:
    """One probe: what was measured, what it was held to, and whether it passed."""

    probe: str
    figures: dict[str, float]
    limits: dict[str, float]
    passed: bool


@dataclass
class Verification:
    """All probes of an artifact."""

    probes: list[Outcome] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every probe passed."""
        return all(p.passed for p in self.probes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"passed": self.passed, **asdict(self)}

    def tables(self) -> list[Any]:
        """The probes, and what else there is to say."""
        from qopt.report import CheckRow, Report

        rows = [CheckRow(p.probe, p.figures, p.limits, p.passed) for p in self.probes]
        return Report(checks=rows, notes=self.notes).tables()


# Metrics -------------------------------------------------------------------------------------


def judge(probe: str, got: Sequence[Array], want: Sequence[Array], dtype: str) -> Outcome:
    """Compare rows of logits (tokens, vocabulary) with the reference's, within the table."""
    highest = max((float(np.abs(w).max()) for w in want if w.size), default=0.0)
    limit = LIMITS[dtype] * max(1.0, highest / 10)
    differences = [np.abs(g.astype(np.float64) - w) for g, w in zip(got, want, strict=True)]
    worst = max((float(d.max()) for d in differences if d.size), default=0.0)
    finite = all(bool(np.isfinite(g).all()) for g in got)
    figures = {
        "max": worst if finite else float("inf"),
        "mean": float(np.mean([d.mean() for d in differences if d.size] or [0.0])),
        "kl": float(np.mean([divergence(g, w) for g, w in zip(got, want, strict=True)])),
        "top1_wrong": float(sum(turned(g, w, 2 * limit) for g, w in zip(got, want, strict=True))),
    }
    limits = {"max": limit, "top1_wrong": 0.0}
    if dtype in MAX_KL:
        limits["kl"] = MAX_KL[dtype]
    passed = finite and all(figures[name] <= most for name, most in limits.items())
    return Outcome(probe, figures, limits, passed)


def divergence(got: Array, want: Array) -> float:
    """Mean over tokens of KL(original || artifact), in nats."""
    if want.ndim < 2 or want.shape[-1] < 2 or not want.size or not np.isfinite(got).all():
        return 0.0
    p, q = log_softmax(want), log_softmax(got)
    return float(np.maximum((np.exp(p) * (p - q)).sum(-1), 0).mean())


def log_softmax(x: Array) -> Array:
    """Log of the softmax over the last dimension, in fp64."""
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))  # type: ignore[no-any-return]


def turned(got: Array, want: Array, margin: float) -> int:
    """Tokens whose best choice differs although the reference's lead exceeds `margin`."""
    if want.ndim < 2 or want.shape[-1] < 2 or not want.size:
        return 0
    best = np.partition(want, -2, axis=-1)
    clear = best[..., -1] - best[..., -2] > margin
    return int((clear & (got.argmax(-1) != want.argmax(-1))).sum())


# After each pass -----------------------------------------------------------------------------


class GraphCheck:
    """Holds the captured graph's answers to two short probes, and compares later graphs with them.

    Weights that fit `memory` bytes are kept evaluated between the passes.
    """

    def __init__(self, graph: Graph, memory: int) -> None:
        from qopt.weights import WeightCache

        self.cache = WeightCache(memory)
        self.dtype = str(graph_dtype(graph)).removeprefix("torch.")
        self.want = self._answers(graph)

    def __call__(self, item: Pass, graph: Graph, record: PassRecord) -> Outcome | None:
        """Compare after an exact pass that changed something; raise `GateError` on a difference."""
        if not item.exact or not record.rewrites:
            return None
        outcome = judge(f"after {item.name}", self._answers(graph), self.want, self.dtype)
        if not outcome.passed:
            raise GateError(
                f"pass {item.name} changes what the model computes",
                where=f"probe {outcome.probe}",
                why=f"largest difference {outcome.figures['max']:.2e}, "
                f"limit {outcome.limits['max']:.2e}",
                todo=f"leave it out with --skip {item.name}, or look with --dump DIR",
            )
        return outcome

    def _answers(self, graph: Graph) -> list[Array]:
        import torch

        if graph.info.kind != "decoder":
            inputs = example_inputs(graph)
            out = graph.interpret(inputs, load=self.cache.get)
            return [
                flat_rows(t.float().numpy()) for t in out.values() if isinstance(t, torch.Tensor)
            ]
        generator = torch.Generator().manual_seed(SEED)
        high = graph.info.vocab_size or 64
        ids = torch.randint(0, high, (2, 6), generator=generator)
        past: dict[str, Any] = {}
        implied: dict[int, Any] = {}
        rows = []
        for start, stop in ((0, 5), (5, 6)):
            feeds = decoder_feeds(graph, ids[:, start:stop], start, past)
            out = graph.interpret(feeds, implied, load=self.cache.get)
            past = {past_name(name): t for name, t in out.items() if name.startswith("present")}
            rows += [row.float().numpy() for row in out["logits"]]
        return rows


def flat_rows(array: Array) -> Array:
    """An output as rows."""
    return array.reshape(-1, array.shape[-1]) if array.ndim else array.reshape(1, 1)


def graph_dtype(graph: Graph) -> torch.dtype:
    """The floating type of the graph's first result."""
    import torch

    for node in graph.results:
        held = node.meta["val"]
        if isinstance(held, torch.Tensor) and held.is_floating_point():
            return held.dtype
    return torch.float32


def decoder_feeds(graph: Graph, ids: Any, start: int, past: dict[str, Any]) -> dict[str, Any]:
    """Inputs of one call, by node name; an empty cache where there is none yet."""
    import torch

    rows, new = ids.shape
    feeds: dict[str, Any] = {}
    for node in graph.inputs:
        name = node.meta.get("input", node.name)
        if name == "input_ids":
            feeds[node.name] = ids
        elif name == "attention_mask":
            feeds[node.name] = torch.ones(rows, start + new, dtype=torch.int64)
        elif name == "position_ids":
            feeds[node.name] = torch.arange(start, start + new)[None].repeat(rows, 1)
        elif name == "num_logits_to_keep":
            feeds[node.name] = torch.zeros(1, dtype=torch.int64)
        elif name in past:
            feeds[node.name] = past[name]
        else:
            held = node.meta["val"]
            sizes = [d if isinstance(d, int) else 0 for d in held.shape[1:]]
            feeds[node.name] = torch.zeros((rows, *sizes), dtype=held.dtype)
    return feeds


def past_name(present: str) -> str:
    """The input that an output becomes in the next call."""
    if present.startswith("present_state."):
        return present.replace("present", "past", 1)
    return present.replace("present", "past_key_values", 1)


def example_inputs(graph: Graph, batch: int = 3) -> dict[str, Any]:
    """Random inputs for a module, every symbolic dimension of size `batch`."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    feeds: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for node in graph.inputs:
        held = node.meta["val"]
        shape = []
        for dim in held.shape:
            known = isinstance(dim, int)
            shape.append(dim if known else sizes.setdefault(str(dim), batch + 2 * len(sizes)))
        feeds[node.name] = random_input(node.name, shape, held.dtype, generator)
    return feeds


def random_input(name: str, shape: list[int], dtype: Any, generator: Any) -> Any:
    """A plausible random tensor: small integers, ones for masks, normal numbers."""
    import torch

    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    if "mask" in name or dtype == torch.bool:
        return torch.ones(shape, dtype=dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


# The final check -----------------------------------------------------------------------------


@dataclass
class Job:
    """What the checking process is asked to do."""

    artifact: str
    model: str
    revision: str | None = None
    adapter: str | None = None
    threads: int | None = None


def check_artifact(job: Job) -> Verification:
    """Run the final check in a new process; raises what went wrong there."""
    command = [sys.executable, "-P", "-m", "qopt.check", json.dumps(asdict(job))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        data = json.loads(lines[-1])
        return Verification([Outcome(**p) for p in data["probes"]], data["notes"])
    if done.returncode in (-9, 137):
        raise ResourceError(
            "the check ran out of memory",
            why="the model in fp32 and the artifact must fit, one after the other",
            todo="free memory, or compile with --check off",
        )
    if lines:
        told = json.loads(lines[-1])
        raise _kind(told["code"])(
            told["what"], where=told["where"], why=told["why"], todo=told["todo"]
        )
    tail = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    raise GateError("the check could not be run", why=tail[0], todo="run again with --debug")


def _kind(code: int) -> type[QoptError]:
    kinds: dict[int, type[QoptError]] = {
        kind.exit_code: kind for kind in QoptError.__subclasses__() if kind.exit_code > 1
    }
    return kinds.get(code, GateError)


def verify(artifact: str | Path | Artifact, model: str | None = None) -> Verification:
    """Check an artifact's files and, where the model can be found, what it computes."""
    from qopt.artifact import Artifact, log_folder

    loaded = artifact if isinstance(artifact, Artifact) else Artifact.load(artifact)
    loaded.verify_files()
    result = Verification(notes=["every file has the size and hash that the manifest states"])
    if not loaded.manifest.weights:
        result.notes.append("integrity only: it was compiled without weights")
        return result
    adapter = None
    if model is None:
        model, adapter = remembered(loaded, log_folder(loaded.folder) / "source.json")
    if model is None:
        result.notes.append("integrity only: the model it was compiled from is not known here")
        return result
    found = check_artifact(Job(str(loaded.folder), model, adapter=adapter))
    return Verification(found.probes, result.notes + found.notes)


def remembered(artifact: Artifact, path: Path) -> tuple[str | None, str | None]:
    """Where the model lay when it was compiled, if its digest is still the same; else its id."""
    if path.is_file():
        told = json.loads(path.read_text())
        where = told.get("model")
        if where and Path(where).exists() and same_digest(told, artifact.manifest.source.digest):
            return where, told.get("adapter")
    return artifact.manifest.source.id, None


def same_digest(told: dict[str, Any], digest: str | None) -> bool:
    """Whether the model at the remembered place is the one that was compiled."""
    from qopt.sources import open_source

    adapter = told.get("adapter")
    source = open_source(told["model"], adapter=Path(adapter) if adapter else None)
    return digest is None or source.digest == digest


# Inside the checking process -----------------------------------------------------------------


def run_job(job: Job) -> Verification:
    """Compute the reference, then the artifact, and compare on every probe."""
    from qopt.artifact import Artifact
    from qopt.sources import open_source

    artifact = Artifact.load(job.artifact)
    adapter = Path(job.adapter) if job.adapter else None
    source = open_source(job.model, revision=job.revision, adapter=adapter)
    if artifact.manifest.model.kind != "decoder":
        return check_module(artifact, source, job)
    reference = Reference(source)
    result = Verification(notes=list(reference.notes))
    probes = list(decoder_probes(artifact, reference, result.notes))
    if artifact.manifest.model.layers and not artifact.manifest.keeps_cache:
        probes = [probe for probe in probes if len(probe.calls) == 1]
        result.notes.append("the artifact keeps no cache: checked on whole prompts alone")
    answers = [[reference.logits(row) for row in probe.rows] for probe in probes]
    reference.free()
    run = DecoderRun(artifact, job.threads)
    for probe, want in zip(probes, answers, strict=True):
        got = run.play(probe)
        result.probes.append(judge(probe.name, got, want, artifact.manifest.dtype))
    return result


class Reference:
    """The original model in fp32, eager, one request at a time."""

    def __init__(self, source: Any) -> None:
        import torch

        self.torch = torch
        self.notes: list[str] = []
        self.model = load_reference(source)
        self.config = source.config

    def logits(self, ids: Array) -> Array:
        """Logits (tokens, vocabulary) of one row of ids, without a cache."""
        with self.torch.no_grad():
            tokens = self.torch.from_numpy(ids[None])
            out = self.model(input_ids=tokens, use_cache=False).logits[0]
        return out.float().numpy()  # type: ignore[no-any-return]

    def free(self) -> None:
        """Let go of the model before the artifact is loaded."""
        import gc

        del self.model
        gc.collect()


def load_reference(source: Any) -> Any:
    """The model as transformers itself loads it, in fp32 with eager attention."""
    from qopt.compat import load_original

    if source.module is not None:
        return source.module.eval().float()
    if source.adapter is None and source.file is not None:
        return load_original(source.file.parent, gguf_file=source.file.name)
    if source.adapter is None and whole_checkpoint(source):
        return load_original(source.folder)
    return filled_model(source).eval()  # an adapter, or a part of a checkpoint: our tensors


def whole_checkpoint(source: Any) -> bool:
    """Whether the folder holds this decoder and nothing around it."""
    path = Path(source.folder or "") / "config.json"
    if source.folder is None or not path.is_file():
        return False
    return bool(json.loads(path.read_text())["model_type"] == source.config.model_type)


def filled_model(source: Any) -> Any:
    """Transformers' own class with the bound weights evaluated into it."""
    import torch
    from transformers import AutoModelForCausalLM

    from qopt.sources import bind_weights

    auto: Any = AutoModelForCausalLM
    model = auto.from_config(source.config, dtype=torch.float32, attn_implementation="eager")
    state = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, weight in bind_weights(model, source).items():
            state[name].copy_(weight.evaluate())
    return model


@dataclass
class Probe:
    """Rows of ids, and the calls in which they are fed: how many tokens each row gets in each."""

    name: str
    rows: list[Array]
    calls: list[list[int]]


def decoder_probes(artifact: Artifact, reference: Reference, notes: list[str]) -> Iterator[Probe]:
    """Inputs that reach the bugs, none of a size that was traced."""
    info = artifact.manifest.model
    tokens = probe_tokens(artifact)
    limit = info.context_length or LONGEST
    at = 0

    def row(length: int) -> Array:
        nonlocal at
        at += 37  # every row starts somewhere else
        return np.resize(np.roll(tokens, -at), min(length, limit))

    def even(name: str, count: int, calls: list[int]) -> Probe:
        calls = fitted(calls, limit)
        return Probe(name, [row(sum(calls)) for _ in range(count)], [[c] * count for c in calls])

    yield even("prefill", 1, [11])
    yield even("prefill, batch 3", 3, [9])
    yield even("decode on a filled cache, batch 3", 3, [7, 1, 1])
    yield even("chunked prefill", 1, [6, 4, 1])
    yield even("chunked prefill, batch 3", 3, [4, 6, 1])
    if info.ragged:
        calls = [[9, 6, 3], [4, 2, 3], [1, 1, 1], [1, 1, 1]]
        if sum(c[0] for c in calls) <= limit:
            rows = [row(sum(c[r] for c in calls)) for r in range(3)]
            yield Probe("unequal lengths", rows, calls)
    for window in sorted({layer.window for layer in info.layers if layer.window}):
        if window + 9 > min(LONGEST, limit):
            notes.append(
                f"the window of {window} tokens is longer than the probes, and not reached"
            )
            continue
        yield even(f"past the window of {window}", 2, [window + 7, 1, 1])
        yield even(f"over the edge of the window of {window}", 2, [max(window - 1, 1), 1, 1, 1])


def probe_tokens(artifact: Artifact) -> Array:
    """Ids of a text that ships with qopt, or random ones where there is no tokenizer.

    Text keeps a trained model where its logits are well conditioned: on random ids some states grow
    a hundred times, and fp32 kernels that are all right differ by more than the limit.
    """
    info = artifact.manifest.model
    path = artifact.folder / "tokenizer.json"
    if path.is_file():
        from tokenizers import Tokenizer

        text = resources.files("qopt").joinpath("data/probe.txt").read_text(encoding="utf-8")
        ids = Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False).ids
        if ids and max(ids) < (info.vocab_size or 0):
            return np.array(ids, np.int64)
    special = {info.pad_token_id, info.bos_token_id, *info.eos_token_ids}
    plain = [i for i in range(info.vocab_size or 64) if i not in special] or [0]
    return np.random.default_rng(SEED).choice(plain, 4096).astype(np.int64)


def fitted(calls: list[int], limit: int) -> list[int]:
    """The calls cut to the context length."""
    kept, total = [], 0
    for call in calls:
        take = min(call, limit - total)
        if take > 0:
            kept.append(take)
            total += take
    return kept


class DecoderRun:
    """Plays probes on an artifact: right-padded calls, past and present passed along."""

    def __init__(self, artifact: Artifact, threads: int | None) -> None:
        from qopt.runtime.session import OnnxSession

        self.session = OnnxSession(artifact.folder / "model.onnx", threads=threads)
        self.names = set(self.session.inputs)
        self.dtype = np.dtype(artifact.manifest.dtype)

    def play(self, probe: Probe) -> list[Array]:
        """The logits of every real token, by row."""
        count = len(probe.rows)
        done = np.zeros(count, int)
        mask = np.zeros((count, 0), np.int64)
        past = self._empty(count)
        got: list[list[Array]] = [[] for _ in range(count)]
        for call in probe.calls:
            lengths = np.array(call)
            columns = np.arange(lengths.max())
            ids = np.zeros((count, len(columns)), np.int64)
            for r, row in enumerate(probe.rows):
                ids[r, : lengths[r]] = row[done[r] : done[r] + lengths[r]]
            mask = np.concatenate([mask, (columns < lengths[:, None]).astype(np.int64)], 1)
            positions = np.maximum(mask.cumsum(1) - 1, 0)[:, -len(columns) :]
            out = self._call(ids, mask, positions, past)
            logits = out.pop("logits")
            past = {past_name(k): v for k, v in out.items()}
            for r in range(count):
                got[r].append(logits[r, : lengths[r]])
            done += lengths
        return [np.concatenate(parts).astype(np.float32) for parts in got]

    def _empty(self, count: int) -> dict[str, Array]:
        past = {}
        for name, spec in self.session.inputs.items():
            if name.startswith("past_"):
                sizes = [d if isinstance(d, int) else 0 for d in spec.shape[1:]]
                past[name] = np.zeros((count, *sizes), spec.dtype)
        return past

    def _call(
        self, ids: Array, mask: Array, positions: Array, past: dict[str, Array]
    ) -> dict[str, Array]:
        feeds = {"input_ids": ids, "attention_mask": mask, **past}
        if "position_ids" in self.names:
            feeds["position_ids"] = positions
        if "num_logits_to_keep" in self.names:
            feeds["num_logits_to_keep"] = np.zeros(1, np.int64)
        return self.session.run(feeds)


def check_module(artifact: Artifact, source: Any, job: Job) -> Verification:
    """Compare an artifact that is no decoder with its module, at two batch sizes."""
    import torch

    from qopt.runtime.session import OnnxSession

    if source.module is None:
        return Verification(notes=["an exported program holds no module to compare with"])
    session = OnnxSession(artifact.folder / "model.onnx", threads=job.threads)
    module = source.module.eval()
    result = Verification()
    for batch in (1, 3):
        feeds = module_feeds(artifact, batch, source)
        with torch.no_grad():
            want = module(*(torch.from_numpy(a) for a in feeds.values()))
        leaves = torch.utils._pytree.tree_leaves(want)
        rows = [flat_rows(t.float().numpy()) for t in leaves if isinstance(t, torch.Tensor)]
        got = [flat_rows(a) for a in session.run(feeds).values()]
        result.probes.append(judge(f"batch {batch}", got, rows, artifact.manifest.dtype))
    return result


def module_feeds(artifact: Artifact, batch: int, source: Any) -> dict[str, Array]:
    """Random inputs in the shapes that the manifest states, symbolic dimensions `batch` or near."""
    import torch

    generator = torch.Generator().manual_seed(SEED + batch)
    sizes: dict[str, int] = {}
    feeds = {}
    for spec in artifact.manifest.inputs:
        shape = [
            d if isinstance(d, int) else sizes.setdefault(d, batch + 2 * len(sizes))
            for d in spec.shape
        ]
        dtype = getattr(torch, spec.dtype)
        feeds[spec.name] = random_input(spec.name, shape, dtype, generator).numpy()
    return feeds


def main(argument: str, run: Callable[[Job], Verification] = run_job) -> int:
    """Entry of the checking process: prints one line of JSON."""
    try:
        result = run(Job(**json.loads(argument)))
    except QoptError as error:
        told = {"what": error.what, "where": error.where, "why": error.why, "todo": error.todo}
        print(json.dumps({"code": error.exit_code, **told}))
        return 1
    print(json.dumps(result.to_dict()))
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise UsageError("qopt.check is run by qopt compile and qopt verify")
    code = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(code)  # at once: taking a model down object by object takes longer than a second
