"""Methods of PyTorch's ``FSDPModule`` that are not supported: each raises a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def override_rest(cls: type, base: type) -> None:
    """Give ``cls`` a method that raises for each method of ``base`` that it does not override.

    PyTorch's methods would look for its own state on the module. Newer versions of PyTorch may add
    methods, so the list is read from the installed version.
    """
    for name, value in vars(base).items():
        if callable(value) and name not in vars(cls) and not _is_special(name):
            setattr(cls, name, _refusal(name))


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _refusal(name: str) -> Callable[..., NoReturn]:
    def method(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"FSDPModule.{name} is not supported yet. Leave the call out.")

    method.__name__ = name
    method.__doc__ = "Raise NotImplementedError. Leave the call out."
    return method
