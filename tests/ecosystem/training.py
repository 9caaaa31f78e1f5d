"""How models of transformers are trained, asked for text and saved, in tests of both APIs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import transformers
from ecosystem.families import FAMILIES, LENGTH, VOCABULARY
from support.parity import Run, Tolerance
from torch import Tensor

STEPS = 3
# Gradients are sums of more than two terms: the unsharded model adds them up in another order.
ROUGH = Tolerance(1e-4, 2e-5)
# In bf16 gradients differ by more, and PyTorch's FSDP is compared bit for bit besides.
ROUGH_IN_BF16 = Tolerance(1e-2, 1e-2)
BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
WRITERS = [name for name in FAMILIES if name not in ("bert", "vit")]  # models that generate text

_PROMPT = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(9))


def checkpointed(run: Run, *, reentrant: bool) -> None:
    """Turn on activation checkpointing in a sharded model, which does not change numbers."""
    if run.sharded:
        model: Any = run.model
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        assert all(unit.gradient_checkpointing and unit.training for unit in model.units())


def accumulate_and_clip(run: Run, step: int) -> tuple[Tensor, ...]:
    """Run a step of two batches, whose gradients are clipped."""
    run.optimizer.zero_grad()
    losses = [run.loss(step, 0)]
    run.backward(losses[0] / 2, sync=False)
    losses.append(run.loss(step, 1))
    run.backward(losses[1] / 2)
    norm = run.clip(0.5)
    run.optimizer.step()
    return (*losses, norm)


def text_of(model: Any) -> Tensor:
    """Return what a model writes, without dropout."""
    was_training = model.training
    text: Tensor = model.eval().generate(_PROMPT, max_new_tokens=5, do_sample=False)
    model.train(was_training)
    return text


def assert_loads(
    name: str, model: Any, sharded: Any, state_dict: dict[str, Any], folder: str
) -> None:
    """Check that `from_pretrained` gives the model that `save_pretrained` has saved.

    Args:
        name: of the family.
        model: of that family.
        sharded: the same model, or a wrapper around it.
        state_dict: whole tensors; read on rank 0 only.
        folder: where it is saved.
    """
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state_dict)
    dist.barrier()
    loaded = getattr(transformers, FAMILIES[name].model).from_pretrained(folder)
    _, batch = model.batch(torch.Generator().manual_seed(7))
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**batch).loss, sharded.eval()(**batch).loss)
