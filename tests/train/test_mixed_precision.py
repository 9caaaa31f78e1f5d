"""All fields of MixedPrecisionPolicy mean what they mean in FSDP2, bit for bit on two ranks.

On the unsharded model a policy is a cast of parameters and inputs, recorded by autograd.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from support import models
from support.accumulation import EACH_TIME, LAST_TIME
from support.launcher import run_ranks
from support.models import Containers, Pair, Stack
from support.parity import (
    DATACLASSES,
    ROUNDING,
    SYSTEM,
    Case,
    Run,
    Sharded,
    check,
    each,
    load_system,
    train_step,
)
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_ext import fully_shard

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
COMPUTE_BF16: Mapping[str, Any] = {"param_dtype": BF16}
REDUCE_FP32: Mapping[str, Any] = {"param_dtype": BF16, "reduce_dtype": FP32}
OUTPUT_FP32: Mapping[str, Any] = {**REDUCE_FP32, "output_dtype": FP32}


def to_bfloat16(run: Run) -> None:
    run.model.to(BF16)


def clipped(run: Run, step: int) -> tuple[Tensor, ...]:
    run.optimizer.zero_grad()
    loss = run.loss(step)
    run.backward(loss)
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
    run.optimizer.step()
    return loss, norm


def evaluation_between_steps(run: Run, step: int) -> tuple[Tensor, ...]:
    """Evaluate after each step, which fails if cast copies do not follow the optimizer."""
    trained = train_step(run, step)
    with torch.no_grad():
        return *trained, run.loss(step, micro_batch=1)


def change_in_place(run: Run, step: int) -> tuple[Tensor, ...]:
    with torch.no_grad():
        before = run.loss(step)
        run.reshard()
        for parameter in run.model.parameters():
            parameter.mul_(0.75)
        after = run.loss(step)
    return before, after, *train_step(run, step)


def as_dict_of_pair(a: Tensor, b: Tensor) -> dict[str, Any]:
    return {"pair": Pair(a, b), "count": torch.tensor(2)}


def pair_in_dict(output: dict[str, Any]) -> tuple[Tensor, ...]:
    assert output["count"].dtype == torch.int64
    return output["pair"].first, output["pair"].second


# A mean over ranks or micro-batches is rounded in another order in low precision.
LOW = ROUNDING[BF16]

CASES = [
    Case("param_dtype=bf16", Stack, precision=COMPUTE_BF16),
    Case("param_dtype=bf16, reduce_dtype=fp32", Stack, precision=REDUCE_FP32),
    Case("a transformer in bf16, reduced in fp32", models.Transformer,
         precision=REDUCE_FP32),
    Case("param_dtype=fp16", Stack, precision={"param_dtype": FP16}),
    Case("param_dtype=fp16, reduce_dtype=fp32", Stack,
         precision={"param_dtype": FP16, "reduce_dtype": FP32}),
    Case("param_dtype=fp16, reduce_dtype=bf16", Stack,
         precision={"param_dtype": FP16, "reduce_dtype": BF16}),
    Case("reduce_dtype=bf16 alone", Stack, precision={"reduce_dtype": BF16}),
    # fsdp_ext scales a gradient in fp32 and rounds it once. FSDP2 rounds it to fp16 and then halves
    # it, which rounds small gradients a second time, because they become subnormal.
    Case("reduce_dtype=fp16 alone", Stack, precision={"reduce_dtype": FP16}, fsdp2=LOW,
         unsharded=LOW),
    Case("output_dtype=fp32", models.BareRoot, precision=OUTPUT_FP32),
    Case("output_dtype=fp64 alone", models.OneUnit, precision={"output_dtype": torch.float64}),
    Case("cast_forward_inputs=False", models.InBfloat16,
         precision={**REDUCE_FP32, "cast_forward_inputs": False}),
    Case("parameters in bf16, reduced in fp32", models.InBfloat16, before_sharding=to_bfloat16,
         precision={"reduce_dtype": FP32}, unsharded=LOW),
    Case("param_dtype=fp32 of parameters in bf16", Stack, before_sharding=to_bfloat16,
         precision={"param_dtype": FP32}, unsharded=LOW),
    Case("reshard_after_forward=False in bf16", Stack, precision=REDUCE_FP32,
         options={"reshard_after_forward": False}),
    Case("units in bf16 below a root in fp32", Stack, unsharded=LOW,
         options={"mp_policy": MixedPrecisionPolicy(**OUTPUT_FP32)},
         root_options={"mp_policy": MixedPrecisionPolicy()}),
    Case("reduced each time in fp32", Stack, precision=REDUCE_FP32, step=EACH_TIME),
    Case("reduced the last time in fp32", Stack, precision=REDUCE_FP32, step=LAST_TIME),
    Case("reduced each time in bf16", Stack, precision=COMPUTE_BF16, step=EACH_TIME),
    Case("reduced the last time in bf16", Stack, precision=COMPUTE_BF16, step=LAST_TIME,
         unsharded=LOW),
    Case("micro-batches that run other units, in bf16", models.BranchingUnits,
         precision=REDUCE_FP32, step=LAST_TIME),
    Case("frozen layers in bf16", models.FrozenBesideTrainable, precision=REDUCE_FP32),
    Case("unused parameters in bf16", models.UnusedParameters, precision=REDUCE_FP32),
    Case("a tied parameter in bf16", models.TiedInUnit, precision=REDUCE_FP32),
    Case("a unit called twice in bf16", models.UnitCalledTwice, precision=REDUCE_FP32),
    Case("a list of modules in bf16", models.GroupedModules, precision=REDUCE_FP32),
    Case("fewer rows than ranks in bf16", models.FewRows, precision=REDUCE_FP32),
    Case("keyword arguments are cast in containers", models.Keywords,
         precision=REDUCE_FP32),
    Case("outputs are cast in containers", partial(Containers, as_dict_of_pair, pair_in_dict),
         precision=OUTPUT_FP32, unsharded=LOW,
         fsdp2_fails=DATACLASSES),
    # The unsharded model has freed its cast parameters when it recomputes.
    Case("recomputed around units in bf16",
         partial(models.Recomputed, inside=False, around=True, use_reentrant=False),
         precision=REDUCE_FP32, unsharded=None),
    Case("recomputed inside units in bf16, reentrant",
         partial(models.Recomputed, inside=True, around=False, use_reentrant=True),
         precision=REDUCE_FP32, unsharded=None),
    Case("evaluation between steps in bf16", Stack, precision=REDUCE_FP32,
         step=evaluation_between_steps),
    Case("parameters changed in place in bf16", Stack, precision=REDUCE_FP32,
         step=change_in_place),
    Case("clipping in bf16", Stack, precision=REDUCE_FP32, step=clipped,
         unsharded=ROUNDING[FP32]),
]  # fmt: skip


@each(CASES, every=3)
def test_mixed_precision_is_that_of_unsharded_casts_and_of_fsdp2(
    case: Case, world_size: int
) -> None:
    check(case, world_size)


def _dtypes_seen() -> dict[str, set[torch.dtype]]:
    case = Case("", models.BareRoot, precision=OUTPUT_FP32)
    run = Sharded(load_system(SYSTEM), case)
    seen: dict[str, set[torch.dtype]] = {"input": set(), "parameter": set(), "output": set()}

    def look(block: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen["input"].add(args[0].dtype)
        seen["parameter"] |= {parameter.dtype for parameter in block.parameters()}

    for block in run.model.blocks:
        block.norm.register_forward_pre_hook(look)
    output = run.forward(run.batch(0))
    run.backward(run.model.loss(output))
    seen["output"].add(output.dtype)
    seen["sharded"] = {parameter.dtype for parameter in run.parameters.values()}
    seen["gradient"] = {parameter.grad.dtype for parameter in run.parameters.values()}
    return seen


def test_units_compute_in_param_dtype_while_shards_and_gradients_stay_in_theirs() -> None:
    for seen in run_ranks(_dtypes_seen, 2):
        assert seen == {
            "input": {BF16},
            "parameter": {BF16},
            "output": {FP32},
            "sharded": {FP32},
            "gradient": {FP32},
        }


def _smallest_gradients() -> None:
    smallest = 2.0**-24  # in fp16
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    for shard in (torch_fully_shard, fully_shard):
        model = shard(nn.Linear(1, 1, bias=False), mp_policy=policy)
        model(torch.full((1, 1), 2 * smallest, dtype=torch.float16)).sum().backward()
        assert model.weight.grad.full_tensor().item() == 2 * smallest


def test_the_mean_of_two_ranks_gradients_in_fp16_has_the_smallest_numbers() -> None:
    run_ranks(_smallest_gradients, 2)


def _written_before_a_reshard() -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    model = fully_shard(nn.Linear(4, 4), mp_policy=policy, reshard_after_forward=True)
    x = torch.ones(1, 4, requires_grad=True)
    output = model(x)
    model.weight.data.fill_(2.0)  # no version tells
    model.reshard()
    output.sum().backward()
    assert torch.equal(x.grad, torch.full((1, 4), 8.0))


def test_after_a_reshard_of_the_user_backward_reads_what_was_written_before() -> None:
    run_ranks(_written_before_a_reshard, 2)
