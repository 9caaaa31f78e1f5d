"""``check_every``: the comparison of ranks at the end of a checked step.

Note [checked steps] in ``csrc/torch/step_checksum.h`` says what is hashed, and
``docs/reliability.md`` which faults that finds.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

_COMPARISON = "the comparison of all ranks at the end of a checked step"
_OUTDATED = 2  # a value of StepChecksum.gathered_ahead
_NAMED = 5  # findings that an error lists
_REPLACE = "replace the machine of the rank that is wrong, and resume from an older checkpoint."

# Returns the messages of all ranks: the name for errors, this rank's message.
AllGather = Callable[[str, bytes], list[bytes]]


@dataclass(frozen=True)
class StepChecksum:
    """One rank's hashes of a unit in a checked step: ``StepChecksum::Numbers`` in C++."""

    forward: int  # hash of the unsharded parameters at the end of forward; 0 for none
    backward: int  # the same for backward
    shard: int  # hash of the flat shard when the step began; 0 for none
    shard_changed: int  # whether the shard has changed in the step although nothing wrote it
    # 0 if the unit was gathered in the step; 1 if its gather was issued before the forward; 2 if
    # that gather brought other values than this rank's shard has.
    gathered_ahead: int = 0


Looks = list[list[StepChecksum]]  # by rank, then by unit


@dataclass(frozen=True)
class MeshRanks:
    """The ranks of a mesh."""

    numbers: Sequence[int]  # the global number of each, shard group by shard group
    group_size: int  # how many ranks a shard group has

    def named(self, ranks: Iterable[int]) -> str:
        """Return the global numbers of ``ranks`` in words."""
        return in_words([self.numbers[rank] for rank in ranks])


def in_words(ranks: Iterable[int]) -> str:
    """Return global ranks in words, such as "ranks 1, 2 and 5"."""
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def findings(looks: Looks, names: Sequence[str], ranks: MeshRanks) -> list[str]:
    """Return the forbidden differences, in words. The most specific differences come first."""
    found = []
    everyone = range(len(looks))
    for unit, name in enumerate(names):
        changed = [rank for rank in everyone if looks[rank][unit].shard_changed]
        if changed:
            found.append(
                f"the shard of unit '{name}' on {ranks.named(changed)} changed between the step's "
                "beginning and its end, and nothing wrote it"
            )
    for first in range(ranks.group_size):
        replicas = everyone[first :: ranks.group_size]
        for unit, name in enumerate(names):
            hashes = {rank: looks[rank][unit].shard for rank in replicas}
            found += _odd(f"the shard of unit '{name}'", hashes, ranks)
    for unit, name in enumerate(names):
        found += _gathered(looks, unit, name, ranks)
    return found


def outdated(looks: Looks, names: Sequence[str], ranks: MeshRanks) -> list[str]:
    """Return what is wrong with units whose gathers were issued before the forward, in words."""
    found = []
    for unit, name in enumerate(names):
        ahead = [of_rank[unit].gathered_ahead for of_rank in looks]
        wrong = [rank for rank, value in enumerate(ahead) if value == _OUTDATED]
        if wrong:
            found.append(
                f"the gathered parameters of unit '{name}' are not those of the shard on "
                f"{ranks.named(wrong)}"
            )
        elif any(ahead):
            found += _gathered(looks, unit, name, ranks)
    return found


def _gathered(looks: Looks, unit: int, name: str, ranks: MeshRanks) -> list[str]:
    """Return how ranks differ in what they gathered of a unit, in words."""
    what = f"the gathered parameters of unit '{name}' in"
    forward = {rank: look[unit].forward for rank, look in enumerate(looks)}
    backward = {rank: look[unit].backward for rank, look in enumerate(looks)}
    # Backward may use what forward has gathered.
    return _odd(f"{what} forward", forward, ranks) or _odd(f"{what} backward", backward, ranks)


def _odd(what: str, hashes: dict[int, int], ranks: MeshRanks) -> list[str]:
    """Return the ranks whose hash differs from that of most, in words, if there are any."""
    seen = {rank: value for rank, value in hashes.items() if value != 0}
    counts = Counter(seen.values()).most_common()
    if len(counts) < 2:
        return []
    value, count = counts[0]
    if 2 * count <= len(seen):
        return [f"{ranks.named(seen)} differ in {what}, and no majority says which is wrong"]
    odd = [rank for rank, other in seen.items() if other != value]
    verb = "differs" if len(odd) == 1 else "differ"
    return [f"{ranks.named(odd)} {verb} from the other {count} ranks in {what}"]


def compare_step(
    step: int,
    every: int,
    numbers: list[list[int]],
    names: Sequence[str],
    ranks: MeshRanks,
    all_gather: AllGather,
) -> None:
    """Compare this rank's hashes of each unit in a step with those of the other ranks."""
    mine = array("q", [number for unit in numbers for number in unit]).tobytes()
    messages = all_gather(_COMPARISON, mine)
    of_all = torch.frombuffer(bytearray(b"".join(messages)), dtype=torch.int64)
    of_all = of_all.view(len(messages), len(numbers), -1)
    if _are_alike(of_all, ranks):
        return
    looks = [[StepChecksum(*unit) for unit in of_rank] for of_rank in of_all.tolist()]
    if found := outdated(looks, names, ranks):
        raise RuntimeError(
            f"check_every={every} found parameters that may have been written after "
            f"their gather began, in step {step}: {_listed(found)}. Writes through .data, "
            "local tensors, flat_shard() or torch._foreach_ functions have to come before "
            "prefetch_next_forward() and unshard(). If there are no such writes, memory is "
            f"wrong: {_REPLACE}"
        )
    if found := findings(looks, names, ranks):
        raise RuntimeError(
            f"check_every={every} found memory that is wrong in step {step}: "
            f"{_listed(found)}. Do not train on: {_REPLACE}"
        )


def _listed(found: Sequence[str]) -> str:
    more = len(found) - _NAMED
    return "; ".join([*found[:_NAMED], *([f"and {more} more"] if more > 0 else [])])


def _are_alike(numbers: torch.Tensor, ranks: MeshRanks) -> bool:
    """Return whether there is nothing to find, which is fast with many ranks."""
    gathered, shards, changed = numbers[:, :, :2], numbers[:, :, 2], numbers[:, :, 3]
    by_group = shards.reshape(-1, min(ranks.group_size, len(shards)), shards.shape[1])
    alike = (gathered == gathered[0]).all() & (by_group == by_group[0]).all() & (changed == 0).all()
    return bool(alike & (numbers[:, :, 4] != _OUTDATED).all())
