"""The final check: the artifact against the model run by transformers, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qopt.check import (
    LONGEST,
    SEED,
    Array,
    Verification,
    flat_rows,
    judge,
    past_name,
    random_input,
)
from qopt.errors import GateError, QoptError, ResourceError, UsageError
from qopt.report import CheckRow
from qopt.runtime.cache import CACHE_POSITION
from qopt.runtime.decoder import Decoder
from qopt.runtime.session import KEEP, device_at_hand

if TYPE_CHECKING:
    from qopt.artifact import Artifact
    from qopt.runtime.session import Spec
    from qopt.streamed import StreamedReference


DISTINCT = 24  # ids that a probe text must have; fewer, and random ones serve


@dataclass
class Job:
    """What the checking process is asked to do."""

    model: str
    revision: str | None = None
    adapter: str | None = None
    threads: int | None = None
    early: bool = False  # load the model before the artifact is named
    streamed: bool = False  # neither the model nor the artifact is ever whole in memory
    device: str | None = None  # cpu or cuda; None: the GPU where target and machine have it


class Checker:
    """The checking process; an `early` one starts at once, to be ready when the artifact is."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.process = self._start() if job.early else None

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "qopt.final_check", json.dumps(asdict(self.job))]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def __enter__(self) -> Checker:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()

    def check(self, artifact: Path) -> Verification:
        """Have the artifact in this folder compared; raises what went wrong there."""
        self.process = self.process or self._start()
        out, err = self.process.communicate(json.dumps(str(artifact)))
        code = self.process.returncode
        lines = [line for line in out.splitlines() if line.startswith("{")]
        if code == 0 and lines:
            data = json.loads(lines[-1])
            probes = [CheckRow(**p) for p in data["probes"]]
            return Verification(probes, data["notes"], data["ran"])
        if code in (-9, 137):
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
        tail = err.strip().splitlines()[-1:] or [f"exit code {code}"]
        raise GateError("the check could not be run", why=tail[0], todo="run again with --debug")


def _kind(code: int) -> type[QoptError]:
    kinds: dict[int, type[QoptError]] = {
        kind.exit_code: kind for kind in QoptError.__subclasses__() if kind.exit_code > 1
    }
    return kinds.get(code, GateError)


def verify(
    artifact: str | Path | Artifact,
    model: str | None = None,
    *,
    max_ram: str | None = None,
    device: str | None = None,
) -> Verification:
    """Check an artifact's files and, where the model can be found, what it computes.

    What does not fit `max_ram` (as `4GB`; default: the memory that is free) is checked in parts.
    `device`: `cpu` or `cuda`; by default an artifact for CUDA runs on the CPU where there is no
    GPU, and the result says what that leaves unchecked.
    """
    from qopt.artifact import Artifact, log_folder
    from qopt.memory import memory_budget, plan, weights_of_artifact

    budget = memory_budget(max_ram)

    loaded = artifact if isinstance(artifact, Artifact) else Artifact.load(artifact)
    loaded.verify_files()
    result = Verification(notes=["every file has the size and hash that the manifest states"])
    if not loaded.manifest.weights:
        result.notes.append("integrity only: it was compiled without weights")
        return result
    adapter = None
    if model is None:
        model, adapter = remembered(loaded, log_folder(loaded.folder) / "source.json", result.notes)
    if model is None:
        result.notes.append("integrity only: the model it was compiled from is not known here")
        return result
    memory = plan(
        weights_of_artifact(loaded),
        budget,
        decoder=loaded.manifest.model.kind == "decoder",
        streams=loaded.manifest.target.startswith("onnx"),
        checked=True,
    )
    result.notes += memory.notes
    job = Job(model, adapter=adapter, streamed=memory.check_in_parts, device=device)
    with Checker(job) as checker:
        found = checker.check(loaded.folder)
    return Verification(found.probes, result.notes + found.notes, found.ran)


def remembered(artifact: Artifact, path: Path, notes: list[str]) -> tuple[str | None, str | None]:
    """Where the model lay when it was compiled, if its digest is still the same; else its id."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        where, adapter = told["model"], told["adapter"]
        if Path(where).exists() and same_digest(where, adapter, artifact.manifest.source.digest):
            return where, adapter
    except FileNotFoundError:
        pass  # moved or copied without its logs
    except (OSError, ValueError, LookupError, TypeError, QoptError) as error:
        reason = error.what if isinstance(error, QoptError) else type(error).__name__
        notes.append(f"where the model lay cannot be read from {path.name}: {reason}")
    return artifact.manifest.source.id, None


def same_digest(model: str, adapter: str | None, digest: str | None) -> bool:
    """Whether the model at the remembered place is the one that was compiled."""
    from qopt.sources import open_source

    source = open_source(model, adapter=Path(adapter) if adapter else None)
    return digest is None or source.digest == digest


# Inside the checking process -----------------------------------------------------------------


def run_job(job: Job, artifact_of: Callable[[], str]) -> Verification:
    """Compute the reference, then the artifact, and compare on every probe.

    `artifact_of` waits until the artifact is there, and names its folder.
    """
    import torch

    from qopt.artifact import Artifact
    from qopt.sources import open_source

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # beside the compiler more than one would wait for each other
    try:
        adapter = Path(job.adapter) if job.adapter else None
        source = open_source(job.model, revision=job.revision, adapter=adapter)
        early = reference_of(source, job) if job.early and source.kind == "decoder" else None
        artifact = Artifact.load(artifact_of())
    finally:
        torch.set_num_threads(job.threads or threads)
    if artifact.manifest.model.kind != "decoder":
        return check_module(artifact, source, job)
    sizes = artifact.manifest.model.vocab_size, getattr(source.config, "vocab_size", None)
    if None not in sizes and sizes[0] != sizes[1]:
        raise GateError(
            f"the artifact has a vocabulary of {sizes[0]}, the model of {sizes[1]}",
            where=job.model,
            why="it was compiled from another model",
        )
    reference = early or reference_of(source, job)
    result = Verification(ran=list(reference.notes))
    probes = list(decoder_probes(artifact, result.notes))
    if artifact.manifest.model.layers and not artifact.manifest.keeps_cache:
        probes = [probe for probe in probes if len(probe.calls) == 1]
        result.notes.append("the artifact keeps no cache: checked on whole prompts alone")
    if not artifact.manifest.batched_chunks:
        probes = [probe for probe in probes if not chunked_rows(probe)]
        result.notes.append("several tokens of several rows on a filled cache: not checked")
    answers = reference.answers([r for probe in probes for r in probe.rows], artifact.folder.parent)
    reference.free()
    run = DecoderRun(artifact, job.threads, in_parts=job.streamed, device=job.device)
    result.ran += run.notes
    for probe, got in zip(probes, run.play_all(probes), strict=True):
        want = run.asked(probe, [answers.pop(0) for _ in probe.rows])
        result.probes.append(judge(probe.name, got, want, artifact.manifest.dtype))
    result.ran += run.told()
    return result


def reference_of(source: Any, job: Job) -> Reference | StreamedReference:
    """What the artifact is held against."""
    if not job.streamed:
        return Reference(source)
    from qopt.streamed import StreamedReference

    return StreamedReference(source)


class Reference:
    """The original model in fp32, eager, one request at a time."""

    def __init__(self, source: Any) -> None:
        import torch

        self.torch = torch
        self.notes: list[str] = []
        self.model = load_reference(source)
        self.config = source.config

    def answers(self, rows: list[Array], room: Path) -> list[Array]:
        """Logits (tokens, vocabulary) of each row of ids; they fit in memory as the model does."""
        return list(self.stream(rows))

    def stream(self, rows: list[Array]) -> Iterator[Array]:
        """The same, one row after the other; each is run without a cache."""
        for ids in rows:
            tokens = self.torch.from_numpy(ids[None])
            with self.torch.inference_mode():
                out = self.model(input_ids=tokens, use_cache=False).logits[0]
            yield out.float().numpy()

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


def decoder_probes(artifact: Artifact, notes: list[str]) -> Iterator[Probe]:
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
        more = [[4, 2, 3]] if artifact.manifest.batched_chunks else []
        calls = [[9, 6, 3], *more, [1, 1, 1], [1, 1, 1]]
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


def chunked_rows(probe: Probe) -> bool:
    """Whether several rows feed several tokens to a filled cache."""
    return len(probe.rows) > 1 and any(max(call) > 1 for call in probe.calls[1:])


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
        # a text of unknown words is one id again and again, which hides what attention does
        if len(set(ids)) >= DISTINCT and max(ids) < (info.vocab_size or 0):
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

    def __init__(
        self,
        artifact: Artifact,
        threads: int | None,
        *,
        in_parts: bool = False,
        device: str | None = None,
    ) -> None:
        from qopt.runtime.generate import open_session
        from qopt.runtime.parts import PartsSession
        from qopt.runtime.session import CPU, remarks

        self.manifest = artifact.manifest
        self.notes: list[str] = []
        self.parts: PartsSession | None = None
        self.inputs: dict[str, Spec]
        if in_parts and artifact.manifest.target.startswith("onnx"):
            names = [spec.name for spec in artifact.manifest.outputs]
            states = {past_name(name): name for name in names if name.startswith("present")}
            target, dtype = artifact.manifest.target, artifact.manifest.dtype
            self.parts = PartsSession(
                artifact.folder / "model.onnx", states, threads, wide=dtype == "bfloat16"
            )
            self.notes += remarks(target, dtype, (CPU,))
            self.inputs = self.parts.inputs
            self.notes.append(
                f"the artifact was run in {len(self.parts.parts)} parts, one after the other"
            )
        else:
            device = device or device_at_hand(artifact.manifest.target)
            self.session = open_session(artifact, threads=threads, device=device)
            self.inputs = self.session.inputs
        self.kept = None if KEEP in self.inputs else columns_of_logits(artifact)

    def asked(self, probe: Probe, answers: list[Array]) -> list[Array]:
        """Of the reference's logits those that the artifact gives: its last ones a call, or all."""
        if self.kept is None:
            return answers
        found = []
        for row, answer in enumerate(answers):
            lengths = np.array([call[row] for call in probe.calls])
            ends = lengths.cumsum()
            starts = ends - np.minimum(lengths, self.kept)
            columns = [np.arange(*pair) for pair in zip(starts, ends, strict=True)]
            found.append(answer[np.concatenate(columns)])
        return found

    def told(self) -> list[str]:
        """What is to be said of how the artifact ran."""
        return self.session.told() if self.parts is None else []

    def play_all(self, probes: list[Probe]) -> Iterator[list[Array]]:
        """What `play` gives, probe by probe."""
        if self.parts is None:
            yield from map(self.play, probes)
            return
        answers = self.parts.run([self._calls(probe) for probe in probes])
        for probe, outputs in zip(probes, answers, strict=True):
            yield self._rows(probe, [out["logits"] for out in outputs])

    def play(self, probe: Probe) -> list[Array]:
        """The logits of every real token that the artifact gives, by row."""
        logits = []
        if CACHE_POSITION in self.inputs:  # written in place: in the buffers of the runtime itself
            decoder = Decoder(self.session, self.manifest, len(probe.rows))
            for call, feeds in zip(probe.calls, self._calls(probe), strict=True):
                ids, lengths = feeds["input_ids"], np.array(call)
                logits.append(decoder.forward(ids, lengths, keep=self.kept or 0))
            return self._rows(probe, logits)
        past: dict[str, Array] = {}
        for feeds in self._calls(probe):
            out = self.session.run(feeds | past)
            logits.append(out.pop("logits"))
            past = {past_name(k): v for k, v in out.items()}
        return self._rows(probe, logits)

    def _calls(self, probe: Probe) -> list[dict[str, Array]]:
        """What each call feeds; the first one an empty cache, the others all but the cache."""
        count = len(probe.rows)
        done = np.zeros(count, int)
        mask: Array = np.zeros((count, 0), np.int64)
        calls: list[dict[str, Array]] = []
        for call in probe.calls:
            lengths = np.array(call)
            columns = np.arange(lengths.max())
            ids = np.zeros((count, len(columns)), np.int64)
            for r, row in enumerate(probe.rows):
                ids[r, : lengths[r]] = row[done[r] : done[r] + lengths[r]]
            mask = np.concatenate([mask, (columns < lengths[:, None]).astype(np.int64)], 1)
            feeds = {"input_ids": ids, "attention_mask": mask}
            if "position_ids" in self.inputs:
                feeds["position_ids"] = np.maximum(mask.cumsum(1) - 1, 0)[:, -len(columns) :]
            if KEEP in self.inputs:
                feeds[KEEP] = np.zeros(1, np.int64)
            calls.append(feeds if calls else feeds | self._empty(count))
            done += lengths
        return calls

    def _rows(self, probe: Probe, logits: list[Array]) -> list[Array]:
        """Each row's real columns of all calls, joined."""
        got: list[list[Array]] = [[] for _ in probe.rows]
        for call, given in zip(probe.calls, logits, strict=True):
            for r, length in enumerate(call):
                there = min(self.kept or length, length)
                got[r].append(given[r, -there:] if self.kept else given[r, :there])
        return [np.concatenate(parts).astype(np.float32) for parts in got]

    def _empty(self, count: int) -> dict[str, Array]:
        past = {}
        for name, spec in self.inputs.items():
            if name.startswith("past_"):
                sizes = [d if isinstance(d, int) else 0 for d in spec.shape[1:]]
                past[name] = np.zeros((count, *sizes), spec.dtype)
        return past


def columns_of_logits(artifact: Artifact) -> int | None:
    """How many columns of logits a graph gives that cannot be asked for another number."""
    shapes = [spec.shape for spec in artifact.manifest.outputs if spec.name == "logits"]
    return next((s[1] for s in shapes if isinstance(s[1], int)), None)


def check_module(artifact: Artifact, source: Any, job: Job) -> Verification:
    """Compare an artifact that is no decoder with its module, at two batch sizes."""
    import torch

    from qopt.runtime.generate import open_session

    if source.module is None:
        return Verification(notes=["an exported program holds no module to compare with"])
    device = job.device or device_at_hand(artifact.manifest.target)
    session = open_session(artifact, threads=job.threads, device=device)
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
    result.ran += session.told()
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


def short_of(error: MemoryError | OSError) -> ResourceError:
    """What the machine did not give, as an error of ours."""
    if isinstance(error, MemoryError):
        return ResourceError("not enough memory for the check", todo="allow less with --max-ram")
    return ResourceError(
        "the check could not read or write a file",
        where=str(error.filename) if error.filename else None,
        why=error.strerror or str(error),
        todo="free disk space, or mend the permissions, and run it again",
    )


def main(argument: str) -> int:
    """Entry of the checking process: reads the artifact's folder, prints one line of JSON."""

    def artifact_of() -> str:
        line = sys.stdin.readline()
        if not line:
            raise UsageError("there is no artifact to check")
        return str(json.loads(line))

    try:
        result = run_job(Job(**json.loads(argument)), artifact_of)
    except (QoptError, MemoryError, OSError) as cause:
        error = cause if isinstance(cause, QoptError) else short_of(cause)
        told = {"what": error.what, "where": error.where, "why": error.why, "todo": error.todo}
        print(json.dumps({"code": error.exit_code, **told}))
        return 1
    print(json.dumps(result.to_dict()))
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise UsageError("qopt.final_check is run by qopt compile and qopt verify")
    code = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(code)  # at once: taking a model down object by object takes longer than a second
