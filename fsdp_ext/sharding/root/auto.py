"""The meaning of ``bucket_bytes="auto"`` and ``prefetch="auto"``: a choice for each shape of model.

``fsdp_ext.tune`` makes the choices. Choices live as long as the process.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from fsdp_ext.sharding.params.entries import ShardedParam
from fsdp_ext.sharding.params.settings import AUTO, Choice
from fsdp_ext.sharding.root.unit import Unit

# The properties that two models of one shape share.
_Key = tuple[object, ...]
_chosen: dict[_Key, Choice] = {}

_logger = logging.getLogger("fsdp_ext")


def _key(units: Sequence[Unit], transport: str) -> _Key:
    def shape_of(param: ShardedParam) -> tuple[object, ...]:
        return param.name.rsplit(".", 1)[-1], tuple(param.shape), param.dtype

    def settings_of(unit: Unit) -> tuple[object, ...]:
        settings = unit.settings
        return settings.mp_policy.param_dtype, *unit.grad_dtypes(), settings.reshard_after_forward

    shapes = tuple((settings_of(unit), *map(shape_of, unit.params)) for unit in units)
    first = units[0]
    ranks = (first.world_size, first.replicas)
    return (transport, first.settings.transport, ranks, first.device.type, shapes)


def remember(units: Sequence[Unit], transport: str, choice: Choice, *, memory_known: bool) -> None:
    """Use ``choice`` for models of this shape from now on.

    If it was not made for a known amount of memory, other models of this shape do not keep the
    choice's units unsharded.
    """
    _chosen[_key(units, transport)] = (
        choice if memory_known else replace(choice, stays_unsharded=())
    )


def chosen_for(units: Sequence[Unit], transport: str) -> Choice | None:
    """Return the choice for models of this shape. If there is none, log that and return None.

    The choice keeps units unsharded only if both bucket size and prefetch are "auto". With other
    values it may not fit the memory for which it was made.
    """
    found = _chosen.get(_key(units, transport))
    first = units[0]
    if found is None:
        if first.ranks.rank_in_mesh == 0:
            _logger.info(
                "settings are 'auto', but fsdp_ext.tune has not run for a model of this shape yet; "
                "the defaults are used until then"
            )
        return None
    both = first.settings.bucket_bytes == AUTO and first.settings.prefetch == AUTO
    return found if both else replace(found, stays_unsharded=())
