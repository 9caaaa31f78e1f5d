"""Which cases of a matrix `make test` leaves to `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def exhaustive(*values: Any) -> list[Any]:
    """Return values of a parameter whose cases are exhaustive: others cover each fact, too.

    @pytest.mark.parametrize("ranks", [1, 2, *exhaustive(3, 4)])
    """
    return [pytest.param(value, marks=pytest.mark.exhaustive) for value in values]


def every(step: int, values: Iterable[Any]) -> list[Any]:
    """Return values of a parameter, of which all but every ``step``-th one are exhaustive."""
    return [
        pytest.param(value, marks=[pytest.mark.exhaustive] if index % step else [])
        for index, value in enumerate(values)
    ]


def exhaustive_cases(*cases: tuple[Any, ...]) -> list[Any]:
    """Return the result of ``exhaustive``, for cases that are values of several parameters."""
    return [pytest.param(*case, marks=pytest.mark.exhaustive) for case in cases]
