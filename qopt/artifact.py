"""The artifact folder: its manifest, an atomic writer, and a loader that trusts nothing."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qopt import __version__
from qopt.errors import GateError, ResourceError, UsageError
from qopt.info import ModelInfo

if TYPE_CHECKING:
    import onnx

MANIFEST = "qopt_manifest.json"
ENVIRONMENT = "environment.json"
SCHEMA = 1
RECOPY = "copy or compile the artifact again"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TensorSpec(_Strict):
    """One input or output of the artifact: a dimension is a number or a name."""

    name: str
    dtype: str  # numpy's name: float32, float16, int64, ...
    shape: list[int | str]


class SourceInfo(_Strict):
    """Where the model came from; a local folder's name is never stored."""

    kind: str  # folder, hub, gguf, function, pt2, demo
    id: str | None = None  # hub id or demo name
    digest: str | None = None


class Verdict(_Strict):
    """What one probe of the final check was held to, and whether it passed."""

    probe: str
    limits: dict[str, float] = {}
    passed: bool


class FileInfo(_Strict):
    """Size and hash of one file of the folder."""

    size: int
    sha256: str


class Manifest(_Strict):
    """All that is known of an artifact; a function of inputs and recipe, never of time or place."""

    # the file calls it `schema`, which pydantic's BaseModel already uses
    schema_version: Literal[1] = Field(default=1, alias="schema")
    qopt: str = __version__
    target: str
    dtype: str
    opset: int | None = None
    ir_version: int | None = None
    runtime: str = "onnxruntime>=1.32"  # the oldest that loads the file
    model: ModelInfo
    source: SourceInfo
    adapter: str | None = None  # digest of the adapter merged in
    plugins: list[str] = []  # digests
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    shared_buffer: bool = False  # past and present may be one buffer
    batched_chunks: bool = True  # several new tokens of several rows may meet a filled cache
    logits: Literal["last", "all"] = "last"
    preset: str = "low-latency"
    weights: bool = True  # False: compiled with --no-weights, only the graph is there
    checks: list[Verdict] = []
    notes: list[str] = []  # what was converted, what a runtime cannot do, ...
    files: dict[str, FileInfo] = {}

    @property
    def keeps_cache(self) -> bool:
        """Whether the graph takes what earlier calls left; else each call stands alone."""
        return any(spec.name.startswith("past_") for spec in self.inputs)

    def to_json(self) -> str:
        """The text of the manifest file: the same bytes for the same facts."""
        return json.dumps(self.model_dump(by_alias=True), indent=2, ensure_ascii=False) + "\n"


# --- writing ---------------------------------------------------------------------------------

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_PERMISSION = {errno.EACCES, errno.EPERM, errno.EROFS}


def resource_error(error: OSError) -> ResourceError | None:
    """The error to show for a full disk or a missing permission; None for any other OSError."""
    where = str(error.filename) if error.filename else None
    if error.errno in _NO_SPACE:
        return ResourceError(
            "no space left for the output",
            where=where,
            why=error.strerror,
            todo="free some disk space or a quota, or choose another output folder",
        )
    if error.errno in _NO_PERMISSION:
        return ResourceError(
            "no permission to write",
            where=where,
            why=error.strerror,
            todo="choose an output folder that you may write to",
        )
    return None


class ArtifactWriter:
    """Writes an artifact so that it is whole or not there.

    Files go to `writer.folder`, a temporary sibling. `write_manifest` comes last (and may come
    again, with the check's verdicts). Leaving the block puts the folder into place; leaving it by
    any exception removes it, or keeps it as OUT.rejected when a gate failed and that was asked for.
    """

    def __init__(self, out: Path, *, size: int | None = None, keep_rejected: bool = False) -> None:
        """`size`: the bytes that are going to be written, where an estimate is known."""
        self.out = Path(os.path.realpath(out))
        self.size = size
        self.keep_rejected = keep_rejected
        self.rejected = _sibling(self.out, "{}.rejected")
        self.folder = _sibling(self.out, f".{{}}.tmp-{os.getpid()}")
        self._hashes: dict[str, tuple[int, str]] = {}  # name -> (size, sha256) as handed in
        self._new_parents: list[Path] = []
        self._lock: Any = None

    def __enter__(self) -> ArtifactWriter:
        refuse_foreign(self.out)
        if self.keep_rejected:
            refuse_foreign(self.rejected)
        self._prepare_parent()
        try:
            self._lock = _locked(self.out)
            self._lock.__enter__()
        except BaseException:
            self._remove_new_parents()
            raise
        try:
            _repair_locked(self.out)
            refuse_foreign(self.out)
            with _told_as_resource_error():
                self.folder.mkdir()
        except BaseException:
            self._release()
            self._remove_new_parents()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                with _told_as_resource_error():
                    self._place(self.out)
            elif isinstance(error, GateError) and self.keep_rejected and self._whole():
                self._place(self.rejected)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._release()
            self._remove_new_parents()
        if isinstance(error, OSError) and (told := resource_error(error)):
            raise told from error

    def add_hash(self, name: str, size: int, sha256: str) -> None:
        """Hand in the hash of a big file that was computed while it was streamed."""
        self._hashes[name] = (size, sha256)

    def write_manifest(self, manifest: Manifest) -> Manifest:
        """Write the manifest with size and hash of every file, and return it so completed."""
        with _told_as_resource_error():
            names = [name for name in _file_names(self.folder) if name != MANIFEST]
            files = {name: self._file_info(name) for name in names}
            manifest = manifest.model_copy(update={"files": files})
            (self.folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        return manifest

    def _file_info(self, name: str) -> FileInfo:
        path = self.folder / name
        size, digest = self._hashes.get(name, (None, ""))
        if size != path.stat().st_size:  # not handed in, or written to since
            size, digest = path.stat().st_size, sha256_of(path)
        return FileInfo(size=size, sha256=digest)

    def _whole(self) -> bool:
        return (self.folder / MANIFEST).is_file()

    def _place(self, out: Path) -> None:
        if not self._whole():
            raise RuntimeError(f"{self.folder} was left without a manifest")
        _sync(self.folder)
        aside = _sibling(out, f".{{}}.old-{os.getpid()}")
        refuse_foreign(out)
        try:
            if out.exists():  # rename() replaces no folder that has files in it
                os.rename(out, aside)
            os.rename(self.folder, out)
        except BaseException:
            if aside.exists() and not out.exists():
                os.rename(aside, out)
            raise
        _sync_folder(out.parent)
        shutil.rmtree(aside, ignore_errors=True)

    def _prepare_parent(self) -> None:
        """Refuse before the work starts what can be known to fail at its end."""
        parent = self.out.parent
        missing = [p for p in (parent, *parent.parents) if not p.exists()]
        there = (missing[-1] if missing else self.out).parent
        if not there.is_dir():
            raise UsageError(f"{there} is not a folder", todo="choose another output folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise ResourceError(
                "no permission to write", where=str(there), todo="choose another output folder"
            )
        disk = shutil.disk_usage(there)
        free = disk.free
        if not disk.total:
            raise ResourceError(
                "no files can be written here",
                where=str(there),
                why="it is on no disk, but a view into the running system",
                todo="choose another output folder",
            )
        if self.size is not None and self.size > free:
            raise ResourceError(
                "no space left for the output",
                where=str(there),
                why=f"about {self.size / 1e6:,.0f} MB are needed, {free / 1e6:,.0f} MB are free",
                todo="free some disk space, or choose an output folder on another disk",
            )
        with _told_as_resource_error():
            parent.mkdir(parents=True, exist_ok=True)
        self._new_parents = missing

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.__exit__(None, None, None)
            self._lock = None

    def _remove_new_parents(self) -> None:
        for folder in self._new_parents:  # innermost first; stops by itself at one that is in use
            with suppress(OSError):
                folder.rmdir()


def refuse_foreign(out: Path) -> None:
    """Refuse an output path that holds anything but an artifact and its own files.

    And one whose OUT.log holds what qopt did not write, since the logs would replace it.
    """
    _refuse_foreign_log(log_folder(out))
    if not out.exists():
        return
    if not out.is_dir():
        raise UsageError(f"{out} is a file", todo="choose another output folder")
    if out.resolve() == Path.cwd():
        raise UsageError(f"{out} is the current folder", todo="name a folder to be made: -o NAME")
    names = set(_file_names(out))
    if not names and not any(out.iterdir()):
        return
    try:
        foreign = names - set(read_manifest(out).files) - {MANIFEST}
    except UsageError:
        raise UsageError(
            f"{out} is not empty and is no qopt artifact",
            why="qopt replaces only folders that it wrote itself",
            todo="choose another output folder, or empty this one",
        ) from None
    if foreign:
        raise UsageError(
            f"{out} is an artifact with other files in it: {', '.join(sorted(foreign)[:5])}",
            why="replacing it would delete them",
            todo="move them away, or choose another output folder",
        )


def _refuse_foreign_log(folder: Path) -> None:
    if not os.path.lexists(folder):
        return
    is_folder = folder.is_dir() and not folder.is_symlink()
    if is_folder and (_is_log(folder) or not any(folder.iterdir())):
        return
    found = "holds no logs of qopt's" if is_folder else "is a file or a link"
    raise UsageError(
        f"{folder} {found}",
        why="qopt writes its logs there, and replaces nothing that it did not write",
        todo="move it away, or choose another output folder",
    )


def _is_log(folder: Path) -> bool:
    """Whether `write_log` was here: it writes the environment first."""
    try:
        return "qopt" in json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def repair(out: Path) -> None:
    """Mend what a kill left: put back what was moved aside, delete temporary folders."""
    out = Path(os.path.realpath(out))
    if any(_leftovers(out, "old")) or any(_leftovers(out, "tmp")):
        with _locked(out):
            _repair_locked(out)


def _repair_locked(out: Path) -> None:
    # who holds the lock is alone: whatever lies here belongs to a process that is gone
    for old in _leftovers(out, "old"):
        if not out.exists() and (old / MANIFEST).is_file():
            os.rename(old, out)
        else:
            shutil.rmtree(old, ignore_errors=True)
    for temporary in _leftovers(out, "tmp"):
        shutil.rmtree(temporary, ignore_errors=True)


def _leftovers(out: Path, kind: str) -> list[Path]:
    prefix = f".{out.name}.{kind}-"
    if not out.parent.is_dir():
        return []
    return sorted(p for p in out.parent.iterdir() if p.name.startswith(prefix) and p.is_dir())


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Hold OUT.lock; the file is gone afterwards, also after a kill and a later success."""
    path = _sibling(out, "{}.lock")
    while True:
        with _told_as_resource_error():
            file = _opened(path)
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ResourceError(
                    f"another qopt is writing {out}",
                    where=str(path),
                    todo="wait until it is done, or choose another output folder",
                ) from None
            if os.fstat(file.fileno()).st_size:
                raise UsageError(
                    f"{path} is not a lock of qopt's",
                    why="it has something in it, and would be deleted",
                    todo="move it away, or choose another output folder",
                )
            with suppress(FileNotFoundError):
                if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                    try:
                        yield
                    finally:
                        path.unlink(missing_ok=True)
                    return
        # the former holder deleted the file between our open and our lock: once more


def _opened(path: Path) -> IO[str]:
    try:
        return open(path, "a+")
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG or isinstance(error, IsADirectoryError):
            raise UsageError(
                "cannot write beside the output folder",
                where=str(path),
                why=error.strerror,
                todo="choose another output folder",
            ) from None
        raise


@contextmanager
def _told_as_resource_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if told := resource_error(error):
            raise told from error
        raise


def _sibling(path: Path, pattern: str) -> Path:
    return path.with_name(pattern.format(path.name))


def _file_names(folder: Path) -> list[str]:
    """Every file below the folder, by its POSIX name relative to it."""
    files = (p for p in folder.rglob("*") if p.is_symlink() or not p.is_dir())
    return sorted(p.relative_to(folder).as_posix() for p in files)


def _sync(folder: Path) -> None:
    for name in _file_names(folder):
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def default_output(model: str, recipe: str) -> Path:
    """`model-low-latency` in the current folder: MODEL's last name, and the recipe's."""
    path, _, function = model.rpartition(":")
    name = function if path.endswith(".py") else Path(os.path.abspath(model)).name
    stem = Path(name).stem if name.endswith((".gguf", ".pt2")) else name
    return Path(f"{stem}-{Path(recipe).name.removesuffix('.yaml')}")


def sha256_of(path: Path) -> str:
    """The hash of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def log_folder(out: Path) -> Path:
    """OUT.log, where all goes that differs between two runs: timings, environment, reports."""
    return _sibling(Path(os.path.realpath(out)), "{}.log")


def write_log(out: Path, environment: Mapping[str, str], **parts: object) -> Path:
    """Write the environment and each part (report, source, ...) as OUT.log/PART.json."""
    folder = log_folder(out)
    with _told_as_resource_error():
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in {"environment": environment, **parts}.items():
            text = json.dumps(part, indent=2, ensure_ascii=False, default=str) + "\n"
            (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return folder


# --- loading ---------------------------------------------------------------------------------


def read_manifest(folder: Path) -> Manifest:
    """Read and validate the manifest of a folder."""
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{folder} is no qopt artifact",
            why=f"it has no {MANIFEST}: not written by qopt, or not to its end",
            todo="compile again: qopt compile MODEL -o OUT",
        ) from None
    except ValueError as error:
        raise UsageError("damaged manifest", where=str(path), why=str(error), todo=RECOPY) from None
    found = data.get("schema") if isinstance(data, dict) else None
    if isinstance(found, int) and found > SCHEMA:
        raise UsageError(
            f"this artifact has schema {found}; qopt {__version__} reads up to {SCHEMA}",
            where=str(path),
            todo="upgrade qopt",
        )
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UsageError(
            "damaged manifest", where=str(path), why=f"{place}: {first['msg']}", todo=RECOPY
        ) from None


class Artifact:
    """A folder that `load` found whole and self-contained."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest

    @classmethod
    def load(cls, folder: str | Path) -> Artifact:
        """Read an artifact; refuse one that is incomplete or that reaches outside its folder."""
        folder = Path(folder)
        if not folder.exists() and any(_leftovers(Path(os.path.realpath(folder)), "old")):
            repair(folder)
        if folder.is_file():
            raise UsageError(
                f"{folder} is a file, and an artifact is a folder",
                todo=f"name the folder: {folder.parent}",
            )
        if not folder.is_dir():
            raise UsageError(
                f"no such artifact: {folder}", todo="compile one: qopt compile MODEL -o OUT"
            )
        artifact = cls(folder, read_manifest(folder))
        for name, info in artifact.manifest.files.items():
            artifact._check_present(name, info)
        for name in artifact.manifest.files:
            if name.endswith(".onnx"):
                artifact._check_external_data(name)
        return artifact

    def verify_files(self) -> None:
        """Compare every file with the hash in the manifest."""
        for name, info in self.manifest.files.items():
            if sha256_of(self.folder / name) != info.sha256:
                raise GateError(
                    f"{name} is not the file that was written",
                    where=str(self.folder),
                    why="its SHA-256 differs from the manifest's",
                    todo=RECOPY,
                )

    def _check_present(self, name: str, info: FileInfo) -> None:
        path = inside(self.folder, name)
        if not path.is_file():
            raise UsageError(f"{name} is missing", where=str(self.folder), todo="copy it again")
        if path.stat().st_size != info.size:
            raise UsageError(
                f"{name} is truncated or changed",
                where=str(self.folder),
                why=f"it has {path.stat().st_size} bytes, the manifest says {info.size}",
                todo=RECOPY,
            )

    def _check_external_data(self, name: str) -> None:
        import onnx  # only here: most of what reads a manifest does not need it

        try:
            model = onnx.load(self.folder / name, load_external_data=False)
        except Exception as error:  # protobuf's DecodeError, which onnx does not export
            raise UsageError(
                f"{name} is no ONNX file", where=str(self.folder), why=str(error), todo=RECOPY
            ) from None
        for location in sorted(set(_locations(model))):
            base = PurePosixPath(name).parent / location
            inside(self.folder, str(base))
            if str(base) not in self.manifest.files and self.manifest.weights:
                raise UsageError(
                    f"{name} reads {location}, which the manifest does not list",
                    where=str(self.folder),
                    todo=RECOPY,
                )


def inside(folder: Path, name: str) -> Path:
    """The path of a file that an artifact names; refused, unopened, when it lies outside."""
    pure = PurePosixPath(name)
    root = os.path.realpath(folder)
    leads_out = pure.is_absolute() or ".." in pure.parts or "\\" in name
    if leads_out or not Path(os.path.realpath(folder / name)).is_relative_to(root):
        raise UsageError(
            f"{name} lies outside the artifact",
            where=str(folder),
            why="its files may be no absolute paths, hold no '..' and be no links that lead out",
            todo="do not use this folder unless you trust where it came from",
        )
    return folder / name


def _locations(model: onnx.ModelProto) -> Iterator[str]:
    """Every file that the model would read its tensors from."""
    yield from _graph_locations(model.graph)
    for function in model.functions:
        yield from _node_locations(function.node)


def _graph_locations(graph: onnx.GraphProto) -> Iterator[str]:
    sparse = (part for s in graph.sparse_initializer for part in (s.values, s.indices))
    for tensor in (*graph.initializer, *sparse):
        yield from _tensor_locations(tensor)
    yield from _node_locations(graph.node)


def _node_locations(nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    for attribute in (a for node in nodes for a in node.attribute):
        for tensor in (attribute.t, *attribute.tensors):
            yield from _tensor_locations(tensor)
        for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
            yield from _tensor_locations(sparse.values)
            yield from _tensor_locations(sparse.indices)
        for graph in (attribute.g, *attribute.graphs):
            yield from _graph_locations(graph)


def _tensor_locations(tensor: onnx.TensorProto) -> Iterator[str]:
    return (entry.value for entry in tensor.external_data if entry.key == "location")


# --- files beside the graph ------------------------------------------------------------------

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
)


def write_sidecars(
    folder: Path,
    source: Path | None,
    *,
    config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> list[str]:
    """Copy the tokenizer's files byte for byte and write the two configs with their original keys.

    A config that is not handed in is taken from the source folder. Returns the names written.
    """
    written = []
    for name in _TOKENIZER_FILES:
        if source is not None and (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
            written.append(name)
    for name, given in (("config.json", config), ("generation_config.json", generation_config)):
        if given is None and source is not None and (source / name).is_file():
            given = json.loads((source / name).read_text(encoding="utf-8"))
        if given is not None:
            # the name is where somebody's copy of the model once lay: often a local folder
            kept = {key: value for key, value in given.items() if key != "_name_or_path"}
            write_json(folder / name, kept)
            written.append(name)
    return written


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write JSON as the whole folder has it: two spaces, UTF-8, a last newline."""
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# decoder types that onnxruntime-genai 0.18 accepts by name and loads with its plain decoder; it
# also takes `decoder` itself, which says nothing and refuses nothing
_GENAI_TYPES = frozenset(
    {
        "chatglm",
        "decoder",
        "ernie4_5",
        "gemma",
        "gemma2",
        "gemma3_text",
        "granite",
        "hunyuandensev1",
        "internlm2",
        "llama",
        "mistral",
        "nemotron",
        "olmo",
        "phi",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen3",
        "smollm3",
    }
)

_CACHE_NAMES = {
    "past_key_names": "past_key_values.%d.key",
    "past_value_names": "past_key_values.%d.value",
    "present_key_names": "present.%d.key",
    "present_value_names": "present.%d.value",
}


def genai_refusal(
    info: ModelInfo, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> str | None:
    """Why onnxruntime-genai cannot load this graph, or None when it can."""
    names = {spec.name for spec in inputs}
    caches = [layer for layer in info.layers if layer.owner is None]
    expected = {"input_ids", "attention_mask", "position_ids", "num_logits_to_keep"} | {
        _CACHE_NAMES[kind] % n
        for kind in ("past_key_names", "past_value_names")
        for n in range(len(caches))
    }
    if info.kind != "decoder" or "input_ids" not in names:
        return "it runs decoders alone"
    if "logits" not in {spec.name for spec in outputs}:
        return "it needs an output named logits"
    if not caches:
        return "it needs a key and value cache, which this model does not keep"
    if len({(c.kv_heads, c.key_size, c.value_size) for c in caches}) > 1:
        return "the layers' caches have different shapes; it knows one shape for all"
    if caches[0].key_size != caches[0].value_size:
        return "keys and values have different sizes; it knows one head size"
    if unknown := sorted(names - expected):
        return f"it does not feed the input {unknown[0]}"
    if missing := sorted(
        expected - names - {"attention_mask", "position_ids", "num_logits_to_keep"}
    ):
        return f"it feeds {missing[0]}, which the graph does not take"
    return None


def genai_config(
    info: ModelInfo,
    inputs: Sequence[TensorSpec],
    *,
    filename: str = "model.onnx",
    shared_buffer: bool = True,
    provider: str | None = None,
) -> dict[str, Any]:
    """The genai_config.json of a graph that `genai_refusal` let pass.

    `provider`: where onnxruntime-genai runs it, as `cuda`; None is the CPU.
    """
    caches = [layer for layer in info.layers if layer.owner is None]
    names = {spec.name for spec in inputs}
    plain = [n for n in ("input_ids", "attention_mask", "position_ids") if n in names]
    past = {key: value for key, value in _CACHE_NAMES.items() if key.startswith("past")}
    present = {key: value for key, value in _CACHE_NAMES.items() if key.startswith("present")}
    options: list[dict[str, Any]] = [{provider: {}}] if provider else []
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": options},
        "filename": filename,
        "head_size": caches[0].key_size,
        "hidden_size": info.hidden_size,
        "inputs": {name: name for name in plain} | past,
        "outputs": {"logits": "logits"} | present,
        "num_attention_heads": info.attention_heads,
        "num_hidden_layers": len(caches),
        "num_key_value_heads": caches[0].kv_heads,
    }
    eos = info.eos_token_ids
    model = {
        "bos_token_id": info.bos_token_id,
        "context_length": info.context_length,
        "decoder": decoder,
        "eos_token_id": eos or None,
        "pad_token_id": info.pad_token_id if info.pad_token_id is not None else (eos or [0])[0],
        "type": info.model_type if info.model_type in _GENAI_TYPES else "decoder",
        "vocab_size": info.vocab_size,
    }
    search = {
        "do_sample": False,
        "max_length": info.context_length,
        "min_length": 0,
        "num_beams": 1,
        "num_return_sequences": 1,
        "past_present_share_buffer": shared_buffer,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_k": 50,
        "top_p": 1.0,
    }
    known = {key: value for key, value in model.items() if value is not None}
    return {"model": known, "search": search}


__all__ = [
    "MANIFEST",
    "Artifact",
    "ArtifactWriter",
    "FileInfo",
    "Manifest",
    "SourceInfo",
    "TensorSpec",
    "Verdict",
    "default_output",
    "genai_config",
    "genai_refusal",
    "inside",
    "log_folder",
    "read_manifest",
    "refuse_foreign",
    "repair",
    "resource_error",
    "sha256_of",
    "write_json",
    "write_log",
    "write_sidecars",
]
