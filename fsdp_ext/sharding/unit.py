"""One unit in Python: its parameters as sharded DTensors over one flat shard.

Everything here happens before training or between steps. What happens in a step is in
``csrc/torch/torch_unit.cpp``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from fsdp_ext import _C
from fsdp_ext.comm.transports import Transport, zeros_for_shard
from fsdp_ext.sharding.arguments import Auto, check_parameter, mark_sharded

# reduce_dtype=None stands for param_dtype before torch 2.15, and for the parameters' own dtype from
# then on (MixedPrecisionPolicy's docstring there, "versionchanged"). The policy is PyTorch's own
# class, so it means what the PyTorch that is installed says.
_REDUCES_AS_COMPUTED = torch.__version__ < "2.15"

# From how many bytes on a parameter is gathered straight into its place: Note [gather plans] in
# csrc/core/layout.h. Tests change it.
DIRECT_BYTES = _C.DIRECT_BYTES


@dataclass
class ParamSlot:
    """One parameter of a unit and every attribute of a module that is it (tied ones, too)."""

    name: str  # from the unit's module, later from the root
    shape: torch.Size
    sharded: nn.Parameter
    attributes: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows, a tensor of shape (rows of this rank, ...)."""
        local: torch.Tensor = self.sharded._local_tensor  # type: ignore[attr-defined]
        return local

    def registered(self) -> nn.Parameter | None:
        """What the module has as its attribute now."""
        module, name = self.attributes[0]
        return module._parameters[name]


class Unit:
    """The parameters of one ``fully_shard`` call, gathered and reduced together.

    Args:
        modules: the modules of the call.
        params: their parameters that no other unit has, with names for error messages.
        mesh: 1-D, over which rows are sharded.
        reshard_after_forward: None stands for True, and False if this turns out to be the root.
        transport: by name, or a simulated one; None for the default.
        bucket_bytes: see :func:`fsdp_ext.fully_shard`.
        max_message_bytes: see there.
        prefetch: see there; the root's counts.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        params: dict[nn.Parameter, str],
        mesh: DeviceMesh,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        transport: Transport = None,
        bucket_bytes: int | Auto | None = None,
        max_message_bytes: int | None = None,
        prefetch: int | Auto | None = None,
    ) -> None:
        self.modules = modules
        self.mesh = mesh
        self.device = device
        self.mp_policy = mp_policy
        self.transport = transport
        self.bucket_bytes = bucket_bytes
        self.max_message_bytes = max_message_bytes
        self.prefetch = prefetch
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.is_last_backward = True  # the root's counts
        self.gradient_divide_factor: float | None = None
        self.forward_prefetch: list[Unit] = []
        self.backward_prefetch: list[Unit] = []
        self.name = type(modules[0]).__name__
        self.root: Any = None  # fsdp_ext.sharding.root.Root, from the first forward on
        self.core: _C.TorchUnit | None = None
        self.flat_shard = torch.empty(0, dtype=torch.uint8, device=device)
        self.flat_gradient = torch.empty(0, device=device)
        for param, name in params.items():
            check_parameter(name, param, device)
        self.slots = self._shard(self._large_first(params))

    def _large_first(self, params: dict[nn.Parameter, str]) -> dict[nn.Parameter, str]:
        """Return the parameters in the order of the layout (csrc/core/layout.h)."""

        def is_small(param: nn.Parameter) -> bool:
            rows = -(-param.shape[0] // self.mesh.size()) * self.mesh.size()
            dtype = self.mp_policy.param_dtype if param.is_floating_point() else None
            size = (dtype or param.dtype).itemsize
            return rows * size * math.prod(param.shape[1:]) < DIRECT_BYTES

        return dict(sorted(params.items(), key=lambda item: is_small(item[0])))

    def flat(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`fsdp_ext.FSDPModule.flat_shard`."""
        dtypes = {slot.local.dtype for slot in self.slots}
        frozen = [slot.name for slot in self.slots if not slot.sharded.requires_grad]
        if len(dtypes) != 1 or frozen:
            raise ValueError(
                f"flat_shard expects a unit whose parameters have one dtype and all require "
                f"gradients but '{self.name}' has {sorted(map(str, dtypes))} and does not train "
                f"{frozen}; use its parameters one by one"
            )
        if self.core is None:
            raise RuntimeError(
                f"flat_shard expects unit '{self.name}' to have run forward, which makes its flat "
                "gradient"
            )
        return self.flat_shard.view(dtypes.pop()), self.flat_gradient

    # - Sharding

    @torch.inference_mode(False)
    @torch.no_grad()
    def _shard(self, params: dict[nn.Parameter, str]) -> list[ParamSlot]:
        """Replace the modules' parameters by DTensors over this rank's rows."""
        rank, world_size = self.mesh.get_local_rank(), self.mesh.size()
        locals_: list[torch.Tensor] = []
        for param in params:
            chunk = -(-param.shape[0] // world_size)
            first = min(chunk * rank, param.shape[0])
            rows = param.detach()[first : first + chunk]
            locals_.append(rows if rows.is_meta else rows.to(self.device))
        slots = [
            ParamSlot(name, param.shape, self._to_dtensor(local, param))
            for (param, name), local in zip(params.items(), locals_, strict=True)
        ]
        by_param = dict(zip(params, slots, strict=True))
        for module in self.modules:
            for submodule in module.modules():
                for attribute, value in submodule._parameters.items():
                    slot = by_param.get(value) if value is not None else None
                    if slot is not None and (submodule, attribute) not in slot.attributes:
                        slot.attributes.append((submodule, attribute))
        for param, slot in by_param.items():
            for submodule, attribute in slot.attributes:
                submodule._parameters[attribute] = slot.sharded
            mark_sharded(param, slot.sharded, slot.name, type(self.modules[0]).__name__)
        self.slots = slots
        self.flatten()
        return slots

    def _to_dtensor(self, local: torch.Tensor, like: torch.Tensor) -> nn.Parameter:
        dtensor = DTensor.from_local(
            local,
            self.mesh,
            [Shard(0)],
            run_check=False,
            shape=like.shape,
            stride=_contiguous_stride(like.shape),
        )
        return nn.Parameter(dtensor, requires_grad=like.requires_grad)

    @torch.inference_mode(False)
    @torch.no_grad()
    def flatten(self, *, loading: bool = False) -> bool:
        """Make the sharded parameters views of one flat shard, whatever became of them since.

        ``module.to()``, ``to_empty`` and ``load_state_dict(assign=True)`` give the modules other
        tensors or other parameters. Their rows are copied into a new flat shard unless they all
        lie in the present one already.

        Args:
            loading: parameters may be replaced one module at a time, so that some of them are
                still on meta; then wait for the rest.

        Returns:
            Whether anything changed, so that the C++ side has to be made anew.

        Raises:
            ValueError: if a parameter is no longer the DTensor it was sharded to, or its shape
                changed.
        """
        replaced = [self._adopt(slot) for slot in self.slots]
        layout = self.layout_for(training=False)
        if self._is_flat(layout):
            return any(replaced)
        devices = {slot.local.device.type for slot in self.slots}
        if loading and len(devices) > 1:
            return True
        if len(devices) > 1:
            on_meta = [slot.name for slot in self.slots if slot.local.is_meta]
            raise RuntimeError(
                f"unit '{self.name}' expects its parameters on one device but got "
                f"{sorted(devices)} (on meta: {on_meta}); materialise all of them with "
                "to_empty(device=...)"
            )
        device = torch.device(devices.pop()) if devices else self.device
        flat = zeros_for_shard(layout.shard_bytes, device, self.mesh.get_group(), self.transport)
        for slot, view in zip(self.slots, self._shard_views(flat, layout), strict=True):
            if not slot.local.is_meta:
                view.copy_(slot.local)
            slot.sharded._local_tensor = view  # type: ignore[attr-defined]
        self.flat_shard = flat
        return True

    def _adopt(self, slot: ParamSlot) -> bool:
        """Take over what the module has as its parameter now; return whether it is another."""
        now = slot.registered()
        replaced = now is not slot.sharded
        if not replaced:
            pass
        elif isinstance(now, nn.Parameter) and isinstance(now, DTensor):
            slot.sharded = now
            for module, name in slot.attributes:
                module._parameters[name] = now
        else:
            raise ValueError(
                f"expects parameter '{slot.name}' to be the DTensor that fully_shard made of it "
                f"but got {type(now).__name__}; shard the module after replacing its parameters"
            )
        rows = self._rows(slot)
        if slot.sharded.shape != slot.shape or slot.local.shape != (rows, *slot.shape[1:]):
            raise ValueError(
                f"expects parameter '{slot.name}' to keep its shape {tuple(slot.shape)} with "
                f"{rows} rows on this rank but got {tuple(slot.sharded.shape)} with local shape "
                f"{tuple(slot.local.shape)}; shard the module after changing shapes"
            )
        return replaced

    def _rows(self, slot: ParamSlot) -> int:
        chunk = -(-slot.shape[0] // self.mesh.size())
        first = min(chunk * self.mesh.get_local_rank(), slot.shape[0])
        return min(chunk, slot.shape[0] - first)

    def _is_flat(self, layout: _C.UnitLayout) -> bool:
        if self.flat_shard.numel() != layout.shard_bytes:
            return False
        base = self.flat_shard.untyped_storage()
        return all(
            slot.local.device == self.flat_shard.device
            and not slot.local.is_meta
            and slot.local.is_contiguous()
            and slot.local.untyped_storage()._cdata == base._cdata
            and slot.local.storage_offset() * slot.local.element_size() == place.shard_offset
            for slot, place in zip(self.slots, layout.placements, strict=True)
        )

    def _shard_views(self, flat: torch.Tensor, layout: _C.UnitLayout) -> list[torch.Tensor]:
        views = []
        for slot, place in zip(self.slots, layout.placements, strict=True):
            dtype = slot.local.dtype
            numel = slot.local.numel()
            end = place.shard_offset + numel * dtype.itemsize
            views.append(flat[place.shard_offset : end].view(dtype).view(slot.local.shape))
        return views

    # - Dtypes

    def layout_for(self, training: bool) -> _C.UnitLayout:
        """Return where parameters are in shards and buffers, and gradients, if it trains.

        Raises:
            ValueError: if trainable parameters have several dtypes.
        """
        grad_dtype, reduce_dtype = self.grad_dtypes() if training else (torch.float32,) * 2
        specs = [
            (
                slot.name,
                list(slot.shape),
                slot.local.dtype,
                self.param_dtype_of(slot),
                training and slot.sharded.requires_grad,
            )
            for slot in self.slots
        ]
        return _C.UnitLayout(specs, self.mesh.size(), grad_dtype, reduce_dtype, DIRECT_BYTES)

    def param_dtype_of(self, slot: ParamSlot) -> torch.dtype:
        """Return the dtype that a parameter is gathered and computed in."""
        dtype = slot.local.dtype
        if self.mp_policy.param_dtype is not None and dtype.is_floating_point:
            return self.mp_policy.param_dtype
        return dtype

    def grad_dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of the sharded gradients and of their reduction.

        Raises:
            ValueError: if trainable parameters have several dtypes.
        """
        trainable = {
            slot.name: slot.local.dtype for slot in self.slots if slot.sharded.requires_grad
        }
        if len(set(trainable.values())) > 1:
            listed = ", ".join(f"'{name}' is {dtype}" for name, dtype in trainable.items())
            raise ValueError(
                f"unit '{self.name}' expects its trainable parameters to have one dtype but "
                f"{listed}; shard them as separate units or convert them"
            )
        grad_dtype = next(iter(trainable.values()), torch.float32)
        computed = self.mp_policy.param_dtype if _REDUCES_AS_COMPUTED else None
        return grad_dtype, self.mp_policy.reduce_dtype or computed or grad_dtype

    def row_bytes(self, slot: ParamSlot) -> int:
        """Return what a row of the parameter from each rank is on the wire, gathered or reduced."""
        dtypes = [self.param_dtype_of(slot)]
        if slot.sharded.requires_grad:
            dtypes.append(self.grad_dtypes()[1])
        numel = math.prod(slot.shape[1:]) * self.mesh.size()
        return numel * max(dtype.itemsize for dtype in dtypes)

    def gradient_scales(self) -> tuple[float, float]:
        """Return what gradients are multiplied by before and after the reduction.

        As FSDP2 has it (``_get_gradient_divide_factors``): averaged over ranks; with fp16, whose
        range is small, about the square root of the divisor on each side.
        """
        factor = self.gradient_divide_factor or float(self.mesh.size())
        _, reduce_dtype = self.grad_dtypes()
        if reduce_dtype in (torch.float32, torch.bfloat16):
            return 1.0 / factor, 1.0
        before = 1
        while factor % before == 0 and factor / before > before:
            before *= 2
        return 1.0 / before, before / factor

    # - The C++ side

    @torch.inference_mode(False)  # the first forward may be an evaluation, and training follows
    @torch.no_grad()
    def build(self, name: str, names: dict[nn.Parameter, str]) -> _C.TorchUnit:
        """Make the C++ unit for the parameters as they are now.

        Args:
            name: of the unit, from the root.
            names: of the sharded parameters, from the root.

        Raises:
            RuntimeError: if parameters are on the meta device.
            ValueError: if dtypes or shapes do not fit.
        """
        self.name = name
        self.flatten()
        for slot in self.slots:
            slot.name = names.get(slot.sharded, slot.name)
        on_meta = [slot.name for slot in self.slots if slot.local.is_meta]
        if on_meta:
            raise RuntimeError(
                f"expects parameters with memory but {on_meta} are on the meta device; call "
                "module.to_empty(device=...) and initialise them before the first forward"
            )
        layout = self.layout_for(training=True)
        grad_dtype, _ = self.grad_dtypes()
        policy = self.mp_policy
        self.flat_gradient = torch.empty(layout.grad_numel, dtype=grad_dtype, device=self.device)
        core = _C.TorchUnit(
            layout=layout,
            flat_shard=self.flat_shard,
            flat_gradient=self.flat_gradient,
            shapes=[list(slot.shape) for slot in self.slots],
            param_dtypes=[self.param_dtype_of(slot) for slot in self.slots],
            cast_inputs=policy.param_dtype if policy.cast_forward_inputs else None,
            cast_outputs=policy.output_dtype,
            module_count=len(self.modules),
        )
        unsharded = [
            nn.Parameter(view, requires_grad=slot.sharded.requires_grad)
            for view, slot in zip(core.unsharded_views(), self.slots, strict=True)
        ]
        core.bind(
            sharded=[slot.sharded for slot in self.slots],
            unsharded=unsharded,
            gradients=self._sharded_gradients(layout),
            attributes=[
                (module._parameters, attribute, index)
                for index, slot in enumerate(self.slots)
                for module, attribute in slot.attributes
            ],
        )
        self.core = core
        return core

    def _sharded_gradients(self, layout: _C.UnitLayout) -> list[DTensor]:
        gradients = []
        for slot, place in zip(self.slots, layout.placements, strict=True):
            if slot.sharded.requires_grad:
                local = self.flat_gradient[place.grad_offset :][: slot.local.numel()]
                gradients.append(
                    DTensor.from_local(
                        local.view(slot.local.shape),
                        self.mesh,
                        [Shard(0)],
                        run_check=False,
                        shape=slot.shape,
                        stride=_contiguous_stride(slot.shape),
                    )
                )
        return gradients


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    stride = [1]
    for size in reversed(shape[1:]):
        stride.append(stride[-1] * max(size, 1))
    return tuple(reversed(stride))
