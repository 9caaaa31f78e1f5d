"""Checks and health on a GPU find what they find on the host, and hashes are the host's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.launcher import run_ranks
from support.models import Stack

import fsdp_ext
from fsdp_ext import _C, fully_shard


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_hash_is_that_of_the_same_operators_on_the_host(dtype: torch.dtype) -> None:
    values = torch.randint(0, 256, (4_000_003,), dtype=torch.uint8)
    values = values[: values.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    assert _C.hash_of(values.cuda()).item() == _C.hash_by_operators(values).item()


def _flip_in_a_shard() -> tuple[str, str]:
    torch.manual_seed(0)
    model: Any = Stack().cuda()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, check_every=1)
    x = torch.ones(2, 10, device="cuda")
    model(x).sum().backward()
    shown = str(fsdp_ext.health(model))
    loss = model(x).sum()
    model.blocks[1].up.weight._local_tensor.data.view(-1).view(torch.int32)[3] ^= 1 << 20
    with pytest.raises(RuntimeError) as raised:
        loss.backward()
    return shown, str(raised.value)


def _nan() -> fsdp_ext.Health:
    torch.manual_seed(0)
    model: Any = Stack().cuda()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    x = torch.ones(2, 10, device="cuda")
    model(x).sum().backward()
    model.zero_grad()
    model.blocks[1].up.register_forward_hook(
        lambda module, args, output: output.register_hook(lambda g: g * float("nan")) and None
    )
    model(x).sum().backward()
    return fsdp_ext.health(model)


def test_packing_marks_the_units_with_nan() -> None:
    (health,) = run_ranks(_nan, 1, device="cuda")
    assert health.first_nonfinite is not None
    assert (health.first_nonfinite.name, health.first_nonfinite.born_on) == ("blocks.1", (0,))
    by_name = {unit.name: unit for unit in health.units}
    assert by_name["blocks.2"].born_on == ()


def test_a_flipped_bit_in_a_shard_is_found() -> None:
    ((shown, message),) = run_ranks(_flip_in_a_shard, 1, device="cuda")
    assert "All gradients are finite." in shown
    assert "in step 2: the shard of unit 'blocks.1' on rank 0 changed" in message
