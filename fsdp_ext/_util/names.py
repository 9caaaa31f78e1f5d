"""Names of modules and parameters."""

from __future__ import annotations

# The names under which wrappers have the module that they wrap: FSDP1's, torch.compile's and that
# of activation checkpointing.
WRAPPED_BY_FSDP1 = "_fsdp_wrapped_module"
WRAPPED = frozenset({WRAPPED_BY_FSDP1, "_orig_mod", "_checkpoint_wrapped_module"})


def without_wrappers(name: str) -> str:
    """Return ``name``, of a module or a parameter, as it is in the model without wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def without_fsdp1(name: str) -> str:
    """Return ``name``, of a module or a parameter, as it is without the wrappers of FSDP1."""
    return ".".join(part for part in name.split(".") if part != WRAPPED_BY_FSDP1)
