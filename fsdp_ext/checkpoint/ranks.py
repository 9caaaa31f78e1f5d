"""The ranks that save or load together."""

# Note [messages of agreements]
# Each rank other than 0 writes a numbered message under a key of its own. Rank 0 reads the messages
# and writes one answer for each, under a key that ends with the message's number. A rank that gives
# up overwrites its message with null, and rank 0 remembers the number of the last message that it
# read from each rank. So a stale message is not read in a later agreement, unless the store did not
# answer when its rank gave up.
# If rank 0 gives up, it leaves its reason in the store for each rank that has not come. A rank that
# finds a reason may be late for that agreement, or early for the next agreement with the same key.
# So the rank first waits _GRACE for an answer, and then raises the reason. Rank 0 deletes a reason
# when it begins the next agreement with the same key, or when the rank has come to a later one.

from __future__ import annotations

import contextlib
import itertools
import json
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist

from fsdp_ext.comm.meeting import announce_process, ended_process, meet, store_of, waiting
from fsdp_ext.comm.store_calls import StoreCalls

_LEAVING = 5.0  # seconds that rank 0 waits for the others at the end
_LOOK = 0.5  # seconds between two looks at whether ranks have ended
_GRACE = 60.0  # seconds that a rank waits for an answer before it believes rank 0's reason

_GAVE_UP = "/gave_up"

_numbers = itertools.count(1)  # of this process's messages


@dataclass
class _Store:
    """What rank 0 knows of the keys in the store."""

    taken: dict[str, int] = field(default_factory=dict)  # the last number read, by message key
    reasons: dict[str, int] = field(default_factory=dict)  # the rank that a reason is for, by key


_known: weakref.WeakKeyDictionary[dist.ProcessGroup, _Store] = weakref.WeakKeyDictionary()


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
        self._timeout = timeout
        self._store: Any = None
        self._has_met = False  # and the store has only keys of this attempt
        self._turn = 0  # the number of agreements
        self._answers: list[str] = []  # the keys of rank 0's last decision
        # A background thread names ranks in messages even after the group has been destroyed.
        self.members = [0] if group is None else dist.get_process_group_ranks(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else group.size()
        self._calls = StoreCalls(f"rank {self.members[self.rank]}", timeout)
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
        self._calls = StoreCalls(f"rank {self.members[self.rank]} in {what}", self._timeout)
        self._meet(self._group, what)
        self._turn += 1
        message = {"ok": value} if failure is None else self._failed(self.rank, failure)
        if self.rank == 0:
            known = _known.setdefault(self._group, _Store())
            decision = self._decide(what, message, decide, known)
        else:
            decision = self._follow(what, message)
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

    def leave(self) -> None:
        """Let rank 0 wait until the others have read its last decision.

        Its process may serve the store, and end next.
        """
        for waited in waiting():
            if waited >= _LEAVING or not self._calls.ask_if_possible(self._has_unread):
                return

    def _has_unread(self) -> bool:
        self._answers = [key for key in self._answers if self._store.check([key])]
        return bool(self._answers)

    def _decide(
        self,
        what: str,
        message: Any,
        decide: Callable[[list[Any]], Any],
        known: _Store,
    ) -> Any:
        """Decide on rank 0, and tell the others, also if that fails."""
        failure: Exception | None = None
        keys = {rank: self._key(what, rank) for rank in range(1, self.size)}
        looks = {rank: partial(self._new_message, key, known.taken) for rank, key in keys.items()}

        def forget_reasons(outdated: Iterable[str]) -> None:
            for key in outdated:
                if known.reasons.pop(key, None) is not None:
                    self._calls.ask_if_possible(partial(self._store.delete_key, key + _GAVE_UP))

        forget_reasons(keys.values())
        came: dict[int, Any] = {}
        try:
            for rank, look in looks.items():
                came[rank] = self._wait_for(rank, what, look)
            values = [message, *came.values()]
            decision = next((value for value in values if "failed" in value), None)
            decision = decision or {"ok": decide([value["ok"] for value in values])}
        except Exception as error:
            failure, decision = error, self._failed(0, error)
            for rank in looks.keys() - came.keys():
                found = self._calls.ask_if_possible(looks[rank])
                if found is not None:
                    came[rank] = found
        forget_reasons([key for key, rank in tuple(known.reasons.items()) if rank in came])
        numbers = {keys[rank]: of_rank["number"] for rank, of_rank in came.items()}
        known.taken |= numbers
        self._answers = [_answer_key(key, number) for key, number in numbers.items()]
        late = {keys[rank]: rank for rank in keys.keys() - came.keys()}
        known.reasons |= late
        told = [*self._answers, *(key + _GAVE_UP for key in late)]
        tell = partial(self._store.multi_set, told, [json.dumps(decision)] * len(told))
        if failure is not None:
            self._calls.ask_if_possible(tell)
            raise failure
        self._calls.ask(tell)
        return decision

    def _follow(self, what: str, message: Any) -> Any:
        """Give rank 0 a message, and return its decision: Note [messages of agreements]."""
        key, number = self._key(what, self.rank), next(_numbers)
        answer, text = _answer_key(key, number), json.dumps(message | {"number": number})
        began = time.monotonic()

        def read() -> Any:
            is_patient = time.monotonic() - began < _GRACE
            return self._read(answer) or (None if is_patient else self._read(key + _GAVE_UP))

        def forget() -> None:
            self._store.set(key, "null")
            self._store.delete_key(answer)
            self._store.delete_key(key + _GAVE_UP)

        try:
            self._calls.ask(lambda: self._store.set(key, text))
            return self._wait_for(0, what, read)
        finally:
            self._calls.ask_if_possible(forget)

    def _key(self, what: str, rank: int) -> str:
        """Return the key of a rank's message in this agreement."""
        return f"checkpoint/{what}/{self._turn}/{rank}"

    def _new_message(self, key: str, taken: dict[str, int]) -> Any:
        message = self._read(key)
        is_new = message is not None and message["number"] != taken.get(key)
        return message if is_new else None

    def _read(self, key: str) -> Any:
        """Return the JSON under a key; None if there is none."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

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
            self._store = self._calls.ask(
                lambda: meet(
                    group,
                    self._store,
                    self._timeout,
                    lambda late: self._raise_late(late[0], what),
                    lambda rank, process: self._raise_ended(rank, process, what),
                    self._calls.note_answer,
                )
            )
            self._has_met = True

    def _wait_for(self, rank: int, what: str, look: Callable[[], Any]) -> Any:
        """Return what ``look`` finds of a rank, when it is there."""
        looked = 0.0
        for waited in waiting():
            found = self._calls.ask(look)
            if found is not None:
                return found
            if waited - looked >= _LOOK:
                looked = waited
                ended = self._calls.ask(lambda: ended_process(self._store, rank, {}))
                if ended is not None and self._calls.ask(look) is None:
                    self._raise_ended(rank, ended, what)
            if waited >= self._timeout.total_seconds():
                self._raise_late(rank, what)
        raise AssertionError("waiting() does not end")

    def _raise_ended(self, rank: int, process: int, what: str) -> NoReturn:
        raise RuntimeError(
            f"rank {self.members[self.rank]} waits in {what} for rank {self.members[rank]} "
            f"(process {process}), which has ended. Its last output may say why."
        )

    def _raise_late(self, rank: int, what: str) -> NoReturn:
        waited = self._timeout.total_seconds()
        raise RuntimeError(
            f"rank {self.members[self.rank]} waited {waited:.0f} s in {what} for rank "
            f"{self.members[rank]}. All ranks have to call it, in the same order."
        )


def _answer_key(key: str, number: int) -> str:
    return f"{key}/{number}"
