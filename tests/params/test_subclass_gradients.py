"""Gradients that are of a tensor subclass are reduced as under FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.extended_layers import Layers, assert_equal, train
from support.extended_models import BF16, SYSTEMS
from support.launcher import run_ranks
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import fsdp_ext


class BothInputs(TwoTensor):
    """It gathers both of its tensors, and its gradients are of its class, too."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        return (self.a, self.b), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: None, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        a, b = outputs
        if out is None:
            return BothInputs(a.to(param_dtype), b.to(param_dtype)), (a, b)
        if a.dtype != param_dtype:
            out.a.copy_(a)
            out.b.copy_(b)
        return None


def _gradients_of_a_subclass(options: dict[str, Any], micro_batches: int) -> None:
    seen = []
    for fully_shard in SYSTEMS:
        torch.manual_seed(0)
        model: Any = Layers(lambda weight: BothInputs(weight, weight.flip(0)))
        for layer in model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        seen.append(train(model, micro_batches))
    assert_equal(*seen)


@pytest.mark.parametrize(
    ("options", "micro_batches"),
    [({}, 1), ({"reshard_after_forward": False}, 3), ({"mp_policy": BF16}, 2)],
    ids=["fp32", "accumulation", "bf16"],
)
def test_gradients_of_a_subclass_are_reduced_as_under_fsdp2(
    options: dict[str, Any], micro_batches: int
) -> None:
    run_ranks(_gradients_of_a_subclass, 2, options, micro_batches)


class WrapsGradient(torch.autograd.Function):
    """Its weight is plain, and the weight's gradient is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        of_weight = gradient.t() @ x
        return gradient @ weight, Packs(of_weight + 1, of_weight)


class Packs(TwoTensor):
    """Raises if it is asked to."""

    fails = False

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if cls.fails and "chunk_cat" in str(func):
            raise KeyError("cannot be packed")
        return super().__torch_dispatch__(func, types, args, kwargs)


class Wraps(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return WrapsGradient.apply(x, self.weight)


def _gradients_of_plain_parameters() -> None:
    seen = []
    for fully_shard in SYSTEMS:
        torch.manual_seed(0)
        model: Any = nn.Sequential(Wraps(8, 7, bias=False), nn.Tanh(), Wraps(7, 3, bias=False))
        fully_shard(model[0])
        fully_shard(model)
        if fully_shard is fsdp_ext.fully_shard:
            Packs.fails = True
            try:
                with pytest.raises(KeyError, match="cannot be packed"):
                    model(torch.ones(2, 8)).sum().backward()
            finally:
                Packs.fails = False
            model.zero_grad()
        seen.append(train(model, 2))
    assert_equal(*seen)


def test_gradients_of_plain_parameters_may_be_of_a_subclass() -> None:
    run_ranks(_gradients_of_plain_parameters, 2)
