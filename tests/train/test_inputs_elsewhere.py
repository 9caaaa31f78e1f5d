"""Batches on another device than the model's are moved there, as FSDP2 moves them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.utils import _to_kwargs
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_map_only

from fsdp_ext import _C

META = torch.device("meta")  # stands for a GPU


def test_all_tensors_of_a_batch_move_and_nothing_else_changes() -> None:
    there = torch.ones(2, device=META)
    args = (torch.ones(3), [torch.zeros(2, dtype=torch.int64), None], "text", there)
    kwargs: dict[str, Any] = {"mask": torch.ones(1, dtype=torch.bool), "scale": 2.0}
    moved_args, moved_kwargs = _C.to_device((args, kwargs), META)
    assert moved_args[3] is there
    (their_args,), (their_kwargs,) = _to_kwargs(args, kwargs, META, False)
    described = [
        tree_map_only(Tensor, lambda t: (t.device, t.dtype, t.shape), tree)
        for tree in ((moved_args, moved_kwargs), (their_args, their_kwargs))
    ]
    assert described[0] == described[1]


def test_a_batch_that_is_there_already_is_passed_on_as_it_is() -> None:
    batch = ((torch.ones(1),), {"x": [torch.ones(1)]})
    assert _C.to_device(batch, torch.device("cpu")) is batch


def test_packed_sequences_move_but_keep_their_batch_sizes_on_the_host() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    moved = _C.to_device(packed, META)
    assert moved.data.device == META
    assert moved.sorted_indices.device == META
    assert moved.unsorted_indices.device == META
    assert moved.batch_sizes.device == torch.device("cpu")
