"""Names of modules and parameters."""

from __future__ import annotations

# The names under which wrappers have the module that they wrap: FSDP1's, torch.compile's and that
# of activation checkpointing.
WRAPPED = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})


def without_wrappers(name: str) -> str:
    """Return ``name``, of a module or a parameter, as it is in the model without wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)
