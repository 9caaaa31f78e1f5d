"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

_calls = itertools.count()


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` to ``path``, or leave what is there as it is.

    Raises:
        OSError: if it cannot be written; the message has the path and the system's reason.
    """
    _replace(Path(path), text.encode())


def write_bytes(path: str | Path, data: bytes) -> None:
    """As :func:`write_text`, for bytes."""
    _replace(Path(path), data)


def _replace(given: Path, data: bytes) -> None:
    target = Path(os.path.realpath(given))  # a link stays one
    # Devices and pipes are written to, not replaced.
    special = target.exists() and not target.is_file()
    # Of this process and this call: others may write the same file, and one of them comes last.
    own = f"{target.name}.{os.getpid()}.{next(_calls)}.partial"
    partial = target if special else target.with_name(own)
    try:
        with partial.open("wb") as file:
            file.write(data)
            if not special:
                file.flush()
                os.fsync(file.fileno())
        if not special:
            partial.replace(target)
    except OSError as error:
        if not special:
            with contextlib.suppress(OSError):
                partial.unlink()
        raise OSError(
            error.errno,
            f"expects {given} to be writable but it is not ({error.strerror}); choose another "
            "place, or make room",
        ) from error
