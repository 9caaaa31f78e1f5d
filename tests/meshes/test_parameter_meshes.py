"""Parameters of one `fully_shard` call on several meshes train as under FSDP2."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.extensions import checkpointed
from support.launcher import run_ranks
from support.matrix import exhaustive
from support.parity import EXACT, ROUNDING, device, load_system
from support.several_meshes import (
    BF16,
    GLOO,
    Experts,
    Model,
    accumulate,
    assert_same,
    batch,
    clip_by_mesh,
    evaluate_between,
    train,
)
from support.several_meshes import Setup as ByModule
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

import fsdp_ext

FSDPMeshInfo = _fsdp_common.FSDPMeshInfo
Placement: Any = getattr(_fsdp_common, "ShardPlacementResult", None)
pytestmark = pytest.mark.skipif(Placement is None, reason="torch 2.11 has one mesh for a call")
RANKS = 4


def placement_fn(
    model: nn.Module, whole: DeviceMesh, part: DeviceMesh
) -> Callable[[nn.Parameter], Any]:
    """Return a `shard_placement_fn` for experts on a part of the ranks, as torchtitan has it."""
    whole_info, part_info = (
        _fsdp_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        if mesh.ndim == 2
        else FSDPMeshInfo(mesh, shard_mesh_dim=0)
        for mesh in (whole, part)
    )
    experts = {
        parameter
        for module in model.modules()
        if isinstance(module, Experts)
        for parameter in module.parameters()
    }
    return lambda parameter: Placement(Shard(0), part_info if parameter in experts else whole_info)


@dataclasses.dataclass(frozen=True)
class Setup(ByModule):
    """As of units on several meshes, but experts are no units of their own.

    Attributes:
        units: the modules of each call before the root's, by name.
        checkpoints: whether blocks run again in backward.
        prefetches: whether each block prefetches its neighbours.
        of_root: more arguments of the root's call.
    """

    units: tuple[tuple[str, ...], ...] = (("blocks.0",), ("blocks.1",), ("blocks.2",))
    checkpoints: bool = False
    prefetches: bool = False
    of_root: dict[str, Any] = dataclasses.field(default_factory=dict)

    def meshes(self, mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh]:
        """Return the meshes of dense parameters and of experts."""
        return mesh._flatten("dp"), mesh["dp_ep"]

    def model(
        self, fully_shard: Any, mesh: DeviceMesh, plain: Model | None = None, **options: Any
    ) -> Any:
        model: Any = self.plain(mesh) if plain is None else plain
        whole, part = self.meshes(mesh)
        options = {**self.options, **options, "mesh": whole}
        options["shard_placement_fn"] = placement_fn(model, whole, part)
        for block in model.blocks if self.checkpoints else ():
            block.forward = checkpointed(block.forward)
        for names in self.units:
            modules = [model.get_submodule(name) for name in names]
            fully_shard(modules[0] if len(modules) == 1 else modules, **options)
        fully_shard(model, **{**options, **self.of_root})
        if self.divides_by is not None:
            for module in model.modules():
                if isinstance(module, fsdp.FSDPModule):
                    module.set_gradient_divide_factor(self.divides_by)
                    module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale
        if self.prefetches:
            for block, ahead in zip(model.blocks[:-1], model.blocks[1:], strict=True):
                block.set_modules_to_forward_prefetch([ahead])
                ahead.set_modules_to_backward_prefetch([block])
        return model


def _compare(setup: Setup) -> None:
    mesh = setup.mesh()
    theirs = train(setup, setup.model(fsdp.fully_shard, mesh))
    model = setup.model(fsdp_ext.fully_shard, mesh, **setup.ours)
    assert len({parameter.device_mesh for parameter in model.parameters()}) > 1
    with torch.no_grad():
        model(batch(0, 0))  # makes the root
    impl = model._fsdp_ext_unit.root.impl
    impl.set_poison_released_slots(True)
    streams = ("gather", "reduce")
    ours = train(setup, model, lambda: impl.delay_stream(streams[dist.get_rank() % 2], 0.002))
    assert_same(ours, theirs, setup.allowed)


def _compare_all(setups: list[Setup]) -> None:
    for setup in setups:
        try:
            _compare(setup)
        except AssertionError as error:
            raise AssertionError(f"{setup}") from error


def unshard_by_hand(model: Any, loss: Callable[[int], Tensor]) -> list[Tensor]:
    """Unshard a block before forward, read all its parameters, and reshard it."""
    handle = model.blocks[1].unshard(async_op=True)
    handle.wait()
    seen = [parameter.detach().sum() for parameter in model.blocks[1].parameters()]
    model.blocks[1].reshard()
    model.blocks[2].unshard()
    value = loss(0)
    value.backward()
    return [*seen, value]


def freeze_between(model: Any, loss: Callable[[int], Tensor]) -> list[Tensor]:
    """Freeze the experts of a block and train, and unfreeze them and train again."""
    values = []
    for trains in (False, True):
        model.blocks[1].experts.requires_grad_(trains)
        values.append(loss(int(trains)))
        values[-1].backward()
    return values


@dataclasses.dataclass(frozen=True)
class WithReplicas(Setup):
    """Hybrid sharding: two sets of ranks have the whole model each.

    Attributes:
        unused_in: the set that leaves one of the experts' parameters unused.
    """

    unused_in: int | None = None

    def mesh(self) -> DeviceMesh:
        experts, same = self.shape
        sets = init_device_mesh(
            device().type, (2, experts * same), mesh_dim_names=("replicate", "dp")
        )
        return sets._unflatten(1, (same, experts), ("dp_ep", "ep"))

    def meshes(self, mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh]:
        return mesh._get_root_mesh(), mesh["replicate", "dp_ep"]

    def model(self, fully_shard: Any, mesh: DeviceMesh, *args: Any, **options: Any) -> Any:
        model = super().model(fully_shard, mesh, *args, **options)
        if self.unused_in == mesh.get_local_rank("replicate"):
            for block in model.blocks:
                block.experts.uses_scale = False
        if self.unused_in is not None and fully_shard is fsdp.fully_shard:
            model.set_reduce_scatter_unused_params(True)  # it needs this not to hang
        return model


ALL_IN_ROOT: tuple[tuple[str, ...], ...] = ()
GROUPED = (("blocks.0", "blocks.1"), ("blocks.2", "head"))
TWO_RANKS = [
    Setup(shape=(2, 1), allowed=EXACT),
    Setup(shape=(2, 1), allowed=EXACT, units=ALL_IN_ROOT, step=accumulate,
          options={"mp_policy": BF16}, ours={"max_message_bytes": 1000}),
    Setup(shape=(2, 1), allowed=EXACT, units=GROUPED, step=freeze_between),
    Setup(shape=(2, 1), allowed=EXACT, kind="dtensor", checkpoints=True, ours=GLOO),
    Setup(shape=(2, 1), allowed=EXACT, step=evaluate_between,
          options={"reshard_after_forward": False}),
    Setup(shape=(2, 1), allowed=EXACT, prefetches=True, step=unshard_by_hand,
          ours={"bucket_bytes": 0}),
]  # fmt: skip
QUICK = [
    Setup(frozen=True, allowed=EXACT, divides_by=8.0),
    Setup(kind="dtensor", step=clip_by_mesh, prefetches=True),
    WithReplicas(shape=(2, 1), allowed=EXACT, unused_in=0),
    WithReplicas(
        shape=(2, 1),
        allowed=EXACT,
        units=ALL_IN_ROOT,
        step=accumulate,
        ours={"max_message_bytes": 500, **GLOO},
    ),
]
MORE = [
    Setup(),
    Setup(step=accumulate, options={"reshard_after_forward": False}, ours=GLOO),
    Setup(units=ALL_IN_ROOT, options={"reshard_after_forward": True}, step=evaluate_between),
    Setup(units=GROUPED, frozen=True, allowed=EXACT, step=accumulate),
    Setup(kind="dtensor", ours={"bucket_bytes": 0}, checkpoints=True),
    Setup(unused_on=(1,), divides_by=4.0),
    Setup(counts=(1, 3), ours={"bucket_bytes": 0, "max_message_bytes": 500}),
    Setup(options={"mp_policy": BF16}, ours={"max_message_bytes": 1000}, checkpoints=True,
          allowed=ROUNDING[torch.bfloat16]),
    Setup(step=unshard_by_hand, prefetches=True, ours={"prefetch": 2}),
    Setup(step=freeze_between, kind="dtensor"),
    Setup(shape=(4, 1), of_root={"reshard_after_forward": 2}),
    WithReplicas(shape=(2, 1), allowed=EXACT, unused_on=(1,)),
    WithReplicas(shape=(2, 1), allowed=EXACT, units=GROUPED, step=freeze_between,
                 options={"mp_policy": BF16}),
    WithReplicas(shape=(2, 1), allowed=EXACT, checkpoints=True, prefetches=True,
                 ours={"bucket_bytes": 0}),
]  # fmt: skip


def test_parameters_that_no_other_rank_has_train_as_under_fsdp2() -> None:
    run_ranks(_compare_all, 2, TWO_RANKS)


@pytest.mark.exhaustive
def test_replicas_of_experts_that_ranks_share_train_as_under_fsdp2() -> None:
    run_ranks(_compare_all, 8, [WithReplicas(), WithReplicas(unused_on=(0,), divides_by=4.0)])


@pytest.mark.parametrize("setups", [QUICK, *exhaustive(MORE)], ids=["quick", "more"])
def test_parameters_on_a_mesh_of_their_own_train_as_under_fsdp2(setups: list[Setup]) -> None:
    run_ranks(_compare_all, RANKS, setups)


# - What users do between steps


def _save_and_load(path: str) -> None:
    setup = Setup(kind="dtensor")
    mesh = setup.mesh()
    saved, loaded = (setup.model(fsdp_ext.fully_shard, mesh) for _ in range(2))
    theirs = setup.model(fsdp.fully_shard, mesh)
    for ours, like in zip(saved.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert ours[0] == like[0]
        assert ours[1].placements == like[1].placements
        assert ours[1].device_mesh == like[1].device_mesh
        assert torch.equal(ours[1].to_local(), like[1].to_local())
    train(setup, saved)
    with torch.no_grad():
        loaded(batch(0, 0))
    dcp.save(get_model_state_dict(saved), checkpoint_id=path)
    state = get_model_state_dict(loaded)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(loaded, state)
    for (name, ours), like in zip(loaded.named_parameters(), saved.parameters(), strict=True):
        if "scale" not in name:  # each rank of expert parallelism has a different one
            assert torch.equal(ours.to_local(), like.to_local()), name
    theirs.load_state_dict(saved.state_dict(), assign=True)
    loaded.load_state_dict(saved.state_dict(), assign=True)
    with torch.no_grad():
        assert torch.equal(loaded(batch(1, 0)), theirs(batch(1, 0)))


def test_checkpoints_have_the_parameters_of_all_meshes(tmp_path: Path) -> None:
    run_ranks(_save_and_load, RANKS, str(tmp_path / "checkpoint"))


def _changes_between_steps() -> None:
    """Convert, replace a module, and fail in forward, and train as before."""
    setup = Setup(shape=(2, 1))
    mesh = setup.mesh()
    seen = []
    for system in ("fsdp_ext", "fsdp2"):
        model = setup.model(load_system(system).fully_shard, mesh)
        results = [model(batch(0, 0))]
        results[-1].sum().backward()
        model.zero_grad()
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()
        model.blocks[1].register_forward_pre_hook(_fail_if_asked)
        for place in range(2):
            _fail_if_asked.asks = True  # type: ignore[attr-defined]
            try:
                with pytest.raises(KeyError, match="asked"):
                    model(batch(place, 1))
            finally:
                _fail_if_asked.asks = False  # type: ignore[attr-defined]
            if system == "fsdp2":
                model.reset_iter_state()
            model.blocks[place].added = nn.Identity()  # makes fsdp_ext look at the model again
            if system == "fsdp_ext":  # FSDP2 cannot go on with other tensors
                model.double()
                model.float()
            results.append(model(batch(place, 2)))
            results[-1].square().sum().backward()
            results += [p.grad.to_local() for p in model.parameters()]
            model.zero_grad()
        seen.append([result.detach().clone() for result in results])
    assert_same(*seen, EXACT)


def _fail_if_asked(module: nn.Module, args: Any) -> None:
    if getattr(_fail_if_asked, "asks", False):
        raise KeyError("asked")


def test_parameters_on_several_meshes_may_be_converted_after_a_failure() -> None:
    run_ranks(_changes_between_steps, 2)


class Routed(nn.Module):
    """Block 1 runs on the first rank only."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.blocks = model.blocks

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        block = self.blocks[1]
        if dist.get_rank() == 0 or not hasattr(block, "join_empty"):
            return block(x)
        return block.join_empty(x)


def _leave_out_a_block() -> None:
    setup = Setup(shape=(2, 1))
    mesh = setup.mesh()
    model: Any = Routed(setup.plain(mesh))
    plain = Routed(setup.plain(mesh))
    place = placement_fn(model, *setup.meshes(mesh))
    for module in (*model.blocks[:2], model):
        fsdp_ext.fully_shard(module, mesh=mesh._flatten("dp"), shard_placement_fn=place)
    x = batch(0, 0)
    for _ in range(2):
        model.zero_grad()
        model(x).square().sum().backward()
    if dist.get_rank() == 0:
        plain(x).square().sum().backward()
    else:
        plain.blocks[0](x).square().sum().backward()
    for (name, ours), alone in zip(model.named_parameters(), plain.parameters(), strict=True):
        if name.startswith("blocks.2"):
            continue
        expected = torch.zeros_like(alone) if alone.grad is None else alone.grad
        if "experts" not in name:
            dist.all_reduce(expected)
            torch.testing.assert_close(ours.grad.full_tensor(), expected / 2)
        elif name.startswith("blocks.0") or dist.get_rank() == 0:
            assert torch.equal(ours.grad.to_local(), expected)
        else:
            assert ours.grad is None


def test_a_rank_may_leave_out_a_module_on_several_meshes() -> None:
    run_ranks(_leave_out_a_block, 2)


# - What is refused


def _ask_for_what_is_not_supported() -> None:
    setup = Setup(shape=(2, 1))
    mesh = setup.mesh()
    flat = mesh._flatten("dp")
    for system in ("fsdp_ext", "fsdp2"):
        model = setup.model(load_system(system).fully_shard, mesh)
        block = model.blocks[0]
        for refused in (
            lambda block=block: block.set_all_reduce_hook(lambda gradients: None),
            lambda block=block: block.set_custom_all_gather(Comm()),
            lambda block=block: block.set_custom_reduce_scatter(Comm()),
        ):
            with pytest.raises(ValueError, match="not supported with multiple param groups"):
                refused()
        state = block._get_fsdp_state()
        assert [group.mesh_info.mesh.size() for group in state._fsdp_param_groups] == [2, 1]
        with pytest.raises(AssertionError, match="Expected at most 1 param group"):
            _ = state._fsdp_param_group
        model(batch(0, 0)).sum().backward()
        assert len(model._get_fsdp_state()._state_ctx.all_states) == 4
    model = setup.model(fsdp_ext.fully_shard, mesh)
    with pytest.raises(ValueError, match="flat_shard is not supported with multiple param"):
        model.blocks[0].flat_shard()
    with pytest.raises(NotImplementedError, match="plan got a model whose units have 2 meshes"):
        fsdp_ext.plan(model)
    with pytest.raises(NotImplementedError, match="tune got a model whose units have 2 meshes"):
        fsdp_ext.tune(model, batch(0, 0))
    model(batch(0, 0)).sum().backward()
    assert "1 ranks share 3 units" in fsdp_ext.describe_buckets(model)
    layer = nn.Linear(2, 2)
    parameters = dict(layer.named_parameters())
    wrong: Any
    for wrong, message in (
        (_fsdp_common.DDPMeshInfo(flat, replicate_mesh_dim=0), "which shards dimension None of"),
        (FSDPMeshInfo(mesh, shard_mesh_dim=1), "which shards dimension 1 of"),
        ("dp", "returned mesh_info='dp' for parameter 'weight'. Return FSDPMeshInfo"),
    ):
        with pytest.raises(ValueError, match=message):
            fsdp_ext.fully_shard(
                layer, mesh=flat, shard_placement_fn=lambda _, w=wrong: Placement(Shard(0), w)
            )
    # The second unit cannot be made, and the module keeps all its parameters.
    bad = nn.Linear(2, 2)
    bad.bias = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    on_bias = {bad.bias: FSDPMeshInfo(mesh["dp_ep"], shard_mesh_dim=0)}
    with pytest.raises(ValueError, match=r"'bias' is torch\.complex64"):
        fsdp_ext.fully_shard(
            bad,
            mesh=flat,
            shard_placement_fn=lambda p: Placement(None, on_bias[p]) if p in on_bias else None,
        )
    bad.bias = nn.Parameter(torch.zeros(2))
    fsdp_ext.fully_shard(bad, mesh=flat)(torch.ones(1, 2)).sum().backward()
    assert dict(layer.named_parameters()) == parameters


class Comm:
    def allocate(self, *args: Any, **kwargs: Any) -> Any: ...

    def __call__(self, **kwargs: Any) -> Any: ...


def test_what_has_no_meaning_on_several_meshes_is_refused() -> None:
    run_ranks(_ask_for_what_is_not_supported, 2)
