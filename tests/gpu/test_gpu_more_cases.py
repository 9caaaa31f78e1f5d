"""Cases of other tests train on a GPU as they do unsharded and under FSDP2, on two ranks."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pytest
import torch
from support.gpu_cases import DIRECT, train_cases
from support.parity import ROUNDING, Case
from train import test_hidden_outputs

TESTS = Path(__file__).resolve().parents[1]
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
    "flat_optimizers",
)


# Why cases do not run here.
NOT_ON_A_GPU = {
    test_hidden_outputs.PENALTY: "units have to stay unsharded, which is another case",
    "over gloo": "ranks on GPUs have no other transport than NCCL",
}
HOOK_RACES = (
    "torch 2.11 frees the sum that a hook reads on another stream, and does not record that stream"
)
# The emulated GPU found it, and on an H100 the numbers of FSDP2 were wrong.
GATHER_RACES = (
    "in torch 2.11 backward gathers a frozen unit early, nothing waits for that, and the next "
    "forward copies its input over the one that the gather may still read"
)
# Why FSDP2 is no reference for cases.
NOT_BESIDE_FSDP2 = {
    "hooks, accumulated": HOOK_RACES,
    "sums in bf16": HOOK_RACES,
    "sums in fp16, divided behind the hook": HOOK_RACES,
    "freezing the first layers": GATHER_RACES,
}


# In this case our optimizer runs on the host. The unsharded model's runs on the GPU and rounds
# differently, so the two agree within rounding.
STEPPED_ON_THE_HOST = "shards on the host"


def _cases(file: str) -> list[Case]:
    """Return the cases of a test file, with fewer steps."""
    (path,) = TESTS.glob(f"*/test_{file}.py")
    cases: list[Case] = importlib.import_module(f"{path.parent.name}.{path.stem}").CASES
    return [_adapted(case) for case in cases if case.fact not in NOT_ON_A_GPU and case.mesh is None]


def _adapted(case: Case) -> Case:
    case = dataclasses.replace(
        case,
        steps=min(case.steps, STEPS),
        fsdp2_fails=NOT_BESIDE_FSDP2.get(case.fact, case.fsdp2_fails),
    )
    if case.fact == STEPPED_ON_THE_HOST:
        return dataclasses.replace(case, fsdp2_fails=None, unsharded=ROUNDING[torch.float32])
    return case


@pytest.mark.timeout(150)
@pytest.mark.parametrize("file", FILES)
def test_cases_train_as_unsharded_and_fsdp2(file: str, tmp_path: Path) -> None:
    train_cases(_cases(file), 2, DIRECT, tmp_path, timeout=90.0)
