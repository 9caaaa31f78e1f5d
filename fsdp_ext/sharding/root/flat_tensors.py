"""A unit's flat shard and flat gradient, for optimizers that step them as a whole."""

from __future__ import annotations

import torch

from fsdp_ext.sharding.root.unit import Unit


def flat_tensors(unit: Unit) -> tuple[torch.Tensor, torch.Tensor]:
    """See :meth:`fsdp_ext.FSDPModule.flat_shard`."""
    dtypes = {param.dtype for param in unit.params}
    grad_dtypes = {unit.grad_dtype(param) for param in unit.params}
    frozen = [param.name for param in unit.params if not param.requires_grad]
    own = [param.name for param in unit.params if not param.is_gathered]
    if own:
        raise ValueError(
            f"flat_shard needs parameters that lie in the flat shard, but those of unit "
            f"'{unit.name}' named {own} have memory of their own, since their class has "
            "fsdp_pre_all_gather. Use its parameters one by one."
        )
    if len(dtypes) != 1 or len(grad_dtypes) != 1 or frozen:
        raise ValueError(
            "flat_shard needs a unit whose parameters have one dtype and are all trained, but "
            f"'{unit.name}' has dtypes {sorted(map(str, dtypes | grad_dtypes))} and the frozen "
            f"parameters {frozen}. Use its parameters one by one."
        )
    if unit.impl is None:
        raise RuntimeError(
            f"flat_shard needs the flat gradient of unit '{unit.name}', which its first "
            "forward makes, so run a forward before."
        )
    dtype = dtypes.pop()
    if any(
        place.shard_offset != place.grad_offset * dtype.itemsize
        for place in unit.impl.layout.placements
    ):
        _, reduce_dtype = unit.grad_dtypes()
        raise ValueError(
            f"flat_shard needs gradients that lie as their parameters do, but those of unit "
            f"'{unit.name}' are reduced in {reduce_dtype}, which needs more padding. Use its "
            f"parameters one by one, or MixedPrecisionPolicy(reduce_dtype={dtype})."
        )
    return unit.flat_shard.view(dtype), unit.impl.share_flat_gradient().view(grad_dtypes.pop())
