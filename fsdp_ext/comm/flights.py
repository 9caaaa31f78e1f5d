"""Flight records: the newest collectives of a rank's lanes, for PyTorch's ``torchfrtrace``.

The environment variables are PyTorch's own. Set them before the first forward:

- ``TORCH_FR_BUFFER_SIZE`` is how many collectives a pair of lanes keeps. With 0, none is recorded.
- ``TORCH_FR_DUMP_TEMP_FILE`` is the prefix of PyTorch's record; the rank's number follows it.
  Ours is in the same folder, and its name begins with ``fsdp_ext_``. PyTorch writes its own record
  at about the same time, so with one name, one record would replace the other.

See Note [flight records] in ``csrc/core/record/flight_tape.h``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_ext import _C

BUFFER_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
PATH = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_ENTRIES = 2000  # as many as PyTorch keeps

_recorders: dict[int, _C.FlightRecorder] = {}  # by rank, since ranks may be threads


def record_flights(lanes: _C.Lanes, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Record what ``lanes`` send from now on, unless the environment says not to."""
    entries = buffer_size()
    if entries == 0:
        return
    rank = dist.get_rank()
    if rank not in _recorders:
        _recorders[rank] = _C.FlightRecorder(rank=rank, entries=entries, prefix=path_prefix())
    name = f"{group.group_name}.{lanes.transport}"
    backend = known_backend(lanes.flight_backend)
    _recorders[rank].record(lanes, name=name, backend=backend, ranks=ranks)


def known_backend(name: str) -> str:
    """Return the name of a backend in ``fr_trace`` of this PyTorch. It refuses other names."""
    return "nccl" if torch.__version__ < "2.13" else name


def buffer_size() -> int:
    """Return how many collectives the environment asks for."""
    name, text = _first_set(BUFFER_SIZE)
    try:
        return max(0, int(text or _ENTRIES))
    except ValueError as error:
        raise ValueError(
            f"{name} is {text!r}. Set it to the number of collectives that a flight record keeps, "
            "or to 0 for no record."
        ) from error


def path_prefix() -> str:
    """Return the prefix of the records' paths."""
    _, text = _first_set(PATH)
    if text:
        given = Path(text)
        return f"{given.parent}/fsdp_ext_{'' if text.endswith('/') else given.name}"
    cache = os.environ.get("XDG_CACHE_HOME") or _cache_at_home()
    return f"{cache}/torch/fsdp_ext_trace_rank_"


def _cache_at_home() -> str:
    """Return the folder of caches; that of temporary files if this user has no home directory."""
    try:
        return f"{Path.home()}/.cache"
    except RuntimeError:
        return tempfile.gettempdir()


def _first_set(names: Sequence[str]) -> tuple[str, str]:
    """Return the first variable of ``names`` that is not empty, and its value."""
    return next(
        ((name, text) for name in names if (text := os.environ.get(name, ""))), (names[0], "")
    )
