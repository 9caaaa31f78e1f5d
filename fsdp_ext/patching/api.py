"""``patch``: puts ``fully_shard`` and ``FullyShardedDataParallel`` in PyTorch's place."""

from __future__ import annotations

from types import TracebackType

from fsdp_ext._util.warn import warn_caller
from fsdp_ext.patching import clipping, lazy_tensors, namespaces, static_methods

_SHOWN = 8  # names in a warning

_patches = 0  # the number of active patches


class Patch:
    """What :func:`patch` returns. The end of its ``with`` block undoes the patch."""

    def __init__(self) -> None:
        global _patches
        if _patches == 0:
            namespaces.import_users_of_both()
            _warn_about(namespaces.holders())
            namespaces.put_ours()
            static_methods.serve_both()
            lazy_tensors.read_when_set()
            clipping.serve_both()
        _patches += 1
        self._is_undone = False

    def __enter__(self) -> None:
        if self._is_undone:
            raise RuntimeError(
                "this patch was undone at the end of a with block. Call fsdp_ext.patch() again."
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        global _patches
        if self._is_undone:
            return
        self._is_undone = True
        _patches -= 1
        if _patches == 0:
            clipping.serve_torchs()
            lazy_tensors.pass_on()
            static_methods.serve_ours()
            namespaces.put_torchs()


def patch() -> Patch:
    """Put fsdp_ext's ``fully_shard`` and ``FullyShardedDataParallel`` in PyTorch's place.

    From now on, code that imports these names from PyTorch gets fsdp_ext's: the program's own code
    and that of libraries. Call it before they do, on all ranks. ``python -m fsdp_ext.patch
    script.py`` runs a script that needs no change.

    PyTorch's other public names stay. Its ``FSDPModule``, ``register_fsdp_forward_method`` and
    ``share_comm_ctx`` serve modules of both. Static methods of ``FullyShardedDataParallel``, such
    as ``state_dict_type``, call PyTorch's for models without fsdp_ext's wrappers.
    ``torch.nn.utils.clip_grad_norm_`` calls :func:`fsdp_ext.clip_grad_norm_` for parameters of
    :func:`fully_shard`.

    Code that took a name before keeps it, and trains with PyTorch's FSDP as before. A warning names
    the modules that have one.

    Returns:
        a context manager that undoes the patch at the end of its ``with`` block. Names that code
        took within the block stay fsdp_ext's. Patches can be nested: the last one to end undoes
        them. Without a ``with`` block the patch lasts as long as the process.
    """
    return Patch()


def _warn_about(holders: list[str]) -> None:
    if not holders:
        return
    more = f" and {len(holders) - _SHOWN} more" if len(holders) > _SHOWN else ""
    warn_caller(
        f"fsdp_ext.patch() came too late for {', '.join(holders[:_SHOWN])}{more}: these are "
        "PyTorch's already, and train with PyTorch's FSDP. Call fsdp_ext.patch() before the "
        "imports that take them."
    )
