"""The model of the example in ``python -m fsdp_ext plan --help``."""

from __future__ import annotations

from torch import nn


def make() -> nn.Module:
    """Return a transformer of 3.2 B parameters in 16 layers."""
    layer = nn.TransformerEncoderLayer(4096, 32, 16384, batch_first=True)
    return nn.TransformerEncoder(layer, 16)
