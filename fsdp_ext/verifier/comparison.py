"""The first difference between two trainings, in words. The tests compare with this, too."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_ext.verifier.peers import exchange


def difference(
    expected: Tensor | None,
    seen: Tensor | None,
    bound: Tensor | None = None,
    *,
    equal_nan: bool = False,
) -> str:
    """Return in words where tensors first differ; empty if they agree.

    Args:
        expected: a tensor, or None.
        seen: the tensor that is compared with it.
        bound: by how much each element may differ; None if they have to be equal.
        equal_nan: whether NaN in both counts as equal.
    """
    if _kind(expected) != _kind(seen):
        return f"is {_kind(seen)}, not {_kind(expected)}"
    if expected is None or seen is None or torch.equal(expected, seen):
        return ""
    same, size = expected == seen, ""
    if equal_nan:
        same |= expected.isnan() & seen.isnan()
    if bound is not None:
        apart = (expected.double() - seen.double()).abs()
        same |= apart.isfinite() & (apart <= bound)
        size = f", by up to {apart.max().item():.3g}"
    if bool(same.all()):
        return ""
    count = int((~same).sum())
    first = int((~same).reshape(-1).int().argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), same.shape)]
    return (
        f"differs in {count:,} of {same.numel():,} values{size}, "
        f"first{f' at {index}' if index else ''}: "
        f"{seen.reshape(-1)[first].item():.9g}, expected {expected.reshape(-1)[first].item():.9g}"
    )


def _kind(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"


@dataclass(frozen=True, order=True)
class Difference:
    """A difference between the two copies. Differences sort by number, then by rank."""

    number: int  # its number among all comparisons
    rank: int  # the rank that sees it
    parameter: str  # the parameter, buffer or other value that differs
    what: str  # where and by how much it differs
    of_model: bool  # whether it is of a parameter or a buffer

    def __str__(self) -> str:
        return f"{self.parameter}: {self.what}"


class Comparison:
    """Collects the differences that this rank sees, and finds the first one of all ranks.

    Attributes:
        when: ends the message, for example the number of the step.
        difference: the first difference of the lowest rank, with the name of the first parameter
            or buffer that differs, if any does; None if everything was equal.
        values: how many elements this rank has compared.
        is_exact: whether all of them were compared bit for bit.
        transport: the transport of the collectives; empty if none ran.
        untried: why values of gradients were not compared; empty if all were.
    """

    def __init__(self) -> None:
        self.when = ""
        self.difference: Difference | None = None
        self.values = 0
        self.is_exact = True
        self.transport = ""
        self.untried = ""
        self._number = 0
        self._found: list[Difference] = []

    def add(
        self,
        name: str,
        what: str,
        expected: Tensor | None,
        seen: Tensor | None,
        bound: Tensor | None = None,
        *,
        of_model: bool = True,
        untried: str = "",
    ) -> None:
        """Compare two tensors bit for bit, or within ``bound``.

        If ``untried`` says why their values are not compared, only shapes, dtypes and whether
        values are finite are.
        """
        self._number += 1
        if untried:
            self.untried, bound = untried, torch.tensor(torch.inf)
        elif expected is not None and seen is not None:
            self.values += expected.numel()
            self.is_exact &= bound is None
        text = difference(expected, seen, bound, equal_nan=True)
        if text:
            what = f"{what} {text}{self.when}"
            self._found.append(Difference(self._number, dist.get_rank(), name, what, of_model))

    def conclude(self) -> bool:
        """Tell all ranks the first difference of any; return whether there is one."""
        own = [
            min(self._found, default=None),
            min((each for each in self._found if each.of_model), default=None),
        ]
        of_any, of_models = (
            [each for each in of_ranks if each is not None]
            for of_ranks in zip(*exchange(own), strict=True)
        )
        if not of_any:
            return False
        first = min(of_any)
        named = min(of_models, default=first)
        what = str(first) if named == first else f"{first}; the first parameter is {named}"
        self.difference = replace(first, parameter=named.parameter, what=what)
        return True
