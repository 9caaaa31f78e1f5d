"""NCCL's messages between ranks, which torch also scatters, gathers and exchanges with."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.devices import IS_EMULATED
from support.launcher import RanksFailed, run_ranks

pytestmark = pytest.mark.skipif(not IS_EMULATED, reason="tests the emulated GPU: make rehearsal")

NUMEL = 200_000  # more than a message's channel holds


def _of(rank: int, numel: int = NUMEL) -> torch.Tensor:
    return torch.arange(numel, device="cuda", dtype=torch.float32) + 1000 * rank


def _messages() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = range(size)
    # Each rank sends to the next one and receives from the one before, in one group.
    came = torch.empty(NUMEL, device="cuda")
    both = [
        dist.P2POp(dist.isend, _of(rank), (rank + 1) % size),
        dist.P2POp(dist.irecv, came, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    assert torch.equal(came, _of((rank - 1) % size))
    # Two messages of a pair arrive in order.
    if rank == 0:
        for value in (5.0, 6.0):
            dist.send(torch.full((3,), value, device="cuda"), 1)
    elif rank == 1:
        found = []
        for _ in range(2):
            part = torch.empty(3, device="cuda")
            dist.recv(part, 0)
            found.append(part[0].item())
        assert found == [5, 6]
    exchanged = torch.empty(size * 4, device="cuda")
    dist.all_to_all_single(exchanged, _of(rank, size * 4))
    assert torch.equal(exchanged, torch.cat([_of(r, size * 4)[rank * 4 :][:4] for r in ranks]))
    scattered = torch.empty(7, device="cuda")
    dist.scatter(scattered, [_of(r, 7) for r in ranks] if rank == 1 else None, src=1)
    assert torch.equal(scattered, _of(rank, 7))
    gathered = [torch.empty(7, device="cuda") for _ in ranks] if rank == 0 else None
    dist.gather(_of(rank, 7), gathered, dst=0)
    if gathered is not None:
        assert torch.equal(torch.stack(gathered), torch.stack([_of(r, 7) for r in ranks]))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_send_and_receive(ranks: int) -> None:
    run_ranks(_messages, ranks, device="cuda")


def _messages_of_two_sizes() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.zeros(4, device="cuda"), 1)
    else:
        dist.recv(torch.zeros(5, device="cuda"), 0)
    torch.cuda.synchronize()


def test_a_message_of_another_size_is_an_error() -> None:
    with pytest.raises(RanksFailed, match="receives 20 bytes from rank 0, which sends 16"):
        run_ranks(_messages_of_two_sizes, 2, device="cuda")


def _collectives_that_differ() -> None:
    dist.all_reduce(torch.ones(4 + dist.get_rank(), device="cuda"))
    torch.cuda.synchronize()


def test_ranks_whose_collectives_differ_are_named() -> None:
    text = "rank 0 runs all-reduce of 4 elements.* but rank 1 runs all-reduce of 5 elements"
    other = "rank 1 runs all-reduce of 5 elements.* but rank 0 runs all-reduce of 4 elements"
    with pytest.raises(RanksFailed, match=f"{text}|{other}"):
        run_ranks(_collectives_that_differ, 2, device="cuda")
