"""What libraries need on each rank of these tests: environment variables, and a system's FSDP."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator

import torch.distributed as dist
from support.parity import device
from torch import nn

import fsdp_ext

_TORCHS_CLIP = nn.utils.clip_grad_norm_


@contextlib.contextmanager
def fsdp_of(system: str, *, clips: bool = False) -> Iterator[None]:
    """Let imports of PyTorch's FSDP give a system's, "torch" or "fsdp_ext".

    Without `clips`, PyTorch clips for both, so that results can be compared bit for bit.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with fsdp_ext.patch() if system == "fsdp_ext" else contextlib.nullcontext():
            if not clips:
                nn.utils.clip_grad_norm_ = _TORCHS_CLIP
            yield


def set_variables_of_torchrun() -> None:
    """Set the environment variables from which libraries learn this rank's place.

    Ranks on a GPU share it, so each says that it is alone on its host.
    """
    alone = device().type == "cuda"
    for name, value, local in (
        ("RANK", dist.get_rank(), 0),
        ("WORLD_SIZE", dist.get_world_size(), 1),
    ):
        os.environ |= {name: str(value), f"LOCAL_{name}": str(local if alone else value)}
