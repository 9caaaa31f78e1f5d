"""Cases of other tests train on a GPU as they do unsharded and under FSDP2, on two ranks.

Of a GPU check only ``make gpu-check PART=more`` runs these tests.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pytest
import test_hidden_outputs
from support.devices import IS_EMULATED
from support.gpu_cases import DIRECT, train_cases
from support.parity import Case

STEPS = 4
# The files whose cases make all of their tensors on the device of the model.
FILES = (
    "gradient_accumulation",
    "inputs_changed_in_place",
    "recovery",
    "prefetch_api",
    "mixed_precision",
    "communication_methods",
    "module_shapes",
    "activation_checkpointing",
    "hidden_outputs",
    "memory_formats",
    "optimizers",
    "state_dict",
    "all_reduce_hook",
    "custom_collectives",
    "offload_optimizer",
)


# Units have to stay unsharded for it (reshard_after_forward=False), which is another case.
NOT_ON_A_GPU = (test_hidden_outputs.PENALTY, "over gloo")
# Over the emulated GPU, FSDP2 gets other numbers in each run of these. It does not if torch's
# allocator caches nothing, so memory is reused before another stream has read it. Whether FSDP2 or
# the emulation is wrong is not known yet.
NOT_BESIDE_FSDP2_EMULATED = ("freezing the first layers",)


def _cases(file: str) -> list[Case]:
    """Return the cases of a test file, with fewer steps."""
    cases: list[Case] = importlib.import_module(f"test_{file}").CASES
    chosen = [
        dataclasses.replace(case, steps=min(case.steps, STEPS))
        for case in cases
        if case.fact not in NOT_ON_A_GPU and case.mesh is None
    ]
    if not IS_EMULATED:
        return chosen
    return [
        dataclasses.replace(case, fsdp2_fails="its numbers differ from run to run")
        if case.fact in NOT_BESIDE_FSDP2_EMULATED
        else case
        for case in chosen
    ]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("file", FILES)
def test_cases_train_as_unsharded_and_fsdp2(file: str, tmp_path: Path) -> None:
    train_cases(_cases(file), 2, DIRECT, tmp_path, timeout=90.0)
