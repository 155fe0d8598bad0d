"""The user's cache: where it lies, and folders in it that are whole or not there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from qopt.errors import ResourceError


def cache_dir(kind: str) -> Path:
    """Folder of the cache for `kind` (`models`, `calibration`, `tune`, `resume`); may not exist."""
    root = os.environ.get("QOPT_CACHE_DIR") or platformdirs.user_cache_dir("qopt")
    return Path(root) / kind


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """Give an empty folder to write to; it becomes `final` when all went well, else vanishes.

    `final` is absent or empty. If another process made it meanwhile, its folder stays.
    """
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    except OSError as error:
        raise ResourceError("cannot write the folder", where=str(final), why=str(error)) from None
    try:
        yield folder
        folder.chmod(0o777 & ~_umask())  # mkdtemp makes it private
        try:
            folder.rename(final)
        except OSError:
            if not final.is_dir() or not any(final.iterdir()):
                raise
    except OSError as error:
        raise ResourceError("cannot write the folder", where=str(final), why=str(error)) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
