"""Parameters in any memory format train as contiguous ones do."""

from __future__ import annotations

import torch
from support.launcher import run_ranks
from support.models import DIM, Stack
from support.parity import SYSTEM, Case, Run, Sharded, check, each, load_system
from torch import Tensor, nn


class Convolution(nn.Module):
    """A convolution with two channels over the features."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(2, 2, kernel_size=(1, 3), padding=(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x.view(-1, 2, 1, DIM // 2)).reshape(-1, DIM)


class Convolutions(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Convolution()


def in_other_formats(run: Run) -> None:
    """Change the formats for fsdp_ext alone. FSDP2 refuses them, and sums may have other orders."""
    if not isinstance(run, Sharded) or run.system.name == "fsdp2":
        return
    run.model.to(memory_format=torch.channels_last)
    run.model.head.weight = nn.Parameter(run.model.head.weight.detach().t().contiguous().t())
    assert not run.model.blocks[1].mix.weight.is_contiguous()
    assert not run.model.head.weight.is_contiguous()


CASES = [
    Case("channels_last and transposed", Convolutions, before_sharding=in_other_formats),
    Case("channels_last in bf16", Convolutions, before_sharding=in_other_formats, unsharded=None,
         precision={"param_dtype": torch.bfloat16}),
]  # fmt: skip


@each(CASES)
def test_parameters_in_other_memory_formats_train_the_same(case: Case, world_size: int) -> None:
    check(case, world_size)


def _on_meta() -> None:
    case = Case("", Convolutions)
    expected = Sharded(load_system(SYSTEM), case).model.state_dict()
    with torch.device("meta"):
        model = Convolutions().to(memory_format=torch.channels_last)
    for unit in (*model.units(), model):
        load_system(SYSTEM).fully_shard(unit)
    model.to_empty(device="cpu")
    model.load_state_dict(expected)
    model(torch.ones(2, DIM)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.to_local().is_contiguous(), name


def test_channels_last_parameters_may_start_on_meta() -> None:
    run_ranks(_on_meta, 2)
