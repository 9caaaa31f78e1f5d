"""The state of a process's random generators, from which models draw in forward."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the random generators afterwards.

    These are the generators of Python, of torch on the host and on the current GPU, and of NumPy if
    it is loaded.
    """
    cuda: Any = torch.cuda
    numpy: Any = sys.modules.get("numpy.random")
    restore_each: list[Callable[[], object]] = [
        partial(random.setstate, random.getstate()),
        partial(torch.set_rng_state, torch.get_rng_state()),
    ]
    if cuda.is_available() and cuda.is_initialized():
        restore_each.append(partial(cuda.set_rng_state, cuda.get_rng_state()))
    if numpy is not None:
        restore_each.append(partial(numpy.set_state, numpy.get_state()))
    try:
        yield
    finally:
        for restore in restore_each:
            restore()
