"""An optimizer whose states are on the host steps as one whose states are on the device.

There is no GPU here, so the CPU is presented as one. Staging tensors are filled with NaN between
steps, so whatever is not copied shows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.launcher import run_ranks
from support.models import Stack, Transformer
from support.offloading import offload
from support.parity import Case, Run, adamw, check, each, train_step
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fsdp_ext import FullyShardedDataParallel, fully_shard, offload_optimizer
from fsdp_ext.offloading import api as offloading
from fsdp_ext.offloading.states import OffloadedStates


def states_of(optimizer: Optimizer) -> OffloadedStates:
    found: OffloadedStates = vars(optimizer)[offloading._STATES]
    return found


def poison(optimizer: Optimizer) -> None:
    for staging in states_of(optimizer)._staging:
        staging.fill_(255)  # NaN in every dtype
        if staging.is_cuda:
            torch.cuda.synchronize()  # the next step's copies wait for their own kind alone


def assert_on_host(optimizer: Optimizer) -> None:
    """Check that each portion's states are in one tensor, which is not a staging tensor."""
    moving = [portion for portion in states_of(optimizer)._portions if portion.nbytes]
    assert len(moving) > 1
    assert len(states_of(optimizer)._staging) == 2
    memory = [
        (p.host.data_ptr(), p.host.data_ptr() + p.nbytes) for p in moving if p.host is not None
    ]
    tensors = [
        value._local_tensor
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, DTensor) and value.dim() > 0
    ]
    for tensor in tensors:
        assert any(begin <= tensor.data_ptr() < end for begin, end in memory) or not tensor.numel()


def offloaded_step(
    run: Run, step: int, then: Callable[[Run, int], tuple[Tensor, ...]] = train_step
) -> tuple[Tensor, ...]:
    if run.under_test and step == 0:
        offload(run.optimizer, run.model)
    result = then(run, step)
    if run.under_test:
        if step > 0:
            assert_on_host(run.optimizer)
        poison(run.optimizer)
    return result


def resumed(run: Run, step: int) -> tuple[Tensor, ...]:
    """Load the optimizer's own state dict into a new optimizer at every step."""
    if run.under_test and step > 0:
        states = copy.deepcopy(run.optimizer.state_dict())
        for values in states["state"].values():
            for name, value in values.items():
                if value.dim() > 0:
                    values[name] = value.double()  # load_state_dict casts it back
        run.optimizer = run.case.optimizer(run.parameters.values())
        offload(run.optimizer, run.model)
        run.optimizer.load_state_dict(states)
    return offloaded_step(run, step)


def with_groups(parameters: Any, kind: Any, **options: Any) -> Optimizer:
    given = list(parameters)
    groups = [{"params": given[::2], "weight_decay": 0.0}, {"params": given[1::2]}]
    optimizer: Optimizer = kind(groups, **options)
    return optimizer


CASES = [
    Case("AdamW on a transformer", Transformer, optimizer=adamw, step=offloaded_step),
    Case("Adam with foreach and amsgrad", Stack, step=offloaded_step, worlds=(1, 2),
         optimizer=partial(torch.optim.Adam, lr=0.01, foreach=True, amsgrad=True)),
    Case("fused AdamW in two groups", Stack, step=offloaded_step, unsharded=None, worlds=(1, 2),
         optimizer=partial(with_groups, kind=torch.optim.AdamW, lr=0.01, fused=True)),
    Case("SGD with momentum", Stack, step=offloaded_step, worlds=(1, 2),
         optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9)),
    Case("Adagrad", Stack, step=offloaded_step, worlds=(1, 2),
         optimizer=partial(torch.optim.Adagrad, lr=0.01)),
    Case("NAdam", Stack, step=offloaded_step, worlds=(1, 2), unsharded=None,
         optimizer=partial(torch.optim.NAdam, lr=0.01)),
    Case("state dicts loaded in each step", Stack, optimizer=adamw, step=resumed, worlds=(1, 2)),
]  # fmt: skip


@each(CASES, every=2)
def test_steps_bit_for_bit_as_on_the_device(case: Case, world_size: int) -> None:
    check(case, world_size)


def _sharded(**options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = Stack()
    for unit in model.units():
        fully_shard(unit, **options)
    return fully_shard(model, **options)


def _backward(model: Any) -> None:
    (x,), _ = model.batch(torch.Generator().manual_seed(1))
    model.loss(model(x)).backward()


def _pair() -> list[tuple[Any, Optimizer]]:
    pairs = []
    for _ in range(2):
        model = _sharded()
        pairs.append((model, torch.optim.AdamW(model.parameters(), lr=0.01)))
    return pairs


def _assert_same(pairs: list[tuple[Any, Optimizer]]) -> None:
    (mine, ours), (other, theirs) = pairs
    for have, want in zip(mine.parameters(), other.parameters(), strict=True):
        assert have._local_tensor.equal(want._local_tensor)
        for name, value in theirs.state.get(want, {}).items():
            state = ours.state[have][name]
            local = state._local_tensor if isinstance(state, DTensor) else state
            assert local.equal(value._local_tensor if isinstance(value, DTensor) else value)


def _hooks_closures_and_schedulers() -> None:
    pairs = _pair()
    calls: list[str] = []
    for number, (model, optimizer) in enumerate(pairs):
        before = LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
        if number == 0:
            offload(optimizer, model)
        after = LambdaLR(optimizer, lambda step: 0.5 / (step + 1))
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        for _ in range(3):
            optimizer.zero_grad()

            def closure(model: Any = model) -> Tensor:
                (x,), _ = model.batch(torch.Generator().manual_seed(1))
                loss: Tensor = model.loss(model(x))
                loss.backward()
                return loss

            assert optimizer.step(closure).requires_grad
            before.step()
            after.step()
        assert calls == ["before", "after"] * 3 * (number + 1)
        model.reshard()
    _assert_same(pairs)


def _checkpoints(path: str) -> None:
    pairs = _pair()
    offload(pairs[0][1], pairs[0][0])
    for model, optimizer in pairs:
        _backward(model)
        optimizer.step()
        optimizer.zero_grad()
    model, optimizer = pairs[0]
    saved = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=path)
    fresh = torch.optim.AdamW(model.parameters(), lr=0.01)
    offload(fresh, model)
    loaded = {"optimizer": get_optimizer_state_dict(model, fresh)}
    dcp.load(loaded, checkpoint_id=path)
    set_optimizer_state_dict(model, fresh, optim_state_dict=loaded["optimizer"])
    pairs[0] = (model, fresh)
    for model, optimizer in pairs:
        _backward(model)
        poison(optimizer) if optimizer is fresh else None
        optimizer.step()
    _assert_same(pairs)


def _changes_between_steps() -> None:
    pairs = _pair()
    offload(pairs[0][1], pairs[0][0])
    for model, optimizer in pairs:
        params = list(model.parameters())
        extra = nn.Parameter(torch.ones(2))
        params[0].requires_grad_(False)  # it gets states later
        for step in range(4):
            optimizer.zero_grad()
            _backward(model)
            if step == 3:
                extra.grad = torch.ones(2)
            optimizer.step()
            model.reshard()
            if step == 0:
                params[0].requires_grad_(True)
                optimizer.state[params[1]]["exp_avg"].zero_()
            if step == 1:  # another tensor, and another dict
                state = optimizer.state[params[2]]
                state["exp_avg"] = state["exp_avg"] * 2
                optimizer.state[params[3]] = dict(optimizer.state[params[3]])
            if step == 2:
                optimizer.state.clear()
                optimizer.add_param_group({"params": [extra], "lr": 0.5})
        assert not torch.equal(extra, torch.ones(2))
    _assert_same(pairs)


class _Sign(Optimizer):
    """An optimizer that replaces its states, one of which is a plain number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["mean"] = 0.9 * state.get("mean", torch.zeros_like(param)) + param.grad
                state["count"] = state.get("count", 0) + 1
                param.sub_(state["mean"].sign(), alpha=group["lr"])


def _replaced_states() -> None:
    pairs = [(model, _Sign(model.parameters())) for model in (_sharded(), _sharded())]
    offload(pairs[0][1], pairs[0][0], is_separable=True)
    for model, optimizer in pairs:
        for _ in range(3):
            optimizer.zero_grad()
            _backward(model)
            optimizer.step()
            if model is pairs[0][0]:
                poison(optimizer)
    (mine, ours), (other, theirs) = pairs
    for have, want in zip(mine.parameters(), other.parameters(), strict=True):
        assert have._local_tensor.equal(want._local_tensor)
        assert ours.state[have]["count"] == theirs.state[want]["count"] == 3


def test_hooks_run_once_a_step_and_closures_and_schedulers_work() -> None:
    run_ranks(_hooks_closures_and_schedulers, 2)


def test_a_checkpoint_is_loaded_on(tmp_path: Any) -> None:
    run_ranks(_checkpoints, 2, str(tmp_path))


def test_states_that_others_change_are_used() -> None:
    run_ranks(_changes_between_steps, 2)


def test_optimizers_may_replace_their_states() -> None:
    run_ranks(_replaced_states, 2)


def _failed_step() -> None:
    (model, optimizer), _ = _pair()
    offload(optimizer, model)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    for _ in range(2):
        _backward(model)
        optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    assert [list(group["params"]) for group in optimizer.param_groups] == groups
    after = optimizer.state_dict()["state"]
    for number, values in before.items():
        assert values["exp_avg"]._local_tensor.equal(after[number]["exp_avg"]._local_tensor)


def _flat_parameters() -> None:
    pairs = []
    for _ in range(2):
        torch.manual_seed(0)
        model: Any = Stack()
        for name, block in list(model.blocks.named_children()):
            model.blocks[int(name)] = FullyShardedDataParallel(block)
        wrapped = FullyShardedDataParallel(model)
        pairs.append((wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.01)))
    offload(pairs[0][1], pairs[0][0])
    (x,), _ = Stack().batch(torch.Generator().manual_seed(1))
    for wrapped, optimizer in pairs:
        for _ in range(3):
            optimizer.zero_grad()
            wrapped.module.loss(wrapped(x)).backward()
            optimizer.step()
            if wrapped is pairs[0][0]:
                poison(optimizer)
    assert len(states_of(pairs[0][1])._staging) == 2
    for have, want in zip(pairs[0][0].parameters(), pairs[1][0].parameters(), strict=True):
        assert have.equal(want)


def test_flat_parameters_of_fsdp1_step_the_same() -> None:
    run_ranks(_flat_parameters, 2)


def _nothing_on_cpus() -> None:
    model = _sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    offload_optimizer(optimizer, model)
    assert "step" not in vars(optimizer)
    assert offloading._STATES not in vars(optimizer)


def one_row() -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1, bias=False))
    model[0].requires_grad_(False)
    for module in (*model, model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    offload(optimizer, model)
    seen = []
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        seen.append(optimizer.state[model[1].weight]["exp_avg"])
    # A GPU's optimizer takes no states from the host, so those that never move stay on the device.
    has_elements = dist.get_rank() == 0
    assert any(portion.nbytes for portion in states_of(optimizer)._portions) == has_elements
    assert len(seen[0].to_local()) == has_elements
    assert has_elements or seen[0] is seen[1]
    assert all((value.data_ptr() == 0) != has_elements for value in map(DTensor.to_local, seen))


def test_empty_shards_keep_their_states() -> None:
    run_ranks(one_row, 2)


def _refuses() -> None:
    model = _sharded()
    params = list(model.parameters())
    with pytest.raises(ValueError, match=r"got a LBFGS, .*pass is_separable=True"):
        offload(torch.optim.LBFGS(params), model)
    with pytest.raises(ValueError, match="has no parameter of the model"):
        offload(torch.optim.SGD([nn.Parameter(torch.ones(1))]), model)
    with pytest.raises(ValueError, match="differentiable=True"):
        offload(torch.optim.SGD(params, differentiable=True), model)
    optimizer = torch.optim.SGD(params, lr=0.1)
    offload(optimizer, model)
    with pytest.raises(RuntimeError, match="once, right after making the optimizer"):
        offload(optimizer, model)
    offloading._units_of(model)[1].change(offloads=True)
    with pytest.raises(NotImplementedError, match=r"have CPUOffloadPolicy, .*Leave out one"):
        offload(torch.optim.SGD(params), model)


@pytest.mark.parametrize("run", [_failed_step, _nothing_on_cpus, _refuses])
def test_what_fails_says_so_and_leaves_states_as_they_were(run: Callable[[], None]) -> None:
    run_ranks(run, 1)
