"""Buckets and pieces on a GPU, over the simulated transport, train as units by themselves do."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from torch import Tensor, nn

import fsdp_ext
from fsdp_ext import Link, MixedPrecisionPolicy, Simulated, fully_shard

RANKS = 4
STEPS = 4
LINK = Link("fast", alpha=20e-6, beta=1e11)


def _train(
    half: bool, bucket_bytes: int, max_message_bytes: int | None, keeps_inputs: bool = True
) -> tuple[Any, list[Tensor]]:
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if half else MixedPrecisionPolicy()
    options: dict[str, Any] = {"transport": Simulated(RANKS, LINK), "mp_policy": policy}
    layers = [nn.Linear(66, 66) for _ in range(9)]  # no number of rows or bytes is even
    model: Any = nn.Sequential(nn.Embedding(1001, 66), *layers, nn.Linear(66, 7))
    for layer in model:
        fully_shard(layer, **options)
    options |= {"bucket_bytes": bucket_bytes, "max_message_bytes": max_message_bytes}
    fully_shard(model, keep_gather_inputs=keeps_inputs, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator(device="cuda").manual_seed(step)
        tokens = torch.randint(0, 1001, (32,), device="cuda", generator=generator)
        if step > 0:  # the root exists after the first forward
            model._fsdp_ext_unit.root.impl.set_poison_released_slots(True)
            model._fsdp_ext_unit.root.impl.delay_stream("gather" if step % 2 else "reduce", 0.005)
        loss = model(tokens).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return model, [*losses, *(p.to_local().detach().clone() for p in model.parameters())]


def _compare() -> None:
    dist.destroy_process_group()
    warnings.simplefilter("ignore")
    for half in (False, True):
        _compare_in(half)


def _compare_in(half: bool) -> None:
    expected_model, expected = _train(half, 0, None)
    for max_message_bytes, keeps_inputs in product((None, 40_000, 4_000), (True, False)):
        model, got = _train(half, 60_000, max_message_bytes, keeps_inputs)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        impl, alone = model._fsdp_ext_unit.root.impl, expected_model._fsdp_ext_unit.root.impl
        assert len(impl.buckets()) < len(alone.buckets())
        messages = sum(bucket["gather_messages"] for bucket in impl.buckets())
        assert (messages > len(impl.buckets())) == (max_message_bytes is not None)
        with fsdp_ext.profile(model) as prof:
            model(torch.zeros(2, dtype=torch.long, device="cuda")).float().sum().backward()
        (iteration,) = prof.iterations
        assert {"gather", "pack", "reduce"} <= {span.work for span in iteration.spans}
        assert all(iteration.begin <= span.begin <= span.end for span in iteration.spans)


@pytest.mark.timeout(90)
def test_buckets_and_pieces_train_as_single_units() -> None:
    run_ranks(_compare, 1, timeout=80.0, device="cuda")
