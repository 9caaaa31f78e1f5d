"""Roll calls: before a collective call, the ranks check that all of them make the same call.

Without a roll call, ranks wait in the call's first collective and fail by the backend's timeout,
which does not say what the other ranks should have called.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from itertools import starmap
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from fsdp_ext import _C
from fsdp_ext.comm.meeting import looks, meet, processes_of, store_of
from fsdp_ext.comm.store_calls import StoreCalls
from fsdp_ext.comm.transports import timeout_of

# Seconds until a waiting rank looks at the other ranks: a constant, and an addition for each rank,
# since a look asks the store for each rank.
_FIRST_LOOK = 0.5
_FIRST_LOOK_PER_RANK = 0.02
_KEY = "roll_call"
_GAVE_UP = "-"  # before the call of a rank that did not wait any longer

# How many roll calls each group has had. A failed roll call counts only if ranks made different
# calls.
_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_is_called: ContextVar[bool] = ContextVar("is_called", default=False)


def call_roll(groups: Mapping[dist.ProcessGroup, torch.device], caller: str) -> None:
    """Wait until all ranks of ``groups`` have made the call: see :func:`called_by_all`."""
    timeout = max(starmap(timeout_of, groups.items()), default=timedelta())
    for group in groups:
        store = store_of(group) if group.size() > 1 else None
        if store is not None:
            _RollCall(group, store, caller, timeout).wait()


@contextlib.contextmanager
def called_by_all(groups: Mapping[dist.ProcessGroup, torch.device], caller: str) -> Iterator[None]:
    """Run the block once all ranks of ``groups`` have made the call.

    A call inside the block of another one does not wait.

    Args:
        groups: each group, with the device of its collectives.
        caller: the name of the call.

    Raises:
        RuntimeError: if a rank makes another call, has ended, or does not come within the longest
            timeout of the groups, which the message names, or if the store does not answer.
    """
    if _is_called.get() or not groups:
        yield
        return
    call_roll(groups, caller)
    token = _is_called.set(True)
    try:
        yield
    finally:
        _is_called.reset(token)


class _RollCall:
    """One roll call. A counter shows when all ranks have come, so no rank looks at every key.

    The key of a rank says which call it makes. Other ranks read it only if they wait for long. The
    last rank that leaves deletes all keys.
    """

    def __init__(
        self, group: dist.ProcessGroup, store: Store, caller: str, timeout: timedelta
    ) -> None:
        self._group = group
        self._store = store
        self._caller = caller
        self._timeout = timeout
        self._index = dist.get_rank(group)
        self._ranks = dist.get_process_group_ranks(group)
        self._number = _counts.get(group, 0)
        self._calls = StoreCalls(f"rank {self._ranks[self._index]} in {caller}", timeout)

    def wait(self) -> None:
        """Wait until all ranks have come."""
        self._store = self._calls.ask(self._meet)
        try:
            self._calls.ask(self._come)
            self._wait_for_others()
        except BaseException:
            self._calls.ask_if_possible(lambda: self._store.add(self._key("count"), -1))
            raise
        _counts[self._group] = self._number + 1
        self._calls.ask(self._leave)

    def _meet(self) -> Store:
        return meet(
            self._group,
            self._store,
            self._timeout,
            self._raise_late,
            self._raise_ended,
            self._calls.note_answer,
        )

    def _come(self) -> None:
        self._store.set(self._rank_key(self._index), self._caller)
        if self._store.add(self._key("count"), 1) == len(self._ranks):
            self._store.set(self._key("all"), "")

    def _wait_for_others(self) -> None:
        first = max(_FIRST_LOOK, _FIRST_LOOK_PER_RANK * len(self._ranks))
        have_come = partial(self._calls.ask, lambda: self._store.check([self._key("all")]))
        for is_late in looks(have_come, self._timeout.total_seconds(), first):
            callers = self._calls.ask(self._callers)
            self._look_at_others(callers)
            if is_late:
                self._give_up(callers)

    def _look_at_others(self, callers: dict[int, str]) -> None:
        for index, caller in callers.items():
            if caller != self._caller and not caller.startswith(_GAVE_UP):
                # All ranks of this roll call learn it, so the next one has another number.
                _counts[self._group] = self._number + 1
                self._fail(
                    f"called {self._caller}, and rank {self._ranks[index]} called {caller}. Make "
                    "the same calls with the same arguments on all ranks, in the same order."
                )
        for rank, process in self._calls.ask(partial(processes_of, self._group)).items():
            ended = _C.ended_process(process)
            if ended is not None and self._ranks.index(rank) not in callers:
                self._raise_ended(self._ranks.index(rank), ended)

    def _give_up(self, callers: dict[int, str]) -> NoReturn:
        """Raise because ranks have not come. This rank may come again, under the same number."""
        self._calls.ask(
            lambda: self._store.set(self._rank_key(self._index), _GAVE_UP + self._caller)
        )
        came = {
            index
            for index, caller in callers.items()
            if caller.removeprefix(_GAVE_UP) == self._caller
        }
        self._raise_late([i for i in range(len(self._ranks)) if i not in came])

    def _raise_ended(self, index: int, process: int) -> NoReturn:
        self._fail(
            f"waits in {self._caller} for rank {self._ranks[index]} (process {process}), which has "
            "ended. Its last output may say why."
        )

    def _raise_late(self, indices: Sequence[int]) -> NoReturn:
        missing = [self._ranks[index] for index in indices]
        self._fail(
            f"waited {self._timeout.total_seconds():.0f} s in {self._caller} for ranks {missing}, "
            f"which have not called it. All of the ranks {self._ranks} have to call "
            f"{self._caller}, also if only rank 0 uses the result."
        )

    def _fail(self, what: str) -> NoReturn:
        raise RuntimeError(f"rank {self._ranks[self._index]} {what}")

    def _callers(self) -> dict[int, str]:
        """Return the calls of the ranks that have come, by their indices in the group."""
        keys = {index: self._rank_key(index) for index in range(len(self._ranks))}
        return {
            index: self._store.get(key).decode()
            for index, key in keys.items()
            if self._store.check([key])
        }

    def _leave(self) -> None:
        """Delete the keys if all others have left, so that nobody looks at them any more."""
        if self._store.add(self._key("left"), 1) == len(self._ranks):
            for index in range(len(self._ranks)):
                self._store.delete_key(self._rank_key(index))
            for what in ("count", "all", "left"):
                self._store.delete_key(self._key(what))

    def _key(self, what: str) -> str:
        return f"{_KEY}/{self._number}/{what}/{self._caller}"

    def _rank_key(self, index: int) -> str:
        return f"{_KEY}/{self._number}/rank/{index}"
