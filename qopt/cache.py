"""The user's cache: where it lies, and folders in it that are whole or not there."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs

from qopt.errors import QoptError, ResourceError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cache_dir(kind: str) -> Path:
    """Folder of the cache for `kind` (`models`, `calibration`, `tune`, `resume`); may not exist."""
    root = os.environ.get("QOPT_CACHE_DIR") or platformdirs.user_cache_dir("qopt")
    return Path(root) / kind


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """Give an empty folder to write to; it becomes `final` when all went well, else vanishes.

    `final` is absent or empty. If another process made it meanwhile, its folder stays.
    """
    made = [parent for parent in final.parents if not parent.exists()]
    try:
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
        except OSError as error:
            raise _unwritten(final, error) from None
        yield from _written(final, folder)
    finally:
        for parent in made:  # innermost first; one that is in use stays
            with suppress(OSError):
                parent.rmdir()


def _written(final: Path, folder: Path) -> Iterator[Path]:
    try:
        yield folder
        folder.chmod(0o777 & ~_umask())  # mkdtemp makes it private
        try:
            folder.rename(final)
        except OSError:
            if not final.is_dir() or not any(final.iterdir()):
                raise
    except QoptError:
        raise
    except OSError as error:
        raise _unwritten(final, error) from None
    except Exception as error:
        if full := full_disk(error, final):  # tokenizers and safetensors raise kinds of their own
            raise full from None
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unwritten(final: Path, error: OSError) -> ResourceError:
    return full_disk(error, final) or ResourceError(
        "cannot write the folder",
        where=str(final),
        why=error.strerror or str(error),
        todo="choose a place that you may write to; QOPT_CACHE_DIR moves the cache",
    )


def full_disk(error: Exception | str, where: Path | None = None) -> ResourceError | None:
    """The error to show where a library's error, or what a command said, tells of a full disk."""
    reasons = [os.strerror(number) for number in NO_SPACE]
    why = next((reason for reason in reasons if reason in str(error)), None)
    if why is None:
        return None
    place = where or getattr(error, "filename", None)
    return ResourceError(
        "no space left on the disk",
        where=str(place) if place else None,
        why=why,
        todo="free some disk space or a quota; QOPT_CACHE_DIR and -o choose another disk",
    )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
