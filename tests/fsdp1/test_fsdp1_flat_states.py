"""State dicts of models with flat parameters, and of their optimizers, have the original ones."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import models
from support.fsdp1_flat import WRAPPERS, adamw, flat_of, sgd, torchs, train
from support.fsdp1_parity import BY_BLOCK, assert_equal, make, run
from support.launcher import run_ranks
from support.matrix import exhaustive
from support.models import Stack
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import OptimStateKeyType, StateDictType
from torch.distributed.tensor import DTensor

from fsdp_ext import FullyShardedDataParallel as FSDP


def state_dicts() -> None:
    found = []
    for wrap in WRAPPERS:
        model = make(models.FewRows)
        wrapped = wrap(model, auto_wrap_policy=BY_BLOCK)
        train(wrapped, model, sgd(wrapped.parameters()), steps=1)
        found.append(wrapped.state_dict())
    assert list(found[0]) == list(found[1])
    assert_equal(*found)
    full = found[0]

    with FSDP.state_dict_type(wrapped := wrapped_anew(), StateDictType.SHARDED_STATE_DICT):
        wrapped.load_state_dict(full)
        sharded = copy.deepcopy(wrapped.state_dict())
        assert all(isinstance(value, DTensor) for value in sharded.values())
        assert list(sharded) == list(full)
    assert list(get_model_state_dict(wrapped)) == list(full)
    other = wrapped_anew()
    other.load_state_dict(sharded)
    assert_equal(other.state_dict(), full)
    assert len(flat_of(other)) == len(list(other.parameters()))


def wrapped_anew() -> FSDP:
    return FSDP(make(models.FewRows, seed=1), auto_wrap_policy=BY_BLOCK)


def test_full_and_sharded_state_dicts_have_the_original_parameters() -> None:
    run_ranks(state_dicts, 2)


def local_state_dicts() -> None:
    model = make(models.FewRows)
    wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK)
    with FSDP.state_dict_type(wrapped, StateDictType.LOCAL_STATE_DICT):
        local = copy.deepcopy(wrapped.state_dict())
    theirs = torchs(make(models.FewRows), auto_wrap_policy=BY_BLOCK)
    with TorchFSDP.state_dict_type(theirs, StateDictType.LOCAL_STATE_DICT):
        assert list(local) == list(theirs.state_dict())
    for name, param in wrapped.named_parameters():
        assert torch.equal(local[name.replace("_fsdp_wrapped_module.", "")].to_local(), param)
    other = wrapped_anew()
    with FSDP.state_dict_type(other, StateDictType.LOCAL_STATE_DICT):
        other.load_state_dict(local)
    assert_equal(other.state_dict(), wrapped.state_dict())
    with_originals = FSDP(make(Stack), use_orig_params=True)
    with pytest.raises(NotImplementedError, match="use_orig_params=True there are none"):
        FSDP.set_state_dict_type(with_originals, StateDictType.LOCAL_STATE_DICT)


def test_local_state_dicts_have_flat_parameters() -> None:
    run_ranks(local_state_dicts, 2)


def assigned_local_state_dict() -> None:
    model = make(models.FewRows)
    wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK)
    other, copied = wrapped_anew(), wrapped_anew()
    flats = flat_of(other)
    for loaded, assign in ((other, True), (copied, False)):
        with FSDP.state_dict_type(wrapped, StateDictType.LOCAL_STATE_DICT):
            local = copy.deepcopy(wrapped.state_dict())
        with FSDP.state_dict_type(loaded, StateDictType.LOCAL_STATE_DICT):
            loaded.load_state_dict(local, assign=assign)
    assert [id(flat) for flat in flat_of(other)] == [id(flat) for flat in flats]
    assert_equal(other.state_dict(), wrapped.state_dict())
    results = [train(each, each, sgd(each.parameters())) for each in (other, copied)]
    assert_equal(*results)
    inner: Any = other.module
    inner._flat_param = nn.Parameter(torch.ones_like(inner._flat_param))
    assert all(bool((value == 1).all()) for value in own_values(other).values())
    del inner._parameters["_flat_param"]
    with pytest.raises(ValueError, match=r"flat parameter of unit .* was removed"):
        other.state_dict()


def own_values(wrapped: FSDP) -> dict[str, torch.Tensor]:
    inside = tuple(
        f"{name}.".replace("_fsdp_wrapped_module.", "")
        for name, module in wrapped.named_modules()
        if module is not wrapped and type(module) is FSDP
    )
    return {n: v for n, v in wrapped.state_dict().items() if not n.startswith(inside)}


def test_flat_parameters_of_local_state_dicts_can_be_assigned() -> None:
    run_ranks(assigned_local_state_dict, 2)


def shared_memory() -> None:
    found = []
    for shares in (False, True):
        model = make(models.FewRows)
        wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK)
        optimizer = sgd(wrapped.parameters())

        def share(wrapped: FSDP = wrapped, shares: bool = shares) -> None:
            for flat in flat_of(wrapped) if shares else ():
                flat.data.share_memory_()

        share()
        saved = [wrapped.state_dict()]
        for step in range(4):
            optimizer.zero_grad()
            model.loss(wrapped(*model.batch(torch.Generator().manual_seed(step))[0])).backward()
            share()
            if step == 2 and shares:  # shards of the parameters, too
                with FSDP.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT):
                    for value in wrapped.state_dict().values():
                        value.to_local().share_memory_()
            if shares:
                torch.full((1 << 16,), 7.0)  # takes memory that was freed
            optimizer.step()
            if step % 2:
                saved.append(wrapped.state_dict())
        found.append(saved)
    for got, want in zip(*found, strict=True):
        assert_equal(got, want)


def test_flat_parameters_in_shared_memory_lose_no_step() -> None:
    run_ranks(shared_memory, 2)


class Nested(nn.Module):
    """A plain module around a wrapper, through which state dicts go, too."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.inner = wrapped


def failed_loading() -> None:
    wrapped = wrapped_anew()
    full = wrapped.state_dict()
    for model in (wrapped, outer := Nested(wrapped)):
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})
        assert len(flat_of(wrapped)) == len(list(wrapped.parameters()))
    outer.load_state_dict({f"inner.{name}": value + 1 for name, value in full.items()})
    assert list(outer.state_dict()) == [f"inner.{name}" for name in full]
    assert_equal(wrapped.state_dict(), {name: value + 1 for name, value in full.items()})


def test_an_error_in_loading_leaves_the_flat_parameters() -> None:
    run_ranks(failed_loading, 2)


class Shared(nn.Module):
    """Has one block under two names, and in a module beside."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = Stack().blocks[0]
        self.beside = Nested(self.a)
        self.last = Stack().blocks[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.beside.inner(self.b(self.a(x))))


def by_hand(model: Any) -> FSDP:
    model.b = FSDP(model.b)
    model.beside = FSDP(model.beside, sync_module_states=True)  # it has the unwrapped block
    return FSDP(model, sync_module_states=True)


def shared_modules() -> None:
    x = torch.ones(2, models.DIM)
    for wrap in (by_hand, lambda model: FSDP(model, auto_wrap_policy=BY_BLOCK)):
        torch.manual_seed(0)
        plain = Shared()
        wrapped: Any = wrap(copy.deepcopy(plain))
        full = wrapped.state_dict()
        assert_equal(full, plain.state_dict())
        wrapped.load_state_dict({name: value * 2 for name, value in full.items()})
        plain.load_state_dict({name: value * 2 for name, value in full.items()})
        loss = wrapped(x).sum()
        loss.backward()
        assert torch.equal(loss, plain(x).sum())
    wrapped.module.b = wrapped.module.b.module
    with pytest.raises(RuntimeError, match=r"found 'b\._flat_param', a shard .* under this name"):
        wrapped.state_dict()


def test_a_module_under_several_names_is_wrapped_and_saved_under_each() -> None:
    run_ranks(shared_modules, 2)


def aliases_of_a_checkpointed_module() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model.append(model[0])
    expected = copy.deepcopy(model)
    model[0] = FSDP(checkpoint_wrapper(model[0]))
    wrapped = FSDP(model)
    assert model[3] is model[0]
    x = torch.ones(2, 4)
    assert torch.equal(wrapped(x), expected(x))


def test_a_second_name_of_a_checkpointed_module_gets_its_wrapper() -> None:
    run_ranks(aliases_of_a_checkpointed_module, 2)


def optimizer_states() -> None:
    found, states = [], []
    for wrap, kind, flat in ((FSDP, FSDP, False), (FSDP, FSDP, True), (torchs, TorchFSDP, False)):
        model = make(models.FewRows)
        wrapped: Any = wrap(model, auto_wrap_policy=BY_BLOCK, use_orig_params=flat)
        optimizer = adamw(wrapped.parameters())
        train(wrapped, model, optimizer, steps=2)
        states.append(kind.optim_state_dict(wrapped, optimizer))
        found.append(train(wrapped, model, optimizer, first=2, steps=2))
        if wrap is FSDP and not flat:
            middle = model, wrapped
    assert_equal(found[0], found[2])
    for other in states[1:]:
        assert states[0]["state"].keys() == other["state"].keys()
        for name, values in other["state"].items():
            assert_equal(states[0]["state"][name], values)
        assert [sorted(g["params"]) for g in states[0]["param_groups"]] == [
            sorted(g["params"]) for g in other["param_groups"]
        ]
    del middle


def test_states_of_optimizers_are_those_of_the_original_parameters() -> None:
    run_ranks(optimizer_states, 2)


def loaded_optimizer_states(kind: StateDictType) -> None:
    """Train, save, load into wrappers with and without flat parameters, and go on."""
    for saves_flat in (True, False):
        model = make(models.FewRows)
        wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK, use_orig_params=not saves_flat)
        optimizer = adamw(wrapped.parameters())
        train(wrapped, model, optimizer, steps=2)
        FSDP.set_state_dict_type(wrapped, kind)
        saved = wrapped.state_dict()
        # Sharded values are those that train.
        saved = {name: value.clone() for name, value in saved.items()}
        state = copy.deepcopy(FSDP.optim_state_dict(wrapped, optimizer))
        FSDP.set_state_dict_type(wrapped, StateDictType.FULL_STATE_DICT)
        want = train(wrapped, model, optimizer, first=2, steps=2)
        for loads_flat in (True, False):
            model = make(models.FewRows, seed=1)
            other = FSDP(model, auto_wrap_policy=BY_BLOCK, use_orig_params=not loads_flat)
            optimizer = adamw(other.parameters())
            with FSDP.state_dict_type(other, kind):
                other.load_state_dict(saved)
                loadable = FSDP.optim_state_dict_to_load(other, optimizer, state)
            optimizer.load_state_dict(loadable)
            assert_equal(train(other, model, optimizer, first=2, steps=2), want)


@pytest.mark.parametrize(
    "kind", [StateDictType.SHARDED_STATE_DICT, *exhaustive(StateDictType.FULL_STATE_DICT)]
)
def test_training_goes_on_from_what_either_kind_of_wrapper_has_saved(kind: StateDictType) -> None:
    run_ranks(loaded_optimizer_states, 2, kind)


def rekeyed_states() -> None:
    model = make(models.FewRows)
    plain = copy.deepcopy(model)
    wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK)
    optimizer = adamw(wrapped.parameters())
    train(wrapped, model, optimizer, steps=1)
    full = FSDP.full_optim_state_dict(wrapped, optimizer, rank0_only=False)
    numbered = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, plain)
    loaded = adamw(plain.parameters())
    loaded.load_state_dict(numbered)
    for name, param in plain.named_parameters():
        assert torch.equal(loaded.state[param]["exp_avg"], full["state"][name]["exp_avg"])
    for state, key in (
        (full, OptimStateKeyType.PARAM_ID),
        (numbered, OptimStateKeyType.PARAM_NAME),
    ):
        with pytest.raises(ValueError, match=r"with flat parameters\. Pass the unwrapped"):
            FSDP.rekey_optim_state_dict(state, key, wrapped)
    unknown = {"state": {}, "param_groups": [{"params": ["other"]}]}
    with pytest.raises(ValueError, match="a state with 'other', which is no parameter of the Few"):
        FSDP.rekey_optim_state_dict(unknown, OptimStateKeyType.PARAM_ID, plain)


def test_rekeyed_states_load_into_the_unwrapped_models_optimizer() -> None:
    run_ranks(rekeyed_states, 2)


def different_values() -> None:
    wrapped: Any = FSDP(nn.Linear(4, 4))
    optimizer = adamw(wrapped.parameters())
    wrapped(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    saved = FSDP.optim_state_dict(wrapped, optimizer)
    average = saved["state"]["bias"]["exp_avg"]
    for key, value, words in (
        (
            "step",
            torch.tensor(7.0),
            r"'weight' has 'step' 1\.0 .* of 'bias' 7\.0 in torch\.float32",
        ),
        ("step", torch.tensor(1), r"'step' 1\.0 in torch\.float32, .* 1 in torch\.int64"),
        ("exp_avg", average.double(), "'exp_avg' of each element, in torch.float32, .*float64"),
        ("other", 3, "'other' None, and that of 'bias' 3, but they are in one flat parameter"),
    ):
        state = copy.deepcopy(saved)
        state["state"]["bias"][key] = value
        with pytest.raises(ValueError, match=words):
            FSDP.optim_state_dict_to_load(wrapped, optimizer, state)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(wrapped, optimizer, saved))


def test_values_that_differ_within_a_flat_parameter_are_refused_as_by_fsdp1() -> None:
    run_ranks(different_values, 2)


def distributed_checkpoint() -> None:
    model = make(Stack)
    wrapped = FSDP(model)
    optimizer = adamw(wrapped.parameters())
    train(wrapped, model, optimizer, steps=1)
    with pytest.raises(NotImplementedError, match=r"Call FullyShardedDataParallel\.optim_state"):
        get_optimizer_state_dict(wrapped, optimizer)


def test_distributed_checkpoint_refuses_optimizers_of_flat_parameters() -> None:
    run_ranks(distributed_checkpoint, 2)


def full_state_dicts_of_distributed_checkpoint() -> None:
    full = {name: value + 1 for name, value in wrapped_anew().state_dict().items()}
    on_rank_0 = full if dist.get_rank() == 0 else {}
    for given, options in (
        (full, StateDictOptions(full_state_dict=True)),
        (on_rank_0, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)),
        (
            on_rank_0,
            StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False),
        ),
    ):
        loaded = wrapped_anew()
        run(loaded, loaded.module, 0)  # forward leaves the root unsharded
        set_model_state_dict(loaded, dict(given), options=options)
        assert len(flat_of(loaded)) == len(list(loaded.parameters()))
        assert_equal(loaded.state_dict(), full)


def test_distributed_checkpoint_loads_full_state_dicts() -> None:
    run_ranks(full_state_dicts_of_distributed_checkpoint, 2)


def without_groups() -> None:
    for cls, orig in itertools.product((FSDP, TorchFSDP), (False, True)):
        model: Any = cls(nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=orig)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()
        groups = state.pop("param_groups")
        saved = cls.optim_state_dict(model, optimizer, state)
        loadable = cls.optim_state_dict_to_load(model, optimizer, saved)
        assert saved.keys() == loadable.keys() == {"state"}
        optimizer.load_state_dict(loadable | {"param_groups": groups})
        again = cls.optim_state_dict(model, optimizer)
        for name in ("weight", "bias"):
            average = again["state"][name]["exp_avg"]
            assert torch.equal(average, saved["state"][name]["exp_avg"])
            assert bool(average.any())
        assert len(model.params) == 1


def test_states_without_groups_are_converted_as_by_fsdp1() -> None:
    run_ranks(without_groups, 2)
