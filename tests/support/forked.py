"""A call in a forked child of the test's process."""

from __future__ import annotations

import os
from collections.abc import Callable


def error_in_child(call: Callable[[], object]) -> str:
    """Run a call in a forked child. Return its error after the name of its type, or "no error"."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        text = "no error"
        try:
            call()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text
