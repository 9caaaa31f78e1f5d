"""Models of transformers train under `fully_shard` as unsharded and as under FSDP2.

Each family meets both dtypes, both kinds of activation checkpointing, and accumulation with
clipping. test_transformers_fsdp1.py has the other pairs of dtype and checkpointing.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ecosystem.families import FAMILIES, subject
from ecosystem.training import (
    BF16,
    ROUGH,
    ROUGH_IN_BF16,
    STEPS,
    WRITERS,
    accumulate_and_clip,
    assert_loads,
    checkpointed,
    text_of,
)
from support.launcher import run_ranks
from support.parity import Case, assert_same, check, load_system
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import register_fsdp_forward_method

CASES = [
    *(
        Case(
            f"{name}, accumulated and clipped, reentrant checkpointing",
            partial(subject, name),
            step=accumulate_and_clip,
            before_sharding=partial(checkpointed, reentrant=True),
            unsharded=ROUGH,
            steps=STEPS,
        )
        for name in FAMILIES
    ),
    *(
        Case(
            f"{name} in bf16, checkpointing that is not reentrant",
            partial(subject, name),
            precision=BF16,
            before_sharding=partial(checkpointed, reentrant=False),
            unsharded=ROUGH_IN_BF16,
            steps=STEPS,
        )
        for name in FAMILIES
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fact)
def test_trains_as_unsharded_and_as_fsdp2(case: Case) -> None:
    check(case, 2)


def _sharded(name: str, system: str) -> Any:
    torch.manual_seed(0)
    model = subject(name)
    if system != "unsharded":
        shard = load_system(system).fully_shard
        for unit in model.units():
            shard(unit)
        shard(model)
        if name in WRITERS:
            register_fsdp_forward_method(model, "generate")
    return model


def _steps_and_texts(name: str, model: Any) -> dict[str, Tensor]:
    """Train with batches that all ranks share, and return losses and texts."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {}
    for step in range(STEPS):
        _, batch = model.batch(torch.Generator().manual_seed(step))
        loss = model.eval()(**batch).loss  # without dropout
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = loss.detach()
        if name in WRITERS:
            found[f"text {step}"] = text_of(model)
    return found


def _generates(name: str, folder: str) -> None:
    systems = ("unsharded", "fsdp2", "fsdp_ext")
    models = {system: _sharded(name, system) for system in systems}
    found = {system: _steps_and_texts(name, model) for system, model in models.items()}
    assert_same("unsharded", found["unsharded"], found["fsdp_ext"], ROUGH)
    assert_same("FSDP2", found["fsdp2"], found["fsdp_ext"])
    ours = models["fsdp_ext"]
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    assert_loads(name, ours, ours, get_model_state_dict(ours, options=options), folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_generates_between_steps_and_saves_what_from_pretrained_loads(
    name: str, tmp_path: Path
) -> None:
    run_ranks(_generates, 2, name, str(tmp_path))


def _unused_experts(name: str, rank: int) -> set[tuple[str, int]]:
    """Return the experts that a rank's first batch does not reach."""
    torch.manual_seed(0)
    model = subject(name)
    _, batch = model.batch(torch.Generator().manual_seed(rank))  # as Run.batch does it
    model(**batch).loss.backward()
    return {
        (param_name, expert)
        for param_name, param in model.named_parameters()
        if ".experts." in param_name
        for expert in range(len(param))
        if not param.grad[expert].any()
    }


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_ranks_leave_experts_unused_that_the_other_rank_uses(name: str) -> None:
    unused = [_unused_experts(name, rank) for rank in range(2)]
    assert unused[0] - unused[1]
    assert unused[1] - unused[0]
