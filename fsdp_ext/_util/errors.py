"""Errors that are also of the type that FSDP2 raises in their place."""

from __future__ import annotations


class MisuseError(ValueError, AssertionError):
    """A value that cannot be used. FSDP2 raises an AssertionError for it."""


class UnsupportedError(NotImplementedError, AssertionError):
    """Something that is not supported. FSDP2 raises an AssertionError for it."""
