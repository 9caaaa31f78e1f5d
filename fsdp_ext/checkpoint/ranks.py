"""The ranks that save or load together."""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fsdp_ext import _C
from fsdp_ext.comm.rendezvous import (
    LONGEST_PAUSE,
    SHORTEST_PAUSE,
    announce_process,
    processes_of,
    store_of,
)

_KEY = "fsdp_ext/checkpoint"
_LOOK = 0.5  # seconds between two looks at whether ranks have ended

# How many agreements each group has had.
_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class OtherRanksError(RuntimeError):
    """Another rank could not save or load, so no rank has."""


TIMEOUT = timedelta(minutes=30)  # by default, as of PyTorch's process groups


class Ranks:
    """All ranks of a process group, or this process alone.

    They agree through the group's store and use no collective. So a thread can save while
    the model trains.

    Args:
        group: the ranks; None for the default group, or for one process if there is none.
        timeout: the longest wait for another rank.

    Raises:
        ValueError: if the group has no store.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta = TIMEOUT) -> None:
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        self._group = group
        self._timeout = timeout.total_seconds()
        self._store: Any = None
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
        message = _failure(self.rank, value) if isinstance(value, BaseException) else {"ok": value}
        if self._store is None or self._group is None:
            if isinstance(value, BaseException):
                raise value
            return decide([value])
        number = _counts[self._group] = _counts.get(self._group, 0) + 1
        key = f"{_KEY}/{number}"
        if self.rank != 0:
            self._store.set(f"{key}/{self.rank}", json.dumps(message))
            decision = self._get(f"{key}/decision", 0, what)
        else:
            error: BaseException | None = None
            try:
                values = [message]
                values += [self._get(f"{key}/{rank}", rank, what) for rank in range(1, self.size)]
                decision = next((value for value in values if "failed" in value), None)
                decision = decision or {"ok": decide([value["ok"] for value in values])}
            except Exception as raised:
                error, decision = raised, _failure(0, raised)
            self._store.set(f"{key}/decision", json.dumps(decision))
            for rank in range(1, self.size):
                self._store.delete_key(f"{key}/{rank}")
            # Every rank has read the decision before this one.
            self._store.delete_key(f"{_KEY}/{number - 1}/decision")
            if error is not None:
                raise error
        if isinstance(value, BaseException):
            raise value
        if "failed" in decision:
            raise OtherRanksError(f"rank {decision['rank']} failed: {decision['failed']}")
        return decision["ok"]

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Raise on all ranks if the block raised on any. All ranks enter it.

        Raises:
            Exception: this rank's.
            OtherRanksError: if the block raised on another rank.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        self.agree(what, failure, lambda _: None)

    def _get(self, key: str, rank: int, what: str) -> Any:
        """Return a message of a rank, when it is there."""
        assert self._group is not None
        start = looked = time.monotonic()
        pause = SHORTEST_PAUSE
        while not self._store.check([key]):
            now = time.monotonic()
            if now - looked >= _LOOK:
                looked = now
                name = dist.get_global_rank(self._group, rank)
                process = processes_of(self._group).get(name)
                ended = None if process is None else _C.ended_process(process)
                if ended is not None and not self._store.check([key]):
                    raise RuntimeError(
                        f"rank {self.rank} waits in {what} for rank {rank} (process {ended}), "
                        "which has ended. Its last output may say why."
                    )
            if now - start >= self._timeout:
                raise RuntimeError(
                    f"rank {self.rank} waited {self._timeout:.0f} s in {what} for rank {rank}. All "
                    "ranks have to call it, in the same order."
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return json.loads(self._store.get(key))


def _failure(rank: int, error: BaseException) -> dict[str, Any]:
    return {"rank": rank, "failed": f"{type(error).__name__}: {error}"}
