"""`use_orig_params=False`: an optimizer sees one flat parameter of each wrapper, as under FSDP1."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import models
from support.fsdp1_flat import WRAPPERS, adamw, flat_of, sgd, torchs, train
from support.fsdp1_parity import BF16, BY_BLOCK, assert_equal, make, run
from support.launcher import run_ranks
from support.matrix import exhaustive
from support.models import Mlp, Stack, Subject, Transformer
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FlatParameter as TorchFlatParameter
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from fsdp_ext import FullyShardedDataParallel as FSDP
from fsdp_ext.optim import AdamW

BY_BLOCK_ARGS: dict[str, Any] = {"auto_wrap_policy": BY_BLOCK}


# - Training


STRATEGY = "sharding_strategy"
FLAT, ORIGINAL, FSDP1 = (FSDP, False), (FSDP, True), (torchs, False)


def parity(
    subject: Callable[[], Subject],
    kwargs: dict[str, Any],
    checkpoints: bool,
    others: tuple[Any, ...],
) -> None:
    # Accumulated gradients are rounded, and with NO_SHARD reduced, in another order by FSDP1.
    accumulates = not kwargs.keys() & {"mixed_precision", STRATEGY}
    for make_optimizer in (adamw, sgd):
        found = []
        for wrap, use_orig_params in (FLAT, *others):
            model = make(subject)
            wrapped = wrap(model, use_orig_params=use_orig_params, **kwargs)
            if checkpoints:
                apply_activation_checkpointing(wrapped, check_fn=lambda m: isinstance(m, Mlp))
            optimizer = make_optimizer(wrapped.parameters())
            found.append(train(wrapped, model, optimizer, accumulates=accumulates))
            if (wrap, use_orig_params) == FLAT:
                assert_padding_is_zero(wrapped)
        for other in found[1:]:
            assert_equal(found[0], other)


def assert_padding_is_zero(wrapped: Any) -> None:
    for wrapper in FSDP.fsdp_modules(wrapped):
        unit = wrapper._fsdp_ext_unit
        if unit.flat_param is None:
            continue
        for flat in (unit.flat_param.param.detach(), unit.flat_param.param.grad):
            if flat is not None:
                rest = flat.clone()
                for _, part in unit.flat_param.parts(rest):
                    part.zero_()
                assert not rest.any()


Case = tuple[Callable[[], Subject], dict[str, Any], bool, tuple[Any, ...]]
BOTH = ORIGINAL, FSDP1
PARITY: dict[str, Case] = {
    "one unit": (Stack, {}, False, BOTH),
    "a unit for each block": (Stack, BY_BLOCK_ARGS, False, BOTH),
    "a transformer": (Transformer, BY_BLOCK_ARGS, False, BOTH),
    "uneven rows": (models.FewRows, BY_BLOCK_ARGS, False, BOTH),
    "tied parameters": (models.TiedInUnit, {}, False, BOTH),
    # Their gradients are zeros, and not None, so weights decay.
    "parameters that nothing uses": (models.UnusedParameters, BY_BLOCK_ARGS, False, (FSDP1,)),
    "activation checkpointing": (Stack, BY_BLOCK_ARGS, True, BOTH),
    "SHARD_GRAD_OP": (
        Stack,
        {**BY_BLOCK_ARGS, STRATEGY: ShardingStrategy.SHARD_GRAD_OP},
        False,
        BOTH,
    ),
    "NO_SHARD": (Stack, {**BY_BLOCK_ARGS, STRATEGY: ShardingStrategy.NO_SHARD}, False, BOTH),
    "bfloat16": (Stack, {**BY_BLOCK_ARGS, "mixed_precision": MixedPrecision(BF16)}, False, BOTH),
    "bfloat16, reduced in float32": (
        Stack,
        {**BY_BLOCK_ARGS, "mixed_precision": MixedPrecision(BF16, torch.float32)},
        False,
        BOTH,
    ),
    "bfloat16 reductions": (
        Stack,
        {**BY_BLOCK_ARGS, "mixed_precision": MixedPrecision(reduce_dtype=BF16)},
        False,
        BOTH,
    ),
    # FSDP1 needs a GPU for that.
    "offloaded": (Stack, {**BY_BLOCK_ARGS, "cpu_offload": CPUOffload(True)}, False, (ORIGINAL,)),
}
QUICK = ("a transformer", "uneven rows", "activation checkpointing", "NO_SHARD", "offloaded")


@pytest.mark.parametrize(
    "name", [*QUICK, *exhaustive(*(name for name in PARITY if name not in QUICK))]
)
def test_trains_as_with_original_parameters_and_as_under_fsdp1(name: str) -> None:
    run_ranks(parity, 2, *PARITY[name])


def one_rank() -> None:
    found = []
    for use_orig_params in (False, True):
        model = make(Stack)
        wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK, use_orig_params=use_orig_params)
        found.append(train(wrapped, model, adamw(wrapped.parameters())))
    assert_equal(*found)


def test_a_single_rank_trains_as_with_original_parameters() -> None:
    run_ranks(one_rank, 1)


# - What optimizers and forward see


def seen() -> None:
    names, flats = [], []
    for wrap in WRAPPERS:
        model = make(Stack)
        inside: list[tuple[type, torch.Size]] = []
        model.stem.register_forward_pre_hook(
            lambda m, _, found=inside: found.append((m.weight.shape, m.weight.requires_grad))
        )
        wrapped = wrap(model, auto_wrap_policy=BY_BLOCK)
        run(wrapped, model, 0).backward()
        assert inside == [(make(Stack).stem.weight.shape, True)]
        params = dict(wrapped.named_parameters())
        names.append([name.replace("_fsdp_wrapped_module.", "") for name in params])
        flats.append(list(params.values()))
        assert wrapped._use_orig_params is False
        assert not wrapped._handle._use_orig_params
        assert wrapped._flat_param is wrapped._handle.flat_param is flats[-1][0]
    assert names[0] == names[1]
    for ours, theirs in zip(*flats, strict=True):
        assert type(ours) is nn.Parameter
        assert isinstance(ours, TorchFlatParameter)
        shapes = dict(zip(ours._fqns, ours._shapes, strict=True))
        assert shapes == dict(zip(theirs._fqns, theirs._shapes, strict=True))
        assert list(ours._numels) == [shape.numel() for shape in ours._shapes]
        assert ours._params is theirs._params is None
        assert ours.ndim == 1
        assert ours.grad is not None
        assert type(ours.grad) is Tensor
        assert ours.grad.shape == ours.shape


def test_there_is_one_parameter_of_each_wrapper_with_the_name_of_fsdp1s() -> None:
    run_ranks(seen, 2)


@contextlib.contextmanager
def memory_that_is_not_zero() -> Iterator[None]:
    """Let glibc fill what it allocates."""
    mallopt, perturb = ctypes.CDLL(None).mallopt, -6
    mallopt(perturb, 0x5A)
    try:
        yield
    finally:
        mallopt(perturb, 0)


def held(subject: Callable[[], Subject], kwargs: dict[str, Any]) -> None:
    model = make(subject)
    wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK, **kwargs)
    run(wrapped, model, 0).backward()
    kept = [param.grad for param in wrapped.parameters()]
    before = [grad.clone() for grad in kept if grad is not None]
    wrapped.zero_grad()
    with memory_that_is_not_zero():
        run(wrapped, model, 1).backward()
    for grad, value, param in zip(kept, before, wrapped.parameters(), strict=True):
        assert torch.equal(grad, value)
        assert param.grad is not grad
    assert_padding_is_zero(wrapped)


def test_a_gradient_that_somebody_holds_does_not_change() -> None:
    run_ranks(held, 2, Stack, {})
    # The reduction writes the gradients themselves here, without the padding between them.
    precision = MixedPrecision(reduce_dtype=BF16)
    run_ranks(held, 2, models.FewRows, {"mixed_precision": precision})


def assigned_gradients() -> None:
    found = []
    for wrap in WRAPPERS:
        model = make(Stack)
        wrapped = wrap(model)
        optimizer = sgd(wrapped.parameters())
        run(wrapped, model, 0).backward()
        for param in wrapped.parameters():
            param.grad = param.grad.clone() * 2
        run(wrapped, model, 1).backward()
        optimizer.step()
        found.append(wrapped.state_dict())
    assert_equal(*found)


def test_a_gradient_that_somebody_sets_is_added_to() -> None:
    run_ranks(assigned_gradients, 2)


# - Freezing


class PartlyFrozen(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.stem.weight.requires_grad_(False)


def freeze() -> None:
    for wrap in WRAPPERS:
        with pytest.raises(ValueError, match="requires_grad"):
            wrap(make(PartlyFrozen))
    found = []
    for wrap in WRAPPERS:
        model = make(Stack)
        for param in model.blocks[0].parameters():
            param.requires_grad_(False)
        wrapped = wrap(model, auto_wrap_policy=BY_BLOCK)
        optimizer = sgd([param for param in wrapped.parameters() if param.requires_grad])
        found.append(train(wrapped, model, optimizer))
    assert_equal(*found)
    # later, between steps
    model = make(Stack)
    wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK)
    run(wrapped, model, 0).backward()
    wrapped.zero_grad()
    first = flat_of(model.blocks[0])[0]
    first.requires_grad_(False)
    run(wrapped, model, 1).backward()
    assert [param.grad is None for param in wrapped.parameters()] == [
        param is first for param in wrapped.parameters()
    ]


def test_a_wrapper_is_frozen_as_a_whole() -> None:
    run_ranks(freeze, 2)


class Unequal(Stack):
    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        data = torch.zeros(2, 2, dtype=kind)
        self.extra = nn.Parameter(data, requires_grad=kind.is_floating_point)


def unequal() -> None:
    for kind in (torch.float64, torch.int64):
        for wrap in WRAPPERS:
            with pytest.raises(ValueError, match=r"dtype|integer|requires_grad"):
                wrap(Unequal(kind))


def test_parameters_of_one_wrapper_need_one_dtype() -> None:
    run_ranks(unequal, 2)


# - Other methods


def clip() -> None:
    norms, found = [], []
    for wrap in WRAPPERS:
        model = make(models.FewRows)
        wrapped = wrap(model, auto_wrap_policy=BY_BLOCK)
        optimizer = sgd(wrapped.parameters())
        for step in range(2):
            optimizer.zero_grad()
            run(wrapped, model, step).backward()
            norms.append(wrapped.clip_grad_norm_(0.01, (2.0, torch.inf)[step]))
            optimizer.step()
        found.append(wrapped.state_dict())
    torch.testing.assert_close(norms[:2], norms[2:])
    assert norms[0] > 0.01
    torch.testing.assert_close(*found)


def test_gradients_are_clipped_as_by_fsdp1() -> None:
    run_ranks(clip, 2)


def clip_around_a_step_that_is_left_out() -> None:
    """Clipping by a norm of NaN writes NaN into all elements, also between the parameters."""
    norms: list[list[Tensor]] = []
    for wrap in WRAPPERS:
        model = make(models.FewRows)
        wrapped = wrap(model, mixed_precision=MixedPrecision(reduce_dtype=BF16))
        norms.append([])
        for step in range(3):
            (run(wrapped, model, step) * (torch.nan if step == 1 else 1.0)).backward()
            norms[-1].append(torch.as_tensor(wrapped.clip_grad_norm_(0.01)))
            wrapped.zero_grad()
    torch.testing.assert_close(*norms, equal_nan=True)
    assert [norm.isnan().item() for norm in norms[0]] == [False, True, False]


def test_a_step_that_is_left_out_for_nan_leaves_nothing_behind() -> None:
    run_ranks(clip_around_a_step_that_is_left_out, 2)


def scaled() -> None:
    found = []
    for wrap in WRAPPERS:
        model = make(Stack)
        wrapped = wrap(model, auto_wrap_policy=BY_BLOCK)
        optimizer = sgd(wrapped.parameters())
        scaler = ShardedGradScaler("cpu", init_scale=4.0)
        for step in range(3):
            optimizer.zero_grad()
            loss = run(wrapped, model, step)
            broken = step == 1 and dist.get_rank() == 1
            scaler.scale(loss * (torch.inf if broken else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append({**wrapped.state_dict(), "scale": torch.tensor(scaler.get_scale())})
    assert found[0]["scale"] == 2.0
    assert_equal(*found)


def test_the_gradient_scaler_skips_a_step_on_all_ranks() -> None:
    run_ranks(scaled, 2)


def infinite_on_one_rank(fused: bool | None) -> None:
    model = make(Stack)
    wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK)
    optimizer = AdamW(wrapped.parameters(), fused=fused)
    before = [param.detach().clone() for param in wrapped.parameters()]
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    scaler.scale(run(wrapped, model, 0)).backward()
    if dist.get_rank() == 1:
        flat_of(wrapped)[0].grad[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    torch.testing.assert_close(list(wrapped.parameters()), before, rtol=0, atol=0)


@pytest.mark.parametrize("fused", [None, True])
def test_all_ranks_skip_a_step_for_an_infinite_gradient_of_one_rank(fused: bool | None) -> None:
    run_ranks(infinite_on_one_rank, 2, fused)


def summoned() -> None:
    names = []
    for wrap, kind in zip(WRAPPERS, (FSDP, TorchFSDP), strict=True):
        model = make(Stack)
        wrapped = wrap(model, auto_wrap_policy=BY_BLOCK)
        optimizer = sgd(wrapped.parameters())
        train(wrapped, model, optimizer, steps=1)
        with kind.summon_full_params(wrapped):
            names.append([name for name, _ in wrapped.named_parameters()])
            with torch.no_grad():
                model.stem.weight.fill_(0.25)
        assert len(flat_of(wrapped)) == len(list(wrapped.parameters()))
        assert bool((wrapped.state_dict()["stem.weight"] == 0.25).all())
        names.append(sorted(train(wrapped, model, optimizer, steps=1)))
    assert names[0] == names[2]
    with (
        pytest.raises(NotImplementedError, match="use_orig_params=True"),
        FSDP.summon_full_params(FSDP(make(Stack)), with_grads=True),
    ):
        pass


def test_whole_parameters_are_the_original_ones() -> None:
    run_ranks(summoned, 2)


def written() -> None:
    model, plain = make(Stack), make(Stack)
    wrapped = FSDP(
        model, auto_wrap_policy=BY_BLOCK, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP
    )
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(run(wrapped, model, 0), run(plain, plain, 0))
            for param in (*wrapped.parameters(), *plain.parameters()):
                param.mul_(0.5)


def test_what_is_written_between_evaluations_that_keep_parameters_counts() -> None:
    run_ranks(written, 2)


def optimizers_of_others() -> None:
    for inside in (False, True):
        model = make(Stack)
        params = list(model.parameters())
        wrapped = FSDP(model)
        if inside:
            with FSDP.summon_full_params(wrapped):
                params = list(wrapped.parameters())
        optimizer = sgd(params)
        run(wrapped, model, 0).backward()
        with pytest.raises(RuntimeError, match="Make the optimizer"):
            optimizer.step()


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    run_ranks(optimizers_of_others, 2)


def converted() -> None:
    results = []
    for use_orig_params in (False, True):
        model = make(Stack).to(BF16)
        wrapped: Any = FSDP(model, auto_wrap_policy=BY_BLOCK, use_orig_params=use_orig_params)
        wrapped.float()
        first = train(wrapped, model, sgd(wrapped.parameters()), steps=1)
        wrapped.zero_grad()
        for wrapper in FSDP.fsdp_modules(wrapped):  # as accelerate casts
            wrapper._flat_param.data = wrapper._flat_param.data.double()
            wrapper._handle._orig_param_dtype = torch.float64
        assert {value.dtype for value in wrapped.state_dict().values()} == {torch.float64}
        results.append(first | {f"now {n}": value for n, value in wrapped.state_dict().items()})
    assert_equal(*results)


def test_flat_parameters_can_be_converted() -> None:
    run_ranks(converted, 2)
