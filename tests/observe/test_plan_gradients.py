"""``plan`` knows how many unsharded gradients are alive at once.

``tests/cpp/cuda/cuda_schedule_test.cpp`` shows that the reducer keeps to the same rules.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_ext import MixedPrecisionPolicy, plan

W = 64  # width
LAYER = 4 * W * W  # bytes
VOCABULARY = 20 * W
TABLE = 4 * VOCABULARY * W  # bytes, of the embedding or of the head: 20 layers
HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def layer() -> nn.Linear:
    return nn.Linear(W, W, bias=False)


class Net(nn.Module):
    """The layers are between an embedding and a head."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, W)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(W, VOCABULARY, bias=False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = layer()
        self.second = layer()


def net(layers: int = 8) -> Net:
    with torch.device("meta"):
        return Net(*(layer() for _ in range(layers)))


def gradients(model: nn.Module, units: Any, **options: Any) -> int:
    options = {"bucket_bytes": 0, **options}
    return plan(model, 8, units=units, **options).memory.gradients_in_flight


def test_those_of_one_bucket_are_in_flight_while_the_next_ones_are_made() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(layer() for _ in range(8)))
    assert gradients(model, nn.Linear) == 2 * LAYER
    assert gradients(model, nn.Linear, mp_policy=HALF) == LAYER


def test_the_only_bucket_has_all_gradients() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(layer() for _ in range(8)))
    assert gradients(model, None) == 8 * LAYER


def test_those_of_an_embedding_and_a_head_of_their_own_are_alone() -> None:
    model = net()
    assert gradients(model, [nn.Linear, nn.Embedding]) == TABLE


def test_those_of_the_root_before_the_layers_stay_until_those_behind_have_come() -> None:
    model = net()
    assert gradients(model, [*model.layers]) == 2 * TABLE  # the last layer's do not stay
    model.embedding.requires_grad_(False)
    assert gradients(model, [*model.layers]) == TABLE + 2 * LAYER


def test_a_block_keeps_its_own_gradients_during_units_inside() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(8)))
    inside = [block.first for block in model]
    # Those of the block behind are in flight.
    assert gradients(model, [*inside, *model]) == 3 * LAYER


def test_units_that_share_a_bucket_are_packed_together() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(layer() for _ in range(8)))
    assert gradients(model, nn.Linear, bucket_bytes=2 * LAYER) == 4 * LAYER


def test_a_parameter_that_is_used_twice_has_two_gradients_and_their_sum() -> None:
    model = net()
    model.head.weight = model.embedding.weight
    assert gradients(model, [*model.layers]) == 3 * TABLE


def test_frozen_parameters_have_none() -> None:
    model = net()
    for module in (model.embedding, model.head, *model.layers[2:]):
        module.requires_grad_(False)
    assert gradients(model, [*model.layers]) == 2 * LAYER
    model.requires_grad_(False)
    assert gradients(model, [*model.layers]) == 0


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="not in this PyTorch")
def test_gradients_are_made_in_a_dtype_of_their_own() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(W, W, device="meta"))
            self.weight.grad_dtype = torch.bfloat16

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    assert gradients(nn.Sequential(Own(), Own()), Own) == LAYER
