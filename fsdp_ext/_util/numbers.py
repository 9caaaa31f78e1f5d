"""Checks of numbers that users pass."""

from __future__ import annotations


def is_at_least(value: object, least: int) -> bool:
    """Return whether ``value`` is an integer of at least ``least``; a bool is not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
