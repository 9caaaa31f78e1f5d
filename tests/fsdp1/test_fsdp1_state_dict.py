"""`FullyShardedDataParallel` keeps the names of parameters, in checkpoints, too."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.fsdp1_parity import (
    BY_BLOCK,
    CPU,
    FSDP,
    assert_equal,
    batch,
    make,
    run,
    state,
    torch_fsdp,
    whole,
)
from support.launcher import run_ranks
from support.models import DIM, Mlp, Stack, Versioned
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import MixedPrecision, StateDictType
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from fsdp_ext import FullyShardedDataParallel as FSDP_CLASS


class WithBuffers(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.blocks[1].register_buffer("shift", torch.ones(DIM))
        self.blocks[1].register_buffer("scratch", torch.ones(DIM), persistent=False)
        self.blocks[2] = nn.Sequential(Mlp(), nn.BatchNorm1d(DIM))


def wrapped_in_places(wrap: Callable[..., nn.Module]) -> Iterator[nn.Module]:
    """Yield models with wrappers at the root or not, beside and around each other."""
    yield wrap(make(WithBuffers), auto_wrap_policy=BY_BLOCK)
    yield nn.Sequential(nn.Linear(DIM, DIM), wrap(make(WithBuffers), auto_wrap_policy=BY_BLOCK))
    nested = make(WithBuffers)
    nested.blocks[1] = wrap(nn.Sequential(wrap(Mlp()), nn.Sequential(wrap(Mlp()))))
    nested.blocks[2] = nested.blocks[1]
    yield wrap(nested)
    yield wrap(wrap(make(Stack)))


def all_names(model: nn.Module) -> list[list[str]]:
    return [
        [name for name, _ in walk(remove_duplicate=once)]
        for walk in (model.named_parameters, model.named_buffers, model.named_modules)
        for once in (True, False)
    ]


def names_are_those_of_fsdp1(use_orig_params: bool) -> None:
    ours = wrapped_in_places(partial(FSDP, use_orig_params=use_orig_params))
    theirs = wrapped_in_places(partial(TorchFSDP, use_orig_params=use_orig_params, device_id=CPU))
    for mine, like in zip(ours, theirs, strict=True):
        names = all_names(like)
        assert all_names(mine) == names
        assert any("_fsdp_wrapped_module" in name for name in names[0])
        for (name, module), (_, other) in zip(
            mine.named_modules(), like.named_modules(), strict=True
        ):
            assert isinstance(module, FSDP_CLASS) == isinstance(other, TorchFSDP), name
            assert mine.get_submodule(name) is module
            assert all_names(module) == all_names(other)
        # Without recursion, FSDP1 takes a wrapper of a wrapper as summoned, without parameters.
        is_wrapped_again = isinstance(getattr(like, "module", None), TorchFSDP)
        for recurse in (True,) if is_wrapped_again else (True, False):
            with (
                FSDP.summon_full_params(mine, recurse=recurse),
                TorchFSDP.summon_full_params(like, recurse=recurse),
            ):
                for module, other in zip(mine.modules(), like.modules(), strict=True):
                    assert all_names(module) == all_names(other)
        assert all_names(mine) == names
        assert list(mine.state_dict()) == list(like.state_dict())


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_names_are_those_of_fsdp1(use_orig_params: bool) -> None:
    run_ranks(names_are_those_of_fsdp1, 2, use_orig_params)


def names_in_compiled_functions() -> None:
    wrapped = FSDP(make(WithBuffers), auto_wrap_policy=BY_BLOCK)

    def count(x: Tensor) -> Tensor:
        named = (wrapped.named_parameters(), wrapped.named_buffers(), wrapped.named_modules())
        return x * len([name for each in named for name, _ in each])

    compiled = torch.compile(count, backend="eager", fullgraph=True)
    assert compiled(torch.ones(())) == count(torch.ones(()))


def test_names_are_listed_in_compiled_functions() -> None:
    run_ranks(names_in_compiled_functions, 1)


def names_of_children() -> None:
    def joined(module: nn.Module) -> list[str]:
        """Return names of parameters, as transformers joins them to choose what decays."""
        own = list(module._parameters)
        return own + [f"{name}.{n}" for name, m in module.named_children() for n in joined(m)]

    for use_orig_params in (True, False):
        for model in wrapped_in_places(partial(FSDP, use_orig_params=use_orig_params)):
            assert {name for name, _ in model.named_parameters()} <= set(joined(model))


def test_names_that_are_joined_from_those_of_children_are_those_of_parameters() -> None:
    run_ranks(names_of_children, 2)


def names_in_state_dicts() -> None:
    plain = make(WithBuffers)
    wrapped = FSDP(make(WithBuffers), auto_wrap_policy=BY_BLOCK)
    around = nn.Sequential(nn.Linear(DIM, DIM), FSDP(make(WithBuffers), auto_wrap_policy=BY_BLOCK))
    plain_around = nn.Sequential(nn.Linear(DIM, DIM), plain)
    for ours, theirs in ((wrapped, plain), (around, plain_around)):
        got, want = ours.state_dict(), theirs.state_dict()
        assert list(got) == list(want)
        assert list(get_model_state_dict(ours)) == list(want)
        assert_equal(
            {n: whole(got[n]) for n in plain.state_dict() if n in got},
            {n: want[n] for n in plain.state_dict() if n in want},
        )
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        groups = get_optimizer_state_dict(ours, optimizer)["param_groups"]
        trained = {name for name, _ in theirs.named_parameters()}
        assert {name for group in groups for name in group["params"]} == trained
        options = StateDictOptions(broadcast_from_rank0=True, full_state_dict=True)
        set_model_state_dict(ours, want if dist.get_rank() == 0 else {}, options=options)
    assert list(wrapped.state_dict(prefix="a.")) == [f"a.{n}" for n in plain.state_dict()]
    assert all(isinstance(p, DTensor) for p in wrapped.parameters())
    assert wrapped.get_parameter("blocks.1.up.weight") is wrapped.blocks[1].up.weight
    assert wrapped.get_submodule("blocks.1.up") is wrapped.blocks[1].module.up


def test_names_in_state_dicts_are_those_of_the_unwrapped_model() -> None:
    run_ranks(names_in_state_dicts, 2)


def loading() -> None:
    def changed() -> dict[str, Tensor]:
        return {n: t + 1 for n, t in make(WithBuffers).state_dict().items()}

    wrapped = FSDP(make(WithBuffers), auto_wrap_policy=BY_BLOCK)
    args, _ = batch(wrapped, 0)
    before = wrapped.eval()(*args)
    want = changed()
    kept = dict(want)
    assert wrapped.load_state_dict(want).missing_keys == []
    assert want == kept  # the user's dict is unchanged
    assert_equal({n: whole(t) for n, t in wrapped.state_dict().items()}, want)
    plain = make(WithBuffers).eval()
    plain.load_state_dict(want)
    after = wrapped(*args)
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, plain(*args), rtol=0, atol=0)

    with FSDP.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT):
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


def versions() -> None:
    def nested(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        inner = nn.Sequential(wrap(Versioned(DIM, DIM)), Versioned(DIM, DIM))
        return nn.Sequential(wrap(nn.Sequential(inner, Versioned(DIM, DIM))))

    def unwrapped(module: nn.Module) -> nn.Module:
        return module

    ours, theirs, plain = nested(FSDP), nested(torch_fsdp), nested(unwrapped)
    flat = nested(partial(FSDP, use_orig_params=False))
    want = plain.state_dict()
    for saved, loads in (
        (ours, (ours, flat, theirs, plain)),
        (flat, (ours, flat, theirs, plain)),
        (theirs, (ours, flat, theirs)),
    ):
        state_dict = saved.state_dict()
        for model in loads:
            model.load_state_dict(state_dict)
            assert_equal(model.state_dict(), want)


def test_versions_are_found_in_models_wrapped_in_the_same_places_and_in_unwrapped_ones() -> None:
    run_ranks(versions, 2)


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
    assert all(isinstance(value, DTensor) for value in saved[0].values())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    gathered = get_model_state_dict(wrapped, options=options)
    whole_on_all = wrapped.state_dict()
    assert_equal(gathered, whole_on_all if dist.get_rank() == 0 else {})
    saved = tree_map_only(Tensor, torch.clone, saved)  # otherwise they would share optimizer state
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


def default_form() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    for options in ({}, {"mixed_precision": precision}):
        ours = FSDP(make(WithBuffers), auto_wrap_policy=BY_BLOCK, **options)
        theirs = torch_fsdp(make(WithBuffers), auto_wrap_policy=BY_BLOCK, **options)
        for model in (ours, theirs):
            run(model.train(), model, 0).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        got, want = ours.state_dict(), theirs.state_dict()
        assert list(got) == list(want)
        assert all(type(value) is Tensor for value in got.values())
        assert_equal(got, want)
        kept = copy.deepcopy(got)
        file = io.BytesIO()
        torch.save(got, file)
        file.seek(0)
        assert_equal(torch.load(file), kept)
        run(ours, ours, 1).backward()
        torch.optim.SGD(ours.parameters(), lr=0.1).step()
        assert_equal(got, kept)  # a copy
        theirs.load_state_dict(got)
        ours.load_state_dict(got)
        assert_equal(ours.state_dict(), kept)
        assert_equal(theirs.state_dict(), kept)


def test_state_dicts_are_full_on_all_ranks_as_those_of_fsdp1() -> None:
    run_ranks(default_form, 2)
