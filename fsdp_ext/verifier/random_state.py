"""The state of a process's random generators, from which models draw in forward."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RandomState:
    """The generators of Python, torch and, if it is loaded, NumPy at one moment.

    Args:
        of_python: the state of ``random``.
        of_torch: the state of torch's generator on the host.
        of_device: the state of the current GPU's generator; None without a GPU.
        of_numpy: the state of ``numpy.random``; None if NumPy is not loaded.
    """

    of_python: Any
    of_torch: torch.Tensor
    of_device: torch.Tensor | None
    of_numpy: Any

    @classmethod
    def now(cls) -> RandomState:
        """Return the present state."""
        cuda: Any = torch.cuda
        on_gpu = cuda.is_available() and cuda.is_initialized()
        numpy = _numpy_random()
        return cls(
            random.getstate(),
            torch.get_rng_state(),
            torch.cuda.get_rng_state() if on_gpu else None,
            None if numpy is None else numpy.get_state(),
        )

    def restore(self) -> None:
        """Let the generators continue from this state."""
        random.setstate(self.of_python)
        torch.set_rng_state(self.of_torch)
        if self.of_device is not None:
            torch.cuda.set_rng_state(self.of_device)
        numpy = _numpy_random()
        if numpy is not None and self.of_numpy is not None:
            numpy.set_state(self.of_numpy)


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the generators afterwards."""
    state = RandomState.now()
    try:
        yield
    finally:
        state.restore()


def _numpy_random() -> Any:
    return sys.modules.get("numpy.random")
