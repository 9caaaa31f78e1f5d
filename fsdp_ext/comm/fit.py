"""Fits the latency alpha and the bandwidth beta of collectives to measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sample:
    """The time of one operation at one size."""

    operation: str
    nbytes: int  # summed over all ranks
    seconds: float  # on the slowest rank, the median over repeats


@dataclass(frozen=True)
class Fit:
    """alpha + S / beta for one operation."""

    alpha: float  # seconds
    beta: float  # bytes per second
    residual: float  # root mean square of the relative errors at the fitted sizes

    def predict(self, nbytes: int) -> float:
        """Return the predicted seconds of a collective of ``nbytes``."""
        return self.alpha + nbytes / self.beta


def fit(samples: Sequence[Sample]) -> Fit:
    """Fit alpha + S / beta by least squares in the relative error.

    The problem is linear in alpha and 1 / beta: each sample asks for (alpha + S / beta) / t = 1.
    Noise may lead to a negative latency, which is replaced by 0.
    """
    if len({sample.nbytes for sample in samples}) < 2:
        raise ValueError("A fit of alpha and beta needs samples of at least two sizes.")
    times = torch.tensor([sample.seconds for sample in samples], dtype=torch.float64)
    sizes = torch.tensor([sample.nbytes for sample in samples], dtype=torch.float64)
    ones = torch.ones_like(times)
    scale = float(sizes.mean())  # gives both columns the same magnitude
    columns = torch.stack([ones / times, sizes / scale / times], dim=1)
    alpha, slope = torch.linalg.lstsq(columns, ones[:, None]).solution[:, 0].tolist()
    if alpha < 0:
        alpha = 0.0
        slope = float((columns[:, 1] @ ones) / (columns[:, 1] @ columns[:, 1]))
    if slope <= 0:
        raise ValueError(
            "In these samples, larger collectives do not take longer. Measure again on a machine "
            "that is less busy."
        )
    predicted = columns @ torch.tensor([alpha, slope], dtype=torch.float64)
    return Fit(alpha, scale / slope, float((predicted - 1).square().mean().sqrt()))
