"""Ranks have the rows that FSDP2 gives them. tests/cpp/layout_test.cpp checks the offsets."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from support.launcher import run_ranks
from torch import nn

from fsdp_ext import _C, fully_shard

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


def layout_of(params: list[Param], *args: object, is_uniform: bool = False) -> _C.UnitLayout:
    specs = [
        _C.ParamSpec(
            name=f"p{i}",
            shape=param.shape,
            shard_dim=0,
            ranks=args[0] if is_uniform else 1,  # type: ignore[arg-type]
            shard_dtype=param.shard_dtype,
            param_dtype=param.param_dtype,
            trainable=param.trainable,
            is_uniform=is_uniform,
        )
        for i, param in enumerate(params)
    ]
    return _C.UnitLayout(specs, *args)  # type: ignore[arg-type]


@given(units())
@settings(max_examples=300, deadline=None)
def test_chunks_are_as_large_as_those_of_torch_chunk(
    unit: tuple[list[Param], int, torch.dtype, torch.dtype],
) -> None:
    params, world_size, *dtypes = unit
    layout = layout_of(params, world_size, *dtypes)
    for index, param in enumerate(params):
        rows = len(torch.chunk(torch.arange(param.shape[0]), world_size)[0])
        assert layout.placements[index].chunk_numel == rows * math.prod(param.shape[1:])


@given(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 5)), max_size=5), st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_uniform_layouts_have_each_element_in_one_place_in_all_dtypes(
    shapes: list[tuple[int, int]], world_size: int
) -> None:
    places = set()
    for dtype, computed, reduced in itertools.product(FLOATS, repeat=3):
        params = [Param(shape, dtype, computed, True) for shape in shapes]
        layout = layout_of(params, world_size, dtype, reduced, is_uniform=True)
        offsets = tuple(place.grad_offset for place in layout.placements)
        assert [place.shard_offset for place in layout.placements] == [
            offset * dtype.itemsize for offset in offsets
        ]
        assert layout.shard_bytes == layout.grad_numel * dtype.itemsize
        assert all(offset * min(dtype.itemsize, reduced.itemsize) % 16 == 0 for offset in offsets)
        places.add((offsets, layout.grad_numel))
    assert len(places) == 1


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
    for world_size in (1, 3):
        run_ranks(_round_trips, world_size)
