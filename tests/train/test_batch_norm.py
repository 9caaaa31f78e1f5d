"""Batch normalisation under a bf16 policy does what it does with FSDP2."""

from __future__ import annotations

import pytest
import torch
from support.launcher import run_ranks
from support.models import DIM, Stack, Unit
from support.parity import SYSTEM, Case, Run, Sharded, check, each, load_system, train_step
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Normalised(Stack):
    """The norm in the middle is a unit, and everything else is the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = nn.BatchNorm1d(DIM)

    def units(self) -> list[Unit]:
        return [self.blocks[1]]


def with_statistics(run: Run, step: int) -> tuple[Tensor, ...]:
    """Train and evaluate, and compare the statistics, too."""
    trained = train_step(run, step)
    norm = run.model.blocks[1]
    run.model.eval()
    with torch.no_grad():
        evaluated = run.loss(step, micro_batch=1)
    run.model.train()
    run.reshard()
    assert norm.running_mean.dtype == torch.float32
    return *trained, evaluated, norm.running_mean.clone(), norm.running_var.clone()


CASES = [
    Case("a norm in fp32", Normalised, step=with_statistics),
    Case("a norm in fp32 in a model in bf16", Normalised, step=with_statistics, unsharded=None,
         options={"mp_policy": MixedPrecisionPolicy()}, root_options={"mp_policy": BF16}),
]  # fmt: skip


@each(CASES)
def test_batch_norm_trains_as_with_fsdp2(case: Case, world_size: int) -> None:
    check(case, world_size)


def _in_bf16() -> list[str]:
    messages = []
    for system in ("fsdp2", SYSTEM):
        case = Case("", Normalised, options={"mp_policy": BF16})
        run = Sharded(load_system(system), case)
        with pytest.raises(RuntimeError) as caught:
            run.loss(0)
        messages.append(str(caught.value))
        assert run.model.blocks[1].running_mean.dtype == torch.float32
    return messages


def test_a_norm_in_bf16_with_statistics_in_fp32_is_refused_by_torch_on_the_host() -> None:
    """On the host, torch's kernel needs parameters and statistics of one dtype."""
    for theirs, ours in run_ranks(_in_bf16, 2):
        assert ours == theirs
