"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
from pathlib import Path


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` to ``path``, or leave what is there as it is.

    Raises:
        OSError: if it cannot be written; the message has the path and the system's reason.
    """
    _replace(Path(path), text.encode())


def write_bytes(path: str | Path, data: bytes) -> None:
    """As :func:`write_text`, for bytes."""
    _replace(Path(path), data)


def _replace(target: Path, data: bytes) -> None:
    # Devices and pipes are written to, not replaced.
    special = target.exists() and not target.is_file()
    partial = target if special else target.with_name(target.name + ".partial")
    try:
        partial.write_bytes(data)
        if not special:
            partial.replace(target)
    except OSError as error:
        if not special:
            with contextlib.suppress(OSError):
                partial.unlink()
        raise OSError(
            error.errno,
            f"expects {target} to be writable but it is not ({error.strerror}); choose another "
            "place, or make room",
        ) from error
