"""The directory of a job's checkpoints.

Note [saving]
A checkpoint is a directory ``checkpoint-000012`` in it. While it is written it has another name,
``.saving-000012-5f0c93d2``, which ends in a random token. When all its files and their names are on
the disk, one rename makes it a checkpoint. A process that is killed before that leaves a directory
that nobody takes for a checkpoint, and the next save removes it. Older checkpoints are removed only
after the new one stands. Each is renamed to ``.deleting-000003`` first, so an interrupted removal
leaves no incomplete checkpoint.

Rank 0 holds a lock of the directory while it saves or exports. So no other job writes there, and
every unfinished checkpoint was left by a job that has ended. Some network file systems have no
locks. There, job B may remove what job A still writes, and then A must not report success. A cannot
write into B's directory, whose name has another token. B renames A's directory before it removes
it, so A can neither write its index nor make its directory a checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from fsdp_ext._util.warn import warn_caller
from fsdp_ext.checkpoint import disk

_NAME = re.compile(r"checkpoint-(\d{6,})")
_SAVING = ".saving-"
_DELETING = ".deleting-"
LOCK = ".lock"
INDEX = "index.json"


def checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints in a directory, the oldest first."""
    if not directory.is_dir():
        return []
    found = {path: _NAME.fullmatch(path.name) for path in directory.iterdir()}
    return sorted((path for path, match in found.items() if match), key=_number)


def _number(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def locate(directory: Path) -> Path:
    """Return a checkpoint: the directory itself if it is one, else the newest in it."""
    if (directory / INDEX).exists():
        return directory
    found = checkpoints(directory)
    if found:
        return found[-1]
    if (directory / ".metadata").exists():
        raise FileNotFoundError(
            f"{directory} is a checkpoint of torch.distributed.checkpoint. Load it with dcp.load."
        )
    raise FileNotFoundError(
        f"{directory} has no checkpoint. Pass the directory that save was given."
    )


def make(directory: Path) -> None:
    """Make a directory if it does not exist."""
    if os.path.lexists(directory) and not directory.is_dir():
        kind = "a file" if directory.exists() else "a link to nothing"
        raise NotADirectoryError(f"{directory} is {kind}. Pass a directory.")
    directory.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory, which is made if it does not exist. Rank 0 calls it."""
    make(directory)
    lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise FileExistsError(
                    f"Another job is writing into {directory}. Give each job its own directory."
                ) from error
            _warn_of_no_lock(directory, error.strerror)
        yield
    finally:
        # A child that was forked meanwhile has the file open, too, so closing it here would not
        # release the lock.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


@functools.cache  # once for each directory
def _warn_of_no_lock(directory: Path, reason: str) -> None:
    warn_caller(
        f"{directory} cannot be locked ({reason}). If two jobs save into it at once, at least one "
        "save fails. If two export, their files may be mixed. Give each job its own directory."
    )


def begin(directory: Path) -> Path:
    """Make the folder where the next checkpoint is written. Rank 0 calls it, with the lock."""
    for path in [*directory.iterdir()]:
        if path.name.startswith(_SAVING):
            dying = path.with_name(path.name.replace(_SAVING, _DELETING))
            disk.rename(path, dying)
            disk.remove_directory(dying)
        elif path.name.startswith(_DELETING):
            _remove(path)
    found = checkpoints(directory)
    number = _number(found[-1]) + 1 if found else 1
    folder = directory / f"{_SAVING}{number:06}-{secrets.token_hex(4)}"
    disk.make_directory(folder)
    return folder


def commit(folder: Path) -> Path:
    """Make what was written a checkpoint, and return its path. Rank 0 calls it."""
    disk.flush_path(folder)
    number = folder.name.removeprefix(_SAVING).partition("-")[0]
    target = folder.with_name(f"checkpoint-{number}")
    disk.rename(folder, target)
    disk.flush_path(target.parent)
    return target


def remove_old(directory: Path, keep: int) -> None:
    """Remove all but the newest checkpoints. Rank 0 calls it."""
    for path in checkpoints(directory)[:-keep]:
        _remove(path)


def _remove(path: Path) -> None:
    """Remove an old checkpoint, or warn: the new checkpoint does not depend on it."""
    dying = path
    try:
        if not path.name.startswith(_DELETING):
            dying = path.with_name(f"{_DELETING}{_number(path):06}")
            disk.rename(path, dying)
        disk.remove_directory(dying)
    except OSError as error:
        warn_caller(f"old checkpoint {path} could not be removed: {error}. Remove it by hand.")
