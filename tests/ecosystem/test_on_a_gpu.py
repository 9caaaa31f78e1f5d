"""One training of each library on a GPU, as its own test has it on the host."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from ecosystem import test_accelerate, test_lightning, test_torchao, test_trainer
from support.devices import HAS_GPU
from support.launcher import run_ranks

pytestmark = [
    pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA build and a GPU"),
    pytest.mark.timeout(200),
]


def test_accelerate_trains_as_with_fsdp2(tmp_path: Path) -> None:
    setting = test_accelerate.VERSION_2["bf16, accumulated"]
    setting = dataclasses.replace(setting, plugin={"fsdp_version": 2})
    run_ranks(test_accelerate.compare, 2, setting, str(tmp_path), device="cuda")


def test_the_trainer_of_transformers_trains_as_with_fsdp2(tmp_path: Path) -> None:
    run_ranks(test_trainer.compare, 2, str(tmp_path), device="cuda")
    assert (tmp_path / "fsdp_ext" / "model.safetensors").exists()


def test_fabric_of_lightning_trains_as_with_fsdp2(tmp_path: Path) -> None:
    run_ranks(test_lightning.compare_fsdp2, 2, str(tmp_path), device="cuda")


# NF4 is left out: FSDP2 of torch 2.11 cannot shard torchao's NF4 weights.
@pytest.mark.parametrize("precomputes", [False, True])
def test_float8_weights_of_torchao_train_as_with_fsdp2(precomputes: bool) -> None:
    run_ranks(
        test_torchao.train_beside_fsdp2, 2, test_torchao.float8, precomputes, {}, device="cuda"
    )
