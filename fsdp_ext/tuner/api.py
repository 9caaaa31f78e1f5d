"""``fsdp_ext.tune``: measures, and chooses bucket size, prefetch and unsharded units."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fsdp_ext._util.losses import resolve_loss
from fsdp_ext.comm.inline_group import is_inline, refuse_inline
from fsdp_ext.planner.units import PlannedRanks, units_of_sharded
from fsdp_ext.sharding.params.settings import Choice, Decision
from fsdp_ext.sharding.root.agreement import called_by_ranks_of, together
from fsdp_ext.sharding.root.meshes import refuse_several_meshes
from fsdp_ext.sharding.root.root import Root, running_root
from fsdp_ext.tuner.arguments import agreed_limit, check_arguments, check_state, units_of
from fsdp_ext.tuner.candidates import WORTH, choices, predict_all, shortlist
from fsdp_ext.tuner.costs import measure_costs
from fsdp_ext.tuner.policies import measure_policies
from fsdp_ext.tuner.result import Tuning
from fsdp_ext.tuner.trial import Trial, left_as_it_was

# Without a memory limit, settings may need this many times the memory of the previous setting.
_GROWTH = 1.25


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

    ``tune`` measures the model's compute and collectives in forward and backward, predicts all
    settings with a model of the schedule (:func:`fsdp_ext.planner.schedule.predict`), and races the
    previous one and the best three others in real steps. It keeps the fastest setting; among
    equally fast ones, the one that needs least memory. This takes about 25 * (steps + 2) steps. The
    logger "fsdp_ext" reports progress at level INFO. ``tune`` calls no optimizer, and restores
    buffers and torch's random state. If the model's own code writes into parameters, these writes
    stay.

    All ranks call this together and choose the same setting. If one rank fails between collectives,
    all ranks raise. A setting that some rank has no memory for is dropped. But if one rank alone
    runs out of memory inside a step, the others wait until the timeout, as in training.

    Over NCCL, ``tune`` also times a bucket's gather and reduction with each
    ``cta_policy``, and says which environment variable to set for the next run. It does not apply
    the policy, because a process makes its communicators once.

    ``tune`` keeps the numbers that were passed to ``fully_shard``, and chooses settings that were
    None. Pass the numbers that it prints to ``fully_shard`` of the next model.

    Args:
        model: the root module, which ``fully_shard`` was applied to; without gradients.
        batch: the model's arguments: a tensor, a tuple, or a mapping of keywords. It should be as
            large as in training.
        loss: makes a scalar of the model's output; by default the mean of its floating-point
            tensors.
        memory_limit: bytes that a rank may hold without activations, as :func:`fsdp_ext.plan`
            counts them without ``optimizer_fused``; the smallest of all ranks counts. Settings that
            need more are not run, except the one in use before. With a limit, more units may stay
            unsharded after forward. Without a limit, no more units do, and memory may grow to 1.25
            times as much.
        optimizer_states: how many tensors of its size the optimizer keeps for each parameter; 2 for
            AdamW.
        steps: how many steps each measurement takes.
        verbose: print the result on the first rank.

    Raises:
        TypeError: if ``fully_shard`` was not applied to the model, an argument has the wrong type,
            or the loss is not a tensor.
        NotImplementedError: if the model has several meshes, or units gathered by smaller groups.
        ValueError: if the model is not the root, has gradients, an attached optimizer or hooks
            behind gradient accumulation, or was told not to gather or reduce in each step, no
            setting fits ``memory_limit``, a number is out of range or differs between ranks, or
            the loss is not a scalar.
        RuntimeError: if a rank does not call it, another rank raised anything else, or memory ran
            out while costs were measured or with the setting before, or with all others while that
            one exceeds ``memory_limit``.
    """
    units = units_of(model)
    on_host = units[0].device.type == "cpu"
    # This comes before ranks compare arguments, because such a group may lack the collectives.
    refuse_inline(on_host and is_inline(units[0].ranks.shard_group), "tune")
    refuse_several_meshes(units, "tune")
    called = called_by_ranks_of(units[:1], "tune", with_replicas=True)
    with called, together(units[0], "tune", "its arguments"):
        loss = resolve_loss(loss, "tune")
        check_arguments(memory_limit, optimizer_states, steps, verbose)
        check_state(model, units)
    memory_limit = agreed_limit(units[0], memory_limit, optimizer_states, steps)
    trial = Trial(model, batch, loss, units[0], steps)
    with left_as_it_was(model, units):
        checked = functools.partial(together, units[0], "tune")
        trial.step(checked)  # makes the root
        trial.step(checked)  # makes buckets in the order of forward
        root = running_root(model, "tune")
        decision = root.decision
        try:
            result = _choose(root, trial, memory_limit, optimizer_states)
            root.decide(Decision(result.chosen.choice))
        except BaseException:
            root.decide(decision)
            raise
    if verbose and units[0].ranks.rank_in_mesh == 0:
        print(result)
    return result


def _choose(root: Root, trial: Trial, memory_limit: int | None, optimizer_states: int) -> Tuning:
    """Return the fastest setting, the same on all ranks."""
    now = root.settings
    in_use = Choice(now.bucket_bytes[0], now.prefetch, now.stays_unsharded)
    every = choices(root, in_use, memory_limit is not None)
    ranks = PlannedRanks(root.units[0].world_size, root.units[0].replicas)
    copied = units_of_sharded(root.module, ranks)  # raises if the model cannot be planned
    costs = measure_costs(root, trial, in_use.stays_unsharded)
    predicted = predict_all(root, copied, every, costs, optimizer_states)
    found = {one.choice: one for one in predicted}
    limit = round(_GROWTH * found[in_use].memory) if memory_limit is None else memory_limit
    fitting = [one for one in found.values() if one.memory <= limit]
    if not fitting:
        least = min(found.values(), key=lambda one: one.memory)
        raise ValueError(
            f"tune found no setting within {limit:,} bytes. Pass a memory_limit of at least "
            f"{least.memory:,} bytes, which {least.choice} needs without activations, or use more "
            "ranks or smaller units."
        )
    racing = [*(one.choice for one in shortlist(fitting, in_use)), in_use]
    medians = trial.race(root, racing, {in_use})
    ranked = sorted(medians, key=medians.__getitem__)
    measured = [replace(found[choice], measured=medians[choice]) for choice in ranked]
    allowed = [one for one in measured if one.memory <= limit]
    if not allowed:
        raise RuntimeError(
            "tune ran out of memory with each setting that it tried, and the one before needs more "
            f"than memory_limit={limit:,}. Use a smaller batch or more ranks."
        )
    as_fast = [one for one in allowed if one.measured <= allowed[0].measured * (1 + WORTH)]
    chosen = min(as_fast, key=lambda one: (one.memory, one.measured))
    return Tuning(
        chosen=chosen,
        before=next(one for one in measured if one.choice == in_use),
        measured=tuple(measured),
        considered=len(found),
        too_large=len(found) - len(fitting),
        costs=costs,
        simulated=root.lanes.is_simulated,
        policies=measure_policies(root, chosen.buckets, trial.steps),
    )
