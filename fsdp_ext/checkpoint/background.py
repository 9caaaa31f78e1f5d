"""The thread that writes a checkpoint while training goes on."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_ext import _C
from fsdp_ext.checkpoint.ranks import Ranks
from fsdp_ext.checkpoint.snapshot import Content, Snapshot
from fsdp_ext.checkpoint.state_dicts import flat_tensors
from fsdp_ext.checkpoint.transfers import free_pinned_memory
from fsdp_ext.checkpoint.weights import names_of
from fsdp_ext.optim.flat_step import register_update_pre_hook
from fsdp_ext.sharding.params.checked_optimizers import steps_shards
from fsdp_ext.sharding.root.module_state import units_below

_NICENESS = 10  # of the thread, so that it takes no core from threads that train


class Saving:
    """A checkpoint that is being written.

    Args:
        write: writes it.
        staged: makes the copies that are written; None if an error prevents them.
    """

    def __init__(self, write: Callable[[], Path], staged: Staged | None) -> None:
        self._write: Callable[[], Path] | None = write
        self._process = os.getpid()
        self._staged = staged
        self._future: Future[Path] = Future()
        self._may_run = threading.Event()
        self._is_begun = False
        # Not a daemon: the interpreter waits for it before it ends.
        self._thread = threading.Thread(target=self._run, name="fsdp_ext checkpoint")

    def begin(self) -> None:
        """Start the thread. If an interrupt prevents that, the thread writes nothing."""
        try:
            self._thread.start()
            self._is_begun = True
        except BaseException:
            if self._staged is not None:
                self._staged.end()
            raise
        finally:  # the interpreter waits for the thread
            self._may_run.set()

    def done(self) -> bool:
        """Return whether it has ended."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Path:
        """Wait, and return the new checkpoint.

        Args:
            timeout: the longest wait in seconds.

        Raises:
            TimeoutError: if it takes longer.
            RuntimeError: in a process that was forked before it ended.
            Exception: why it was not saved, as :func:`save` raises it.
        """
        self._check_process()
        # Before Python 3.11, the future's own TimeoutError is not the builtin one.
        if not wait([self._future], timeout).done:
            raise TimeoutError(f"the checkpoint is still being written after {timeout:g} s.")
        error = self._future.exception()
        with contextlib.suppress(ValueError):  # called before
            _running.remove(self)
        if error is not None:
            raise error
        return self._future.result()

    def wait_for_copies(self) -> None:
        """Wait until everything is copied. From then on, anything may change the model.

        Raises:
            RuntimeError: in a process that was forked before the save ended.
        """
        self._check_process()
        if self._staged is not None:
            self._staged.wait()

    def error(self) -> BaseException | None:
        """Wait, and return the error of the save."""
        return self._future.exception()

    def before_step(self, optimizer: Optimizer) -> None:
        """Wait for the copies of what the optimizer's step changes."""
        if self._staged is not None:
            self._staged.before_step(optimizer)

    def before_update(self, params: frozenset[Any] | None) -> None:
        """Wait for the copies of a unit that an attached optimizer steps in backward."""
        if self._staged is not None:
            self._staged.before_update(params)

    def _check_process(self) -> None:
        if self._write is not None and os.getpid() != self._process:
            raise RuntimeError(
                "this process was forked while async_save's thread wrote a checkpoint, and does "
                "not have the thread. Call the handle's methods in the parent process."
            )

    def _run(self) -> None:
        self._may_run.wait()  # so that Thread.start(), which waits for this, gets the GIL back
        try:
            if not self._is_begun:
                raise RuntimeError("async_save was interrupted before its thread began to write.")
            assert self._write is not None
            self._future.set_result(self._write())
        except BaseException as error:
            self._future.set_exception(without_frames(error))
        finally:
            self._write = None  # it keeps ``extra`` and the process group


class _Traceback(Exception):
    """The text of a traceback."""


E = TypeVar("E", bound=BaseException)


def without_frames(error: E) -> E:
    """Replace an error's traceback by its text, because frames keep the model and the copies."""
    error.__cause__ = _Traceback("\n" + "".join(traceback.format_exception(error)))
    error.__traceback__ = error.__context__ = None
    return error


def lower_priority() -> None:
    """Lower the priority of the thread that calls this, for the rest of its life."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


# Optimizers that have stepped, and those among them whose step a CUDA graph has captured.
_stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_captured: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _note_step(optimizer: Optimizer, *_: object) -> None:
    if torch.compiler.is_compiling():  # Dynamo cannot trace a WeakSet
        return
    _stepped.add(optimizer)
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        _captured.add(optimizer)


register_optimizer_step_pre_hook(_note_step)  # now, since captures may come before the first save


def _may_replay(optimizer: Optimizer) -> bool:
    """Return whether the optimizer may step by replays of a CUDA graph."""
    if optimizer in _stepped:
        return optimizer in _captured
    # A graph may have captured its step before this module was imported.
    return any(param.is_cuda for group in optimizer.param_groups for param in group["params"])


_running: list[Saving] = []  # the last save, until its end has been reported
# The memory of the copies. It stays allocated as long as the model exists.
_memory: weakref.WeakKeyDictionary[nn.Module, dict[str, torch.Tensor]] = weakref.WeakKeyDictionary()


def start(write: Callable[[], Path], staged: Staged | None) -> Saving:
    """Write in a thread."""
    _watch_process()
    saving = Saving(write, staged)
    _running.append(saving)  # first, so that every step finds it
    try:
        saving.begin()
    except BaseException:
        _running.remove(saving)
        raise
    return saving


def finish(*, wait: bool = True) -> None:
    """Wait for the last save, and raise its error unless ``result()`` has raised it."""
    if _running and not wait and not _running[-1].done():
        raise RuntimeError(
            "async_save was called while the previous checkpoint is still being written. Call "
            "result() of the earlier handle first, or pass if_running='wait'."
        )
    error = _error()
    if error is not None:
        raise RuntimeError(f"the previous checkpoint was not saved: {error}") from error


def _error() -> BaseException | None:
    """Wait for the last save, and return its error unless ``result()`` has raised it."""
    error = _running[-1].error() if _running else None
    _running.clear()  # not before it has ended: an interrupt must not forget it
    return error


class CopyGroup:
    """Tensors that are copied together.

    Args:
        keys: the kind of file and the name of each.
        watched: tensors with names. If the version of one changes before the copies are made,
            something other than the optimizer's step has written to it.
        params: the parameters of a unit that an attached optimizer steps, if these tensors belong
            to them.
    """

    def __init__(
        self,
        keys: Sequence[tuple[str, str]],
        watched: Iterable[tuple[str, torch.Tensor]] = (),
        params: frozenset[Any] | None = None,
    ) -> None:
        self.params = params
        self._keys = keys
        self._versions = [(name, tensor, tensor._version) for name, tensor in watched]
        self._changed: list[str] | None = None
        self._lock = threading.Lock()
        self._issued = threading.Event()
        self._events: dict[torch.device, torch.cuda.Event] = {}

    def copy(self, source: Snapshot, target: Snapshot) -> None:
        """Copy the tensors that this rank saves. Copies from a GPU are only issued."""
        for kind, name in self._keys:
            box = source.kinds[kind].boxes.get(name)
            if box is not None:
                copy = target.kinds[kind].boxes[name].tensor
                copy.copy_(box.tensor, non_blocking=True)

    def end(self, events: dict[torch.device, torch.cuda.Event]) -> None:
        """Let waiters go on after ``events``. No more copies are issued."""
        self._events = events
        self._issued.set()

    def wait(self) -> None:
        """Order later work of this thread and its current streams after the copies."""
        self._issued.wait()
        for device, event in self._events.items():
            torch.cuda.current_stream(device).wait_event(event)
        self.compare_versions()

    def compare_versions(self) -> list[str]:
        """Compare versions once, and return the names of tensors that something else wrote to."""
        with self._lock:
            if self._changed is None:
                self._changed = [
                    name for name, tensor, old in self._versions if tensor._version != old
                ]
                self._versions = []
            return self._changed


class Staged:
    """Copies on the host of what is saved.

    Note [copies before the next step]
    Only the optimizer's step changes its parameters and states. So a thread copies these after the
    call: on a GPU by a stream of its own. The call itself copies the rest, such as buffers. A hook
    waits for the thread's copies before the step of any optimizer of shards. An attached optimizer
    steps units in backward. So the thread copies unit by unit, in reverse order of registration,
    and each unit waits only for its own copies. Steps of ``fsdp_ext.optim`` have to wait, because
    versions do not show them. Wrappers such as accelerate's may step without hooks. For them, the
    call copies everything. So it does for optimizers that may step by replays of a CUDA graph,
    because replays run no hooks: those whose step a graph has captured, and those on a GPU that
    have not stepped since this module was imported. Versions show whether anything else wrote to a
    tensor meanwhile. They are compared before the step, or once everything is copied. A forward
    that moves shards (Note [moving shards] in ``csrc/core/units/bucket.h``) waits until everything
    is copied, too.
    """

    def __init__(
        self,
        model: nn.Module,
        contents: Mapping[str, Content],
        optimizers: Sequence[Optimizer],
        ranks: Ranks,
    ) -> None:
        self._ranks = ranks
        self._memory = _memory.setdefault(model, {})
        # Optimizers with hooks before their step run them before anything is stepped.
        defers = all(
            hasattr(each, "_optimizer_step_pre_hooks") and not _may_replay(each)
            for each in optimizers
        )
        self._deferred, others = {}, {}
        for kind, content in contents.items():
            names = content.stepped if defers else ()
            self._deferred[kind], others[kind] = content.split(names)
        self._groups: Sequence[CopyGroup] = _groups_of(
            model, self._deferred, optimizers if defers else ()
        )
        self._copied = threading.Event()
        devices = {
            tensor.device
            for content in contents.values()
            for tensor in content.tensors.values()
            if tensor.is_cuda
        }
        self._streams = {device: _stream_on(device) for device in devices}
        source, self._copied_now = self._place("others", others)
        CopyGroup(_keys_of(others)).copy(source, self._copied_now)
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))  # so it ends after these copies
        self._optimizers: Sequence[Optimizer] = optimizers

    def finish(self) -> Snapshot | Exception:
        """Make the deferred copies, wait for all copies, and return them or an error."""
        try:
            if self._streams:
                # A new thread begins with device 0. Leaving torch.cuda.stream sets the stream that
                # was current before, which would make a context on that device.
                torch.cuda.set_device(next(iter(self._streams)))
            with contextlib.ExitStack() as streams:
                for stream in self._streams.values():
                    streams.enter_context(torch.cuda.stream(stream))
                source, copied = self._place("deferred", self._deferred)
                for group in self._groups:
                    group.copy(source, copied)
                    group.end({d: stream.record_event() for d, stream in self._streams.items()})
            for stream in self._streams.values():
                stream.synchronize()
            changed = [name for group in self._groups for name in group.compare_versions()]
            if changed:
                return RuntimeError(
                    f"'{changed[0]}' was written to while async_save copied it, and not by the "
                    "optimizer's step. Call the handle's wait_for_copies() before such writes."
                )
            return self._copied_now | copied
        except Exception as error:
            for stream in self._streams.values():
                stream.synchronize()  # copies may still go to memory that others will use
            return error
        finally:
            self.end()
            # The handle may live longer than the model, so it drops its references. before_step may
            # still read two of these attributes, so they are replaced, not deleted.
            self._optimizers = self._groups = ()
            del self._copied_now, self._deferred, self._memory

    def wait(self) -> None:
        """Wait until everything is copied."""
        self._copied.wait()

    def end(self) -> None:
        """End all waits: the copies are made, or will not be made."""
        for group in self._groups:
            group.end({})
        self._copied.set()

    def before_step(self, optimizer: Optimizer) -> None:
        """Wait for the copies, unless they concern other parameters."""
        if self._groups and (
            any(optimizer is each for each in self._optimizers) or steps_shards(optimizer)
        ):
            self.before_update(None)

    def before_update(self, params: frozenset[Any] | None) -> None:
        """Wait for the copies of the unit with these parameters, or for all if there is none."""
        groups = self._groups
        own = [each for each in groups if params is not None and each.params is params]
        for group in own or groups:
            group.wait()

    def _place(self, what: str, contents: Mapping[str, Content]) -> tuple[Snapshot, Snapshot]:
        """Return what this rank saves of ``contents``, and memory of the host for copies of it.

        Later saves use the memory again.
        """
        snapshot = Snapshot.of(contents, self._ranks)
        memory = self._memory.pop(what, None)
        if memory is None or len(memory) < snapshot.nbytes:
            pins = bool(self._streams)
            frees_pinned = pins and memory is not None
            del memory  # before the new memory, so that both never exist together
            if frees_pinned:
                for device in self._streams:  # until torch sees that no copy uses the old memory
                    torch.cuda.current_stream(device).synchronize()
                free_pinned_memory()
            memory = torch.empty(snapshot.nbytes, dtype=torch.uint8, device="cpu", pin_memory=pins)
        self._memory[what] = memory
        return snapshot, snapshot.placed_in(memory)


def _keys_of(contents: Mapping[str, Content]) -> list[tuple[str, str]]:
    return [(kind, name) for kind, content in contents.items() for name in content.tensors]


def _groups_of(
    model: nn.Module, contents: Mapping[str, Content], optimizers: Sequence[Optimizer]
) -> list[CopyGroup]:
    """Return what is copied together: each attached unit, the last one first, and then the rest."""
    settings = [unit.settings.update for unit in reversed(units_below(model))]
    units = [each.params for each in settings if each is not None]
    names = names_of(model) if units else {}
    unit_of = {names[param]: unit for unit in units for param in unit if param in names}
    stepped = {name for content in contents.values() for name in content.stepped.values()}
    if units and not stepped <= {*names.values()}:
        units, unit_of = [], {}  # a state may belong to any unit, so all wait for everything
    keys: dict[frozenset[Any] | None, list[tuple[str, str]]] = {unit: [] for unit in (*units, None)}
    for kind, name in _keys_of(contents):
        keys[unit_of.get(contents[kind].stepped[name])].append((kind, name))
    flat = [pair for each in optimizers for pair in flat_tensors(model, each)]
    return [
        CopyGroup(
            own,
            [(n, contents[kind].tensors[n]) for kind, n in own] + (flat if unit is None else []),
            unit,
        )
        for unit, own in keys.items()
    ]


@functools.cache
def _stream_on(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all saves: torch frees pinned memory after the streams that used it."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@functools.cache  # once in a process
def _watch_process() -> None:
    atexit.register(_report)
    os.register_at_fork(after_in_child=_forget)
    register_optimizer_step_pre_hook(_before_step)
    _C.call_before_shards_move(_wait_for_copies)


def _before_step(optimizer: Optimizer, *_: object) -> None:
    for saving in tuple(_running):
        saving.before_step(optimizer)


def _before_update(params: frozenset[Any] | None) -> None:
    for saving in tuple(_running):
        saving.before_update(params)


register_update_pre_hook(_before_update)


def _wait_for_copies() -> None:
    for saving in tuple(_running):
        saving.wait_for_copies()


def _forget() -> None:
    """Wait for nothing in a child process, which has no such thread."""
    _running.clear()


def _report() -> None:
    error = _error()
    if error is not None:
        print(f"fsdp_ext: the last checkpoint was not saved: {error}", file=sys.stderr)
