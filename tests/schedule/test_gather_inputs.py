"""Shards that are cast for each gather train as those that are cast once a step.

See Note [gather inputs] in csrc/core/gather/gatherer.h. Reductions that are cut by default, and
gathers that are not, train as whole ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.matrix import every
from support.stacks import sharded, step
from torch import Tensor
from torch.distributed import fsdp as torch_fsdp

from fsdp_ext import CPUOffloadPolicy, MixedPrecisionPolicy
from fsdp_ext.sharding.root import unit_tree

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# Options of ours alone, and those that FSDP2 has, too.
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "buckets": (2, {}, {}),
    "each unit by itself": (2, {"bucket_bytes": 0, "prefetch": 2}, {}),
    "gloo": (2, {"transport": "process_group"}, {}),
    "messages of a few rows": (2, {"bucket_bytes": 0, "max_message_bytes": 600}, {}),
    "some units in messages": (2, {"bucket_bytes": 0, "max_message_bytes": 3000}, {}),
    "nothing reshards": (2, {}, {"reshard_after_forward": False}),
    "smaller groups": (4, {"bucket_bytes": 0}, {"reshard_after_forward": 2}),
    "offloaded": (2, {}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
}


def _train(model: Any) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for number in range(4):
        losses += [step(model, 2 * number), step(model, 2 * number + 1)]  # gradients add up
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.99)
    return [*losses, *(param._local_tensor.clone() for param in model.parameters())]


def _compare(ours: dict[str, Any], both: dict[str, Any]) -> None:
    both = {"mp_policy": HALF, **both}
    # More ranks are added up in another order than FSDP2's.
    expected = (
        _train(sharded(torch_fsdp.fully_shard, **both))
        if dist.get_world_size() == 2
        else _train(sharded(**both, **ours))
    )
    sizes = []
    for keeps in (True, False):
        model = sharded(**both, **ours, keep_gather_inputs=keeps)
        found = _train(model)
        assert all(map(torch.equal, found, expected)), keeps
        sizes.append(model._fsdp_ext_unit.root.impl.memory())
    kept, in_place = sizes
    assert kept.pop("bucket_buffer_bytes") > in_place.pop("bucket_buffer_bytes")
    assert kept == in_place


@pytest.mark.parametrize("case", every(2, CASES))
def test_gathers_in_place_train_as_those_from_kept_inputs_and_as_fsdp2(case: str) -> None:
    ranks, ours, both = CASES[case]
    run_ranks(_compare, ranks, ours, both)


def _cut_reductions(limit: int) -> tuple[list[int], list[int]]:
    whole = _train(sharded(mp_policy=HALF, bucket_bytes=0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit_tree, "default_reduction_bytes", lambda *_: limit)
        model = sharded(mp_policy=HALF, bucket_bytes=0)
        assert all(map(torch.equal, _train(model), whole))
    buckets = model._fsdp_ext_unit.root.impl.buckets()
    return [b["gather_messages"] for b in buckets], [b["reduce_messages"] for b in buckets]


@pytest.mark.parametrize("limit", [8, 600])  # less than a row, and a few rows
def test_reductions_are_cut_by_default_and_gathers_are_not(limit: int) -> None:
    gathers, reductions = run_ranks(_cut_reductions, 2, limit)[0]
    assert set(gathers) == {1}
    assert min(reductions[1:]) > 1


def _limits_of_each() -> dict[tuple[int | None, int | None], list[int]]:
    found = {}
    for pair in ((None, 600), (600, None), (600, 900), (None, None)):
        model = sharded(mp_policy=HALF, bucket_bytes=0, max_message_bytes=pair)
        _train(model)
        bucket = model._fsdp_ext_unit.root.impl.buckets()[-1]
        found[pair] = [bucket["gather_messages"], bucket["reduce_messages"]]
    return found


def test_gathers_and_reductions_have_limits_of_their_own() -> None:
    found = run_ranks(_limits_of_each, 2)[0]
    assert found[None, None] == [1, 1]
    whole_gathers, cut = found[None, 600]
    assert whole_gathers == 1 < cut
    cut_gathers, whole = found[600, None]
    assert whole == 1 < cut_gathers
    assert found[600, 900][0] == cut_gathers
    assert 1 < found[600, 900][1] < cut


def _is_refused() -> str:
    with pytest.raises(TypeError) as error:
        sharded(keep_gather_inputs="yes")
    return str(error.value)


def test_keep_gather_inputs_is_a_bool() -> None:
    (message,) = run_ranks(_is_refused, 1)
    assert "keep_gather_inputs" in message
    assert "'yes'" in message
