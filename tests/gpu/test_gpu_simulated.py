"""The simulated transport on a GPU moves bytes for the time of its link, also in a step."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from torch import nn

from fsdp_ext import Link, Simulated, fully_shard
from fsdp_ext.comm.lanes import lanes_of

RANKS = 8
DEVICE = torch.device("cuda", 0)


def _lanes(link: Link, multiprocessors: int) -> Any:
    dist.destroy_process_group()
    warnings.simplefilter("ignore")
    transport = Simulated(RANKS, link, rank=3, multiprocessors=multiprocessors)
    transport.init_process_group()
    assert dist.group.WORLD is not None
    return lanes_of(dist.group.WORLD, DEVICE, transport)


# One process runs all settings, because it takes seconds to start. Some sizes are not a multiple
# of 16 bytes, so that the kernel moves narrower words, too.
def _moves() -> None:
    for multiprocessors in (0, 1, 16):
        lanes = _lanes(Link("fast", alpha=0.0, beta=1e15), multiprocessors)
        for numel in (1, 1001, 1 << 20):
            _moves_elements(lanes, numel)


def _moves_elements(lanes: Any, numel: int) -> None:
    part = torch.randn(numel, device=DEVICE)
    whole = torch.full((RANKS * numel,), float("nan"), device=DEVICE)
    lanes.all_gather(part, whole)
    torch.testing.assert_close(whole, part.repeat(RANKS), rtol=0, atol=0)
    segments = torch.randn(RANKS * numel, device=DEVICE)
    reduced = torch.full((numel,), float("nan"), device=DEVICE)
    lanes.reduce_scatter(segments, reduced)
    torch.testing.assert_close(reduced, segments.view(RANKS, numel)[3], rtol=0, atol=0)


@pytest.mark.timeout(90)
def test_every_part_is_a_copy_of_this_ranks() -> None:
    run_ranks(_moves, 1, timeout=80.0, device="cuda")


def _lasts() -> list[float]:
    return [_milliseconds(multiprocessors) for multiprocessors in (0, 16)]


def _milliseconds(multiprocessors: int) -> float:
    lanes = _lanes(Link("slow", alpha=5e-3, beta=1e15), multiprocessors)
    part = torch.zeros(1000, device=DEVICE)
    whole = torch.zeros(RANKS * 1000, device=DEVICE)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    lanes.all_gather(part, whole)
    torch.cuda.synchronize()
    start.record()
    lanes.all_gather(part, whole)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


@pytest.mark.timeout(90)
def test_a_collective_takes_at_least_its_time() -> None:
    (milliseconds,) = run_ranks(_lasts, 1, timeout=80.0, device="cuda")
    assert min(milliseconds) >= 4.9  # the GPU's timer and its events use different clocks


def _train() -> dict[str, Any]:
    dist.destroy_process_group()
    warnings.simplefilter("ignore")
    transport = Simulated(1024, Link("fast", alpha=0.0, beta=1e15), multiprocessors=4)
    model: Any = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).cuda()
    for layer in model:
        fully_shard(layer, transport=transport)
    fully_shard(model, transport=transport)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(4):
        loss = model(torch.randn(16, 1024, device=DEVICE)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return {"loss": float(loss), "local": tuple(model[0].weight.to_local().shape)}


@pytest.mark.timeout(90)
def test_one_gpu_trains_as_one_of_many() -> None:
    (answer,) = run_ranks(_train, 1, timeout=80.0, device="cuda")
    assert math.isfinite(answer["loss"])
    assert answer["local"] == (1, 1024)
