"""Comparisons of ranks when a root is made, so that a difference is an error instead of a hang."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch.distributed as dist

from fsdp_ext import _C
from fsdp_ext._util.names import without_wrappers
from fsdp_ext.comm.lanes import exchange_messages, texts_if_different
from fsdp_ext.sharding.root.step_checks import AllGather, MeshRanks
from fsdp_ext.sharding.root.unit import Unit

_GROUPS = "the comparison of the ranks' groups"
_MODELS = "the comparison of the ranks' models"

_Line = tuple[str, str]  # a name, and facts


def compare_groups(
    lanes: _C.Lanes, units: Sequence[Unit], module_names: Sequence[Sequence[str]]
) -> None:
    """Check that ranks agree on meshes and smaller groups, which they are about to join."""
    mine = "\n".join(
        f"over {unit.ranks.size} ranks "
        f"(reshard_after_forward: {unit.settings.reshard_group or 'no number'})"
        for unit in units
    )
    said = texts_if_different(lambda _, text: exchange_messages(lanes, text), _GROUPS, mine) or []
    ranks = dist.get_process_group_ranks(units[0].ranks.shard_group)
    for rank, text in zip(ranks, said, strict=False):
        of_units = zip(module_names, said[0].split("\n"), text.split("\n"), strict=False)
        for names, first, other in of_units:
            if first != other:
                raise ValueError(
                    f"rank {ranks[0]} shards unit '{names[0] or 'the root'}' {first}, but rank "
                    f"{rank} shards it {other}. Pass one dimension of the same mesh and the same "
                    "reshard_after_forward to fully_shard on all ranks."
                )


def compare_models(
    units: Sequence[Unit], settings: Sequence[_Line], ranks: MeshRanks, all_gather: AllGather
) -> None:
    """Check that all ranks shard the same parameters with the same settings.

    Equal sizes are not enough: in a message, parameters of equal size could be swapped. A name that
    the other rank has nowhere says nothing, since a rank may wrap modules that it looks at. The
    settings come last, because some defaults follow from the parameters.
    """
    mine = [*(line for unit in units for line in _parameters_of(unit)), *settings]
    said = texts_if_different(all_gather, _MODELS, "\n".join(map("\t".join, mine)))
    if said is None:
        return
    for rank, text in enumerate(said):
        different = _first_difference(_lines_of(said[0]), _lines_of(text))
        if different is not None:
            here, there = map(" ".join, different)
            raise ValueError(
                f"ranks have different models: {ranks.named([0])} has {here} where "
                f"{ranks.named([rank])} has {there}. Make the model the same on every rank, for "
                "example from a sorted list instead of a set, and also its fully_shard calls with "
                "their arguments, frozen parameters and divide factors."
            )


def _lines_of(text: str) -> list[_Line]:
    return [(name, facts) for name, _, facts in (line.partition("\t") for line in text.split("\n"))]


def _first_difference(here: list[_Line], there: list[_Line]) -> tuple[_Line, _Line] | None:
    """Return the first lines that differ in facts, or in a name that both ranks have."""
    common = {name for name, _ in here} & {name for name, _ in there}
    for one, other in zip_longest(here, there, fillvalue=("nothing", "more")):
        names = {one[0], other[0]}
        if one[1] != other[1] or (len(names) == 2 and names & common):
            return one, other
    return None


def _parameters_of(unit: Unit) -> Iterator[_Line]:
    """Yield names with facts that have to be the same on all ranks: the unit, its parameters."""
    reduce_dtype = unit.grad_dtypes()[1]
    before, after = unit.gradient_scales(reduce_dtype)
    is_trained = any(param.is_trained for param in unit.params)
    scales = f"scaled by {before} before that and {after} after it"
    gradients = f"its gradients reduced in {reduce_dtype}, {scales}"
    name = without_wrappers(unit.name)
    yield f"unit '{name}'", f"({gradients if is_trained else 'frozen'})"
    for param in unit.entries:
        use = f"trained in {unit.grad_dtype(param)}" if param.is_trained else "frozen"
        yield (
            f"parameter '{without_wrappers(param.name)}'",
            f"({param.dtype}, shape {list(param.shape)}, Shard({param.shard_dim}), gathered in "
            f"{unit.compute_dtype(param)}, {use})",
        )
