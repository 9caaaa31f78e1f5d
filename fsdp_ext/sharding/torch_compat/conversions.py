"""``module.to()``, ``to_empty()`` and the like, which convert or replace sharded parameters."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from fsdp_ext.sharding.root.module_state import units_of
from fsdp_ext.sharding.root.unit import Unit
from fsdp_ext.sharding.torch_compat.state_dict_hooks import converting, reshard


@contextlib.contextmanager
def applied(units: Sequence[Unit]) -> Iterator[None]:
    """Let the block, which is ``Module._apply``, work on the units' sharded parameters."""
    with contextlib.ExitStack() as conversions:
        for unit in units:
            reshard_and_forget(unit)
            if unit.impl is not None:
                # torch.utils.swap_tensors wants to be the only holder of gradients.
                unit.impl.release_gradients()
            conversions.enter_context(converting(unit))
        yield


def reshard_and_forget(unit: Unit) -> None:
    """Reshard the unit, and have its next use gather from all ranks again."""
    reshard(unit)
    if unit.root is not None:
        unit.root.forget(unit)


def convert_shards(module: nn.Module) -> None:
    """Let ``_apply`` of a unit's module, which keeps its class, work on the sharded parameters.

    ``FSDPModule`` has such a method in its class. Here the module itself gets this method.
    """
    weakly = weakref.ref(module)

    def _apply(*args: Any, **kwargs: Any) -> Any:
        own: Any = weakly()
        assert own is not None
        with applied(units_of(own)):
            return type(own)._apply(own, *args, **kwargs)

    module.__dict__["_apply"] = _apply
