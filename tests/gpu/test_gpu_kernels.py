"""The CUDA kernels agree with kernels of CuPy, which share no code with them.

Some run at sizes that need a GPU's memory. tests/comm/test_packer.py compares with PyTorch.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from support.packing import RandomPack, same_bits
from torch import Tensor

from fsdp_ext import _C

cupy: Any = pytest.importorskip("cupy", reason="pip install fsdp-ext[gpu]")

DEVICE = torch.device("cuda", 0)
# Random plans for each pair of dtypes. Under a sanitizer each takes seconds.
SEEDS = int(os.environ.get("FSDP_EXT_TEST_SEEDS", "12"))
TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}
SOURCE = """
// Without cuda_fp16.h, since a machine may have CuPy but no headers of CUDA.
struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };
__device__ float widen(float x) { return x; }
__device__ float widen(fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ float widen(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ void narrow(float x, float& y) { y = x; }
__device__ void narrow(float x, fp16& y) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
}
// To nearest even: half of the last place less one is added, and one more where that place is odd.
__device__ void narrow(float x, bf16& y) {
  unsigned bits = __float_as_uint(x);
  y.bits = x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
// One element a thread, by division alone: where an element of the reduce input comes from.
extern "C" __global__ void pack(const FROM* gradient, TO* reduce_input, long long numel,
                                long long chunk, long long offset, long long runs,
                                long long segment, long long world_size, float scale,
                                int accumulate) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= numel) return;
  long long run = chunk / runs;
  long long piece = i / run;
  long long rank = piece % world_size;
  long long place = rank * segment + offset + piece / world_size * run + i % run;
  TO value;
  narrow(__fmul_rn(widen(gradient[i]), scale), value);
  if (accumulate) narrow(__fadd_rn(widen(reduce_input[place]), widen(value)), value);
  reduce_input[place] = value;
}
"""


def _pack_with_cupy(
    case: RandomPack, destination: Tensor, dtype: torch.dtype, scale: float, accumulate: bool
) -> None:
    source = SOURCE.replace("FROM", TYPES[dtype]).replace("TO", TYPES[destination.dtype])
    kernel = cupy.RawKernel(source, "pack", options=("-fmad=false",))
    if not accumulate:
        destination.zero_()
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        for (numel, chunk, offset, runs), gradient in zip(
            case.entries, case.gradients, strict=True
        ):
            if gradient is not None and numel > 0:
                arguments = (numel, chunk, offset, runs, case.segment_numel, case.world_size)
                kernel(
                    ((numel + 255) // 256,),
                    (256,),
                    (
                        gradient.data_ptr(),
                        destination.data_ptr(),
                        *(cupy.int64(a) for a in arguments),
                        cupy.float32(scale),
                        cupy.int32(accumulate),
                    ),
                )


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("to", TYPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_packs_as_an_independent_kernel_does(
    dtype: torch.dtype, to: torch.dtype, accumulate: bool
) -> None:
    packer = _C.Packer(gpu=0)
    for seed in range(SEEDS):
        world_size = (8, 3, 1, 2, 64)[seed % 5]
        case = RandomPack(seed, world_size, dtype, to, DEVICE, largest_row=40000 // world_size)
        expected = case.reduce_input(poisoned=not accumulate)
        got = expected.clone()
        scale = (1.0, 1 / 3, 0.125)[seed % 3]
        _pack_with_cupy(case, expected, dtype, scale, accumulate)
        plan = packer.pack_plan(case.entries, case.segment_numel, world_size)
        marks = torch.zeros(len(case.gradients), dtype=torch.int64, device=DEVICE)
        packer.pack(plan, case.gradients, dtype, got, scale, accumulate, marks)
        torch.cuda.synchronize()
        same_bits(got, expected)
        assert marks.tolist() == [
            int(gradient is not None and not gradient.isfinite().all())
            for gradient in case.gradients
        ]


def test_more_than_two_to_the_31_elements_are_packed() -> None:
    """And 64-bit offsets with them: about 9 GiB of bf16 for both sides together."""
    world_size, rows, row = 8, (1 << 31) // 4096 + 3, 4096
    chunk = -(-rows // world_size) * row
    free, _ = torch.cuda.mem_get_info()
    if free < 3 * 2 * chunk * world_size:
        pytest.skip(
            f"needs {3 * 2 * chunk * world_size >> 30} GiB of GPU memory, {free >> 30} free"
        )
    gradient = torch.empty(rows * row, dtype=torch.bfloat16, device=DEVICE)
    gradient.view(torch.int16).random_(0, 1 << 14)
    packer = _C.Packer(gpu=0)
    staging = torch.full((world_size * chunk,), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    plan = packer.pack_plan([(gradient.numel(), chunk, 0, 1)], chunk, world_size)
    packer.pack(plan, [gradient], torch.bfloat16, staging, 1.0, False)
    assert staging[: gradient.numel()].equal(gradient)
    assert not staging[gradient.numel() :].any()
    unpack = packer.unpack_plan([(2 * chunk, 0, 0, 1)], 2 * chunk, world_size)
    gradient.fill_(float("nan"))
    unsharded = torch.full_like(staging, float("nan"))
    packer.unpack(unpack, staging, unsharded)
    assert unsharded.equal(staging)


@pytest.mark.parametrize("count", [480, 481, 2000, 9000])
def test_a_plan_of_more_entries_than_fit_a_launch(count: int) -> None:
    gradients = [torch.full((3,), float(i), device=DEVICE) for i in range(count)]
    packer = _C.Packer(gpu=0)
    plan = packer.pack_plan([(3, 2, 4 * i, 1) for i in range(count)], 4 * count, 2)
    got = torch.full((2 * 4 * count,), float("nan"), device=DEVICE)
    packer.pack(plan, gradients, torch.float32, got, 1.0, False)
    values = torch.arange(count, dtype=torch.float32, device=DEVICE)
    expected = torch.zeros(2, count, 4, device=DEVICE)
    expected[0, :, :2] = values[:, None]
    expected[1, :, :1] = values[:, None]
    assert got.equal(expected.view(-1))


def test_work_goes_to_the_current_stream() -> None:
    packer = _C.Packer(gpu=0)
    plan = packer.cast_plan([(0, 0, 1 << 20, torch.float32, torch.bfloat16)])
    source = torch.zeros(1 << 20, device=DEVICE)
    got = torch.zeros(1 << 20, dtype=torch.bfloat16, device=DEVICE)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        source.fill_(2.0)
        packer.cast(plan, source, got, 1.0, False)
    torch.cuda.current_stream().wait_stream(stream)
    assert bool((got == 2).all())
