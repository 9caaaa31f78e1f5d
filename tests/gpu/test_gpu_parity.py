"""Models train on a GPU, over NCCL, as they do unsharded and under FSDP2.

With 2 and 4 ranks, all share one GPU and talk over sockets (support/shared_gpu.py). That shows
that the numbers are right, but nothing about speed.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import models
from support.launcher import run_ranks
from support.models import Stack, Transformer
from support.parity import Case, Run, adamw, compare_on_rank

import fsdp_ext.sharding.param_group


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
DIRECT, PACKED = 0, 1 << 62  # parameters at least this large are gathered directly


def _cases(world_size: int, *names: str) -> list[Case]:
    """Return the named cases, or all, with their numbers of steps."""
    by_name = {case.fact: case for case in CASES}
    assert by_name.keys() >= {*LONG, *names}
    long = LONG if world_size <= 2 else ()  # more ranks are slow, and their bits may differ anyway
    return [
        dataclasses.replace(by_name[name], steps=LONG_STEPS if name in long else STEPS)
        for name in names or by_name
    ]


def _compare(cases: list[Case], direct_bytes: int, directory: str) -> tuple[dict[str, str], str]:
    """Return the failures by case, and NCCL's log. One process runs all cases, because it takes
    seconds to start.

    A file in the directory has the outcomes so far, for a call that fails or is late.
    """
    torch.backends.cudnn.deterministic = True
    fsdp_ext.sharding.param_group.DIRECT_BYTES = direct_bytes
    # If a case has failed on one rank alone, its peer does not come. Then the call ends early.
    together = dist.new_group(backend="gloo", timeout=timedelta(seconds=15))
    failures = {}
    with (Path(directory) / f"rank{dist.get_rank()}").open("w") as outcomes:
        say = functools.partial(print, file=outcomes, flush=True)  # a rank that is late is killed
        for case in cases:
            say(f"{case.fact}, {case.steps} steps ... ", end="")
            start = time.monotonic()
            try:
                compare_on_rank(case, "fsdp_ext")
                outcome = "ok"
            except Exception:
                outcome = failures[case.fact] = traceback.format_exc()
            say(f"{time.monotonic() - start:.1f} s, {outcome}")
            gc.collect()
            dist.barrier(together)
    log = os.environ.get("NCCL_DEBUG_FILE")
    return failures, Path(log).read_text(errors="replace") if log is not None else ""


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
    try:
        answers = run_ranks(
            _compare,
            world_size,
            cases,
            direct_bytes,
            str(tmp_path),
            timeout=timeout,
            device="cuda",
        )
    finally:
        for path in sorted(tmp_path.iterdir()):
            print(f"{path.name} of {world_size}:\n{path.read_text()}")
    failures = {
        f"rank {r}: {name}": text
        for r, (failed, _) in enumerate(answers)
        for name, text in failed.items()
    }
    assert not failures, "\n\n".join(f"{name}\n{text}" for name, text in failures.items())
    if world_size > 1 and torch.cuda.nccl.version() < (2, 30, 3):
        for _, log in answers:
            assert "via NET/Socket" in log, log[-4000:]
            assert "via P2P" not in log
            assert "via SHM" not in log
