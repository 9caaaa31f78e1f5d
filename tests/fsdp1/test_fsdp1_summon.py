"""`summon_full_params` shows whole parameters, and keeps what is written, as FSDP1's does."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import models
from support.fsdp1_parity import (
    BF16,
    BY_BLOCK,
    FSDP,
    assert_equal,
    average_gradients,
    make,
    run,
    state,
    torch_fsdp,
    whole,
)
from support.launcher import run_ranks
from support.models import Stack, Transformer
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.tensor import DTensor

from fsdp_ext import checkpoint
from fsdp_ext._util.errors import MisuseError


def both(subject: Any = Stack, **options: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return the class and the model of each system."""
    ours = FSDP(make(subject), auto_wrap_policy=BY_BLOCK, **options)
    theirs = torch_fsdp(make(subject), auto_wrap_policy=BY_BLOCK, **options)
    return (FSDP, ours), (TorchFSDP, theirs)


def train(model: Any, step: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run(model, model, step).backward()
    if not isinstance(model, (FSDP, TorchFSDP)):
        average_gradients(model)
    optimizer.step()


def values_inside(system: Any, model: Any, **options: Any) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {}
    with system.summon_full_params(model, **options):
        for name, param in model.named_parameters():
            found[name] = param.detach().clone()
            found[f"{name}.grad"] = None if param.grad is None else param.grad.clone()
    return found


# - What there is inside


def _shown() -> None:
    for subject in (Transformer, models.FewRows):
        (_, ours), (_, theirs) = both(subject)
        train(ours, 0)
        train(theirs, 0)
        sharded = dict(ours.named_parameters())
        with FSDP.summon_full_params(ours):
            params = dict(ours.named_parameters())
            assert list(params) == [name.replace("_fsdp_wrapped_module.", "") for name in sharded]
            assert all(type(param) is nn.Parameter for param in params.values())
            assert all(param.grad is None for param in params.values())
        assert dict(ours.named_parameters()) == sharded
        assert all(isinstance(param, DTensor) for param in sharded.values())
        want = values_inside(TorchFSDP, theirs, with_grads=True)
        assert_equal(values_inside(FSDP, ours, with_grads=True), want)
        assert_equal(
            values_inside(FSDP, nn.Sequential(ours), with_grads=True),
            values_inside(TorchFSDP, nn.Sequential(theirs), with_grads=True),
        )


def test_parameters_and_gradients_are_whole_inside_as_with_fsdp1() -> None:
    run_ranks(_shown, 2)


def _of_one() -> None:
    for system, model in both():
        with system.summon_full_params(model, recurse=False):
            assert model.stem.weight.shape == (models.DIM, models.DIM)
            inside = next(iter(model.blocks[0].parameters()))
            assert type(inside) is not nn.Parameter or inside.ndim == 1
            with system.summon_full_params(model.blocks[0]):
                assert model.blocks[0].up.weight.ndim == 2
        with system.summon_full_params(model.module, recurse=False):
            pass  # no wrapper itself
        with system.summon_full_params(model, writeback=False, rank0_only=True):
            is_whole = type(model.stem.weight) is nn.Parameter and model.stem.weight.ndim == 2
            assert is_whole == (dist.get_rank() == 0)


def test_recurse_and_rank0_only_choose_parameters_and_ranks() -> None:
    run_ranks(_of_one, 2)


def _in_full_precision() -> None:
    precision = MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, buffer_dtype=BF16)
    (_, ours), _ = both(mixed_precision=precision)
    train(ours, 0)
    plain = make(Stack)
    plain.load_state_dict(ours.state_dict())
    with FSDP.summon_full_params(ours), torch.no_grad():
        assert all(param.dtype == torch.float32 for param in ours.parameters())
        assert torch.equal(run(ours, ours, 1), run(plain, plain, 1))


def test_mixed_precision_does_not_hold_inside() -> None:
    run_ranks(_in_full_precision, 2)


# - Writing


@torch.no_grad()
def write(model: Any, with_grads: bool = False) -> None:
    for number, param in enumerate(model.parameters()):
        param.mul_(0.5).add_(number / 100)
        if with_grads and param.grad is not None:
            param.grad.fill_(number)


def _kept() -> None:
    for options in (
        {"with_grads": True},
        {"writeback": False, "with_grads": True},
        {"recurse": False},
        {"writeback": False, "rank0_only": True},
    ):
        results = []
        for system, model in both(Transformer):
            for _ in range(2):  # before the first forward, and after a step
                with system.summon_full_params(model, **options):
                    if not options.get("rank0_only") or dist.get_rank() == 0:
                        part = model if options.get("recurse", True) else model.norm
                        write(part, with_grads=options.get("with_grads", False))
                train(model, 0)
            results.append(state(model))
        assert_equal(*results)


def test_what_is_written_inside_is_kept_or_dropped_as_by_fsdp1() -> None:
    run_ranks(_kept, 2)


def _of_whole_shards() -> None:
    for options in ({}, {"sharding_strategy": ShardingStrategy.NO_SHARD}):
        model = FSDP(make(Stack), auto_wrap_policy=BY_BLOCK, **options)
        before = state(model)
        with FSDP.summon_full_params(model, writeback=False):
            write(model)
        assert_equal(state(model), before)


def test_writes_without_writeback_are_dropped_on_a_single_rank() -> None:
    run_ranks(_of_whole_shards, 1)


def _other_writes() -> None:
    (_, model), _ = both()
    train(model, 0)
    with FSDP.summon_full_params(model, with_grads=True):
        model.stem.weight = nn.Parameter(torch.full_like(model.stem.weight, 3))
        model.stem.bias.requires_grad_(False)
        model.head.weight.grad = None
    assert isinstance(model.stem.weight, DTensor)
    assert bool((whole(model.stem.weight) == 3).all())
    assert model.head.weight.grad is None
    model.zero_grad()
    with FSDP.summon_full_params(model, with_grads=True):
        model.head.weight.grad = torch.ones_like(model.head.weight)
    plain = make(Stack)
    plain.load_state_dict(model.state_dict())
    plain.stem.bias.requires_grad_(False)
    plain.head.weight.grad = torch.ones_like(plain.head.weight)
    run(plain, plain, 1).backward()
    run(model, model, 1).backward()  # adds to the gradient
    dist.all_reduce(plain.head.weight.grad)
    torch.testing.assert_close(whole(model.head.weight.grad), plain.head.weight.grad / 2 + 0)
    assert model.stem.bias.grad is None


def test_parameters_gradients_and_what_is_trained_may_be_replaced() -> None:
    run_ranks(_other_writes, 2)


# - Forward inside


class Generates(Stack):
    def generate(self, x: Tensor, count: int) -> Tensor:
        for _ in range(count):
            x = self(x)
        return x


@torch.no_grad()
def _generated() -> None:
    x = torch.randn(3, models.DIM)
    for recurse in (True, False):
        for trains_before in (False, True):
            results = []
            for system, model in (*both(Generates), (None, make(Generates))):
                if trains_before:
                    with torch.enable_grad():
                        train(model, 0)
                with nullcontext() if system is None else system.summon_full_params(model, recurse):
                    write(model.head)
                    outputs = [model.generate(x, 3), model.generate(x, 1)]
                with torch.enable_grad():
                    train(model, 1)
                results.append({"once": outputs[1], "often": outputs[0], **state(model)})
            ours, theirs, plain = results
            if not recurse:  # FSDP1 trains wrongly after a forward inside with recurse=True
                assert_equal(ours, theirs)
            for name, value in plain.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-7)


def test_a_model_generates_inside_as_under_fsdp1_and_unsharded() -> None:
    run_ranks(_generated, 2)


@torch.no_grad()
def _gathers() -> None:
    model = FSDP(make(Generates), auto_wrap_policy=BY_BLOCK)
    x = torch.randn(3, models.DIM)
    for _ in range(3):
        model(x)
    impl = model._fsdp_ext_unit.root.impl
    impl.enable_log(True)
    for recurse, gathered in ((True, []), (False, ["blocks.0 to blocks.2"] * 3)):
        with FSDP.summon_full_params(model, recurse=recurse):
            model.generate(x, 3)
            log = impl.take_log()
        assert [units for _, _, units, _ in log] == gathered


@torch.no_grad()
def _gathers_around() -> None:
    model = FSDP(make(Stack), auto_wrap_policy=BY_BLOCK)
    for unit in model._fsdp_ext_units(recurse=True):
        unit.change(bucket_bytes=0)
    for _ in range(3):
        run(model, model, 0)
    impl = model._fsdp_ext_unit.root.impl
    impl.enable_log(True)
    with FSDP.summon_full_params(model.blocks[1]):
        run(model, model, 0)
    assert [units for _, _, units, _ in impl.take_log()] == ["the root", "blocks.0", "blocks.2"]


def test_forward_inside_gathers_only_what_is_not_summoned() -> None:
    run_ranks(_gathers, 2)
    run_ranks(_gathers_around, 2)


# - State dicts


def _state_dicts() -> None:
    model = FSDP(make(Transformer), auto_wrap_policy=BY_BLOCK)
    with FSDP.summon_full_params(model):
        write(model)
        inside = model.state_dict()
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            sharded = model.state_dict()
    assert_equal(inside, model.state_dict())
    assert all(isinstance(value, DTensor) for value in sharded.values())
    assert_equal({name: whole(value) for name, value in sharded.items()}, inside)
    for saved in (inside, sharded):
        other = FSDP(make(Transformer, seed=1), auto_wrap_policy=BY_BLOCK)
        with FSDP.summon_full_params(other):
            other.load_state_dict(saved)
        assert_equal(other.state_dict(), inside)


def _on_rank_0() -> None:
    model = FSDP(make(Transformer), auto_wrap_policy=BY_BLOCK)
    want = model.state_dict()
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        if dist.get_rank() == 0:
            assert_equal(model.state_dict(), want)
        else:
            with pytest.raises(RuntimeError, match=r"Call it on rank 0 only"):
                model.state_dict()


def test_rank_0_alone_saves_what_it_alone_has() -> None:
    run_ranks(_on_rank_0, 2)


def _save_in_background(*args: Any) -> None:
    checkpoint.async_save(*args).result()


def _stream(model: nn.Module) -> None:
    dict(checkpoint.stream_weights(model))


def _checkpoints(directory: Path) -> None:
    for flat, rank0_only in ((False, False), (True, True)):
        model = FSDP(make(Stack), auto_wrap_policy=BY_BLOCK, use_orig_params=not flat)
        optimizer = torch.optim.SGD(model.parameters())
        checkpoint.save(directory, model, optimizer)
        with FSDP.summon_full_params(model, writeback=False, rank0_only=rank0_only):
            for call in (
                partial(checkpoint.save, directory, model, optimizer),
                partial(_save_in_background, directory, model, optimizer),
                partial(checkpoint.load, directory, model, optimizer),
                partial(checkpoint.export, model, directory),
                partial(_stream, model),
            ):
                with pytest.raises(MisuseError, match=r"inside summon_full_params\. Leave"):
                    call()
        checkpoint.load(directory, model, optimizer)


def test_checkpoints_are_refused_inside(tmp_path: Path) -> None:
    run_ranks(_checkpoints, 2, tmp_path)


def test_state_dicts_are_saved_and_loaded_inside() -> None:
    run_ranks(_state_dicts, 2)


# - Mistakes


def _refused() -> None:
    for system, model in both():
        refused = [
            (NotImplementedError, {"writeback": True, "rank0_only": True}),
            (NotImplementedError, {"with_grads": True, "offload_to_cpu": True}),
        ]
        for error, options in refused:
            with pytest.raises(error), system.summon_full_params(model, **options):
                pass
        with (
            system.summon_full_params(model),
            pytest.raises(AssertionError),
            system.summon_full_params(model.blocks[1]),
        ):
            pass
        with (
            pytest.warns(UserWarning, match="offload_to_cpu=True and rank0_only=False"),
            system.summon_full_params(model, writeback=False, offload_to_cpu=True),
        ):
            pass


def test_what_fsdp1_refuses_is_refused() -> None:
    run_ranks(_refused, 2)


def _raised() -> None:
    (_, model), _ = both()
    before = state(model)

    def write_and_raise() -> None:
        with FSDP.summon_full_params(model, writeback=False):
            write(model)
            raise KeyError

    with pytest.raises(KeyError):
        write_and_raise()
    with (
        pytest.raises(AssertionError, match="summoned already"),
        FSDP.summon_full_params(model),
        FSDP.summon_full_params(model.blocks[1]),
    ):
        pass
    assert_equal(state(model), before)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    train(model, 0)


def test_exceptions_inside_leave_shards() -> None:
    run_ranks(_raised, 2)


class SummonsItself(Stack):
    def forward(self, x: Tensor) -> Tensor:
        with FSDP.summon_full_params(self.wrapper[0]):
            return super().forward(x)


def _misused() -> None:
    model = make(SummonsItself)
    wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK)
    model.wrapper = (wrapped,)  # type: ignore[assignment]
    with pytest.raises(AssertionError, match=r"while forward runs\. Call it between steps"):
        run(wrapped, wrapped, 0)
    (_, wrapped), _ = both()
    with (
        FSDP.summon_full_params(wrapped),
        pytest.raises(RuntimeError, match="Run forward and backward outside of the context"),
    ):
        run(wrapped, wrapped, 0).backward()
    with FSDP.summon_full_params(wrapped), pytest.raises(ValueError, match="summoned already"):
        wrapped.apply(print)
    kept = state(wrapped)
    with (
        pytest.raises(ValueError, match=r"'stem.weight' had shape .* was given shape \(2, 2\)"),
        FSDP.summon_full_params(wrapped),
    ):
        wrapped.stem.weight = nn.Parameter(torch.ones(2, 2))
    for use in (lambda: FSDP.summon_full_params(wrapped).__enter__(), wrapped.state_dict):
        wrapped.stem.weight = nn.Parameter(torch.ones(2, 2))
        with pytest.raises(ValueError, match=r"'stem.weight' was replaced by a Parameter"):
            use()
    assert_equal(state(wrapped), kept)
    train(wrapped, 0)


def test_wrong_uses_raise_errors_that_say_what_to_do() -> None:
    run_ranks(_misused, 2)


def assigned_inside() -> None:
    model = make(Stack)
    wrapped = FSDP(model)
    with FSDP.summon_full_params(wrapped):
        kept = nn.Parameter(torch.ones_like(model.stem.weight))
        model.stem.weight = kept
        with pytest.raises(RuntimeError, match="nothing would reduce"):
            run(wrapped, model, 0).backward()
    kept.grad = None
    kept.sum().backward()  # outside, it is a parameter as any other
    assert kept.grad is not None


def test_backward_into_a_parameter_that_was_assigned_inside_is_refused() -> None:
    run_ranks(assigned_inside, 2)
