"""State dicts of models and optimizers have the types of FSDP1, and load into FSDP1 and back."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fsdp1_parity import BY_BLOCK, CPU, FSDP, assert_equal, make, run, state, torch_fsdp
from support.launcher import run_ranks
from support.models import DIM, Stack
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import tree_leaves

from fsdp_ext.fsdp1 import optimizer_states, state_dict_forms

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
ON_RANK_0 = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
# With offload_to_cpu or rank0_only, PyTorch 2.13 returns exp_avg_sq as exp_avg, too, on the CPU.
FULL_ON_DEVICE = (FULL, FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False))
OPTIM_ON_RANK_0 = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)


def make_ours(**options: Any) -> tuple[Any, Optimizer]:
    model = FSDP(make(Stack), auto_wrap_policy=BY_BLOCK, **options)
    return model, AdamW(model.parameters(), lr=0.01)


def make_theirs() -> tuple[Any, Optimizer]:
    model = torch_fsdp(make(Stack), auto_wrap_policy=BY_BLOCK)
    return model, AdamW(model.parameters(), lr=0.01)


def train(model: Any, optimizer: Optimizer, *steps: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        run(model, model, step).backward()
        optimizer.step()


def flat(state_dict: dict[str, Any]) -> dict[str, Tensor]:
    """Return an optimizer's state as one dict of tensors."""
    values = state_dict["state"].items()
    return {f"{name}.{key}": value for name, of in values for key, value in of.items()}


def _full(options: dict[str, Any]) -> None:
    ours, our_optimizer = make_ours(**options)
    theirs, their_optimizer = make_theirs()
    train(ours, our_optimizer, 0, 1)
    train(theirs, their_optimizer, 0, 1)
    with (
        FSDP.state_dict_type(ours, *FULL_ON_DEVICE),
        TorchFSDP.state_dict_type(theirs, *FULL_ON_DEVICE),
    ):
        got, want = ours.state_dict(), theirs.state_dict()
        assert list(got) == list(want)
        assert_equal(got, want)
        got = FSDP.optim_state_dict(ours, our_optimizer)
        want = TorchFSDP.optim_state_dict(theirs, their_optimizer)
        assert_equal(flat(got), flat(want))
        assert got["param_groups"][0]["params"] == want["param_groups"][0]["params"]
    saved = got["state"]["head.weight"]["exp_avg"].clone()
    train(ours, our_optimizer, 2)
    assert torch.equal(got["state"]["head.weight"]["exp_avg"], saved)  # a copy
    with FSDP.state_dict_type(ours, SHARDED):
        assert all(isinstance(value, DTensor) for value in ours.state_dict().values())


@pytest.mark.parametrize("strategy", [None, ShardingStrategy.NO_SHARD], ids=str)
def test_full_state_dicts_are_those_of_fsdp1(strategy: ShardingStrategy | None) -> None:
    run_ranks(_full, 2, {} if strategy is None else {"sharding_strategy": strategy})


SNAPSHOTS: list[tuple[Any, ...]] = [
    (SHARDED, ShardedStateDictConfig(), ShardedOptimStateDictConfig(offload_to_cpu=False)),
    (SHARDED, ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig()),
    (
        StateDictType.LOCAL_STATE_DICT,
        LocalStateDictConfig(),
        LocalOptimStateDictConfig(offload_to_cpu=False),
    ),
]


def following(wrapped: Any, types: tuple[Any, ...]) -> set[str]:
    """Return the names of saved tensors that training changes."""
    optimizer = AdamW(wrapped.parameters(), lr=0.01)
    train(wrapped, optimizer, 0)
    with type(wrapped).state_dict_type(wrapped, *types):
        saved = wrapped.state_dict()
        saved |= flat(type(wrapped).optim_state_dict(wrapped, optimizer))
    before = {name: local(value).clone() for name, value in saved.items()}
    train(wrapped, optimizer, 1)
    return {name for name, value in saved.items() if not torch.equal(local(value), before[name])}


def local(value: Any) -> Tensor:
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, ShardedTensor):
        return value.local_tensor() if value.local_shards() else torch.empty(0)
    return value


def _snapshots() -> None:
    for use_orig_params in (True, False):
        for types in SNAPSHOTS[: 2 if use_orig_params else 3]:
            ours, theirs = (
                following(
                    wrap(
                        make(Stack),
                        auto_wrap_policy=BY_BLOCK,
                        use_orig_params=use_orig_params,
                        device_id=CPU,
                    ),
                    types,
                )
                for wrap in (FSDP, TorchFSDP)
            )
            assert ours == theirs
            assert all("_flat_param" in name for name in ours)
            assert bool(ours) == (types is SNAPSHOTS[2])


def test_saved_tensors_follow_training_only_where_those_of_fsdp1_do() -> None:
    run_ranks(_snapshots, 2)


def _resume() -> None:
    ours, our_optimizer = make_ours()
    train(ours, our_optimizer, 0, 1)
    with FSDP.state_dict_type(ours, FULL, ON_RANK_0, OPTIM_ON_RANK_0):
        saved = ours.state_dict()
        saved_optimizer = FSDP.optim_state_dict(ours, our_optimizer)
    assert bool(saved) == bool(saved_optimizer) == (dist.get_rank() == 0)
    whole = [saved, saved_optimizer]
    dist.broadcast_object_list(whole)
    resumed, its_optimizer = make_ours()
    with FSDP.state_dict_type(resumed, FULL, ON_RANK_0, OPTIM_ON_RANK_0):
        resumed.load_state_dict(whole[0])
        loaded = FSDP.optim_state_dict_to_load(resumed, its_optimizer, saved_optimizer)
        its_optimizer.load_state_dict(loaded)
    # Theirs goes on from the same state.
    theirs, their_optimizer = make_theirs()
    with TorchFSDP.state_dict_type(theirs, *FULL_ON_DEVICE):
        theirs.load_state_dict(whole[0])
        loaded = TorchFSDP.optim_state_dict_to_load(theirs, their_optimizer, whole[1])
        their_optimizer.load_state_dict(loaded)
    # Sharded states, and the older names.
    sharded, sharded_optimizer = make_ours()
    with FSDP.state_dict_type(ours, SHARDED), FSDP.state_dict_type(sharded, SHARDED):
        sharded.load_state_dict({name: value.clone() for name, value in ours.state_dict().items()})
        FSDP.optim_state_dict_to_load(
            sharded,
            sharded_optimizer,
            FSDP.optim_state_dict(ours, our_optimizer),
            load_directly=True,
        )
    older, older_optimizer = make_ours()
    older.load_state_dict(whole[0])
    full = FSDP.full_optim_state_dict(ours, our_optimizer)
    older_optimizer.load_state_dict(
        FSDP.scatter_full_optim_state_dict(full or None, older, optim=older_optimizer)
    )
    train(ours, our_optimizer, 2)
    want = state(ours)
    for model, optimizer in (
        (resumed, its_optimizer),
        (sharded, sharded_optimizer),
        (older, older_optimizer),
        (theirs, their_optimizer),
    ):
        train(model, optimizer, 2)
        assert_equal(state(model), want)


def test_training_resumes_from_every_kind_of_state() -> None:
    run_ranks(_resume, 2)


def _one_at_a_time() -> None:
    wholes: list[weakref.ref[Tensor]] = []
    whole_copy, broadcast = state_dict_forms.whole_copy, optimizer_states.broadcast

    def expect_one(value: Tensor) -> None:
        if dist.get_rank() > 0:
            assert not any(whole() is not None for whole in wholes)
        wholes.append(weakref.ref(value))

    def copy(sharded: DTensor) -> Tensor:
        value = whole_copy(sharded)
        expect_one(value)
        return value

    def send(values: list[Tensor], mesh: DeviceMesh) -> None:
        (value,) = values
        expect_one(value)
        broadcast(values, mesh)

    model, optimizer = make_ours()
    train(model, optimizer, 0)
    FSDP.set_state_dict_type(model, FULL, ON_RANK_0, OPTIM_ON_RANK_0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_dict_forms, "whole_copy", copy)
        patch.setattr(optimizer_states, "broadcast", send)
        saved = FSDP.optim_state_dict(model, optimizer)
        gathered = len(wholes)
        FSDP.optim_state_dict_to_load(model, optimizer, saved)
    count = sum(value.ndim > 0 for value in flat(optimizer.state_dict()).values())
    assert gathered == len(wholes) - gathered == count > 0


def test_other_ranks_than_0_need_memory_for_one_whole_state() -> None:
    run_ranks(_one_at_a_time, 2)


def _shards_as_whole() -> None:
    model, optimizer = make_ours()
    train(model, optimizer, 0)
    saved = FSDP.sharded_optim_state_dict(model, optimizer)
    with (
        FSDP.state_dict_type(model, FULL, ON_RANK_0, OPTIM_ON_RANK_0),
        pytest.raises(ValueError, match=r"its 'exp_avg' of '.*' is a DTensor, a shard\. Set"),
    ):
        FSDP.optim_state_dict_to_load(model, optimizer, saved)


def test_shards_are_refused_where_rank_0s_whole_state_is_loaded() -> None:
    run_ranks(_shards_as_whole, 2)


def test_no_tensor_of_a_device_is_pickled() -> None:
    scalar = torch.zeros((), device="meta")  # stands for a GPU
    group = {"params": ["a"], "lr": scalar, "betas": (scalar, scalar)}
    sent = optimizer_states._to_send({"state": {"a": {"step": scalar}}, "param_groups": [group]})
    assert not any(isinstance(value, Tensor) for value in tree_leaves(sent))


def _other_keys() -> None:
    ours, optimizer = make_ours()
    train(ours, optimizer, 0)
    full = FSDP.full_optim_state_dict(ours, optimizer, rank0_only=False)
    numbered = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, ours, optim=optimizer)
    assert list(numbered["state"]) == list(range(len(full["state"])))
    plain = make(Stack)
    AdamW(plain.parameters()).load_state_dict(numbered)
    named = FSDP.rekey_optim_state_dict(numbered, OptimStateKeyType.PARAM_NAME, plain)
    assert_equal(flat(named), flat(full))
    sharded = FSDP.sharded_optim_state_dict(ours, optimizer)
    for loadable in (
        FSDP.shard_full_optim_state_dict(full, ours, optim=optimizer),
        FSDP.flatten_sharded_optim_state_dict(sharded, ours, optimizer),
    ):
        for key, values in optimizer.state_dict()["state"].items():
            assert torch.equal(
                loadable["state"][key]["exp_avg"].to_local(), values["exp_avg"].to_local()
            )


def test_a_state_is_keyed_by_names_or_numbers() -> None:
    run_ranks(_other_keys, 2)


def _groups_given() -> None:
    """What the optimizer was made of takes its place."""

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        params = list(model.parameters())[::-1]
        return [{"params": params[:1]}, {"params": iter(params[1:]), "weight_decay": 0.5}]

    plain = make(Stack)
    optimizer = AdamW(groups(plain))
    plain(torch.ones(2, DIM)).sum().backward()
    optimizer.step()
    named = FSDP.rekey_optim_state_dict(
        optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, plain, optim_input=groups(plain)
    )
    for name, param in plain.named_parameters():
        assert torch.equal(named["state"][name]["exp_avg"], optimizer.state[param]["exp_avg"])
    ours = FSDP(make(Stack), auto_wrap_policy=BY_BLOCK)
    sharded = AdamW(groups(ours))
    for load in (FSDP.shard_full_optim_state_dict, FSDP.scatter_full_optim_state_dict):
        sharded.load_state_dict(load(named, ours, optim_input=groups(ours)))
        assert_equal(flat(FSDP.full_optim_state_dict(ours, sharded, rank0_only=False)), flat(named))
        load(named, ours, optim_input=groups(ours), optim=sharded)
        with pytest.raises(
            ValueError, match=r"other parameters than optim, .* Pass one of the two"
        ):
            load(named, ours, optim_input=ours.parameters(), optim=sharded)
        for wrong in (2, [], ["head"], [{"lr": 0.1}]):
            with pytest.raises(TypeError, match=r"optim_input is not .* Pass a list of parameters"):
                load(named, ours, optim_input=wrong)


def test_an_optimizers_input_takes_its_place() -> None:
    run_ranks(_groups_given, 2)


def _settings() -> None:
    ours, optimizer = make_ours()
    around = nn.Sequential(ours)
    default = StateDictSettings(FULL, FullStateDictConfig(), FullOptimStateDictConfig())
    assert default == TorchFSDP.get_state_dict_type(torch_fsdp(make(Stack)))
    assert FSDP.get_state_dict_type(around) == default
    assert FSDP.set_state_dict_type(around, FULL, ON_RANK_0) == default
    assert FSDP.get_state_dict_type(ours.blocks[0]).state_dict_config == ON_RANK_0
    assert bool(around.state_dict()) == (dist.get_rank() == 0)
    with FSDP.state_dict_type(around, SHARDED):
        assert FSDP.get_state_dict_type(around) == StateDictSettings(
            SHARDED, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
        )
    assert FSDP.get_state_dict_type(around).state_dict_type is FULL
    FSDP.set_state_dict_type(ours.blocks[0], SHARDED)
    with pytest.raises(RuntimeError, match="have different types of state dicts"):
        FSDP.get_state_dict_type(around)
    with FSDP.state_dict_type(around, FULL, ON_RANK_0):
        assert FSDP.get_state_dict_type(around).state_dict_type is FULL
    assert FSDP.get_state_dict_type(ours.blocks[0]).state_dict_type is SHARDED
    FSDP.set_state_dict_type(around, FULL, ON_RANK_0)
    with pytest.raises(RuntimeError, match=r"got a ShardedStateDictConfig. Pass a FullState"):
        FSDP.set_state_dict_type(around, FULL, ShardedStateDictConfig())
    with pytest.raises(NotImplementedError, match="use_orig_params=True there are none"):
        FSDP.set_state_dict_type(around, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig())
    other = AdamW(make(Stack).parameters())
    with pytest.raises(ValueError, match="a parameter that is not one of the FullyShardedData"):
        FSDP.optim_state_dict(ours, other)
    unknown = {"state": {"no.weight": {}}, "param_groups": []}
    with FSDP.state_dict_type(ours, SHARDED), pytest.raises(ValueError, match=r"\['no.weight'\]"):
        FSDP.optim_state_dict_to_load(ours, optimizer, unknown)


def test_settings_hold_for_all_wrappers_and_are_checked() -> None:
    run_ranks(_settings, 2)


def _load_by_name() -> None:
    ours, optimizer = make_ours()
    train(ours, optimizer, 0)
    saved = FSDP.full_optim_state_dict(ours, optimizer, rank0_only=False)
    other, _ = make_ours()
    reordered = AdamW(list(other.parameters())[::-1])
    reordered.load_state_dict(FSDP.shard_full_optim_state_dict(saved, other, optim=reordered))
    loaded = FSDP.full_optim_state_dict(other, reordered, rank0_only=False)
    assert_equal({name: flat(loaded)[name] for name in flat(saved)}, flat(saved))

    halves = list(ours.parameters())[:4], list(ours.parameters())[4:]
    grouped = AdamW([{"params": halves[0], "lr": 0.5}, {"params": halves[1], "lr": 0.1}])
    train(ours, grouped, 0)
    saved = FSDP.full_optim_state_dict(ours, grouped, rank0_only=False)
    halves = list(other.parameters())[:4], list(other.parameters())[4:]
    swapped = AdamW([{"params": halves[1][::-1]}, {"params": halves[0]}])
    swapped.load_state_dict(FSDP.shard_full_optim_state_dict(saved, other, optim=swapped))
    assert [group["lr"] for group in swapped.param_groups] == [0.1, 0.5]
    loaded = FSDP.full_optim_state_dict(other, swapped, rank0_only=False)
    assert_equal({name: flat(loaded)[name] for name in flat(saved)}, flat(saved))
    with pytest.raises(ValueError, match="the state has none of the same parameters among its 2"):
        FSDP.shard_full_optim_state_dict(saved, other, optim=reordered)


def test_states_are_loaded_by_name_whatever_the_order_of_parameters() -> None:
    run_ranks(_load_by_name, 2)


def _optimizers_differ() -> None:
    ours, optimizer = make_ours()
    train(ours, optimizer, 0)
    want = flat(FSDP.full_optim_state_dict(ours, optimizer, rank0_only=False))
    is_first = dist.get_rank() == 0
    other, _ = make_ours()
    params = list(other.parameters())
    reversed_on_one = AdamW(params if is_first else params[::-1], lr=0.01)
    train(other, reversed_on_one, 0)
    assert_equal(flat(FSDP.full_optim_state_dict(other, reversed_on_one, rank0_only=False)), want)
    fewer = AdamW(params if is_first else params[:-1], lr=0.01)
    train(other, fewer, 1)
    with pytest.raises(RuntimeError, match="missing some of those states: rank 1 has none, or not"):
        FSDP.full_optim_state_dict(other, fewer)
    saved = FSDP.full_optim_state_dict(ours, optimizer)
    with pytest.raises(ValueError, match=r"on rank 1, .* no parameters of the opt"):
        FSDP.scatter_full_optim_state_dict(saved, other, optim=fewer)
    at = "the load failed on rank 0, in reading rank 0's state: TypeError"
    for malformed, words in (({"state": {"stem.weight": None}}, ".*of 'stem.weight'"), ([], "")):
        with pytest.raises(TypeError, match=at + words):
            FSDP.scatter_full_optim_state_dict(malformed if is_first else None, other, optim=fewer)
    unpicklable = {"state": {"stem.weight": {"hook": lambda: None}}}
    with pytest.raises(RuntimeError, match=r"failed on rank 0, .* pickle .*'\. Correct that"):
        FSDP.scatter_full_optim_state_dict(unpicklable if is_first else None, other, optim=fewer)


def test_whole_states_of_ranks_whose_optimizers_differ_are_right_or_refused() -> None:
    run_ranks(_optimizers_differ, 2)


def _sharded_tensors() -> None:
    theirs, their_optimizer = make_theirs()
    train(theirs, their_optimizer, 0, 1)
    with TorchFSDP.state_dict_type(theirs, SHARDED, ShardedStateDictConfig()):
        saved = theirs.state_dict()
        saved_states = TorchFSDP.optim_state_dict(theirs, their_optimizer)
    assert all(isinstance(value, ShardedTensor) for value in saved.values())
    for flat_parameters in (False, True):
        ours = FSDP(make(Stack, 1), auto_wrap_policy=BY_BLOCK, use_orig_params=not flat_parameters)
        optimizer = AdamW(ours.parameters(), lr=0.01)
        ours.load_state_dict(saved)
        with FSDP.state_dict_type(ours, SHARDED):
            states = FSDP.optim_state_dict_to_load(ours, optimizer, saved_states)
        optimizer.load_state_dict(states)
        train(ours, optimizer, 2)
        if not flat_parameters:
            train(theirs, their_optimizer, 2)
        with FSDP.summon_full_params(ours):
            assert_equal(state_without_gradients(ours), state_without_gradients(theirs))
    in_sets_of_one = FSDP(
        make(Stack), auto_wrap_policy=BY_BLOCK, sharding_strategy=ShardingStrategy.NO_SHARD
    )
    with pytest.raises(NotImplementedError, match=r"is a ShardedTensor of .* The parameter"):
        in_sets_of_one.load_state_dict(saved)
    ignoring = make(Stack)
    ignoring = FSDP(ignoring, ignored_states=[ignoring.head.weight])
    with pytest.raises(NotImplementedError, match="ShardedTensor, and the parameter is not shar"):
        ignoring.load_state_dict(saved)


def state_without_gradients(model: Any) -> dict[str, Any]:
    return {name: value for name, value in state(model).items() if not name.endswith(".grad")}


def test_sharded_tensors_of_fsdp1_are_loaded_on_as_many_ranks() -> None:
    run_ranks(_sharded_tensors, 2)
