"""fsdp_ext.optim and fsdp_ext.clip_grad_norm_ over flat memory do what PyTorch's do."""

from __future__ import annotations

import copy
import gc
import io
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.models import EmptyParameter, FewRows, FrozenBesideTrainable, Stack, UnusedParameters
from support.parity import ROUNDING, Case, Run, check, each, train_step, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_ext
from fsdp_ext import _C, fully_shard
from fsdp_ext.optim import SGD, Adam, AdamW
from fsdp_ext.optim.clip import parameters_of
from fsdp_ext.optim.flat_step import FlatStep

# On the host, fused kernels round the last elements of a tensor differently. In flat memory, other
# elements are the last. With foreach, results are equal bit for bit.
ROUNDED = ROUNDING[torch.float32]
KINDS: dict[type[Optimizer], type[Optimizer]] = {
    AdamW: torch.optim.AdamW,
    Adam: torch.optim.Adam,
    SGD: torch.optim.SGD,
}


# - Training as unsharded and under FSDP2, whose parameters these optimizers step one by one


def in_groups(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return an optimizer with weight decay for matrices only, so that runs are short."""
    found = list(parameters)
    return AdamW(
        [
            {"params": [each for each in found if each.ndim > 1], "weight_decay": 0.2},
            {"params": [each for each in found if each.ndim == 1], "lr": 0.03},
        ],
        lr=0.01,
        weight_decay=0.0,
        foreach=True,
    )


def clipped(norm_type: float, run: Run, step: int) -> tuple[Tensor, ...]:
    run.optimizer.zero_grad()
    loss = run.loss(step)
    run.backward(loss)
    parameters = run.model.parameters()
    clip = fsdp_ext.clip_grad_norm_ if run.sharded else nn.utils.clip_grad_norm_
    norm = clip(parameters, 0.05, norm_type=norm_type)
    assert whole(norm) > 0.05, "there is nothing to clip"
    run.optimizer.step()
    return loss, norm


def scheduled(run: Run, step: int) -> tuple[Tensor, ...]:
    if step == 0:
        run.scheduler = torch.optim.lr_scheduler.LinearLR(  # type: ignore[attr-defined]
            run.optimizer, start_factor=0.1, total_iters=5
        )
    found = train_step(run, step)
    run.scheduler.step()  # type: ignore[attr-defined]
    return found


def by_closure(run: Run, step: int) -> tuple[Tensor, ...]:
    def closure() -> Tensor:
        run.optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = run.loss(step)
        run.backward(loss)
        return loss

    loss = run.optimizer.step(closure)
    assert isinstance(loss, Tensor)
    return (loss,)


def drop_first_gradients(run: Run, step: int) -> None:
    for param in list(run.parameters.values())[: 2 - step]:
        param.grad = None


def drop_some_gradients(run: Run, step: int) -> None:
    """Drop gradients of other parameters in each step, so that their counts of steps differ."""
    for index, parameter in enumerate(run.model.parameters()):
        if (index + step) % 3 == 0 and step != 2:
            parameter.grad = None


def replace_some_gradients(run: Run, step: int) -> None:
    """Replace some gradients by tensors that are not in the flat gradient."""
    for index, parameter in enumerate(run.model.parameters()):
        if index % 2 == step % 2 and parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5


def frozen_by_turns(run: Run, step: int) -> tuple[Tensor, ...]:
    parameters = list(run.parameters.values())
    parameters[0].requires_grad_(step % 3 != 1)
    return train_step(run, step)


def frozen_after_backward(run: Run, step: int) -> tuple[Tensor, ...]:
    """Freeze other parameters in backward than in the optimizer's step."""
    for index, name in enumerate(sorted(run.parameters)):
        run.parameters[name].requires_grad_(step % 2 == 0 or index % 3 != 1)
    return train_step(run, step, before_step=_freeze_others)


def _freeze_others(run: Run, step: int) -> None:
    for index, name in enumerate(sorted(run.parameters)):
        parameter = run.parameters[name]
        parameter.requires_grad_(step % 2 == 1 or index % 3 != 0)
        if index % 2 == 1 and parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5


FOREACH = partial(AdamW, lr=0.01, foreach=True)
CASES = [
    Case("AdamW", Stack, optimizer=partial(AdamW, lr=0.01), fsdp2=ROUNDED, unsharded=ROUNDED),
    Case("AdamW with amsgrad and maximize", Stack, fsdp2=ROUNDED, unsharded=ROUNDED,
         optimizer=partial(AdamW, lr=0.01, amsgrad=True, maximize=True)),
    Case("AdamW with foreach", Stack, optimizer=FOREACH),
    Case("AdamW with a tensor as lr", Stack,
         optimizer=partial(AdamW, lr=torch.tensor(0.01), fused=False)),
    Case("Adam with weight decay", Stack, fsdp2=ROUNDED, unsharded=ROUNDED,
         optimizer=partial(Adam, lr=0.01, weight_decay=0.1)),
    Case("SGD with Nesterov's momentum", Stack, fsdp2=ROUNDED, unsharded=ROUNDED,
         optimizer=partial(SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1)),
    Case("SGD with foreach", Stack, optimizer=partial(SGD, lr=0.05, momentum=0.9, foreach=True)),
    Case("parameter groups", Stack, optimizer=in_groups),
    Case("few rows", FewRows, optimizer=FOREACH),
    Case("empty shards", EmptyParameter, optimizer=FOREACH,
         fsdp2_fails="torch's pack expects non-empty tensors"),
    Case("frozen parameters", FrozenBesideTrainable, optimizer=FOREACH),
    Case("unused parameters", UnusedParameters, optimizer=FOREACH),
    Case("a parameter that is frozen by turns", Stack, step=frozen_by_turns, optimizer=FOREACH),
    Case("parameters frozen between backward and step", Stack, step=frozen_after_backward,
         optimizer=FOREACH),
    Case("parameters without a gradient by turns", Stack,
         step=partial(train_step, before_step=drop_some_gradients),
         optimizer=FOREACH),
    Case("first gradients in a later step", Stack, fsdp2=ROUNDED, unsharded=ROUNDED,
         optimizer=partial(SGD, lr=0.05, momentum=0.9),
         step=partial(train_step, before_step=drop_first_gradients)),
    Case("gradients of their own", Stack, optimizer=FOREACH,
         step=partial(train_step, before_step=replace_some_gradients)),
    Case("a scheduler", Stack, step=scheduled, optimizer=FOREACH),
    Case("a closure", Stack, step=by_closure, optimizer=FOREACH),
    Case("parameters that are not sharded", Stack, ignored_params=("head.weight",),
         optimizer=FOREACH),
    Case("shards on the host", Stack, options={"offload_policy": CPUOffloadPolicy()},
         optimizer=FOREACH, fsdp2_fails="torch pins memory, which needs a GPU"),
    Case("reductions in bfloat16", Stack, precision={"reduce_dtype": torch.bfloat16},
         unsharded=None, optimizer=FOREACH),
    Case("replicas", Stack, worlds=(4,), mesh=(2, 2), optimizer=FOREACH, unsharded=ROUNDED),
    Case("clipping by the 2-norm", Stack, step=partial(clipped, 2.0), fsdp2=ROUNDED,
         unsharded=ROUNDED, optimizer=FOREACH),
    Case("clipping by the 3-norm", Stack, step=partial(clipped, 3.0), fsdp2=ROUNDED,
         unsharded=ROUNDED, optimizer=FOREACH),
    Case("clipping by the largest", Stack, step=partial(clipped, math.inf), unsharded=ROUNDED,
         optimizer=FOREACH),
    Case("clipping with replicas", Stack, worlds=(4,), mesh=(2, 2), step=partial(clipped, 2.0),
         optimizer=FOREACH, fsdp2=ROUNDED, unsharded=ROUNDED),
]  # fmt: skip


@each(CASES, every=3)
def test_flat_optimizers_step_as_unsharded_and_as_under_fsdp2(case: Case, world_size: int) -> None:
    check(case, world_size)


# - One model with ours and one with PyTorch's optimizer


def sharded(**options: Any) -> Any:
    torch.manual_seed(0)
    model = Stack()
    for unit in model.units():
        fully_shard(unit, **options)
    fully_shard(model, **options)
    return model


def loss_of(model: Any, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    args, kwargs = model.batch(generator)
    loss: Tensor = model.loss(model(*args, **kwargs))
    return loss


def backward(model: Any, step: int = 0) -> None:
    loss_of(model, step).backward()


class Pair:
    """Two equal models, with our optimizer and with PyTorch's."""

    def __init__(self, kind: type[Optimizer] = AdamW, **options: Any) -> None:
        self.models = [sharded(), sharded()]
        self.options = {"lr": 0.01, "foreach": True, **options}
        self.ours = kind(self.models[0].parameters(), **self.options)
        self.torchs = KINDS[kind](self.models[1].parameters(), **self.options)
        self.steps = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for model, optimizer in zip(self.models, (self.ours, self.torchs), strict=True):
                optimizer.zero_grad()
                backward(model, self.steps)
                optimizer.step()
            self.steps += 1
            self.compare()

    def compare(self) -> None:
        for ours, torchs in zip(*(model.parameters() for model in self.models), strict=True):
            assert torch.equal(ours.to_local(), torchs.to_local())
            assert_same_states(self.ours.state.get(ours, {}), self.torchs.state.get(torchs, {}))


def assert_same_states(ours: dict[str, Any], torchs: dict[str, Any]) -> None:
    assert list(ours) == list(torchs)
    for name, value in ours.items():
        expected = torchs[name]
        assert type(value) is type(expected), name
        if isinstance(value, DTensor):
            assert value.placements == expected.placements
            assert value.shape == expected.shape
        assert torch.equal(_local(value), _local(expected)), name


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assert_same_order(pair: Pair) -> None:
    ours, torchs = pair.ours.state_dict(), pair.torchs.state_dict()
    assert list(ours["state"]) == list(torchs["state"])


def runs_of(optimizer: Any) -> list[Any]:
    """Return the runs that the last step took."""
    return [run for group in optimizer._every.groups for run in group.runs.runs]


def _states_are_those_of_torch() -> None:
    for options in ({}, {"amsgrad": True}):
        pair = Pair(AdamW, **options)
        pair.train(3)
        units = len(pair.models[0].units()) + 1
        assert len(runs_of(pair.ours)) == units
        assert_same_order(pair)
        assert pair.ours.state_dict()["param_groups"] == pair.torchs.state_dict()["param_groups"]


def _states_are_in_the_order_of_the_groups() -> None:
    """Also if some gradients are not in flat memory, and if some parameters get theirs later."""
    pair = Pair()
    for optimizer in (pair.ours, pair.torchs):
        optimizer.param_groups[0]["params"].reverse()
    for is_last in (False, True):
        for model, optimizer in zip(pair.models, (pair.ours, pair.torchs), strict=True):
            optimizer.zero_grad()
            backward(model)
            for index, param in enumerate(model.parameters()):
                if index % 3 == 0:
                    param.grad = param.grad * 0.5
                elif index % 4 == 0 and not is_last:
                    param.grad = None
            optimizer.step()
        pair.compare()
        assert_same_order(pair)


def _state_dicts_go_both_ways() -> None:
    pair = Pair()
    pair.train(2)
    ours, torchs = pair.ours.state_dict(), pair.torchs.state_dict()
    pair.ours.load_state_dict(copy.deepcopy(torchs))
    pair.torchs.load_state_dict(copy.deepcopy(ours))
    pair.train(2)

    file = io.BytesIO()
    torch.save(pair.ours.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for optimizer in (pair.ours, pair.torchs):
        optimizer.load_state_dict(copy.deepcopy(loaded))
    pair.train(2)

    # With an optimizer that has not stepped yet.
    model = pair.models[0]
    pair.ours = AdamW(model.parameters(), **pair.options)
    pair.ours.load_state_dict(copy.deepcopy(loaded))
    pair.torchs.load_state_dict(copy.deepcopy(loaded))
    pair.train(1)


def _distributed_state_dicts_go_both_ways() -> None:
    pair = Pair()
    pair.train(2)
    ours = get_optimizer_state_dict(pair.models[0], pair.ours)
    torchs = get_optimizer_state_dict(pair.models[1], pair.torchs)
    assert ours["state"].keys() == torchs["state"].keys()
    for name in ours["state"]:
        assert_same_states(ours["state"][name], torchs["state"][name])
    fresh = Pair()
    set_optimizer_state_dict(fresh.models[0], fresh.ours, copy.deepcopy(torchs))
    set_optimizer_state_dict(fresh.models[1], fresh.torchs, copy.deepcopy(ours))
    fresh.train(2)


def _default_options_go_both_ways() -> None:
    """With neither foreach nor fused, groups are PyTorch's, although our step is fused."""
    for kind in (SGD, AdamW):
        pair = Pair(kind, foreach=None, **({"momentum": 0.9} if kind is SGD else {}))
        for model, optimizer in zip(pair.models, (pair.ours, pair.torchs), strict=True):
            backward(model)
            optimizer.step()
        ours, torchs = pair.ours.state_dict(), pair.torchs.state_dict()
        assert ours["param_groups"] == torchs["param_groups"]
        pair.ours.load_state_dict(copy.deepcopy(torchs))
        pair.torchs.load_state_dict(copy.deepcopy(ours))
        for model, optimizer in zip(pair.models, (pair.ours, pair.torchs), strict=True):
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            scaler.scale(loss_of(model, 1)).backward()
            scaler.step(optimizer)
        for one, other in zip(*(model.parameters() for model in pair.models), strict=True):
            torch.testing.assert_close(one.to_local(), other.to_local())


def _replaced_states_are_taken() -> None:
    pair = Pair()
    pair.train(2)
    for optimizer in (pair.ours, pair.torchs):
        first, *_, last = optimizer.param_groups[0]["params"]
        optimizer.state[first]["exp_avg"] = optimizer.state[first]["exp_avg"] * 2
        optimizer.state[last]["step"] = optimizer.state[last]["step"] + 3
    pair.train(2)
    for optimizer in (pair.ours, pair.torchs):
        for value in optimizer.state[optimizer.param_groups[0]["params"][2]].values():
            _local(value).zero_()
    pair.train(2)
    for optimizer in (pair.ours, pair.torchs):
        del optimizer.state[optimizer.param_groups[0]["params"][1]]
    pair.train(2)


class Peak(TorchDispatchMode):
    """Notes the most bytes that tensors have had after any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.nbytes = max(self.nbytes, live_bytes())
        return result


def live_bytes() -> int:
    """Return the bytes of all tensors that Python knows, without parameters and DTensors."""
    storages = [each.untyped_storage() for each in gc.get_objects() if type(each) is Tensor]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def _loaded_states_do_not_exist_twice() -> None:
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
    for unit in [*model, model]:
        fully_shard(unit)
    optimizer = AdamW(model.parameters(), fused=True)
    for _ in range(2):
        model(torch.ones(1, 128)).sum().backward()
        optimizer.step()
    loaded = copy.deepcopy(optimizer.state_dict())
    optimizer = AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 128)).sum().backward()
    optimizer.load_state_dict(loaded)
    del loaded
    gc.collect()
    before = live_bytes()
    with Peak() as peak:
        optimizer.step()
    of_run = max(run.whole.nbytes for run in runs_of(optimizer))
    scalars = 1000
    assert of_run > 10 * scalars
    assert peak.nbytes - before < of_run + scalars, peak.nbytes - before
    assert live_bytes() - before < scalars


def _states_may_be_added() -> None:
    pair = Pair()
    pair.train(2)
    for optimizer in (pair.ours, pair.torchs):
        optimizer.param_groups[0]["amsgrad"] = True
        for param in optimizer.param_groups[0]["params"]:
            largest = torch.ones_like(optimizer.state[param]["exp_avg_sq"])
            optimizer.state[param]["max_exp_avg_sq"] = largest
    pair.train(2)


def _parameters_may_be_replaced() -> None:
    pair = Pair()
    pair.train(2)
    for model in pair.models:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    pair.train(2)
    assert len(runs_of(pair.ours)) == len(pair.models[0].units()) + 1


def _gradients_may_be_held() -> None:
    pair = Pair()
    pair.train(2)
    held = [param.grad for param in pair.models[0].parameters()]
    before = [grad.to_local().clone() for grad in held]
    pair.train(2)
    for grad, expected in zip(held, before, strict=True):
        assert torch.equal(grad.to_local(), expected)


def _steps_may_be_in_inference_mode() -> None:
    """Also the first one, which makes states: later steps outside can change ours."""
    options: list[dict[str, Any]] = [{}, {"foreach": True}, {"kind": SGD, "momentum": 0.9}]
    for given in options:
        pair = Pair(**given)
        for number in range(4):
            for model, optimizer in zip(pair.models, (pair.ours, pair.torchs), strict=True):
                optimizer.zero_grad()
                backward(model, number)
                with torch.inference_mode(optimizer is pair.ours and number % 2 == 0):
                    optimizer.step()
            pair.compare()


def _a_first_step_may_have_a_default_device() -> None:
    pair = Pair(foreach=None, fused=True)
    for number in range(2):
        for model, optimizer in zip(pair.models, (pair.ours, pair.torchs), strict=True):
            optimizer.zero_grad()
            backward(model, number)
            with torch.device("meta"):
                optimizer.step()
        for ours, torchs in zip(*(model.parameters() for model in pair.models), strict=True):
            torch.testing.assert_close(ours.to_local(), torchs.to_local())
            assert pair.ours.state[ours].keys() == pair.torchs.state[torchs].keys()
            assert pair.ours.state[ours]["step"] == pair.torchs.state[torchs]["step"] == number + 1


def _parameters_may_be_added() -> None:
    pair = Pair()
    pair.models = [sharded(), sharded()]
    first, *rest = zip(*(model.parameters() for model in pair.models), strict=True)
    pair.ours = AdamW([first[0]], **pair.options)
    pair.torchs = torch.optim.AdamW([first[1]], **pair.options)
    pair.train(2)
    pair.ours.add_param_group({"params": [ours for ours, _ in rest], "lr": 0.02})
    pair.torchs.add_param_group({"params": [torchs for _, torchs in rest], "lr": 0.02})
    pair.train(2)


def _gradients_are_unscaled() -> None:
    pair = Pair()
    pair.train(1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in range(2)]
    for step in range(5):
        for model, optimizer, scaler in zip(
            pair.models, (pair.ours, pair.torchs), scalers, strict=True
        ):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            scaler.scale(loss).backward()
            if step == 2:
                for param in model.parameters():
                    param.grad.to_local().fill_(math.inf)
            if step == 3:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        pair.compare()
        assert scalers[0].get_scale() == scalers[1].get_scale()


def _a_first_step_may_have_no_gradients() -> None:
    pair = Pair()
    pair.ours.step()
    pair.torchs.step()
    pair.train(2)
    assert len(runs_of(pair.ours)) == len(pair.models[0].units()) + 1


def _a_parameter_without_gradient_keeps_no_run() -> None:
    pair = Pair()
    pair.train(2)
    (group,) = pair.ours._every.groups  # type: ignore[attr-defined]
    averages = [states["exp_avg"] for _, states in group._states]
    param = next(pair.models[0].parameters())

    def is_in_run() -> bool:
        address = pair.ours.state[param]["exp_avg"].to_local().data_ptr()
        return any(0 <= address - whole.data_ptr() < whole.nbytes for whole in averages)

    assert is_in_run()
    for model, optimizer in zip(pair.models, (pair.ours, pair.torchs), strict=True):
        optimizer.zero_grad()
        backward(model)
        next(model.parameters()).grad = None
        optimizer.step()
    pair.compare()
    assert not is_in_run()


def _states_may_have_entries_of_the_user() -> None:
    pair = Pair()
    pair.train(2)
    entries = [None, 1, True, [1], torch.ones(2), torch.tensor(1.5), torch.tensor(1)]
    for optimizer in (pair.ours, pair.torchs):
        params = optimizer.param_groups[0]["params"]
        for index, param in enumerate(params):
            optimizer.state[param]["entry"] = entries[index % len(entries)]
    for _ in range(2):
        for model, optimizer in zip(pair.models, (pair.ours, pair.torchs), strict=True):
            backward(model)
            optimizer.step()
            for index, param in enumerate(optimizer.param_groups[0]["params"]):
                entry = optimizer.state[param].pop("entry")
                expected = entries[index % len(entries)]
                assert type(entry) is type(expected)
                assert str(entry) == str(expected)
                optimizer.state[param]["entry"] = expected
    for optimizer in (pair.ours, pair.torchs):
        for param in optimizer.param_groups[0]["params"]:
            del optimizer.state[param]["entry"]
    pair.compare()


def _parameters_may_get_other_memory() -> None:
    def in_place(param: Any) -> None:
        param._local_tensor.data = param._local_tensor.detach().clone()

    def by_another_tensor(param: Any) -> None:
        param._local_tensor = param._local_tensor.detach().clone()

    for move in (in_place, by_another_tensor):
        pair = Pair()
        pair.train(2)
        for model, optimizer in zip(pair.models, (pair.ours, pair.torchs), strict=True):
            backward(model, 7)
            for param in model.parameters():
                if _local(param).numel():
                    move(param)
            optimizer.step()
        pair.compare()


def _gradients_may_have_another_dtype() -> None:
    pair = Pair()
    pair.models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Stack().bfloat16()
        for param in list(model.parameters())[::2]:
            param.grad_dtype = torch.float32
        for unit in model.units():
            fully_shard(unit)
        fully_shard(model)
        pair.models.append(model)
    options = {"lr": 0.01, "momentum": 0.9, "foreach": False}
    pair.ours = SGD(pair.models[0].parameters(), **options)
    pair.torchs = torch.optim.SGD(pair.models[1].parameters(), **options)
    for model, optimizer in zip(pair.models, (pair.ours, pair.torchs), strict=True):
        (args, kwargs) = model.batch(torch.Generator().manual_seed(0))
        model.loss(model(*(arg.bfloat16() for arg in args), **kwargs)).backward()
        assert {param.grad.dtype for param in model.parameters()} == {
            torch.float32, torch.bfloat16
        }  # fmt: skip
        optimizer.step()
    for ours, torchs in zip(*(model.parameters() for model in pair.models), strict=True):
        torch.testing.assert_close(ours.to_local(), torchs.to_local())


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Embedding(8, 3, sparse=True)
        self.linear = nn.Linear(3, 2)

    def forward(self) -> Tensor:
        found: Tensor = self.linear(self.rare(torch.tensor([1, 5])))
        return found.square().sum()


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.linear = nn.Linear(3, 2)

    def forward(self) -> Tensor:
        found: Tensor = self.linear((self.rare * (1 + 2j)).real)
        return found.square().sum()


class _OtherGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.linear.bias.grad_dtype = torch.bfloat16

    def forward(self) -> Tensor:
        found: Tensor = self.linear(torch.ones(3))
        return found.square().sum()


def _parameters_may_not_fit_fused_code() -> None:
    for make_model, kinds in (
        (_Sparse, [SGD]),
        (_OtherGradients, [SGD]),
        (_Complex, [SGD, Adam, AdamW]),
    ):
        for kind in kinds:
            found = []
            for make in (kind, KINDS[kind]):
                torch.manual_seed(0)
                model = make_model()
                rare = {param for name, param in model.named_parameters() if "rare" in name}
                fully_shard(model, ignored_params=rare)
                optimizer = make(model.parameters(), lr=0.1)
                for _ in range(3):
                    optimizer.zero_grad()
                    model().backward()
                    optimizer.step()
                found.append([whole(param) for param in model.parameters()])
            torch.testing.assert_close(*found)


def _a_step_may_be_compiled() -> None:
    pair = Pair()
    step = torch.compile(pair.ours.step, backend="eager")
    for number in range(3):
        for model, run in zip(pair.models, (step, pair.torchs.step), strict=True):
            model.zero_grad()
            backward(model, number)
            run()
        pair.compare()


def _hooks_run_once() -> None:
    pair = Pair()
    calls: list[str] = []
    pair.ours.register_step_pre_hook(lambda *args: calls.append("before"))
    pair.ours.register_step_post_hook(lambda *args: calls.append("after"))
    pair.train(2)
    assert calls == ["before", "after"] * 2


def _a_failed_step_leaves_the_optimizer_whole() -> None:
    pair = Pair()
    pair.train(2)
    params = pair.ours.param_groups[0]["params"]
    pair.ours.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        pair.ours.step()
    assert pair.ours.param_groups[0]["params"] is params
    pair.ours.param_groups[0]["betas"] = pair.torchs.param_groups[0]["betas"]
    pair.train(2)


class _Counting(torch.optim.SGD):
    """Counts its steps in an attribute and in each group."""

    count = 0

    def __init_subclass__(cls, *, name: str) -> None:
        cls.name = name

    def step(self, closure: Any = None) -> Any:
        assert type(self).__name__ == "_FlatCounting"
        self.count += 1
        vars(self).pop("is_new", None)
        for group in self.param_groups:
            group["count"] = self.count
        return super().step(closure)


class _FlatCounting(FlatStep, _Counting, name="flat"):
    pass


def _a_step_may_write_to_its_optimizer() -> None:
    model = sharded()
    optimizer = _FlatCounting(model.parameters(), lr=0.1)
    optimizer.is_new = True  # type: ignore[attr-defined]
    for _ in range(2):
        backward(model)
        optimizer.step()
    assert optimizer.count == optimizer.param_groups[0]["count"] == 2
    assert not hasattr(optimizer, "is_new")


def _an_optimizer_is_copied() -> None:
    pair = Pair()
    pair.train(1)
    pair.ours = copy.copy(pair.ours)
    pair.train(1)


def _gradients_of_ignored_parameters_are_zeroed() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    fully_shard(model, ignored_params={model[1].bias})
    optimizer = AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    grads = [param.grad for param in model.parameters()]
    optimizer.zero_grad(set_to_none=False)
    for param, grad in zip(model.parameters(), grads, strict=True):
        assert param.grad is grad
        assert not grad.count_nonzero()


@pytest.mark.parametrize(
    "work",
    [
        _gradients_of_ignored_parameters_are_zeroed,
        _states_are_those_of_torch,
        _states_are_in_the_order_of_the_groups,
        _state_dicts_go_both_ways,
        _distributed_state_dicts_go_both_ways,
        _default_options_go_both_ways,
        _replaced_states_are_taken,
        _loaded_states_do_not_exist_twice,
        _states_may_be_added,
        _parameters_may_be_replaced,
        _gradients_may_be_held,
        _steps_may_be_in_inference_mode,
        _a_first_step_may_have_a_default_device,
        _parameters_may_be_added,
        _gradients_are_unscaled,
        _a_first_step_may_have_no_gradients,
        _a_parameter_without_gradient_keeps_no_run,
        _states_may_have_entries_of_the_user,
        _parameters_may_get_other_memory,
        _gradients_may_have_another_dtype,
        _parameters_may_not_fit_fused_code,
        _a_step_may_be_compiled,
        _hooks_run_once,
        _a_failed_step_leaves_the_optimizer_whole,
        _a_step_may_write_to_its_optimizer,
        _an_optimizer_is_copied,
    ],
)
def test_flat_optimizers_pass_for_torchs(work: Callable[[], None]) -> None:
    run_ranks(work, 2)


@pytest.mark.parametrize("options", [{"nesterov": True}, {"dampening": 0.1}])
def test_sgd_may_get_first_gradients_later_as_torchs_without_fused_code(
    options: dict[str, Any],
) -> None:
    pairs = []
    for make in (SGD, torch.optim.SGD):
        torch.manual_seed(0)
        params = [torch.randn(4, requires_grad=True) for _ in range(2)]
        optimizer = make(params, lr=0.1, momentum=0.9, weight_decay=0.1, **options)
        for step in range(3):
            for param in params[: 1 + step]:
                param.grad = torch.randn(4)
            optimizer.step()
        pairs.append(params)
    torch.testing.assert_close(*pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sgd_updates_low_precision_on_the_host_as_torchs_without_fused_code(
    dtype: torch.dtype,
) -> None:
    pairs = []
    for make in (SGD, torch.optim.SGD):
        torch.manual_seed(0)
        param = torch.randn(67).to(dtype).requires_grad_()
        optimizer = make([param], lr=0.1, momentum=0.9, nesterov=True)
        for _ in range(3):
            param.grad = torch.randn(67).to(dtype)
            optimizer.step()
        pairs.append((param, optimizer.state[param]["momentum_buffer"]))
    torch.testing.assert_close(*pairs, rtol=0, atol=0)
    fused = SGD([param], lr=0.1, fused=True)
    fused.grad_scale, fused.found_inf = torch.ones(()), torch.zeros(())  # as by a GradScaler
    with pytest.raises(RuntimeError, match=r"GradScaler .* Leave out fused=True"):
        fused.step()
    assert fused.param_groups[0]["fused"] is True


@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "unscaled"])
def test_a_first_step_that_a_scaler_skips_leaves_no_momentum_of_its_own(scaled: bool) -> None:
    params = []
    torch.use_deterministic_algorithms(True)  # memory that nobody has written is NaN
    for make in (partial(SGD, fused=True), torch.optim.SGD):
        param = torch.zeros(100, requires_grad=True)
        optimizer = make([param], lr=1.0, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        for grad in (math.inf, 2.0, 2.0):
            param.grad = torch.full((100,), grad)
            if not scaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        params.append(param)
    torch.use_deterministic_algorithms(False)
    assert torch.equal(*params)
    damped = SGD(
        [torch.zeros(2, requires_grad=True)], lr=1.0, momentum=0.9, dampening=0.5, fused=True
    )
    damped.param_groups[0]["params"][0].grad = torch.ones(2)
    damped.found_inf = torch.ones(())
    with pytest.raises(RuntimeError, match=r"GradScaler .* Leave out fused=True"):
        damped.step()


# - Clipping


def _norms(model: Any, **options: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield our norm and PyTorch's of the same gradients."""
    for step in range(2):
        model.zero_grad()
        backward(model, step)
        grads = _grads_of(model)
        before = [grad.clone() for grad in grads]
        ours = fsdp_ext.clip_grad_norm_(model, 0.05, **options)
        clipped = [grad.clone() for grad in grads]
        for grad, value in zip(grads, before, strict=True):
            grad.copy_(value)
        theirs = nn.utils.clip_grad_norm_(model.parameters(), 0.05, **options)
        for got, expected in zip(clipped, grads, strict=True):
            torch.testing.assert_close(_local(got), _local(expected))
        yield ours, whole(theirs)


def _grads_of(model: Any) -> list[Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


def _norms_are_those_of_torch() -> None:
    for norm_type in (1.0, 2.0, 2.5, math.inf):
        for ours, theirs in _norms(sharded(), norm_type=norm_type):
            torch.testing.assert_close(ours, theirs)
    half = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for ours, theirs in _norms(half):
        torch.testing.assert_close(ours, theirs)
    # Each rank's own values of a parameter outside of all units count on that rank.
    model = sharded()
    model.zero_grad()
    backward(model)
    outside = nn.Parameter(torch.zeros(3))
    outside.grad = torch.full((3,), 2.0)
    ours = fsdp_ext.clip_grad_norm_([*model.parameters(), outside], 1e6)
    inside = fsdp_ext.clip_grad_norm_(model, 1e6)
    torch.testing.assert_close(ours, (inside**2 + 12) ** 0.5)


def _units_may_be_unsharded() -> None:
    model = sharded()
    model.set_reshard_after_backward(False)
    backward(model)
    norms = [fsdp_ext.clip_grad_norm_(given, 0.05) for given in (model, list(model.parameters()))]
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    model.reshard()
    for unit in model.units():
        unit.reshard()
    norms.append(fsdp_ext.clip_grad_norm_(model, 0.05))
    assert norms[0] > 0.06
    torch.testing.assert_close(norms[1:], [torch.tensor(0.05)] * 2, rtol=1e-4, atol=0)


def _norms_agree_if_a_rank_has_no_gradient() -> None:
    model = sharded()
    first, *_ = model.parameters()
    only = fsdp_ext.clip_grad_norm_([first], 1.0)
    assert only == 0
    if dist.get_rank() == 0:
        first.grad = torch.ones_like(first)
    expected = first.to_local().numel() if dist.get_rank() == 0 else 0
    total = torch.tensor(float(expected))
    dist.all_reduce(total)
    assert fsdp_ext.clip_grad_norm_([first], 100.0) == total**0.5
    assert fsdp_ext.clip_grad_norm_(first, 100.0) == total**0.5


def _parameters_given_twice_count_once() -> None:
    """In flat memory, elsewhere, and without sharding."""
    for moved in (False, True):
        model = sharded()
        backward(model)
        params = list(model.parameters())
        if moved:
            for param in params:
                param.grad = param.grad.clone()
        before = [grad.to_local().clone() for grad in _grads_of(model)]
        norm = fsdp_ext.clip_grad_norm_([*params, *params[:3]], math.inf)
        assert torch.equal(norm, fsdp_ext.clip_grad_norm_(params, math.inf))
        fsdp_ext.clip_grad_norm_([*params, *params[:3]], 0.05)
        for grad, value in zip(_grads_of(model), before, strict=True):
            torch.testing.assert_close(grad.to_local(), value * (0.05 / norm))
    plain = nn.Parameter(torch.zeros(1))
    plain.grad = torch.tensor([2.0])
    assert fsdp_ext.clip_grad_norm_([plain, plain], 1.0) == 2
    torch.testing.assert_close(plain.grad, torch.tensor([1.0]))


def _norms_of_several_meshes() -> None:
    """One unit is on all ranks, one on pairs of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5))
    fully_shard(model[0], mesh=mesh["shard"])
    fully_shard(model[1])
    model(torch.ones(2, 4)).square().sum().backward()
    expected = sum(float(param.grad.full_tensor().square().sum()) for param in model.parameters())
    norm = fsdp_ext.clip_grad_norm_(model, 0.1)
    torch.testing.assert_close(norm, torch.tensor(expected**0.5))
    after = sum(float(param.grad.full_tensor().square().sum()) for param in model.parameters())
    assert math.isclose(after**0.5, 0.1, rel_tol=1e-4)


def _norms_of_tensor_parallel_parameters() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6), nn.LayerNorm(6))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model[0], mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    model(torch.randn(4, 6, generator=generator)).sin().sum().backward()
    before = [param.grad.full_tensor() for param in model.parameters()]
    expected = torch.cat([grad.flatten() for grad in before]).norm()
    torch.testing.assert_close(fsdp_ext.clip_grad_norm_(model, 0.5), expected)
    for param, grad in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), grad * (0.5 / expected))


def _norms_do_not_depend_on_addresses() -> None:
    norms = set()
    kept = []  # so that each model is elsewhere
    for _ in range(6):
        model = sharded()
        kept.append(model)
        backward(model)
        norms.add(fsdp_ext.clip_grad_norm_(model, 1e6).item())
    assert len(norms) == 1


def _norms_follow_the_dtype() -> None:
    model = sharded()
    assert fsdp_ext.clip_grad_norm_(model, 1.0).dtype == torch.float32  # without gradients
    model.double()
    (args, kwargs) = model.batch(torch.Generator())
    model.loss(model(*(arg.double() for arg in args), **kwargs)).backward()
    assert fsdp_ext.clip_grad_norm_(model, 1.0).dtype == torch.float64


def _norms_follow_the_dtype_of_gradients() -> None:
    """Beside the unsharded model, with gradients in float64 of some parameters in float32."""
    found = []
    for shard, clip in (
        (fully_shard, fsdp_ext.clip_grad_norm_),
        (lambda model: model, nn.utils.clip_grad_norm_),
    ):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
        for layer in model:
            layer.weight.grad_dtype = torch.float64
        shard(model)
        model(torch.ones(2, 3)).sum().backward()
        for given in (model[0].weight, model.parameters()):
            found.append([clip(given, 0.1), *map(whole, _grads_of(model))])
    for ours, unsharded in zip(found[:2], found[2:], strict=True):
        assert ours[0].dtype == torch.float64
        torch.testing.assert_close(ours, unsharded)


def _a_norm_that_is_not_finite_changes_no_later_one() -> None:
    """A scaler leaves out a step, beside FSDP2."""
    for set_to_none in (True, False):
        found = []
        for shard, clip in (
            (fully_shard, fsdp_ext.clip_grad_norm_),
            (torch.distributed.fsdp.fully_shard, nn.utils.clip_grad_norm_),
        ):
            torch.manual_seed(0)
            model: Any = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7), nn.Linear(7, 1))
            shard(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            norms = []
            for factor in (1.0, math.inf, 1.0, 1.0):
                scaler.scale((model(torch.ones(2, 3)) * factor).sum()).backward()
                scaler.unscale_(optimizer)
                norms.append(whole(clip(model.parameters(), 1.0)))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=set_to_none)
            assert torch.stack(norms).isfinite().tolist() == [True, False, True, True]
            found.append([*norms, *(whole(param) for param in model.parameters())])
        torch.testing.assert_close(*found, equal_nan=True)


def _norms_of_complex_gradients() -> None:
    for norm_type in (1.0, 2.0, math.inf):
        for count in (1, 2):  # complex gradients alone, and beside real ones
            ours, theirs = (
                [nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in (torch.cfloat, torch.float)]
                for _ in range(2)
            )
            for params in (ours, theirs):
                params[0].grad = torch.tensor([3 + 4j, 1, -2j])
                params[1].grad = torch.tensor([1.0, 2.0, 3.0])
            norm = fsdp_ext.clip_grad_norm_(ours[:count], 0.05, norm_type)
            expected = nn.utils.clip_grad_norm_(theirs[:count], 0.05, norm_type)
            torch.testing.assert_close(norm, expected)
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one.grad, other.grad)


class _OwnParameters(nn.Linear):
    def parameters(self, recurse: bool = True) -> Any:
        return iter([self.weight])


class _OwnModules(nn.Sequential):
    def named_modules(self, *args: Any, **options: Any) -> Any:
        yield "", self
        yield "0", self[0]


def _modules() -> dict[str, tuple[nn.Module, bool]]:
    """Return modules, and whether C++ finds all parameters below them."""
    linear = nn.Linear(2, 3)
    tied = nn.Sequential(linear, nn.Linear(2, 3), nn.Sequential(linear), nn.Linear(3, 2))
    tied[1].weight = linear.weight
    tied[1].register_parameter("last", None)
    tied.register_module("none", None)
    changed = nn.Sequential(nn.Linear(2, 2))
    changed[0].named_modules = lambda *_: iter(())  # type: ignore[method-assign]
    lists = nn.ModuleList([nn.ParameterList([linear.bias, nn.Parameter(torch.ones(1))]), tied])
    return {
        "ties": (tied, True),
        "parameters below and above": (lists, True),
        "nothing": (nn.Tanh(), True),
        "scripted": (nn.Sequential(torch.jit.script(nn.Linear(2, 2)), linear), False),
        "parameters()": (_OwnParameters(2, 2), True),
        "a child's parameters(), which nobody calls": (nn.Sequential(_OwnParameters(2, 2)), True),
        "named_modules()": (_OwnModules(nn.Linear(2, 2), nn.Linear(2, 2)), False),
        "named_modules() of a child": (nn.Sequential(_OwnModules(linear, nn.Linear(2, 2))), False),
        "named_modules of an object": (changed, False),
    }


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_clipping_finds_the_parameters_of_a_module() -> None:
    for name, (module, is_plain) in _modules().items():
        found = parameters_of(module)
        assert [id(param) for param in found] == [id(param) for param in module.parameters()], name
        assert (_C.parameters_of(module, nn.Module.named_modules) is not None) == is_plain, name


def _gradients_within_the_limit_are_not_written() -> None:
    model = sharded()
    backward(model)
    norm = float(fsdp_ext.clip_grad_norm_(model, math.inf))
    before = [grad.to_local().clone() for grad in _grads_of(model)]
    for max_norm, is_written in ((1e6, False), (0.5 * norm, True)):
        with _CountMultiplications() as counted:
            fsdp_ext.clip_grad_norm_(model, max_norm)
        assert bool(counted.calls) == is_written
        if not is_written:
            assert all(map(torch.equal, before, map(_local, _grads_of(model))))


class _CountMultiplications(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is torch.ops.aten._foreach_mul_.Tensor
        return func(*args, **(kwargs or {}))


def _clipping_keeps_no_model() -> None:
    kept, gone = sharded(), sharded()
    for model in (kept, gone):
        backward(model)
    fsdp_ext.clip_grad_norm_([*kept.parameters(), *gone.parameters()], 1.0)
    params = [weakref.ref(param) for param in gone.parameters()]
    del gone, model
    gc.collect()
    assert not any(param() is not None for param in params)


@pytest.mark.parametrize(
    ("work", "ranks"),
    [
        (_norms_are_those_of_torch, 3),
        (_units_may_be_unsharded, 2),
        (_norms_agree_if_a_rank_has_no_gradient, 2),
        (_parameters_given_twice_count_once, 2),
        (_norms_of_several_meshes, 4),
        (_norms_of_tensor_parallel_parameters, 4),
        (_norms_do_not_depend_on_addresses, 2),
        (_norms_follow_the_dtype, 2),
        (_norms_follow_the_dtype_of_gradients, 2),
        (_norms_of_complex_gradients, 1),
        (_a_norm_that_is_not_finite_changes_no_later_one, 2),
        (_gradients_within_the_limit_are_not_written, 2),
        (_clipping_keeps_no_model, 2),
    ],
)
def test_clip_grad_norm(work: Callable[[], None], ranks: int) -> None:
    run_ranks(work, ranks)


def _bad_arguments_say_what_is_wrong() -> None:
    model = sharded()
    backward(model)
    with pytest.raises(ValueError, match="norm_type=0"):
        fsdp_ext.clip_grad_norm_(model, 1.0, norm_type=0)
    with pytest.raises(TypeError, match="max_norm='x'"):
        fsdp_ext.clip_grad_norm_(model, "x")  # type: ignore[arg-type]
    first = next(model.parameters())
    sharded_grad = first.grad
    first.grad = sharded_grad.redistribute(placements=[Replicate()])
    with pytest.raises(NotImplementedError, match="placements"):
        fsdp_ext.clip_grad_norm_(model, 1.0)
    first.grad = sharded_grad
    if dist.get_rank() == dist.get_world_size() - 1:
        next(model.parameters()).grad.to_local().fill_(math.nan)
    for norm_type in (2.0, math.inf):
        with pytest.raises(RuntimeError, match="non-finite"):
            fsdp_ext.clip_grad_norm_(model, 1.0, norm_type, error_if_nonfinite=True)
        assert fsdp_ext.clip_grad_norm_(model, 1.0, norm_type).isnan()
    params = list(model.parameters())
    with pytest.raises(ValueError, match="differentiable=True"):
        AdamW(params, differentiable=True)
    group = {"params": params[1:], "differentiable": True}
    with pytest.raises(ValueError, match="differentiable=True"):
        AdamW([{"params": params[:1]}, group])
    optimizer = AdamW(params[:1])
    with pytest.raises(ValueError, match="differentiable=True"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    optimizer.step()
    early = Stack()
    optimizer = AdamW(early.parameters())
    for unit in early.units():
        fully_shard(unit)
    fully_shard(early)
    backward(early)
    with pytest.raises(RuntimeError, match="Make the optimizer after fully_shard"):
        optimizer.step()
    stepped = AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"Use the optimizer of torch\.optim"):
        fsdp_ext.offload_optimizer(stepped, model)


def test_bad_arguments_say_what_is_wrong() -> None:
    run_ranks(_bad_arguments_say_what_is_wrong, 2)
