"""``reshard_after_forward=k`` gathers over k ranks in backward, and trains bit for bit as True."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import models
from support.extended_models import Setup, compare
from support.extended_models import train_step as train_extensions
from support.launcher import run_ranks
from support.matrix import exhaustive
from support.models import Stack
from support.parity import (
    EXACT,
    Case,
    Run,
    Sharded,
    assert_learning,
    assert_same_history,
    compare_on_rank,
    device,
    load_system,
    train_step,
    trained,
)
from support.planned import FAST, expect_as_planned, train
from support.random_programs import Program, assert_same_record
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import fsdp_ext
from fsdp_ext import MixedPrecisionPolicy, Simulated, fully_shard, plan

RANKS = 4
GROUP = 2
OURS = load_system("fsdp_ext")
BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def one_unit_a_bucket(run: Run) -> None:
    if isinstance(run.model, fsdp_ext.FSDPModule):
        for unit in run.model._fsdp_ext_units(recurse=True):
            unit.change(bucket_bytes=0)


def cut_into_messages(run: Run) -> None:
    if isinstance(run.model, fsdp_ext.FSDPModule):
        for unit in run.model._fsdp_ext_units(recurse=True):
            unit.change(bucket_bytes=0, max_message_bytes=400)


def two_units_a_bucket(run: Run) -> None:
    if isinstance(run.model, fsdp_ext.FSDPModule):
        for unit in run.model._fsdp_ext_units(recurse=True):
            unit.change(bucket_bytes=3000)


def evaluate_before(run: Run, step: int) -> tuple[Tensor, ...]:
    with torch.no_grad():
        before = run.loss(step, 1)
    return before, *train_step(run, step)


def two_forwards_before_two_backwards(run: Run, step: int) -> tuple[Tensor, ...]:
    run.optimizer.zero_grad()
    first, second = run.loss(step, 0), run.loss(step, 1)
    run.backward(second)
    run.backward(first)
    run.optimizer.step()
    return first, second


def unshard_and_reshard_before_backward(run: Run, step: int) -> tuple[Tensor, ...]:
    run.optimizer.zero_grad()
    loss = run.loss(step)
    run.model.blocks[0].unshard()
    run.model.blocks[2].unshard(async_op=True).wait()
    run.model.blocks[0].reshard()
    run.backward(loss)
    run.optimizer.step()
    run.reshard()
    return (loss,)


def fail_in_backward_first(run: Run, step: int) -> tuple[Tensor, ...]:
    def fail(gradient: Tensor) -> None:
        raise KeyError("on purpose")

    def fail_at(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(fail)

    handle = run.model.blocks[1].up.register_forward_hook(fail_at)
    with pytest.raises(KeyError):
        run.loss(step).backward()
    handle.remove()
    return train_step(run, step)


def write_unnoticed_before_backward(run: Run, step: int) -> tuple[Tensor, ...]:
    """Change parameters in a way that no version tells, and say so by ``reshard()``."""
    run.optimizer.zero_grad()
    loss = run.loss(step)
    for name in ("blocks.0.down.weight", "blocks.2.up.weight"):
        run.parameters[name].data.mul_(1.25)
    if run.sharded:
        run.model.blocks[0].reshard()
        run.model.blocks[2].reshard()
    run.backward(loss)
    run.optimizer.step()
    return (loss,)


def scale_a_parameter_before_backward(run: Run, step: int) -> tuple[Tensor, ...]:
    run.optimizer.zero_grad()
    loss = run.loss(step)
    with torch.no_grad():
        run.parameters["blocks.0.down.weight"].mul_(1.25)
    run.backward(loss)
    run.optimizer.step()
    return (loss,)


class Checkpointed(Stack):
    def __init__(self, use_reentrant: bool = False) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


class CheckpointedReentrantly(Checkpointed):
    def __init__(self) -> None:
        super().__init__(use_reentrant=True)


class FourColumns(Stack):
    """Dimension 1 of the layers' weights is a multiple of four."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Square() for _ in range(3))


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(models.DIM, 8)
        self.outer = nn.Linear(8, models.DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


def by_columns(parameter: Tensor) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % RANKS == 0 else None


IN_GROUPS: dict[str, Any] = {"reshard_after_forward": GROUP}
GROUPED = Case("as it is", Stack, worlds=(RANKS,), options=IN_GROUPS)


def _like(fact: str, **changes: Any) -> Case:
    return dataclasses.replace(GROUPED, fact=fact, **changes)


ALONE = _like("one unit a bucket", after_sharding=one_unit_a_bucket)
CASES = [
    ALONE,
    _like("two units a bucket", after_sharding=two_units_a_bucket),
    _like("in messages, bf16", after_sharding=cut_into_messages, precision=BF16),
    _like("checkpointed", subject=Checkpointed, after_sharding=one_unit_a_bucket),
    _like("checkpointed reentrantly", subject=CheckpointedReentrantly,
          after_sharding=one_unit_a_bucket),
    _like("frozen and trained", subject=models.FrozenUnit, after_sharding=one_unit_a_bucket),
    _like("fewer rows than ranks", subject=models.FewRows, after_sharding=one_unit_a_bucket),
    _like("evaluations", step=evaluate_before, after_sharding=one_unit_a_bucket),
    _like("two forwards", step=two_forwards_before_two_backwards,
          after_sharding=one_unit_a_bucket),
    _like("a parameter that changes before backward", step=scale_a_parameter_before_backward,
          after_sharding=one_unit_a_bucket),
    _like("a backward that fails", step=fail_in_backward_first, after_sharding=one_unit_a_bucket),
    _like("the root keeps its parameters", root_options={"reshard_after_forward": None}),
    _like("columns", subject=FourColumns, after_sharding=one_unit_a_bucket,
          options={**IN_GROUPS, "shard_placement_fn": by_columns}),
]  # fmt: skip
UNSHARDED_BEFORE_BACKWARD = _like(
    "units that the user unshards",
    step=unshard_and_reshard_before_backward,
    after_sharding=one_unit_a_bucket,
)
RESHARDED_BY_THE_USER = _like(
    "the user reshards units",
    step=write_unnoticed_before_backward,
    after_sharding=one_unit_a_bucket,
)
AFTER_FORWARD = dataclasses.replace(
    RESHARDED_BY_THE_USER, worlds=(2,), options={"reshard_after_forward": True}
)
IN_BF16 = dataclasses.replace(
    RESHARDED_BY_THE_USER, after_sharding=two_units_a_bucket, precision=BF16, unsharded=None
)
IN_ONE_BUCKET = dataclasses.replace(AFTER_FORWARD, after_sharding=None)


def _trained(case: Case, poisoned: bool) -> tuple[list[Any], int]:
    """Return the records of a training, and how many gathers of groups it had."""
    run = Sharded(OURS, case)
    run.under_test = True
    if poisoned:
        run.model(*run.batch(0)[0])
        run.model._fsdp_ext_unit.root.impl.set_poison_released_slots(True)
    records = trained(run)
    counters = run.model._fsdp_ext_unit.root.impl.counters()
    assert counters["all_gathers"] > 0
    return records, counters["group_all_gathers"]


def _bitwise(cases: list[Case], uses_groups: bool) -> None:
    for case in cases:
        got, gathers = _trained(case, poisoned=True)
        assert (gathers > 0) == uses_groups, case.fact
        of_all = {**case.options, "reshard_after_forward": True}
        want, none = _trained(dataclasses.replace(case, options=of_all), poisoned=False)
        assert none == 0
        assert_learning(got)
        assert_same_history(case.fact, want, got, EXACT)


def _some(transport: str | None, *places: int) -> list[Case]:
    return [
        dataclasses.replace(case, options={"transport": transport, **case.options})
        for place, case in enumerate(CASES)
        if place in places
    ]


QUICK = (2, 4, 7, 8)


@pytest.mark.parametrize(
    "cases",
    [
        _some(None, *QUICK),
        *exhaustive(
            _some(None, *(place for place in range(len(CASES)) if place not in QUICK)),
            _some("process_group", *QUICK),
        ),
    ],
    ids=["quick", "others", "over gloo"],
)
def test_units_in_groups_train_bit_for_bit_as_over_all_ranks(cases: list[Case]) -> None:
    run_ranks(_bitwise, RANKS, cases, True)


def test_after_an_unshard_of_the_user_backward_gathers_from_all_ranks() -> None:
    run_ranks(_bitwise, RANKS, [UNSHARDED_BEFORE_BACKWARD], False)


@pytest.mark.parametrize(
    "case",
    [RESHARDED_BY_THE_USER, *exhaustive(IN_BF16, IN_ONE_BUCKET, AFTER_FORWARD)],
)
def test_after_a_reshard_of_the_user_backward_reads_what_was_written_before(case: Case) -> None:
    run_ranks(compare_on_rank, case.worlds[0], case, "fsdp_ext")


@pytest.mark.parametrize("case", [ALONE, *exhaustive(CASES[2], CASES[3], CASES[8])])
def test_units_in_groups_train_as_under_fsdp2(case: Case) -> None:
    run_ranks(compare_on_rank, RANKS, case, "fsdp_ext")


@pytest.mark.exhaustive
def test_sets_of_four_ranks_train_in_groups_as_under_fsdp2() -> None:
    hybrid = dataclasses.replace(ALONE, fact="two sets of four", mesh=(2, RANKS))
    run_ranks(compare_on_rank, 2 * RANKS, hybrid, "fsdp_ext")


def _extensions_in_groups() -> int:
    models = [
        Setup(options={"reshard_after_forward": reshard}, ours={"bucket_bytes": 0}).model(
            fully_shard
        )
        for reshard in (GROUP, True)
    ]
    optimizers = [
        torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.05)
        for model in models
    ]
    for step in range(3):
        losses = [
            train_extensions(model, optimizer, step, 1)
            for model, optimizer in zip(models, optimizers, strict=True)
        ]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*losses, strict=True))
        compare(models, f"step {step}")
    counters: dict[str, int] = models[0]._fsdp_ext_unit.root.impl.counters()
    return counters["group_all_gathers"]


def test_parameters_that_say_how_they_are_gathered_train_in_groups_as_over_all_ranks() -> None:
    assert all(gathers > 0 for gathers in run_ranks(_extensions_in_groups, RANKS))


# - Random programs


class InGroups(Program):
    """The same program, with units in groups where it has units that are resharded."""

    def shard(self, module: nn.Module, **options: Any) -> None:
        if options.get("reshard_after_forward") is not False:
            options["reshard_after_forward"] = GROUP
        super().shard(module, **options)


class Resharded(Program):
    """The same program, with a root that is resharded, too."""

    def shard(self, module: nn.Module, **options: Any) -> None:
        if options.get("reshard_after_forward") is not False:
            options["reshard_after_forward"] = True
        super().shard(module, **options)


def _same_in_groups(seeds: list[int]) -> None:
    for seed in seeds:
        got = InGroups(seed, "fsdp_ext").run()
        want = Resharded(seed, "fsdp_ext").run()
        assert_same_record(want, got, f"seed {seed}: ")


@pytest.mark.parametrize("seeds", [[0, 1, 2], *exhaustive([*range(3, 10)], [*range(10, 17)])])
def test_random_programs_train_in_groups_as_over_all_ranks(seeds: list[int]) -> None:
    run_ranks(_same_in_groups, RANKS, seeds)


# - Memory, settings and reports


def _has_what_was_planned(transports: list[Any]) -> None:
    warnings.simplefilter("ignore")
    for transport in transports:
        if isinstance(transport, Simulated):
            dist.destroy_process_group()
            transport.init_process_group()
        world = dist.get_world_size()
        mesh = None
        if isinstance(transport, Simulated) and transport.replicas > 1:
            mesh = init_device_mesh(device().type, (transport.replicas, transport.shards))
        for settings in (
            {},
            {"bucket_bytes": 0},
            {"bucket_bytes": 10**5, "max_message_bytes": 1500},
            {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        ):
            torch.manual_seed(0)
            model: Any = models.Transformer()
            for unit in model.units():
                fully_shard(unit, mesh=mesh, transport=transport, **IN_GROUPS, **settings)
            fully_shard(model, mesh=mesh, transport=transport, **settings)
            planned = plan(model)
            assert planned.memory.group_shards > 0
            assert "kept for backward by groups" in str(planned)
            expect_as_planned(model, train(model), planned)
            if not settings and transport is None:
                with torch.device("meta"):
                    plain = models.Transformer()
                units: Any = plain.units()
                before = plan(plain, world, units=units, device_type="cpu", **IN_GROUPS)
                # The root is in a group, too.
                assert before.memory.group_shards > planned.memory.group_shards


def test_ranks_in_groups_have_what_was_planned() -> None:
    simulated = [Simulated(8, FAST), Simulated(8, FAST, replicas=2)]
    run_ranks(_has_what_was_planned, 1, list[Any](simulated))
    run_ranks(_has_what_was_planned, RANKS, [None, "process_group"])


def _gathers() -> list[tuple[str, str, str]]:
    """Return the gathers of a step, by operation, phase and unit."""
    torch.manual_seed(0)
    model: Any = Stack()
    for unit in model.units():
        fully_shard(unit, **IN_GROUPS)
    fully_shard(model, bucket_bytes=0)
    train(model)
    train(model)
    impl = model._fsdp_ext_unit.root.impl
    before = impl.memory()
    impl.reset_counters()
    impl.enable_log(True)
    with fsdp_ext.profile(model) as prof:
        train(model)
    prof.merge()
    log = [record[:3] for record in impl.take_log() if "gather" in record[0]]
    assert impl.memory() == before
    assert impl.counters()["overflow_slots"] == 0
    rows = {(row.operation, row.phase, row.units) for row in prof.rows()}
    assert ("group gather", "backward", "blocks.0") in rows
    assert "over groups of 2 ranks" in fsdp_ext.describe_buckets(model)
    model.set_reshard_after_forward(True)
    train(model)
    impl.enable_log(True)
    train(model)
    assert all(record[0] != "group_all_gather" for record in impl.take_log())
    return log


def test_backward_gathers_over_the_group_alone() -> None:
    forward = [("all_gather", "forward", unit) for unit in ("the root", *_BLOCKS)]
    backward = [("group_all_gather", "backward", "blocks.0")]  # the others are in their slots
    assert run_ranks(_gathers, RANKS) == [forward + backward] * RANKS


_BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


def _refused() -> None:
    model: Any = fully_shard(nn.Linear(4, 4), reshard_after_forward=GROUP)
    mesh = init_device_mesh(device().type, (RANKS, 1), mesh_dim_names=("dp", "tp"))
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tp"], [Shard(0)]))
    with pytest.raises(NotImplementedError, match="parameter 'weight', which is a DTensor"):
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=GROUP)
    if hasattr(fsdp_ext, "DataParallelMeshDims"):  # not in torch 2.11
        dims = fsdp_ext.DataParallelMeshDims(shard="dp")
        with pytest.raises(NotImplementedError, match="is not supported with dp_mesh_dims"):
            fully_shard(layer, mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=GROUP)
    with pytest.raises(NotImplementedError, match="tune cannot predict gathers of smaller groups"):
        fsdp_ext.tune(model, torch.randn(2, 4))
    with pytest.raises(NotImplementedError, match="plan cannot predict times with resh"):
        plan(model, compute={"the root": (1.0, 2.0)})
    with pytest.raises(ValueError, match=r"plan got 7 ranks .* multiple of 2"):
        plan(fully_shard(nn.Linear(4, 4), reshard_after_forward=GROUP), 7)


def test_what_groups_do_not_support_is_refused() -> None:
    run_ranks(_refused, RANKS)


def _train_with_other_groups() -> str:
    torch.manual_seed(0)
    model: Any = Stack()
    for number, unit in enumerate(model.units()):
        other = number == 1 and dist.get_rank() == 1
        fully_shard(unit, reshard_after_forward=True if other else GROUP)
    fully_shard(model, bucket_bytes=0)
    with pytest.raises(ValueError, match="reshard_after_forward") as error:
        train(model)
    return str(error.value)


def test_ranks_that_disagree_about_groups_get_an_error_before_they_connect() -> None:
    errors = run_ranks(_train_with_other_groups, RANKS)
    assert errors == RANKS * [
        "rank 0 shards unit 'blocks.1' over 4 ranks (reshard_after_forward: 2), but rank 1 shards "
        "it over 4 ranks (reshard_after_forward: no number). Pass one dimension of the same mesh "
        "and the same reshard_after_forward to fully_shard on all ranks."
    ]


def _reshard_on_some_ranks() -> str:
    torch.manual_seed(0)
    model: Any = Stack()
    for unit in model.units():
        fully_shard(unit, reshard_after_forward=GROUP)
    fully_shard(model, bucket_bytes=0)
    loss = model(*model.batch(torch.Generator().manual_seed(0))[0]).sum()
    if dist.get_rank() < GROUP:
        model.blocks[0].reshard()
    with pytest.raises(RuntimeError) as error:
        loss.backward()
    return str(error.value)


def test_ranks_of_which_some_reshard_before_backward_get_an_error() -> None:
    for message in run_ranks(_reshard_on_some_ranks, RANKS, fresh=True):
        assert "the all-gather over 2 ranks of unit 'blocks.0'" in message
        assert "issues the all-gather of unit 'blocks.0'" in message


def _poisoned_between_passes() -> None:
    """Poison slots while copies of earlier releases may still read them."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    expected = copy.deepcopy(model)
    fully_shard(model[1], reshard_after_forward=2)
    fully_shard(model)
    x = torch.ones(2, 6)
    losses = [model(factor * x).square().mean() for factor in (1, 2)]
    model._fsdp_ext_unit.root.impl.set_poison_released_slots(True)
    torch.autograd.backward(losses)
    torch.autograd.backward([expected(factor * x).square().mean() for factor in (1, 2)])
    for param, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), other.grad)


def test_slots_may_be_poisoned_between_forward_and_backward() -> None:
    run_ranks(_poisoned_between_passes, 4)
