"""Every argument of `FullyShardedDataParallel` does what FSDP1 says, or is refused by name."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fsdp1_parity import (
    BY_BLOCK,
    CPU,
    FSDP,
    assert_equal,
    make,
    run,
    torch_fsdp,
    whole,
)
from support.launcher import run_ranks
from support.messages import check_messages
from support.models import DIM, Mlp, Stack, Subject
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    ShardingStrategy,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_module


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
                policy = ModuleWrapPolicy({nn.LayerNorm})  # a wrapper needs a parameter
            wrapped = FSDP(model, auto_wrap_policy=policy, **chosen(model, how))
            for name, param in wrapped.named_parameters():
                left = name.replace("_fsdp_wrapped_module.", "").startswith(("blocks.1.", "head."))
                assert isinstance(param, DTensor) != left, name
            run(wrapped, model, 0).backward()
            mine = {n: p.grad for n, p in model.head.named_parameters()}
            local = make(Stack)
            run(local, local, 0).backward()
            assert_equal(mine, {n: p.grad for n, p in local.head.named_parameters()})


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
    """Ranks 1 and 2 form a group. Its rank 0 is not the rank 0 of the world."""
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
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    nn.init.constant_(model[1].weight, dist.get_rank())
    model[1].running_mean.fill_(dist.get_rank() + 1)
    FSDP(model, ignored_modules=[model[1]], sync_module_states=True)
    assert model[1].running_mean.tolist() == [1, 1]  # FSDP1 syncs buffers of ignored modules,
    assert model[1].weight.tolist() == [dist.get_rank()] * 2  # but not their parameters
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    distribute_module(model[1], init_device_mesh("cpu", (3,)))
    model[1].running_mean.to_local().fill_(dist.get_rank() + 1)
    FSDP(model, ignored_modules=[model[1]], sync_module_states=True)
    assert model[1].running_mean.to_local().tolist() == [1, 1]


def test_states_come_from_rank_0_of_the_group() -> None:
    run_ranks(synced, 3)


def init_meta(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.LayerNorm)):
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for param in module.parameters(recurse=False):
                param.fill_(0.25)


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def on_meta() -> None:
    with torch.device("meta"):
        meta = [Stack() for _ in range(3)]
    wrapped = FSDP(meta[0], auto_wrap_policy=BY_BLOCK, param_init_fn=init_meta)
    assert all(bool((whole(p) == 0.25).all()) for p in wrapped.parameters())
    run(wrapped, meta[0], 0).backward()

    torch.manual_seed(3)
    wrapped = FSDP(meta[1], auto_wrap_policy=BY_BLOCK)  # reset_parameters
    assert bool((whole(wrapped.blocks[0].norm.weight) == 1).all())
    assert 0 < float(whole(wrapped.stem.weight).abs().max()) <= 1 / math.sqrt(DIM)

    # Only rank 0 has values, as recipes for large checkpoints have it.
    model = make(Stack) if dist.get_rank() == 0 else meta[2]
    init = functools.partial(nn.Module.to_empty, device="cpu", recurse=False)
    wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK, param_init_fn=init, sync_module_states=True)
    want = make(Stack).state_dict()
    assert_equal({n: whole(t) for n, t in wrapped.state_dict().items()}, want)


def test_modules_on_meta_are_initialised() -> None:
    run_ranks(on_meta, 2)


def group_of_blocks(module: nn.Module) -> bool | dict[str, Any]:
    return {"process_group": dist.group.WORLD} if isinstance(module, Mlp) else False


def group_and_mesh_of_blocks(module: nn.Module) -> bool | dict[str, Any]:
    group = group_of_blocks(module)
    return isinstance(group, dict) and {**group, "device_mesh": init_device_mesh("cpu", (2,))}


def group_arguments() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for kwargs in (
        {"process_group": dist.group.WORLD},
        {"device_mesh": mesh},
        {"device_id": CPU, "use_orig_params": True, "cpu_offload": CPUOffload(True)},
        {"process_group": dist.group.WORLD, "device_id": CPU},
        {"auto_wrap_policy": CustomPolicy(group_of_blocks)},
        {"auto_wrap_policy": CustomPolicy(group_of_blocks), "device_mesh": mesh},
    ):
        wrapped = FSDP(make(Stack), **{"auto_wrap_policy": BY_BLOCK} | kwargs)
        assert isinstance(wrapped.blocks[0], FSDP)
        assert dist.get_process_group_ranks(wrapped.process_group) == [0, 1]
        assert all(p.placements == (Shard(0),) for p in wrapped.parameters())
        run(wrapped, wrapped, 0).backward()


def test_arguments_of_where_to_shard() -> None:
    run_ranks(group_arguments, 2)


def refused() -> None:
    def wrap(module: nn.Module | None = None, **arguments: Any) -> Callable[[], object]:
        return lambda: FSDP(nn.Linear(2, 2) if module is None else module, **arguments)

    model, inside = make(Stack), make(Stack)
    inside.head, inside.blocks[0] = FSDP(inside.head), FSDP(inside.blocks[0])
    FSDP(wrapped := nn.Linear(2, 2))
    unsharded = FSDP(nn.Linear(2, 2), sharding_strategy=ShardingStrategy.NO_SHARD)
    mixed = nn.Sequential(FSDP(nn.Linear(2, 2)), nn.Linear(2, 2), nn.Linear(2, 2).double())
    with torch.device("meta"):
        meta, unable, linear = Stack(), nn.Sequential(NoReset()), nn.Linear(2, 2)
    check_messages([
        (ValueError, "both ignored_modules and ignored_states",
         wrap(model, ignored_modules=[model.head], ignored_states=[model.stem])),
        (ValueError, "expects nn.Module list .* Pass .* as ignored_states",
         wrap(model, ignored_modules=[model.head.weight])),
        (ValueError, "should not include FSDP modules, but one of these is wrapped",
         wrap(inside, ignored_modules=[inside.head])),
        (ValueError, r"\['stem.* still on meta after param_init_fn",
         wrap(meta, param_init_fn=lambda module: None)),
        (TypeError, "NoReset has no reset_parameters .* Pass param_init_fn", wrap(unable)),
        (ValueError, "42", lambda: torch_fsdp(linear, param_init_fn=42)),
        (ValueError, "42", wrap(linear, param_init_fn=42)),
        (ValueError, "param_init_fn is 42, but has to be callable", wrap(param_init_fn=42)),
        (ValueError, "both process_group and device_mesh",
         wrap(process_group=dist.group.WORLD, device_mesh=init_device_mesh("cpu", (2,)))),
        (TypeError, "auto_wrap_policy is a set", wrap(model, auto_wrap_policy={Mlp})),
        (ValueError, r"'blocks\.0' is wrapped already. Pass a policy, or wrap modules yourself",
         wrap(inside, auto_wrap_policy=BY_BLOCK)),
        (ValueError, "got a Linear that is sharded already", wrap(wrapped)),
        (ValueError, "no forward that would gather '.*weight'. Wrap its",
         wrap(nn.ModuleList([nn.Linear(2, 2)]))),
        (ValueError, "no forward that would gather '.*weight'. Wrap its",
         wrap(nn.ModuleDict({"a": nn.Linear(2, 2)}))),
        (TypeError, "mixed_precision is .* must be a MixedPrecision or None",
         wrap(mixed_precision=torch.bfloat16)),
        (TypeError, "sharding_strategy is 'FULL_SHARD' but must be",
         wrap(sharding_strategy="FULL_SHARD")),
        (TypeError, "cpu_offload is True but must be a CPUOffload or None", wrap(cpu_offload=True)),
        (ValueError, "both process_group and device_mesh",
         wrap(make(Stack), auto_wrap_policy=CustomPolicy(group_and_mesh_of_blocks))),
        (TypeError, "device_mesh is 'cpu' but must be a DeviceMesh or None",
         wrap(device_mesh="cpu")),
        (TypeError, "backward_prefetch is 'pre'.*BACKWARD_PRE", wrap(backward_prefetch="pre")),
        (NotImplementedError, "NO_SHARD and .*FULL_SHARD, which shard over",
         wrap(nn.Sequential(unsharded))),
        (ValueError, "which differ in dtypes", wrap(mixed, use_orig_params=False)),
    ])  # fmt: skip
    assert all(wrapper.check_is_root() for wrapper in (inside.head, unsharded, mixed[0]))


def test_arguments_that_cannot_be_are_refused() -> None:
    run_ranks(refused, 2)


def test_there_has_to_be_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="initialised process group"):
        FSDP(nn.Linear(2, 2))


def one_rank() -> None:
    """A single rank has NO_SHARD, with a warning, and the wrappers of a model may differ."""
    strategies = ShardingStrategy
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="FSDP is switching")
        FSDP(nn.Linear(2, 2), sharding_strategy=strategies.NO_SHARD)
    for strategy in (None, strategies.SHARD_GRAD_OP, strategies.HYBRID_SHARD):
        named = strategy or strategies.FULL_SHARD
        with pytest.warns(UserWarning, match=f"`NO_SHARD` instead of {named} since the world") as w:
            model = FSDP(make(Stack), auto_wrap_policy=BY_BLOCK, sharding_strategy=strategy)
        assert len(w) == 1
        assert {wrapper.sharding_strategy for wrapper in FSDP.fsdp_modules(model)} == {
            strategies.NO_SHARD
        }
    with pytest.warns(UserWarning, match="FSDP is switching"):
        inner = FSDP(nn.Linear(2, 2), sharding_strategy=strategies.SHARD_GRAD_OP)
    model = FSDP(nn.Sequential(inner), sharding_strategy=strategies.NO_SHARD)
    model(torch.ones(1, 2)).sum().backward()
    assert inner.weight.grad is not None


def test_a_single_rank_shards_nothing_and_says_so() -> None:
    run_ranks(one_rank, 1)


def top_level_ignored() -> None:
    for system in (FSDP, torch_fsdp):
        model = nn.Linear(2, 2)
        with pytest.warns(UserWarning, match="ignore the top-level module passed into the FSDP"):
            wrapped = system(model, ignored_modules=[model])
        assert model.weight.shape == (2, 2)
        wrapped(torch.ones(1, 2)).sum().backward()
        assert torch.equal(model.weight.grad, torch.ones(2, 2))


def test_ignoring_the_whole_module_warns_as_under_fsdp1() -> None:
    run_ranks(top_level_ignored, 2)


def containers() -> None:
    """A list or a dict of wrapped modules is wrapped, too."""

    class Listed(nn.Module):
        def __init__(self, wrap: Any) -> None:
            super().__init__()
            torch.manual_seed(0)
            layers = nn.ModuleList([wrap(nn.Linear(4, 4)) for _ in range(2)])
            heads = nn.ModuleDict({"a": wrap(nn.Linear(4, 2)), "b": wrap(nn.Linear(4, 2))})
            self.layers, self.heads = wrap(layers), wrap(heads)
            self.norm = nn.LayerNorm(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            x = self.norm(x)
            return torch.cat([self.heads["a"](x), self.heads["b"](x)]).square().sum()

    results = []
    for system in (FSDP, torch_fsdp):
        with pytest.warns(UserWarning, match="containers that do not implement forward"):
            model = system(Listed(system))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            torch.manual_seed(10 * step + dist.get_rank())
            with model.no_sync():
                model(torch.randn(3, 4)).backward()
            model(torch.randn(3, 4)).backward()
            model.clip_grad_norm_(1e6)
            optimizer.step()
            optimizer.zero_grad()
        with type(model).summon_full_params(model):
            results.append({n: p.detach().clone() for n, p in model.module.named_parameters()})
        assert len(type(model).fsdp_modules(model)) == 7
        if system is FSDP:
            state = model.state_dict()
            results.append({name: value.clone() for name, value in state.items()})
            assert not model.load_state_dict(state).missing_keys
    ours, saved, theirs = results
    assert_equal(ours, theirs)
    assert_equal(
        saved, {name.replace("_fsdp_wrapped_module.", ""): value for name, value in theirs.items()}
    )


def test_lists_and_dicts_of_wrapped_modules_train_as_under_fsdp1() -> None:
    run_ranks(containers, 2)


def nested_in_ignored() -> None:
    """A wrapper inside of an ignored module trains on."""
    for how in ("ignored_modules", "ignored_states"):
        model = make(Stack)
        model.blocks[1].up = FSDP(model.blocks[1].up)
        ignored = model.blocks[1]
        wrapped = FSDP(model, **{how: [ignored]})
        run(wrapped, model, 0).backward()
        kinds = {name: type(param.grad) for name, param in ignored.named_parameters()}
        inner = "up._fsdp_wrapped_module"
        assert kinds.pop(f"{inner}.weight") is kinds.pop(f"{inner}.bias") is DTensor
        assert set(kinds.values()) == {torch.Tensor}


def test_a_wrapper_in_an_ignored_module_trains() -> None:
    run_ranks(nested_in_ignored, 2)


def test_no_public_method_of_fsdp1_is_missing() -> None:
    public = {n for n in vars(TorchFSDP) if not n.startswith("_")}
    assert public <= set(dir(FSDP))
