"""How plan, tune and verify call a user's model on a batch, and check its loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def output_of(model: nn.Module, batch: Any) -> Any:
    """Return the output for a batch: a tensor, a tuple of arguments, or a mapping of keywords."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*(batch if isinstance(batch, tuple) else (batch,)))


def check_loss_function(loss: object, caller: str) -> None:
    """Check the argument ``loss`` of the public function ``caller``.

    Raises:
        TypeError: if it cannot be called.
    """
    if loss is not None and not callable(loss):
        raise TypeError(
            f"{caller} got loss={loss!r}. Pass a function of the model's output, or leave it out "
            "to use the mean."
        )


def check_loss(loss: Any, caller: str) -> None:
    """Check what a user's loss function returned to the public function ``caller``.

    Raises:
        TypeError: if the loss is not a tensor.
        ValueError: if it is not a scalar that requires a gradient.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"{caller} got a {type(loss).__name__} from loss. Return the scalar tensor that "
            "backward starts from."
        )
    if loss.numel() != 1 or not loss.requires_grad:
        raise ValueError(
            f"{caller} got a tensor of shape {tuple(loss.shape)} with requires_grad="
            f"{loss.requires_grad} from loss. Return a scalar that is computed from the model's "
            "output."
        )


def mean_of_output(output: Any, caller: str) -> Tensor:
    """Return the means of the output's floating-point tensors, summed: the default loss.

    Raises:
        ValueError: if none of them requires a gradient.
    """
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
