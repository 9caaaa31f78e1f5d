"""Process groups that only the calling thread may use: Note [inline groups].

The Note is in ``csrc/torch/inline_group.h``.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from fsdp_ext import _C
from fsdp_ext.comm.collectives import all_gather, reduce_scatter
from fsdp_ext.comm.meeting import backend_name

# Backends of the host that are written in C++ and serve any thread.
_SERVE_ANY_THREAD = ("gloo", "fake")

# The names of a collective of one tensor. torch 2.13 renamed the methods, and a class may have
# either name.
_ALL_GATHER = ("all_gather_single", "_allgather_base")
_REDUCE_SCATTER = ("reduce_scatter_single", "_reduce_scatter_base")


def is_inline(group: dist.ProcessGroup) -> bool:
    """Return whether collectives of ``group`` have to run on the calling thread."""
    return type(group) is not dist.ProcessGroup or backend_name(group) not in _SERVE_ANY_THREAD


def refuse_inline(lanes_are_inline: bool, caller: str) -> None:
    """Raise NotImplementedError if collectives run on the thread that trains."""
    if lanes_are_inline:
        raise NotImplementedError(
            f"{caller} does not support process groups whose collectives run on the thread that "
            "trains, because nothing overlaps them: all of their time is exposed. Use gloo."
        )


class InlineCollectives:
    """The collectives of a group, on the calling thread.

    A class in Python may have few methods. It needs all-gathers and all-reduces.

    It does not keep the group alive, because lanes live as long as their group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._weak_group = weakref.ref(group)
        self._all_gather = _overridden(group, _ALL_GATHER)
        self._reduce_scatter = _overridden(group, _REDUCE_SCATTER)

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._weak_group()
        if group is None:
            raise RuntimeError("the process group of the model's mesh was destroyed")
        return group

    def ranks_are_threads(self) -> bool:
        """Return whether ranks are threads of one process, as PyTorch's own tests have them.

        All ranks make this call together.
        """
        own = torch.frombuffer(bytearray(_C.process_identity()), dtype=torch.uint8)
        gathered = own.new_empty(self._group.size() * own.numel())
        self.all_gather(gathered, own)
        processes = {tuple(process) for process in gathered.view(-1, own.numel()).tolist()}
        return len(processes) < self._group.size()

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Gather the 1-D inputs of all ranks into ``output``."""
        group: Any = self._group
        if type(group) is dist.ProcessGroup:
            all_gather(output, input, group)
        elif self._all_gather is not None:
            getattr(group, self._all_gather)(output, input, AllgatherOptions()).wait()
        else:
            parts = list(output.view(group.size(), input.numel()).unbind())
            dist.all_gather(parts, input, group=group)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Sum this rank's part of the ranks' 1-D inputs into ``output``."""
        group: Any = self._group
        if type(group) is dist.ProcessGroup:
            reduce_scatter(output, input, group)
        elif self._reduce_scatter is not None:
            getattr(group, self._reduce_scatter)(output, input, ReduceScatterOptions()).wait()
        elif _overridden(group, ("reduce_scatter",)) is not None:
            parts = list(input.view(group.size(), output.numel()).unbind())
            dist.reduce_scatter(output, parts, group=group)
        else:
            whole = input.clone()
            dist.all_reduce(whole, group=group)
            output.copy_(whole.view(group.size(), output.numel())[dist.get_rank(group)])

    def all_reduce(self, data: torch.Tensor) -> None:
        """Replace ``data`` with its sum over all ranks."""
        dist.all_reduce(data, group=self._group)


def _overridden(group: dist.ProcessGroup, names: tuple[str, ...]) -> str | None:
    """Return the first of the methods that the group's class itself defines."""
    for name in names:
        own = getattr(type(group), name, None)
        if own is not None and own is not getattr(dist.ProcessGroup, name, None):
            return name
    return None
