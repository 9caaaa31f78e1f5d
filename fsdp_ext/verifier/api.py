"""``fsdp_ext.verify``: shows whether a model trains sharded as it does unsharded.

fsdp_ext.verify(model, batch, units=Block)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_ext._util.losses import resolve_loss
from fsdp_ext._util.numbers import as_bool
from fsdp_ext.comm.simulated import Simulated
from fsdp_ext.comm.transports import device_of, resolve_transport
from fsdp_ext.planner.units import Units
from fsdp_ext.sharding.api import arguments as of_sharding
from fsdp_ext.verifier import arguments, checks
from fsdp_ext.verifier.checks import Site
from fsdp_ext.verifier.random_state import random_state_kept
from fsdp_ext.verifier.result import Verification
from fsdp_ext.verifier.subject import Subject


def verify(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    units: Units | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen
    reshard_after_forward: bool | int | None = None,
    transport: str | None = None,
    bucket_bytes: int | None = None,
    max_message_bytes: int | tuple[int | None, int | None] | None = None,
    prefetch: int | None = None,
    verbose: bool = True,
) -> Verification:
    """Train sharded copies of a model beside unsharded ones, and report the first difference.

    On every rank, an unsharded copy takes the same steps (forward, backward, plain SGD) as the
    sharded one. Losses, gradients of the batch, buffers and parameters have to agree bit for bit,
    and so do averaged gradients where the transport fixes the order of additions: over shared
    memory and composed collectives, and on one or two ranks with fp32 or fp64. Elsewhere
    gradients of N ranks may differ by ``(N - 1) eps_reduce + 2 eps_grad`` times the sum of the
    ranks' magnitudes, which bounds two sums of different order. If that exceeds half of a rank's
    average part, as in bfloat16 on 9 ranks (8 with gradients in bfloat16), gradients are not tried,
    and the result says so. Then the same is tried with released slots filled with NaN and streams
    that pause, with a unit that every second rank, or a single rank, does not use, with two
    forwards before a backward, and twice, to compare two runs.

    All ranks call this together. Without a process group, this process is the only rank, which has
    nothing to shard or to sum.

    Everything runs on copies: a rank needs memory for about three unsharded models and the
    activations of a step. The model, its gradients and buffers, the batch and the random generators
    are the same afterwards. Losses of ranks are multiplied by different factors, so that no rank's
    own gradient is the average.

    Args:
        model: the model before ``fully_shard``, with the same parameters on all ranks.
        batch: the model's arguments: a tensor, a tuple, or a mapping of keywords. Ranks may have
            different ones.
        loss: makes a scalar of the model's output; by default the mean of its floating-point
            tensors. It does not change its argument.
        units: the modules that become units besides the model itself: classes, modules, or a
            function that takes a module and returns whether it becomes a unit.
        mp_policy: as for ``fully_shard``. The unsharded copy computes in the same dtypes.
        reshard_after_forward: as for ``fully_shard``; of all units.
        transport: a name, as for ``fully_shard``.
        bucket_bytes: as for ``fully_shard``.
        max_message_bytes: as for ``fully_shard``.
        prefetch: as for ``fully_shard``.
        verbose: print the result on the first rank.

    Returns:
        What was tried, what differs, and whether it is ``ok``. It is the same on all ranks, except
        for the numbers of values.

    Raises:
        TypeError: if an argument has a wrong type, or the loss is not a tensor.
        ValueError: if the model is sharded already, has parameters on meta, or cannot be copied,
            or another argument cannot be used, or ranks have different parameters, or the loss or a
            gradient is NaN or infinite without sharding, or the model is not on the CPU and there
            is no process group.
        Exception: any error of the unsharded model.
    """
    arguments.check_model(model)
    verbose = as_bool("verify", "verbose", verbose)
    loss = resolve_loss(loss, "verify")
    if isinstance(transport, Simulated):
        raise TypeError(
            "verify got a Simulated transport, which moves no data, so nothing could be compared. "
            "Leave transport out."
        )
    settings = {
        "mp_policy": mp_policy,
        "reshard_after_forward": reshard_after_forward,
        "transport": transport,
        "bucket_bytes": bucket_bytes,
        "max_message_bytes": max_message_bytes,
        "prefetch": prefetch,
    }
    with random_state_kept(), _process_group(model):
        mesh = of_sharding.resolve_mesh(None, (param.device for param in model.parameters()))
        # Wrong arguments are refused before copies are made.
        of_sharding.check_policy(mp_policy)
        of_sharding.reshard_over(reshard_after_forward, mesh.size())
        resolve_transport(transport, mesh.device_type)
        of_sharding.check_numbers(bucket_bytes, max_message_bytes, prefetch)
        names = arguments.names_of_units(model, units)
        device = device_of(mesh.device_type)
        subject = Subject(model, batch, loss, names, settings, device)
        arguments.check_copy(subject)
        site = Site(subject, mesh)
        checks.check_same_parameters(site)
        checks.check_first_loss(site)
        found = tuple(checks.run_checks(site))
        result = Verification(type(model).__name__, mesh.size(), len(names) + 1, found)
        if verbose and dist.get_rank() == 0:
            print(result)
    return result


@contextlib.contextmanager
def _process_group(model: nn.Module) -> Iterator[None]:
    """Make a process group of one rank meanwhile, if there is none."""
    if dist.is_initialized():
        yield
        return
    arguments.check_is_on_host(model)
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
