"""Process groups that only the calling thread may use run collectives on that thread, in order."""

from __future__ import annotations

import copy
import os
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.parity import assert_same
from support.threads import run_threads
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

import fsdp_ext
from fsdp_ext.comm.lanes import lanes_of

CPU = torch.device("cpu")
STEPS = 3
RANKS = 2


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 8), nn.Sequential(nn.Linear(8, 3), nn.Tanh())
    )


def train(fully_shard: Any, model: nn.Sequential, rank: int, **settings: Any) -> list[Tensor]:
    """Return the losses of this rank, and its shards of gradients and parameters."""
    for unit in (model[0], model[2], model[3]):
        fully_shard(unit, **settings)
    fully_shard(model, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        loss = (model(torch.randn(4, 6, generator=generator)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.detach())
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert isinstance(parameter.grad, DTensor)
        seen += [parameter.grad.to_local(), parameter.to_local().detach()]
    return seen


# - Ranks that are threads


def train_on_thread(rank: int, shape: tuple[int, ...], models: list[nn.Sequential]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    theirs = train(fsdp.fully_shard, copy.deepcopy(models[rank]), rank, mesh=mesh)
    ours = train(fsdp_ext.fully_shard, models[rank], rank, mesh=mesh, bucket_bytes=400)
    assert_same("FSDP2", theirs, ours)


def train_on_threads(shape: tuple[int, ...]) -> None:
    ranks = torch.Size(shape).numel()
    run_threads(train_on_thread, ranks, shape, [make_model() for _ in range(ranks)])


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["1-D", "2-D"])
def test_ranks_that_are_threads_train_as_fsdp2_does(shape: tuple[int, ...]) -> None:
    run_ranks(train_on_threads, 1, shape, fresh=True)


def shard_in_groups(rank: int, models: list[nn.Linear]) -> None:
    with pytest.raises(NotImplementedError, match="reshard_after_forward=2 needs a process group"):
        fsdp_ext.fully_shard(models[rank], reshard_after_forward=2)


def groups_of_threads() -> None:
    run_threads(shard_in_groups, 4, [nn.Linear(4, 4) for _ in range(4)])


def test_threads_cannot_reshard_to_smaller_groups() -> None:
    run_ranks(groups_of_threads, 1, fresh=True)


def evaluate_twice_after_a_step(rank: int, models: list[nn.Linear]) -> int:
    model = fsdp_ext.fully_shard(models[rank], reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # later forwards begin with the gather
        model(torch.ones(1, 4)).sum().backward()
    if rank == 1:  # steps while the other rank, which has stepped, waits in its next gather
        while not ProcessLocalGroup._cur_coll_on_pgs:
            os.sched_yield()
    optimizer.step()
    with torch.no_grad():
        model(torch.ones(1, 4))
        before = gathers_of(model)
        model(torch.ones(1, 4))
    return gathers_of(model) - before


def gathers_of(model: Any) -> int:
    counters: dict[str, int] = model._fsdp_ext_unit.root.impl.counters()
    return counters["all_gathers"]


def steps_of_threads() -> None:
    models = [nn.Linear(4, 4) for _ in range(2)]
    assert run_threads(evaluate_twice_after_a_step, 2, models) == [0, 0]


def test_a_step_of_one_thread_does_not_make_another_gather_again() -> None:
    run_ranks(steps_of_threads, 1, fresh=True)


# - Groups that are written in Python


class Smallest(dist.ProcessGroup):
    """Gloo with the fewest collectives that a group in Python may have."""

    threads: ClassVar[set[int]] = set()
    called: ClassVar[set[str]] = set()
    fails = False

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "of_python"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def call(self, name: str, *args: Any) -> Any:
        Smallest.threads.add(threading.get_ident())
        if Smallest.fails:
            raise RuntimeError("the cable is unplugged")
        Smallest.called.add(name)
        return getattr(self.gloo, name)(*args)

    def allgather(self, *args: Any) -> Any:
        return self.call("allgather", *args)

    def allreduce(self, *args: Any) -> Any:
        return self.call("allreduce", *args)


class ByLists(Smallest):
    """One that also reduce-scatters lists."""

    def reduce_scatter(self, *args: Any) -> Any:
        return self.call("reduce_scatter", *args)


def new_group(of: type[dist.ProcessGroup] = ByLists) -> dist.ProcessGroup:
    dist.Backend.register_backend("of_python", of, devices=["cpu"])
    return dist.new_group(backend="of_python")


def train_on_group(of: type[Smallest], reduction: str) -> None:
    group = new_group(of)
    assert type(group) is of
    mesh = DeviceMesh.from_group(group, "cpu")
    theirs = train(fsdp.fully_shard, make_model(), dist.get_rank())
    ours = train(fsdp_ext.fully_shard, make_model(), dist.get_rank(), mesh=mesh)
    assert_same("FSDP2", theirs, ours)
    assert of.threads == {threading.get_ident()}
    assert of.called == {"allgather", reduction}
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    assert not any(name.startswith("fsdp:") for name in names), "lanes have no threads"


def describe_and_measure() -> str:
    mesh = DeviceMesh.from_group(new_group(), "cpu")
    model = fsdp_ext.fully_shard(nn.Linear(4, 4), mesh=mesh)
    batch = torch.ones(1, 4)
    with pytest.raises(NotImplementedError, match="tune does not support process groups"):
        fsdp_ext.tune(model, batch, steps=2)
    model(batch)
    with pytest.raises(NotImplementedError, match="profile does not support process groups"):
        fsdp_ext.profile(model)
    return str(fsdp_ext.describe_buckets(model))


@pytest.mark.parametrize(
    ("of", "reduction"), [(ByLists, "reduce_scatter"), (Smallest, "allreduce")]
)
def test_a_group_in_python_is_called_on_the_thread_that_trains(
    of: type[Smallest], reduction: str
) -> None:
    run_ranks(train_on_group, RANKS, of, reduction, fresh=True)


def test_tools_that_look_for_overlap_refuse_such_a_group() -> None:
    for description in run_ranks(describe_and_measure, RANKS, fresh=True):
        assert "process_group, on the thread that trains" in description


def issue_different_collectives() -> str:
    lanes = lanes_of(new_group(), CPU)
    part, whole = torch.ones(4), torch.ones(8)
    collective = lanes.all_gather if dist.get_rank() == 0 else lanes.reduce_scatter
    arguments = (part, whole) if dist.get_rank() == 0 else (whole, part)
    with pytest.raises(RuntimeError) as raised:
        collective(*arguments)
    return str(raised.value)


def test_ranks_in_different_collectives_of_a_group_learn_it() -> None:
    errors = run_ranks(issue_different_collectives, RANKS, fresh=True)
    for error in errors:
        for words in ("an all-gather called", "a reduce-scatter called", "in the same order"):
            assert words in error


def fail_in_backward() -> str:
    mesh = DeviceMesh.from_group(new_group(), "cpu")
    model = fsdp_ext.fully_shard(nn.Linear(4, 4), mesh=mesh)
    loss = model(torch.ones(1, 4)).sum()
    Smallest.fails = True
    with pytest.raises(RuntimeError) as raised:
        loss.backward()
    return str(raised.value)


def test_an_error_of_a_group_in_python_is_raised_with_its_own_words() -> None:
    for error in run_ranks(fail_in_backward, RANKS, fresh=True):
        assert "failed over the process group: RuntimeError: the cable is unplugged" in error
