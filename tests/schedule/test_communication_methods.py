"""Methods of FSDP2 that change when or how ranks communicate leave the numbers as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import models
from support.launcher import run_ranks
from support.models import Stack
from support.parity import SYSTEM, Case, Run, Sharded, check, each, load_system, train_step
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp

import fsdp_ext
from fsdp_ext.sharding.api.handles import HAS_FINALIZATION


class Tokens(Stack):
    """A stack behind an embedding that is a unit. Its backward does not read the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, models.DIM)

    def units(self) -> list[models.Unit]:
        return [self.embed, *super().units()]

    def batch(self, generator: torch.Generator) -> models.Batch:
        return (torch.randint(7, (models.ROWS,), generator=generator),), {}

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(self.embed(tokens))


def leave_the_embedding_sharded(run: Run) -> None:
    if run.sharded:
        run.model.embed.set_unshard_in_backward(False)


def prefetch_the_embedding_in_vain(run: Run) -> None:
    leave_the_embedding_sharded(run)
    if run.sharded:
        run.model.blocks[0].set_modules_to_backward_prefetch([run.model.embed])


def leave_the_embedding_sharded_in_every_other_step(run: Run, step: int) -> tuple[Tensor, ...]:
    if run.sharded:
        run.model.embed.set_unshard_in_backward(step % 2 == 0)
    return train_step(run, step)


def nothing_to_reduce_between_replicas(run: Run) -> None:
    if run.sharded:
        run.model.set_requires_all_reduce(False)


def communicate_otherwise(run: Run) -> None:
    """Call what changes FSDP2's communication, as far as the installed one can do it over gloo."""
    if run.sharded:
        run.model.set_force_sum_reduction_for_comms(True)
        run.model._set_unshard_async_op(True)
        for name, value in (
            ("set_separate_reduce_scatter_group", True),
            ("set_reduce_scatter_max_input_buffers", 2),
        ):
            if hasattr(run.model, name):
                getattr(run.model, name)(value)


def divide_by_four(run: Run) -> None:
    """Over gloo, FSDP2 divides by other factors than the world size only if it may scale itself.

    On one rank it would then divide twice (torch 2.13).
    """
    for number, module in enumerate(run.model.modules()):
        if run.sharded and isinstance(module, run.system.fsdp_module):
            module.set_force_sum_reduction_for_comms(dist.get_world_size() > 1)
            names = ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor")
            getattr(module, names[number % 2])(4.0)


class OtherMethod(Stack):
    """A stack that runs by another method than forward, too."""

    def generate(self, x: Tensor) -> Tensor:
        return 2 * self.head(self.stem(x))


def register(run: Run, api: Any) -> None:
    api.register_fsdp_forward_method(run.model, "generate")


def register_by_own(run: Run) -> None:
    if run.sharded:
        register(run, fsdp_ext if run.system.name == "fsdp_ext" else torch_fsdp)


def register_by_torch(run: Run) -> None:
    register(run, torch_fsdp)


def generate_and_forward(run: Run, step: int) -> tuple[Tensor, ...]:
    run.optimizer.zero_grad()
    (batch,), _ = run.batch(step)
    with torch.no_grad():
        sample = run.model.generate(batch)
    generated = run.model.loss(run.model.generate(batch))
    run.backward(generated)
    loss = run.loss(step)
    run.backward(loss)
    run.optimizer.step()
    return sample, generated, loss


def finalize_by_hand(run: Run, step: int) -> tuple[Tensor, ...]:
    """Accumulate two micro-batches, and reduce after the second one's backward."""
    by_hand = run.sharded and hasattr(run.model, "finalize_backward")
    if by_hand:
        run.model.set_manual_backward_finalization(True)
    run.optimizer.zero_grad()
    losses = run.loss(step, 0), run.loss(step, 1)
    run.backward(losses[0], sync=False)
    run.backward(losses[1], sync=not by_hand)
    if by_hand:
        run.sync(True)
        handle = run.model.finalize_backward(async_op=step % 2 == 0)
        assert (handle is None) == (step % 2 == 1)
        if handle is not None:
            handle.wait()
            handle.wait()  # a second call is no error
        run.model.set_manual_backward_finalization(False)
    run.optimizer.step()
    return losses


def finalize_what_is_reduced(run: Run, step: int) -> tuple[Tensor, ...]:
    """Reduce in backward, and only wait afterwards."""
    by_hand = run.sharded and hasattr(run.model, "finalize_backward")
    if by_hand:
        run.model.set_manual_backward_finalization(True)
    run.optimizer.zero_grad()
    loss = run.loss(step)
    run.backward(loss)
    if by_hand:
        run.model.finalize_backward()
    run.optimizer.step()
    return (loss,)


def put_gradients_there(run: Run, step: int) -> tuple[Tensor, ...]:
    """Do what zero-bubble schedules of torch.distributed.pipelining do with FSDP2's state."""
    run.optimizer.zero_grad()
    loss = run.loss(step)
    if not run.sharded:
        run.backward(loss)
        run.optimizer.step()
        return (loss,)
    run.sync(False)
    run.model.set_is_last_backward(False)
    run.model.set_reshard_after_backward(False)
    parameters = list(run.model.parameters())  # unsharded, because forward does not reshard
    gradients = torch.autograd.grad(loss, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    run.sync(True)
    run.model.set_is_last_backward(True)
    run.model.set_reshard_after_backward(True)
    state = torch_fsdp.fully_shard.state(run.model)
    for one in state._state_ctx.all_states:
        if one._fsdp_param_group is not None:
            one._fsdp_param_group.post_backward()
    state._root_post_backward_final_callback()
    run.optimizer.step()
    return (loss,)


CASES = [
    Case("gradients that a schedule has put there", Stack, step=put_gradients_there,
         options={"reshard_after_forward": False}),
    Case("a backward that is finalised by hand", Stack, step=finalize_by_hand),
    Case("a backward that is only waited for by hand", Stack, step=finalize_what_is_reduced),
    Case("gradients divided by a factor", Stack, after_sharding=divide_by_four, unsharded=None),
    Case("a registered method", OtherMethod, step=generate_and_forward,
         after_sharding=register_by_own),
    Case("a method registered by torch", OtherMethod, step=generate_and_forward,
         after_sharding=register_by_torch),
    Case("an embedding that backward leaves sharded", Tokens,
         after_sharding=leave_the_embedding_sharded),
    Case("an embedding whose prefetch has no effect", Tokens,
         after_sharding=prefetch_the_embedding_in_vain),
    Case("an embedding that some backwards leave sharded", Tokens,
         step=leave_the_embedding_sharded_in_every_other_step),
    Case("no all-reduce where there are no replicas", Stack,
         after_sharding=nothing_to_reduce_between_replicas),
    Case("another way to communicate", Stack, after_sharding=communicate_otherwise),
]  # fmt: skip


@each(CASES, every=3)
def test_numbers_do_not_change_with(case: Case, world_size: int) -> None:
    check(case, world_size)


def _gathers_in_backward(leaves_sharded: bool) -> list[str]:
    run = Sharded(load_system(SYSTEM), Case("", Tokens, root_options={"bucket_bytes": 0}))
    if leaves_sharded:
        leave_the_embedding_sharded(run)
    for step in range(2):
        train_step(run, step)
    impl = run.model._fsdp_ext_unit.root.impl
    impl.enable_log(True)
    train_step(run, 2)
    return [
        unit for op, phase, unit, _ in impl.take_log() if (op, phase) == ("all_gather", "backward")
    ]


def test_backward_does_not_gather_what_it_is_told_not_to() -> None:
    assert "embed" in run_ranks(_gathers_in_backward, 2, False)[0]
    assert "embed" not in run_ranks(_gathers_in_backward, 2, True)[0]


def _read_in_backward() -> None:
    run = Sharded(load_system(SYSTEM), Case("", Stack, root_options={"bucket_bytes": 0}))
    run.model.blocks[0].set_unshard_in_backward(False)
    with pytest.raises(RuntimeError, match=r"read while it is freed|of size 0|not allocated"):
        run.backward(run.loss(0))


def test_a_backward_that_reads_what_was_left_sharded_raises() -> None:
    run_ranks(_read_in_backward, 2)


def _arguments() -> None:
    model: Any = fsdp_ext.fully_shard(nn.Sequential(nn.Linear(2, 2)))
    model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_symm_mem_for_comm()
    model.set_keep_unsharded_storage(True)
    model.set_post_optim_event(torch.Event(device="cpu"))
    model.set_post_optim_event(torch.cpu.current_stream().record_event())
    model.set_manual_backward_finalization(True)
    model.finalize_backward()  # nothing has run
    hook = model[0].register_forward_hook(lambda *_: model.finalize_backward())
    with pytest.raises(RuntimeError, match="after backward has ended"):
        model(torch.ones(1, 2))
    hook.remove()
    model(torch.ones(1, 2)).sum().backward()


def test_methods_without_an_effect_check_their_arguments() -> None:
    run_ranks(_arguments, 1)


def _raise(_gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


def _misused_finalization() -> None:
    x = torch.ones(1, 2)

    def sharded(fully_shard: Any, by_hand: bool = True) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        for layer in model:
            fully_shard(layer)
        model = fully_shard(model)
        if by_hand:
            model.set_manual_backward_finalization(True)
        return model

    found = {}
    systems = (fsdp_ext.fully_shard, torch_fsdp.fully_shard)
    for fully_shard in systems if HAS_FINALIZATION else systems[:1]:
        model = sharded(fully_shard, by_hand=False)
        assert model.finalize_backward() is None
        model.finalize_backward(async_op=True).wait()
        model[1].set_manual_backward_finalization(True)
        with pytest.raises(RuntimeError, match=r"set_manual_backward_finalization.* root"):
            model(x)

        model = sharded(fully_shard)
        model.unshard()
        model.reshard()
        assert model.finalize_backward() is None
        model(x).sum().backward()
        for call in (
            lambda layer: layer.set_manual_backward_finalization(False),
            lambda layer: layer.finalize_backward(),
        ):
            with pytest.raises(RuntimeError, match=r"called on .*root"):
                call(model[0])
        with pytest.raises(RuntimeError, match=r"set_manual_backward_finalization.* change.* mode"):
            model.set_manual_backward_finalization(False)
        handle = model.finalize_backward(async_op=True)
        with pytest.raises(RuntimeError, match="wait"):
            model(x)
        with pytest.raises(RuntimeError, match="wait"):
            model.finalize_backward()
        handle.wait()
        handle.wait()
        model(x).sum().backward()
        model.finalize_backward()
        found[fully_shard] = [param.grad.full_tensor() for param in model.parameters()]
        model.set_manual_backward_finalization(False)
        model.set_manual_backward_finalization(True)
        model.zero_grad()

        # The wait sends nothing: it leaves alone what was accumulated later.
        first, second, failing = model(x).sum(), model(2 * x).sum(), model(x)
        failing.register_hook(_raise)
        first.backward()
        handle = model.finalize_backward(async_op=True)
        model.set_requires_gradient_sync(False)
        second.backward()
        with pytest.raises(ZeroDivisionError):
            failing.sum().backward()
        handle.wait()
        found[fully_shard] += [param.grad.full_tensor() for param in model.parameters()]
        model.reset_iter_state()
        model.set_requires_gradient_sync(True)
        model.zero_grad()

        model(x).sum().backward()
        handle = model.finalize_backward(async_op=True)
        model.reset_iter_state()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"wait was called on a handle|invalidated"):
                handle.wait()
        model.set_manual_backward_finalization(False)
        model(x).sum().backward()

        model = sharded(fully_shard)
        model(x).sum().backward()
        model.double()
        model.unshard()
        model.reshard()
        with pytest.raises(RuntimeError, match=r"set_manual_backward_finalization.* change.* mode"):
            model.set_manual_backward_finalization(False)
        handle = model.finalize_backward(async_op=True)
        model.float()
        with pytest.raises(RuntimeError, match="wait"):
            model(x)
        handle.wait()
        model(x).sum().backward()
    first, *others = found.values()
    assert all(gradient.norm() > 0 for gradient in first)
    later = first[len(first) // 2 :]
    torch.testing.assert_close([2 * gradient for gradient in later], first[: len(later)])
    for other in others:
        torch.testing.assert_close(other, first)


def test_misuse_of_manual_finalization_raises_as_under_fsdp2() -> None:
    run_ranks(_misused_finalization, 2)


def _refused_in_forward() -> None:
    model: Any = fsdp_ext.fully_shard(nn.Sequential(nn.Linear(1, 2)))
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 1)).sum().backward()
    hook = model[0].register_forward_hook(lambda *_: model.set_gradient_divide_factor(8.0))
    with pytest.raises(RuntimeError, match="while forward or backward runs"):
        model(torch.ones(1, 1))
    hook.remove()
    model.set_requires_gradient_sync(True)  # passes all settings of the unit on
    model(torch.ones(1, 1)).sum().backward()
    assert torch.equal(model[0].weight.grad.full_tensor(), torch.full((2, 1), 2.0))


def test_a_setting_that_was_refused_has_no_effect_later() -> None:
    run_ranks(_refused_in_forward, 2)
