"""Entries of an optimizer's state, and whether the optimizer still has them."""

from __future__ import annotations

import dataclasses
import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from fsdp_ext import _C


class StateEntries:
    """An optimizer's state entries for some parameters, if ``is_noted`` accepts their values."""

    def __init__(
        self,
        states: Mapping[Any, Any],
        params: Iterable[Any],
        is_noted: Callable[[Any], bool] = lambda value: True,
    ) -> None:
        self._params = list(params)
        self._dicts: list[dict[str, Any]] = list(filter(None, map(states.get, self._params)))
        self._count = _C.total_length(self._dicts)  # of all entries
        found = [
            (values, name)
            for values in self._dicts
            for name, value in values.items()
            if is_noted(value)
        ]
        self._homes = [values for values, _ in found]
        self.names = [name for _, name in found]

    def values(self) -> list[Any]:
        """Return the values of the noted entries."""
        return list(map(dict.get, self._homes, self.names))

    def are_in(self, states: Mapping[Any, Any], values: list[Any]) -> bool:
        """Return whether the optimizer has the same dicts as before, with ``values`` in them."""
        dicts = list(filter(None, map(states.get, self._params)))
        return _C.same_objects(dicts, self._dicts) and self.have_only(values)

    def have_only(self, values: list[Any]) -> bool:
        """Return whether the dicts have ``values``, and no other entries than before."""
        has_count = _C.total_length(self._dicts) == self._count
        return has_count and _C.have_entries(self._homes, self.names, values)

    def put(self, values: list[Any]) -> None:
        """Replace the noted entries."""
        deque(map(operator.setitem, self._homes, self.names, values), maxlen=0)


def local_of(value: Any) -> Any:
    """Return this rank's part of a DTensor, and anything else as it is."""
    return value._local_tensor if isinstance(value, DTensor) else value


def over(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a DTensor that is spread as ``like``, with ``local`` as this rank's part."""
    if not isinstance(like, DTensor):
        return local
    spec = like._spec
    if local.dtype != like.dtype and spec.tensor_meta is not None:
        meta = spec.tensor_meta._replace(dtype=local.dtype)
        spec = dataclasses.replace(spec, tensor_meta=meta)
    # from_local would move it to the mesh's device.
    return cast(torch.Tensor, DTensor(local, spec, requires_grad=False))  # type: ignore[no-untyped-call]
