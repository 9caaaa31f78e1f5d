"""Which cases of a matrix `make test` leaves to `make test-all`."""

from __future__ import annotations

from typing import Any

import pytest


def exhaustive(*values: Any) -> list[Any]:
    """Return values of a parameter whose cases are exhaustive: others cover each fact, too.

    @pytest.mark.parametrize("ranks", [1, 2, *exhaustive(3, 4)])
    """
    return [pytest.param(value, marks=pytest.mark.exhaustive) for value in values]


def exhaustive_cases(*cases: tuple[Any, ...]) -> list[Any]:
    """Return the result of ``exhaustive``, for cases that are values of several parameters."""
    return [pytest.param(*case, marks=pytest.mark.exhaustive) for case in cases]
