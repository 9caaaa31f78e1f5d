"""torchao's weights and optimizers train on a sharded model as under FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor, linear_nf4, to_nf4

import fsdp_ext
from fsdp_ext import MixedPrecisionPolicy

WIDTH = 256  # a rank's rows are whole blocks of NF4
SYSTEMS = (fsdp_ext.fully_shard, torch.distributed.fsdp.fully_shard)


class QLora(nn.Module):
    """A frozen NF4 weight with a trained correction."""

    def __init__(self) -> None:
        super().__init__()
        weight = 0.05 * torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.weight = nn.Parameter(to_nf4(weight, 64, 64), requires_grad=False)
        self.down = nn.Linear(WIDTH, 4, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(4, WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return linear_nf4(x, self.weight) + self.up(self.down(x))


def nf4() -> nn.Module:
    return nn.Sequential(*(QLora() for _ in range(3)))


def float8() -> nn.Module:
    # With biases, since FSDP2 over gloo cannot gather float8 numbers alone.
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    converted: nn.Module = convert_to_float8_training(model, config=config)
    return converted


def train(
    make: Callable[[], Any],
    fully_shard: Callable[..., Any],
    precomputes: bool,
    compiles: bool = False,
    **options: Any,
) -> list[Tensor]:
    """Return losses, gradients and trained parameters of a few steps."""
    torch.manual_seed(0)
    model = make()
    for layer in model:
        if compiles:
            layer.compile(backend="eager", fullgraph=True)
        fully_shard(layer, **options)
    fully_shard(model, **options)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    seen: list[Tensor] = []
    for step in range(3):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(8, WIDTH, generator=generator).to(trained[0].device, trained[0].dtype)
        loss = (model(x).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        if precomputes:
            precompute_float8_dynamic_scale_for_fsdp(model)
        seen.append(loss.detach())
        if isinstance(model, fsdp_ext.FSDPModule):
            model._fsdp_ext_unit.root.impl.set_poison_released_slots(True)
    for param in trained:
        assert isinstance(param, DTensor)
        local: Any = param._local_tensor
        seen += [param.grad._local_tensor, getattr(local, "_tensor", local)]
    return seen


def train_beside_fsdp2(make: Callable[[], Any], precomputes: bool, options: dict[str, Any]) -> None:
    ours, theirs = (train(make, system, precomputes, **options) for system in SYSTEMS)
    assert ours[0].isfinite()
    assert not torch.equal(ours[0], ours[2])
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(mine, other), f"value {index}"


@pytest.mark.parametrize(
    ("make", "precomputes", "options"),
    [
        pytest.param(nf4, False, {}, id="NF4"),
        pytest.param(float8, False, {}, id="float8"),
        pytest.param(float8, True, {}, id="float8, scales computed after the step"),
        pytest.param(
            float8,
            False,
            {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
            id="float8 of bf16",
        ),
        pytest.param(float8, False, {"compiles": True}, id="float8 in full graphs"),
    ],
)
def test_weights_train_as_under_fsdp2(
    make: Callable[[], Any], precomputes: bool, options: dict[str, Any]
) -> None:
    run_ranks(train_beside_fsdp2, 2, make, precomputes, options)


def _optimized(kind: Callable[..., torch.optim.Optimizer]) -> None:
    # PyTorch's on-disk cache of compiled code can confuse two of these optimizers.
    torch._functorch.config.enable_autograd_cache = False
    seen: list[list[Tensor]] = []
    for fully_shard in SYSTEMS:
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = kind(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(dist.get_rank())
        losses = []
        for _ in range(4):
            loss = (model(torch.randn(4, WIDTH, generator=generator)) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        # Only the states of large weights are quantised to 8 or 4 bits.
        state = optimizer.state[model[0].weight]["exp_avg"].to_local()
        assert "OptimState" in type(state).__name__
        seen.append([*losses, *(param.to_local() for param in model.parameters())])
    assert seen[0][3] < seen[0][0]
    for mine, other in zip(*seen, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("kind", [AdamW8bit, AdamW4bit, AdamWFp8])
def test_optimizers_with_low_bit_states_train_as_under_fsdp2(
    kind: Callable[..., torch.optim.Optimizer],
) -> None:
    run_ranks(_optimized, 2, kind, fresh=True)  # it compiles, which leaves threads


def _saved() -> None:
    states = []
    for fully_shard in SYSTEMS:
        torch.manual_seed(0)
        states.append(fully_shard(nf4()).state_dict())
    assert states[0].keys() == states[1].keys()
    for key, ours in states[0].items():
        theirs = states[1][key]
        assert ours.placements == theirs.placements
        mine, other = ours._local_tensor, theirs._local_tensor
        assert type(mine) is type(other)
        if isinstance(mine, NF4Tensor):
            assert torch.equal(mine.quantized_data, other.quantized_data), key
            assert torch.equal(mine.quantized_scalers, other.quantized_scalers), key
        else:
            assert torch.equal(mine, other), key


def test_the_state_of_nf4_weights_is_that_of_fsdp2() -> None:
    run_ranks(_saved, 2)
