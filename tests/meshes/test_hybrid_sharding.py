"""A 2-D mesh shards over its second dimension and replicates over its first, as with FSDP2."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.fsdp1_parity import BY_BLOCK, FSDP, assert_equal, make, run, torch_fsdp, train
from support.launcher import run_ranks
from support.matrix import exhaustive
from support.models import DIM, Stack
from support.parity import EXACT, ROUNDING, Case, Run, adamw, check, compare_on_rank, each
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, ShardingStrategy, StateDictType

import fsdp_ext
from bench.harness import hosts
from fsdp_ext import MixedPrecisionPolicy, fully_shard

SUMMED_IN_ANOTHER_ORDER = ROUNDING[torch.float32]


def _accumulate(run: Run, step: int, setter: str) -> tuple[Tensor, ...]:
    run.optimizer.zero_grad()
    losses = []
    for micro_batch in range(3):
        last = micro_batch == 2
        loss = run.loss(step, micro_batch)
        if run.sharded:
            getattr(run.model, setter)(last)
            loss.backward()
        else:
            run.backward(loss, sync=last)
        losses.append(loss)
    run.optimizer.step()
    return tuple(losses)


def accumulate_without_sync(run: Run, step: int) -> tuple[Tensor, ...]:
    return _accumulate(run, step, "set_requires_gradient_sync")


def accumulate_without_all_reduce(run: Run, step: int) -> tuple[Tensor, ...]:
    return _accumulate(run, step, "set_requires_all_reduce")


def end_by_the_other_setter(run: Run, step: int) -> tuple[Tensor, ...]:
    """set_requires_gradient_sync turns the all-reduce on again, too."""
    run.optimizer.zero_grad()
    run.model.set_requires_all_reduce(False)
    first = run.loss(step)
    first.backward()
    run.model.set_requires_gradient_sync(True)
    second = run.loss(step, micro_batch=1)
    second.backward()
    run.optimizer.step()
    return first, second


def accumulate_in_turns(run: Run, step: int) -> tuple[Tensor, ...]:
    """Reduce the gradients of half of the units while the others accumulate, then those of all."""
    run.optimizer.zero_grad()
    losses = []
    for micro_batch in range(3):
        for number, unit in enumerate([run.model, *run.units]):
            syncs = micro_batch == 2 or (micro_batch == 1 and number % 2 == 0)
            unit.set_requires_gradient_sync(syncs, recurse=False)
        loss = run.loss(step, micro_batch)
        loss.backward()
        losses.append(loss)
    run.optimizer.step()
    return tuple(losses)


def clip(run: Run, step: int) -> tuple[Tensor, ...]:
    run.optimizer.zero_grad()
    loss = run.loss(step)
    run.backward(loss)
    norm = nn.utils.clip_grad_norm_(run.parameters.values(), 0.1)
    run.optimizer.step()
    return loss, norm


def evaluate_between_steps(run: Run, step: int) -> tuple[Tensor, ...]:
    with torch.no_grad():
        before = run.loss(step, micro_batch=1)
    run.optimizer.zero_grad()
    loss = run.loss(step)
    run.backward(loss)
    run.optimizer.step()
    return before, loss


def cut_into_messages(run: Run) -> None:
    """Let each unit of ours be a bucket of several messages."""
    if isinstance(run.model, fsdp_ext.FSDPModule):
        for unit in run.model._fsdp_ext_units(recurse=True):
            unit.change(bucket_bytes=0, max_message_bytes=256)


HYBRID = Case(
    "two sets of two ranks",
    Stack,
    worlds=(4,),
    mesh=(2, 2),
    unsharded=SUMMED_IN_ANOTHER_ORDER,
)
ONE_RANK = dataclasses.replace(
    HYBRID, fact="sets of one rank", worlds=(2,), mesh=(2, 1), unsharded=EXACT
)
BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@each(
    [
        HYBRID,
        dataclasses.replace(HYBRID, fact="one set", worlds=(2,), mesh=(1, 2)),
        ONE_RANK,
        dataclasses.replace(
            ONE_RANK,
            fact="sets of one rank, bf16 with sums in fp32",
            precision=BF16,
            unsharded=None,
            optimizer=adamw,
            after_sharding=cut_into_messages,
            step=evaluate_between_steps,
        ),
        dataclasses.replace(
            ONE_RANK,
            fact="sets of one rank, fp16",
            precision={"param_dtype": torch.float16, "reduce_dtype": torch.float16},
            unsharded=None,
        ),
        dataclasses.replace(
            ONE_RANK,
            fact="sets of one rank, accumulation",
            step=accumulate_without_sync,
        ),
        dataclasses.replace(
            ONE_RANK,
            fact="sets of one rank, accumulation without all-reduce that a sync ends",
            step=end_by_the_other_setter,
            unsharded=None,
        ),
        dataclasses.replace(
            ONE_RANK,
            fact="sets of one rank, units that synchronise in turns",
            step=accumulate_in_turns,
            unsharded=None,
        ),
        dataclasses.replace(
            ONE_RANK,
            fact="sets of one rank, bf16 accumulation",
            precision=BF16,
            unsharded=None,
            step=accumulate_without_all_reduce,
            fsdp2=SUMMED_IN_ANOTHER_ORDER,
        ),
        dataclasses.replace(
            HYBRID,
            fact="each unit is a bucket, cut into messages",
            after_sharding=cut_into_messages,
            optimizer=adamw,
            step=evaluate_between_steps,
        ),
        dataclasses.replace(HYBRID, fact="bf16 with sums in fp32", precision=BF16, unsharded=None),
        dataclasses.replace(
            HYBRID,
            fact="accumulation without synchronisation",
            step=accumulate_without_sync,
        ),
        dataclasses.replace(
            HYBRID,
            fact="accumulation without all-reduces",
            step=accumulate_without_all_reduce,
            fsdp2=SUMMED_IN_ANOTHER_ORDER,
        ),
        dataclasses.replace(HYBRID, fact="clipped gradients", step=clip),
    ],
    quick=(2,),
)
def test_hybrid_sharding_trains_as_fsdp2_does(case: Case, world_size: int) -> None:
    check(case, world_size)


# - What no other system is compared with

WIDTH = 8


def hybrid_mesh(sets: int = 2, ranks: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (sets, ranks), mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, units: Iterable[nn.Module], mesh: DeviceMesh) -> Any:
    for unit in units:
        fully_shard(unit, mesh=mesh, bucket_bytes=0)
    return fully_shard(model, mesh=mesh, bucket_bytes=0)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def _train(delayed: str | None, shape: tuple[int, int], accumulates: bool) -> list[Tensor]:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(torch.bfloat16)
    model = shard(layers, layers, hybrid_mesh(*shape))
    for unit in model._fsdp_ext_units(recurse=True):
        # Reductions in fp32, so that buckets take turns with the halves of the reduce output.
        unit.change(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        root = model._fsdp_ext_unit.root
        if delayed is not None and root is not None:
            root.impl.set_poison_released_slots(True)
            root.impl.delay_stream(delayed, 0.03)
        # Two backwards accumulate, two reduce, and only the last one waits for reductions.
        if accumulates:
            model.set_requires_gradient_sync(step % 2 == 1)
            model.set_is_last_backward(step == 3)
        else:
            optimizer.zero_grad()
        model(batch(step, dist.get_rank()).bfloat16()).float().pow(2).sum().backward()
        if not accumulates or step == 3:
            optimizer.step()
    return [param.full_tensor().detach() for param in model.parameters()]


def _compare_delayed(shape: tuple[int, int], accumulates: bool) -> None:
    expected = _train(None, shape, accumulates)
    for delayed in ("gather", "reduce", "all-reduce"):
        for want, have in zip(expected, _train(delayed, shape, accumulates), strict=True):
            assert want.isfinite().all()
            assert torch.equal(want, have), delayed


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("shape", [(2, 2), *exhaustive((2, 1))])
def test_results_do_not_depend_on_how_long_a_stream_takes(
    shape: tuple[int, int], accumulates: bool
) -> None:
    run_ranks(_compare_delayed, shape[0] * shape[1], shape, accumulates)


class Experts(nn.Module):
    """Experts of one unit, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return self.experts[expert](x)


def _train_experts(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = Experts()
    copies = [copy.deepcopy(model) for _ in range(dist.get_world_size())]
    model = shard(model, [], hybrid_mesh(*shape))
    model(batch(0, dist.get_rank()), dist.get_rank() // shape[1]).sum().backward()
    for rank, unsharded in enumerate(copies):
        unsharded(batch(0, rank), rank // shape[1]).sum().backward()
    for name, param in model.named_parameters():
        grads = [dict(each.named_parameters())[name].grad for each in copies]
        used = [grad for grad in grads if grad is not None]
        assert (param.grad is None) == (not used), name
        if param.grad is not None:
            torch.testing.assert_close(param.grad.full_tensor(), sum(used) / len(copies))


@pytest.mark.parametrize("shape", [(2, 2), (2, 1)])
def test_a_parameter_that_one_set_uses_has_its_gradient_in_both(shape: tuple[int, int]) -> None:
    run_ranks(_train_experts, shape[0] * shape[1], shape)


def _run_in_another_order(shape: tuple[int, int]) -> str:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
    model = nn.Sequential(*layers)
    shard(model, layers, hybrid_mesh(*shape))
    model(batch(0, dist.get_rank())).sum().backward()
    if dist.get_rank() >= shape[1]:
        model[0], model[1] = model[1], model[0]
    try:
        for step in (1, 2):
            model(batch(step, dist.get_rank())).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("shape", [(2, 2), *exhaustive((2, 1))])
def test_sets_that_run_units_in_different_orders_name_both(shape: tuple[int, int]) -> None:
    for message in run_ranks(_run_in_another_order, shape[0] * shape[1], shape, fresh=True):
        assert "issued different collectives" in message
        assert "unit '0'" in message
        assert "unit '1'" in message


def _train_another_model_in_one_set() -> None:
    mesh = hybrid_mesh()
    both, own = (fully_shard(nn.Linear(WIDTH, WIDTH), mesh=each) for each in (mesh, mesh["shard"]))
    for step in range(3):
        both(batch(step, dist.get_rank())).sum().backward()
        if dist.get_rank() < 2:
            own(batch(step, dist.get_rank())).sum().backward()


def test_one_set_of_shards_may_train_another_model() -> None:
    run_ranks(_train_another_model_in_one_set, 4)


def _differ(setting: str) -> str:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    is_first = dist.get_rank() < 2
    options = {}
    if setting == "bucket_bytes":
        options["bucket_bytes"] = 0 if is_first else 1 << 20
    elif setting == "prefetch":
        options["prefetch"] = 0 if is_first else 2
    elif setting == "frozen":
        layers[0].requires_grad_(is_first)
    mesh = hybrid_mesh()
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    model = fully_shard(layers, mesh=mesh, **options)
    try:
        for _ in range(2):
            model(batch(0, 0)).sum().backward()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def test_shard_groups_that_cut_the_model_differently_raise() -> None:
    for message in run_ranks(_differ, 4, "bucket_bytes"):
        assert "rank 0 has unit 'the root' (bucket_bytes=0, " in message
    for message in run_ranks(_differ, 4, "frozen"):
        assert "where rank 2 has unit '0' (frozen)" in message
    assert run_ranks(_differ, 4, "prefetch") == [""] * 4


def _ask_for_what_is_not_supported() -> None:
    with pytest.raises(ValueError, match="3-D mesh"):
        fully_shard(nn.Linear(WIDTH, WIDTH), mesh=init_device_mesh("cpu", (1, 1, 2)))


def test_meshes_that_are_not_supported_are_refused() -> None:
    run_ranks(_ask_for_what_is_not_supported, 2)


def _gradient_on(ranks: list[list[int]]) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    shard(model, [], DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard")))
    model(batch(0, 0)).square().sum().backward()
    return model[0].weight.grad.full_tensor()


def _order_ranks() -> None:
    expected = _gradient_on([[0, 1], [2, 3]])
    for ranks in ([[2, 3], [0, 1]], [[0, 2], [1, 3]], [[1, 0], [3, 2]]):
        torch.testing.assert_close(_gradient_on(ranks), expected)
    for ranks in ([[0, 1], [3, 2]], [[0, 2], [3, 1]]):
        with pytest.raises(ValueError, match=r"ranks .*, whose rows are not in one order"):
            _gradient_on(ranks)


def test_meshes_whose_replicas_would_have_different_shards_are_refused() -> None:
    run_ranks(_order_ranks, 4)


def _describe() -> str:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    shard(model, [], hybrid_mesh())
    with torch.no_grad():
        model(batch(0, 0))
    return fsdp_ext.describe_buckets(model)


def test_a_description_says_how_replicas_communicate() -> None:
    for text in run_ranks(_describe, 4):
        assert "gradients are summed over 2 replicas over shared_memory" in text


def _checkpoint(path: str) -> None:
    def sharded(mesh: DeviceMesh, seed: int) -> Any:
        torch.manual_seed(seed)
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
        return shard(layers, layers, mesh)

    saved = sharded(hybrid_mesh(), seed=0)
    dcp.save(get_model_state_dict(saved), checkpoint_id=path)
    want = get_model_state_dict(saved, options=StateDictOptions(full_state_dict=True))
    for mesh in (hybrid_mesh(), init_device_mesh("cpu", (4,))):
        loaded = sharded(mesh, seed=1)
        state = get_model_state_dict(loaded)
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(loaded, state)
        for name, param in loaded.named_parameters():
            assert torch.equal(param.full_tensor(), want[name])
    copied = copy.deepcopy(saved.state_dict())
    for name, param in saved.named_parameters():
        assert torch.equal(copied[name].to_local(), param.to_local())


def test_checkpoints_load_on_meshes_of_one_and_of_two_dimensions(tmp_path: Path) -> None:
    run_ranks(_checkpoint, 4, str(tmp_path))


def _train_as_fsdp1_does() -> None:
    mesh = hybrid_mesh()
    shards, replicas = mesh.get_group(1), mesh.get_group(0)
    for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        options = {"sharding_strategy": strategy, "auto_wrap_policy": BY_BLOCK}
        expected = make(Stack)
        want = train(torch_fsdp(expected, process_group=(shards, replicas), **options), expected)
        for given in ({"device_mesh": mesh}, {"process_group": (shards, replicas)}):
            model = make(Stack, seed=dist.get_rank())
            wrapped = FSDP(model, sync_module_states=True, **given, **options)
            assert_equal(train(wrapped, model), want)
        wrapped.clip_grad_norm_(0.1)
    with pytest.raises(ValueError, match="HYBRID_SHARD_ZERO2 got one process group"):
        fsdp_ext.FullyShardedDataParallel(
            make(Stack), process_group=dist.group.WORLD, sharding_strategy=strategy
        )
    with pytest.raises(ValueError, match="FULL_SHARD got a pair of process groups"):
        fsdp_ext.FullyShardedDataParallel(make(Stack), process_group=(shards, replicas))

    rank = dist.get_rank()
    other = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])][0 if rank in (0, 3) else 1]
    with pytest.raises(ValueError, match="do not have the same number in their shard groups"):
        fsdp_ext.FullyShardedDataParallel(
            make(Stack), process_group=(shards, other), sharding_strategy=strategy
        )


def test_hybrid_strategies_train_as_those_of_fsdp1_do() -> None:
    run_ranks(_train_as_fsdp1_does, 4)


def _show_rank_0_of_each_set() -> None:
    groups = (hybrid_mesh().get_group(1), hybrid_mesh().get_group(0))
    config = FullStateDictConfig(rank0_only=True)
    found = []
    for system in (fsdp_ext.FullyShardedDataParallel, torch_fsdp):
        model = make(Stack)
        wrapped = system(
            model, process_group=groups, sharding_strategy=ShardingStrategy.HYBRID_SHARD
        )
        run(wrapped, model, 0)
        with type(wrapped).state_dict_type(wrapped, StateDictType.FULL_STATE_DICT, config):
            names = sorted(wrapped.state_dict())
        with type(wrapped).summon_full_params(wrapped, writeback=False, rank0_only=True):
            found.append((names, model.stem.weight.shape == (DIM, DIM)))
    assert found[0][0] == found[1][0]
    assert bool(found[0][0]) == (dist.get_rank(groups[0]) == 0)
    if dist.get_rank(groups[0]) == 0:
        assert found == [found[0]] * 2


def test_each_set_of_ranks_has_a_rank_0_as_with_fsdp1() -> None:
    run_ranks(_show_rank_0_of_each_set, 4)


def _train_on_hosts(case: Case) -> list[str]:
    compare_on_rank(case, "fsdp_ext")
    model = shard(nn.Linear(WIDTH, WIDTH), [], hybrid_mesh())
    model(batch(0, 0)).sum().backward()
    root = model._fsdp_ext_unit.root
    return [root.lanes.transport, root.replicas.transport]


@pytest.mark.exhaustive
@pytest.mark.skipif(bool(reason := hosts.why_not()), reason=reason)
def test_sets_on_two_hosts_share_memory_within_and_send_messages_between() -> None:
    with hosts.Hosts() as pair:
        transports = run_ranks(_train_on_hosts, 4, HYBRID, hosts=pair)
    assert transports == [["shared_memory", "process_group"]] * 4
