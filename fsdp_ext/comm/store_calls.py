"""Calls of a process group's store that end in time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from fsdp_ext import _C

_Answer = TypeVar("_Answer")

# While a call runs, its caller checks this often (seconds) how long the store has been silent.
_CHECK_INTERVAL = 0.5


class StoreCalls:
    """Calls of a group's store, each of which ends within a timeout.

    If the network to the store is down, or its process hangs, a call of it does not return,
    whatever its timeout is. So calls run on threads of their own.

    Args:
        caller: who calls, for messages: "rank 1 in checkpoint.save".
        timeout: the longest time without an answer.
        look_for_ended: is called if the store is lost, and raises an error if a rank has ended.
    """

    def __init__(
        self, caller: str, timeout: timedelta, look_for_ended: Callable[[], None] = lambda: None
    ) -> None:
        self._caller = caller
        self._timeout = timeout.total_seconds()
        self._look_for_ended = look_for_ended
        self._answered = 0.0
        self._has_failed = False

    def note_answer(self) -> None:
        """Restart the timeout, between two requests of one call of ``ask``."""
        self._answered = time.monotonic()

    def ask(self, call: Callable[[], _Answer]) -> _Answer:
        """Run ``call``, which uses the store, on another thread, and return its result.

        Raises:
            RuntimeError: if the store does not answer, or its process has ended.
        """
        self.note_answer()
        answer: Future[_Answer] = Future()
        threading.Thread(target=_run, args=(call, answer), daemon=True).start()
        while True:
            try:
                return answer.result(_CHECK_INTERVAL)
            except dist.DistError as error:
                self._has_failed = True
                self._look_for_ended()
                raise RuntimeError(
                    f"{self._caller} cannot reach the process group's store any more: "
                    f"{plain_text(error)}. The process that served it, often rank 0, has ended. "
                    "Its last output may say why."
                ) from error
            except NotDone:
                silent = time.monotonic() - self._answered
                if silent >= self._timeout + 2 * _CHECK_INTERVAL:
                    self._has_failed = True
                    raise RuntimeError(
                        f"{self._caller}: the process group's store has not answered for "
                        f"{silent:.0f} s. In most jobs rank 0 serves it. That process, or the "
                        "network to it, may be down."
                    ) from None

    def ask_if_possible(self, call: Callable[[], _Answer]) -> _Answer | None:
        """Return what ``call`` returns; None if the store has failed in this call or before."""
        with contextlib.suppress(RuntimeError):
            return None if self._has_failed else self.ask(call)
        return None


def _run(work: Callable[[], _Answer], result: Future[_Answer]) -> None:
    try:
        result.set_result(work())
    except BaseException as error:
        result.set_exception(error)


def plain_text(error: BaseException) -> str:
    """Return the message of an error of torch, without source positions and stacks."""
    return _C.plain_text(str(error)) or type(error).__name__
