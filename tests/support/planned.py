"""Compares the allocations of training with those that plan predicts, and a model for that."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_ext import Link, Plan

WIDTH = 512
ROWS = 4001  # no multiple of the number of ranks
FAST = Link("fast", alpha=0.0, beta=1e15)


def train(model: Any) -> torch.optim.Optimizer:
    """Run one step. Its buckets follow the order of registration."""
    arguments, keywords = model.batch(torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    model.loss(model(*arguments, **keywords)).backward()
    optimizer.step()
    return optimizer


def expect_as_planned(model: Any, optimizer: torch.optim.Optimizer, planned: Plan) -> None:
    root = model._fsdp_ext_unit.root
    memory, of_plan = root.impl.memory(), planned.memory
    assert memory["ring_slots"] == of_plan.ring_slots
    assert memory["ring_slot_bytes"] == of_plan.ring_slot
    assert memory["ring_bytes"] == of_plan.ring
    assert memory["staging_bytes"] == of_plan.staging
    assert memory["reduce_bytes"] == of_plan.reduce_input + of_plan.reduce_output
    assert memory["message_staging_bytes"] == of_plan.message_staging
    in_buckets = of_plan.kept_unsharded + of_plan.group_shards
    gather_inputs = memory["bucket_buffer_bytes"] - in_buckets
    assert gather_inputs == of_plan.gather_inputs
    assert [unit.name for unit in root.units] == [unit.name for unit in planned.units]
    assert [unit.flat_shard.nbytes for unit in root.units] == [u.shard for u in planned.units]
    assert sum(unit.impl.share_flat_gradient().nbytes for unit in root.units) == of_plan.gradients
    assert sum(unit.shard for unit in planned.units) == of_plan.shards
    if dist.get_rank() == 0:
        kept = [value for state in optimizer.state.values() for value in state.values()]
        held = [state._local_tensor for state in kept if state.ndim > 0]
        assert sum(state.nbytes for state in held) == of_plan.optimizer_states
    names = [unit.name for unit in root.units]
    for bucket, expected in zip(root.impl.buckets(), planned.buckets, strict=True):
        assert [names[number] for number in bucket["units"]] == list(expected.units)
        assert bucket["gather_bytes"] == expected.gather
        assert bucket["reduce_bytes"] == expected.reduce
        assert bucket["gather_messages"] == expected.gather_messages
        assert bucket["reduce_messages"] == expected.reduce_messages
        assert bucket["unsharded_bytes"] == expected.unsharded
        assert bucket["gather_plan"] == expected.gather_plan


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """A model of wide layers, whose activations of one token are small."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))
