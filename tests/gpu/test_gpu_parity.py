"""Models train on a GPU, over NCCL, as they do unsharded and under FSDP2.

With 2 and 4 ranks, all share one GPU and talk over sockets (support/shared_gpu.py). That shows
that the numbers are right, but nothing about speed.
"""

from __future__ import annotations

import gc
import os
import traceback
from functools import partial
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
        partial(models.Recomputed, inside=True, around=False, use_reentrant=False),
    ),
    Case("bf16", Transformer, precision=BF16),
    Case("bf16_reduced_in_fp32", Stack, precision={**BF16, "reduce_dtype": torch.float32}),
    Case("fp16", Stack, precision={"param_dtype": torch.float16}),
    Case("parameters_in_bf16", models.InBfloat16, before_sharding=_to_bfloat16, unsharded=None),
    Case("kept_unsharded", Stack, options={"reshard_after_forward": False}),
    Case("keyword_arguments", models.Keywords),
    Case("a_trainable_input", models.TrainableInput),
]


def _compare(names: list[str], direct_bytes: int) -> tuple[dict[str, str], str]:
    """Return the failures by case, and NCCL's log. One process runs all cases, because it takes
    seconds to start."""
    torch.backends.cudnn.deterministic = True
    fsdp_ext.sharding.param_group.DIRECT_BYTES = direct_bytes
    failures = {}
    for case in CASES:
        if case.fact in names:
            try:
                compare_on_rank(case, "fsdp_ext")
            except Exception:
                failures[case.fact] = traceback.format_exc()
            gc.collect()
            dist.barrier()
    log = os.environ.get("NCCL_DEBUG_FILE")
    return failures, Path(log).read_text(errors="replace") if log is not None else ""


@pytest.mark.timeout(150)
@pytest.mark.parametrize("direct_bytes", [0, 1 << 62], ids=["direct", "packed"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_cases_train_as_unsharded_and_fsdp2(world_size: int, direct_bytes: int) -> None:
    names = [case.fact for case in CASES]
    if world_size == 4 or (world_size == 1 and direct_bytes):
        # The other cases show nothing that 2 ranks do not.
        names = [*names[:4], "bf16", "fewer_rows_than_ranks"]
    answers = run_ranks(_compare, world_size, names, direct_bytes, timeout=70.0, device="cuda")
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
