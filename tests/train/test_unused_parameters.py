"""Ranks that use different parameters: experts, towers, units that a rank leaves out."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.launcher import RanksFailed, run_ranks
from support.matrix import exhaustive
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp_ext

DIM = 6
STEPS = 4
TRANSPORTS = ["shared_memory", "process_group"]
FIRST_OF_TRANSPORTS = ["shared_memory", *exhaustive("process_group")]


class Experts(nn.Module):
    """A block that uses one of its experts. Its first parameters see an input without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(DIM, DIM)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return F.gelu(self.shared(x)) + self.experts[expert](x)


class Routed(nn.Module):
    """Two towers of experts, side by side, and a head in the root. Expert 2 is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(Experts() for _ in range(2))
        self.right = nn.ModuleList(Experts() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(DIM))
        self.head = nn.Linear(2 * DIM, 3)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        left, right = x, x
        for block in self.left:
            left = block(left, expert)
        for block in self.right:
            right = block(right, 1 - expert)
        both = torch.cat([left, right], dim=-1)
        if expert == 0:
            both = both * torch.cat([self.scale, self.scale])
        return self.head(both)

    def units(self) -> list[nn.Module]:
        return [*self.left, *self.right]


class Skipped(nn.Module):
    """A stack whose middle block some ranks leave out, with another unit inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.block = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, skips: bool, joins: bool = False) -> Tensor:
        x = self.first(x)
        if not skips:
            x = self.block(x)
        elif joins:
            x = self.block.join_empty(x)
        return self.last(x)

    def units(self) -> list[nn.Module]:
        return [self.first, self.block[2], self.block, self.last]


def shard(model: nn.Module, transport: str, **settings: object) -> nn.Module:
    for unit in model.units():
        fsdp_ext.fully_shard(unit, transport=transport, **settings)
    return fsdp_ext.fully_shard(model, transport=transport, **settings)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(5, DIM, generator=torch.Generator().manual_seed(10 * step + rank))


def average_gradients(
    replicas: list[nn.Module], ranks_of_a_set: int | None = None
) -> dict[str, Tensor | None]:
    """The gradients of all ranks' replicas, averaged; None where no replica has one.

    Gradients are added up within each set of ranks that shards the model, then over the sets.
    """
    ranks = ranks_of_a_set or len(replicas)
    averages: dict[str, Tensor | None] = {}
    for name, _ in replicas[0].named_parameters():
        grads = [dict(replica.named_parameters())[name].grad for replica in replicas]
        sums = []
        for first in range(0, len(grads), ranks):
            used = [grad for grad in grads[first : first + ranks] if grad is not None]
            sums += [sum(used)] if used else []
        averages[name] = sum(sums) / len(replicas) if sums else None
    return averages


def compare(model: nn.Module, expected: dict[str, Tensor | None]) -> None:
    for name, param in model.named_parameters():
        grad, wanted = param.grad, expected[name]
        assert (grad is None) == (wanted is None), name
        if wanted is not None:
            assert isinstance(grad, DTensor)
            assert torch.equal(grad.full_tensor(), wanted), name


class Aside(nn.Module):
    """Ranks that do not run the block join it. A caller changes what they get, or cuts it off."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.block = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM))
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, skips: bool, then: str) -> Tensor:
        x = self.first(x)
        if not skips:
            y = self.block(x)
        else:
            y = self.block.join_empty(x) if hasattr(self.block, "join_empty") else x.clone()
        if then == "is detached":
            return self.last(x + y.detach())
        if then == "changes":
            y.mul_(0.5)
        return self.last(y)

    def units(self) -> list[nn.Module]:
        return [self.first, self.block[1], self.block, self.last]


class ChangesInput(nn.Module):
    """Callers change in place what a block returns. On some ranks this is the block's input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.block = Maybe()
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        y = self.block(self.first(x), skips)
        y.mul_(0.5)
        return self.last(y)

    def units(self) -> list[nn.Module]:
        return [self.first, self.block, self.last]


class Maybe(nn.Linear):
    def __init__(self) -> None:
        super().__init__(DIM, DIM)

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        return x if skips else super().forward(x)


class Region(nn.Module):
    """Recomputes a part of itself, in front of a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.unit = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.unit(checkpoint(self.inner, x, use_reentrant=True))


class RunsRegions(nn.Module):
    """Some ranks run the block once, and others twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.block = Region()

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        x = self.first(x)
        if not skips:
            x = self.block(x)
        elif hasattr(self.block, "join_empty"):
            x = self.block.join_empty(x)
        return self.block(x)

    def units(self) -> list[nn.Module]:
        return [self.first, self.block.unit, self.block]


def train(
    transport: str,
    make: Callable[[], nn.Module],
    run: Callable[[nn.Module, int, int], Tensor],
    run_reference: Callable[[nn.Module, int, int], Tensor],
    settings: dict[str, object],
    reduces_unused: bool = False,
    mesh: tuple[int, ...] | None = None,
) -> None:
    """Train sharded and as one replica a rank, and compare gradients and parameters."""
    torch.manual_seed(0)
    reference = make()
    if mesh is not None:
        settings = {**settings, "mesh": init_device_mesh("cpu", mesh)}
    model = shard(copy.deepcopy(reference), transport, **settings)
    if reduces_unused:
        model.set_reduce_scatter_unused_params(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for step in range(STEPS):
        replicas = [copy.deepcopy(reference) for _ in range(dist.get_world_size())]
        for rank, replica in enumerate(replicas):
            run_reference(replica, step, rank).square().mean().backward()
        expected = average_gradients(replicas, None if mesh is None else mesh[-1])
        run(model, step, dist.get_rank()).square().mean().backward()
        if reduces_unused:  # what no rank uses has zeros then
            for name, param in reference.named_parameters():
                if expected[name] is None:
                    expected[name] = torch.zeros_like(param)
        compare(model, expected)
        for name, param in reference.named_parameters():
            param.grad = expected[name]
        reference_optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
    for (name, param), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), wanted), name


def run_routed(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(batch(step, rank), (rank + step // 2) % 2)


@pytest.mark.parametrize("transport", FIRST_OF_TRANSPORTS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"bucket_bytes": 1 << 20}, {"max_message_bytes": 200}],
    ids=["units", "one bucket", "messages"],
)
def test_a_parameter_that_any_rank_uses_gets_its_gradient(
    transport: str, settings: dict[str, object]
) -> None:
    run_ranks(train, 2, transport, Routed, run_routed, run_routed, settings)


class Recurrent(nn.Module):
    """Runs one block twice, each time with another expert on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.block = Experts()
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, experts: tuple[int, int]) -> Tensor:
        x = self.first(x)
        for expert in experts:
            x = self.block(x, expert)
        return self.last(x)

    def units(self) -> list[nn.Module]:
        return [self.first, self.block, self.last]


def run_recurrent(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(batch(step, rank), (0, (rank + step) % 2))


@pytest.mark.parametrize("transport", FIRST_OF_TRANSPORTS)
def test_a_unit_that_runs_twice_may_use_other_parameters_each_time(transport: str) -> None:
    settings: dict[str, object] = {"bucket_bytes": 0}
    run_ranks(train, 2, transport, Recurrent, run_recurrent, run_recurrent, settings)


def accumulate(transport: str) -> None:
    """Each rank uses one expert in the first micro-batch and another one in the second."""
    torch.manual_seed(0)
    reference = Routed()
    model = shard(copy.deepcopy(reference), transport)
    replicas = [copy.deepcopy(reference) for _ in range(2)]
    for micro_batch in range(2):
        model.set_requires_gradient_sync(micro_batch == 1)
        for rank, replica in enumerate(replicas):
            expert = rank * micro_batch
            replica(batch(micro_batch, rank), expert).square().mean().backward()
        expert = dist.get_rank() * micro_batch
        model(batch(micro_batch, dist.get_rank()), expert).square().mean().backward()
    compare(model, average_gradients(replicas))


@pytest.mark.parametrize("transport", FIRST_OF_TRANSPORTS)
def test_accumulated_gradients_count_as_used(transport: str) -> None:
    run_ranks(accumulate, 2, transport)


class MayUseNothing(Experts):
    def forward(self, x: Tensor, expert: int | None) -> Tensor:
        return x * 2 if expert is None else super().forward(x, expert)


class MayBeLeftOut(nn.Module):
    """Its middle unit may run without its parameters, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.middle = MayUseNothing()
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, runs: bool, expert: int | None = None) -> Tensor:
        x = self.first(x)
        return self.last(self.middle(x, expert) if runs else x)


def accumulate_on_one_rank() -> None:
    """Rank 1 alone has gradients of a unit, and the backward that reduces them reaches none."""
    torch.manual_seed(0)
    reference = MayBeLeftOut()
    model = copy.deepcopy(reference)
    fsdp_ext.fully_shard(model.middle, bucket_bytes=0)
    fsdp_ext.fully_shard(model, bucket_bytes=0)

    def run(of: nn.Module, rank: int, last: bool) -> None:
        expert = 0 if rank == 1 else None
        of(batch(last, rank), not last, expert).square().mean().backward()

    replicas = [copy.deepcopy(reference) for _ in range(2)]
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        for rank, replica in enumerate(replicas):
            run(replica, rank, last)
        run(model, dist.get_rank(), last)
    compare(model, average_gradients(replicas))


def test_a_backward_reduces_what_one_rank_has_accumulated_for_a_unit_that_it_leaves_out() -> None:
    run_ranks(accumulate_on_one_rank, 2)


def add_to_gradients(transport: str) -> None:
    """A gradient is added to what is there, also if the rank did not use the parameter."""
    torch.manual_seed(0)
    reference = Routed()
    model = shard(copy.deepcopy(reference), transport)
    expected: dict[str, Tensor | None] = {}
    for step in range(2):
        replicas = [copy.deepcopy(reference) for _ in range(2)]
        for rank, replica in enumerate(replicas):
            run_routed(replica, 2 * step, rank).square().mean().backward()
        for name, grad in average_gradients(replicas).items():
            before = expected.get(name)
            expected[name] = grad if before is None or grad is None else before + grad
        run_routed(model, 2 * step, dist.get_rank()).square().mean().backward()
    compare(model, expected)


def test_gradients_of_other_ranks_are_added_to_those_that_exist() -> None:
    run_ranks(add_to_gradients, 2, "shared_memory")


# - Units that a rank's backward, or its forward, leaves out


def run_detached(model: nn.Module, step: int, rank: int) -> Tensor:
    """Forward runs all blocks. On one rank the loss does not depend on the left tower."""
    x = batch(step, rank)
    left, right = x, x
    for block in model.left:
        left = block(left, 0)
    for block in model.right:
        right = block(right, 0)
    if (rank + step) % 2 == 0:
        left = left.detach()
    return model.head(torch.cat([left, right], dim=-1))


class Detached(Routed):
    def forward(self, step: int, rank: int) -> Tensor:
        return run_detached(self, step, rank)


def call(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(step, rank)


@pytest.mark.parametrize("transport", FIRST_OF_TRANSPORTS)
def test_a_unit_that_backward_does_not_reach_sends_zeros_if_asked(transport: str) -> None:
    run_ranks(train, 2, transport, Detached, call, call, {}, True)


def skip(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(batch(step, rank), (rank + step) % 2 == 0, joins=True)


def skip_in_replica(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(batch(step, rank), (rank + step) % 2 == 0)


@pytest.mark.parametrize("transport", FIRST_OF_TRANSPORTS)
@pytest.mark.parametrize("settings", [{}, {"prefetch": 0}], ids=["prefetch", "no prefetch"])
def test_join_empty_takes_part_for_a_unit_that_does_not_run(
    transport: str, settings: dict[str, object]
) -> None:
    run_ranks(train, 2, transport, Skipped, skip, skip_in_replica, settings)


@pytest.mark.parametrize("transport", FIRST_OF_TRANSPORTS)
@pytest.mark.parametrize("mesh", [(2,), (2, 1), *exhaustive((1, 2), (2, 2))], ids=str)
@pytest.mark.parametrize("then", ["is detached", "changes"])
def test_the_result_of_join_empty_takes_part_as_a_result_of_the_unit_does(
    transport: str, mesh: tuple[int, ...], then: str
) -> None:
    run = functools.partial(run_aside, then)
    run_ranks(train, math.prod(mesh), transport, Aside, run, run, {"bucket_bytes": 0}, False, mesh)


def run_aside(then: str, model: nn.Module, step: int, rank: int) -> Tensor:
    return model(batch(step, rank), (rank + step) % 2 == 0, then)


@pytest.mark.parametrize("transport", FIRST_OF_TRANSPORTS)
def test_a_unit_that_returns_its_input_on_some_ranks_takes_part_after_that_changes(
    transport: str,
) -> None:
    run_ranks(train, 2, transport, ChangesInput, skip_part, skip_part, {"bucket_bytes": 0})


class TwiceThenSkipped(nn.Module):
    """A unit that runs twice, and then one that returns its input on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.second = MayReturnItsInput()

    def forward(self, x: Tensor, skips: bool, copies: bool) -> Tensor:
        return self.second(self.first(self.first(x)), skips, copies)


class MayReturnItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, skips: bool, copies: bool) -> Tensor:
        if skips:
            return x.clone() if copies else x
        return self.layer(x)


def return_cast_inputs() -> None:
    gradients = []
    for copies in (False, True):
        torch.manual_seed(0)
        model = TwiceThenSkipped().double()
        policy = fsdp_ext.MixedPrecisionPolicy(
            param_dtype=torch.float32, reduce_dtype=torch.float64, output_dtype=torch.float64
        )
        for unit in (model.first, model.second, model):
            fsdp_ext.fully_shard(unit, mp_policy=policy, bucket_bytes=0, prefetch=0)
        x = torch.ones(2, DIM, dtype=torch.float64)
        model(x, dist.get_rank() == 1, copies).sum().backward()
        gradients.append([param.grad.full_tensor() for param in model.parameters()])
    for returned, copied in zip(*gradients, strict=True):
        torch.testing.assert_close(returned, copied, rtol=0, atol=0)


def test_a_unit_that_returns_its_cast_input_on_one_rank_takes_part() -> None:
    run_ranks(return_cast_inputs, 2)


class NotReached(nn.Module):
    """Backward does not reach the first unit where that returns its input, which has no history."""

    def __init__(self) -> None:
        super().__init__()
        self.first = MayReturnItsInput()
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        return self.last(self.first(x, skips, copies=False))


def reduce_where_asked(wrapped: bool, asked: bool) -> None:
    model: nn.Module = NotReached()
    if wrapped:
        model.first = fsdp_ext.FullyShardedDataParallel(model.first)
        model = fsdp_ext.FullyShardedDataParallel(model)
    else:
        for unit in (model.first, model):
            fsdp_ext.fully_shard(unit)
    if asked:
        model.first.set_reduce_scatter_unused_params(True)
    model(torch.ones(2, DIM), dist.get_rank() == 1).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("wrapped", [False, True], ids=["fully_shard", "wrapper"])
def test_a_unit_that_backward_reaches_on_one_rank_is_reduced_if_asked(wrapped: bool) -> None:
    run_ranks(reduce_where_asked, 2, wrapped, True)
    with pytest.raises(RanksFailed, match=r"set_reduce_scatter_unused_params\(True\)"):
        run_ranks(reduce_where_asked, 2, wrapped, False)


@pytest.mark.parametrize("transport", FIRST_OF_TRANSPORTS)
def test_gradients_of_a_recomputed_region_inside_a_unit_are_reduced_once(transport: str) -> None:
    run_ranks(train, 2, transport, RunsRegions, skip_part, skip_part, {"bucket_bytes": 0})


def skip_part(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(batch(step, rank), (rank + step) % 2 == 0)


class JoinsInRegion(nn.Module):
    """A checkpointed region that leaves out a unit before it runs another one."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(DIM, DIM)
        self.layers = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.region, x, use_reentrant=False)
        return result

    def region(self, x: Tensor) -> Tensor:
        x = self.block.join_empty(x)  # type: ignore[operator]
        self.hidden = self.layers[0](x)
        result: Tensor = self.layers[1:](self.hidden)
        return result


def begin_inside_a_region() -> None:
    model = JoinsInRegion()
    for unit in (model.block, model):
        fsdp_ext.fully_shard(unit, reshard_after_forward=False)
    for step in range(2):
        x = batch(step, dist.get_rank())
        model(x)
        edge = torch.autograd.graph.get_gradient_edge(model.hidden)
        (gradient,) = torch.autograd.grad(
            [edge], [model.layers[0].weight], [torch.ones_like(model.hidden)]
        )
        assert torch.equal(gradient, torch.ones_like(model.hidden).T @ x)


def test_a_backward_that_begins_inside_a_region_recomputes_a_unit_that_is_left_out() -> None:
    run_ranks(begin_inside_a_region, 2)


def join_wrongly(tensor: object) -> None:
    model = shard(Skipped(), "shared_memory")
    model.block.join_empty(tensor)


def test_join_empty_explains_wrong_uses() -> None:
    with pytest.raises(RanksFailed, match=r"join_empty got torch\.int64"):
        run_ranks(join_wrongly, 1, torch.ones(2, dtype=torch.int64))
    with pytest.raises(RanksFailed, match="before the first forward of the root"):
        run_ranks(join_wrongly, 1, torch.ones(2))


# - Ranks whose collectives differ


class Reordered(nn.Module):
    """Two equal blocks whose order is an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(3))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = self.blocks[index](x)
        return x

    def units(self) -> list[nn.Module]:
        return list(self.blocks)


def train_in_orders(transport: str, other_order: list[int]) -> None:
    model = shard(Reordered(), transport, bucket_bytes=0)
    for step in range(4):
        order = other_order if step == 3 and dist.get_rank() == 1 else [0, 1, 2]
        model(batch(step, 0), order).sum().backward()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_another_order_in_a_later_iteration_raises(transport: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(train_in_orders, 2, transport, [1, 0, 2], timeout=60)
    text = str(failed.value)
    assert "the all-gather of unit 'blocks.0'" in text
    assert "the all-gather of unit 'blocks.1'" in text
    assert "in the same order on every rank" in text


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_unit_left_out_in_a_later_iteration_raises(transport: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(train_in_orders, 2, transport, [0, 2], timeout=60)
    text = str(failed.value)
    assert "issued different collectives" in text
    assert "the reduce-scatter of unit 'blocks.1'" in text


def train_frozen_on_one_rank(transport: str) -> None:
    model = Reordered()
    model.blocks[1].requires_grad_(dist.get_rank() == 0)
    shard(model, transport)(batch(0, 0), [0, 1, 2]).sum().backward()


@pytest.mark.parametrize("transport", FIRST_OF_TRANSPORTS)
def test_a_unit_that_is_frozen_on_one_rank_raises(transport: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(train_frozen_on_one_rank, 2, transport, timeout=60)
    text = str(failed.value)
    assert "rank 1 has unit 'blocks.1' (frozen)" in text


# - Gradients that only some ranks have accumulated


class SometimesDetached(Routed):
    def forward(self, step: int, rank: int, detaches: bool) -> Tensor:
        if detaches:
            return run_detached(self, step, rank)
        return super().forward(batch(step, rank), (rank + step // 2) % 2)


def regroup_with_accumulated(transport: str) -> None:
    """A change of buckets waits on all ranks for gradients that one rank has accumulated."""
    torch.manual_seed(0)
    reference = SometimesDetached()
    model = shard(copy.deepcopy(reference), transport, bucket_bytes=1 << 20)
    rank = dist.get_rank()
    for _ in range(2):
        model(0, rank, False).square().mean().backward()
    model.zero_grad()
    for block in model.left:
        block.set_requires_gradient_sync(False)
    model(0, rank, True).square().mean().backward()  # rank 0 accumulates nothing
    replicas = [copy.deepcopy(reference) for _ in range(2)]
    for number, replica in enumerate(replicas):
        replica(0, number, True).square().mean().backward()
    for each in [model, *replicas]:
        for module in (each.right, each.head):
            module.zero_grad()
        each.scale.grad = None
    for block in model.left:
        block.set_requires_gradient_sync(True)
        block.set_reshard_after_forward(False)
    for step in range(1, 4):
        for number, replica in enumerate(replicas):
            replica(step, number, False).square().mean().backward()
        model(step, rank, False).square().mean().backward()
        compare(model, average_gradients(replicas))
        for each in [model, *replicas]:
            each.zero_grad()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_form_the_same_buckets_whatever_they_have_accumulated(transport: str) -> None:
    run_ranks(regroup_with_accumulated, 2, transport)


class _Branches(nn.Module):
    """Rank 0 leaves out the second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.used(x)
        return found if dist.get_rank() == 0 else found + self.unused(x)


def _replaced_within_backward() -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), _Branches())
    for module in [*model, model]:
        fsdp_ext.fully_shard(module, bucket_bytes=0)
    x = torch.ones(2, DIM)
    model(x).sum().backward()
    model.zero_grad()

    def replace(_gradient: Tensor) -> None:
        state = {name: each.clone() for name, each in model[2].state_dict().items()}
        model[2].load_state_dict(state, assign=True)

    hook = model[0].register_forward_hook(lambda _module, _x, y: y.register_hook(replace) and None)
    model(x).sum().backward()  # the end of this backward has no place for the unit's gradients
    hook.remove()
    model(x).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_parameters_may_be_replaced_after_backward_has_passed_their_unit() -> None:
    run_ranks(_replaced_within_backward, 2)


def _frozen_again() -> None:
    """A parameter that stays in its unit while it is frozen gets no zeros."""
    model: nn.Module = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    model = fsdp_ext.fully_shard(model)
    model.set_reduce_scatter_unused_params(True)
    weight = model[0].weight
    for is_trained in (True, False, True, False):
        weight.requires_grad_(is_trained)
        model.zero_grad()
        for micro_batch in range(2):
            model.set_requires_gradient_sync(micro_batch == 1)
            model(torch.ones(2, DIM)).sum().backward()
        assert (weight.grad is not None) == is_trained


def test_a_frozen_parameter_is_not_unused() -> None:
    run_ranks(_frozen_again, 2)
