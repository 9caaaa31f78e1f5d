"""``write_flight_record``: the newest collectives of this rank, for PyTorch's ``torchfrtrace``."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from fsdp_ext.sharding.root.root import running_root


def write_flight_record(model: nn.Module, path: str | Path | None = None) -> str:
    """Write the newest collectives of this rank to a file, and whether each has begun and ended.

    The file has the format of PyTorch's Flight Recorder. Give ``torchfrtrace`` (or ``python -m
    torch.distributed.flight_recorder.fr_trace``) a folder with the files of all ranks. A rank also
    writes one when a collective times out, ranks differ or other ranks have failed, and the error
    says where it is.

    A call waits for no collective and for no other rank, so another thread may call it while a step
    hangs.

    Args:
        model: a sharded module that has run forward, or FSDP1's wrapper of one. The collectives of
            other models on this rank are in the file, too.
        path: the file's path; the file is replaced. By default it is made of PyTorch's variable
            ``TORCH_FR_DUMP_TEMP_FILE`` and the rank's number; see ``docs/reliability.md``.

    Returns:
        The path of the file.

    Raises:
        TypeError: if ``fully_shard`` was not applied to ``model``, or ``path`` is no path.
        RuntimeError: before the first forward, if nothing is recorded because
            ``TORCH_FR_BUFFER_SIZE`` is 0, or if the file cannot be written.
    """
    flights = running_root(model, "write_flight_record").lanes.flights
    if flights is None:
        raise RuntimeError(
            "write_flight_record has nothing to write, because TORCH_FR_BUFFER_SIZE was 0 when the "
            "first model ran. Set it to the number of collectives to keep, such as 2000."
        )
    if path is not None and not isinstance(path, (str, Path)):
        raise TypeError(f"write_flight_record got path={path!r}. Pass the path of a file, or None.")
    target = flights.path if path is None else str(path)
    flights.write(target)
    return target
