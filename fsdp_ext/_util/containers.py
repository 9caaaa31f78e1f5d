"""Tensors inside containers that csrc/torch/containers.cpp does not handle itself."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from fsdp_ext._util.tracing import untraced

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    slice,
    type,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Generator,
)


@untraced  # hooks of compiled blocks call it
def map_tensors(fn: Callable[[Any], Any], container: Any) -> Any:
    """Apply ``fn`` to the items of ``container``; return the container itself if none changed.

    The container is never changed. A mapping that is neither a dict nor a ``UserDict`` is returned
    as it is, because nothing says how to copy it. FSDP2 and FSDP1 leave such mappings alone, too.

    Args:
        fn: maps a tensor, or a tuple, list or dict of tensors, and returns anything else unchanged.
        container: a dataclass, a named tuple, a mapping, a set, a ``PackedSequence``, a subclass of
            tuple or list. Any other object is returned unchanged.
    """
    if isinstance(container, PackedSequence):
        # The batch sizes stay on the host.
        names = ("data", "sorted_indices", "unsorted_indices")
        mapped = {name: fn(getattr(container, name)) for name in names}
        if all(mapped[name] is getattr(container, name) for name in names):
            return container
        return container._replace(**mapped)
    if dataclasses.is_dataclass(container) and not isinstance(container, (type, Mapping)):
        fields = {}
        for field in dataclasses.fields(container):
            value = getattr(container, field.name, None)
            mapped = fn(value)
            if mapped is not value:
                fields[field.name] = mapped
        if not fields:
            return container
        result = copy.copy(container)
        for name, value in fields.items():
            object.__setattr__(result, name, value)  # frozen ones, too
        return result
    if isinstance(container, Mapping):
        given = dict(container.items())  # once: a mapping may make its values anew each time
        items = {key: fn(value) for key, value in given.items()}
        changed = {key: items[key] for key, value in given.items() if items[key] is not value}
        return _copy_of(container, items, changed) if changed else container
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


def _copy_of(mapping: Mapping[Any, Any], items: dict[Any, Any], changed: dict[Any, Any]) -> Any:
    """Return a copy of ``mapping`` with ``items``, or ``mapping`` if nothing says how to copy it.

    ``changed`` has those that differ from the mapping's.
    """
    if not isinstance(mapping, (dict, UserDict)):
        return mapping
    try:
        copied: Any = copy.copy(mapping)
        for key, value in changed.items():
            copied[key] = value
    except TypeError:  # a dict that cannot be written; FSDP2 makes plain ones of all dicts
        return items
    return copied


@untraced
def opaque_type_in(value: Any) -> str:
    """Return the name of the type of an object in ``value`` that may hide tensors.

    :func:`map_tensors` does not look into it: it is no container, but has state of its own. The
    result is "" if there is none.
    """
    if isinstance(value, (torch.Tensor, *_PLAIN)) or type(value).__module__ == "numpy":
        return ""
    if isinstance(value, PackedSequence):
        return ""
    items: Iterable[Any]
    if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
        items = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (tuple, list, set, frozenset)):
        items = value
    else:
        return type(value).__name__
    return next((name for name in map(opaque_type_in, items) if name), "")
