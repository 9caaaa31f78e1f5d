"""Under `FullyShardedDataParallel`, `.grad` after a backward in `no_sync` is as under FSDP1."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.fsdp1_flat import flat_of
from support.fsdp1_parity import (
    BF16,
    BY_BLOCK,
    CPU,
    FSDP,
    Values,
    assert_equal,
    average_gradients,
    make,
    run,
)
from support.launcher import run_ranks
from support.matrix import exhaustive, exhaustive_cases
from support.models import Stack, Subject
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.tensor import DTensor

FULL, GRAD_OP, NO_SHARD = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)
HYBRID = ShardingStrategy.HYBRID_SHARD
# (strategy, use_orig_params)
KINDS = [
    (FULL, True),
    (NO_SHARD, False),
    *exhaustive_cases((FULL, False), (NO_SHARD, True), (GRAD_OP, True)),
]
# What a user does with gradients.
Action = Callable[[nn.Module], object]


def nothing(model: nn.Module) -> None:
    pass


def zero(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def halve(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)


def drop(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


def drop_biases(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            param.grad = None


def replace(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad = param.grad * 2


def clip(model: Any) -> Tensor:
    norm: Tensor = model.clip_grad_norm_(0.05)
    return norm


@dataclass(frozen=True)
class Backward:
    """One micro-batch, and what the user does after its backward.

    With `clears`, the optimizer clears gradients between its forward and its backward.
    """

    syncs: bool
    then: Action = nothing
    clears: bool = False


def no_sync(then: Action = nothing) -> Backward:
    return Backward(syncs=False, then=then)


def sync(*, clears: bool = False) -> Backward:
    return Backward(syncs=True, clears=clears)


Program = tuple[Backward, ...]
# FSDP1 trains these, and the unsharded model with averaged gradients trains to the same bits.
PROGRAMS: dict[str, Program] = {
    "plain": (no_sync(), no_sync(), sync()),
    "zero_grad": (no_sync(nn.Module.zero_grad), no_sync(), sync()),
    "zero in place": (no_sync(zero), no_sync(), sync()),
    "grad = None": (no_sync(), no_sync(drop), sync()),
    "mul_": (no_sync(halve), no_sync(halve), sync()),
    "cleared after forward": (no_sync(), sync(clears=True)),
    "sync first": (sync(), no_sync(halve), sync()),
}
# What FSDP1 does not do, or not so: it has the oddities that docs/design/fsdp1.md lists.
BEYOND_FSDP1: dict[str, Program] = {
    "one of several": (no_sync(drop_biases), no_sync(), sync()),
    "replaced": (no_sync(replace), no_sync(replace), sync()),
    "all dropped after sync": (sync(), no_sync(drop), sync()),
}


def train(wrapped: Any, model: Subject, program: Program) -> Values:
    """Train two steps, and return the parameters."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    is_plain = wrapped is model
    for step in range(2):
        for number, each in enumerate(program):
            shared = contextlib.nullcontext() if each.syncs or is_plain else wrapped.no_sync()
            with shared:
                loss = run(wrapped, model, 10 * step + number)
                if each.clears:
                    optimizer.zero_grad()
                loss.backward()
            if is_plain and each.syncs:
                average_gradients(wrapped)
            each.then(wrapped)
        optimizer.step()
        if step == 0:
            optimizer.zero_grad()
    return {name: value.clone() for name, value in wrapped.state_dict().items()}


def ours_and_torchs(
    strategy: ShardingStrategy, orig: bool, subject: Callable[[], Subject] = Stack, **kwargs: Any
) -> list[tuple[Any, Subject]]:
    """Return ours and FSDP1's wrapper, each with its model."""
    pairs = []
    for wrapper, extra in ((FSDP, {}), (TorchFSDP, {"device_id": CPU})):
        model = make(subject)
        wrapped = wrapper(
            model,
            sharding_strategy=strategy,
            use_orig_params=orig,
            auto_wrap_policy=BY_BLOCK,
            **extra,
            **kwargs,
        )
        pairs.append((wrapped, model))
    return pairs


def counts(strategy: ShardingStrategy, orig: bool) -> None:
    for name, program in PROGRAMS.items():
        ours, reference = ours_and_torchs(strategy, orig)
        got = train(*ours, program)
        assert_equal(got, train(*reference, program))
        plain = make(Stack)
        want = train(plain, plain, program)
        if name != "sync first" or strategy is NO_SHARD:
            # With shards, changes of `.grad` after no_sync do not change an earlier reduction.
            assert_equal(got, want)
    for program in BEYOND_FSDP1.values() if orig else ():
        model = make(Stack)
        wrapped = FSDP(
            model, sharding_strategy=strategy, use_orig_params=True, auto_wrap_policy=BY_BLOCK
        )
        plain = make(Stack)
        want = train(plain, plain, program)
        assert_equal(train(wrapped, model, program), want)


@pytest.mark.parametrize(("strategy", "orig"), KINDS)
def test_what_is_done_to_gradients_in_no_sync_counts(
    strategy: ShardingStrategy, orig: bool
) -> None:
    run_ranks(counts, 2, strategy, orig)


def by_name(wrapped: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name.replace("_fsdp_wrapped_module.", ""): param
        for name, param in wrapped.named_parameters()
    }


def visible(wrapped: nn.Module) -> Values:
    """Return what `.grad` has, by name; elements of flat gradients in the order of their values."""
    found: Values = {}
    for name, param in by_name(wrapped).items():
        grad = param.grad
        assert grad is not None
        grad = grad.to_local() if isinstance(grad, DTensor) else grad
        found[name] = grad.flatten().sort().values if "_flat_param" in name else grad.clone()
    return found


def without_padding(values: Values, want: Values) -> Values:
    """Our flat gradient has padding if it has all elements of the flat parameter."""
    return {
        name: value
        if value is None or value.numel() == want[name].numel()  # type: ignore[union-attr]
        else value[value != 0]
        for name, value in values.items()
    }


def shows(strategy: ShardingStrategy, orig: bool) -> None:
    low = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)
    for precision in (None, low):
        ours, reference = ours_and_torchs(strategy, orig, mixed_precision=precision)
        for step in range(2):
            for wrapped, model in (ours, reference):
                with wrapped.no_sync():
                    run(wrapped, model, step).backward()
            want = visible(reference[0])
            assert_equal(without_padding(visible(ours[0]), want), want)
        # Norms are summed up in another order.
        rtol = 2e-2 if precision else 1e-5
        torch.testing.assert_close(clip(ours[0]), clip(reference[0]), rtol=rtol, atol=0)
        got = without_padding(visible(ours[0]), want)
        for name, value in visible(reference[0]).items():
            torch.testing.assert_close(got[name], value, rtol=rtol, atol=0)


@pytest.mark.parametrize(("strategy", "orig"), KINDS)
def test_the_gradient_of_this_rank_is_visible_and_can_be_clipped(
    strategy: ShardingStrategy, orig: bool
) -> None:
    run_ranks(shows, 2, strategy, orig)


def in_low_precision(strategy: ShardingStrategy, orig: bool) -> None:
    policies = (
        MixedPrecision(param_dtype=BF16),
        MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32),
        MixedPrecision(param_dtype=BF16, keep_low_precision_grads=True),
    )
    for policy in policies:
        ours, reference = ours_and_torchs(strategy, orig, mixed_precision=policy)
        program = PROGRAMS["mul_"]
        assert_equal(train(*ours, program), train(*reference, program))


@pytest.mark.parametrize("orig", [True, *exhaustive(False)])
def test_low_precision_sums_are_those_of_fsdp1(orig: bool) -> None:
    run_ranks(in_low_precision, 2, FULL, orig)


def over_replicas(orig: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for name in ("mul_", "grad = None"):
        ours, reference = ours_and_torchs(HYBRID, orig, device_mesh=mesh)
        assert_equal(train(*ours, PROGRAMS[name]), train(*reference, PROGRAMS[name]))


@pytest.mark.parametrize("orig", [True, *exhaustive(False)])
def test_it_counts_over_replicas(orig: bool) -> None:
    run_ranks(over_replicas, 4, orig)


class Halves(Stack):
    """Each micro-batch runs only one of the blocks, so most parameters get no gradient."""

    number = 0

    def forward(self, x: Tensor) -> Tensor:
        block = list(self.blocks)[self.number]
        result: Tensor = block(x)
        return result


def of_some_parameters() -> None:
    def train_halves(wrapped: Any, model: Halves) -> Values:
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
        for number, syncs in ((0, False), (1, False), (0, False), (2, True)):
            model.number = number
            with contextlib.nullcontext() if syncs or wrapped is model else wrapped.no_sync():
                run(wrapped, model, number).backward()
            halve(wrapped)
        if wrapped is model:
            average_gradients(model)
        else:  # the last halving was that of a reduced gradient, and the same
            assert all(type(param.grad) is not Tensor for param in wrapped.parameters())
        optimizer.step()
        return final(wrapped)

    model, plain = make(Halves), make(Halves)
    wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK)
    assert_equal(train_halves(wrapped, model), train_halves(plain, plain))


def final(wrapped: nn.Module) -> Values:
    return dict(wrapped.state_dict())


def test_gradients_of_units_that_the_last_backward_leaves_out_are_reduced() -> None:
    run_ranks(of_some_parameters, 2)


def freezes(orig: bool) -> None:
    """A frozen parameter keeps what it has accumulated, as in the unsharded model."""

    def freeze(wrapped: Any, model: Stack, *, frees: bool = True) -> Values:
        for step, syncs in enumerate((False, False, True)):
            with contextlib.nullcontext() if syncs or wrapped is model else wrapped.no_sync():
                run(wrapped, model, step).backward()
            if step == 0:
                halve(wrapped)
                params = flat_of(wrapped)[1:2] or [by_name(wrapped)["blocks.0.up.weight"]]
                if wrapped is model and not orig:
                    params = list(model.blocks[0].parameters())
                for param in params:
                    param.requires_grad_(False)
        if wrapped is model:
            average_gradients(model)
        torch.optim.SGD(wrapped.parameters(), lr=0.05).step()
        return final(wrapped)

    model, plain = make(Stack), make(Stack)
    wrapped = FSDP(model, use_orig_params=orig, auto_wrap_policy=BY_BLOCK)
    assert_equal(freeze(wrapped, model), freeze(plain, plain))


@pytest.mark.parametrize("orig", [True, *exhaustive(False)])
def test_a_frozen_parameter_keeps_what_it_has_accumulated(orig: bool) -> None:
    run_ranks(freezes, 2, orig)


def backward(wrapped: nn.Module, model: Subject, step: int) -> None:
    run(wrapped, model, step).backward()


def refused() -> None:
    for orig in (False, True):
        model = make(Stack)
        wrapped = FSDP(model, use_orig_params=orig, auto_wrap_policy=BY_BLOCK)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
        run(wrapped, model, 0).backward()
        before = {name: param.grad for name, param in by_name(wrapped).items()}
        with wrapped.no_sync():
            run(wrapped, model, 1).backward()
        with pytest.raises(RuntimeError, match="gradients of no_sync are not reduced yet"):
            optimizer.step()
        with (
            pytest.raises(
                AssertionError if orig else NotImplementedError,
                match="with_grads=True .* not reduced yet" if orig else "a flat parameter",
            ),
            FSDP.summon_full_params(wrapped, with_grads=True),
        ):
            pass
        with wrapped.no_sync(), pytest.raises(RuntimeError, match="are not reduced yet"):
            optimizer.step(functools.partial(backward, wrapped, model, 1))
        params = list(by_name(wrapped).values())
        with ThreadPoolExecutor(1) as thread:  # lives on after backward, as autograd's on a GPU
            for param in (params[0], params[-1]):  # of the first unit that is checked, and the last
                assert param.grad is not None
                whole, param.grad.data = param.grad.clone(), torch.ones(3)
                loss = run(wrapped, model, 2)
                with pytest.raises(RuntimeError, match=r"has shape \[3\].*or to None"):
                    thread.submit(loss.backward).result()
                param.grad.data = whole
                wrapped.zero_grad()
                run(wrapped, model, 0).backward()
                for name, each in by_name(wrapped).items():
                    assert_equal({name: shard_of(each)}, {name: local(before[name])})
                with wrapped.no_sync():
                    run(wrapped, model, 1).backward()
        run(wrapped, model, 0).backward()
        optimizer.step()


def steps_with_closures(orig: bool) -> None:
    """The last backward of a step runs in the optimizer's closure, as Lightning has it."""

    def train(wrapped: Any, model: Subject, *, by_name: bool) -> Values:
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)

        def closure() -> None:
            backward(wrapped, model, 1)
            if wrapped is model:
                average_gradients(model)

        for _ in range(2):
            optimizer.zero_grad()
            with contextlib.nullcontext() if wrapped is model else wrapped.no_sync():
                run(wrapped, model, 0).backward()
            optimizer.step(closure=closure) if by_name else optimizer.step(closure)  # type: ignore[arg-type]
        return final(wrapped)

    for by_name in (False, True):
        model, plain = make(Stack), make(Stack)
        wrapped = FSDP(model, use_orig_params=orig, auto_wrap_policy=BY_BLOCK)
        expected = train(plain, plain, by_name=by_name)
        assert_equal(train(wrapped, model, by_name=by_name), expected)


@pytest.mark.parametrize("orig", [True, *exhaustive(False)])
def test_the_last_backward_may_run_in_the_optimizers_closure(orig: bool) -> None:
    run_ranks(steps_with_closures, 2, orig)


def local(grad: Tensor | None) -> Tensor | None:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def shard_of(param: nn.Parameter) -> Tensor | None:
    return local(param.grad)


def test_what_needs_reduced_gradients_says_so_and_training_goes_on() -> None:
    run_ranks(refused, 2)


def one_rank(orig: bool) -> None:
    """On one rank gradients of `no_sync` are complete, and an optimizer may use them."""
    model = make(Stack)
    wrapped = FSDP(model, use_orig_params=orig, auto_wrap_policy=BY_BLOCK)
    plain = make(Stack)
    for each in (wrapped, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.05)
        for step, syncs in enumerate((True, False, False)):
            with contextlib.nullcontext() if syncs or each is plain else wrapped.no_sync():
                run(each, plain, step).backward()
        optimizer.step()
    assert_equal(final(wrapped), final(plain))


@pytest.mark.parametrize("orig", [False, True])
def test_one_rank_trains_with_gradients_of_no_sync(orig: bool) -> None:
    run_ranks(one_rank, 1, orig)
