"""Models train on a GPU, over NCCL, as they do unsharded and under FSDP2.

With 2 and 4 ranks, all share one GPU and talk over sockets (support/shared_gpu.py). That shows
that the numbers are right, but nothing about speed.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
from support import models, nccl_library
from support.gpu_cases import DIRECT, PACKED, train_cases
from support.models import Stack, Transformer
from support.parity import Case, Run, adamw


def _to_bfloat16(run: Run) -> None:
    run.model.bfloat16()


BF16 = {"param_dtype": torch.bfloat16}
CASES = [
    Case("layers", Stack),
    Case("one_unit", models.OneUnit),
    Case("a_root_without_parameters", models.BareRoot),
    Case("a_group_of_modules", models.GroupedModules),
    Case("nested_units", models.NestedUnits),
    Case("a_transformer", Transformer, optimizer=adamw),
    Case("frozen_beside_trainable", models.FrozenBesideTrainable),
    Case("unused_parameters", models.UnusedParameters),
    Case("tied_parameters", models.TiedInUnit),
    Case("a_unit_called_twice", models.UnitCalledTwice),
    Case("fewer_rows_than_ranks", models.FewRows),
    Case("many_shapes", models.ManyShapes),
    Case(
        "checkpointed",
        functools.partial(models.Recomputed, inside=True, around=False, use_reentrant=False),
    ),
    Case("bf16", Transformer, precision=BF16),
    Case("bf16_reduced_in_fp32", Stack, precision={**BF16, "reduce_dtype": torch.float32}),
    Case("fp16", Stack, precision={"param_dtype": torch.float16}),
    Case("parameters_in_bf16", models.InBfloat16, before_sharding=_to_bfloat16, unsharded=None),
    Case("kept_unsharded", Stack, options={"reshard_after_forward": False}),
    Case("keyword_arguments", models.Keywords),
    Case("a_trainable_input", models.TrainableInput),
]


# Errors that a step makes grow from step to step, so these train longer.
LONG = ("layers", "a_transformer", "bf16", "bf16_reduced_in_fp32")
LONG_STEPS = 10
STEPS = 4
# The other cases show nothing here that 2 ranks do not.
ONE_PACKED = ("layers", "bf16", "many_shapes", "fewer_rows_than_ranks")
FOUR_RANKS = ("layers", "one_unit", "a_group_of_modules", "bf16", "fewer_rows_than_ranks")


def _cases(world_size: int, *names: str) -> list[Case]:
    """Return the named cases, or all, with their numbers of steps."""
    by_name = {case.fact: case for case in CASES}
    assert by_name.keys() >= {*LONG, *names}
    long = LONG if world_size <= 2 else ()  # more ranks are slow, and their bits may differ anyway
    return [
        dataclasses.replace(by_name[name], steps=LONG_STEPS if name in long else STEPS)
        for name in names or by_name
    ]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("world_size", "direct_bytes", "cases", "timeout"),
    [
        pytest.param(1, DIRECT, _cases(1), 40.0, id="1-direct"),
        pytest.param(1, PACKED, _cases(1, *ONE_PACKED), 40.0, id="1-packed"),
        pytest.param(2, DIRECT, _cases(2), 70.0, id="2-direct"),
        pytest.param(2, PACKED, _cases(2), 70.0, id="2-packed"),
        pytest.param(4, DIRECT, _cases(4, *FOUR_RANKS), 70.0, id="4-direct"),
    ],
)
def test_cases_train_as_unsharded_and_fsdp2(
    world_size: int, direct_bytes: int, cases: list[Case], timeout: float, tmp_path: Path
) -> None:
    logs = train_cases(cases, world_size, direct_bytes, tmp_path, timeout)
    if world_size > 1 and nccl_library.version() < (2, 30, 3):
        for log in logs:
            assert "via NET/Socket" in log, log[-4000:]
            assert "via P2P" not in log
            assert "via SHM" not in log
