"""How plan, tune and verify call a user's model on a batch, and check its loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def output_of(model: nn.Module, batch: Any) -> Any:
    """Return the output for a batch: a tensor, a tuple of arguments, or a mapping of keywords."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*(batch if isinstance(batch, tuple) else (batch,)))


def resolve_loss(loss: Callable[[Any], Tensor] | None, caller: str) -> Callable[[Any], Tensor]:
    """Return a function that makes a scalar of the model's output, and checks it.

    It raises TypeError if the user's function returns no tensor, and ValueError if that is not a
    scalar that requires a gradient. Without a function, the scalar is the mean of the output.
    """
    if loss is None:
        return functools.partial(_mean_of_output, caller=caller)
    if not callable(loss):
        raise TypeError(
            f"{caller} got loss={loss!r}. Pass a function of the model's output, or leave it out "
            "to use the mean."
        )

    def checked(output: Any) -> Tensor:
        result: object = loss(output)
        if not isinstance(result, Tensor):
            raise TypeError(
                f"{caller} got a {type(result).__name__} from loss. Return the scalar tensor that "
                "backward starts from."
            )
        if result.numel() != 1 or not result.requires_grad:
            raise ValueError(
                f"{caller} got a tensor of shape {tuple(result.shape)} with requires_grad="
                f"{result.requires_grad} from loss. Return a scalar that is computed from the "
                "model's output."
            )
        return result

    return checked


def _mean_of_output(output: Any, caller: str) -> Tensor:
    """Return the means of the output's floating-point tensors, summed: the default loss."""
    tensors = [
        leaf
        for leaf in torch.utils._pytree.tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad
    ]
    if not tensors:
        raise ValueError(
            f"{caller} found no floating-point tensor that requires a gradient in the model's "
            "output. Pass loss=, a function that makes a scalar of the output."
        )
    return torch.stack([tensor.float().mean() for tensor in tensors]).sum()
