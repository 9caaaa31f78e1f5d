"""`FullyShardedDataParallel` trains as PyTorch's FSDP1 does, with its arguments and methods.

Two ranks, on which both compute the same bits: a sum of two commutes.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from launcher import run_ranks
from models import DIM, Mlp, Stack, Subject, Transformer, TransformerBlock
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
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
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from fsdp_ext import FullyShardedDataParallel as FSDP

BF16 = torch.bfloat16
STEPS = 4
CPU = torch.device("cpu")
BY_BLOCK = ModuleWrapPolicy({Mlp, TransformerBlock})
Values = dict[str, "Tensor | None"]


def make(subject: Callable[[], Subject], seed: int = 0) -> Subject:
    torch.manual_seed(seed)
    return subject()


def torch_fsdp(module: nn.Module, **kwargs: Any) -> TorchFSDP:
    return TorchFSDP(module, use_orig_params=True, device_id=CPU, **kwargs)


def batch(model: Subject, step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return model.batch(torch.Generator().manual_seed(100 * step + dist.get_rank()))


def run(wrapped: nn.Module, model: Subject, step: int) -> Tensor:
    """Loss of one step on this rank's own batch."""
    args, kwargs = batch(model, step)
    return model.loss(wrapped(*args, **kwargs))


def whole(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def state(wrapped: nn.Module) -> Values:
    """Whole parameters by name, and their gradients as 'name.grad'."""
    found: Values = {}
    summoned = isinstance(wrapped, TorchFSDP)
    with TorchFSDP.summon_full_params(wrapped, with_grads=True) if summoned else nullcontext():
        for name, param in wrapped.named_parameters():
            clean = name.replace("_fsdp_wrapped_module.", "")
            found[clean] = whole(param)
            # FSDP1 gives a frozen parameter zeros if it is beside trainable ones.
            grad = None if summoned and not param.requires_grad else param.grad
            found[f"{clean}.grad"] = whole(grad)
    return found


def assert_equal(got: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None]) -> None:
    assert got.keys() == want.keys()
    for name, expected in want.items():
        value = got[name]
        if expected is None or value is None:
            assert value is expected, name
        else:
            assert value.dtype == expected.dtype, name
            assert torch.equal(value, expected), f"{name}: {value} != {expected}"


def train(
    wrapped: nn.Module, model: Subject, steps: int = STEPS, *, average: bool = False
) -> Values:
    """Train; return the losses and the state at the end, with the last step's gradients."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    losses: Values = {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = run(wrapped, model, step)
        loss.backward()
        if average:
            average_gradients(wrapped)
        optimizer.step()
        losses[f"loss {step}"] = loss.detach()
    return losses | state(wrapped)


def average_gradients(module: nn.Module) -> None:
    for param in module.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


# - Training


def parity(subject: Callable[[], Subject], kwargs: dict[str, Any], with_unsharded: bool) -> None:
    model = make(subject)
    got = train(FSDP(model, **kwargs), model)
    assert any(v is not None and bool(v.any()) for n, v in got.items() if n.endswith(".grad"))
    model = make(subject)
    assert_equal(got, train(torch_fsdp(model, **kwargs), model))
    if with_unsharded:
        model = make(subject)
        assert_equal(got, train(model, model, average=True))


class TakesBfloat16(Stack):
    """Says which dtypes arrive at its layers."""

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
}


@pytest.mark.parametrize("case", PARITY)
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
    assert_equal(got, train(nested(TorchFSDP, model, use_orig_params=True, device_id=CPU), model))
    with enable_wrap(wrapper_cls=FSDP):
        assert isinstance(wrap(nn.Linear(2, 2)), FSDP)


def test_modules_wrapped_by_hand_are_units_of_the_wrapper_around_them() -> None:
    run_ranks(manual_nesting, 2)


def recomputed(before: bool) -> None:
    """As recipes do it: a checkpoint wrapper for each block, put in before or after FSDP."""
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
    """Names of the wrapped modules that have a forward, with their strategies."""
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
        names = [n for n, _ in wrapped.named_parameters(remove_duplicate=not duplicates)]
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

    # The cast for the root is not for those inside it.
    inner = TakesBfloat16()
    FSDP(nn.Sequential(nn.Identity(), FSDP(inner, mixed_precision=precision())))(x)
    assert inner.seen[0] == torch.float32

    # Inside containers, and only floating-point tensors.
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


# - Names and state dicts


class WithBuffers(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.blocks[1].register_buffer("shift", torch.ones(DIM))
        self.blocks[1].register_buffer("scratch", torch.ones(DIM), persistent=False)
        self.blocks[2] = nn.Sequential(Mlp(), nn.BatchNorm1d(DIM))


def names_are_clean() -> None:
    plain = make(WithBuffers)
    wrapped = FSDP(make(WithBuffers), auto_wrap_policy=BY_BLOCK)
    around = nn.Sequential(nn.Linear(DIM, DIM), FSDP(make(WithBuffers), auto_wrap_policy=BY_BLOCK))
    plain_around = nn.Sequential(nn.Linear(DIM, DIM), plain)
    for ours, theirs in ((wrapped, plain), (around, plain_around)):
        assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
        assert [n for n, _ in ours.named_buffers()] == [n for n, _ in theirs.named_buffers()]
        assert {n for n, _ in ours.named_modules()} == {n for n, _ in theirs.named_modules()}
        got, want = ours.state_dict(), theirs.state_dict()
        assert list(got) == list(want)
        assert got._metadata == want._metadata  # type: ignore[attr-defined]
        assert list(get_model_state_dict(ours)) == list(want)
        assert_equal(
            {n: whole(got[n]) for n in plain.state_dict() if n in got},
            {n: want[n] for n in plain.state_dict() if n in want},
        )
    assert list(wrapped.state_dict(prefix="a.")) == [f"a.{n}" for n in plain.state_dict()]
    assert all(isinstance(p, DTensor) for p in wrapped.parameters())
    assert wrapped.get_parameter("blocks.1.up.weight") is wrapped.blocks[1].up.weight
    assert wrapped.get_submodule("blocks.1.up") is wrapped.blocks[1].module.up


def test_names_are_those_of_the_unwrapped_model() -> None:
    run_ranks(names_are_clean, 2)


def loading() -> None:
    def changed() -> dict[str, Tensor]:
        return {n: t + 1 for n, t in make(WithBuffers).state_dict().items()}

    wrapped = FSDP(make(WithBuffers), auto_wrap_policy=BY_BLOCK)
    args, _ = batch(wrapped, 0)
    before = wrapped.eval()(*args)
    want = changed()
    kept = dict(want)
    assert wrapped.load_state_dict(want).missing_keys == []
    assert want == kept  # the user's dict is not touched
    assert_equal({n: whole(t) for n, t in wrapped.state_dict().items()}, want)
    plain = make(WithBuffers).eval()
    plain.load_state_dict(want)
    after = wrapped(*args)
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, plain(*args), rtol=0, atol=0)

    sharded = wrapped.state_dict()
    for other in (
        FSDP(make(WithBuffers), auto_wrap_policy=BY_BLOCK),
        nn.Sequential(FSDP(make(WithBuffers))),
    ):
        prefix = "0." if isinstance(other, nn.Sequential) else ""
        other.load_state_dict({prefix + n: t for n, t in sharded.items()})
        assert_equal(
            {n: whole(t) for n, t in other.state_dict().items()},
            {prefix + n: t for n, t in want.items()},
        )

    incomplete = changed()
    value = incomplete.pop("blocks.1.up.weight")
    incomplete["blocks.1.up.wait"] = value
    keys = wrapped.load_state_dict(incomplete, strict=False)
    assert keys.missing_keys == ["blocks.1.up.weight"]
    assert keys.unexpected_keys == ["blocks.1.up.wait"]
    with pytest.raises(RuntimeError, match=r'"blocks\.1\.up\.wait"'):
        wrapped.load_state_dict(incomplete)


def test_sharded_and_whole_state_dicts_load() -> None:
    run_ranks(loading, 2)


def checkpoint_api() -> None:
    def trained(steps: int) -> tuple[FSDP, torch.optim.Optimizer]:
        wrapped = FSDP(make(Stack), auto_wrap_policy=BY_BLOCK)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
        for step in range(steps):
            run(wrapped, wrapped, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return wrapped, optimizer

    wrapped, optimizer = trained(2)
    saved = get_model_state_dict(wrapped), get_optimizer_state_dict(wrapped, optimizer)
    saved = tree_map_only(Tensor, torch.clone, saved)  # or they would share optimizer state
    assert set(saved[1]["state"]) == {n for n, _ in make(Stack).named_parameters()}
    resumed, its_optimizer = trained(1)
    set_model_state_dict(resumed, saved[0])
    set_optimizer_state_dict(resumed, its_optimizer, saved[1])
    for model, opt in ((wrapped, optimizer), (resumed, its_optimizer)):
        run(model, model, 5).backward()
        opt.step()
    assert_equal(state(resumed), state(wrapped))


def test_checkpoint_state_dicts_resume_training() -> None:
    run_ranks(checkpoint_api, 2)


# - Arguments


def ignored() -> None:
    def chosen(model: Subject, how: str) -> dict[str, Any]:
        if how == "ignored_modules":
            return {how: [model.blocks[1], model.head]}
        if how == "modules":
            return {"ignored_states": [model.blocks[1], model.head]}
        params = [*model.blocks[1].parameters(), *model.head.parameters()]
        return {"ignored_states": params}

    for how in ("ignored_modules", "modules", "parameters"):
        for policy in (None, ModuleWrapPolicy({Mlp})):
            model = make(Stack)
            if policy is not None and how == "parameters":
                policy = ModuleWrapPolicy({nn.LayerNorm})  # a wrapper needs some parameter
            wrapped = FSDP(model, auto_wrap_policy=policy, **chosen(model, how))
            for name, param in wrapped.named_parameters():
                left = name.startswith(("blocks.1.", "head."))
                assert isinstance(param, DTensor) != left, name
            run(wrapped, model, 0).backward()
            mine = {n: p.grad for n, p in model.head.named_parameters()}
            local = make(Stack)
            run(local, local, 0).backward()
            assert_equal(mine, {n: p.grad for n, p in local.head.named_parameters()})
    model = make(Stack)
    with pytest.raises(ValueError, match="ignored_modules or ignored_states but got both"):
        FSDP(model, ignored_modules=[model.head], ignored_states=[model.stem])
    with pytest.raises(TypeError, match="but got Parameter"):
        FSDP(model, ignored_modules=[model.head.weight])
    model.head = FSDP(model.head)
    with pytest.raises(TypeError, match="but got FullyShardedDataParallel"):
        FSDP(model, ignored_modules=[model.head])


def test_ignored_modules_and_parameters_stay_plain_and_local() -> None:
    run_ranks(ignored, 2)


class ManyDtypes(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flags", torch.rand(7) > 0.5)
        self.register_buffer("small", torch.randn(3).bfloat16())
        self.register_buffer("count", torch.randint(100, ()))
        self.register_buffer("turned", torch.randn(3, 5).t())
        self.register_buffer("nothing", torch.empty(0))


def synced() -> None:
    """Ranks 1 and 2 are a group, whose rank 0 is another than the world's."""
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    group = groups[min(dist.get_rank(), 1)]
    want = make(ManyDtypes, seed=min(dist.get_rank(), 1)).state_dict()
    for kwargs in (
        {"process_group": group},
        {"device_mesh": init_device_mesh("cpu", (3,))},
    ):
        if "device_mesh" in kwargs:
            want = make(ManyDtypes, seed=0).state_dict()
        model = make(ManyDtypes, seed=dist.get_rank())
        wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK, sync_module_states=True, **kwargs)
        assert_equal({n: whole(t) for n, t in wrapped.state_dict().items()}, want)
        assert wrapped.process_group.size() == wrapped.stem.weight.device_mesh.size()
        run(wrapped, model, 0).backward()
    model = make(ManyDtypes, seed=dist.get_rank())
    own = model.state_dict()["count"].clone()
    unsynced = FSDP(model)
    assert torch.equal(unsynced.count, own)


def test_states_come_from_rank_0_of_the_group() -> None:
    run_ranks(synced, 3)


def init_meta(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.LayerNorm)):
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for param in module.parameters(recurse=False):
                param.fill_(0.25)


def leave_meta(module: nn.Module) -> None:
    pass


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def on_meta() -> None:
    with torch.device("meta"):
        meta = [Stack() for _ in range(4)]
        unable = NoReset()
    wrapped = FSDP(meta[0], auto_wrap_policy=BY_BLOCK, param_init_fn=init_meta)
    assert all(bool((whole(p) == 0.25).all()) for p in wrapped.parameters())
    run(wrapped, meta[0], 0).backward()

    torch.manual_seed(3)
    wrapped = FSDP(meta[1], auto_wrap_policy=BY_BLOCK)  # reset_parameters
    assert bool((whole(wrapped.blocks[0].norm.weight) == 1).all())
    assert 0 < float(whole(wrapped.stem.weight).abs().max()) <= 1 / math.sqrt(DIM)

    with pytest.raises(ValueError, match=r"nothing on meta after param_init_fn but \['stem'"):
        FSDP(meta[2], param_init_fn=leave_meta)
    with pytest.raises(TypeError, match="NoReset has none; pass param_init_fn"):
        FSDP(nn.Sequential(unable))

    # Only rank 0 has values: a recipe for large checkpoints.
    model = make(Stack) if dist.get_rank() == 0 else meta[3]
    init = functools.partial(nn.Module.to_empty, device="cpu", recurse=False)
    wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK, param_init_fn=init, sync_module_states=True)
    want = make(Stack).state_dict()
    assert_equal({n: whole(t) for n, t in wrapped.state_dict().items()}, want)


def test_modules_on_meta_are_initialised() -> None:
    run_ranks(on_meta, 2)


def group_arguments() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = make(Stack)
    with pytest.raises(ValueError, match="process_group or device_mesh but got both"):
        FSDP(model, process_group=dist.group.WORLD, device_mesh=mesh)
    with pytest.raises(TypeError, match=r"callable or a policy .* but got set"):
        FSDP(model, auto_wrap_policy={Mlp})
    for kwargs in (
        {"process_group": dist.group.WORLD},
        {"device_mesh": mesh},
        {"device_id": CPU, "use_orig_params": True, "cpu_offload": CPUOffload(False)},
        {"process_group": dist.group.WORLD, "device_id": CPU, "use_orig_params": False},
    ):
        wrapped = FSDP(make(Stack), auto_wrap_policy=BY_BLOCK, **kwargs)
        assert dist.get_process_group_ranks(wrapped.process_group) == [0, 1]
        assert all(p.placements == (Shard(0),) for p in wrapped.parameters())
        run(wrapped, wrapped, 0).backward()
    model.blocks[0] = FSDP(model.blocks[0])
    with pytest.raises(ValueError, match=r"but 'blocks\.0' is one; wrap by policy or by hand"):
        FSDP(model, auto_wrap_policy=BY_BLOCK)
    with pytest.raises(ValueError, match="not sharded yet but got a FullyShardedDataParallel"):
        FSDP(FSDP(nn.Linear(2, 2)))


def test_arguments_of_where_to_shard() -> None:
    run_ranks(group_arguments, 2)


def test_there_has_to_be_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="initialised process group"):
        FSDP(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        *(
            ({"sharding_strategy": strategy}, f"ShardingStrategy.{strategy.name}")
            for strategy in ShardingStrategy
            if strategy not in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
        ),
        ({"process_group": (None, None)}, "HYBRID_SHARD"),
        ({"cpu_offload": CPUOffload(offload_params=True)}, "cpu_offload=CPUOffload"),
        ({"backward_prefetch": None}, "backward_prefetch=None"),
        ({"backward_prefetch": BackwardPrefetch.BACKWARD_POST}, "BACKWARD_POST"),
        (
            {"mixed_precision": MixedPrecision(keep_low_precision_grads=True)},
            "keep_low_precision_grads",
        ),
    ],
    ids=str,
)
def test_unsupported_arguments_are_refused_by_name(kwargs: dict[str, Any], name: str) -> None:
    with pytest.raises(NotImplementedError, match=name):
        FSDP(nn.Linear(2, 2), **kwargs)


@pytest.mark.parametrize(
    "name",
    [
        "state_dict_type",
        "set_state_dict_type",
        "get_state_dict_type",
        "summon_full_params",
        "register_comm_hook",
        "optim_state_dict",
        "full_optim_state_dict",
        "sharded_optim_state_dict",
        "optim_state_dict_to_load",
        "shard_full_optim_state_dict",
        "scatter_full_optim_state_dict",
        "flatten_sharded_optim_state_dict",
        "rekey_optim_state_dict",
    ],
)
def test_unsupported_methods_are_refused_by_name(name: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"FullyShardedDataParallel\.{name} is not"):
        getattr(FSDP, name)(nn.Linear(2, 2), None)


def test_no_public_method_of_fsdp1_is_missing() -> None:
    public = {n for n in vars(TorchFSDP) if not n.startswith("_")}
    assert public <= set(dir(FSDP))


# - Methods


def fails_after_backward(wrapped: FSDP) -> None:
    def fail_in_no_sync() -> None:
        with wrapped.no_sync():
            run(wrapped, wrapped, 0).backward()
            assert all(p.grad is None for p in wrapped.parameters())
            raise KeyError

    with pytest.raises(KeyError):
        fail_in_no_sync()


def accumulated() -> None:
    def train_accumulating(wrapped: Any, model: Subject) -> Values:
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
        for step in range(0, 6, 3):
            with wrapped.no_sync():
                run(wrapped, model, step).backward()
                with wrapped.no_sync():
                    run(wrapped, model, step + 1).backward()
            run(wrapped, model, step + 2).backward()
            optimizer.step()
            if step == 0:
                optimizer.zero_grad()
        return state(wrapped)

    model = make(Stack)
    wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK)
    got = train_accumulating(wrapped, model)
    model = make(Stack)
    reference = torch_fsdp(model, auto_wrap_policy=BY_BLOCK)
    assert_equal(got, train_accumulating(reference, model))

    wrapped.zero_grad()
    fails_after_backward(wrapped)
    run(wrapped, wrapped, 1).backward()
    assert all(p.grad is not None for p in wrapped.parameters())
    with pytest.raises(RuntimeError, match="no_sync expects the outermost"):
        wrapped.blocks[0].no_sync().__enter__()


def test_no_sync_accumulates_as_fsdp1() -> None:
    run_ranks(accumulated, 2)


def norms_before_clipping(norm_type: float) -> list[float]:
    norms = []
    for max_norm in (0.05, 1e6):
        model = make(models.FewRows)
        wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK)
        run(wrapped, model, 0).backward()
        got = wrapped.clip_grad_norm_(max_norm, norm_type)
        assert type(got) is Tensor
        assert got.shape == ()
        model = make(models.FewRows)
        reference = torch_fsdp(model, auto_wrap_policy=BY_BLOCK)
        run(reference, model, 0).backward()
        want = reference.clip_grad_norm_(max_norm, norm_type)
        # Each adds up in its own order.
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
        clipped = state(wrapped)
        for name, value in state(reference).items():
            torch.testing.assert_close(clipped[name], value, rtol=2e-6, atol=0)
        model = make(models.FewRows)
        run(model, model, 0).backward()
        average_gradients(model)
        plain = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
        torch.testing.assert_close(got, plain, rtol=1e-6, atol=0)
        norms.append(float(got))
    return norms


@pytest.mark.parametrize("norm_type", [1, 2.0, 3.5, math.inf])
def test_clip_grad_norm_is_that_of_fsdp1(norm_type: float) -> None:
    first, second = run_ranks(norms_before_clipping, 2, norm_type)
    assert first == second
    assert first[0] > 0.05


def clip_corners() -> None:
    model = make(Stack)
    wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK, ignored_modules=[model.head])
    assert float(wrapped.clip_grad_norm_(1.0)) == 0  # before any gradient
    run(wrapped, model, 0).backward()
    for param in model.head.parameters():  # ours to reduce
        dist.all_reduce(param.grad)
        param.grad /= 2
    with torch.no_grad():
        run(wrapped, model, 1)  # leaves the root unsharded
    got = wrapped.clip_grad_norm_(0.05)
    plain = make(Stack)
    run(plain, plain, 0).backward()
    average_gradients(plain)
    want = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    torch.testing.assert_close(model.head.weight.grad, plain.head.weight.grad)
    with pytest.raises(RuntimeError, match="clip_grad_norm_ expects the outermost"):
        wrapped.blocks[0].clip_grad_norm_(1.0)
    with pytest.raises(ValueError, match="positive norm_type but got 0"):
        wrapped.clip_grad_norm_(1.0, 0)

    double = FSDP(make(Stack).double())
    double(torch.ones(2, DIM).double()).sum().backward()
    assert double.clip_grad_norm_(1.0).dtype == torch.float64
    half = FSDP(make(Stack).bfloat16())
    half(torch.ones(2, DIM).bfloat16()).sum().backward()
    assert half.clip_grad_norm_(1.0).dtype == BF16


def test_clip_grad_norm_with_ignored_parameters_and_other_dtypes() -> None:
    run_ranks(clip_corners, 2)


def passed_through() -> None:
    layers = FSDP(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), auto_wrap_policy=always_wrap_policy)
    assert isinstance(layers[0], FSDP)
    assert layers[0].in_features == 2
    assert [type(layer.module).__name__ for layer in layers] == ["FSDPLinear", "FSDPReLU"]
    assert isinstance(layers.module, nn.Sequential)
    assert isinstance(layers[0].module, nn.Linear)
    assert not hasattr(layers, "missing")
    with pytest.raises(AttributeError, match="'missing'"):
        layers.missing  # noqa: B018
    layers.eval()
    assert not layers[0].module.training
    with pytest.raises(NotImplementedError, match="deep-copied"):
        copy.deepcopy(layers)
    around = nn.Sequential(layers, FSDP(nn.Linear(3, 1)))
    assert FSDP.fsdp_modules(around) == [layers, layers[0], layers[1], around[1]]
    assert FSDP.fsdp_modules(around, root_only=True) == [layers, around[1]]
    assert layers.check_is_root()
    assert not layers[0].check_is_root()
    around(torch.ones(1, 2)).backward()


def test_attributes_and_items_are_those_of_the_module() -> None:
    run_ranks(passed_through, 1)


def fill(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        assert not isinstance(module.weight, DTensor)
        with torch.no_grad():
            module.weight.copy_(torch.arange(module.weight.numel()).view_as(module.weight) / 100)


def applied() -> None:
    def fail(module: nn.Module) -> None:
        raise KeyError

    for forwards in (0, 1):  # before there is a schedule, and with units still unsharded
        wrapped = FSDP(make(Transformer), auto_wrap_policy=BY_BLOCK)
        params = dict(wrapped.named_parameters())
        plain = make(Transformer).apply(fill)
        for _ in range(forwards):
            run(wrapped, wrapped, 0)
        assert wrapped.apply(fill) is wrapped
        assert dict(wrapped.named_parameters()) == params
        assert_equal({n: whole(t) for n, t in wrapped.state_dict().items()}, plain.state_dict())
        assert torch.equal(run(wrapped, wrapped, 0), run(plain, plain, 0))
        with pytest.raises(KeyError):
            wrapped.apply(fail)
        assert dict(wrapped.named_parameters()).keys() == params.keys()
        assert_equal({n: whole(t) for n, t in wrapped.state_dict().items()}, plain.state_dict())


def test_apply_sees_whole_parameters() -> None:
    run_ranks(applied, 2)
