"""How the ranks of a group first meet in its store, and which of them have ended."""

# Note [keys of an attempt]
# torchrun restarts ranks, and keeps one store for all attempts. So a key that is not there yet may
# have a value of an earlier attempt. Nothing in the environment names the attempt: torchrun counts
# restarts on each host by itself, and not those for changes of membership. So rank 0 makes a random
# word, and all keys that ranks wait for contain it. Each other rank writes a random mark, waits for
# the word under a key that contains this mark, and says under the word that it has come. Rank 0
# answers every mark, also an old one, and the new one as soon as it replaces the old one.

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from fsdp_ext import _C

# Keys below this are of any attempt: Note [keys of an attempt].
_SHARED = "fsdp_ext"
_MARK_BYTES = 16

# Seconds between two looks at the store. The intervals grow while nothing arrives.
SHORTEST_PAUSE = 0.001
LONGEST_PAUSE = 0.05
# Seconds before the first look at whether processes still exist: a constant, and an addition for
# each rank, since a look asks the store for each rank that has not come.
_PROCESS_CHECK_INTERVAL = 0.2
_PROCESS_CHECK_PER_RANK = 0.02
# Later intervals are up to this many times as long as the first.
_LONGEST_INTERVAL = 10
# The process that announced itself, by group.
_announced: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()

_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, _Meeting] = weakref.WeakKeyDictionary()


def backend_name(group: dist.ProcessGroup, kind: str = "cpu") -> str | None:
    """Return the name of the group's backend for devices of a kind; None if there is none.

    A group may have several backends, and has by default. `dist.get_backend` then returns no
    backend's name. The name is "" if a backend that is written in Python has none.
    """
    try:
        backend = group._get_backend(torch.device(kind))
    except RuntimeError:
        return None
    # A wrapper returns the name of the backend in it.
    name: str = getattr(backend, "name", lambda: "")()
    return name


def store_of(group: dist.ProcessGroup) -> Store | None:
    """Return the group's store; None if it has none."""
    backend = backend_name(group) or dist.get_backend(group)
    if backend == "fake":
        return None
    store: Store | None = dist.distributed_c10d._get_process_group_store(group)
    return store


def announce_process(group: dist.ProcessGroup) -> None:
    """Tell the other ranks which process this rank is, so that they notice when it ends.

    Nothing connects the ranks before the first forward. Until then, a rank that has ended is known
    by its process alone. So every rank writes its process into the store when it shards a module.
    It does not wait for other ranks.
    """
    if group in _announced:
        return
    _announced[group] = os.getpid()
    store = store_of(group) if group.size() > 1 else None
    if store is None:
        return
    # After an error the others only wait longer.
    with contextlib.suppress(RuntimeError):
        _write_process(PrefixStore(_SHARED, store), dist.get_rank(group))


def is_fork(group: dist.ProcessGroup) -> bool:
    """Return whether this process was forked off the one that announced itself."""
    return _announced[group] != os.getpid()


def processes_of(group: dist.ProcessGroup) -> dict[int, bytes]:
    """Return the known processes of the group's ranks, by global rank, once these have met."""
    store = store_of_attempt(group)
    if store is None:
        return {}
    ranks = dist.get_process_group_ranks(group)
    texts = store.multi_get([_process_key(index) for index in range(len(ranks))])
    found = zip(ranks, map(_parse_process, texts), strict=True)
    return {rank: identity for rank, identity in found if identity is not None}


def ended_process(store: Store, index: int, known: dict[int, bytes]) -> int | None:
    """Return the process of the rank at `index` if it is known to have ended.

    ``known`` has the processes that were read before, by index, and gets this one.
    """
    key = _process_key(index)
    if index not in known and store.check([key]):
        identity = _parse_process(store.get(key))
        if identity is not None:
            known[index] = identity
    return _C.ended_process(known[index]) if index in known else None


def _write_process(store: Store, index: int) -> None:
    try:
        text = _C.process_identity().hex()
    except RuntimeError:  # /proc is missing
        text = ""
    store.set(_process_key(index), text)


def _parse_process(text: bytes) -> bytes | None:
    try:
        identity = bytes.fromhex(text.decode("ascii"))
        _C.ended_process(identity)  # raises if it is not a process
    except (ValueError, RuntimeError):
        return None
    return identity


def _process_key(index: int) -> str:
    return f"process/{index}"


def store_of_attempt(group: dist.ProcessGroup) -> Store | None:
    """Return the part of the group's store that `meet` has returned; None if ranks have not met."""
    meeting = _meetings.get(group)
    return meeting.store if meeting is not None and meeting.is_over else None


def meet(
    group: dist.ProcessGroup,
    store: Store,
    timeout: timedelta,
    raise_late: Callable[[list[int]], NoReturn],
    raise_ended: Callable[[int, int], NoReturn],
    looked: Callable[[], None] = lambda: None,
) -> Store:
    """Wait for all ranks once, and return the part of the store that only this attempt uses.

    See Note [keys of an attempt].

    Args:
        group: the ranks. All of them call this, in whichever of their calls comes first.
        store: the group's store.
        timeout: the longest wait.
        raise_late: raises an error; gets the indices of the ranks that have not come in time.
        raise_ended: raises an error; gets the index of a rank and its process, which has ended.
        looked: is called after each answer of the store.
    """
    meeting = _meeting_of(group, store)
    seconds = timeout.total_seconds()
    # Another thread may save a checkpoint, and wait for the same ranks or for the store.
    if not meeting.lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
        raise_late(meeting.missing_at_last_look())
    try:
        if not meeting.is_over:
            meeting.wait(seconds, raise_late, raise_ended, looked)
    finally:
        meeting.lock.release()
    assert meeting.store is not None
    return meeting.store


def processes_seen(group: dist.ProcessGroup, store: Store) -> dict[int, bytes]:
    """Return the processes of ranks that this rank has waited for, by index.

    The caller may add to it.
    """
    return _meeting_of(group, store).processes


def _meeting_of(group: dist.ProcessGroup, store: Store) -> _Meeting:
    if group not in _meetings:
        _meetings.setdefault(group, _Meeting(group, store))
    return _meetings[group]


class _Meeting:
    """This rank's side of the first meeting of a group's ranks: Note [keys of an attempt].

    Attributes:
        store: the attempt's part of the group's store; None until its word is known.
        is_over: whether all ranks have come.
        processes: those of ranks that this one has waited for, by their indices in the group.
    """

    def __init__(self, group: dist.ProcessGroup, store: Store) -> None:
        self.lock = threading.Lock()
        self.store: Store | None = None
        self.is_over = False
        self.processes: dict[int, bytes] = {}
        self._index = dist.get_rank(group)
        self._size = group.size()
        self._group_store = store
        self._shared = PrefixStore(_SHARED, store)
        self._mark = os.urandom(_MARK_BYTES).hex()
        self._answered: dict[int, str] = {}  # the mark of each rank that rank 0 has answered
        self._awaited = list(range(self._size))  # who may not have said yet that they have come

    def wait(
        self,
        timeout: float,
        raise_late: Callable[[list[int]], NoReturn],
        raise_ended: Callable[[int, int], NoReturn],
        looked: Callable[[], None],
    ) -> None:
        """Wait until all ranks have come."""
        if self.store is None and self._index == 0:
            self._come(self._mark)
        elif self.store is None:
            self._shared.set(f"mark/{self._index}", self._mark)
        for is_late in looks(lambda: self._have_all_come(looked), timeout, first_look(self._size)):
            if not _launcher_keeps_store():
                self._look_at_processes(raise_ended)
            if is_late:
                self._missing()
                raise_late(self.missing_at_last_look())

    def missing_at_last_look(self) -> list[int]:
        """Return the indices of ranks that had not come when this rank last asked the store."""
        missing = [index for index in self._awaited if index != self._index]
        # If none is missing any more, one that has come has not gone on.
        return missing or [0 if self._index else 1]

    def _have_all_come(self, looked: Callable[[], None]) -> bool:
        answer = f"word/{self._mark}"
        if self.store is None and self._shared.check([answer]):
            self._come(self._shared.get(answer).decode())
            self._shared.delete_key(answer)
        self.is_over = self.store is not None and self.store.check(["all"])
        if self._index == 0 and self.is_over:
            for index in self._answered:
                self._shared.delete_key(f"mark/{index}")
        elif self._index == 0:
            self._answer()
        looked()
        return self.is_over

    def _come(self, word: str) -> None:
        store = PrefixStore(f"{_SHARED}/{word}", self._group_store)
        _write_process(store, self._index)
        count = store.add("count", 1)
        self.store = store  # after an error a later call counts this rank
        if count == self._size:
            store.set("all", "")

    def _answer(self) -> None:
        """Tell the word to ranks that have a new mark. Only rank 0 deletes marks."""
        for index in self._missing():
            key = f"mark/{index}"
            if self._shared.check([key]):
                mark = self._shared.get(key).decode()
                if self._answered.get(index) != mark:
                    self._answered[index] = mark
                    self._shared.set(f"word/{mark}", self._mark)

    def _missing(self) -> list[int]:
        """Return the indices of the ranks that have not come, as far as this rank knows."""
        if self.store is None:  # only rank 0 can tell the word
            return [0]
        store = self.store
        self._awaited = [i for i in self._awaited if not store.check([_process_key(i)])]
        return self._awaited

    def _look_at_processes(self, raise_ended: Callable[[int, int], NoReturn]) -> None:
        for index in self._missing():
            process = ended_process(self._shared, index, self.processes)
            if process is not None and index in self._missing():
                raise_ended(index, process)


def _launcher_keeps_store() -> bool:
    """Return whether processes in the store may be those of an earlier attempt.

    When a rank has ended with an error, torchrun ends the others, so none of them has to notice it.
    A rank that ends early with exit code 0 is named after the timeout.
    """
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def first_look(ranks: int) -> float:
    """Return the seconds before the first look at the processes of a group of ``ranks``."""
    return _PROCESS_CHECK_INTERVAL + _PROCESS_CHECK_PER_RANK * ranks


def looks(is_there: Callable[[], bool], timeout: float, first: float) -> Iterator[bool]:
    """Wait until ``is_there`` returns true, and yield whenever it is time to look at other ranks.

    Yields:
        Whether the wait has reached ``timeout``. The caller raises an error then.
    """
    look_at = first
    for waited in waiting():
        if is_there():
            return
        is_late = waited >= timeout
        if is_late or waited >= look_at:
            look_at = waited + min(waited, _LONGEST_INTERVAL * first)
            yield is_late


def waiting() -> Iterator[float]:
    """Yield the seconds since the first look, with growing pauses between looks.

    Each pause is about a fifth of the time so far, so the caller is at most that much late.
    """
    start = time.monotonic()
    pause = SHORTEST_PAUSE
    while True:
        yield time.monotonic() - start
        time.sleep(pause)
        pause = min(1.25 * pause, LONGEST_PAUSE)
