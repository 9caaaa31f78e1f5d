"""Write files whole or not at all."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

_calls = itertools.count()


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` to ``path``. If that fails, an existing file stays as it is.

    Raises:
        OSError: with the path and the system's reason.
    """
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write ``data`` as :func:`write_text` writes text."""
    with naming(path):
        write_whole(path, data)


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Add the path and what to do to an OSError of the block."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"{path} cannot be written ({error.strerror}). Make room, or choose another place.",
        ) from error


def write_whole(path: str | Path, data: bytes) -> None:
    """Write a file under another name beside ``path``, flush it to the disk, and rename it.

    A full disk or an interrupt leaves an existing file as it is. A device or a pipe is written
    directly: root could replace even /dev/full.

    Raises:
        OSError: the system's own error.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        with target.open("wb", buffering=0) as file:
            file.write(data)
        return
    target = target.resolve()  # a link stays, and its target is written
    # Several processes or threads may write the same file at once; each has its own partial one.
    partial = target.with_name(f"{target.name}.{os.getpid()}.{next(_calls)}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
