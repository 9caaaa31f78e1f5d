"""What ``bucket_bytes="auto"`` and ``prefetch="auto"`` stand for: what ``tune`` has chosen."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from fsdp_ext.sharding.root import Root
    from fsdp_ext.sharding.unit import ParamSlot, Unit

AUTO: Literal["auto"] = "auto"
_logger = logging.getLogger("fsdp_ext")


@dataclass(frozen=True)
class Choice:
    """One way to run a model.

    Args:
        bucket_bytes: of the root: see :func:`fsdp_ext.fully_shard`.
        prefetch: of the root: see there.
        kept: units that stay unsharded after forward, by number; the root's own setting is not in
            it.
    """

    bucket_bytes: int
    prefetch: int
    kept: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return it as arguments."""
        kept = f", {len(self.kept)} units with reshard_after_forward=False" if self.kept else ""
        return f"bucket_bytes={self.bucket_bytes:,}, prefetch={self.prefetch}{kept}"


# By what a model looks like.
_Key = tuple[object, ...]
_chosen: dict[_Key, Choice] = {}


def _key(root: Root) -> _Key:
    def shape_of(slot: ParamSlot) -> tuple[object, ...]:
        return slot.name.rsplit(".", 1)[-1], tuple(slot.shape), slot.local.dtype

    def settings_of(unit: Unit) -> tuple[object, ...]:
        policy = unit.mp_policy
        return policy.param_dtype, *unit.grad_dtypes(), unit.reshard_after_forward

    units = tuple((settings_of(unit), *map(shape_of, unit.slots)) for unit in root.units)
    first = root.units[0]
    return (root.lanes.transport, first.transport, first.mesh.size(), first.device.type, units)


def remember(root: Root, choice: Choice, *, memory_known: bool) -> None:
    """Keep what was chosen for models that look like this one, as long as the process lives.

    Args:
        root: of the model that was tuned.
        choice: for it.
        memory_known: whether it keeps units unsharded because there is memory for that; otherwise
            that part of it is of that model alone.
    """
    _chosen[_key(root)] = choice if memory_known else replace(choice, kept=())


def chosen_for(root: Root) -> Choice | None:
    """Return what was chosen for models that look like this one, and say so if nothing was.

    Units stay unsharded only where bucket size and prefetch are "auto", both: with others, what was
    chosen may not fit the memory that it was chosen for.
    """
    found = _chosen.get(_key(root))
    first = root.units[0]
    if found is not None and not (first.bucket_bytes == AUTO and first.prefetch == AUTO):
        found = replace(found, kept=())
    if found is None and first.mesh.get_local_rank() == 0:
        _logger.info(
            "settings are 'auto' but fsdp_ext.tune was not called for such a model yet; it has the "
            "defaults until then"
        )
    return found
