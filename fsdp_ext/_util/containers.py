"""Tensors inside containers that csrc/torch/containers.cpp does not handle itself."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch.nn.utils.rnn import PackedSequence


def map_tensors(fn: Callable[[Any], Any], container: Any) -> Any:
    """Apply ``fn`` to the items of ``container``; return the container itself if none changed.

    Args:
        fn: maps a tensor, or a tuple, list or dict of tensors, and returns anything else unchanged.
        container: a dataclass, a named tuple, a mapping, a set, a ``PackedSequence``, a subclass of
            tuple or list. Any other object is returned unchanged.
    """
    if isinstance(container, PackedSequence):
        data = fn(container.data)
        return container if data is container.data else container._replace(data=data)
    if dataclasses.is_dataclass(container) and not isinstance(container, (type, Mapping)):
        changed = {}
        for field in dataclasses.fields(container):
            value = getattr(container, field.name, None)
            mapped = fn(value)
            if mapped is not value:
                changed[field.name] = mapped
        if not changed:
            return container
        result = copy.copy(container)
        for name, value in changed.items():
            object.__setattr__(result, name, value)  # frozen ones, too
        return result
    if isinstance(container, Mapping):
        items = {key: fn(value) for key, value in container.items()}
        if all(items[key] is value for key, value in container.items()):
            return container
        mapping: Any = copy.copy(container)
        for key, value in items.items():
            mapping[key] = value
        return mapping
    if isinstance(container, (tuple, list)):
        mapped_items = [fn(item) for item in container]
        if all(new is old for new, old in zip(mapped_items, container, strict=True)):
            return container
        if hasattr(container, "_fields"):
            return type(container)(*mapped_items)
        return type(container)(mapped_items)
    if isinstance(container, (set, frozenset)):
        mapped_set = {item: fn(item) for item in container}
        if all(new is old for old, new in mapped_set.items()):
            return container
        return type(container)(mapped_set.values())
    return container
