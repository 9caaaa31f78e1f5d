"""Warnings that name the user's line."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

# Frames of these files are between the user's line and the warning: a model's first forward goes
# through torch's modules and our hooks.
_INSIDE = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent.parent}/")


def warn_caller(message: str) -> None:
    """Warn about the innermost line that is neither in fsdp_ext nor in torch."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
