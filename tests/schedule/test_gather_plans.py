"""All ways to gather give the same numbers: see Note [gather plans] in csrc/core/memory/layout.h.

Shared memory gathers each parameter by itself, and a process group packs them. No transport of the
host launches several gathers as one group, so here the process group pretends to.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import models
from support.launcher import run_ranks
from support.matrix import exhaustive
from support.models import ManyShapes, Stack, Transformer
from support.parity import Case, adamw, compare_on_rank

import fsdp_ext.comm.lanes
import fsdp_ext.sharding.params.param_group
from fsdp_ext import _C, fully_shard

CASES = [
    Case("layers", Stack),
    Case("many_shapes", ManyShapes),
    Case("a_transformer", Transformer, optimizer=adamw),
    Case("mixed_precision", Transformer, precision={"param_dtype": torch.bfloat16}),
    Case("nested_units", models.NestedUnits),
]


@contextlib.contextmanager
def _grouped(direct_bytes: int) -> Iterator[None]:
    """Have the process group launch the gathers of a unit as one group."""
    make = _C.Lanes.process_group

    def grouping(*args: Any, **kwargs: Any) -> _C.Lanes:
        return make(*args, **kwargs, groups_one_by_one=True)

    class Lanes:
        process_group = staticmethod(grouping)

    os.environ["FSDP_EXT_TRANSPORT"] = "process_group"
    stub = type("Stub", (), {"Lanes": Lanes})
    with (
        mock.patch.object(fsdp_ext.sharding.params.param_group, "DIRECT_BYTES", direct_bytes),
        mock.patch.object(fsdp_ext.comm.lanes, "_C", stub),
    ):
        yield


def _compare(case: Case, direct_bytes: int) -> None:
    with _grouped(direct_bytes):
        compare_on_rank(case, "fsdp_ext")


@pytest.mark.parametrize("world_size", [2, *exhaustive(3)])
@pytest.mark.parametrize("direct_bytes", [500, *exhaustive(0)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fact)
def test_grouped_gathers_train_as_packed_ones(
    case: Case, direct_bytes: int, world_size: int
) -> None:
    run_ranks(_compare, world_size, case, direct_bytes)


def _compare_packed(case: Case) -> None:
    os.environ["FSDP_EXT_TRANSPORT"] = "process_group"
    compare_on_rank(case, "fsdp_ext")


@pytest.mark.parametrize("world_size", [2, *exhaustive(3)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fact)
def test_packed_gathers_train_as_others(case: Case, world_size: int) -> None:
    run_ranks(_compare_packed, world_size, case)


def _plans(how: str) -> list[str]:
    with _grouped(500) if how == "direct and packed" else contextlib.nullcontext():
        if how == "packed":
            os.environ["FSDP_EXT_TRANSPORT"] = "process_group"
        model = Stack()
        for unit in model.units():
            fully_shard(unit)
        fully_shard(model)
        args, kwargs = model.batch(torch.Generator().manual_seed(dist.get_rank()))
        model(*args, **kwargs)
        impl = model._fsdp_ext_unit.root.impl  # type: ignore[attr-defined]
        return [impl.gather_plan(number) for number in range(len(model.units()) + 1)]


@pytest.mark.parametrize("how", ["direct", "packed", "direct and packed"])
def test_a_unit_says_how_it_is_gathered(how: str) -> None:
    (plans, _) = run_ranks(_plans, 2, how)
    assert plans[1:] == [how] * 3
