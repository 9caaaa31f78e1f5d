"""PyTorch's FSDP2, FSDP1 and DDP on one process, over a process group of simulated ranks."""

from __future__ import annotations

import itertools
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.messages import check_messages
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bench.models import simulated_group as module
from bench.models.simulated_group import SimulatedGroup, simulated_group
from fsdp_ext import Link
from fsdp_ext.comm.link import H100_CLUSTER, H100_NODE

FAST = Link("fast", alpha=0.0, beta=1e15)
BLOCKS = 3
DIM = 64

# They have these names in all versions of torch that are tested.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed.*is deprecated:FutureWarning")


class _Block(nn.Linear):
    pass


class _Net(nn.Module):
    """Blocks, and a head that the root unit has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(DIM, DIM) for _ in range(BLOCKS))
        self.head = nn.Linear(DIM, 2 * DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)  # type: ignore[no-any-return]


def _fsdp2(ranks: int, prefetch: bool = False) -> Any:
    from torch.distributed.fsdp import fully_shard

    model: Any = _Net()
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if prefetch:
        model._set_unshard_async_op(True)
        units = [model, *model.blocks]
        for unit, following in itertools.pairwise(units):
            unit.set_modules_to_forward_prefetch([following])
    return model


def _fsdp1() -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        _Net(),
        auto_wrap_policy=ModuleWrapPolicy({_Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def _train(system: str, ranks: int) -> list[tuple[str, int]]:
    dist.destroy_process_group()
    warnings.simplefilter("ignore")
    with simulated_group(ranks, FAST, rank=ranks - 1) as group:
        if system == "DDP":
            model: Any = nn.parallel.DistributedDataParallel(_Net())
        else:
            model = _fsdp1() if system == "FSDP1" else _fsdp2(ranks, "prefetch" in system)
        optimizer = torch.optim.AdamW(model.parameters())
        sent = []
        for _ in range(2):
            group.log.clear()
            optimizer.zero_grad()
            model(torch.ones(2, DIM)).sum().backward()
            optimizer.step()
            sent = [(c.operation, c.nbytes) for c in group.log]
        assert group.rank() == ranks - 1
        assert group.size() == dist.get_world_size() == ranks
    assert not dist.is_initialized()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    return sent


BLOCK_BYTES = 4 * DIM * (DIM + 1)
HEAD_BYTES = 4 * 2 * DIM * DIM


def _gather(nbytes: int) -> tuple[str, int]:
    return ("all_gather", nbytes)


def _reduce(nbytes: int) -> tuple[str, int]:
    return ("reduce_scatter", nbytes)


@pytest.mark.parametrize("ranks", [4, 64])
@pytest.mark.parametrize("system", ["FSDP2", "FSDP2, prefetch"])
def test_fsdp2_sends_each_unit_twice_and_reduces_it_once(system: str, ranks: int) -> None:
    (sent,) = run_ranks(_train, 1, system, ranks)
    block = [_gather(BLOCK_BYTES), _reduce(BLOCK_BYTES)]
    # The root stays gathered after forward. In backward the next block is gathered before the
    # gradients of this one are reduced. The root's gradients are reduced at the end, and so are the
    # first block's, whose input needs no gradient.
    forward = [_gather(HEAD_BYTES)] + BLOCKS * [_gather(BLOCK_BYTES)]
    backward = [_gather(BLOCK_BYTES), *(BLOCKS - 1) * block]
    assert sent == [*forward, *backward, _reduce(HEAD_BYTES), _reduce(BLOCK_BYTES)]


@pytest.mark.parametrize("ranks", [4, 64])
def test_fsdp1_sends_each_unit_twice_and_reduces_it_once(ranks: int) -> None:
    (sent,) = run_ranks(_train, 1, "FSDP1", ranks)
    forward = [_gather(HEAD_BYTES)] + BLOCKS * [_gather(BLOCK_BYTES)]
    assert sent[: BLOCKS + 1] == forward
    backward = sent[BLOCKS + 1 :]
    # The root stays gathered after forward.
    assert backward.count(_gather(BLOCK_BYTES)) == backward.count(_reduce(BLOCK_BYTES)) == BLOCKS
    assert backward.count(_reduce(HEAD_BYTES)) == 1
    assert len(backward) == 2 * BLOCKS + 1


def _unshard_a_block(ranks: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    dist.destroy_process_group()
    with simulated_group(ranks, FAST, rank):
        block = _fsdp2(ranks).blocks[0]
        shard = block.weight.to_local().clone()
        block.unshard()
        weight = block.weight.detach().clone()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    return shard, weight


def test_the_shard_of_this_rank_arrives() -> None:
    ((shard, weight),) = run_ranks(_unshard_a_block, 1, 4, 2)
    rows = DIM // 4
    assert shard.shape == (rows, DIM)
    assert torch.equal(weight[2 * rows : 3 * rows], shard)


def test_ddp_sums_all_gradients() -> None:
    (sent,) = run_ranks(_train, 1, "DDP", 64)
    assert ("all_reduce", BLOCKS * BLOCK_BYTES + HEAD_BYTES) in sent
    assert not [operation for operation, _ in sent if operation in ("all_gather", "reduce_scatter")]


class _Gate:
    """Blocks the simulated link until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.events: list[str] = []

        def sleep(moment: float, late: float) -> float:
            assert self.opened.wait(60)
            self.events.append("ended")
            return late

        monkeypatch.setattr(module, "_sleep_until", sleep)

    def wait_for(self, name: str, work: dist.Work) -> threading.Thread:
        """Wait in a thread, and record when the wait is over."""

        def wait() -> None:
            work.wait()
            self.events.append(name)

        thread = threading.Thread(target=wait)
        thread.start()
        return thread


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> _Gate:
    return _Gate(monkeypatch)


def test_wait_returns_when_the_collective_has_ended(gate: _Gate) -> None:
    whole, part = torch.zeros(8), torch.tensor([1.0, 2.0])
    with simulated_group(4, FAST, rank=2):
        work = dist.all_gather_into_tensor(whole, part, async_op=True)
        waiting = gate.wait_for("waited", work)
        assert not work.is_completed()
        gate.opened.set()
        waiting.join()
        assert work.is_completed()
    assert gate.events == ["ended", "waited"]
    assert whole.tolist() == [0, 0, 0, 0, 1, 2, 0, 0]  # this rank's own part


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_reduction_returns_when_the_one_so_many_before_has_ended_if_asked(
    gate: _Gate, in_flight: int
) -> None:
    wholes = [torch.arange(8.0) + n for n in range(in_flight + 1)]
    parts = torch.zeros(in_flight + 1, 2)
    with simulated_group(4, FAST, rank=1, reductions_in_flight=in_flight) as group:
        *before, last = (
            dist.reduce_scatter_tensor(part, whole, async_op=True)
            for part, whole in zip(parts, wholes, strict=True)
        )
        for work in before:
            work.wait()  # although the link is blocked
        assert gate.events == []
        waiting = gate.wait_for("waited for the last", last)
        gate.opened.set()
        waiting.join()
        assert gate.events.index("ended") < gate.events.index("waited for the last")
        group.synchronize()
        assert gate.events.count("ended") == in_flight + 1
    assert parts.tolist() == [[2 + n, 3 + n] for n in range(in_flight + 1)]


def test_collectives_of_a_group_run_one_after_another(gate: _Gate) -> None:
    gate.opened.set()
    link = Link("slow", alpha=100, beta=10, reduce_alpha=200, reduce_beta=20)
    with simulated_group(4, link) as group:
        whole, part = torch.zeros(1000), torch.zeros(250)
        dist.all_gather_into_tensor(whole, part, async_op=True)
        dist.reduce_scatter_tensor(part, whole, async_op=True)
        dist.all_reduce(whole, async_op=True)
        group.synchronize()
        log = group.log
    assert [c.operation for c in log] == ["all_gather", "reduce_scatter", "all_reduce"]
    assert [c.nbytes for c in log] == [4000, 4000, 4000]
    assert [c.seconds for c in log] == pytest.approx([500, 400, 600])
    for before, after in itertools.pairwise(log):
        assert after.issued < before.end == after.start


def test_a_separate_group_is_another_wire(gate: _Gate) -> None:
    gate.opened.set()
    with simulated_group(4, Link("slow", alpha=100, beta=1e15)) as group:
        other: Any = dist.new_group(list(range(4)))
        for wire in (group, other):
            work = dist.all_gather_into_tensor(
                torch.zeros(8), torch.zeros(2), async_op=True, group=wire
            )
            work.wait()
        (first,), (second,) = group.log, other.log
        group.synchronize()  # waits for both
        assert gate.events == ["ended", "ended"]
    assert isinstance(other, SimulatedGroup)
    assert second.start < first.end  # both at once


def test_the_link_is_the_one_that_so_many_ranks_see() -> None:
    with simulated_group(64, H100_CLUSTER) as group:
        assert group.link == H100_CLUSTER.over(64)


def test_errors_say_what_to_do() -> None:
    check_messages([
        (ValueError, "got rank 4, and world_size 4 has ranks 0 to 3",
         simulated_group(4, FAST, rank=4).__enter__),
        (ValueError, "figures for at most 8 ranks", simulated_group(64, H100_NODE).__enter__),
        (RuntimeError, "needs a link and has none", lambda: dist.init_process_group(
            "simulated", rank=0, world_size=4, store=dist.HashStore())),
    ])  # fmt: skip
    with simulated_group(4, FAST):
        check_messages([
            (ValueError, "got a part of 3 elements and needs 2",
             lambda: dist.all_gather_into_tensor(torch.zeros(8), torch.zeros(3))),
            (RuntimeError, "call destroy_process_group", simulated_group(4, FAST).__enter__),
        ])  # fmt: skip
