"""`set_all_reduce_hook`: a function that changes a unit's reduced gradients, as with FSDP2."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import threading
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.models import OneUnit, Stack
from support.parity import ROUNDING, Case, Run, check, device, each
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_ext
from fsdp_ext import fully_shard
from fsdp_ext.sharding.params.user_hooks import on_stream

# - Beside FSDP2


def clip(gradients: Tensor) -> None:
    """Depends on what came before: a hook that is called twice, or too late, shows."""
    gradients.clamp_(-0.02, 0.03).mul_(-1.5)


def over_gloo(run: Run) -> None:
    os.environ["FSDP_EXT_TRANSPORT"] = "process_group"


def hook_the_middle(run: Run) -> None:
    run.model.blocks[1].set_all_reduce_hook(clip)


def hook_all(run: Run) -> None:
    for module in [*run.model.units(), run.model]:
        module.set_all_reduce_hook(clip)


def hook_all_in_messages(run: Run) -> None:
    hook_all(run)
    if isinstance(run.model, fsdp_ext.FSDPModule):
        for unit in run.model._fsdp_ext_units(recurse=True):
            unit.change(max_message_bytes=2048)


def accumulate(run: Run, step: int) -> tuple[Tensor, ...]:
    run.optimizer.zero_grad()
    losses = []
    for micro_batch in range(3):
        losses.append(run.loss(step, micro_batch))
        # The hook of the last one adds to the gradient of the first.
        run.backward(losses[-1], sync=micro_batch != 1)
    run.optimizer.step()
    return tuple(losses)


def change_between_forward_and_backward(run: Run, step: int) -> tuple[Tensor, ...]:
    """In even steps the middle block has a hook. Its bucket has other units, too, at first."""
    run.optimizer.zero_grad()
    loss = run.loss(step)
    run.model.blocks[1].set_all_reduce_hook(clip if step % 2 == 0 else None)
    run.backward(loss)
    run.optimizer.step()
    return (loss,)


ONE = Case("one of several units", Stack, (2, 3), after_sharding=hook_the_middle, unsharded=None)
ALL = dataclasses.replace(ONE, fact="all units", after_sharding=hook_all)


CASES = [
    ONE,
    ALL,
    dataclasses.replace(ALL, fact="a root alone", subject=OneUnit),
    dataclasses.replace(ALL, fact="one rank", worlds=(1,)),
    dataclasses.replace(ALL, fact="in messages", after_sharding=hook_all_in_messages),
    dataclasses.replace(ALL, fact="hooks, accumulated", step=accumulate),
    dataclasses.replace(ALL, fact="over gloo", before_sharding=over_gloo),
    dataclasses.replace(
        ALL,
        fact="sums in bf16",
        worlds=(1, 2, 3),
        precision={"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
    ),
    dataclasses.replace(
        ALL,
        fact="sums in fp16, divided behind the hook",
        precision={"reduce_dtype": torch.float16},
        fsdp2=ROUNDING[torch.float16],  # it rounds once more
    ),
    dataclasses.replace(ALL, fact="behind the all-reduce over replicas", worlds=(4,), mesh=(2, 2)),
    dataclasses.replace(
        ALL,
        fact="set between forward and backward",
        after_sharding=None,
        step=change_between_forward_and_backward,
    ),
]


@each(CASES, quick=(2, 4), more=(1,))
def test_a_hook_changes_reduced_gradients_as_with_fsdp2(case: Case, world_size: int) -> None:
    check(case, world_size)


# - What a hook sees


def make(**settings: Any) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    for layer in model:
        fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def look() -> None:
    seen: list[tuple[Tensor, int]] = []

    def hook(gradients: Tensor) -> None:
        assert not torch.is_grad_enabled()
        seen.append((gradients.clone(), threading.get_ident()))

    model = make(mp_policy=fsdp_ext.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    for step in range(3):
        model[1].set_all_reduce_hook(hook)  # again, which drops the object of the step before
        model.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        assert len(seen) == step + 1, "one call for each reduction"
    gradients, thread = seen[-1]
    assert gradients.dtype == torch.bfloat16
    shards = torch.cat([param.grad.to_local().flatten() for param in model[1].parameters()])
    values = gradients[gradients != 0].float()
    assert torch.equal(values.sort().values, shards.sort().values), "and padding, which is zero"
    assert thread != threading.get_ident(), "backward goes on meanwhile"
    buckets = [bucket["units"] for bucket in model._fsdp_ext_unit.root.impl.buckets()]
    assert [2] in buckets, "the unit shares no bucket"
    assert len(buckets) > 1


def test_a_hook_gets_all_gradients_of_its_unit_once_a_reduction() -> None:
    run_ranks(look, 2)


def average_over_sets() -> None:
    """What FSDP2 documents hooks for: hybrid sharding with an all-reduce of the user's own."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    across = mesh.get_group(0)

    def average(gradients: Tensor) -> None:
        dist.all_reduce(gradients, group=across)
        gradients.div_(2)

    expected, got = make(mesh=mesh), make(mesh=mesh["shard"])
    for module in [*got, got]:
        module.set_all_reduce_hook(average)
    batch = torch.randn(2, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    for model in (expected, got):
        model(batch).square().sum().backward()
    for want, have in zip(expected.parameters(), got.parameters(), strict=True):
        assert torch.equal(want.grad.to_local(), have.grad.to_local())


def test_a_hook_may_all_reduce_over_other_ranks() -> None:
    run_ranks(average_over_sets, 4)


# - Mistakes


def fail() -> None:
    model = make()
    model(torch.ones(2, 6)).sum().backward()
    expected = [param.grad.to_local().clone() for param in model.parameters()]

    def hook(gradients: Tensor) -> None:
        raise LookupError("no such gradient")

    model[1].set_all_reduce_hook(hook if dist.get_rank() == 0 else lambda gradients: None)
    for _ in range(2):
        model.zero_grad()
        loss = model(torch.ones(2, 6)).sum()
        if dist.get_rank() == 0:
            with pytest.raises(LookupError, match="no such gradient"):
                loss.backward()
        else:
            loss.backward()
    model[1].set_all_reduce_hook(lambda gradients: None)
    model.zero_grad()
    model(torch.ones(2, 6)).sum().backward()
    for param, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(param.grad.to_local(), gradient), "training goes on"


def test_an_error_of_a_hook_is_raised_at_the_end_of_backward() -> None:
    run_ranks(fail, 2)


def fail_before_a_setting() -> None:
    def hook(gradients: Tensor) -> None:
        raise LookupError("no such gradient")

    model = make()
    model(torch.ones(2, 6)).sum().backward()
    model.set_manual_backward_finalization(True)
    model[1].set_all_reduce_hook(hook)
    model(torch.ones(2, 6)).sum().backward()
    model.set_requires_gradient_sync(True)
    with pytest.raises(LookupError, match="no such gradient"):
        model.finalize_backward()


def test_an_error_of_a_hook_outlives_changes_of_settings() -> None:
    run_ranks(fail_before_a_setting, 2)


def fail_twice() -> None:
    model = make()
    fails = True

    def hook(gradients: Tensor) -> None:
        if fails:
            raise LookupError("no such gradient")

    def fail_in_backward(gradient: Tensor) -> None:
        raise KeyError("of backward")

    model[1].set_all_reduce_hook(hook)
    x = torch.ones(2, 6, requires_grad=True)
    x.register_hook(fail_in_backward)
    with pytest.raises(KeyError, match="of backward"):
        model(x).sum().backward()
    fails = False
    model.zero_grad()
    model(torch.ones(2, 6)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_an_error_of_a_hook_goes_with_the_backward_that_failed() -> None:
    run_ranks(fail_twice, 2)


def misuse() -> None:
    model = make()
    stream = torch.cpu.Stream()
    model.set_all_reduce_hook(clip, stream=stream)
    hybrid = make(
        mesh=init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    )
    with pytest.raises(ValueError, match="a 2-D mesh"):
        hybrid.set_all_reduce_hook(clip, stream=stream)


def test_the_reductions_wait_for_a_stream_whose_hook_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[tuple[str, str]] = []

    @dataclasses.dataclass
    class Stream:
        name: str

        def wait_stream(self, other: Stream) -> None:
            waits.append((self.name, other.name))

    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: Stream("lane"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    chosen: Any = Stream("chosen")
    with pytest.raises(KeyError), on_stream(torch.device("cuda", 0), 1, chosen):
        raise KeyError
    assert waits == [("chosen", "lane"), ("lane", "chosen")]


def test_wrong_arguments_are_refused() -> None:
    run_ranks(misuse, 4)


def mul_by_length(model: nn.Sequential, gradients: Tensor) -> None:
    gradients.mul_(len(model))


def forget() -> None:
    model = make()
    model.set_all_reduce_hook(partial(mul_by_length, model))
    model(torch.ones(2, 6)).sum().backward()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_a_hook_that_refers_to_the_model_does_not_keep_it() -> None:
    run_ranks(forget, 2)
