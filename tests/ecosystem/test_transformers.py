"""Models of transformers train under `fully_shard` as unsharded and as under FSDP2."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from ecosystem.families import FAMILIES, LENGTH, VOCABULARY, subject
from support.fsdp1_parity import FSDP, torch_fsdp, train
from support.launcher import run_ranks
from support.parity import (
    EXACT,
    Case,
    Run,
    Tolerance,
    adamw,
    assert_same,
    check,
    load_system,
    whole,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

# Gradients are sums of more than two terms: the unsharded model adds them up in another order.
ROUGH = Tolerance(1e-4, 1e-5)
BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def checkpointed(run: Run) -> None:
    run.model.activation_checkpointing_enable()


def accumulate_and_clip(run: Run, step: int) -> tuple[Tensor, ...]:
    run.optimizer.zero_grad()
    losses = [run.loss(step, 0)]
    run.backward(losses[0] / 2, sync=False)
    losses.append(run.loss(step, 1))
    run.backward(losses[1] / 2)
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
    run.optimizer.step()
    return (*losses, whole(norm))


# All families train in fp32. Each of the other settings has a few families.
CASES = [
    *(Case(name, partial(subject, name), unsharded=ROUGH) for name in FAMILIES),
    *(
        Case(
            f"{name} in bf16, with activation checkpointing",
            partial(subject, name),
            optimizer=adamw,
            precision=BF16,
            before_sharding=checkpointed,
            unsharded=None,
        )
        for name in ("llama", "gpt2", "qwen3_moe", "bert", "vit", "t5")
    ),
    *(
        Case(
            f"{name}, gradients accumulated and clipped",
            partial(subject, name),
            step=accumulate_and_clip,
            unsharded=ROUGH,
        )
        for name in ("llama", "gpt2", "mixtral", "mamba")
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fact)
def test_trains_as_unsharded_and_as_fsdp2(case: Case) -> None:
    check(case, 2)


def _by_wrapper(name: str) -> None:
    histories = []
    for wrap in (torch_fsdp, FSDP):
        torch.manual_seed(0)
        model = subject(name)
        policy = ModuleWrapPolicy({type(unit) for unit in model.units()})
        histories.append(train(wrap(model, auto_wrap_policy=policy), model))
    # T5 uses its embedding three times, and FSDP1 adds up the three gradients in another order.
    assert_same(name, *histories, ROUGH if name == "t5" else EXACT)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "vit"])
def test_trains_under_the_wrapper_as_under_fsdp1(name: str) -> None:
    run_ranks(_by_wrapper, 2, name)


def _sharded(name: str, system: str) -> Any:
    torch.manual_seed(0)
    model = subject(name)
    if system != "unsharded":
        shard = load_system(system).fully_shard
        for unit in model.units():
            shard(unit)
        shard(model)
        register_fsdp_forward_method(model, "generate")
    return model


def _steps_and_texts(model: Any) -> dict[str, Tensor]:
    """Train with batches that all ranks share, and return losses and texts."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prompt = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(9))
    found = {}
    for step in range(3):
        _, batch = model.batch(torch.Generator().manual_seed(step))
        loss = model.eval()(**batch).loss  # without dropout
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = loss.detach()
        found[f"text {step}"] = model.generate(prompt, max_new_tokens=5, do_sample=False)
    return found


def _generates(name: str, directory: str) -> None:
    systems = ("unsharded", "fsdp2", "fsdp_ext")
    models = {system: _sharded(name, system) for system in systems}
    found = {system: _steps_and_texts(model) for system, model in models.items()}
    assert_same("unsharded", found["unsharded"], found["fsdp_ext"], ROUGH)
    assert_same("FSDP2", found["fsdp2"], found["fsdp_ext"])
    ours = models["fsdp_ext"]
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(ours, options=options)
    if dist.get_rank() == 0:
        ours.save_pretrained(directory, state_dict=state)
    dist.barrier()
    loaded = getattr(transformers, FAMILIES[name].model).from_pretrained(directory)
    _, batch = ours.batch(torch.Generator().manual_seed(7))
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**batch).loss, ours(**batch).loss)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "mamba"])
def test_generates_between_steps_and_saves_what_from_pretrained_loads(
    name: str, tmp_path: Path
) -> None:
    run_ranks(_generates, 2, name, str(tmp_path))
