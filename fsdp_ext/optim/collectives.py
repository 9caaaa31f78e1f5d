"""Collectives of a step, called without a roll call, because each step calls them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def explaining_errors(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Let a collective that fails say what the ranks have to do.

    Only the host sees such errors. Over NCCL, torch's watchdog ends the process.

    Args:
        what: what the rank could not do.
        group: the ranks of the collective.
    """
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {dist.get_rank()} could not {what}. All of the ranks "
            f"{dist.get_process_group_ranks(group)} have to do this in the same step, for the same "
            f"parameters. The backend says: {error}"
        ) from error
