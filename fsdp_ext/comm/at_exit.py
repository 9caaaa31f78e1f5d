"""Lets gloo's worker threads finish before the interpreter ends.

A worker thread of gloo frees the tensors of a collective after it has woken the waiting thread. If
the interpreter ends in between, it ends the worker, which waits for the GIL, and the process is
aborted: "terminate called without an active exception" (docs/reliability.md, "Symptoms"). So this
handler, which runs before that, waits until these threads sleep.
"""

import time
from pathlib import Path

from fsdp_ext import _C

# A worker that is busy for longer is in a collective that another rank has not joined.
_LONGEST = 5.0  # seconds
_GLOO_WORKER = "(pt_gloo_runloop)"  # PyTorch's name of these threads, in 15 characters


def let_threads_finish() -> None:
    """Let other threads drop their Python objects, as long as there is an interpreter."""
    _C.note_exit()
    deadline = time.monotonic() + _LONGEST
    quiet = 0
    while quiet < 2 and time.monotonic() < deadline:
        time.sleep(0.001)  # without the GIL, which a thread may need
        quiet = 0 if _is_gloo_running() else quiet + 1


def _is_gloo_running() -> bool:
    """Return whether a worker of gloo runs, or would run if there were a CPU for it."""
    for thread in Path("/proc/self/task").glob("*/stat"):
        try:
            _, name, rest = thread.read_text(errors="replace").partition(_GLOO_WORKER)
        except OSError:
            continue  # it has ended
        if name and rest.split()[0] == "R":
            return True
    return False
