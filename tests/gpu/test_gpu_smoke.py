"""Each kernel runs once, and two models train on one rank: what is first to know of a new GPU."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import test_gpu_simulated
import torch
from support.gpu_cases import DIRECT, train_cases
from support.launcher import run_ranks
from support.models import Stack, Transformer
from support.packing import FLOATS, RandomCast, RandomPack, same_bits, scaled
from support.parity import Case, adamw

from fsdp_ext import _C

DEVICE = torch.device("cuda", 0)
PAIRS = list(itertools.product(FLOATS, FLOATS))
SCALE = 0.125
# So many entries do not fit the arguments of one launch.
MANY = 600


def test_gradients_are_packed_and_unpacked() -> None:
    packer = _C.Packer(gpu=0)
    for seed, (dtype, to) in enumerate(PAIRS):
        case = RandomPack(100 + seed, 8, dtype, to, DEVICE)
        plan = packer.pack_plan(case.entries, case.segment_numel, 8)
        expected = case.reduce_input(poisoned=True)
        got = expected.clone()
        case.pack_with_torch(expected, SCALE, accumulate=False)
        packer.pack(plan, case.gradients, dtype, got, SCALE, False)
        same_bits(got, expected)
    case = RandomPack(0, 8, torch.bfloat16, torch.bfloat16, DEVICE, absent=False)
    plan = packer.pack_plan(case.entries, case.segment_numel, 8)
    staging = case.reduce_input(poisoned=True)
    packer.pack(plan, case.gradients, torch.bfloat16, staging, 1.0, False)
    unpack_plan, unsharded = case.unpack_plan(packer)
    packer.unpack(unpack_plan, staging, unsharded)
    for gradient, region in case.regions(unsharded):
        same_bits(region, gradient)


def test_many_gradients_are_packed() -> None:
    packer = _C.Packer(gpu=0)
    plan = packer.pack_plan([(3, 3, 3 * entry, 1) for entry in range(MANY)], 3 * MANY, 1)
    for dtype, to in PAIRS:
        values = torch.linspace(-4, 4, 3 * MANY, dtype=torch.float64).to(DEVICE, dtype)
        got = torch.full((3 * MANY,), float("nan"), dtype=to, device=DEVICE)
        packer.pack(plan, list(values.clone().split(3)), dtype, got, SCALE, False)
        same_bits(got, scaled(values, to, SCALE))


def test_values_are_cast_and_bytes_moved() -> None:
    packer = _C.Packer(gpu=0)
    for seed, (dtype, to) in enumerate(PAIRS):
        case = RandomCast(seed, dtype, to, DEVICE)
        expected = case.destination.clone()
        got = case.destination.clone()
        case.cast_with_torch(expected, SCALE, accumulate=False)
        packer.cast(packer.cast_plan(case.entries), case.source, got, SCALE, False)
        same_bits(got, expected)
    source = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    moved = torch.zeros_like(source)
    plan = packer.cast_plan([(3, 1, 200, torch.uint8, torch.uint8)])
    packer.cast(plan, source, moved, 1.0, False)
    assert moved[1:201].equal(source[3:203])


@pytest.mark.timeout(90)
def test_simulated_collectives_move_bytes() -> None:
    run_ranks(test_gpu_simulated._moves, 1, timeout=80.0, device="cuda")


@pytest.mark.timeout(90)
def test_two_models_train_on_one_rank(tmp_path: Path) -> None:
    half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    cases = [
        Case("a transformer", Transformer, optimizer=adamw, steps=2),
        Case("layers in bf16", Stack, precision=half, steps=2),
    ]
    train_cases(cases, 1, DIRECT, tmp_path, timeout=60.0)
