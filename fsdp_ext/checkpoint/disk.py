"""Every change of the disk that saving makes.

A test counts the calls and kills the process at each one.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def before_change() -> None:
    """Run before each change of the disk. Tests replace it."""


def create(path: Path) -> int:
    """Open a new file for writing."""
    before_change()
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write(file: int, buffers: list[memoryview], position: int) -> None:
    """Write the buffers one after another from ``position`` on."""
    before_change()
    begin, remaining = position, sum(map(len, buffers))
    while True:
        count = os.pwritev(file, buffers, position)
        remaining -= count
        position += count
        if remaining == 0:
            # On Linux this starts writing the pages to the disk, so ``flush`` has less to wait for.
            os.posix_fadvise(file, begin, position - begin, os.POSIX_FADV_DONTNEED)
            return
        while count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        buffers[0] = buffers[0][count:]


def flush(file: int) -> None:
    """Wait until the disk has what was written."""
    before_change()
    os.fsync(file)


def flush_path(path: Path) -> None:
    """Wait until the disk has what was written to a file, or the names in a directory."""
    before_change()
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def make_directory(path: Path) -> None:
    """Make a directory. It must not exist."""
    before_change()
    path.mkdir()


def rename(path: Path, target: Path) -> None:
    """Rename a file or directory in one step."""
    before_change()
    path.rename(target)


def remove_directory(path: Path) -> None:
    """Remove a directory with all that is in it. If it is a symbolic link, remove only the link."""
    if path.is_symlink():
        remove(path)
        return
    for inner in sorted(path.iterdir()):
        remove(inner)
    before_change()
    path.rmdir()


def remove(path: Path) -> None:
    """Remove a file or a directory. It counts as one change."""
    before_change()
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
