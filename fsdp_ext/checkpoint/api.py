"""``save``, ``load`` and ``async_save``."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ext.checkpoint import background
from fsdp_ext.checkpoint import directory as directories
from fsdp_ext.checkpoint.loading import read
from fsdp_ext.checkpoint.ranks import TIMEOUT, Ranks
from fsdp_ext.checkpoint.saving import write
from fsdp_ext.checkpoint.snapshot import Snapshot, collect
from fsdp_ext.checkpoint.state_dicts import Optimizers, as_optimizers
from fsdp_ext.checkpoint.transfers import free_pinned_memory


def latest(directory: str | Path) -> Path | None:
    """Return the newest checkpoint in a directory; None if there is none."""
    found = directories.checkpoints(Path(directory))
    return found[-1] if found else None


@torch.inference_mode(False)  # DTensors cannot be detached there
@torch.no_grad()
def save(
    directory: str | Path,
    model: nn.Module,
    optimizer: Optimizers = None,
    extra: Any = None,
    *,
    keep: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: timedelta = TIMEOUT,
) -> Path:
    """Save a checkpoint. All ranks call it.

    Each rank writes its own shards. When all have, one rename makes the files a checkpoint. A save
    that is interrupted anywhere leaves earlier checkpoints as they are.

    Args:
        directory: where the job's checkpoints are, a file system that all ranks share.
        model: the model: sharded, wrapped, or neither.
        optimizer: an optimizer of its parameters, or several.
        extra: what else this rank has to save, such as the step, schedulers' state dicts and random
            states: numbers, strings, lists, tuples, dicts, bytes, tensors, NumPy arrays.
        keep: how many checkpoints to keep; the oldest ones are removed once the new one stands.
            ``None`` keeps every checkpoint.
        process_group: the ranks; all by default.
        timeout: the longest wait for another rank.

    Returns:
        the new checkpoint: ``directory/checkpoint-000001``, and so on.

    Raises:
        OSError: if a file cannot be written, or another job saves or exports into it.
        TypeError: if something cannot be saved, named in the message.
        ValueError: if an argument cannot be used, or optimizers differ between ranks.
        OtherRanksError: if another rank could not save.
    """
    directory = Path(directory).absolute()
    ranks = Ranks(process_group, timeout)
    with ranks.together("the start of checkpoint.save"):
        _check_keep(keep)
        background.finish()
    snapshot: Snapshot | Exception
    try:
        snapshot = Snapshot.of(collect(model, as_optimizers(optimizer), extra), ranks)
    except Exception as error:
        snapshot = error
    return write(snapshot, directory, ranks, keep)


@torch.inference_mode(False)  # DTensors cannot be detached there
@torch.no_grad()
def async_save(
    directory: str | Path,
    model: nn.Module,
    optimizer: Optimizers = None,
    extra: Any = None,
    *,
    keep: int | None = None,
    if_running: str = "wait",
    process_group: dist.ProcessGroup | None = None,
    timeout: timedelta = TIMEOUT,
) -> background.Saving:
    """Save what is there now, while training goes on. All ranks call it.

    What the optimizer steps is copied to the host after the call: by a thread, or on a GPU by a
    stream of its own. The optimizer's next step waits for the copies. If the optimizer is attached,
    each unit's step in backward waits for the copies of that unit. If anything else writes to a
    parameter before it is copied, the save fails: call ``handle.wait_for_copies()`` first.
    Everything else is copied during the call. A thread writes the copies. Their memory stays
    allocated for the next call, as long as the model exists.

    Args:
        directory: as in :func:`save`, as are ``model``, ``optimizer``, ``extra``, ``keep``,
            ``process_group`` and ``timeout``.
        if_running: what to do while an earlier call still writes: "wait" or "raise".

    Returns:
        a handle. Its ``result()`` waits, and returns the new checkpoint or raises the error of the
        save. If nobody calls it, the next call of this function, :func:`save`, :func:`load`,
        ``export`` or ``load_pretrained`` waits and raises the error, or it is printed when the
        process ends.

    Raises:
        RuntimeError: if an earlier call still writes, with ``if_running="raise"``.
        Exception: as :func:`save`.
    """
    directory = Path(directory).absolute()
    ranks = Ranks(process_group, timeout)
    # Ranks may differ in whether the previous save has ended, and in who knows its error.
    with ranks.together("the start of checkpoint.async_save"):
        if if_running not in ("wait", "raise"):
            raise ValueError(f"async_save got if_running={if_running!r}. Pass 'wait' or 'raise'.")
        _check_keep(keep)
        optimizers = as_optimizers(optimizer)
        background.finish(wait=if_running == "wait")
    staged: background.Staged | None = None
    failure: Exception | None = None
    try:
        contents = collect(model, optimizers, extra)
        staged = background.Staged(model, contents, optimizers, ranks)
    except Exception as error:
        failure = background.without_frames(error)

    def work() -> Path:
        snapshot = staged.finish() if staged is not None else failure
        assert snapshot is not None
        background.lower_priority()  # not before: the next step may wait for the copies
        return write(snapshot, directory, ranks, keep)

    return background.start(work, staged)


@torch.inference_mode(False)  # DTensors cannot be detached there
@torch.no_grad()
def load(
    directory: str | Path,
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
    timeout: timedelta = TIMEOUT,
) -> Any:
    """Load the newest checkpoint of a directory. All ranks call it.

    The number of ranks, the mesh, the placements and the dtypes may differ from those that saved.
    Each rank reads only what it needs, and checks it. The model and the optimizer change after all
    ranks have read everything. After an error they are unchanged, with one exception. If the
    model's own ``load_state_dict`` raises, or ignores a name that its ``state_dict`` returns, that
    rank raises. Its optimizer is unchanged, its model may be partly changed, and other ranks may
    have loaded everything.

    Args:
        directory: as in :func:`save`, or one checkpoint.
        model: a model of the same parameters, with memory (``to_empty`` after meta-device
            initialization).
        optimizer: an optimizer of its parameters, or several. Their state is replaced.
        strict: whether the checkpoint and the model have to have the same names.
        process_group: the ranks; all by default.
        timeout: the longest wait for another rank.

    Returns:
        what this rank saved as ``extra``. A rank that did not take part in the save gets rank 0's.

    Raises:
        FileNotFoundError: if there is no checkpoint, or one of its files is missing.
        DamagedFileError: if a file is not what was written. The message names tensor and file.
        TypeError: for weights on the meta device, or in PyTorch's FSDP1 wrapper without a
            ``device_mesh``.
        ValueError: if the checkpoint is of another model, or an optimizer cannot load its states.
        OtherRanksError: if another rank could not read.
    """
    ranks = Ranks(process_group, timeout)
    with ranks.together("the start of checkpoint.load"):
        optimizers = as_optimizers(optimizer)
        background.finish()
    directory = Path(directory)

    def newest(_: list[Any]) -> str:
        return str(directories.locate(directory).relative_to(directory))

    path = directory / ranks.agree("checkpoint.load", None, newest)
    with ranks.together("checkpoint.load"):
        loaded = read(path, model, optimizers, ranks.rank, strict=strict)
    loaded.put_into(model, optimizers)
    saved = loaded.extra
    del loaded
    free_pinned_memory()
    return saved


def _check_keep(keep: int | None) -> None:
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ValueError(f"checkpoints got keep={keep!r}. Pass a number of at least 1, or None.")
