"""`FullyShardedDataParallel` trains as PyTorch's FSDP1 does, wrapped one by one or by policy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import models
from support.fsdp1_parity import (
    BF16,
    BY_BLOCK,
    FSDP,
    STEPS,
    assert_equal,
    average_gradients,
    make,
    run,
    torch_fsdp,
    train,
)
from support.launcher import run_ranks
from support.matrix import every
from support.models import DIM, Mlp, Stack, Subject, Transformer, TransformerBlock
from support.parity import device
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import (
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

# - Training


def parity(subject: Callable[[], Subject], kwargs: dict[str, Any], with_unsharded: bool) -> None:
    if kwargs.get("process_group") == "all ranks":
        kwargs = {**kwargs, "process_group": dist.group.WORLD}
    model = make(subject)
    got = train(FSDP(model, **kwargs), model)
    assert any(v is not None and bool(v.any()) for n, v in got.items() if n.endswith(".grad"))
    model = make(subject)
    assert_equal(got, train(torch_fsdp(model, **kwargs), model))
    if with_unsharded:
        model = make(subject)
        assert_equal(got, train(model, model, average=True))


class TakesBfloat16(Stack):
    """Records which dtypes arrive at its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((DIM,), 1.2345))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += [x.dtype, self.scale.dtype, self.stem.weight.dtype]
        return super().forward((x * self.scale).to(self.stem.weight.dtype))


class WithBatchNorm(Stack):
    """Its first block has batch norms, one without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = nn.Sequential(
            nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), Mlp(), nn.BatchNorm1d(DIM, affine=False)
        )


PARITY: dict[str, tuple[Callable[[], Subject], dict[str, Any], bool]] = {
    "one unit": (Stack, {}, True),
    "a unit for each block": (Stack, {"auto_wrap_policy": BY_BLOCK}, True),
    "a transformer": (Transformer, {"auto_wrap_policy": BY_BLOCK}, True),
    "uneven rows": (models.FewRows, {"auto_wrap_policy": BY_BLOCK}, True),
    "frozen beside trainable": (
        models.FrozenBesideTrainable,
        {"auto_wrap_policy": BY_BLOCK},
        True,
    ),
    "SHARD_GRAD_OP": (
        Stack,
        {"auto_wrap_policy": BY_BLOCK, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        True,
    ),
    "bfloat16": (
        TakesBfloat16,
        {"auto_wrap_policy": BY_BLOCK, "mixed_precision": MixedPrecision(BF16)},
        False,
    ),
    "bfloat16, reduced in float32, with its buffers": (
        TakesBfloat16,
        {
            "auto_wrap_policy": BY_BLOCK,
            "mixed_precision": MixedPrecision(BF16, torch.float32, BF16),
        },
        False,
    ),
    "bfloat16 reductions alone": (
        Stack,
        {"auto_wrap_policy": BY_BLOCK, "mixed_precision": MixedPrecision(reduce_dtype=BF16)},
        False,
    ),
    "batch norm in float32 beside bfloat16": (
        WithBatchNorm,
        {
            "auto_wrap_policy": BY_BLOCK,
            "mixed_precision": MixedPrecision(BF16, buffer_dtype=BF16),
        },
        False,
    ),
    "batch norm in float32 beside bfloat16, by a callable": (
        WithBatchNorm,
        {
            "auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=200),
            "mixed_precision": MixedPrecision(BF16),
        },
        False,
    ),
    "hints without effect": (
        Stack,
        {"auto_wrap_policy": BY_BLOCK, "forward_prefetch": True, "limit_all_gathers": False},
        True,
    ),
    "no backward prefetch": (
        Stack,
        {"auto_wrap_policy": BY_BLOCK, "backward_prefetch": None},
        True,
    ),
    "NO_SHARD": (
        Transformer,
        {"auto_wrap_policy": BY_BLOCK, "sharding_strategy": ShardingStrategy.NO_SHARD},
        True,
    ),
    "NO_SHARD with a group and bfloat16": (
        TakesBfloat16,
        {
            "auto_wrap_policy": BY_BLOCK,
            "sharding_strategy": ShardingStrategy.NO_SHARD,
            "process_group": "all ranks",
            "mixed_precision": MixedPrecision(BF16),
        },
        False,
    ),
}


def low_precision_gradients(reduce_dtype: torch.dtype, backwards: int) -> None:
    """FSDP1 has no summon_full_params(with_grads=True) for them, so parameters are compared."""
    results = []
    for make_wrapper in (FSDP, torch_fsdp):
        model: Any = make_wrapper(
            make(Stack),
            auto_wrap_policy=BY_BLOCK,
            mixed_precision=MixedPrecision(BF16, reduce_dtype, keep_low_precision_grads=True),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(STEPS):
            run(model, model, step).backward()
            if (step + 1) % backwards == 0:
                assert model.clip_grad_norm_(1e6).dtype == BF16
                optimizer.step()
                assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {BF16}
                optimizer.zero_grad()
        results.append(model.state_dict())
    assert_equal(*results)


@pytest.mark.parametrize(
    ("reduce_dtype", "backwards"), [(torch.float32, 1), (BF16, 1), (BF16, 2)], ids=str
)
def test_gradients_stay_in_low_precision_as_under_fsdp1(
    reduce_dtype: torch.dtype, backwards: int
) -> None:
    run_ranks(low_precision_gradients, 2, reduce_dtype, backwards)


def moves_low_precision_gradients() -> None:
    results = []
    for make_wrapper in (FSDP, torch_fsdp):
        model: Any = make_wrapper(
            make(Stack),
            auto_wrap_policy=BY_BLOCK,
            mixed_precision=MixedPrecision(BF16, keep_low_precision_grads=True),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(STEPS):
            run(model, model, step).backward()
            model.to(device())
            dtypes = {(p.dtype, p.grad.dtype) for p in model.parameters() if p.grad is not None}
            assert dtypes == {(torch.float32, BF16)}
            if step > 0:  # the first gradients are added to
                optimizer.step()
                optimizer.zero_grad()
        results.append(model.state_dict())
        run(model, model, 0).backward()
        model.half()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.half}
    assert_equal(*results)


def test_gradients_in_low_precision_survive_moves_as_under_fsdp1() -> None:
    run_ranks(moves_low_precision_gradients, 2)


def optimizer_before(warm_up: bool) -> None:
    """With ``warm_up``, the optimizer has states of the whole parameters already."""
    results = []
    # FSDP1 has states of other shapes, and does not step with those of whole parameters.
    for make_wrapper in (FSDP, None) if warm_up else (FSDP, None, torch_fsdp):
        model: Any = make(Transformer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if warm_up:
            run(model, model, 7).backward()
            average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        if make_wrapper is FSDP:
            model = FSDP(model, auto_wrap_policy=BY_BLOCK, use_orig_params=True)
        elif make_wrapper is not None:
            model = make_wrapper(model, auto_wrap_policy=BY_BLOCK)
        for step in range(STEPS):
            optimizer.zero_grad()
            run(model, model, step).backward()
            if make_wrapper is None:
                average_gradients(model)
            optimizer.step()
        results.append(model.state_dict())
    ours, plain, *theirs = results
    for expected in theirs:
        assert_equal(ours, expected)
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("warm_up", [False, True])
def test_an_optimizer_made_before_wrapping_goes_on_with_use_orig_params(warm_up: bool) -> None:
    run_ranks(optimizer_before, 2, warm_up)


@pytest.mark.parametrize("case", every(2, PARITY))
def test_trains_to_the_bit_as_fsdp1(case: str) -> None:
    subject, kwargs, with_unsharded = PARITY[case]
    run_ranks(parity, 2, subject, kwargs, with_unsharded)


def manual_nesting() -> None:
    def nested(cls: type[nn.Module], model: Subject, **kwargs: Any) -> nn.Module:
        for block in model.blocks:
            block.up = cls(block.up, **kwargs)
        model.blocks[1] = cls(model.blocks[1], **kwargs)
        return cls(model, **kwargs)

    model = make(Stack)
    ours = nested(FSDP, model)
    assert [w.check_is_root() for w in FSDP.fsdp_modules(ours)] == [True] + 4 * [False]
    got = train(ours, model)
    model = make(Stack)
    assert_equal(
        got, train(nested(TorchFSDP, model, use_orig_params=True, device_id=device()), model)
    )
    with enable_wrap(wrapper_cls=FSDP):
        assert isinstance(wrap(nn.Linear(2, 2)), FSDP)


def test_modules_wrapped_by_hand_are_units_of_the_wrapper_around_them() -> None:
    run_ranks(manual_nesting, 2)


def recomputed(before: bool) -> None:
    """Wrap each block for checkpointing before or after FSDP, as recipes do."""
    model = make(Stack)
    want = train(model, model, average=True)
    model = make(Stack)
    if before:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(FSDP(block) if i == 0 else block)
            model.blocks[i] = model.blocks[i] if i == 0 else FSDP(model.blocks[i])
        wrapped = FSDP(model)
    else:
        wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK)
        apply_activation_checkpointing(wrapped, check_fn=lambda m: isinstance(m, Mlp))
    assert isinstance(wrapped.blocks[2].module, Mlp)
    got = {
        name.replace("_checkpoint_wrapped_module.", ""): value
        for name, value in train(wrapped, model).items()
    }
    assert_equal(got, want)
    assert list(wrapped.state_dict()) == list(make(Stack).state_dict())


@pytest.mark.parametrize("before", [False, True])
def test_blocks_are_recomputed_whichever_wrapper_came_first(before: bool) -> None:
    run_ranks(recomputed, 2, before)


# - Wrapping policies


def is_block(module: nn.Module) -> bool:
    return isinstance(module, TransformerBlock)


def kwargs_by_module(module: nn.Module) -> bool | dict[str, Any]:
    if isinstance(module, TransformerBlock):
        return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    return isinstance(module, nn.LayerNorm)


POLICIES: dict[str, Any] = {
    "ModuleWrapPolicy": BY_BLOCK,
    "CustomPolicy": CustomPolicy(kwargs_by_module),
    "size_based": functools.partial(size_based_auto_wrap_policy, min_num_params=400),
    "size_based, with leaves": functools.partial(
        size_based_auto_wrap_policy,
        min_num_params=100,
        force_leaf_modules={TransformerBlock},
        exclude_wrap_modules={nn.Embedding, nn.ModuleList},
    ),
    "transformer": functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={TransformerBlock}
    ),
    "always_wrap": always_wrap_policy,
    "lambda": functools.partial(lambda_auto_wrap_policy, lambda_fn=is_block),
    "or": functools.partial(
        _or_policy,
        policies=[
            functools.partial(lambda_auto_wrap_policy, lambda_fn=is_block),
            functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.LayerNorm}),
        ],
    ),
}


def wrapped_names(model: nn.Module, cls: type[nn.Module]) -> dict[str, ShardingStrategy]:
    """Return the names of wrapped modules that have a forward, with their strategies."""
    return {
        name.replace("_fsdp_wrapped_module.", ""): module.sharding_strategy
        for name, module in model.named_modules()
        if isinstance(module, cls) and not isinstance(module.module, nn.ModuleList)
    }


class UntiedTransformer(Transformer):
    """A wrapper for the head may not share a weight with another."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, self.VOCABULARY, bias=False)


def policies_agree() -> None:
    for name, policy in POLICIES.items():
        ignored = make(UntiedTransformer), make(UntiedTransformer)
        ours, torchs = ignored
        wrapped = FSDP(ours, auto_wrap_policy=policy, ignored_modules=[ours.blocks[0].mlp])
        reference = torch_fsdp(
            torchs, auto_wrap_policy=policy, ignored_modules=[torchs.blocks[0].mlp]
        )
        want = wrapped_names(reference, TorchFSDP)
        assert wrapped_names(wrapped, FSDP) == want, name
        assert len(want) > 1, name
        assert not isinstance(wrapped.blocks, FSDP), name
        run(wrapped, ours, 0).backward()


def test_each_policy_wraps_what_it_wraps_in_fsdp1() -> None:
    run_ranks(policies_agree, 2)


def shared_module() -> None:
    def shared() -> Subject:
        model = make(Stack)
        model.blocks[2] = model.blocks[0]
        return model

    model = shared()
    wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK)
    for duplicates in (False, True):
        named = wrapped.named_parameters(remove_duplicate=not duplicates)
        names = [name.replace("_fsdp_wrapped_module.", "") for name, _ in named]
        plain = shared().named_parameters(remove_duplicate=not duplicates)
        assert names == [n for n, _ in plain]
    assert len(FSDP.fsdp_modules(wrapped)) == 3
    assert len(list(wrapped.modules())) == len(list(shared().modules())) + 3
    got = train(wrapped, model)
    model = shared()
    assert_equal(got, train(model, model, average=True))


def test_a_module_in_two_places_is_one_unit() -> None:
    run_ranks(shared_module, 2)


# - Mixed precision


def input_casts() -> None:
    x = torch.randn(3, DIM)
    precision = functools.partial(MixedPrecision, param_dtype=BF16)

    def seen(**fields: Any) -> list[torch.dtype]:
        model = TakesBfloat16()
        FSDP(model, mixed_precision=precision(**fields))(x)
        return model.seen

    assert seen() == [BF16, torch.float32, BF16]
    assert seen(cast_root_forward_inputs=False) == [torch.float32, torch.float32, BF16]
    assert seen(cast_root_forward_inputs=False, cast_forward_inputs=True)[0] == BF16
    assert seen(buffer_dtype=BF16) == [BF16, BF16, BF16]

    # The cast for the root does not apply to wrappers inside it.
    inner = TakesBfloat16()
    FSDP(nn.Sequential(nn.Identity(), FSDP(inner, mixed_precision=precision())))(x)
    assert inner.seen[0] == torch.float32

    # Tensors inside containers are cast, but only floating-point ones.
    class Nested(nn.Linear):
        def forward(self, batch: dict[str, Any], *, pair: models.Pair) -> Tensor:
            assert batch["x"][0].dtype == pair.first.dtype == BF16
            assert batch["index"].dtype == torch.int64
            return super().forward(batch["x"][0])

    given = {"x": [x], "index": torch.arange(3)}
    wrapped = FSDP(Nested(DIM, DIM), mixed_precision=precision())
    assert wrapped(given, pair=models.Pair(x, x)).dtype == BF16
    assert given["x"][0] is x


def test_forward_inputs_are_cast_as_told() -> None:
    run_ranks(input_casts, 1)


class Precise(nn.Linear):
    """Needs float32."""

    def forward(self, x: Tensor, count: Tensor, *, shift: Tensor) -> tuple[Tensor, Tensor]:
        assert x.dtype == shift.dtype == self.weight.dtype == torch.float32
        return super().forward(x + shift), count


def precise_class() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(DIM, DIM)
            self.precise = Precise(DIM, DIM)
            self.left_alone = Precise(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            x = self.before(x)
            assert x.dtype == BF16
            y, count = self.precise(x, torch.arange(2), shift=x)
            assert y.dtype == BF16
            assert count.dtype == torch.int64
            return y

    precision = MixedPrecision(BF16, _module_classes_to_ignore=(Precise,))
    for policy in (ModuleWrapPolicy({nn.ReLU}), ModuleWrapPolicy({Precise}), always_wrap_policy):
        model = Around()
        kwargs = {"mixed_precision": precision, "ignored_modules": [model.left_alone]}
        wrapped = FSDP(model, auto_wrap_policy=policy, **kwargs)
        assert isinstance(wrapped.precise, FSDP)
        assert not isinstance(wrapped.left_alone, FSDP)
        wrapped(torch.ones(2, DIM)).sum().backward()
        assert all(p.grad is not None for p in wrapped.precise.parameters())


def test_classes_that_mixed_precision_ignores_run_in_float32() -> None:
    run_ranks(precise_class, 1)


def buffers_in_state_dict() -> None:
    model = TakesBfloat16()
    wrapped = FSDP(
        model, auto_wrap_policy=BY_BLOCK, mixed_precision=MixedPrecision(BF16, None, BF16)
    )
    assert wrapped.scale.dtype == BF16
    assert wrapped.count.dtype == torch.int64
    saved = wrapped.state_dict()["scale"]
    torch.testing.assert_close(saved, torch.full((DIM,), 1.2345).bfloat16().float())
    batch_norm = WithBatchNorm()
    wrapped = FSDP(
        batch_norm, auto_wrap_policy=BY_BLOCK, mixed_precision=MixedPrecision(BF16, None, BF16)
    )
    assert isinstance(wrapped.blocks[0][1], FSDP)
    assert wrapped.blocks[0][1].running_mean.dtype == torch.float32
    assert wrapped.blocks[0][1](torch.randn(4, DIM).bfloat16()).dtype == BF16


def test_buffers_are_saved_in_their_own_dtype() -> None:
    run_ranks(buffers_in_state_dict, 1)
