"""What other tests compare on the host is equal on a GPU, too.

Each test runs functions that tests of the host define.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from comm import test_all_reduce_hook as hooks
from comm import test_custom_collectives as collectives
from faults import test_flight_records as flights
from fsdp1 import test_fsdp1_summon as summon
from fsdp1 import test_fsdp1_training as fsdp1
from meshes import test_reshard_groups as groups
from meshes import test_several_meshes as meshes
from observe import test_verify as verify
from params import test_param_dtype_override as override
from params import test_tensor_extensions as extensions
from support.gpu_cases import Work, run_works
from support.launcher import run_ranks
from train import test_attached_optimizers as attached
from train import test_gradient_dtypes as dtypes
from train import test_muon as muon

from fsdp_ext import MixedPrecisionPolicy

FSDP1 = (
    "one unit",
    "a transformer",
    "uneven rows",
    "SHARD_GRAD_OP",
    "bfloat16, reduced in float32, with its buffers",
    "NO_SHARD",
)
WORKS = {
    "fsdp1": [
        *(Work(f"FSDP1, {case}", fsdp1.parity, fsdp1.PARITY[case]) for case in FSDP1),
        Work("FSDP1, wrapped by hand", fsdp1.manual_nesting),
        Work("FSDP1, an optimizer made before", fsdp1.optimizer_before, (False,)),
        Work("summon_full_params shows", summon._shown),
        Work("summon_full_params keeps", summon._kept),
        Work("summon_full_params and forwards", summon._generated),
    ],
    "hooks and collectives": [
        Work("hooks see reduced gradients", hooks.look),
        Work("hooks raise errors", hooks.fail),
        Work("custom collectives are called", collectives._called),
        Work("verify", verify.verify_in_the_group, ("nccl", torch.float32)),
        Work("verify finds faults", verify.verify_in_any_order),
    ],
    "optimizers": [
        Work("attached, models", attached._models),
        Work("attached, more models", attached._more_models),
        Work("attached, settings", attached._all_settings),
        Work("attached, accumulation", attached._accumulation),
        Work("attached, two backwards", attached._two_backwards),
        Work("attached, clipping", attached._clipping),
        Work("attached, by unit", attached._clipping_by_unit),
        Work("attached, skipping", attached._units_with_nonfinite_gradients_are_skipped),
        Work("attached, parts", attached._other_parameters_keep_their_gradients),
        Work("Muon", muon._matrices_on_one_dimension),
    ],
    "dtypes": [
        Work("several dtypes", dtypes.compare, ({}, dtypes.REDUCED_IN_FP32)),
        Work(
            "dtypes, in pieces", dtypes.compare, ({"max_message_bytes": 64}, dtypes.REDUCED_IN_FP32)
        ),
        Work("dtypes that stay", dtypes.compare, ({}, MixedPrecisionPolicy())),
        Work("dtypes that override", override.compare, ({},)),
    ],
    "meshes": [
        Work(f"meshes, setup {number}", meshes.compare_with_fsdp2, (setup,))
        for number, setup in enumerate(meshes.TWO_RANKS)
        if setup.ours != meshes.GLOO
    ],
    "extensions": [
        Work(f"extensions, {name}", extensions._train_beside_fsdp2, (setup,))
        for name, setup in extensions.SETUPS.items()
        if "transport" not in setup.ours
    ],
}
IN_GROUPS = [
    Work("in groups as over all", groups._bitwise, (groups._some(None, 0, 2, 8), True)),
    Work("in groups as under FSDP2", groups.compare_on_rank, (groups.ALONE, "fsdp_ext")),
]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", WORKS)
def test_workers_find_on_two_ranks_what_they_find_on_the_host(name: str, tmp_path: Path) -> None:
    run_works(WORKS[name], 2, tmp_path, timeout=90.0)


@pytest.mark.timeout(150)
def test_groups_of_two_of_four_ranks_gather(tmp_path: Path) -> None:
    run_works(IN_GROUPS, groups.RANKS, tmp_path, timeout=90.0)


def _write_flights(folder: str) -> None:
    Work("", flights._train_and_write, (folder, "nccl", False))()


@pytest.mark.timeout(150)
def test_the_tool_of_pytorch_reads_flight_records(tmp_path: Path) -> None:
    run_ranks(_write_flights, 2, str(tmp_path), device="cuda")
    said, database = flights._analyse(tmp_path)
    assert said == ""
    assert database.collectives
    assert all(collective.pass_check for collective in database.collectives)
