"""The thread that writes a checkpoint while training goes on."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_ext.checkpoint.saving import Copy, Snapshot

_NICENESS = 10  # of the thread, so that it takes no core from the ones that train


class Saving:
    """A checkpoint that is being written.

    Args:
        write: writes it.
        staged: the copies that it writes; None if there are none.
    """

    def __init__(self, write: Callable[[], Path], staged: Staged | None) -> None:
        self._write: Callable[[], Path] | None = write
        self._staged = staged
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

    def wait_for_copies(self) -> None:
        """Wait until everything is copied. From then on, anything may change the model."""
        if self._staged is not None:
            self._staged.wait()

    def error(self) -> BaseException | None:
        """Wait, and return why it was not saved if nobody has learned it yet."""
        error = self._future.exception()
        is_new, self.is_observed = not self.is_observed, True
        return error if is_new else None

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            assert self._write is not None
            self._future.set_result(self._write())
        except BaseException as error:
            self._future.set_exception(error)
        finally:
            self._write = None  # it has the model


_running: list[Saving] = []  # the last save, if nobody has waited for it
# The memory of the copies. It stays allocated as long as the model exists.
_memory: weakref.WeakKeyDictionary[nn.Module, torch.Tensor] = weakref.WeakKeyDictionary()


def start(write: Callable[[], Path], staged: Staged | None) -> Saving:
    """Write in a thread."""
    _running.append(Saving(write, staged))
    return _running[-1]


def finish(*, wait: bool = True) -> None:
    """Wait for the last save, and raise its error if nobody has learned it."""
    if _running and not wait and not _running[-1].done():
        raise RuntimeError(
            "async_save was called while the checkpoint before is still being written. Call "
            "result() of the earlier handle first, or pass if_running='wait'."
        )
    error = _error()
    if error is not None:
        raise RuntimeError(f"the checkpoint before was not saved: {error}") from error


def _error() -> BaseException | None:
    """Wait for the last save, and return its error if nobody has learned it."""
    return _running.pop().error() if _running else None


class Staged:
    """Copies on the host of what is saved.

    Note [copies before the next step]
    Between two steps of the optimizer, nothing changes its parameters and states. So the call that
    saves copies only the rest, such as buffers, and a thread copies these: on the host as it gets
    to it, and from a GPU on a stream of its own. A hook before the optimizer's step waits until
    they are copied. Optimizers that step in backward have no such moment; for them the call copies
    everything. Versions of the tensors tell whether something else has written to them.

    Args:
        model: the model.
        snapshot: what is saved.
        optimizers: those that step it.
    """

    def __init__(
        self, model: nn.Module, snapshot: Snapshot, optimizers: Sequence[Optimizer]
    ) -> None:
        self._snapshot, copies = snapshot.staged(_staging(model, snapshot.nbytes))
        is_attached = any(vars(optimizer).get("_attached") for optimizer in optimizers)
        self._deferred = [copy for copy in copies if copy.is_stepped and not is_attached]
        self._versions = [copy.owner._version for copy in self._deferred]
        self._on_gpu = any(copy.source.is_cuda for copy in copies)
        self._copied = threading.Event()
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers
        ]
        if self._on_gpu:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                _make(self._deferred)
            self._event = self._stream.record_event()
        _make([copy for copy in copies if is_attached or not copy.is_stepped])
        if self._on_gpu:
            self._rest = torch.cuda.current_stream().record_event()

    def finish(self) -> Snapshot | Exception:
        """Make the copies that are left, wait for all, and return them, or why they are wrong."""
        try:
            if self._on_gpu:
                self._event.synchronize()
                self._rest.synchronize()
            else:
                _make(self._deferred)
            for copy, version in zip(self._deferred, self._versions, strict=True):
                if copy.owner._version != version:
                    return RuntimeError(
                        f"'{copy.name}' was written to while async_save copied it, and not by "
                        "the optimizer's step. Call the handle's wait_for_copies() before such "
                        "writes."
                    )
            return self._snapshot
        except Exception as error:
            return error
        finally:
            del self._snapshot, self._deferred  # the caller has the one, and the model the others
            self._copied.set()
            for hook in self._hooks:
                hook.remove()

    def wait(self) -> None:
        """Wait until everything is copied."""
        self._copied.wait()

    def _before_step(self, *_: object) -> None:
        if self._on_gpu:
            torch.cuda.current_stream().wait_event(self._event)
        else:
            self._copied.wait()


def _make(copies: Sequence[Copy]) -> None:
    for copy in copies:
        copy.target.copy_(copy.source, non_blocking=True)


def _staging(model: nn.Module, nbytes: int) -> torch.Tensor:
    """Return memory of the host, which later calls use again."""
    memory = _memory.pop(model, None)
    if memory is None or len(memory) < nbytes:
        del memory  # before the new memory, so that both never exist together
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    _memory[model] = memory
    return memory


@atexit.register
def _report() -> None:
    error = _error()
    if error is not None:
        print(f"fsdp_ext: the last checkpoint was not saved: {error}", file=sys.stderr)
