"""Handles that asynchronous calls of ``FSDPModule`` return, to wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle

from fsdp_ext.sharding.root.root import Root
from fsdp_ext.sharding.root.unit import Unit

# FSDP2 has manual finalization since torch 2.15.
HAS_FINALIZATION = hasattr(torch_fsdp, "GradientReductionHandle")
_TorchGradientReductionHandle: Any = getattr(torch_fsdp, "GradientReductionHandle", object)


class UnshardHandle(TorchUnshardHandle):
    """An all-gather in flight.

    Args:
        units: the units that are gathered.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units

    def wait(self) -> None:
        """Make the current stream wait, and register the unsharded parameters.

        It does nothing for units that have run since, were resharded, or were waited for already.
        """
        units, self._units = self._units, ()
        for unit in units:
            if unit.root is not None:
                unit.root.wait_for_unshard(unit)


class GradientReductionHandle(_TorchGradientReductionHandle):  # type: ignore[misc]
    """Gradient reductions in flight.

    Args:
        root: the root of the model whose gradients are reduced; None before the first forward.
        reduction: the result of the root's ``leave_reduction_pending``.
    """

    def __init__(self, root: Root | None = None, reduction: object = None) -> None:
        self._root = root
        self._reduction = reduction

    def wait(self) -> None:
        """Make the current stream wait.

        Raises:
            RuntimeError: if ``reset_iter_state`` has dropped the reductions.
        """
        if self._root is not None:
            self._root.wait_for_pending(self._reduction)
            self._root = None
