"""The packer gives the bits of PyTorch's own casts, sums and copies on every device.

The C++ tests (tests/cpp/pack_test.cpp) compare with arithmetic of their own. On a GPU,
tests/gpu/test_gpu_kernels.py compares with kernels of CuPy.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices import DEVICES
from support.packing import FLOATS, RandomCast, RandomPack, same_bits

from fsdp_ext import _C

EXAMPLES = settings(max_examples=60, deadline=None)

pytestmark = pytest.mark.parametrize("device", DEVICES, ids=str)


def packer_of(device: torch.device) -> _C.Packer:
    return _C.Packer(gpu=device.index if device.type == "cuda" else None)


@EXAMPLES
@given(
    seed=st.integers(0, 2**31),
    world_size=st.sampled_from([1, 2, 3, 8, 64]),
    dtypes=st.tuples(st.sampled_from(FLOATS), st.sampled_from(FLOATS)),
    scale=st.sampled_from([1.0, 0.125, 1.0 / 3.0]),
    accumulate=st.booleans(),
)
def test_packs_as_torch_does(
    device: torch.device,
    seed: int,
    world_size: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    scale: float,
    accumulate: bool,
) -> None:
    case = RandomPack(seed, world_size, *dtypes, device)
    packer = packer_of(device)
    plan = packer.pack_plan(case.entries, case.segment_numel, world_size)
    expected = case.reduce_input(poisoned=not accumulate)
    got = expected.clone()
    case.pack_with_torch(expected, scale, accumulate)
    packer.pack(plan, case.gradients, dtypes[0], got, scale, accumulate)
    same_bits(got, expected)


@EXAMPLES
@given(seed=st.integers(0, 2**31), world_size=st.sampled_from([1, 2, 3, 8, 64]))
def test_unpack_gives_back_what_was_packed(
    device: torch.device, seed: int, world_size: int
) -> None:
    case = RandomPack(seed, world_size, torch.bfloat16, torch.bfloat16, device, absent=False)
    packer = packer_of(device)
    staging = case.reduce_input(poisoned=True)
    plan = packer.pack_plan(case.entries, case.segment_numel, world_size)
    packer.pack(plan, case.gradients, torch.bfloat16, staging, 1.0, False)
    unpack_plan, unsharded = case.unpack_plan(packer)
    packer.unpack(unpack_plan, staging, unsharded)
    for gradient, region in case.regions(unsharded):
        same_bits(region, gradient)


@EXAMPLES
@given(
    seed=st.integers(0, 2**31),
    dtypes=st.tuples(st.sampled_from(FLOATS), st.sampled_from(FLOATS)),
    scale=st.sampled_from([1.0, 0.125, 1.0 / 3.0]),
    accumulate=st.booleans(),
)
def test_casts_as_torch_does(
    device: torch.device,
    seed: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    scale: float,
    accumulate: bool,
) -> None:
    case = RandomCast(seed, *dtypes, device)
    packer = packer_of(device)
    expected = case.destination.clone()
    got = case.destination.clone()
    case.cast_with_torch(expected, scale, accumulate)
    packer.cast(packer.cast_plan(case.entries), case.source, got, scale, accumulate)
    same_bits(got, expected)


def test_moves_bytes_of_any_dtype(device: torch.device) -> None:
    source = torch.arange(256, dtype=torch.uint8, device=device)
    got = torch.zeros(256, dtype=torch.uint8, device=device)
    packer = packer_of(device)
    plan = packer.cast_plan([(3, 1, 200, torch.uint8, torch.int8)])
    packer.cast(plan, source, got, 1.0, False)
    assert got[1:201].equal(source[3:203])
    assert got[0] == 0
    assert not got[201:].any()


def test_says_what_it_cannot_do(device: torch.device) -> None:
    packer = packer_of(device)
    memory = torch.zeros(64, dtype=torch.uint8, device=device)
    plan = packer.pack_plan([(4, 4, 0, 1)], 4, 1)
    with pytest.raises(RuntimeError, match="pack got gradients of bytes to reduce as"):
        packer.pack(plan, [memory], torch.uint8, memory, 1.0, False)
    with pytest.raises(RuntimeError, match="cast got bytes to float32 with scale 1"):
        packer.cast(
            packer.cast_plan([(0, 0, 4, torch.uint8, torch.float32)]), memory, memory, 1.0, False
        )
