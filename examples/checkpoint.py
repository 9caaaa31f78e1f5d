"""Checkpoints that any number of ranks can resume, and that an interruption cannot break.

A checkpoint directory has one directory for each saved step, and a file `latest` with the name of
the one to resume. A step is written under a temporary name, renamed when it is complete, and only
then named in `latest`. So `latest` always names a complete checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from corpus import UsageError
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

_LATEST = "latest"
_PROGRESS = "progress.json"
_TEMPORARY = ".incomplete"


def save(directory: Path, model: nn.Module, optimizer: Optimizer, progress: dict[str, Any]) -> None:
    """Write one checkpoint; every rank takes part.

    Args:
        directory: where to; all ranks have to see it.
        model, optimizer: saved under their unsharded names, so that another number of ranks, and
            another system, can load them.
        progress: everything else that a resumed run needs, as JSON; `step` counts the steps done.
    """
    name = f"step-{progress['step']:08d}"
    incomplete = directory / (name + _TEMPORARY)
    if dist.get_rank() == 0:
        shutil.rmtree(incomplete, ignore_errors=True)
        incomplete.mkdir(parents=True)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=incomplete)
    # dcp.save returns as soon as this rank's own file is written.
    dist.barrier()
    if dist.get_rank() == 0:
        _write_synced(incomplete / _PROGRESS, json.dumps(progress))
        # An interrupted run may have left this step complete, but not named in `latest`.
        shutil.rmtree(directory / name, ignore_errors=True)
        os.replace(incomplete, directory / name)
        _write_synced(directory / (_LATEST + _TEMPORARY), name)
        os.replace(directory / (_LATEST + _TEMPORARY), directory / _LATEST)
        for old in directory.glob("step-*"):
            if old.name != name:
                shutil.rmtree(old)
    dist.barrier()


def read_progress(directory: Path) -> dict[str, Any] | None:
    """The `progress` of the latest checkpoint, or None without one. Ranks do not communicate."""
    latest = directory / _LATEST
    if not latest.is_file():
        return None
    progress = directory / latest.read_text() / _PROGRESS
    try:
        return dict(json.loads(progress.read_text()))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--checkpoint {directory} names {progress.parent.name} as its latest checkpoint, "
            f"but it cannot be read ({error}); restore it, or give another directory"
        ) from error


def load(directory: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Load the latest checkpoint into a sharded model and its optimizer; every rank takes part."""
    name = (directory / _LATEST).read_text()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory / name)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
