"""Programs that few write, with the results of PyTorch."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.parity import device, load_system, whole
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from fsdp_ext import fully_shard, register_fsdp_forward_method

WIDTH = 64


class Tied(nn.Module):
    """Takes its embeddings from the rows of its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def penalty(model: nn.Module) -> Any:
    total = sum(param.square().sum() for param in model.parameters())
    return total.full_tensor() if hasattr(total, "full_tensor") else total


def penalised(model: Any, x: Tensor, hooked: bool) -> Tensor:
    """Return a loss whose penalty comes first in the graph, so that backward reaches it last."""
    if hooked:  # a hook of the user's replaces what fsdp_ext has put on the parameter
        for param in model.parameters():
            if not param._backward_hooks:
                param.register_hook(lambda grad: grad)
    own = 0.1 * penalty(model)
    loss: Tensor = model(x).square().mean() + own
    return loss


def embedded(model: Any, x: Tensor, hooked: bool) -> Tensor:
    weight = whole_weight(model.head.weight)
    loss: Tensor = model(weight[x[:, 0].abs().long()]).square().mean()
    return loss


def whole_weight(weight: Any) -> Tensor:
    full: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return full


def gradients(
    system: Callable[..., Any] | None, loss: Callable[..., Tensor], hooked: bool, **options: Any
) -> list[Tensor]:
    torch.manual_seed(0)
    model = Tied().to(device())
    if system is not None:
        for module in (model.body, model.head, model):
            system(module, **options)
    seen = []
    for step in range(3):
        model.zero_grad()
        for part in range(2):  # the second backward adds to gradients that are there
            generator = torch.Generator().manual_seed(10 * step + part)
            x = torch.randn(8, WIDTH, generator=generator).to(device())
            loss(model, x, hooked).backward()
        seen += [whole(param.grad).clone() for param in model.parameters()]
    return seen


def compare(loss: Callable[..., Tensor], hooked: bool, replicas: bool) -> None:
    options = {}
    if replicas:
        options["mesh"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    expected = gradients(None, loss, hooked)
    for mine, want in zip(gradients(fully_shard, loss, hooked, **options), expected, strict=True):
        torch.testing.assert_close(mine, want)


@pytest.mark.parametrize("replicas", [False, True], ids=["sharded", "replicated"])
@pytest.mark.parametrize(("loss", "hooked"), [(penalised, False), (penalised, True)])
def test_a_penalty_on_weights_may_come_before_forward(
    loss: Callable[..., Tensor], hooked: bool, replicas: bool
) -> None:
    run_ranks(compare, 2, loss, hooked, replicas)


def test_a_weight_may_be_used_whole_before_forward() -> None:
    run_ranks(compare, 2, embedded, False, False)


class Conjugate(nn.Module):
    """Its gradients have autograd's negative bit, because a complex number is conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imag = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.complex(self.real, self.imag).conj() * x).imag.sum()


def _conjugated() -> None:
    grads = []
    for system in (fully_shard, torch_fully_shard):
        model: Any = Conjugate()
        system(model)
        model(torch.ones(5, dtype=torch.complex64)).backward()
        grads.append([whole(param.grad) for param in model.parameters()])
    assert all(map(torch.equal, *grads))
    assert grads[0][1].item() == -5


def test_gradients_with_the_negative_bit_keep_their_sign() -> None:
    run_ranks(_conjugated, 2)


def _one_rank_steps_a_probe() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    for layer in [*model, model]:
        fully_shard(layer)
    probe = nn.Linear(WIDTH, 2)
    optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
    for step in range(4):
        y = model(torch.ones(2, WIDTH))
        if dist.get_rank() == 0 and step > 1:
            probe(y.detach()).sum().backward()
            optimizer.step()
        y.sum().backward()


def test_an_optimizer_of_another_model_may_step_on_one_rank() -> None:
    run_ranks(_one_rank_steps_a_probe, 2)


def _steps_local_tensors() -> None:
    """An optimizer may hold the tensors in the DTensors."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in [*model, model]:
        fully_shard(layer, reshard_after_forward=False)
    x = torch.ones(2, 4)
    model(x).sum().backward()
    params: Any = list(model.parameters())
    local = [param.to_local().detach() for param in params]
    for tensor, param in zip(local, params, strict=True):
        tensor.grad = param.grad.to_local()
    optimizer = torch.optim.SGD(local, lr=1.0)
    with torch.no_grad():
        before = model(x)
        optimizer.step()
        assert not torch.equal(model(x), before)


def test_an_optimizer_may_step_local_tensors() -> None:
    run_ranks(_steps_local_tensors, 2)


def _one_replica_evaluates_more() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    for layer in [*model, model]:
        fully_shard(layer, mesh=mesh)
    x = torch.ones(2, WIDTH)
    for step in range(4):
        model.zero_grad()
        model(x).square().mean().backward()
        if mesh.get_local_rank("replicate") == 0 and step > 0:
            with torch.no_grad():
                model(x)
            model.state_dict()


def test_one_replica_may_evaluate_more_batches() -> None:
    run_ranks(_one_replica_evaluates_more, 4)


def _a_unit_is_removed() -> None:
    model: Any = Tied()
    for module in (model.body, model.head, model):
        fully_shard(module)
    x = torch.ones(2, WIDTH)
    model(x).sum().backward()
    model.head = nn.Identity()
    model.body.bias.requires_grad_(False)
    model.zero_grad()
    model(x).sum().backward()
    assert model.body.bias.grad is None
    assert model.body.weight.grad is not None


def test_a_unit_may_be_removed_before_the_schedule_is_made_anew() -> None:
    run_ranks(_a_unit_is_removed, 2)


class Sampler(Tied):
    """Its method is a forward around forward, and uses parameters of the root unit."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))

    def sample(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self(x))
        return result


def _samples() -> None:
    model: Any = Sampler()
    fully_shard(model.body)
    fully_shard(model)
    register_fsdp_forward_method(model, "sample")
    x = torch.ones(2, WIDTH)
    model.sample(x).sum().backward()
    assert model.head.weight.grad is not None
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        model.sample(x)
    with torch.no_grad():
        hidden = model(x)
        model.unshard()
        model.head(hidden)
    model.sample(x).sum().backward()


def test_a_method_around_forward_needs_gradients() -> None:
    run_ranks(_samples, 2)


def _a_failed_forward_between_backwards() -> None:
    model: Any = Tied()
    for module in (model.body, model.head, model):
        fully_shard(module)
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, WIDTH)).sum().backward()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 3))
    model.body.set_gradient_divide_factor(3.0)


def test_a_divide_factor_may_change_after_a_failed_forward() -> None:
    run_ranks(_a_failed_forward_between_backwards, 2)


class Recursive(Tied):
    """Calls itself once. The root unit has the parameters of ``head``."""

    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        x = self.head(torch.tanh(self.body(x)))
        return x if depth == 0 else self(x, depth - 1)


def _recursion() -> None:
    model: Any = Recursive()
    fully_shard(model.body)
    fully_shard(model)
    found = model(torch.ones(2, WIDTH)).sum()
    with pytest.raises(RuntimeError, match="was read while it is freed"):
        found.backward()
    model(torch.ones(2, WIDTH), 0).sum().backward()


def test_a_root_module_cannot_call_itself() -> None:
    run_ranks(_recursion, 2)


class Watched(Tied):
    """A hook on the output of ``body`` uses its weight."""

    unshards = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        x.register_hook(self.scaled)
        result: Tensor = self.head(x)
        return result

    def scaled(self, grad: Tensor) -> Tensor:
        body: Any = self.body
        if self.unshards:
            body.unshard()
        return grad * body.weight.norm(dim=0).detach()


def _a_hook_uses_a_weight() -> None:
    torch.manual_seed(0)
    model, expected = Watched(), Watched()
    expected.load_state_dict(model.state_dict())
    expected(torch.ones(2, WIDTH)).sum().backward()
    for module in (model.body, model.head, model):
        fully_shard(module)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        model(torch.ones(2, WIDTH)).sum().backward()
    model.unshards = True
    model.zero_grad()
    model(torch.ones(2, WIDTH)).sum().backward()
    for mine, want in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), want.grad)


def test_a_hook_on_a_units_output_unshards_the_unit_that_it_uses() -> None:
    run_ranks(_a_hook_uses_a_weight, 2)


@contextlib.contextmanager
def deferred_reshard(module: Any) -> Iterator[None]:
    """Keep a unit unsharded in a part of backward, as axolotl's tiled MLP does."""
    group = module._get_fsdp_state()._fsdp_param_group
    before = group.reshard_after_backward
    module.set_reshard_after_backward(False, recurse=False)
    try:
        yield
    finally:
        module.set_reshard_after_backward(before, recurse=False)
        module.reshard()


class InTiles(torch.autograd.Function):
    """Runs a module in tiles, and runs each again in backward, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, module: Any, x: Tensor) -> Tensor:
        ctx.module, ctx.params = module, list(module.parameters())
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([module.on_tile(tile) for tile in x.chunk(2)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        sums, of_inputs = [torch.zeros_like(param) for param in ctx.params], []
        with deferred_reshard(ctx.module):
            for tile, grad in zip(x.chunk(2), grads[0].chunk(2), strict=True):
                leaf = tile.detach().requires_grad_()
                with torch.enable_grad():
                    output = ctx.module.on_tile(leaf)
                torch.autograd.backward(output, grad)
                of_inputs.append(leaf.grad)
                for param, total in zip(ctx.params, sums, strict=True):
                    total.add_(param.grad)
                    param.grad = None
        for param, total in zip(ctx.params, sums, strict=True):
            param.grad = total
        return None, torch.cat(of_inputs)


class Tiled(Tied):
    in_tiles = True

    def on_tile(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = InTiles.apply(self, x) if self.in_tiles else self.on_tile(x)
        return result


class LowRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, base: Tensor, down: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(x, base, down, up)
        return x @ base.t() + x @ down.t() @ up.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, base, down, up = ctx.saved_tensors
        through = grad @ up
        return grad @ base + through @ down, None, through.t() @ x, grad.t() @ (x @ down.t())


class Adapted(nn.Module):
    """Unshards its adapter and uses the weights itself, as axolotl's kernels for LoRA do."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Any = self.down
        up: Any = self.up
        if isinstance(down.weight, DTensor):
            down.unshard()
            up.unshard()
        result: Tensor = LowRank.apply(x, self.base.weight, down.weight, up.weight)
        return x + torch.tanh(result)


def _units(part: Any) -> list[nn.Module]:
    return [part.down, part.up, part] if isinstance(part, Adapted) else [part]


def _trains_as_fsdp2(
    make: Callable[[], nn.Module], wrap: Callable[[nn.Module], nn.Module] | None
) -> None:
    histories: list[list[Tensor]] = []
    for name in ("fsdp2", "fsdp_ext"):
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(make() for _ in range(3)))
        shard = load_system(name).fully_shard
        for index, part in enumerate(model):
            model[index] = part if wrap is None else wrap(part)
            for module in _units(part):
                shard(module)
        shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for step in range(4):
            torch.manual_seed(10 * step + dist.get_rank())
            model.set_requires_gradient_sync(step != 1)
            x = torch.randn(4, WIDTH, requires_grad=True)
            loss = model(x).square().mean()
            loss.backward()
            seen += [loss.detach(), x.grad]
            if step != 1:
                grads = [param.grad for param in model.parameters() if param.requires_grad]
                seen += [whole(grad).clone() for grad in grads]
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                seen.append(model(x))
        histories.append(seen)
    torch.testing.assert_close(histories[1], histories[0])


def test_a_backward_in_tiles_may_keep_its_unit_unsharded_and_reshard_it() -> None:
    run_ranks(_trains_as_fsdp2, 2, Tiled, None)


def _recomputed(part: nn.Module) -> nn.Module:
    wrapped: nn.Module = checkpoint_wrapper(part, CheckpointImpl.NO_REENTRANT)
    return wrapped


def _recomputed_reentrantly(part: nn.Module) -> nn.Module:
    wrapped: nn.Module = checkpoint_wrapper(part, CheckpointImpl.REENTRANT)
    return wrapped


@pytest.mark.parametrize("wrap", [None, _recomputed, _recomputed_reentrantly])
def test_weights_of_an_unsharded_unit_may_be_used_without_its_forward(
    wrap: Callable[[nn.Module], nn.Module] | None,
) -> None:
    run_ranks(_trains_as_fsdp2, 2, Adapted, wrap)


HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def _forward_without_hooks(shard: Callable[..., Any], starts_with_training: bool) -> list[Tensor]:
    """Unshard the children first, remove the hooks of FSDP, give modules copies, and undo it."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    for unit in (*model, model):
        shard(unit)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.arange(8.0).view(2, 4) * (dist.get_rank() + 1)
    results = []

    def train() -> None:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        results.append(loss.detach())

    if starts_with_training:
        train()
    seen = []
    user = model[0].register_forward_hook(lambda *_: seen.append("user"))
    removed, params = [], []
    for unit in (*model, model):
        unit.unshard()
        for name in HOOKS:
            hooks = getattr(unit, name)
            kept = {
                number: hook
                for number, hook in hooks.items()
                if not hook.__module__.startswith("torch.distributed.fsdp")
            }
            assert len(hooks) - len(kept) == 1
            removed.append((unit, name, hooks))
            setattr(unit, name, OrderedDict(kept))
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            params.append((module, name, param))
            setattr(module, name, nn.Parameter(param.detach() * 2))
    with torch.no_grad():
        results.append(model(inputs))
    assert seen == ["user"]
    user.remove()
    for module, name, param in params:
        setattr(module, name, param)
    for unit, name, hooks in removed:
        setattr(unit, name, hooks)
    for unit in (*model, model):
        unit.reshard()
    train()
    train()
    return [*results, *(whole(param) for param in model.parameters())]


def _hooks_are_removed_for_a_forward(starts_with_training: bool) -> None:
    ours = _forward_without_hooks(fully_shard, starts_with_training)
    theirs = _forward_without_hooks(torch_fully_shard, starts_with_training)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


# As in fairseq2, which finds FSDP2's hooks by their module's name.
@pytest.mark.parametrize("starts_with_training", [False, True])
def test_hooks_that_are_named_as_fsdp2s_may_be_removed_for_a_forward(
    starts_with_training: bool,
) -> None:
    run_ranks(_hooks_are_removed_for_a_forward, 2, starts_with_training)
