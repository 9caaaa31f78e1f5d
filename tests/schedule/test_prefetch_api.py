"""FSDPModule's methods change when parameters are gathered and freed, but never the numbers."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from support import models
from support.launcher import run_ranks
from support.matrix import exhaustive
from support.models import DIM, Stack, Unit
from support.parity import (
    SYSTEM,
    Case,
    Run,
    Sharded,
    assert_same,
    check,
    each,
    load_system,
    train_step,
    whole,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from fsdp_ext.sharding.api import entry


def prefetch_next_forward(run: Run) -> None:
    if run.sharded:
        order = [run.model, *run.model.blocks]
        for module, following in itertools.pairwise(order):
            module.set_modules_to_forward_prefetch([following])


def prefetch_all_forward(run: Run) -> None:
    if run.sharded:
        run.model.set_modules_to_forward_prefetch(list(run.model.blocks))


def prefetch_wrongly_forward(run: Run) -> None:
    """Prefetch two units ahead, and units that have already run."""
    if run.sharded:
        first, second, third = run.model.blocks
        first.set_modules_to_forward_prefetch([third])
        second.set_modules_to_forward_prefetch([first])


def prefetch_two_backward(run: Run) -> None:
    if run.sharded:
        first, second, third = run.model.blocks
        run.model.set_modules_to_backward_prefetch([third, second])
        third.set_modules_to_backward_prefetch([second, first])


def prefetch_both(run: Run) -> None:
    prefetch_next_forward(run)
    prefetch_two_backward(run)


def reshard_root_too(run: Run) -> None:
    if run.sharded:
        run.model.set_reshard_after_forward(True)


def reshard_nothing(run: Run) -> None:
    if run.sharded:
        run.model.set_reshard_after_forward(False)


def reshard_one_block_less(run: Run) -> None:
    if run.sharded:
        run.model.blocks[1].set_reshard_after_forward(False, recurse=False)


def keep_for_evaluation(run: Run, step: int) -> tuple[Tensor, ...]:
    """Evaluate twice without resharding in between."""
    with torch.no_grad():
        if run.sharded:
            run.model.set_reshard_after_forward(False)
        evaluated = [run.loss(step, 1), run.loss(step, 2)]
        if run.sharded:
            run.model.set_reshard_after_forward(True)
            for block in run.model.blocks:
                block.reshard()
    return *evaluated, *train_step(run, step)


def unshard_ahead(run: Run, step: int) -> tuple[Tensor, ...]:
    """Unshard all units before forward: waited for, not waited for, and synchronous."""
    if run.sharded:
        first, second, third = run.model.blocks
        handles = [first.unshard(async_op=True), second.unshard(async_op=True)]
        third.unshard()
        handles[0].wait()
    return train_step(run, step)


def unshard_and_reshard(run: Run, step: int) -> tuple[Tensor, ...]:
    """Unshard and reshard before forward, and between forward and backward."""
    if run.sharded:
        for block in run.model.blocks:
            block.unshard()
            block.reshard()
    run.optimizer.zero_grad()
    loss = run.loss(step)
    if run.sharded:
        for block in (run.model, *run.model.blocks):
            block.reshard()
    run.backward(loss)
    run.optimizer.step()
    return (loss,)


def unshard_for_one_forward_of_two(run: Run, step: int) -> tuple[Tensor, ...]:
    if step % 2 == 0:
        return unshard_ahead(run, step)
    return train_step(run, step)


def wait_after_forward(run: Run, step: int) -> tuple[Tensor, ...]:
    """Prefetch all units, and wait for them when forward has run them already."""
    if not run.sharded:
        return train_step(run, step)
    units = (run.model, *run.model.blocks)
    run.optimizer.zero_grad()
    handles = [unit.unshard(async_op=True) for unit in units]
    loss = run.loss(step)
    for handle in (*handles, *handles):
        handle.wait()
    run.backward(loss)
    handles += [unit.unshard(async_op=True) for unit in units]
    for unit in units:
        unit.reshard()
    run.optimizer.step()
    for handle in handles:
        handle.wait()
    for unit in units:
        unit.reshard()
    return (loss,)


def wait_late(run: Run, step: int) -> tuple[Tensor, ...]:
    """Wait after an evaluation, inside forward, after the optimizer, and in a later step."""
    if not run.sharded:
        with torch.no_grad():
            evaluated = run.loss(step, 1)
        return evaluated, *train_step(run, step)
    units = (run.model, *run.model.blocks)
    handles = [unit.unshard(async_op=True) for unit in units]
    with torch.no_grad():
        evaluated = run.loss(step, 1)
    handles[1].wait()
    for unit in units:
        unit.reshard()
    hook = run.model.blocks[1].register_forward_hook(lambda *_: handles[2].wait())
    result = train_step(run, step)
    hook.remove()
    handles[3].wait()
    run.kept = [*getattr(run, "kept", ()), handles[0]]
    run.kept[0].wait()
    return evaluated, *result


def gather_ahead(run: Run) -> None:
    """Let the next forward's first gathers begin. FSDP2 has no such method."""
    if run.sharded and run.system.name == "fsdp_ext":
        run.model.prefetch_next_forward()


class ThreeLevels(Stack):
    """Each block is a unit with a unit inside."""

    def units(self) -> list[Unit]:
        return [unit for block in self.blocks for unit in (block.up, block)]


def unshard_innermost_first(run: Run, step: int, *, async_op: bool) -> tuple[Tensor, ...]:
    """Unshard all units, each before the one around it, and reshard one of them again."""
    if run.sharded:
        units = [*run.model.units(), run.model]
        first, *others = units
        handles = [unit.unshard(async_op=async_op) for unit in units[:4]]
        first.reshard()
        handles += [unit.unshard(async_op=async_op) for unit in units[4:]]
        for handle in handles[1:] if async_op else ():
            handle.wait()
        inner = set(first.parameters())
        assert all(isinstance(param, DTensor) for param in inner)
        rest = [param for unit in others for param in unit.parameters() if param not in inner]
        assert not any(isinstance(param, DTensor) for param in rest)
    values = [whole(param) for param in run.model.parameters()]
    return *values, *train_step(run, step)


class SharesAWeight(Stack):
    """The last layer computes with the weight of a unit whose forward does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(DIM, DIM)

    def units(self) -> list[Unit]:
        return [self.tied, *self.blocks]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(super().forward(x), self.tied.weight, self.tied.bias)


def unshard_what_runs_no_forward(run: Run, step: int) -> tuple[Tensor, ...]:
    if run.sharded:
        run.model.tied.unshard()
    return train_step(run, step)


def finish_gathers(run: Run) -> None:
    """Wait for gathers in flight, which read the shards, before these are written."""
    if next(run.model.parameters()).is_cuda:
        torch.cuda.synchronize()


def gather_ahead_of_each_forward(run: Run, step: int) -> tuple[Tensor, ...]:
    gather_ahead(run)
    with torch.no_grad():
        evaluated = run.loss(step, 1)
    gather_ahead(run)
    run.optimizer.zero_grad()
    loss = run.loss(step)
    gather_ahead(run)  # between forward and backward
    run.backward(loss)
    gather_ahead(run)  # before the step, so forward gathers again
    finish_gathers(run)
    run.optimizer.step()
    gather_ahead(run)
    return evaluated, loss


def change_what_was_gathered_ahead(run: Run, step: int) -> tuple[Tensor, ...]:
    """Change parameters in all ways after their gathers have begun."""
    result = list(train_step(run, step))
    params = list(run.model.parameters())
    changes = [
        lambda: [param.mul_(0.5) for param in params[::2]],
        lambda: run.model.load_state_dict(
            {name: tensor * 2 for name, tensor in run.model.state_dict().items()}
        ),
        lambda: run.optimizer.step(),
        lambda: [param.data.mul_(0.75) for param in params],
    ]
    gather_ahead(run)
    finish_gathers(run)
    with torch.no_grad():
        changes[step % len(changes)]()
    if run.sharded:
        if step % len(changes) == 3:
            for unit in (run.model, *run.model.blocks):
                unit.reshard()
        if step == 2:
            run.model.set_reshard_after_forward(False)
    return tuple(result)


CASES = [
    Case("parameters that change after their gathers", Stack, step=change_what_was_gathered_ahead,
         steps=6),
    Case("forward prefetch of the next unit", Stack,
         after_sharding=prefetch_next_forward),
    Case("forward prefetch of all units", Stack, after_sharding=prefetch_all_forward),
    Case("forward prefetch of the wrong units", Stack, after_sharding=prefetch_wrongly_forward),
    Case("gathers ahead of forward", Stack, step=gather_ahead_of_each_forward, steps=3),
    Case("backward prefetch of two units", Stack, after_sharding=prefetch_two_backward),
    Case("prefetch in both directions", Stack, after_sharding=prefetch_both),
    Case("prefetch of what is frozen or unused", models.UnusedParameters,
         after_sharding=prefetch_both),
    Case("set_reshard_after_forward(True)", Stack, after_sharding=reshard_root_too),
    Case("set_reshard_after_forward(False)", Stack, after_sharding=reshard_nothing),
    Case("set_reshard_after_forward(False) of one unit", Stack,
         after_sharding=reshard_one_block_less),
    Case("set_reshard_after_forward(False) for evaluation", Stack, step=keep_for_evaluation),
    Case("units unsharded before the forward", Stack, step=unshard_ahead),
    Case("units unsharded before every other forward", Stack, step=unshard_for_one_forward_of_two),
    *(
        Case(f"units unsharded from the innermost on, {kind}", ThreeLevels,
             step=partial(unshard_innermost_first, async_op=async_op))
        for kind, async_op in (("each waited for", False), ("all in flight", True))
    ),
    Case("a unit that is unsharded by hand and runs no forward", SharesAWeight,
         step=unshard_what_runs_no_forward),
    Case("handles that are waited for after forward", Stack, step=wait_after_forward),
    Case("handles that are waited for late", Stack, step=wait_late),
    Case("units resharded between forward and backward", Stack, step=unshard_and_reshard),
]  # fmt: skip


@each(CASES, every=3)
def test_numbers_do_not_change_with(case: Case, world_size: int) -> None:
    check(case, world_size)


STACK = Case("", Stack)


def _sharded() -> Sharded:
    return Sharded(load_system(SYSTEM), STACK)


def _gathers_ahead_inside_passes() -> None:
    run = _sharded()
    run.model.prefetch_next_forward()  # nothing is known before the first forward
    train_step(run, 0)
    block = run.model.blocks[1]
    for register, phase in (
        (block.register_forward_pre_hook, "forward"),
        (block.register_full_backward_hook, "backward"),
    ):
        hook = register(lambda *_: run.model.prefetch_next_forward())
        with pytest.raises(RuntimeError, match=f"was called while {phase} runs. Call it after the"):
            train_step(run, 1)
        hook.remove()
        train_step(run, 2)


def test_gathers_ahead_inside_of_a_forward_or_backward_are_refused() -> None:
    run_ranks(_gathers_ahead_inside_passes, 1)


def _attributes_while_unsharded_by_hand(async_op: bool) -> None:
    torch.manual_seed(0)
    expected = dict(Stack().blocks[0].named_parameters())
    block = _sharded().model.blocks[0]
    sharded = dict(block.named_parameters())
    assert all(isinstance(parameter, DTensor) for parameter in sharded.values())

    handle = block.unshard(async_op=async_op)
    if async_op:
        handle.wait()
        handle.wait()  # a second call is no error
    else:
        assert handle is None
    unsharded = dict(block.named_parameters())
    assert not any(isinstance(parameter, DTensor) for parameter in unsharded.values())
    assert all(isinstance(parameter, nn.Parameter) for parameter in unsharded.values())
    assert_same("unsharded parameters", dict(expected), dict(unsharded))
    assert block.up.weight is unsharded["up.weight"]
    assert block.unshard() is None  # a second call changes nothing
    assert block.up.weight is unsharded["up.weight"]

    block.reshard()
    block.reshard()
    assert all(sharded[name] is parameter for name, parameter in block.named_parameters())
    assert block.up.weight is sharded["up.weight"]


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, *exhaustive(3)])
def test_unshard_gives_the_unit_its_full_parameters_and_reshard_takes_them(
    world_size: int, async_op: bool
) -> None:
    run_ranks(_attributes_while_unsharded_by_hand, world_size, async_op)


def _unshards_what_an_evaluation_kept() -> None:
    run = _sharded()
    run.model.set_reshard_after_forward(False)
    with torch.no_grad():
        run.loss(0)
        for parameter in run.model.parameters():
            parameter.mul_(0.5)
    block = run.model.blocks[0]
    expected = {name: whole(parameter) for name, parameter in block.named_parameters()}
    block.unshard()
    assert_same("unsharded parameters", expected, dict(block.named_parameters()))


def test_unshard_after_an_evaluation_reads_the_parameters_as_they_are_now() -> None:
    run_ranks(_unshards_what_an_evaluation_kept, 2)


def _what_is_unsharded() -> None:
    run = _sharded()

    def unsharded() -> list[str]:
        return [
            name
            for name, parameter in run.model.named_parameters()
            if not isinstance(parameter, DTensor) and name.endswith(("up.weight", "stem.weight"))
        ]

    seen: list[list[str]] = []
    for block in run.model.blocks:
        block.norm.register_forward_hook(lambda *_: seen.append(unsharded()))
    loss = run.loss(0)
    assert seen == [["stem.weight", f"blocks.{index}.up.weight"] for index in range(3)]
    assert unsharded() == ["stem.weight"], "the root stays unsharded until backward, no unit does"
    run.backward(loss)
    assert unsharded() == []

    run.model.set_reshard_after_forward(True)
    loss = run.loss(0)
    assert unsharded() == []
    run.backward(loss)

    run.model.set_reshard_after_forward(False)
    loss = run.loss(0)
    assert len(unsharded()) == 4
    run.model.set_reshard_after_backward(False)
    run.backward(loss)
    assert len(unsharded()) == 4
    run.model.set_reshard_after_backward(True)
    run.backward(run.loss(0))
    assert unsharded() == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_units_are_unsharded_when_they_run_and_kept_as_set(world_size: int) -> None:
    run_ranks(_what_is_unsharded, world_size)


def _class_and_parameters(with_mesh: bool) -> None:
    system = load_system(SYSTEM)
    torch.manual_seed(0)
    model = Stack()
    whole_parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    world_size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("data",)) if with_mesh else None
    for block in model.blocks:
        assert system.fully_shard(block, mesh=mesh) is block
    pair = [model.stem, model.head]
    assert system.fully_shard(pair, mesh=mesh) is pair
    assert system.fully_shard(model, mesh=mesh) is model

    assert isinstance(model, Stack)
    assert type(model).__name__ == "FSDPStack"
    for module in (model, *model.blocks, *pair):
        assert isinstance(module, system.fsdp_module)
    assert not isinstance(model.blocks, system.fsdp_module)
    assert [name for name, _ in model.named_parameters()] == list(whole_parameters)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, DTensor)
        assert parameter.shape == whole_parameters[name].shape
        assert parameter.device_mesh.device_type == "cpu"
        assert parameter.device_mesh.size() == world_size
        if with_mesh:
            assert parameter.device_mesh == mesh
        assert torch.equal(whole(parameter), whole_parameters[name])


@pytest.mark.parametrize("with_mesh", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, *exhaustive(3)])
def test_sharding_changes_classes_and_parameters_in_place(world_size: int, with_mesh: bool) -> None:
    run_ranks(_class_and_parameters, world_size, with_mesh)


def _unsharded_before_the_first_forward() -> None:
    system = load_system(SYSTEM)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    weight = model[0].weight.detach().clone()
    inputs = torch.ones(2, 4)
    expected = model(inputs).detach()
    for layer in model:
        system.fully_shard(layer)
    system.fully_shard(model)
    model[0].set_modules_to_forward_prefetch([model[1]])
    model[2].set_modules_to_backward_prefetch([model[1]])
    model[0].unshard()
    assert torch.equal(model[0].weight, weight)
    model[0].set_modules_to_forward_prefetch([model[2]])
    assert torch.equal(model(inputs), expected)


# The unit is prepared alone, without the units that it prefetches.
def test_a_unit_with_a_prefetch_list_can_be_unsharded_before_the_first_forward() -> None:
    run_ranks(_unsharded_before_the_first_forward, 2)


def _early_gathers(options: dict[str, Any], mesh: tuple[int, int] | None) -> None:
    """Two equal models train, one of them with early gathers."""
    with pytest.MonkeyPatch.context() as patched:  # treats the CPU as a GPU
        patched.setitem(vars(entry), "resolve_offload", lambda policy, _: policy is not None)
        case = Case("", Stack, options=options, mesh=mesh)
        early, late = (Sharded(load_system(SYSTEM), case) for _ in range(2))
    for step in range(3):
        expected, got = (run.recorded(train_step(run, step)) for run in (late, early))
        assert_same("without early gathers", expected, got)
        root = early.model._fsdp_ext_unit.root.impl
        before = root.counters()["all_gathers"]
        gather_ahead(early)
        assert root.counters()["all_gathers"] > before


@pytest.mark.parametrize(
    ("options", "mesh", "ranks"),
    [
        pytest.param({}, (2, 2), 4, id="hybrid sharding"),
        pytest.param({"reshard_after_forward": 2}, None, 4, id="smaller groups"),
        pytest.param({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, None, 2, id="offload"),
    ],
)
def test_early_gathers_change_no_numbers_with(
    options: dict[str, Any], mesh: tuple[int, int] | None, ranks: int
) -> None:
    run_ranks(_early_gathers, ranks, options, mesh)
