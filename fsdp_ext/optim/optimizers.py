"""PyTorch's optimizers, stepping shards."""

from __future__ import annotations

import torch

from fsdp_ext.optim.flat_step import FlatStep
from fsdp_ext.optim.muon import MuonStep


class AdamW(FlatStep, torch.optim.AdamW):
    """``torch.optim.AdamW`` over one tensor for each unit instead of one for each parameter."""


class Adam(FlatStep, torch.optim.Adam):
    """``torch.optim.Adam`` over one tensor for each unit instead of one for each parameter."""


class SGD(FlatStep, torch.optim.SGD):
    """``torch.optim.SGD`` over one tensor for each unit instead of one for each parameter."""


class Muon(MuonStep):
    """``torch.optim.Muon``, except that one rank orthogonalises each sharded matrix.

    All ranks that shard a matrix have to step it together, and give it a gradient together.
    """
