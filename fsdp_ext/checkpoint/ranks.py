"""The ranks that save or load together."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from fsdp_ext.comm.meeting import announce_process, ended_process, meet, store_of, waiting
from fsdp_ext.comm.store_calls import plain_text

_LEAVING = 5.0  # seconds that rank 0 waits for the others at the end
_LOOK = 0.5  # seconds between two looks at whether ranks have ended

# The number of agreements of each group, by operation. A thread may save while the caller exports.
_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()


class OtherRanksError(RuntimeError):
    """Another rank failed to save or load, so this one did not either."""


TIMEOUT = timedelta(minutes=30)  # by default, as of PyTorch's process groups


class Ranks:
    """All ranks of a process group, or this process alone.

    They agree through the group's store and use no collective. So a thread can save while
    the model trains.

    Args:
        group: the ranks; None for the default group, or for one process if there is none.
        timeout: the longest wait for another rank.

    Attributes:
        members: the global rank of each.
        rank: this rank's number in the group.
        size: the number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta = TIMEOUT) -> None:
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        # new_group returns a number on ranks that are not in the group.
        if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                f"checkpoints got a process_group= without rank {dist.get_rank()}, which called. "
                "Call it on the group's ranks only."
            )
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"checkpoints got process_group={group!r}. Pass a ProcessGroup, or None for all "
                "ranks."
            )
        if not isinstance(timeout, timedelta):
            raise TypeError(f"checkpoints got timeout={timeout!r}. Pass a datetime.timedelta.")
        self._group = group
        self._timeout = timeout.total_seconds()
        self._store: Any = None
        self._has_met = False  # and the store has only keys of this attempt
        # A background thread names ranks in messages even after the group has been destroyed.
        self.members = [0] if group is None else dist.get_process_group_ranks(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else group.size()
        if group is not None and self.size > 1:
            self._store = store_of(group)
            if self._store is None:
                raise ValueError(
                    'checkpoints got a process group without a store, such as a "fake" one. Pass '
                    "process_group= the ranks that save."
                )
            announce_process(group)

    def agree(self, what: str, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Let rank 0 decide from the values of all ranks, and return its decision on all ranks.

        Args:
            what: what the ranks do, for messages: "rank 1 ... in {what}".
            value: JSON of this rank, or an exception if it has failed.
            decide: returns the decision, as JSON. It runs on rank 0, after all ranks have
                succeeded.

        Raises:
            Exception: this rank's, if it has failed.
            OtherRanksError: if another rank has failed, or ``decide``.
            RuntimeError: if a rank does not come. The message names it.
        """
        failure = value if isinstance(value, BaseException) else None
        if self._store is None or self._group is None:
            if failure is not None:
                raise failure
            return decide([value])
        self._meet(self._group, what)
        counts = _counts.setdefault(self._group, Counter())
        counts[what] += 1
        number, message = counts[what], {"ok": value}
        if failure is not None:
            message = self._failed(self.rank, failure)
        if self.rank == 0:
            decision = self._decide(what, number, message, decide)
        else:
            self._store.set(_key(what, number, self.rank), json.dumps(message))
            decision = self._get(_key(what, number, "decision"), 0, what)
        if failure is not None:
            raise failure
        if "failed" in decision:
            raise OtherRanksError(f"rank {decision['rank']} failed: {decision['failed']}")
        return decision["ok"]

    def agree_on(
        self, what: str, make: Callable[[], Any], decide: Callable[[list[Any]], Any]
    ) -> Any:
        """Let rank 0 decide as in :meth:`agree`, from what ``make`` returns on all ranks."""
        try:
            value = make()
        except Exception as error:
            value = error
        return self.agree(what, value, decide)

    def leave(self, what: str) -> None:
        """Let rank 0 wait until the others have read its last decision.

        Its process may serve the store, and end next.
        """
        if self._store is None or self._group is None:
            return
        key = _key(what, _counts[self._group][what], "left")
        if self.rank != 0:
            self._store.add(key, 1)
            return
        for waited in waiting():
            if self._store.add(key, 0) == self.size - 1 or waited >= _LEAVING:
                break
        self._store.delete_key(key)

    def _decide(
        self, what: str, number: int, message: Any, decide: Callable[[list[Any]], Any]
    ) -> Any:
        """Decide on rank 0, and tell the others, also if that fails."""
        failure: Exception | None = None
        others = range(1, self.size)
        try:
            values = [message, *(self._get(_key(what, number, r), r, what) for r in others)]
            # So every rank has read the decision before this one.
            self._store.delete_key(_key(what, number - 1, "decision"))
            decision = next((value for value in values if "failed" in value), None)
            decision = decision or {"ok": decide([value["ok"] for value in values])}
        except Exception as error:
            failure, decision = error, self._failed(0, error)
        self._store.set(_key(what, number, "decision"), json.dumps(decision))
        for rank in others:
            self._store.delete_key(_key(what, number, rank))
        if failure is not None:
            raise failure
        return decision

    def _failed(self, rank: int, error: BaseException) -> dict[str, Any]:
        return {"rank": self.members[rank], "failed": f"{type(error).__name__}: {error}"}

    @contextlib.contextmanager
    def together(self, what: str, then: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Raise on all ranks if the block raised on any. All ranks enter it.

        Args:
            what: as :meth:`agree` has it.
            then: runs on rank 0 after the block has succeeded on all ranks, which wait for it.

        Raises:
            Exception: this rank's.
            OtherRanksError: if the block raised on another rank, or ``then``.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        self.agree(what, failure, lambda _: then())

    def _meet(self, group: dist.ProcessGroup, what: str) -> None:
        """Use the keys of this attempt from now on: Note [keys of an attempt]."""
        if not self._has_met:
            timeout = timedelta(seconds=self._timeout)
            with self._lost_store(what):
                self._store = meet(
                    group,
                    self._store,
                    timeout,
                    lambda late: self._raise_late(late[0], what),
                    lambda rank, process: self._raise_ended(rank, process, what),
                )
            self._has_met = True

    def _get(self, key: str, rank: int, what: str) -> Any:
        """Return a message of a rank, when it is there."""
        looked = 0.0
        with self._lost_store(what):
            for waited in waiting():
                if self._store.check([key]):
                    break
                if waited - looked >= _LOOK:
                    looked = waited
                    ended = ended_process(self._store, rank, {})
                    if ended is not None and not self._store.check([key]):
                        self._raise_ended(rank, ended, what)
                if waited >= self._timeout:
                    self._raise_late(rank, what)
            return json.loads(self._store.get(key))

    def _raise_ended(self, rank: int, process: int, what: str) -> NoReturn:
        raise RuntimeError(
            f"rank {self.members[self.rank]} waits in {what} for rank {self.members[rank]} "
            f"(process {process}), which has ended. Its last output may say why."
        )

    def _raise_late(self, rank: int, what: str) -> NoReturn:
        raise RuntimeError(
            f"rank {self.members[self.rank]} waited {self._timeout:.0f} s in {what} for rank "
            f"{self.members[rank]}. All ranks have to call it, in the same order."
        )

    @contextlib.contextmanager
    def _lost_store(self, what: str) -> Iterator[None]:
        """Raise an error that says so if the store cannot be reached."""
        try:
            yield
        except dist.DistError as error:
            raise RuntimeError(
                f"rank {self.members[self.rank]} cannot reach the process group's store in "
                f"{what}: {plain_text(error)}. The process that served it, often rank 0, has "
                "ended. Its last output may say why."
            ) from error


def _key(what: str, number: int, whose: int | str) -> str:
    return f"checkpoint/{what}/{number}/{whose}"
