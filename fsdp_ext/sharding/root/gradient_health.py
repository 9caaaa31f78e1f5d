"""``health``: the norm and the finiteness of each unit's gradients, and the origin of a NaN."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_ext._util.tables import columns
from fsdp_ext.sharding.root.root import Root, running_root
from fsdp_ext.sharding.root.step_checks import in_words
from fsdp_ext.sharding.root.unit import Unit

_EXCHANGE = "the exchange of health"


@dataclass(frozen=True)
class UnitHealth:
    """The gradients of one unit.

    Args:
        name: the unit's name in the root module.
        gradient_norm: the 2-norm of its reduced gradients, over all ranks.
        nonfinite: how many elements of its reduced gradients are NaN or Inf, over all ranks.
        born_on: the ranks whose own gradients, before they were reduced, had a NaN or Inf, as
            packing has marked: Note [NaN and Inf] in ``csrc/core/reduce/nonfinite_gradients.h``.
    """

    name: str
    gradient_norm: float
    nonfinite: int
    born_on: tuple[int, ...]


@dataclass(frozen=True)
class Health:
    """What :func:`fsdp_ext.health` returns. Printing it shows a table.

    Args:
        units: the units, in the order in which backward completes them.
    """

    units: tuple[UnitHealth, ...]

    @property
    def gradient_norm(self) -> float:
        """The 2-norm of all gradients, which ``clip_grad_norm_`` also returns."""
        return math.hypot(*(unit.gradient_norm for unit in self.units))

    @property
    def first_nonfinite(self) -> UnitHealth | None:
        """The first unit in backward with a NaN or Inf; None if there is none."""
        return next((unit for unit in self.units if unit.nonfinite), None)

    def __str__(self) -> str:
        """Return a table of the units, and a sentence about the first one that is not finite."""
        header = ("unit", "gradient norm", "not finite", "born on ranks")
        rows = [
            (
                unit.name,
                f"{unit.gradient_norm:.6g}",
                f"{unit.nonfinite:,}",
                ", ".join(map(str, unit.born_on)) or "-",
            )
            for unit in self.units
        ]
        return "\n".join([*columns(header, rows), self._verdict()])

    def _verdict(self) -> str:
        first = self.first_nonfinite
        if first is None:
            return f"All gradients are finite. Their norm is {self.gradient_norm:.6g}."
        where = f"The first unit in backward with NaN or Inf is '{first.name}'"
        if first.born_on:
            return f"{where}, on {in_words(first.born_on)}."
        return (
            f"{where}, but no rank's own gradients had one in the last backward. The sum over "
            "ranks overflowed, or an earlier backward's gradients were not finite."
        )


def health(model: nn.Module) -> Health:
    """Return norms and counts of non-finite elements, for the gradients of the last backward.

    All ranks call it, after a backward and before ``zero_grad``. It reads each rank's own shards
    once, and exchanges three numbers for each unit. With tensor parallelism the numbers are those
    of the ranks that share this rank's part.

    Args:
        model: the root module, which has run forward, or FSDP1's wrapper of one.

    Raises:
        TypeError: if ``fully_shard`` was not applied to ``model``.
        RuntimeError: before the first forward, while reductions are in flight, if gradients of a
            backward without gradient sync are not reduced yet, or if an attached optimizer has used
            the gradients up.
    """
    root = running_root(model, "health")
    if any(unit.settings.update is not None for unit in root.units):
        raise RuntimeError(
            "health got a model that an attached optimizer steps in backward, so its gradients no "
            "longer exist. Call detach() of the optimizer before the backward to look at."
        )
    if not root.waits_for_reductions:
        raise RuntimeError(
            "health needs reduced gradients, but the model's backward does not wait for them. Call "
            "set_is_last_backward(True) and set_manual_backward_finalization(False) before it."
        )
    mine = array("d")
    for unit, is_born in zip(root.units, root.impl.units_with_nonfinite(), strict=True):
        mine.extend((*_numbers_of(unit), is_born))
    mine.append(root.impl.has_unreduced())
    of_ranks = [array("d", message) for message in root.impl.all_gather(_EXCHANGE, mine.tobytes())]
    if any(numbers[-1] for numbers in of_ranks):
        raise RuntimeError(
            "health needs reduced gradients, but a backward without gradient sync has left some "
            "that are not. Call it after a backward with set_requires_gradient_sync(True)."
        )
    units = []
    for number in _backward_order(root):
        of_unit = [numbers[3 * number : 3 * number + 3] for numbers in of_ranks]
        of_group = of_unit[: root.mesh_ranks.group_size]  # its ranks have all shards
        norm = math.hypot(*(norm for norm, _, _ in of_group))
        nonfinite = int(sum(count for _, count, _ in of_group))
        born_on = tuple(
            rank
            for rank, (_, _, is_born) in zip(root.mesh_ranks.numbers, of_unit, strict=False)
            if is_born and nonfinite > 0
        )
        units.append(UnitHealth(root.units[number].name, norm, nonfinite, born_on))
    return Health(tuple(units))


@torch.no_grad()
def _numbers_of(unit: Unit) -> tuple[float, float]:
    """Return the norm and the number of non-finite elements of this rank's gradient shards."""
    flat = unit.flat_param  # its padding is zero
    owners = [param.sharded for param in unit.params] if flat is None else [flat.param]
    gradients = [
        owner.grad.to_local() if isinstance(owner.grad, DTensor) else owner.grad
        for owner in owners
        if owner.grad is not None
    ]
    norms = [
        torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
        for gradient in gradients
        if gradient.numel() > 0
    ]
    if not norms:
        return 0.0, 0.0
    norm = math.hypot(*torch.stack(norms).tolist())
    if math.isfinite(norm):
        return norm, 0.0
    counts = [(~gradient.isfinite()).sum() for gradient in gradients]
    return norm, float(torch.stack(counts).sum().item())


def _backward_order(root: Root) -> list[int]:
    """Return the units' numbers in the reverse of the order in which forward runs them."""
    root.impl.form_buckets()  # there may be none yet after parameters were replaced
    order = [number for bucket in root.impl.buckets() for number in bucket["units"]]
    return order[::-1]
