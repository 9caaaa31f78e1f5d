"""An attached optimizer steps in backward, with the results of steps after backward."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.extended_models import Setup
from support.launcher import run_ranks
from support.models import FewRows, FrozenBesideTrainable, Stack, Subject, UnusedParameters
from support.parity import device, moved, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import fsdp_ext
from fsdp_ext import fully_shard
from fsdp_ext.optim import SGD, AdamW, Muon, flat_step
from fsdp_ext.sharding.api import entry
from fsdp_ext.sharding.root import setting_changes
from fsdp_ext.sharding.root.module_state import units_below


class OtherExperts(Stack):
    """Each rank uses other blocks in each step, so some gradients come from other ranks alone."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            uses = (index + self.calls + dist.get_rank()) % 2 == 0
            x = block(x) if uses else block.join_empty(x)  # type: ignore[operator]
        return self.head(x)


def in_groups(parameters: Any) -> AdamW:
    found = list(parameters)
    return AdamW(
        [
            {"params": [each for each in found if each.ndim > 1], "weight_decay": 0.2},
            {"params": [each for each in found if each.ndim == 1], "lr": 0.03},
        ],
        foreach=True,
    )


def adam(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=0.01, foreach=True)


def sgd(parameters: Any) -> SGD:
    return SGD(parameters, lr=0.05, momentum=0.9, foreach=True)


class Pair:
    """Two equal models. The optimizer of the first one is attached.

    Args:
        subject: makes the models.
        make: makes their optimizers.
        clipping: arguments of ``attach``.
        tolerance: how much the models may differ, relatively; 0 for no difference in a bit.
        options: arguments of each fully_shard.
    """

    def __init__(
        self,
        subject: Callable[[], Subject] = Stack,
        make: Callable[[Any], Any] = adam,
        clipping: dict[str, Any] | None = None,
        tolerance: float = 0.0,
        **options: Any,
    ) -> None:
        self.models: list[Any] = []
        self.optimizers: list[Any] = []
        for _ in range(2):
            torch.manual_seed(0)
            model: Any = subject().to(device())
            for unit in model.units():
                fully_shard(unit, **options)
            fully_shard(model, **options)
            self.models.append(model)
            self.optimizers.append(make(model.parameters()))
        self.optimizers[0].attach(self.models[0], **(clipping or {}))
        self.batches: Counter[Any] = Counter()  # of each model so far
        self.tolerance = tolerance

    def loss(self, model: Any) -> Tensor:
        self.batches[model] += 1
        generator = torch.Generator().manual_seed(100 * self.batches[model] + dist.get_rank())
        args, kwargs = moved(model.batch(generator))
        loss: Tensor = model.loss(model(*args, **kwargs))
        return loss

    def train(
        self,
        steps: int = 4,
        backward: Callable[[Any, Any], None] | None = None,
        step: Callable[[int], None] | None = None,
        left: Callable[[Tensor], bool] = lambda param: False,
    ) -> None:
        """Train both models.

        Args:
            steps: the number of steps.
            backward: runs the backwards of a step, for this pair and one of its models.
            step: called before each optimizer's step, with the number of the model.
            left: whether a parameter of the first model has a gradient then.
        """
        for _ in range(steps):
            for number, (model, optimizer) in enumerate(
                zip(self.models, self.optimizers, strict=True)
            ):
                if backward is None:
                    self.loss(model).backward()
                else:
                    backward(self, model)
                if number == 0:
                    assert all(
                        (param.grad is not None) == left(param) for param in model.parameters()
                    )
                if step is not None:
                    step(number)
                optimizer.step()
                model.zero_grad()
            self.compare()

    def compare(self) -> None:
        ours, expected = (list(model.parameters()) for model in self.models)
        states, expected_states = (optimizer.state for optimizer in self.optimizers)
        for param, other in zip(ours, expected, strict=True):
            assert self.alike(param, other)
            assert states.get(param, {}).keys() == expected_states.get(other, {}).keys()
            for name, value in states.get(param, {}).items():
                assert self.alike(value, expected_states[other][name]), name

    def alike(self, one: Any, other: Any) -> bool:
        one, other = _local(one), _local(other)
        tolerance = self.tolerance
        return torch.allclose(one, other, rtol=tolerance, atol=tolerance) and (
            tolerance > 0 or torch.equal(one, other)
        )


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def accumulated(pair: Any, model: Any) -> None:
    for syncs in (False, False, True):
        model.set_requires_gradient_sync(syncs)
        pair.loss(model).backward()


def without_a_wait(pair: Any, model: Any) -> None:
    """Let the first of two backwards, each of which is a step, not wait for its reductions."""
    for is_last in (False, True):
        model.set_is_last_backward(is_last or model is pair.models[1])
        pair.loss(model).backward()
        if model is pair.models[1]:
            pair.optimizers[1].step()
            pair.optimizers[1].zero_grad()


def _models() -> None:
    Pair(make=in_groups).train()
    Pair(OtherExperts).train()


def _more_models() -> None:
    Pair().train()
    Pair(make=sgd).train()
    Pair(FewRows).train()
    Pair(UnusedParameters).train()
    Pair(FrozenBesideTrainable).train()


def _all_settings() -> None:
    Pair(reshard_after_forward=False).train()
    Pair(bucket_bytes=10**6).train()
    Pair(bucket_bytes=0, max_message_bytes=200).train()
    rounded = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    Pair(OtherExperts, bucket_bytes=0, max_message_bytes=200, mp_policy=rounded).train()
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    Pair(mp_policy=half).train()
    pair = Pair()
    for model in pair.models:
        model.set_reduce_scatter_unused_params(True)
    pair.train()


def _transports() -> None:
    Pair(transport="process_group").train()
    _clip_by_unit(2.0, OtherExperts, transport="process_group")


def _accumulation() -> None:
    Pair().train(backward=accumulated)
    Pair(OtherExperts).train(backward=accumulated)


def _two_backwards() -> None:
    Pair().train(3, without_a_wait)


def _replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    Pair(mesh=mesh).train()
    Pair(OtherExperts, mesh=mesh).train()


def _state_dicts_and_schedulers() -> None:
    pair = Pair()
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in pair.optimizers]
    pair.train(2)
    for scheduler in schedulers:
        scheduler.step()
    pair.train(2)
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in pair.optimizers]
    for optimizer, state in zip(pair.optimizers, reversed(states), strict=True):
        optimizer.load_state_dict(state)
    pair.train(2)
    weights = copy.deepcopy(pair.models[1].state_dict())
    for model in pair.models:
        model.load_state_dict({name: value * 0.5 for name, value in weights.items()})
    pair.train(2)


def _other_parameters_keep_their_gradients() -> None:
    """One optimizer is attached, and another one steps the other parameters after backward."""
    pair = Pair(make=lambda parameters: adam([each for each in parameters if each.ndim == 2]))
    others = [
        SGD([each for each in model.parameters() if each.ndim == 1], lr=0.1, foreach=True)
        for model in pair.models
    ]
    pair.train(3, step=lambda number: others[number].step(), left=lambda param: param.ndim == 1)


def _a_part_of_a_model() -> None:
    """Units that are not attached are stepped by step()."""
    pair = Pair()
    model = Stack().to(device())
    for unit in model.units():
        fully_shard(unit)
    fully_shard(model)
    optimizer = adam(model.parameters())
    optimizer.attach(model.blocks[0])
    optimizer.attach(model.blocks[2])
    torch.manual_seed(0)
    model.load_state_dict(copy.deepcopy(pair.models[1].state_dict()))
    pair.models[0], pair.optimizers[0] = model, optimizer
    stepped = {*model.blocks[0].parameters(), *model.blocks[2].parameters()}
    pair.train(3, left=lambda param: param not in stepped)


def _groups_may_be_added() -> None:
    pair = Pair(make=lambda parameters: adam([each for each in parameters if each.ndim == 2]))
    pair.train(2, left=lambda param: param.ndim == 1)
    for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
        vectors = [param for param in model.parameters() if param.ndim == 1]
        optimizer.add_param_group({"params": vectors, "lr": 0.02})
    pair.train(3, left=lambda param: param.ndim == 1)


def _groups_may_change_places() -> None:
    pair = Pair(make=in_groups)
    pair.train(2)
    for optimizer in pair.optimizers:
        optimizer.param_groups.reverse()
    pair.train(2)
    for optimizer in pair.optimizers:  # parameters change places within lists of the same lengths
        (first, second) = (group["params"] for group in optimizer.param_groups)
        first[0], second[0] = second[0], first[0]
    pair.train(2)


class _Stages(Stack):
    """Runs some of its blocks."""

    stages = (0, 1)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = self.blocks[stage](x)
        return self.head(x).float()


def _groups_may_change_before_backwards_of_other_units() -> None:
    pair = Pair(_Stages, make=in_groups, bucket_bytes=0)
    pair.train(1)
    for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
        first, second = (group["params"] for group in optimizer.param_groups)
        own = set(model.blocks[2].parameters())
        first[:], second[:] = (
            [each for each in first if each not in own],
            [*second, *(each for each in first if each in own)],
        )
        model.stages = (2,)
    pair.train(1)
    for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, device=device()))]})
        model.stages = (1,)
    pair.train(1)


def _gradients_of_others_are_stepped_by_step() -> None:
    """step() steps gradients that no backward has brought, as torch's state dicts need."""
    pair = Pair()
    for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
        for number, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, 0.1 * number)
        optimizer.step()
        optimizer.zero_grad()
    pair.compare()
    pair.train(2)
    states = [
        get_optimizer_state_dict(model, optimizer)
        for model, optimizer in zip(pair.models, pair.optimizers, strict=True)
    ]
    fresh = Pair()
    for model, optimizer, state in zip(fresh.models, fresh.optimizers, states, strict=True):
        set_optimizer_state_dict(model, optimizer, copy.deepcopy(state))
    assert len(fresh.optimizers[0].state) == len(list(fresh.models[0].parameters()))
    fresh.train(2)


def _optimizers_may_be_detached() -> None:
    pair = Pair()
    pair.train(2)
    pair.optimizers[0].detach()
    clip = partial(fsdp_ext.clip_grad_norm_, max_norm=1.0)
    pair.train(2, step=lambda number: clip(pair.models[number]), left=lambda param: True)
    pair.optimizers[0].attach(pair.models[0])
    pair.train(2)


class Teacher(Stack):
    """A checkpoint runs some blocks without gradients first, and again with them."""

    def forward(self, x: Tensor) -> Tensor:
        def segment(x: Tensor) -> Tensor:
            with torch.no_grad():
                hint = self.blocks[1](x)
            return self.blocks[0](x) + hint

        x = checkpoint(segment, self.stem(x), use_reentrant=False)
        return self.head(self.blocks[1](x))


def _early_reductions_without_gradients() -> None:
    Pair(Teacher).train()
    Pair(Teacher, bucket_bytes=0).train()


class ClipByLastNorm:
    """Clips a pair's second model by the norm of the step before, after its backward."""

    def __init__(self, pair: Pair, max_norm: float, norm_type: float, last_norm: float = 0.0):
        self.pair = pair
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.last = torch.tensor(last_norm)

    def __call__(self, number: int) -> None:
        if number == 0:
            return
        params = list(self.pair.models[1].parameters())
        norm = fsdp_ext.clip_grad_norm_(params, math.inf, self.norm_type)
        scale = (self.max_norm / (self.last + 1e-6)).clamp(max=1.0)
        for param in params:
            if param.grad is not None:
                param.grad.to_local().mul_(scale)
        found = self.pair.optimizers[0].grad_norm
        if found.isfinite():
            torch.testing.assert_close(found, norm, rtol=1e-6, atol=0)  # units are summed first
            self.last = found


def _clip(norm_type: float, *args: Any, **options: Any) -> None:
    clipping = {"max_norm": 1e-3, "norm_type": norm_type}
    pair = Pair(*args, clipping=clipping, **options)
    clip = ClipByLastNorm(pair, **clipping)
    pair.train(step=clip)
    assert float(clip.last) > 1e-3, "nothing was clipped"


def _clipping() -> None:
    for norm_type in (math.inf, 2.0, 1.0):
        _clip(norm_type)
    _clip(2.0, make=sgd, bucket_bytes=0)
    _clip(2.0, OtherExperts, make=in_groups)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    _clip(2.0, mp_policy=half)


class OtherGradients(Stack):
    def __init__(self) -> None:
        super().__init__()
        for param in [*self.parameters()][::2]:
            param.grad_dtype = torch.float64


def _clipping_of_gradients_in_another_dtype() -> None:
    _clip(2.0, OtherGradients, make=sgd)
    _clip_by_unit(2.0, OtherGradients)


def _clipping_with_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _clip(2.0, OtherExperts, mesh=mesh)


def _clipping_of_tensor_parallel_parameters() -> None:
    """Parameters that lie side by side are sharded over different ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    _clip(2.0, lambda: parallelize_module(Stack(), mesh["tp"], plan), mesh=mesh["shard"])


def _clipping_goes_on_after_a_checkpoint() -> None:
    clipping = {"max_norm": 1e-3, "norm_type": 2.0, "last_norm": 0.7}
    pair = Pair(clipping=clipping)
    pair.train(2, step=ClipByLastNorm(pair, **clipping))


def _clipping_counts_what_step_steps() -> None:
    """Gradients of units that are not attached are clipped by step()."""
    clipping = {"max_norm": 1e-3, "norm_type": 2.0}
    pair = Pair()
    pair.optimizers[0].detach()
    for block in pair.models[0].blocks[:2]:
        pair.optimizers[0].attach(block, **clipping)
    stepped = {param for block in pair.models[0].blocks[:2] for param in block.parameters()}
    clip = ClipByLastNorm(pair, **clipping)
    pair.train(step=clip, left=lambda param: param not in stepped)
    pair.optimizers[0].step()  # without gradients: the next step clips as before
    pair.train(1, step=clip, left=lambda param: param not in stepped)


def _clipping_after_a_failed_backward() -> None:
    """step() ends the failed step. Then the same weights have the same norm as without it."""
    (model, other), (optimizer, _) = _failing(clipping={"max_norm": 1e-3})
    optimizer.step()
    model.load_state_dict(copy.deepcopy(other.state_dict()))
    args, kwargs = model.batch(torch.Generator().manual_seed(0))
    for each in (model, other):
        each.loss(each(*args, **kwargs)).backward()
    optimizer.step()
    norm = fsdp_ext.clip_grad_norm_(other, math.inf)
    torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-6, atol=0)


class ClipByUnit:
    """Clips each unit of a pair's second model by the norm of its whole gradients."""

    def __init__(self, pair: Pair, max_norm: float, norm_type: float) -> None:
        self.pair = pair
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scales: list[float] = []
        self.units = units_below(pair.models[1])  # those that are clipped

    def __call__(self, number: int) -> None:
        if number == 0:
            return
        norms = []
        for unit in self.units:
            grads: list[Any] = [param.sharded.grad for param in unit.params]
            grads = [grad for grad in grads if grad is not None]
            if grads:
                whole = torch.cat([grad.full_tensor().float().flatten() for grad in grads])
                norms.append(torch.linalg.vector_norm(whole, self.norm_type))
                scale = (self.max_norm / (norms[-1] + 1e-6)).clamp(max=1.0)
                self.scales.append(float(scale))
                for grad in grads:
                    grad.to_local().mul_(scale)
        norm = torch.linalg.vector_norm(torch.stack(norms), self.norm_type)
        torch.testing.assert_close(self.pair.optimizers[0].grad_norm.float(), norm)


def _clip_by_unit(
    norm_type: float,
    subject: Callable[[], Subject] = Stack,
    backward: Callable[[Any, Any], None] | None = None,
    **options: Any,
) -> None:
    clipping = {"max_norm": 0.2, "norm_type": norm_type}
    asked = {**clipping, "clip_by": "unit"}
    pair = Pair(subject, sgd, asked, **{"tolerance": 1e-5, **options})
    clip = ClipByUnit(pair, **clipping)
    pair.train(step=clip, backward=backward)
    assert min(clip.scales) < 0.9, "nothing was clipped"


def _clipping_by_unit() -> None:
    for norm_type in (math.inf, 2.0, 1.0):
        _clip_by_unit(norm_type)
    _clip_by_unit(2.0, OtherExperts)
    _clip_by_unit(2.0, OtherExperts, bucket_bytes=0, max_message_bytes=200)
    _clip_by_unit(2.0, OtherExperts, bucket_bytes=10**6)
    _clip_by_unit(2.0, FewRows)
    _clip_by_unit(2.0, backward=accumulated)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    _clip_by_unit(2.0, mp_policy=half)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    _clip_by_unit(2.0, lambda: Stack().to(torch.bfloat16), mp_policy=half, tolerance=1e-2)


def _clipping_by_unit_with_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _clip_by_unit(2.0, mesh=mesh)
    _clip_by_unit(2.0, OtherExperts, mesh=mesh, bucket_bytes=0)


def _clipping_by_unit_over_several_meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    _clip_by_unit(2.0, lambda: parallelize_module(Stack(), mesh["tp"], plan), mesh=mesh["shard"])

    def with_expert() -> Subject:
        model = Stack()
        fully_shard(model.blocks.pop(1), mesh=mesh["shard"])
        return model

    _clip_by_unit(2.0, with_expert)


def _clipping_by_unit_may_end_and_begin() -> None:
    clipping = {"max_norm": 0.2, "norm_type": 2.0}
    asked = {**clipping, "clip_by": "unit", "skip_nonfinite": True}
    pair = Pair(make=sgd, clipping=asked, tolerance=1e-5)
    clip = ClipByUnit(pair, **clipping)
    pair.train(2, step=clip)
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in pair.optimizers]
    for optimizer, state in zip(pair.optimizers, reversed(states), strict=True):
        optimizer.load_state_dict(state)
    pair.train(1, step=clip)
    pair.optimizers[0].detach()
    pair.train(1, left=lambda param: True)
    for block in pair.models[0].blocks[:2]:  # step() does not clip the others
        pair.optimizers[0].attach(block, **asked)
    stepped = {param for block in pair.models[0].blocks[:2] for param in block.parameters()}
    clip.units = [unit for block in pair.models[1].blocks[:2] for unit in units_below(block)]
    pair.train(2, step=clip, left=lambda param: param not in stepped)
    assert min(clip.scales) < 0.9, "nothing was clipped"


class PoisonedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, param: Tensor, poison: float) -> Tensor:
        ctx.param, ctx.poison = param, poison
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        poisoned = torch.zeros_like(ctx.param)
        poisoned[-1] = ctx.poison  # in the last rank's shard
        return gradients[0], poisoned, None


class Poisoned(Stack):
    """The gradient of one parameter of one unit is what the test chooses."""

    poison = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].poisoned = nn.Parameter(torch.ones(6, device=device()))
        self.blocks[1].register_forward_hook(self.poisoned)

    def poisoned(self, block: Any, args: Any, x: Tensor) -> Any:
        return PoisonedGradient.apply(x, block.poisoned, self.poison)


class DropUnit:
    """Drops the gradients of one unit of a pair's second model if a rank poisons it."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def poison(self, poison: float) -> None:
        """Let the last rank have this gradient of the unit in both models."""
        self.poisons = not math.isfinite(poison)
        if dist.get_rank() == dist.get_world_size() - 1:
            for model in self.pair.models:
                model.poison = poison

    def __call__(self, number: int) -> None:
        if number == 1 and self.poisons:
            for param in self.pair.models[1].blocks[1].parameters():
                param.grad = None


def _units_with_nonfinite_gradients_are_skipped() -> None:
    fused = partial(AdamW, lr=0.01)
    makers = [fused, partial(SGD, lr=0.05, momentum=0.9)]
    if device().type == "cpu":  # GPUs need fused code
        makers += [adam, partial(SGD, lr=0.05, momentum=0.9, dampening=0.1)]
    by_unit = {"max_norm": 1e6, "norm_type": math.inf, "clip_by": "unit"}  # clips nothing
    for make, clipping in [*((make, {}) for make in makers), (fused, by_unit)]:
        pair = Pair(Poisoned, make, {**clipping, "skip_nonfinite": True}, bucket_bytes=0)
        drop = DropUnit(pair)
        for poison in (0.5, math.nan, math.inf, 0.5):
            drop.poison(poison)
            before = copy.deepcopy(pair.models[0].blocks[1].state_dict())
            pair.train(1, step=drop)
            after = pair.models[0].blocks[1].state_dict()
            is_skipped = all(
                torch.equal(before[name].to_local(), after[name].to_local()) for name in before
            )
            assert is_skipped == (not math.isfinite(poison))
            assert pair.optimizers[0].grad_norm.isfinite() == math.isfinite(poison)


def _a_nonfinite_norm_clips_no_other_step() -> None:
    clipping = {"max_norm": 1e-3, "norm_type": 2.0}
    pair = Pair(Poisoned, clipping={**clipping, "skip_nonfinite": True}, bucket_bytes=0)
    drop, clip = DropUnit(pair), ClipByLastNorm(pair, **clipping)

    def step(number: int) -> None:
        drop(number)
        clip(number)

    for poison in (0.5, math.nan, 0.5):
        drop.poison(poison)
        pair.train(1, step=step)
    assert float(clip.last) > 1e-3, "nothing was clipped"


def _gradient_penalties() -> None:
    def of_inputs(pair: Any, model: Any) -> None:
        inputs: list[Tensor] = []
        handle = model.register_forward_pre_hook(
            lambda module, args: inputs.append(args[0].requires_grad_())
        )
        loss = pair.loss(model)
        handle.remove()
        (grad,) = torch.autograd.grad(loss, inputs, create_graph=True)
        (loss + grad.square().sum()).backward()

    Pair().train(backward=of_inputs)
    Pair().train(backward=lambda pair, model: pair.loss(model).backward(create_graph=True))


def _checked_steps() -> None:
    Pair(check_every=1).train(3)


@pytest.mark.parametrize(
    ("work", "ranks"),
    [
        (_models, 2),
        (_all_settings, 2),
        (_transports, 2),
        (_accumulation, 2),
        (_two_backwards, 2),
        (_replicas, 4),
        (_state_dicts_and_schedulers, 2),
        (_other_parameters_keep_their_gradients, 2),
        (_a_part_of_a_model, 2),
        (_groups_may_be_added, 2),
        (_groups_may_change_places, 2),
        (_groups_may_change_before_backwards_of_other_units, 2),
        (_gradients_of_others_are_stepped_by_step, 2),
        (_optimizers_may_be_detached, 2),
        (_early_reductions_without_gradients, 2),
        (_gradient_penalties, 2),
        (_checked_steps, 2),
        (_clipping, 2),
        (_clipping_of_gradients_in_another_dtype, 2),
        (_clipping_with_replicas, 4),
        (_clipping_of_tensor_parallel_parameters, 4),
        (_clipping_goes_on_after_a_checkpoint, 2),
        (_clipping_counts_what_step_steps, 2),
        (_clipping_after_a_failed_backward, 2),
        (_clipping_by_unit, 2),
        (_clipping_by_unit_with_replicas, 4),
        (_clipping_by_unit_over_several_meshes, 4),
        (_clipping_by_unit_may_end_and_begin, 2),
        (_units_with_nonfinite_gradients_are_skipped, 2),
        (_a_nonfinite_norm_clips_no_other_step, 2),
        pytest.param(_more_models, 2, marks=pytest.mark.exhaustive),
        pytest.param(_more_models, 3, marks=pytest.mark.exhaustive),
        pytest.param(_all_settings, 1, marks=pytest.mark.exhaustive),
    ],
)
def test_steps_in_backward_are_those_after_backward(work: Callable[[], None], ranks: int) -> None:
    run_ranks(work, ranks)


def _two_models_in_a_group() -> None:
    """One backward runs through both models. Results equal those of PyTorch's optimizer."""
    found = []
    for make, attaches in ((torch.optim.AdamW, False), (AdamW, False), (AdamW, True)):
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)) for _ in range(2)]
        for model in models:
            fully_shard(model[0])
            fully_shard(model)
        params = [param for model in models for param in model.parameters()]
        optimizer: Any = make(params, lr=0.01, foreach=True)
        for model in models if attaches else ():
            optimizer.attach(model)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            models[1](models[0](torch.randn(4, 6, generator=generator))).sin().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([whole(param) for param in params])
    for ours in found[1:]:
        assert all(map(torch.equal, ours, found[0]))


def test_parameters_of_two_models_may_share_a_group() -> None:
    run_ranks(_two_models_in_a_group, 2)


# - Errors


def _errors_say_what_is_wrong() -> None:
    pair = Pair()
    model, optimizer = pair.models[0], pair.optimizers[0]
    with pytest.raises(RuntimeError, match="Attach one optimizer to each unit, once"):
        optimizer.attach(model)
    with pytest.raises(ValueError, match="without sharded parameters of this optimizer"):
        optimizer.attach(nn.Linear(2, 2))
    pair.train(1)
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0, "PyTorch's finds no gradients"
    for refused in (fsdp_ext.health, partial(fsdp_ext.clip_grad_norm_, max_norm=1.0)):
        with pytest.raises(RuntimeError, match="gradients no longer exist"):
            refused(model)
    with pytest.raises(ValueError, match="has an attached optimizer"):
        fsdp_ext.tune(model, torch.ones(4, 10))
    with pytest.raises(TypeError, match=r"Pass the model, a torch\.nn\.Module"):
        optimizer.attach([model])
    hooked = Stack()
    fully_shard(hooked)
    next(hooked.parameters()).register_post_accumulate_grad_hook(lambda param: None)
    with pytest.raises(ValueError, match="would find no gradient"):
        adam(hooked.parameters()).attach(hooked)
    flat = fsdp_ext.FullyShardedDataParallel(Stack(), use_orig_params=False)
    with pytest.raises(ValueError, match="has a flat parameter"):
        adam(flat.parameters()).attach(flat)
    extended = Setup().model(fully_shard)
    with pytest.raises(ValueError, match="has tensor extensions"):
        adam(param for param in extended.parameters() if param.requires_grad).attach(extended)
    offloaded = Stack()
    with pytest.MonkeyPatch.context() as patched:  # treats the CPU as a GPU
        patched.setitem(vars(entry), "resolve_offload", lambda policy, device: True)
        fully_shard(offloaded, offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(ValueError, match="has its shards on the host"):
        adam(offloaded.parameters()).attach(offloaded)
    muon = Muon([param for param in model.parameters() if param.ndim == 2])
    with pytest.raises(NotImplementedError, match=r"Muon cannot be attached.* Call step\(\) after"):
        muon.attach(model)


def _an_error_in_a_step_is_raised_by_backward() -> None:
    pair = Pair()
    pair.train(2)
    model, optimizer = pair.models[0], pair.optimizers[0]
    betas = optimizer.param_groups[0]["betas"]
    optimizer.param_groups[0]["betas"] = None
    loss = pair.loss(model)
    with pytest.raises(TypeError):
        loss.backward()
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
    optimizer.param_groups[0]["betas"] = betas
    # No unit has stepped, and the next forward finds no gradient of that backward.
    with torch.no_grad():
        pair.loss(model)
    assert all(param.grad is None for param in model.parameters())
    for _ in range(2):
        pair.loss(pair.models[1])
    pair.train(2)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ValueError("a fault of the test")


def _failing(**options: Any) -> tuple[list[Any], list[Any]]:
    """Return a pair's models and optimizers after a backward of the first one has failed."""
    pair = Pair(bucket_bytes=0, **options)
    model = pair.models[0]
    args, kwargs = model.batch(torch.Generator().manual_seed(0))
    handle = model.blocks[0].register_forward_hook(lambda module, args, out: Failing.apply(out))
    with pytest.raises(ValueError, match="a fault of the test"):
        model.loss(model(*args, **kwargs)).backward()
    handle.remove()
    return pair.models, pair.optimizers


class Deep(Stack):
    """Eight blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.extend(type(self.blocks[0])() for _ in range(5))


def _a_failed_backward_steps_units_once_or_not() -> None:
    pair = Pair(Deep, bucket_bytes=0)
    pair.train(1)
    (model, other), (optimizer, _) = pair.models, pair.optimizers

    def values(model: Any, optimizer: Any) -> list[list[Tensor]]:
        """Return the parameters and states of each block, and of the root."""
        return [
            [
                _local(value).clone()
                for param in (each.sharded for each in unit.params)
                for value in (param, *optimizer.state[param].values())
            ]
            for unit in units_below(model)
        ]

    before = values(model, optimizer)
    handle = model.blocks[3].register_forward_hook(lambda module, args, out: Failing.apply(out))
    loss = pair.loss(model)
    with pytest.raises(ValueError, match="a fault of the test"):
        loss.backward()
    handle.remove()
    after = values(model, optimizer)
    pair.loss(other).backward()
    pair.optimizers[1].step()
    stepped = values(other, pair.optimizers[1])
    modules = [unit.modules[0] for unit in units_below(model)]
    for module, *of_unit in zip(modules, before, after, stepped, strict=True):
        old, now, new = of_unit
        has_stepped = module in [*model.blocks[6:]]
        assert all(map(torch.equal, now, new if has_stepped else old)), module


def _a_failed_backward_leaves_no_gradients() -> None:
    """Units whose gradients were reduced before the failure have stepped, or lose them."""
    model = Pair(bucket_bytes=0).models[0]
    args, kwargs = model.batch(torch.Generator().manual_seed(0))
    handle = model.blocks[0].register_forward_hook(lambda module, args, out: Failing.apply(out))
    for _ in range(2):
        loss = model.loss(model(*args, **kwargs))
        with pytest.raises(ValueError, match="a fault of the test"):
            loss.backward()
        with torch.no_grad():
            model(*args, **kwargs)
        assert all(param.grad is None for param in model.parameters())
    handle.remove()
    model.loss(model(*args, **kwargs)).backward()


def _backward_of_other_weights_is_refused() -> None:
    model = Pair().models[0]
    args, kwargs = model.batch(torch.Generator().manual_seed(0))
    loss = model.loss(model(*args, **kwargs))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="Run one backward for each forward"):
        loss.backward()


def _bad_norms_are_refused() -> None:
    pair = Pair(clipping={"max_norm": 1.0})
    model, optimizer = pair.models[0], pair.optimizers[0]
    pair.loss(model).backward()
    loss = pair.loss(model)
    with pytest.raises(RuntimeError, match=r"Call step\(\) after each backward"):
        loss.backward()
    optimizer.step()
    pair.loss(model).backward()
    optimizer.detach()
    assert optimizer.grad_norm is None
    for name in ("max_norm", "last_norm"):
        with pytest.raises(TypeError, match=f"attach got {name}='one'"):
            optimizer.attach(model, **{"max_norm": 1.0, name: "one"})
    with pytest.raises(ValueError, match=r"attach got last_norm=-1\.0\. Pass the grad_norm"):
        optimizer.attach(model, max_norm=1.0, last_norm=-1.0)
    with pytest.raises(ValueError, match="attach got last_norm without max_norm"):
        optimizer.attach(model, last_norm=1.0)
    for last_norm in (math.inf, math.nan):
        with pytest.raises(ValueError, match="a finite number"):
            optimizer.attach(model, max_norm=1.0, last_norm=last_norm)
    with pytest.raises(ValueError, match="Pass 'last_step' or 'unit'"):
        optimizer.attach(model, max_norm=1.0, clip_by="all")
    with pytest.raises(TypeError, match="skip_nonfinite='yes'"):
        optimizer.attach(model, skip_nonfinite="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="attach got clip_by='unit' without max_norm"):
        optimizer.attach(model, clip_by="unit")
    with pytest.raises(ValueError, match="Leave out one of them"):
        optimizer.attach(model, max_norm=1.0, last_norm=1.0, clip_by="unit")
    with pytest.raises(ValueError, match="attach got norm_type=0"):
        optimizer.attach(model, max_norm=1.0, norm_type=0)
    optimizer.attach(model.blocks[0], max_norm=1.0)
    with pytest.raises(
        ValueError, match=r"attach got \(max_norm=2\.0, norm_type=2\.0\), but anoth"
    ):
        optimizer.attach(model.blocks[1], max_norm=2.0)
    with pytest.raises(ValueError, match=r"attach got \(\), but another .* \(max_norm=1\.0, norm"):
        optimizer.attach(model.blocks[1])


def _ranks_have_to_attach_alike() -> None:
    pair = Pair()
    model, optimizer = pair.models[0], pair.optimizers[0]
    optimizer.detach()
    options: list[dict[str, Any]] = [{}, {"max_norm": 1.0}]
    if dist.get_rank() == 1:
        options.reverse()
    for own in options:
        with pytest.raises(RuntimeError, match=r"called attach\(\)") as raised:
            optimizer.attach(model, **own)
        raised.match(r"called attach\(max_norm=1\.0, norm_type=2\.0\) for ")
    inner: Any = model.blocks[0] if dist.get_rank() == 1 else model
    with pytest.raises(RuntimeError, match=r"called attach\(\) for \d+ units"):
        optimizer.attach(inner)
    optimizer.attach(model)
    pair.train(1)


def _an_attach_that_fails_attaches_nothing() -> None:
    pair = Pair()
    model, optimizer = pair.models[1], pair.optimizers[1]
    changes = []

    def change(units: Any, **settings: Any) -> None:
        changes.append(settings["update"])
        if len(changes) == 2:
            raise ValueError("a fault of the test")
        setting_changes.change(units, **settings)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(flat_step, "change", change)
        with pytest.raises(ValueError, match="a fault of the test"):
            optimizer.attach(model, max_norm=1e-3)
    pair.train(1)  # the second optimizer steps after backward, and does not clip


def _a_gradient_scaler_is_refused() -> None:
    pair = Pair(make=partial(AdamW, foreach=True))
    model, optimizer = pair.models[0], pair.optimizers[0]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(pair.loss(model)).backward()
    with pytest.raises(RuntimeError, match="scaled gradients"):
        scaler.step(optimizer)


@pytest.mark.parametrize(
    "work",
    [
        _errors_say_what_is_wrong,
        _an_error_in_a_step_is_raised_by_backward,
        _a_failed_backward_leaves_no_gradients,
        _a_failed_backward_steps_units_once_or_not,
        _backward_of_other_weights_is_refused,
        _a_gradient_scaler_is_refused,
        _bad_norms_are_refused,
        _ranks_have_to_attach_alike,
        _an_attach_that_fails_attaches_nothing,
    ],
)
def test_errors(work: Callable[[], None]) -> None:
    run_ranks(work, 2)
