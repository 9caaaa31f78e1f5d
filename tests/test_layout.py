"""Every element has exactly one place in every buffer of a unit, whatever its shapes."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from support.launcher import run_ranks
from torch import nn

from fsdp_ext import _C, fully_shard

ALIGNMENT = 16
REGION_ALIGNMENT = 256  # alignment that matrix products need
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Param:
    shape: tuple[int, ...]
    shard_dtype: torch.dtype
    param_dtype: torch.dtype
    trainable: bool


@st.composite
def units(draw: st.DrawFn) -> tuple[list[Param], int, torch.dtype, torch.dtype]:
    """Draw parameters, a world size, the dtype of gradients and the dtype of their reduction."""
    grad_dtype = draw(st.sampled_from(FLOATS))
    params = []
    for _ in range(draw(st.integers(0, 5))):
        rows = draw(st.integers(0, 70))
        shape = (rows, *draw(st.lists(st.integers(0, 5), max_size=2)))
        trainable = draw(st.booleans())
        if not trainable and draw(st.booleans()):
            params.append(Param(shape, torch.int8, torch.int8, False))
            continue
        dtype = grad_dtype if trainable else draw(st.sampled_from(FLOATS))
        params.append(Param(shape, dtype, draw(st.sampled_from(FLOATS)), trainable))
    return params, draw(st.integers(1, 64)), grad_dtype, draw(st.sampled_from(FLOATS))


def layout_of(params: list[Param], *args: object) -> _C.UnitLayout:
    specs = [
        _C.ParamSpec(
            name=f"p{i}",
            shape=param.shape,
            shard_dtype=param.shard_dtype,
            param_dtype=param.param_dtype,
            trainable=param.trainable,
        )
        for i, param in enumerate(params)
    ]
    return _C.UnitLayout(specs, *args)  # type: ignore[arg-type]


def claim(places: torch.Tensor, start: int, length: int) -> None:
    """Mark places [start, start + length) as used. Fails if one is used already."""
    assert start >= 0
    assert start + length <= places.numel()
    assert not places[start : start + length].any()
    places[start : start + length] = True


@given(units())
@settings(max_examples=300, deadline=None)
def test_chunks_and_regions_do_not_overlap_and_start_aligned(
    unit: tuple[list[Param], int, torch.dtype, torch.dtype],
) -> None:
    params, world_size, grad_dtype, reduce_dtype = unit
    layout = layout_of(params, world_size, grad_dtype, reduce_dtype)
    shard = torch.zeros(layout.shard_bytes, dtype=torch.bool)
    gather = torch.zeros(layout.gather_bytes, dtype=torch.bool)
    unsharded = torch.zeros(layout.unsharded_bytes, dtype=torch.bool)
    gradient = torch.zeros(layout.grad_numel, dtype=torch.bool)
    for param, place in zip(params, layout.placements, strict=True):
        for start in (place.shard_offset, place.gather_offset, place.unsharded_offset):
            assert start % ALIGNMENT == 0
        claim(shard, place.shard_offset, place.chunk_numel * param.shard_dtype.itemsize)
        size = place.chunk_numel * param.param_dtype.itemsize
        claim(gather, place.gather_offset, size)
        claim(unsharded, place.unsharded_offset, world_size * size)
        if param.trainable:
            assert place.grad_offset * grad_dtype.itemsize % ALIGNMENT == 0
            assert place.grad_offset * reduce_dtype.itemsize % ALIGNMENT == 0
            claim(gradient, place.grad_offset, place.chunk_numel)
        else:
            assert place.grad_offset == -1
    padding = REGION_ALIGNMENT if world_size == 1 else ALIGNMENT
    assert layout.shard_bytes < shard.sum() + padding * max(1, len(params))


@given(units())
@settings(max_examples=300, deadline=None)
def test_ranks_have_the_rows_that_torch_chunk_gives_them(
    unit: tuple[list[Param], int, torch.dtype, torch.dtype],
) -> None:
    params, world_size, *dtypes = unit
    layout = layout_of(params, world_size, *dtypes)
    for index, param in enumerate(params):
        rows = torch.arange(param.shape[0])
        chunks = list(torch.chunk(rows, world_size)) if len(rows) else []
        chunks += [rows[:0]] * (world_size - len(chunks))
        for rank, chunk in enumerate(chunks):
            first, count = layout.first_row(index, rank), layout.row_count(index, rank)
            assert rows[first : first + count].equal(chunk)


@given(units(), st.integers(0, 2**31))
@settings(max_examples=150, deadline=None)
def test_sharding_and_gathering_round_trip_bit_for_bit(
    unit: tuple[list[Param], int, torch.dtype, torch.dtype], seed: int
) -> None:
    """Pack by the offsets alone, one rank's chunk at a time, on the bytes of the values."""
    params, world_size, *dtypes = unit
    # Without a cast, bytes can be compared.
    params = [Param(p.shape, p.shard_dtype, p.shard_dtype, p.trainable) for p in params]
    layout = layout_of(params, world_size, *dtypes)
    generator = torch.Generator().manual_seed(seed)
    staging = torch.zeros(world_size, layout.gather_bytes, dtype=torch.uint8)
    originals = []
    for index, (param, place) in enumerate(zip(params, layout.placements, strict=True)):
        row_bytes = param.shard_dtype.itemsize
        for size in param.shape[1:]:
            row_bytes *= size
        original = torch.randint(
            0, 256, (param.shape[0], row_bytes), generator=generator, dtype=torch.uint8
        )
        originals.append(original)
        for rank in range(world_size):
            first, count = layout.first_row(index, rank), layout.row_count(index, rank)
            mine = original[first : first + count].reshape(-1)
            staging[rank, place.gather_offset :][: mine.numel()] = mine
    unsharded = torch.full((layout.unsharded_bytes,), 0xFF, dtype=torch.uint8)
    for param, place in zip(params, layout.placements, strict=True):
        chunk = place.chunk_numel * (
            1 if param.shard_dtype is torch.int8 else param.shard_dtype.itemsize
        )
        for rank in range(world_size):
            start = place.unsharded_offset + rank * chunk
            unsharded[start : start + chunk] = staging[rank, place.gather_offset :][:chunk]
    for original, place in zip(originals, layout.placements, strict=True):
        region = unsharded[place.unsharded_offset :][: original.numel()]
        assert region.equal(original.reshape(-1))


def _round_trip(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    module = nn.Module()
    originals = {}
    for i in range(6):
        shape = torch.randint(0, 9, (1 + i % 3,), generator=generator).tolist()
        value = torch.randn(shape, generator=generator)
        originals[f"p{i}"] = value
        module.register_parameter(f"p{i}", nn.Parameter(value.clone()))
    sharded: nn.Module = fully_shard(module)  # type: ignore[assignment]
    for name, param in sharded.named_parameters():
        assert torch.equal(param.full_tensor(), originals[name]), name  # type: ignore[attr-defined]
    sharded.unshard()  # type: ignore[operator]
    for name, param in sharded.named_parameters():
        assert torch.equal(param, originals[name]), name


def _round_trips() -> None:
    for seed in range(12):
        _round_trip(seed)


def test_parameters_of_any_shape_come_back_bit_for_bit() -> None:
    for world_size in (1, 2, 3, 4):
        run_ranks(_round_trips, world_size)
