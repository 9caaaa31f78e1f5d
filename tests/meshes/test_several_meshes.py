"""Units over several meshes, such as experts, train in one model as under FSDP2."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.launcher import run_ranks
from support.matrix import exhaustive
from support.parity import EXACT, ROUNDING, device
from support.several_meshes import (
    BF16,
    EXPERTS,
    GLOO,
    Model,
    Setup,
    accumulate,
    assert_same,
    batch,
    clip_by_mesh,
    evaluate_between,
    train,
    train_step,
)
from support.threads import run_threads
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_ext
from fsdp_ext import Simulated
from fsdp_ext.comm.link import PRESETS

RANKS = 4


def experts_accumulate_alone(model: Any, loss: Callable[[int], Tensor]) -> list[Tensor]:
    """Reduce the gradients of dense layers in each backward, and those of experts in the last."""
    values = []
    for micro_batch in range(2):
        for block in model.blocks:
            block.experts.set_requires_gradient_sync(micro_batch == 1)
        values += train_step(model, lambda _, place=micro_batch: loss(place))  # type: ignore[misc]
    return values


def compare_with_fsdp2(setup: Setup) -> None:
    mesh = setup.mesh()
    theirs = train(setup, setup.model(fsdp.fully_shard, mesh))
    model = setup.model(fsdp_ext.fully_shard, mesh, **setup.ours)
    model.blocks[0].experts.unshard()  # makes a root for the experts alone
    model.blocks[0].experts.reshard()
    with torch.no_grad():
        model(batch(0, 0))  # makes the root
    impl = model._fsdp_ext_unit.root.impl
    impl.set_poison_released_slots(True)
    streams = ("gather", "reduce")

    def delay() -> None:
        impl.delay_stream(streams[dist.get_rank() % 2], 0.002)

    ours = train(setup, model, delay)
    assert_same(ours, theirs, setup.allowed)


def compare_all(setups: list[Setup]) -> None:
    for setup in setups:
        compare_with_fsdp2(setup)


FROZEN = Setup(frozen=True, allowed=EXACT)
QUICK = [
    dataclasses.replace(FROZEN, ours=GLOO, step=accumulate),
    Setup(unused_on=(1,), divides_by=4.0, head="ep"),
    # Ranks send their experts in different numbers of messages.
    Setup(counts=(1, 3), ours={"bucket_bytes": 0, "max_message_bytes": 500}),
]
MORE = [
    Setup(),
    Setup(kind="dtensor", ours={"bucket_bytes": 0}),
    FROZEN,
    Setup(ours=GLOO),
    Setup(step=accumulate, options={"reshard_after_forward": False}),
    Setup(options={"reshard_after_forward": True}, ours=GLOO, step=evaluate_between),
    Setup(options={"reshard_after_forward": False}, ours=GLOO, kind="dtensor"),
    Setup(kind="dtensor", step=clip_by_mesh),
    Setup(ours={"bucket_bytes": 0, "max_message_bytes": 1000}, step=accumulate),
    Setup(options={"mp_policy": BF16}, ours={"max_message_bytes": 1000},
          allowed=ROUNDING[torch.bfloat16]),
    dataclasses.replace(FROZEN, options={"mp_policy": BF16, "reshard_after_forward": False}),
    dataclasses.replace(FROZEN, kind="dtensor", unused_on=(0,), step=evaluate_between),
    Setup(step=experts_accumulate_alone),
    Setup(counts=(1, 3), options={"mp_policy": BF16}, allowed=ROUNDING[torch.bfloat16],
          ours={"max_message_bytes": 1000, **GLOO}, step=accumulate),
    Setup(shape=(4, 1)),
    Setup(shape=(1, 4)),
]  # fmt: skip
TWO_RANKS = [
    Setup(shape=(2, 1), allowed=EXACT),
    Setup(shape=(2, 1), allowed=EXACT, ours=GLOO, step=accumulate, kind="dtensor"),
    Setup(shape=(2, 1), allowed=EXACT, step=experts_accumulate_alone,
          options={"reshard_after_forward": False}),
    Setup(shape=(2, 1), allowed=EXACT, options={"mp_policy": BF16}, step=accumulate,
          ours={"max_message_bytes": 1000}),
    Setup(shape=(1, 2), allowed=EXACT),
]  # fmt: skip


@pytest.mark.parametrize("setups", [QUICK, *exhaustive(MORE)], ids=["quick", "more"])
def test_experts_on_a_mesh_of_their_own_train_as_under_fsdp2(setups: list[Setup]) -> None:
    run_ranks(compare_all, RANKS, setups)


@pytest.mark.exhaustive
def test_experts_that_no_other_rank_has_train_as_under_fsdp2() -> None:
    run_ranks(compare_all, 2, TWO_RANKS)


class NamedExperts(nn.Module):
    """A rank has some of the experts, under their names in the whole model, and None elsewhere."""

    def __init__(self, own: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        linears = [nn.Linear(4, 4) for _ in range(4)]
        self.experts = nn.ModuleList([e if i in own else None for i, e in enumerate(linears)])
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts:
            x = x if expert is None else x + expert(x)
        return self.head(x)


def _train_named_experts(api: Any, **options: Any) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    first = 2 * mesh.get_local_rank("ep")
    model: Any = NamedExperts((first, first + 1))
    for expert in model.experts:
        if expert is not None:
            api.fully_shard(expert, mesh=mesh["dp"], **options)
    api.fully_shard(model, mesh=init_device_mesh("cpu", (4,)), **options)
    for step in range(3):
        model(torch.full((2, 4), dist.get_rank() + step + 1.0)).square().mean().backward()
    return [param.grad.full_tensor() for param in model.parameters()]


def _named_experts() -> None:
    theirs = _train_named_experts(fsdp)
    for options in ({}, {"bucket_bytes": 0}):
        for one, other in zip(_train_named_experts(fsdp_ext, **options), theirs, strict=True):
            torch.testing.assert_close(one, other)


def test_experts_may_have_other_names_on_ranks_of_another_mesh() -> None:
    run_ranks(_named_experts, RANKS)


def _used_in_one_set() -> None:
    """The second set of replicas alone uses one of the experts' parameters."""
    mesh = init_device_mesh(device().type, (2, 2, 1), mesh_dim_names=("sets", "ep", "dp_ep"))
    mesh["ep", "dp_ep"]._flatten("dp")
    is_used = mesh.get_local_rank("sets") == 1
    torch.manual_seed(0)
    plain: Any = Model(EXPERTS, is_used)
    model: Any = copy.deepcopy(plain)
    for block in model.blocks:
        fsdp_ext.fully_shard(block.experts, mesh=mesh["sets", "dp_ep"])
        fsdp_ext.fully_shard(block, mesh=mesh["sets", "dp"])
    fsdp_ext.fully_shard(model, mesh=mesh["sets", "dp"])
    for each in (plain, model):
        each(batch(0, 0)).square().mean().backward()
    for ours, block in zip(model.blocks, plain.blocks, strict=True):
        scale = block.experts.scale
        expected = scale.grad if is_used else torch.zeros_like(scale)
        dist.all_reduce(expected, group=mesh.get_group("sets"))
        torch.testing.assert_close(ours.experts.scale.grad.to_local(), expected / 2)


def test_parameters_of_experts_that_one_set_uses_have_a_gradient_in_both() -> None:
    run_ranks(_used_in_one_set, RANKS)


def _clip_experts() -> None:
    """Each rank has other elements, so the norm is that of all local gradients together."""

    def sharded() -> Any:
        return Setup().model(fsdp_ext.fully_shard, mesh)

    def run_backward(model: Any) -> None:
        model(batch(0, dist.get_rank())).square().sum().backward()

    mesh = Setup().mesh()
    model = sharded()
    fsdp_ext.clip_grad_norm_(model, 1.0)  # before the model has a root
    run_backward(model)
    own = [param.grad.to_local().square().sum() for param in model.parameters()]
    square = torch.stack(own).sum()
    dist.all_reduce(square)
    torch.testing.assert_close(fsdp_ext.clip_grad_norm_(model, 1.0), square.sqrt())
    attached = sharded()
    optimizer = fsdp_ext.optim.SGD(attached.parameters(), lr=0.0)
    optimizer.attach(attached, max_norm=1.0)
    run_backward(attached)
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, square.sqrt())


def test_the_norm_has_the_experts_of_all_ranks() -> None:
    run_ranks(_clip_experts, RANKS)


def _save_and_load(path: str) -> None:
    setup = Setup(kind="dtensor")
    mesh = setup.mesh()
    saved, loaded, theirs = (
        setup.model(fully_shard, mesh)
        for fully_shard in (fsdp_ext.fully_shard, fsdp_ext.fully_shard, fsdp.fully_shard)
    )
    torch.manual_seed(0)
    whole = dict(Model(EXPERTS).named_parameters())
    for (name, ours), like in zip(saved.named_parameters(), theirs.parameters(), strict=True):
        assert ours.placements == like.placements
        assert ours.device_mesh == like.device_mesh
        assert torch.equal(ours.full_tensor(), whole[name])
    with torch.no_grad():
        saved(batch(0, 0))
        loaded(batch(0, 0))
    assert loaded._fsdp_ext_unit.root.lanes is saved._fsdp_ext_unit.root.lanes
    assert loaded._fsdp_ext_unit.root.meshes == saved._fsdp_ext_unit.root.meshes
    for module in (*saved.modules(), *loaded.modules()):
        if isinstance(module, fsdp_ext.FSDPModule):
            module.reshard()
    train(setup, saved)
    dcp.save(get_model_state_dict(saved), checkpoint_id=path)
    state = get_model_state_dict(loaded)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(loaded, state)
    for (name, ours), like in zip(loaded.named_parameters(), saved.parameters(), strict=True):
        if "scale" not in name:  # each rank of expert parallelism has another one of this name
            assert torch.equal(ours.to_local(), like.to_local()), name


def test_checkpoints_have_the_experts_of_all_ranks(tmp_path: Path) -> None:
    run_ranks(_save_and_load, RANKS, str(tmp_path / "checkpoint"))


def _ask_for_what_is_not_supported() -> None:
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("ep", "dp_ep"))
    flat = mesh._flatten("dp")
    x = torch.ones(1, 4)

    def sharded(inner: DeviceMesh, outer: DeviceMesh, **options: Any) -> Any:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fsdp_ext.fully_shard(model[0], mesh=inner, **options)
        return fsdp_ext.fully_shard(model, mesh=outer, **options)

    with pytest.raises(NotImplementedError, match=r"that of '0' is 2-D, \(2, 2\). Pass 1-D"):
        sharded(mesh, flat)(x)
    with pytest.raises(NotImplementedError, match=r"unit '0' .* over ranks \[0, 1, 2, 3\], and"):
        sharded(flat, mesh["dp_ep"])(x)
    with pytest.raises(NotImplementedError, match=r"of '0' is 1-D, \(2,\). .* root's replicas"):
        sharded(mesh["dp_ep"], mesh)(x)
    own = mesh["dp_ep" if dist.get_rank() == 0 else "ep"]
    with pytest.raises(ValueError, match="ranks disagree on the mesh of unit 1 of the model"):
        sharded(own, flat)(x)
    model = sharded(mesh["dp_ep"], flat)
    with pytest.raises(NotImplementedError, match="plan got a model whose units have 2 meshes"):
        fsdp_ext.plan(model)
    with pytest.raises(NotImplementedError, match="tune got a model whose units have 2 meshes"):
        fsdp_ext.tune(model, x)
    model(x).sum().backward()
    with pytest.raises(NotImplementedError, match="profile got a model whose units have 2 meshes"):
        fsdp_ext.profile(model)
    text = fsdp_ext.describe_buckets(model)
    assert "4 ranks communicate over shared_memory" in text
    assert "2 ranks share 1 unit over shared_memory" in text
    for fully_shard in (fsdp.fully_shard, fsdp_ext.fully_shard):  # PyTorch has no such norm
        model = Setup().model(fully_shard, mesh)
        model(batch(0, 0)).sum().backward()
        with pytest.raises(RuntimeError, match="must have the same mesh"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_what_is_not_supported_with_several_meshes_is_refused() -> None:
    run_ranks(_ask_for_what_is_not_supported, RANKS)


def _name_one_mesh_twice() -> None:
    plain = init_device_mesh(device().type, (RANKS,))
    named = init_device_mesh(device().type, (RANKS,), mesh_dim_names=("dp",))
    assert plain != named
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fsdp_ext.fully_shard(model[0], mesh=plain)
    fsdp_ext.fully_shard(model, mesh=named, check_every=1)
    model(torch.ones(1, 4)).sum().backward()
    with fsdp_ext.profile(model):
        model(torch.ones(1, 4)).sum().backward()


def test_meshes_of_the_same_ranks_are_one_mesh() -> None:
    run_ranks(_name_one_mesh_twice, RANKS)


def _ask_without_peers() -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    mesh = init_device_mesh(device().type, (2, 4), mesh_dim_names=("ep", "dp_ep"))

    def sharded(**options: Any) -> Any:
        model = nn.Sequential(nn.Linear(8, 8))
        fsdp_ext.fully_shard(model[0], mesh=mesh["dp_ep"], **options)
        return fsdp_ext.fully_shard(model, mesh=mesh._flatten("dp"))

    sharded()(torch.ones(1, 8)).sum().backward()
    checked = nn.Sequential(nn.Linear(8, 8))
    fsdp_ext.fully_shard(checked[0], mesh=mesh["dp_ep"])
    fsdp_ext.fully_shard(checked, mesh=mesh._flatten("dp"), check_every=2)
    with pytest.raises(NotImplementedError, match="check_every got a model whose units have 2 me"):
        checked(torch.ones(1, 8))
    with pytest.raises(NotImplementedError, match="unit '0' has reshard_after_forward=2 and ano"):
        sharded(reshard_after_forward=2)(torch.ones(1, 8))
    model = nn.Sequential(nn.Linear(8, 8))
    for unit, part in ((model[0], mesh["dp_ep"]), (model, mesh._flatten("dp"))):
        transport = Simulated(world_size=part.size(), link=PRESETS["infiniband_400g_nodes"])
        fsdp_ext.fully_shard(unit, mesh=part, transport=transport)
    with pytest.raises(NotImplementedError, match="a Simulated transport supports one"):
        model(torch.ones(1, 8))


def test_smaller_groups_and_simulated_links_are_refused_with_several_meshes() -> None:
    run_ranks(_ask_without_peers, 1, fresh=True)


def _compare_on_thread(rank: int) -> None:
    setup = Setup(step=accumulate)
    mesh = setup.mesh()
    plain = setup.plain(mesh)  # threads share the random numbers, so each has another one
    theirs = train(setup, setup.model(fsdp.fully_shard, mesh, copy.deepcopy(plain)))
    ours = train(setup, setup.model(fsdp_ext.fully_shard, mesh, plain))
    assert_same(ours, theirs, setup.allowed)


def _compare_on_threads() -> None:
    run_threads(_compare_on_thread, RANKS)


@pytest.mark.exhaustive
def test_experts_train_on_ranks_that_are_threads() -> None:
    run_ranks(_compare_on_threads, 1, fresh=True)
