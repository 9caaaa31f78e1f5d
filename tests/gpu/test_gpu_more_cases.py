"""Cases of other tests train on a GPU as they do unsharded and under FSDP2, on two ranks.

Only ``make gpu-check PART=more`` runs these tests. The other parts do without them.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pytest
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
)


def _cases(file: str) -> list[Case]:
    """Return the cases of a test file, with fewer steps."""
    cases: list[Case] = importlib.import_module(f"test_{file}").CASES
    return [dataclasses.replace(case, steps=min(case.steps, STEPS)) for case in cases]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("file", FILES)
def test_cases_train_as_unsharded_and_fsdp2(file: str, tmp_path: Path) -> None:
    train_cases(_cases(file), 2, DIRECT, tmp_path, timeout=90.0)
