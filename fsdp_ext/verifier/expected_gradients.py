"""The expected gradients of ranks, computed from unsharded models, and when they are exact.

Note [what is exact]
Every rank trains an unsharded copy beside its sharded one. Results that each rank computes alone
have to agree bit for bit: losses, buffers, gradients of the batch, and parameters after the
optimizer, since a gather changes no bit. Gradients are averages over ranks, so they depend on the
order of additions. Over shared memory and composed collectives, ranks are added in the order of
their numbers. The expected gradient is computed in that order, and agrees bit for bit. Any order
gives the same bits on one or two ranks with fp32 or fp64, since a + b = b + a. Elsewhere (NCCL,
gloo's own collectives) N - 1 additions in any order are off by less than half of (N - 1) eps
sum(|terms|), so two such sums differ by less than twice that. A factor afterwards rounds each
result once more, by half of its eps.

The bound grows with the number of ranks, and the part of one rank in the sum shrinks. Where the
bound exceeds half of a rank's average part, the gradient of a missing rank could hide in it, so
gradients are not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdp_ext.sharding.root.root import Root

_WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Reduction:
    """How a unit reduces its gradients."""

    before: float  # the factor before the reduction
    after: float  # the factor after it
    reduce_dtype: torch.dtype
    grad_dtype: torch.dtype  # of the result
    is_exact: bool  # whether the order of additions is known: Note [what is exact]

    @classmethod
    def by_parameter(cls, root: Root) -> dict[nn.Parameter, Reduction]:
        """Return how each sharded parameter's gradient is reduced."""
        found = {}
        for unit in root.units:
            _, dtype = unit.grad_dtypes()
            scales, is_exact = unit.gradient_scales(dtype), _is_exact(root, dtype)
            for param in unit.params:
                if param.requires_grad:
                    found[param.sharded] = cls(*scales, dtype, unit.grad_dtype(param), is_exact)
        return found

    def result(self, gradients: Sequence[Tensor | None], like: Tensor) -> Tensor:
        """Return the gradient after the reduction; a rank without one counts as zero."""
        total = rank_order_sum(self._terms(gradients, like))
        return _times(total, self.after, self.grad_dtype)

    def bound(self, gradients: Sequence[Tensor | None], like: Tensor) -> Tensor:
        """Return by how much each element may differ if the order of additions is unknown."""
        terms = self._terms(gradients, like)
        magnitude = torch.stack([term.abs().double() for term in terms]).sum(0) * self.after
        return self._relative_bound(len(terms)) * magnitude

    def untried(self, ranks: int) -> str:
        """Return why gradients of so many ranks cannot be compared; empty if they can."""
        if self.is_exact or self._relative_bound(ranks) <= 0.5 / ranks:
            return ""
        dtypes = self.reduce_dtype, self.grad_dtype
        narrowest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        return (
            f"the rounding of an average over {ranks} ranks in {narrowest} may hide a rank that "
            "is missing in it. Call verify on fewer ranks, or with wider dtypes."
        )

    def _relative_bound(self, ranks: int) -> float:
        eps = torch.finfo(self.reduce_dtype).eps, torch.finfo(self.grad_dtype).eps
        return (ranks - 1) * eps[0] + 2 * eps[1]

    def _terms(self, gradients: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
        zero = torch.zeros(like.shape, dtype=self.reduce_dtype, device=like.device)
        return [
            zero if each is None else _times(each, self.before, self.reduce_dtype)
            for each in gradients
        ]


def rank_order_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum in rank order, in fp32 or wider, rounded once to the dtype of the parts."""
    first = parts[0]
    narrow = first.dtype in (torch.float16, torch.bfloat16)
    total = first.float() if narrow else first.clone()
    for part in parts[1:]:
        total += part
    return total.to(first.dtype)


def _times(tensor: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """Return the product, rounded once to ``dtype``."""
    wide = tensor.double() if torch.float64 in (tensor.dtype, dtype) else tensor.float()
    return (wide * factor).to(dtype)


def _is_exact(root: Root, reduce_dtype: torch.dtype) -> bool:
    size = root.units[0].ranks.size
    if size == 1 or root.lanes.sums_in_rank_order:
        return True
    return size == 2 and reduce_dtype in _WIDE
