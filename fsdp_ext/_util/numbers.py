"""Checks of numbers and booleans that users pass."""

from __future__ import annotations

import math
import numbers
import re
from typing import TypeGuard

# The largest integer that the C++ side can hold.
LARGEST = 2**63 - 1
# More ranks than any machine has. Sizes of models on so many ranks still fit into 64 bits.
MOST_RANKS = 2**24
# More steps than a measurement needs; each one takes memory.
MOST_STEPS = 10**6

_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{prefix}i": 2 ** (10 * i) for i, prefix in enumerate("KMGT", start=1)}


def is_at_least(value: object, least: int, most: int = LARGEST) -> bool:
    """Return whether ``value`` is an integer from ``least`` to ``most``; a bool is not."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def check_ranks(caller: str, world_size: int, replicas: int) -> None:
    """Raise ValueError unless ``world_size`` is a number of ranks that ``replicas`` divides."""
    if not is_at_least(world_size, 1, MOST_RANKS):
        raise ValueError(
            f"{caller} got world_size={world_size!r}. Pass a whole number of ranks from 1 to "
            f"{MOST_RANKS}."
        )
    if not is_at_least(replicas, 1) or world_size % replicas != 0:
        raise ValueError(
            f"{caller} got {replicas!r} replicas of a model on {world_size} ranks. Pass a number "
            "of replicas that divides the number of ranks."
        )


def bytes_in(text: str) -> int | None:
    """Return the number of bytes of a size such as "80GB", "40MiB" or "100"; None if it is none."""
    size = r"(\d+)\s*B?|(\d+(?:\.\d+)?)\s*([KMGT]i?)B?"
    match = re.fullmatch(size, text.strip(), re.IGNORECASE)
    if match is None:
        return None
    if match[1] is not None:
        return int(match[1])
    return int(float(match[2]) * _UNITS[match[3][:1].upper() + match[3][1:].lower()])


def is_real(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is a finite number that a float can hold; a bool is not."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:  # an integer that is too large
        return False


def scalar_of(value: object) -> object:
    """Return the number in a scalar of NumPy or PyTorch, and any other value as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value  # type: ignore[attr-defined]


def as_bool(caller: str, name: str, value: object) -> bool:
    """Return a bool that a user has passed.

    Integers and the scalars of NumPy and PyTorch are accepted, too, because remainders and
    comparisons return them.
    """
    scalar = scalar_of(value)
    if isinstance(scalar, int):
        return bool(scalar)
    raise TypeError(f"{caller} got {name}={value!r}. Pass True or False.")
