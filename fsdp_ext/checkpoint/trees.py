"""Nested values as JSON and named tensors.

A value that is not a number, a string, a truth value or None becomes an object with one key, which
says what it was. So a tuple comes back as a tuple, and nothing needs pickle. A NumPy scalar comes
back as Python's number or string.
"""

from __future__ import annotations

import base64
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

# What a value may be, for messages.
_KINDS = (
    "numbers, strings, None, lists, tuples, dicts, bytes, tensors and NumPy arrays; most objects "
    "have a state_dict() of these"
)


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a value as JSON; ``tensors`` gets its tensors, whose names begin with ``path``."""

    def inner(key: object, item: Any) -> Any:
        return encode(item, f"{path}/{key}", tensors)

    def put(tensor: torch.Tensor) -> str:
        name = path
        while name in tensors:  # such as of the keys 1 and "1"
            name += "'"
        tensors[name] = tensor
        return name

    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, torch.Tensor):
        return {"tensor": put(value)}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        name = "counter" if isinstance(value, Counter) else "dict"
        pairs = enumerate(value.items())
        return {name: [[inner(f"key {i}", key), inner(key, item)] for i, (key, item) in pairs]}
    if isinstance(value, (list, tuple)):
        name = "tuple" if isinstance(value, tuple) else "list"
        return {name: [inner(i, item) for i, item in enumerate(value)]}
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray:
        try:
            tensor = torch.from_numpy(value.copy())
        except (TypeError, ValueError) as error:  # such as for strings
            raise TypeError(
                f"{path} is a NumPy array of {value.dtype}, which cannot be saved. Use an array of "
                "numbers that a tensor can have, in this machine's byte order."
            ) from error
        return {"array": put(tensor)}
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biufU":
        plain = value.item()
        if type(plain) is not kind:  # item() of a longdouble returns a longdouble
            return encode(plain, path, tensors)
    raise TypeError(f"{path} is of type {kind.__name__}, which cannot be saved. Use {_KINDS}.")


def decode(value: Any, tensor_of: Callable[[str], torch.Tensor]) -> Any:
    """Return the value that :func:`encode` was given."""

    def inner(item: Any) -> Any:
        return decode(item, tensor_of)

    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ValueError("a list without its kind")
        return value
    if len(value) != 1:
        raise ValueError(f"an object with {len(value)} keys instead of one")
    ((name, content),) = value.items()
    match name:
        case "float":
            return float(content)
        case "tensor":
            return tensor_of(content)
        case "array":
            return tensor_of(content).numpy()
        case "bytes":
            return base64.b64decode(content)
        case "dtype":
            return getattr(torch, content)
        case "list":
            return [inner(item) for item in content]
        case "tuple":
            return tuple(inner(item) for item in content)
        case "dict" | "counter":
            pairs = {inner(key): inner(item) for key, item in content}
            return Counter(pairs) if name == "counter" else pairs
    raise ValueError(f"a value of the unknown kind '{name}'")


def tensors_in(tree: Any) -> Iterator[str]:
    """Return the names of the tensors in an encoded value."""
    if isinstance(tree, dict):
        for kind, content in tree.items():
            if kind in ("tensor", "array"):
                yield str(content)  # it may be anything in a damaged file
            else:
                yield from tensors_in(content)
    elif isinstance(tree, list):
        for item in tree:
            yield from tensors_in(item)
