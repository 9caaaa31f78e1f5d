"""``fsdp_ext.tune``: chooses bucket size, prefetch and what stays unsharded, by measurement."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fsdp_ext._util.losses import mean_of_output
from fsdp_ext.comm.inline_group import refuse_inline_group
from fsdp_ext.sharding.agreement import together
from fsdp_ext.sharding.auto import remember
from fsdp_ext.sharding.meshes import refuse_several_meshes
from fsdp_ext.sharding.root import running_root
from fsdp_ext.tuner.arguments import agreed_limit, check_arguments, check_state, units_of
from fsdp_ext.tuner.candidates import TunableSettings
from fsdp_ext.tuner.result import Tuning
from fsdp_ext.tuner.search import Search
from fsdp_ext.tuner.trial import Trial, left_as_it_was


def tune(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    memory_limit: int | None = None,
    optimizer_states: int = 2,
    steps: int = 8,
    verbose: bool = True,
) -> Tuning:
    """Choose bucket size, prefetch depth and which units stay unsharded, and apply the choice.

    ``tune`` runs steps (forward and backward, without the optimizer) to measure the times of units
    and collectives. It predicts all settings with a model of the schedule
    (:func:`fsdp_ext.planner.schedule.predict`), measures the most promising ones, and keeps the
    fastest. Of settings that are equally fast it keeps the one with least memory. That takes about
    40 * (steps + 2) steps, 400 by default. The logger "fsdp_ext" reports progress at level INFO.

    All ranks call this together and choose the same setting, within the smallest of their memory
    limits. If one rank fails between collectives, all ranks raise. A setting that some rank has no
    memory for is dropped. But if one rank alone runs out of memory inside a step, the others wait
    in its next collective until the timeout, as in training.

    Parameters, buffers, gradients of the batch and the random state are the same afterwards, for
    which ``tune`` holds a copy of shards and buffers. Parameters are restored even if hooks of the
    model run an optimizer in backward, but the states of that optimizer are not.

    ``tune`` keeps the numbers that were passed to ``fully_shard``, and chooses what was None or
    "auto". A model that is made later in this process with the same units, dtypes and ranks starts
    with this choice where it has ``bucket_bytes="auto"`` or ``prefetch="auto"``. If it has both and
    a memory limit was given here, the same units stay unsharded, too.

    Args:
        model: the root module, which ``fully_shard`` was applied to; without gradients.
        batch: the model's arguments: a tensor, a tuple, or a mapping of keywords. It should be as
            large as in training.
        loss: makes a scalar of the model's output; by default the mean of its floating-point
            tensors.
        memory_limit: bytes that a rank may hold without activations, as :func:`fsdp_ext.plan`
            counts them. No setting that needs more is tried, except the one in use before. With a
            limit, units may stay unsharded after forward if that is faster. Without one, no more
            units stay unsharded than before, and settings may need up to 1.25 times the memory of
            the one before.
        optimizer_states: how many tensors of its size the optimizer keeps for each parameter; 2 for
            AdamW.
        steps: how many steps each measurement takes.
        verbose: print the result on the first rank.

    Returns:
        The chosen setting, the setting before, and all measurements.

    Raises:
        TypeError: if ``fully_shard`` was not applied to the model, an argument has the wrong type,
            or the loss is not a tensor.
        NotImplementedError: if the model has several meshes.
        ValueError: if parameters have gradients, gradients are not reduced, the model is not the
            root, no setting fits ``memory_limit``, a number is out of range or differs between
            ranks, or the loss is not a scalar.
        RuntimeError: if another rank raised anything else, or memory ran out with the setting
            before or with all others.
    """
    units = units_of(model)
    refuse_inline_group(units[0].ranks.group, units[0].device, "tune")
    refuse_several_meshes(units, "tune")
    with together(units[0], "tune", "its arguments"):
        check_arguments(loss, memory_limit, optimizer_states, steps, verbose)
        check_state(model, units)
    memory_limit = agreed_limit(units[0], memory_limit, optimizer_states, steps)
    trial = Trial(model, batch, loss or functools.partial(mean_of_output, caller="tune"), units[0])
    with left_as_it_was(model, batch, units):
        trial.first_step()  # makes the root
        trial.first_step()  # makes buckets in the order of forward
        root = running_root(model, "tune")
        settings = TunableSettings(root)
        try:
            search = Search(root, settings, trial.step, steps, optimizer_states)
            result = search.run(memory_limit)
        except BaseException:
            settings.restore()
            raise
    remember(
        root.units,
        root.lanes.transport,
        result.chosen.choice,
        memory_known=memory_limit is not None,
    )
    if verbose and units[0].ranks.rank_in_mesh == 0:
        print(result, file=sys.stdout)
    return result
