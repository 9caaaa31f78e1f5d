"""Parameters of tensor subclasses whose methods say how they are gathered.

Note [tensor extensions]
FSDP2's extensions are two methods of a class. ``fsdp_pre_all_gather`` turns a shard into tensors to
gather, and ``fsdp_post_all_gather`` turns gathered tensors into the unsharded parameter. Quantised
weights, for example, travel as bytes and scales. The schedule knows nothing of such classes. It
sees ordinary entries of the layout:

- Each *input*, a tensor that the first method returns, is an entry like a frozen parameter of raw
  bytes. It lies in the flat shard and is gathered with the others. The user never sees it.
- The parameter itself is not gathered (``ParamSpec::gathered``). It has an entry so that its
  gradient is reduced. The sharded parameter keeps memory of its own.

Before a gather, the gatherer has the unit compute its inputs if sharded parameters may have
changed: once an iteration, and again if their versions have changed. The first method then runs on
the calling thread, and its results are copied into the flat shard.

When the unit is attached, the second method gets views of the slot. Its first call makes the
unsharded parameter, and later calls get this parameter as ``out``. Views and parameter stay the
same for the life of the C++ unit: Note [one pointer swap] in csrc/torch/torch_unit.h. Memory that
the parameter has outside of the slot is freed when the unit is detached.

The sizes of the inputs are known only from a call of the first method. So making the C++ unit calls
the method once more.

As in FSDP2, the methods may also be set after ``fully_shard``: on a class, or on local tensors.
When the flat shard is made anew, or at the latest when the C++ unit is made, parameters with
methods leave the flat shard, and those without return to it.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_ext._util.errors import MisuseError
from fsdp_ext._util.tracing import hidden_from_dynamo
from fsdp_ext.sharding.params.dtensors import contiguous_stride
from fsdp_ext.sharding.params.entries import Entry, GatherInput, ShardedParam
from fsdp_ext.sharding.params.ownership import mark_unsharded
from fsdp_ext.sharding.params.ranks import Ranks
from fsdp_ext.sharding.params.settings import UnitSettings


def check_can_extend(name: str, part: torch.Tensor, dim: int, settings: UnitSettings) -> None:
    """Raise NotImplementedError if a unit cannot have an extension, sharded in ``dim``."""
    if settings.offloads:
        raise NotImplementedError(
            f"offload_policy is CPUOffloadPolicy, but parameter '{name}' is a "
            f"{type(part).__name__}, whose methods gather it on the device. Pass "
            "OffloadPolicy() for its module."
        )
    if dim > 0:
        raise NotImplementedError(
            f"shard_placement_fn returned Shard({dim}) for parameter '{name}', a "
            f"{type(part).__name__}. Parameters whose class has fsdp_pre_all_gather are only "
            "shared along dimension 0, so return Shard(0)."
        )


class Extension:
    """The two methods of one parameter's class, for the life of a C++ unit.

    The C++ unit keeps this, so it refers to nothing that refers to the unit. The metadata may refer
    to a module, and so to the unit. It lies in the rows, which only objects of Python keep, so the
    garbage collector finds the cycle.
    """

    def __init__(
        self, param: ShardedParam, ranks: Ranks, policy: MixedPrecisionPolicy, dtype: torch.dtype
    ) -> None:
        assert param.own is not None
        self.name = param.name
        self._sharded = param.sharded
        self._module = weakref.ref(param.attributes[0][0])
        self._shape, self._padded = param.shape, param.own.size
        self._spread = param.unsharded
        self._mesh = ranks.shard_mesh
        self._policy, self._dtype = policy, dtype
        self._rows = weakref.ref(param.own)
        self._unsharded: nn.Parameter | None = None
        self._is_new = False  # whether the C++ unit has yet to take the unsharded parameter
        self._own: list[torch.Tensor] = []  # the unsharded parameter's tensors outside of the slot
        self.inputs = [
            GatherInput(f"{self.name} (input {index})", tensor, ranks.size)
            for index, tensor in enumerate(self._run_pre_hook())
        ]

    def compute_inputs(self) -> None:
        """Copy the results of the first method into the flat shard."""
        tensors = self._run_pre_hook()
        if len(tensors) != len(self.inputs) or not all(
            map(GatherInput.is_like, self.inputs, tensors)
        ):
            before = [(tuple(each.size), each.input_dtype) for each in self.inputs]
            now = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
            raise ValueError(
                f"fsdp_pre_all_gather of parameter '{self.name}' returned tensors of {now}, but at "
                f"first of {before}. Return the same shapes and dtypes in every call."
            )
        for each, tensor in zip(self.inputs, tensors, strict=True):
            each.part.copy_(tensor.contiguous().view(-1).view(torch.uint8))

    def attach(self) -> None:
        """Make the unsharded parameter of gathered tensors."""
        for tensor in self._own:
            _resize(tensor, tensor.numel() * tensor.itemsize)
        outputs = tuple(each.output for each in self.inputs)
        versions = [output._version for output in outputs]
        self._run_post_hook(outputs)
        if versions != [output._version for output in outputs]:
            # A slot is attached again without a gather: Note [lazy reshard] in
            # core/gather/gatherer.h.
            raise NotImplementedError(
                f"fsdp_post_all_gather of parameter '{self.name}' changed a gathered tensor in "
                "place. The next call may get the same tensor without another all-gather. Write "
                "into a new tensor, or into out."
            )

    def take_new(self) -> nn.Parameter | None:
        """Return the unsharded parameter the first time, for the C++ unit, and None later."""
        self._is_new, is_new = False, self._is_new
        return self._unsharded if is_new else None

    def undo_attach(self) -> None:
        """Restore the state before attach, after one extension of the unit failed in it."""
        self.detach()
        if self._is_new:
            self._unsharded, self._own, self._is_new = None, [], False

    def _run_post_hook(self, outputs: Sequence[torch.Tensor]) -> None:
        local: Any = self._local
        rows = self._rows()
        metadata = None if rows is None else rows.metadata
        if self._unsharded is not None:
            local.fsdp_post_all_gather(outputs, metadata, self._dtype, out=self._unsharded)
            return
        tensor, inner = local.fsdp_post_all_gather(outputs, metadata, self._dtype)
        self._check_dtype(tensor)
        in_slot = {output.untyped_storage()._cdata for output in outputs}
        self._own = [each for each in inner if each.untyped_storage()._cdata not in in_slot]
        whole = torch.as_strided(tensor, self._shape, contiguous_stride(self._shape), 0)
        if self._spread is not None:
            whole = self._spread.wrap(whole)
        self._unsharded = nn.Parameter(whole, requires_grad=self._sharded.requires_grad)
        mark_unsharded(self._unsharded, self.name)
        self._is_new = True

    def detach(self) -> None:
        """Free the unsharded parameter's memory outside of the slot."""
        for tensor in self._own:
            _resize(tensor, 0)

    @property
    def _local(self) -> torch.Tensor:
        local: torch.Tensor = self._sharded._local_tensor  # type: ignore[attr-defined]
        return local

    def _run_pre_hook(self) -> Sequence[torch.Tensor]:
        local: Any = self._local
        signature = inspect.signature(local.fsdp_pre_all_gather)
        inputs: Sequence[torch.Tensor]
        if len(signature.parameters) == 1:
            inputs, metadata = local.fsdp_pre_all_gather(self._mesh)
        elif len(signature.parameters) == 5:
            stride = contiguous_stride(self._shape)
            inputs, metadata = local.fsdp_pre_all_gather(
                self._mesh, self._shape, stride, self._module(), self._policy
            )
        else:
            raise MisuseError(
                f"fsdp_pre_all_gather of parameter '{self.name}' has the parameters "
                f"{list(signature.parameters)} besides self. It needs (mesh) or (mesh, outer_size, "
                "outer_stride, module, mp_policy)."
            )
        sizes = [tuple(tensor.shape) for tensor in inputs]
        if local.shape != self._padded and any(size != tuple(self._padded) for size in sizes):
            raise MisuseError(
                f"fsdp_pre_all_gather of parameter '{self.name}' returned tensors of sizes "
                f"{sizes}. Ranks have different numbers of its rows, so each tensor needs the "
                f"padded size, {tuple(self._padded)}."
            )
        rows = self._rows()
        if rows is not None:
            rows.metadata = metadata
        return inputs

    def _check_dtype(self, tensor: torch.Tensor) -> None:
        if self._sharded.requires_grad and tensor.dtype != self._dtype:
            raise NotImplementedError(
                f"fsdp_post_all_gather of parameter '{self.name}' returned a {tensor.dtype} "
                f"tensor, but gradients of its unit need param_dtype={self._dtype}. Return a "
                "tensor of that dtype, or freeze the parameter."
            )


@dataclass(frozen=True)
class UnitExtensions:
    """All extensions of a unit. The C++ unit calls these methods."""

    extensions: dict[int, Extension]

    @hidden_from_dynamo
    @torch.inference_mode(False)
    @torch.no_grad()
    def compute_inputs(self) -> None:
        """Compute the inputs of the next gather."""
        for extension in self.extensions.values():
            extension.compute_inputs()

    @hidden_from_dynamo
    @torch.inference_mode(False)
    @torch.no_grad()
    def attach(self) -> dict[int, nn.Parameter]:
        """Make the unsharded parameters; return the new ones by their index in the layout."""
        try:
            for extension in self.extensions.values():
                extension.attach()
        except BaseException:
            for extension in self.extensions.values():
                extension.undo_attach()
            raise
        made = {index: extension.take_new() for index, extension in self.extensions.items()}
        return {index: param for index, param in made.items() if param is not None}

    @hidden_from_dynamo
    def detach(self) -> None:
        """Free the unsharded parameters' memory outside of the slot."""
        for extension in self.extensions.values():
            extension.detach()


def place_extensions(
    extensions: Sequence[Extension],
    entries: Sequence[Entry],
    parts: Sequence[torch.Tensor],
    views: Sequence[torch.Tensor],
) -> UnitExtensions | None:
    """Tell the extensions of a unit where their tensors lie. Return None if there are none.

    Each entry of the unit's layout has a part of the flat shard and an unsharded view.
    """
    if not extensions:
        return None
    for entry, part, view in zip(entries, parts, views, strict=True):
        if isinstance(entry, GatherInput):
            entry.part, entry.output = part, view
    indices = [index for index, entry in enumerate(entries) if not entry.is_gathered]
    return UnitExtensions(dict(zip(indices, extensions, strict=True)))


def _resize(tensor: torch.Tensor, nbytes: int) -> None:
    storage = tensor.untyped_storage()
    if storage.size() != nbytes:
        storage.resize_(nbytes)
