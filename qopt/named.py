"""What a command may name - a model, an adapter, a plugin - looked at before torch is imported."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from qopt.errors import ResourceError, UsageError

DEMOS = ("smollm2-135m", "random-llama-0.4b", "random-llama-1b")
FORMS = "give a folder, a .gguf file, a .pt2 file or file.py:function"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def refuse_model(model: str, revision: str | None = None) -> None:
    """Refuse a MODEL that is no path, no demo and no hub id, or a revision of anything else."""
    if not model:
        raise UsageError("MODEL is empty", todo=FORMS)
    file, _, function = model.rpartition(":")
    in_file = function.isidentifier() and Path(file).is_file()
    if Path(model).exists() or model in DEMOS or in_file:
        if revision is not None:
            raise UsageError(
                "--revision is for hub ids",
                where=model,
                why="neither a path nor a demo has revisions",
                todo="leave --revision out",
            )
        return
    coded = function.isidentifier() and file.endswith(".py")
    if coded or _is_path(model):
        raise UsageError(
            f"no such model: {model}",
            why=f"there is no file or folder {file if coded else model}",
            todo=f"check the path; {FORMS}",
        )
    if not HUB_ID.fullmatch(model):
        raise UsageError(
            f"no such model: {model}",
            why="it is no path, no demo name, and does not look like a hub id (org/name)",
            todo=f"give one of these, or a demo: {', '.join(DEMOS)}",
        )


def _is_path(model: str) -> bool:
    """Whether a name that is not there can only have been meant as a path."""
    path = Path(model)
    ending = path.suffix in (".gguf", ".pt2", ".safetensors", ".py")
    return model.startswith((".", "/", "~")) or (ending and path.parent.is_dir())


def refuse_adapter(folder: Path) -> Path:
    """Refuse a folder that holds no adapter; gives the path of its settings."""
    path = folder / "adapter_config.json"
    if not path.is_file():
        raise UsageError(
            "no adapter here",
            where=str(folder),
            why="there is no adapter_config.json" if folder.is_dir() else "it is no folder",
            todo="give the folder that PEFT's save_pretrained wrote",
        )
    return path


def refuse_dump(folder: Path) -> None:
    """Refuse a place for dumps that is no folder and cannot become one."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise UsageError(f"--dump: {there} is a file", todo="name a folder, there or not")
    if not os.access(there, os.W_OK | os.X_OK) or not shutil.disk_usage(there).total:
        raise ResourceError(
            "--dump: no files can be written here", where=str(there), todo="name another folder"
        )


def plugin_file(plugin: str) -> Path | None:
    """The file of a plugin, None where it names a module; another file than .py is not run."""
    path = Path(plugin)
    if path.suffix != ".py" and "/" not in plugin and not path.is_file():
        return None
    if path.suffix != ".py":
        raise UsageError(
            "only a .py file is run as a plugin", where=plugin, todo="name the file FILE.py"
        )
    if not path.is_file():
        raise UsageError(
            "no such plugin file",
            where=plugin,
            todo="give a .py file, or the name of a module that can be imported",
        )
    return path
