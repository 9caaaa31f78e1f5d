"""PyTorch's own code recognises sharded modules, and runs none of FSDP2's methods on them."""

from __future__ import annotations

import copy
import functools
import pickle
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.parity import load_system
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed._composable.contract import _get_registry
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fully_shard as of_fsdp2
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp_ext
from fsdp_ext import fully_shard
from fsdp_ext.sharding.api.fsdp_module import refuse_rest
from fsdp_ext.sharding.api.handles import HAS_FINALIZATION


def test_every_name_of_torch_is_exported() -> None:
    for name in torch_fsdp.__all__:
        assert name in fsdp_ext.__all__
        ours, theirs = getattr(fsdp_ext, name), getattr(torch_fsdp, name)
        assert ours is theirs or ours.__module__.startswith("fsdp_ext.")


def test_no_method_of_torch_is_inherited() -> None:
    ours, theirs = fsdp_ext.FSDPModule, torch_fsdp.FSDPModule
    assert issubclass(ours, theirs)
    methods = {name for name, value in vars(theirs).items() if callable(value)}
    assert len(methods) > 20
    inherited = {name for name in methods if getattr(ours, name) is getattr(theirs, name)}
    assert inherited == set()
    assert issubclass(fsdp_ext.UnshardHandle, torch_fsdp.UnshardHandle)


class Theirs:
    """A class of PyTorch's with a method that ours does not have."""

    def set_something(self, value: int) -> None:
        raise AssertionError("PyTorch's method ran")

    def _finish(self) -> None:
        raise AssertionError("PyTorch's method ran")


class Ours(Theirs):
    pass


def test_methods_that_a_later_torch_has_raise_by_name() -> None:
    refuse_rest(Ours, Theirs)
    with pytest.raises(NotImplementedError, match=r"FSDPModule\.set_something is not supported"):
        Ours().set_something(3)
    with pytest.raises(NotImplementedError, match=r"FSDPModule\._finish is not supported"):
        Ours()._finish()


def test_no_method_of_the_installed_torch_is_refused() -> None:
    for method in vars(fsdp_ext.FSDPModule).values():
        assert not isinstance(method, functools.partialmethod)


def _recognised() -> None:
    layer, other = nn.Linear(4, 4), nn.Linear(4, 4)
    pair = [nn.Linear(4, 4), nn.Linear(4, 4)]
    model = nn.Sequential(fully_shard(layer), other, *fully_shard(pair))
    fully_shard(model)
    assert [isinstance(m, torch_fsdp.FSDPModule) for m in (model, layer, other, *pair)] == [
        True, True, False, True, True,
    ]  # fmt: skip
    registry = _get_registry(layer)
    assert registry is not None
    assert list(registry) == ["fully_shard"]
    assert _get_registry(other) is None
    # The state, by each of the ways to ask for it.
    state = layer._get_fsdp_state()
    assert state is fully_shard.state(layer)
    assert state is torch_fsdp.fully_shard.state(layer)
    assert state is _get_module_fsdp_state(layer)
    assert _get_module_fsdp_state(other) is None
    assert fully_shard.state(other) is None
    assert fully_shard.state(pair[0]) is fully_shard.state(pair[1])
    group = state._fsdp_param_group
    assert state._fsdp_param_groups[0].modules == group.modules == (layer,)
    assert group.mesh_info == FSDPMeshInfo(layer._fsdp_ext_unit.ranks.mesh, shard_mesh_dim=0)
    assert [param.sharded_param for param in group.fsdp_params] == [layer.weight, layer.bias]
    assert fully_shard.state(model)._is_root is None
    assert state._state_ctx.all_states == [state]
    model(torch.ones(2, 4)).sum().backward()
    assert fully_shard.state(model)._is_root
    assert not state._is_root
    states = [fully_shard.state(module) for module in (model, layer, pair[0])]
    assert state._state_ctx.all_states == states
    assert states[2]._fsdp_param_group.modules == tuple(pair)
    root_group = fully_shard.state(model)._fsdp_param_group
    assert root_group.post_forward_mesh_info is None
    assert group.post_forward_mesh_info == group.mesh_info
    layer.set_reshard_after_forward(False)
    assert group.post_forward_mesh_info is None
    with pytest.raises(AttributeError, match=r"only a view with .*_state_ctx.* no '_device_handle"):
        _ = state._device_handle
    with pytest.raises(AttributeError, match="'post_forward_mesh_info' was set on a view"):
        group.post_forward_mesh_info = group.mesh
    # PyTorch's fully_shard knows better than to shard it again.
    with pytest.raises(AssertionError, match="already been applied"):
        torch_fsdp.fully_shard(layer)


def test_torch_recognises_a_sharded_module() -> None:
    run_ranks(_recognised, 2)


def _roots_by_hand(name: str) -> list[Any]:
    """Make roots before their first forward, as dinov3 does. Return what it sees."""
    torch.manual_seed(0)
    shard = load_system(name).fully_shard
    model = nn.Sequential(shard(nn.Linear(4, 4)), nn.Linear(4, 4))
    state, inner = shard(model)._get_fsdp_state(), model[0]._get_fsdp_state()
    group = state._fsdp_param_group
    info = group.post_forward_mesh_info
    seen = [info == group.mesh_info, state._is_root]
    for one in (state, state, inner):
        one._lazy_init()
    seen += [state._is_root, inner._is_root, len(inner._state_ctx.all_states)]
    seen.append(group.post_forward_mesh_info)
    for value in (info, None, info):
        group.post_forward_mesh_info = value
        seen.append(group.post_forward_mesh_info == value)
        output = model(torch.ones(2, 4))
        seen += [isinstance(param, DTensor) for param in model.parameters()]
        output.sum().backward()
        seen.append(output.detach())
    seen += [param.grad.full_tensor() for param in model.parameters()]
    late = nn.Sequential(shard(nn.Linear(4, 4)), shard(nn.Linear(4, 4)))
    late[1]._get_fsdp_state()._lazy_init()
    with pytest.raises(RuntimeError, match="already been lazily initialized for 1"):
        shard(late)._get_fsdp_state()._lazy_init()
    pair = shard([nn.Linear(4, 4), nn.Linear(4, 4)])
    with pytest.raises(RuntimeError, match="requires a single root module"):
        pair[0]._get_fsdp_state()._lazy_init()
    return seen


def _roots_of_both_by_hand() -> None:
    theirs, ours = map(_roots_by_hand, ("fsdp2", "fsdp_ext"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_root_can_be_made_before_the_first_forward_as_under_fsdp2() -> None:
    run_ranks(_roots_of_both_by_hand, 2)


def _idle_states() -> None:
    """Reset states and move the model, as verl does before it offloads an engine."""
    model = nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4))
    fully_shard(model)
    group = model[0]._get_fsdp_state()._fsdp_param_group
    group._training_state = TrainingState.IDLE
    for _ in range(2):
        model(torch.ones(2, 4))  # no backward follows
        group._training_state = TrainingState.IDLE
        model.reshard()
        model.cpu()
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(AttributeError, match="'_training_state' was set on a view"):
        group._training_state = TrainingState.FORWARD
    model[0].register_forward_hook(lambda *_: setattr(group, "_training_state", TrainingState.IDLE))
    with pytest.raises(RuntimeError, match="of unit '0' was set to IDLE while forward runs"):
        model(torch.ones(2, 4))


def test_the_training_state_may_be_set_to_idle_between_steps() -> None:
    run_ranks(_idle_states, 2)


def _streams_for_copies() -> None:
    layers = [fully_shard(nn.Linear(4, 4)) for _ in range(2)]
    model = fully_shard(nn.Sequential(*layers))
    theirs = torch_fsdp.fully_shard(nn.Linear(4, 4))
    for one in (model, theirs):
        one(torch.ones(2, 4))
    streams = [layer._get_fsdp_state()._comm_ctx.all_gather_stream for layer in layers]
    assert streams[0] is streams[1]
    assert type(streams[0]) is type(theirs._get_fsdp_state()._comm_ctx.all_gather_stream)
    with pytest.raises(AttributeError, match=r"with all_gather_stream.* no 'all_gather_state'"):
        _ = model._get_fsdp_state()._comm_ctx.all_gather_state


def test_the_communication_context_has_a_stream_for_copies() -> None:
    run_ranks(_streams_for_copies, 1)


def _shared_streams() -> None:
    first, second = fully_shard(nn.Linear(4, 4)), fully_shard(nn.Linear(4, 4))
    fsdp_ext.share_comm_ctx([])
    contexts = [fully_shard.state(module)._comm_ctx for module in (first, second)]
    assert contexts[0] is not contexts[1]  # as pipelining needs them for stages that share none
    fsdp_ext.share_comm_ctx([first, second])
    assert fully_shard.state(first)._comm_ctx is fully_shard.state(second)._comm_ctx
    for module in (first, second):
        module(torch.ones(2, 4)).sum().backward()
    assert first._fsdp_ext_unit.root.lanes is second._fsdp_ext_unit.root.lanes
    assert fully_shard.state(first)._comm_ctx is contexts[0]
    assert fully_shard.state(second)._comm_ctx is contexts[0]
    parts: Any = [nn.Sequential(fully_shard(nn.Linear(4, 4))) for _ in range(3)]
    for model in parts:
        fully_shard(model)(torch.ones(2, 4))
    fsdp_ext.share_comm_ctx([model[0] for model in parts[:2]])
    torch_fsdp.share_comm_ctx([model[0] for model in parts[1:]])
    assert len({id(fully_shard.state(model[0])._comm_ctx) for model in parts}) == 1
    for wrong in (nn.Linear(4, 4), torch_fsdp.fully_shard(nn.Linear(4, 4))):
        with pytest.raises(ValueError, match=r"got a .*Linear that is not sharded. Pass modules"):
            fsdp_ext.share_comm_ctx([first, wrong])
    other = fully_shard(nn.Linear(4, 4), transport="process_group")
    with pytest.raises(NotImplementedError, match="2 groups of ranks or transports"):
        fsdp_ext.share_comm_ctx([first, other])
    third = fully_shard(nn.Linear(4, 4))
    torch_fsdp.share_comm_ctx([first, second, third])
    assert fully_shard.state(first)._comm_ctx is fully_shard.state(third)._comm_ctx
    with pytest.raises(AttributeError, match="'_comm_ctx' was set on a view"):
        torch_fsdp.share_comm_ctx([first, other])


def test_modules_over_one_group_share_their_streams() -> None:
    run_ranks(_shared_streams, 2)


# PyTorch's setters, the values to pass, and our settings.
SETTERS = [
    ("set_requires_all_reduce", False, "requires_all_reduce"),
    ("set_reshard_after_backward", False, "reshard_after_backward"),
    ("set_reshard_after_backward", True, "reshard_after_backward"),
    ("set_reduce_scatter_unused_params", True, "reduce_scatter_unused_params"),
    ("_set_unshard_async_op", True, None),
    ("set_reduce_scatter_max_input_buffers", 2, None),
]


# The names of the settings in PyTorch's FSDPParamGroup.
READ = {
    "requires_all_reduce": "all_reduce_grads",
    "reshard_after_backward": "reshard_after_backward",
}


def _replicated_outside() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
    gradients: dict[str, list[Any]] = {}
    for name in ("fsdp2", "fsdp_ext"):
        torch.manual_seed(0)
        inner: Any = load_system(name).fully_shard(nn.Linear(4, 4), mesh=mesh)
        model = replicate(nn.Sequential(nn.Linear(4, 4), inner), mesh=mesh)
        for setter, value, setting in SETTERS:
            if hasattr(model, setter):
                getattr(model, setter)(value)
                if name == "fsdp_ext" and setting is not None:
                    assert getattr(inner._fsdp_ext_unit.settings, setting) is value
                group = inner._get_fsdp_state()._fsdp_param_group
                if setting in READ:
                    assert getattr(group, READ[setting]) is value
        torch.manual_seed(dist.get_rank())
        for syncs in (False, True, False, True):
            model.set_requires_gradient_sync(syncs)
            model(torch.randn(2, 4)).square().sum().backward()
            model.set_modules_to_forward_prefetch([inner])
            model.set_modules_to_backward_prefetch([inner])
        gradients[name] = [param.grad.full_tensor() for param in model.parameters()]
    torch.testing.assert_close(gradients["fsdp_ext"], gradients["fsdp2"])


def test_setters_of_a_replicated_module_reach_the_sharded_modules_inside() -> None:
    run_ranks(_replicated_outside, 2)


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).relu()


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Any:
        return checkpoint(lambda x: x + self.inner(self.norm(x)), x, use_reentrant=False)


def _pipeline(schedule: str, stages: int, options: dict[str, Any]) -> None:
    own = {"settings": {}, "recomputes": False, "systems": ("fsdp2", "fsdp_ext")}
    settings, recomputes, systems = (options.get(name, own[name]) for name in own)
    options = {name: value for name, value in options.items() if name not in own}
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    gradients: dict[str, list[Tensor]] = {}
    for name in systems:
        shard = load_system(name).fully_shard
        torch.manual_seed(0)
        models = [Stage() for _ in range(stages)]
        for model in models:
            if recomputes:
                model.layers = nn.Sequential(Recomputed(), Recomputed())
                for layer in model.layers:
                    shard(layer.inner, mesh=mesh["dp"], **settings)
            for layer in model.layers:
                shard(layer, mesh=mesh["dp"], **settings)
            shard(model, mesh=mesh["dp"], **settings)
        parts = [
            PipelineStage(model, index, stages, torch.device("cpu"), group=mesh.get_group("pp"))
            for index, model in enumerate(models)
        ]
        run = get_schedule_class(schedule)(
            parts if stages > 1 else parts[0],
            4,
            loss_fn=lambda y, t: (y - t).square().sum(),
            **options,
        )
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
        for step in range(3):
            torch.manual_seed(10 * step + dist.get_rank())
            run.step(torch.randn(8, 6), target=torch.randn(8, 6))
            for optimizer in optimizers:
                optimizer.step()
            if step < 2:
                for model in models if name == "fsdp_ext" else ():
                    model._fsdp_ext_unit.root.impl.enable_log(True)
                    model._fsdp_ext_unit.root.impl.take_log()  # of this step
                for optimizer in optimizers:
                    optimizer.zero_grad()
        gradients[name] = [
            value.detach().to_local()
            for model in models
            for param in model.parameters()
            for value in (param, param.grad)
        ]
    for model in models:
        impl = model._fsdp_ext_unit.root.impl
        reductions = [op for op, *_ in impl.take_log() if op == "reduce_scatter"]
        assert len(reductions) == sum(bucket["reduce_bytes"] > 0 for bucket in impl.buckets())
    for theirs, ours in zip(gradients["fsdp2"], gradients["fsdp_ext"], strict=True):
        assert torch.equal(theirs, ours)


STAGES_ON_ONE_RANK = pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="torch 2.11 sends between stages of one rank through gloo, which refuses",
)
STAYS_WHOLE = {"settings": {"reshard_after_forward": False}}


@pytest.mark.parametrize(
    ("schedule", "stages", "options"),
    [
        ("GPipe", 1, {}),
        ("1F1B", 1, {}),
        pytest.param("Interleaved1F1B", 2, {}, marks=STAGES_ON_ONE_RANK),
        pytest.param("InterleavedZeroBubble", 2, STAYS_WHOLE, marks=STAGES_ON_ONE_RANK),
        pytest.param(
            "ZBVZeroBubble", 2, {"recomputes": True, **STAYS_WHOLE}, marks=STAGES_ON_ONE_RANK
        ),
        pytest.param(
            "Interleaved1F1B",
            2,
            {"defer_reduce_grad_wait": True},
            marks=pytest.mark.skipif(
                not HAS_FINALIZATION,
                reason="schedules defer waits since torch 2.15",
            ),
        ),
    ],
)
def test_pipelining_reduces_once_for_all_micro_batches(
    schedule: str, stages: int, options: dict[str, Any]
) -> None:
    run_ranks(_pipeline, 2, schedule, stages, options)


def _loses_gradients() -> None:
    with pytest.raises(RuntimeError, match=r"unit 'layers\.\d' was resharded after forward, so a"):
        _pipeline("InterleavedZeroBubble", 2, {"systems": ("fsdp_ext",)})


@STAGES_ON_ONE_RANK
def test_zero_bubble_pipelining_of_units_that_reshard_raises() -> None:
    run_ranks(_loses_gradients, 2)


def _indexing() -> None:
    model: Any = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert type(model[:1]) is nn.Sequential
    with pytest.raises(NotImplementedError, match="does not support deepcopy"):
        copy.deepcopy(model)


def test_slicing_makes_an_instance_of_the_original_class() -> None:
    run_ranks(_indexing, 1)


Scalar = TypeVar("Scalar")


class Abstract(ABC, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.moves = nn.Linear(4, 4), 0

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.moves += 1
        return super()._apply(*args, **kwargs)


class Concrete(Abstract):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


class Generically(Generic[Scalar], Concrete):
    pass


class Slotless:
    __slots__ = ()


class Mixed(Slotless, Generic[Scalar], ABC, nn.Sequential):
    def __init__(self, *args: Any) -> None:
        super().__init__(*(args or (nn.Linear(4, 4), nn.Linear(4, 4))))


def _gradients_of(model: Any, wrap: Any) -> list[Tensor]:
    model = wrap(model)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        model.to(torch.float64)
        model(torch.randn(2, 4, dtype=torch.float64)).square().sum().backward()
    return [param.grad.full_tensor() for param in model.parameters()]


def _wrap_in_fsdp1(model: nn.Module) -> nn.Module:
    return fsdp_ext.FullyShardedDataParallel(
        model, use_orig_params=True, device_id=torch.device("cpu")
    )


def _classes_with_other_layouts() -> None:
    for cls in (Concrete, Generically, Mixed):
        model: Any = fully_shard(cls())
        assert isinstance(model, fsdp_ext.FSDPModule)
        assert isinstance(model, cls)
        # Programs find the original class by this index.
        assert type(model).__mro__[type(model)._orig_cls_mro_index] is cls
        model(torch.ones(2, 4)).sum().backward()
        model.unshard()
        assert not any(isinstance(param, DTensor) for param in model.parameters(recurse=False))
        model.reshard()
        assert all(isinstance(param, DTensor) for param in model.parameters())
        model.float()
        assert getattr(model, "moves", 1) == 1
        assert type(copy.copy(model)) is cls
        with pytest.raises(NotImplementedError, match="does not support deepcopy"):
            copy.deepcopy(model)
        with pytest.raises(pickle.PicklingError, match=f"a sharded {cls.__name__} cannot"):
            pickle.dumps(model)
        with pytest.raises(TypeError, match="object layout differs"):
            torch_fsdp.fully_shard(cls())
        torch.manual_seed(0)
        start = cls()
        ours = _gradients_of(copy.deepcopy(start), fully_shard)
        assert all(map(torch.equal, ours, _gradients_of(copy.deepcopy(start), _wrap_in_fsdp1)))
        plain = nn.Sequential(*start) if cls is Mixed else nn.Sequential(start.inner)
        theirs = _gradients_of(plain, torch_fsdp.fully_shard)
        assert all(map(torch.equal, ours, theirs))
    assert type(fully_shard(Mixed())[:1]) is Mixed

    class Patched(ABC, torch_fsdp.FSDPModule):
        pass

    with pytest.MonkeyPatch.context() as context:  # as verl lets FSDP2 shard such models
        context.setattr(of_fsdp2, "FSDPModule", Patched)
        fully_shard(Concrete())(torch.ones(2, 4)).sum().backward()


def test_classes_that_derive_from_abc_or_generic_first_are_sharded() -> None:
    run_ranks(_classes_with_other_layouts, 2)


class OfUnits(nn.Linear):
    """Has attributes of names that a thin wrapper might use, too."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self._unit, self._units, self.unit = "mm", ["mm", "inch"], nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        assert (self._unit, self._units) == ("mm", ["mm", "inch"])
        return self.unit(super().forward(x))


def _names() -> None:
    model: Any = fully_shard(OfUnits())
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 2)).sum().backward()
    assert model._unit == "mm"


def test_attributes_of_a_users_module_keep_their_meaning() -> None:
    run_ranks(_names, 1)
