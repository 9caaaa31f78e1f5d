"""The thread that writes a checkpoint while training goes on."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch

from fsdp_ext.checkpoint.saving import Snapshot

_NICENESS = 10  # of the thread, so that it takes no core from the ones that train


class Saving:
    """A checkpoint that is being written.

    Args:
        write: writes it.
    """

    def __init__(self, write: Callable[[], Path]) -> None:
        self._write = write
        self._future: Future[Path] = Future()
        self.is_observed = False  # whether somebody has learned how it ended
        # Not a daemon: the interpreter waits for it before it ends.
        self._thread = threading.Thread(target=self._run, name="fsdp_ext checkpoint")
        self._thread.start()

    def done(self) -> bool:
        """Return whether it has ended."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Path:
        """Wait, and return the new checkpoint.

        Args:
            timeout: the longest wait in seconds.

        Raises:
            TimeoutError: if it takes longer.
            Exception: why it was not saved, as :func:`save` raises it.
        """
        error = self._future.exception(timeout)
        self.is_observed = True
        if error is not None:
            raise error
        return self._future.result()

    def error(self) -> BaseException | None:
        """Wait, and return why it was not saved if nobody has learned it yet."""
        error = self._future.exception()
        is_new, self.is_observed = not self.is_observed, True
        return error if is_new else None

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            self._future.set_result(self._write())
        except BaseException as error:
            self._future.set_exception(error)
        finally:
            del self._write


_last: Saving | None = None
_memory: torch.Tensor | None = None  # of the copies


def start(write: Callable[[], Path]) -> Saving:
    """Write in a thread."""
    global _last
    _last = Saving(write)
    return _last


def finish(*, wait: bool = True) -> None:
    """Wait for the last save, and raise its error if nobody has learned it."""
    global _last
    if _last is None:
        return
    if not wait and not _last.done():
        raise RuntimeError(
            "async_save was called while the checkpoint before is still being written. Call "
            "result() of the earlier handle first, or pass if_running='wait'."
        )
    last, _last = _last, None
    error = last.error()
    if error is not None:
        raise RuntimeError(f"the checkpoint before was not saved: {error}") from error


def stage(snapshot: Snapshot) -> Callable[[], Snapshot]:
    """Copy what is saved to memory of the host that stays allocated.

    Copies from a GPU are in order with the current stream, and the host does not wait for them.

    Returns:
        what waits for the copies, and returns them.
    """
    global _memory
    nbytes = snapshot.nbytes
    on_gpu = torch.cuda.is_available()
    if _memory is None or len(_memory) < nbytes:
        _memory = None  # before the new memory, so that both never exist together
        _memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_gpu)
    copies = snapshot.staged(_memory)
    copied = torch.cuda.current_stream().record_event() if on_gpu else None

    def wait() -> Snapshot:
        if copied is not None:
            copied.synchronize()
        return copies

    return wait


@atexit.register
def _report() -> None:
    error = _last.error() if _last is not None else None
    if error is not None:
        print(f"fsdp_ext: the last checkpoint was not saved: {error}", file=sys.stderr)
