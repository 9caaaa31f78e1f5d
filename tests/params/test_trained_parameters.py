"""What users write into parameters and what optimizers hold is what trains, or an error says so.

A model has its sharded parameters whenever no training step is under way: also after evaluations
and after exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.launcher import run_ranks
from support.models import TwoLayers
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor

from fsdp_ext import (
    FullyShardedDataParallel as FSDP,
)
from fsdp_ext import (
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from fsdp_ext.sharding.root import module_changes


class Stop(Exception):
    """Raised by a model on purpose."""


class Model(TwoLayers):
    """It can fail in forward, after its layers have run."""

    def __init__(self) -> None:
        super().__init__()
        self.failure: Exception | None = None
        self.head.register_forward_pre_hook(self._raise_failure)

    def _raise_failure(self, *_: Any) -> None:
        if self.failure is not None:
            raise self.failure

    def fail(self, x: Tensor) -> Tensor:
        raise Stop


def sharded(**options: Any) -> Any:
    model = Model()
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def all_sharded(model: nn.Module) -> bool:
    return all(isinstance(param, DTensor) for param in model.parameters())


def ones() -> Tensor:
    return torch.ones(2, 4)


def whole(model: nn.Module) -> list[Tensor]:
    assert all_sharded(model)
    return [param.detach().full_tensor().clone() for param in model.parameters()]


def output_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(ones()).clone()


def ways_to_lose_parameters(model: Any) -> Iterator[str]:
    """End forward or backward of `model` in ways that leave no step under way."""
    with torch.no_grad():
        model(ones())
    yield "an evaluation"
    with torch.inference_mode():
        model(ones())
    yield "inference"
    model.failure = Stop()
    with pytest.raises(Stop):
        model(ones())
    model.failure = None
    yield "an exception in forward"
    try:
        raise Stop
    except Stop:
        output_of(model)
    yield "an evaluation while an exception is handled"
    register_fsdp_forward_method(model, "fail")
    with pytest.raises(Stop):
        model.fail(ones())
    yield "an exception in another method"
    hidden: list[Tensor] = []
    handle = model.layers[1].register_forward_hook(lambda *args: hidden.append(args[-1]))
    output = model(ones())
    handle.remove()
    hidden[0].register_hook(_raise)
    with pytest.raises(Stop):
        output.sum().backward()
    yield "an exception in backward"


def _raise(_: Any) -> None:
    raise Stop


def _parameters_after_every_end() -> None:
    model = sharded()
    for way in ways_to_lose_parameters(model):
        assert all_sharded(model), way
        model.zero_grad()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = whole(model)
        model(ones()).square().sum().backward()
        optimizer.step()
        changed = [not torch.equal(a, b) for a, b in zip(before, whole(model), strict=True)]
        assert changed[-1], way


def test_an_optimizer_made_after_an_evaluation_or_an_exception_trains() -> None:
    run_ranks(_parameters_after_every_end, 2)


def _write(model: nn.Module, write: str) -> None:
    for param in model.parameters():
        with torch.no_grad():
            if write == "in place":
                param.zero_()
            elif write == "through .data":
                param.data.zero_()
            else:
                torch._foreach_mul_([param], 0.0)


def _writes_after_evaluations() -> None:
    for write in ("in place", "through .data", "foreach"):
        model = sharded()
        assert output_of(model).abs().sum() > 0
        _write(model, write)
        assert not any(value.any() for value in whole(model)), write
        assert torch.equal(output_of(model), torch.zeros(2, 4)), write
    model = sharded()
    output_of(model)
    for param in model.head.parameters():
        param.requires_grad_(False)
    model(ones()).sum().backward()
    assert model.head.weight.grad is None
    assert model.layers[0].weight.grad is not None


def test_what_is_written_into_parameters_after_an_evaluation_counts() -> None:
    run_ranks(_writes_after_evaluations, 2)


class ThroughData(torch.optim.Optimizer):
    """Changes no version of a parameter, as some optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(param.grad.data, alpha=-0.1)


def _steps_between_evaluations(replaces: bool) -> None:
    model, plain = sharded(reshard_after_forward=False), Model()
    if replaces:
        replace_parameters(model)
    optimizers = [ThroughData(each.parameters()) for each in (model, plain)]
    for _ in range(2):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            each.zero_grad()
            each(ones()).square().sum().backward()
            output_of(each)  # keeps its parameters for the next one
            optimizer.step()
        torch.testing.assert_close(output_of(model), output_of(plain))


@pytest.mark.parametrize("replaces", [False, True])
def test_an_evaluation_sees_the_step_of_an_optimizer_that_writes_through_data(
    replaces: bool,
) -> None:
    run_ranks(partial(_steps_between_evaluations, replaces), 2)


class Refusing(nn.Linear):
    """Its own `__setattr__` refuses to set one parameter."""

    refused = ""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == self.refused:
            raise Stop
        super().__setattr__(name, value)


def _refused_parameters() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), Refusing(4, 4))
    fully_shard(model[1])
    fully_shard(model)
    expected = output_of(model)
    for name in ("weight", "bias"):
        model[1].refused = name
        with pytest.raises(Stop):
            model(ones())
        model[1].refused = ""
        assert all_sharded(model), name
        assert torch.equal(output_of(model), expected), name
        model(ones()).sum().backward()
        assert model[1].bias.grad is not None


def test_parameters_are_sharded_after_a_module_has_refused_to_set_one() -> None:
    run_ranks(_refused_parameters, 2)


def _optimizer_of_unsharded_parameters() -> None:
    model = sharded()
    optimizer = torch.optim.SGD(list(model.layers.parameters()), lr=0.1)
    loss = model(ones()).sum()
    optimizer.step()  # it has nothing to complain about
    optimizer.add_param_group({"params": [model.head.weight]})  # backward needs it unsharded
    loss.backward()
    with pytest.raises(RuntimeError, match=r"the unsharded 'head\.weight'.*after reshard"):
        optimizer.step()
    model.unshard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"the unsharded 'head\.weight'"):
        optimizer.step()


def test_an_optimizer_of_unsharded_parameters_is_refused() -> None:
    run_ranks(_optimizer_of_unsharded_parameters, 2)


def _parameters_unsharded_by_hand() -> None:
    model = sharded()
    expected = output_of(model)
    model.unshard()
    assert not isinstance(model.head.weight, DTensor)
    for _ in range(2):  # as in FSDP2, the root stays unsharded
        assert torch.equal(output_of(model), expected)
        assert not isinstance(model.head.weight, DTensor)
    model.reshard()
    assert all_sharded(model)
    output_of(model)
    assert all_sharded(model)
    # After an exception, unshard() gathers anew.
    model.failure = Stop()
    with pytest.raises(Stop):
        model(ones())
    model.head.weight.data.zero_()
    model.unshard()
    assert torch.equal(model.head.weight, torch.zeros(4, 4))


def test_parameters_that_the_user_has_unsharded_stay_so() -> None:
    run_ranks(_parameters_unsharded_by_hand, 2)


def _kept_slots() -> None:
    model = sharded(reshard_after_forward=False)
    expected = output_of(model)
    impl = model._fsdp_ext_unit.root.impl
    impl.reset_counters()
    for _ in range(3):
        assert all_sharded(model)
        assert torch.equal(output_of(model), expected)
    assert impl.counters()["all_gathers"] == 0
    model.layers[0].unshard()  # gathers anew
    assert impl.counters()["all_gathers"] == 1
    with torch.no_grad():
        model.reshard()
        model.head.weight.zero_()
    model(ones()).sum().backward()
    assert torch.equal(output_of(model), model.head.bias.full_tensor().expand(2, 4))


def _casts_without_peers() -> None:
    def changes_after_a_write(model: nn.Module) -> bool:
        before = output_of(model)
        for param in model.parameters():
            param.data.mul_(2)  # leaves no version
        return not torch.equal(output_of(model), before)

    def kept() -> nn.Module:
        model = Model()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(model, reshard_after_forward=False, mp_policy=policy)
        return model

    mixed = MixedPrecision(param_dtype=torch.bfloat16)
    cpu = torch.device("cpu")
    assert changes_after_a_write(FSDP(Model(), mixed_precision=mixed, device_id=cpu))
    assert not changes_after_a_write(kept())


def test_fsdp1_on_one_rank_casts_for_each_evaluation() -> None:
    run_ranks(_casts_without_peers, 1)


def test_evaluations_that_keep_parameters_gather_once() -> None:
    run_ranks(_kept_slots, 2)


class Evaluating(Model):
    """Runs parts of itself without gradients, and catches an exception of a layer."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = x + self.layers[0](x)
            assert not isinstance(self.head.weight, DTensor)
        try:
            self.layers[1](None)
        except TypeError:
            assert not isinstance(self.head.weight, DTensor)
        return super().forward(x)


def _nested() -> None:
    model = Evaluating()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for _ in range(2):
        model(ones()).square().sum().backward()
        assert all_sharded(model)
        assert all(param.grad is not None for param in model.parameters())
        output_of(model)
        assert all_sharded(model)
        # A layer that runs by itself after an exception is the outermost one.
        model.failure = Stop()
        with pytest.raises(Stop):
            model(ones())
        model.failure = None
        with torch.no_grad():
            model.layers[0](ones())
        assert all_sharded(model)


def test_only_the_outermost_forward_decides() -> None:
    run_ranks(_nested, 2)


# - Modules that change after they were sharded


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))

    def tie(self) -> None:
        self.last.weight = self.first.weight


def _tied_after_sharding() -> None:
    for tie_at in (0, 1):
        unsharded, ours = Tied(), fully_shard(Tied())
        for step in range(3):
            for model in (unsharded, ours):
                if step == tie_at:
                    model.tie()
                model.zero_grad()
                model(ones() + step).square().sum().backward()
                with torch.no_grad():
                    for param in model.parameters():
                        param -= 0.1 * param.grad
            for expected, param in zip(unsharded.parameters(), ours.parameters(), strict=True):
                assert torch.equal(param.full_tensor(), expected), (tie_at, step)
        assert ours.last.weight is ours.first.weight


def test_weights_that_are_tied_within_a_unit_after_sharding_train_as_one() -> None:
    run_ranks(_tied_after_sharding, 2)


def _tied_across_units() -> None:
    model = Tied()
    fully_shard(model.first)
    fully_shard(model)
    model(ones()).sum().backward()
    model.tie()
    with pytest.raises(ValueError, match=r"'last\.weight'.*'the root'.*'first\.weight'"):
        model(ones())


def test_weights_that_are_tied_across_units_after_sharding_are_named() -> None:
    run_ranks(_tied_across_units, 2)


def _swapped_between_models() -> None:
    ours, plain = [[make() for _ in range(2)] for make in (sharded, Model)]
    with torch.no_grad():
        for of_second in (ours[1], plain[1]):
            for param in of_second.parameters():
                param *= 2
    for _ in range(2):
        for first, second in (ours, plain):
            for param in (*first.parameters(), *second.parameters()):
                param.grad = None
            first(ones()).square().sum().backward()
            second(ones()).square().sum().backward()
            with torch.no_grad():
                for param in (*first.parameters(), *second.parameters()):
                    param -= 0.1 * param.grad
            layers = first.layers[0], second.layers[0]
            layers[0].weight, layers[1].weight = layers[1].weight, layers[0].weight
    for model, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(whole(model), list(expected.parameters()))


def _left_by_a_deleted_model() -> None:
    model, other = sharded(), sharded()
    output_of(other)
    with torch.no_grad():
        other.head.weight.fill_(3)
    model.head.weight = other.head.weight
    del other  # which is in reference cycles
    model(ones()).sum().backward()
    assert model.head.weight.full_tensor().eq(3).all()


@pytest.mark.parametrize("work", [_swapped_between_models, _left_by_a_deleted_model])
def test_models_may_take_each_others_parameters(work: Callable[[], None]) -> None:
    run_ranks(work, 2)


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def _unfrozen_later(model: Any, layer: nn.Linear) -> None:
    model.layers.append(layer.requires_grad_(False))
    model(ones())
    layer.requires_grad_(True)


def _put_in(model: Any, layer: nn.Linear) -> None:
    model.layers._modules["2"] = layer


UNNOTICED = [lambda model, layer: model.layers.insert(1, layer), _put_in, _unfrozen_later]


def _added_unnoticed() -> None:
    for add in UNNOTICED:
        model, layer = sharded(), nn.Linear(4, 4)
        model(ones()).sum().backward()
        add(model, layer)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        model(ones()).sum().backward()
        optimizer.step()  # which has its parameters checked
        with pytest.raises(RuntimeError, match=r"'layers\.[12]\..*' was added after fully_shard"):
            model(ones())


def _added_after_sharding() -> None:
    message = (
        r"'layers\.1.*.down\.weight' was added after fully_shard.*before fully_shard, or freeze"
    )
    for steps in (0, 1):
        model = sharded()
        for _ in range(steps):
            model(ones()).sum().backward()
        model.layers[1].adapter = LoRA(nn.Linear(4, 4))
        for _ in range(2):
            with pytest.raises(RuntimeError, match=message):
                model(ones())
        model.layers[1].adapter.requires_grad_(False)
        model(ones()).sum().backward()
    # A parameter by itself.
    model.head.scale = nn.Parameter(torch.ones(4))
    with pytest.raises(RuntimeError, match=r"'head\.scale' was added"):
        model(ones())
    del model.head.scale
    model(ones()).sum().backward()
    # Modules elsewhere change nothing.
    impl = model._fsdp_ext_unit.impl
    elsewhere = nn.Sequential(nn.Linear(4, 4))
    elsewhere.append(nn.Linear(4, 4))
    model(ones()).sum().backward()
    model.layers[1].note = nn.Identity()
    model(ones()).sum().backward()
    assert model._fsdp_ext_unit.impl is impl


def _enable_gradients(*_: Any) -> None:
    torch.set_grad_enabled(True)


def _added_for_evaluations() -> None:
    for steps in (0, 1):
        model = sharded()
        for _ in range(steps):
            model(ones()).sum().backward()
        base = output_of(model) if steps else None
        for scale in (1.0, 2.0):  # as FastVideo sets an adapter, and then another one
            model.layers[1].register_forward_hook(lambda module, _, out: out * module.scale)
            model.layers[1].scale = nn.Parameter(torch.full((), scale))
            for _ in range(2):
                output = output_of(model)
            with torch.inference_mode():
                assert torch.equal(model(ones()), output)
        if base is not None:
            assert not torch.equal(output, base)
        with pytest.MonkeyPatch.context() as context:
            # Evaluations do not look at the modules again.
            context.setattr(module_changes, "check_parameters", pytest.fail)
            assert torch.equal(output_of(model), output)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"'layers\.1\.scale' was added"):
                model(ones())
            assert torch.equal(output_of(model), output)
        # The root runs without gradients, and the layer with them.
        enable = model.layers[0].register_forward_hook(_enable_gradients)
        with pytest.raises(RuntimeError, match=r"'layers\.1\.scale' was added"), torch.no_grad():
            model(ones())
        enable.remove()
        model.layers[1].scale.requires_grad_(False)
        impl = model._fsdp_ext_unit.impl
        model(ones()).sum().backward()
        assert model._fsdp_ext_unit.impl is impl
        with pytest.MonkeyPatch.context() as context:
            context.setattr(module_changes, "check_parameters", pytest.fail)
            model(ones()).sum().backward()


@pytest.mark.parametrize("work", [_added_after_sharding, _added_unnoticed, _added_for_evaluations])
def test_trainable_parameters_that_are_added_after_sharding_are_refused(
    work: Callable[[], None],
) -> None:
    run_ranks(work, 2)


def _wrapped_before_sharding() -> None:
    model = Model()
    model.head.scale = nn.Parameter(torch.ones(3))
    for index in range(2):
        model.layers[index] = LoRA(model.layers[index])
        fully_shard(model.layers[index])
    fully_shard(model, ignored_params={model.head.scale})
    for _ in range(2):
        model(ones()).square().sum().backward()
        output_of(model)
    for name, param in model.named_parameters():
        trained = "base" not in name and name != "head.scale"
        assert (param.grad is not None) == trained, name
    model.head.scale = nn.Parameter(torch.zeros(3))  # still the attribute that was ignored
    model(ones()).sum().backward()


def test_adapters_from_before_sharding_and_ignored_parameters_are_fine() -> None:
    run_ranks(_wrapped_before_sharding, 2)


# - Changes between backwards without gradient sync


def replace_parameters(model: nn.Module) -> None:
    """Load parameters in place of those of a sharded model. Its gradients stay, as with FSDP2."""
    if all_sharded(model):
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)


def convert_units_one_by_one(model: Any) -> None:
    for module in (*model.layers, model.head):
        module.double()


def take_float64_gradients(model: Any) -> None:
    """Refused by PyTorch for a model that is not sharded, since it has gradients."""
    if all_sharded(model):
        model.head.weight.grad_dtype = torch.float64


def add_a_module_and_evaluate(model: Any) -> None:
    model.layers[0].note = nn.Identity()
    with torch.no_grad():
        model(ones())


def _changed_while_gradients_accumulate() -> None:
    for change in (
        nn.Module.double,
        nn.Module.bfloat16,
        convert_units_one_by_one,
        replace_parameters,
        take_float64_gradients,
        add_a_module_and_evaluate,
    ):
        unsharded, ours = Model(), sharded()
        for model in (unsharded, ours):
            for micro_batch in range(3):
                if model is ours:
                    model.set_requires_gradient_sync(micro_batch == 2)
                if micro_batch == 1:
                    change(model)
                batch = ones().to(model.head.weight.dtype)
                model(batch * micro_batch + 1).square().sum().backward()
        for expected, param in zip(unsharded.parameters(), ours.parameters(), strict=True):
            got = param.grad.full_tensor()
            if change is take_float64_gradients:  # the unit's sums are in float64, too
                assert got.dtype == (param.grad_dtype or param.dtype)
                assert torch.allclose(got, expected.grad.to(got.dtype))
            else:
                assert got.dtype == expected.dtype, change
                assert torch.equal(got, expected.grad), change


def test_accumulated_gradients_survive_conversions_and_replacements() -> None:
    run_ranks(_changed_while_gradients_accumulate, 2)


# - Changes of a module that is no unit itself


def convert_and_back(head: nn.Module) -> None:
    head.double()
    head.float()


def empty_and_fill(head: nn.Module) -> None:
    head.to_empty(device="cpu")
    with torch.no_grad():
        for param in head.parameters():
            param.fill_(0.5)


def swap_tensors(head: nn.Module) -> None:
    other = nn.Parameter(head.weight.detach() / 2)
    torch.utils.swap_tensors(head.weight, other)


def _changed_below_units() -> None:
    for change in (convert_and_back, empty_and_fill, swap_tensors):
        found = []
        for model in (Model(), sharded()):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for step in range(3):
                if step == 1:
                    optimizer.zero_grad()
                    change(model.head)
                model(ones()).square().sum().backward()
                optimizer.step()
            found.append(output_of(model))
        assert torch.equal(*found), change


def test_a_module_inside_a_unit_may_be_converted_emptied_or_swapped() -> None:
    run_ranks(_changed_below_units, 2)


def load_by_swapping(model: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(model.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _changed_in_nothing() -> None:
    model = sharded()
    model(ones()).sum().backward()
    units = [unit.impl for unit in model._fsdp_ext_unit.root.units]
    for change in (nn.Module.float, lambda model: model.head.to("cpu"), load_by_swapping):
        loss = model(ones()).sum()
        change(model)
        output_of(model)
        loss.backward()
        assert [unit.impl for unit in model._fsdp_ext_unit.root.units] == units


def test_conversions_that_change_nothing_leave_the_units_as_they_are() -> None:
    run_ranks(_changed_in_nothing, 2)


class WritesIntoItself(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)  # as nn.Embedding(max_norm=...) does
        return super().forward(x)


def _written_in_forward(systems: list[Any]) -> None:
    found = []
    for system in systems:
        torch.manual_seed(0)
        model: Any = nn.Sequential(WritesIntoItself(4, 4))
        for module in (model[0], model):
            system(module)
        found.append(torch.stack([model(ones()).detach() for _ in range(2)]))
    assert torch.equal(*found)


def test_a_unit_loses_what_forward_writes_into_parameters_as_under_fsdp2() -> None:
    run_ranks(_written_in_forward, 2, [fully_shard, torch_fully_shard])


def test_a_single_rank_keeps_what_forward_writes_into_parameters() -> None:
    run_ranks(_written_in_forward, 1, [fully_shard, nn.Module.train])


def _divided_otherwise_after_conversion() -> None:
    model: Any = fully_shard(nn.Linear(4, 4))
    model.set_gradient_divide_factor(8.0)
    model.set_requires_gradient_sync(False)
    model(ones()).sum().backward()
    model.half()
    model.set_requires_gradient_sync(True)
    model(ones().half()).sum().backward()
    # Two backwards on each of two ranks, for each of which the gradient of two rows is 2.
    assert torch.equal(model.weight.grad.full_tensor(), torch.ones(4, 4, dtype=torch.float16))


def test_accumulated_gradients_survive_conversions_to_a_dtype_that_is_divided_otherwise() -> None:
    run_ranks(_divided_otherwise_after_conversion, 2)


def _finalized_after_conversion() -> None:
    model = sharded()
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    model(ones()).square().sum().backward()
    unsharded = Model()
    unsharded(ones()).square().sum().backward()
    model.double()
    replace_parameters(model)
    model.layers[0].requires_grad_(False)
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    for expected, param in zip(unsharded.parameters(), model.parameters(), strict=True):
        assert torch.equal(param.grad.full_tensor(), expected.grad.double())
    model.zero_grad()
    model(ones().double()).square().sum().backward()
    assert model.layers[0].weight.grad is None
    assert model.head.weight.grad is not None


def test_finalize_backward_reduces_gradients_of_parameters_that_were_converted() -> None:
    run_ranks(_finalized_after_conversion, 2)


# - Parameters that sharding would change


class Params4bit(nn.Parameter):
    """As bitsandbytes has it: a parameter with more than numbers."""

    quant_state: object = None


class WithWeight(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def _classes_of_parameters() -> None:
    quantised = Params4bit(torch.ones(4, 2, dtype=torch.uint8), requires_grad=False)
    two = nn.Parameter(TwoTensor(torch.ones(4, 2), torch.zeros(4, 2)))
    for weight in (quantised, two):
        message = f"'weight' is a {type(weight).__name__}.*an nn.Parameter, or .* ignored_params"
        with pytest.raises(NotImplementedError, match=message):
            # The class of the second one may get its methods before the first forward.
            fully_shard(WithWeight(weight))(torch.ones(1, 4))
        model = WithWeight(weight)
        fully_shard(model, ignored_params={weight})
        assert model.weight is weight
    with pytest.raises(ValueError, match=r"'weight' belongs to a lazy module.*Run one"):
        fully_shard(nn.LazyLinear(4))
    small = WithWeight(nn.Parameter(torch.ones(4, 2).to(torch.float8_e4m3fn), requires_grad=False))
    with pytest.raises(NotImplementedError, match=r"'weight' has dtype torch.float8.*Convert it"):
        fully_shard(small, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    annotated: Any = nn.Linear(4, 4)
    annotated.weight._local_type = {"tp": "R"}  # as spmd_types.assert_type sets it
    with pytest.raises(NotImplementedError, match=r"'weight' has a type of spmd_types.*DTensor"):
        fully_shard(annotated)
    fully_shard(annotated, ignored_params={annotated.weight})


def test_parameters_of_classes_that_sharding_would_lose_are_refused() -> None:
    run_ranks(_classes_of_parameters, 2)
