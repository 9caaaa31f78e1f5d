"""Collectives occupy multiprocessors while they wait for their peers, as kernels do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support import nccl_library as nccl
from support.devices import IS_EMULATED
from support.launcher import RanksFailed, run_ranks

pytestmark = pytest.mark.skipif(not IS_EMULATED, reason="tests the emulated GPU: make rehearsal")

BLOCKS = 2
# Room for one communicator's collective, but not for two.
SMALL = {"EMULATED_GPU_SMS": "3", "EMULATED_GPU_STUCK_S": "2", "NCCL_MAX_CTAS": ""}
LATE_CYCLES = 500_000_000  # so much that the other stream starts before, on a busy machine, too


def _two_communicators(in_order: bool) -> None:
    rank = dist.get_rank()
    comms = [nccl.join(nccl.config(minCTAs=BLOCKS, maxCTAs=BLOCKS)) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in comms]
    data = [torch.full((8,), 1.0 + rank, device="cuda") for _ in comms]
    torch.cuda.synchronize()
    order = [0, 1] if in_order or rank == 0 else [1, 0]
    for number, which in enumerate(order):
        # Both ranks have started their first collective before either looks for the second.
        with torch.cuda.stream(streams[which]):
            torch.cuda._sleep(number * LATE_CYCLES)
        assert nccl.all_reduce(comms[which], data[which], streams[which]) == nccl.SUCCESS
    torch.cuda.synchronize()
    assert [one.tolist() for one in data] == [[3.0] * 8] * 2


def test_communicators_that_do_not_fit_wait_for_each_other_for_ever() -> None:
    run_ranks(_two_communicators, 2, True, device="cuda", variables=SMALL)
    with pytest.raises(RanksFailed) as raised:
        run_ranks(_two_communicators, 2, False, device="cuda", variables=SMALL)
    text = str(raised.value)
    assert "needs 2 of the 3 multiprocessors of device 0 (EMULATED_GPU_SMS)" in text
    assert "all-reduce of 8 elements, dtype 7, operation 0" in text
    assert "holds 2." in text


def test_communicators_that_fit_may_start_in_any_order() -> None:
    fits = SMALL | {"EMULATED_GPU_SMS": "4"}
    run_ranks(_two_communicators, 2, False, device="cuda", variables=fits)


def _streams_that_are_late() -> None:
    """The host launches in one order, but on each rank another stream is late."""
    rank = dist.get_rank()
    comms = [nccl.join(nccl.config(minCTAs=BLOCKS, maxCTAs=BLOCKS)) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in comms]
    data = [torch.full((8,), 1.0 + rank, device="cuda") for _ in comms]
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[rank]):
        torch.cuda._sleep(LATE_CYCLES)
    for comm, values, stream in zip(comms, data, streams, strict=True):
        assert nccl.all_reduce(comm, values, stream) == nccl.SUCCESS
    torch.cuda.synchronize()
    assert [one.tolist() for one in data] == [[3.0] * 8] * 2


def test_implicit_order_starts_collectives_as_the_host_launches_them() -> None:
    with pytest.raises(RanksFailed, match="wait for each other for ever"):
        run_ranks(_streams_that_are_late, 2, device="cuda", variables=SMALL)
    ordered = SMALL | {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
    run_ranks(_streams_that_are_late, 2, device="cuda", variables=ordered)
