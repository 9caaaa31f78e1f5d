"""Files that are written whole or not at all."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

_calls = itertools.count()


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` to ``path``, or leave what is there as it is.

    Raises:
        OSError: if it cannot be written; the message has the path and the system's reason.
    """
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, data: bytes) -> None:
    """As :func:`write_text`, for bytes."""
    try:
        write_whole(path, data)
    except OSError as error:
        raise OSError(
            error.errno,
            f"expects {path} to be writable but it is not ({error.strerror}); choose another "
            "place, or make room",
        ) from error


def write_whole(path: str | Path, data: bytes) -> None:
    """Write a file beside its place, bring it to the disk, and rename it.

    A full disk or an interrupt leaves what was there. A device or a pipe cannot be replaced (as
    root, /dev/full could be) and is written to as it is.

    Raises:
        OSError: the system's own.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        with target.open("wb", buffering=0) as file:
            file.write(data)
        return
    target = target.resolve()  # through a link, whose target is what is meant
    # Of this process and this call: others may write the same file, and one of them comes last.
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
