"""One unit in Python: its parameters as sharded DTensors over one flat shard.

Everything here runs before training or between steps. ``csrc/torch`` has what runs in a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_ext import _C
from fsdp_ext.comm.transports import zeros_for_shard
from fsdp_ext.sharding.dtensors import (
    GradientPlace,
    Spread,
    gradient_maker,
    part_of_this_rank,
    shards_of,
)
from fsdp_ext.sharding.ownership import (
    check_grad_dtype,
    check_parameter,
    check_tensor_parallel,
    mark_sharded,
    mark_unsharded,
    unsharded_name,
)
from fsdp_ext.sharding.param_group import ParamGroup
from fsdp_ext.sharding.ranks import Ranks
from fsdp_ext.sharding.settings import UnitSettings


@dataclass
class ShardedParam:
    """One parameter of a unit and every module attribute that refers to it (tied ones, too).

    Args:
        name: its name in the unit's module, and from the first forward on in the root module.
        shape: shape of the whole parameter, or of the part that tensor parallelism has given to
            this rank.
        sharded: the DTensor that modules have while the unit is sharded.
        shard_dim: the dimension of it that ranks share.
        spread: how the DTensor is spread.
        unsharded: how the parameter was spread before; None if it was a plain tensor.
        attributes: modules and the names of their attributes.
    """

    name: str
    shape: torch.Size
    sharded: nn.Parameter
    shard_dim: int
    spread: Spread
    unsharded: Spread | None
    attributes: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard of the parameter."""
        local: torch.Tensor = self.sharded._local_tensor  # type: ignore[attr-defined]
        return local

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the sharded parameter."""
        return self.sharded.dtype

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""
        return self.sharded.requires_grad

    def registered(self) -> nn.Parameter | None:
        """Return the present value of the first attribute."""
        module, name = self.attributes[0]
        return module._parameters[name]


class Unit(ParamGroup):
    """The parameters of one ``fully_shard`` call.

    Args:
        modules: the modules of the call.
        params: their parameters that are in no other unit, with names for error messages.
        shard_dims: the dimensions that ranks share, of parameters for which that is not 0.
        ranks: those that share the parameters, and their replicas.
        device: this rank's device.
        settings: the settings that the user asked for.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        params: dict[nn.Parameter, str],
        shard_dims: Mapping[nn.Parameter, int],
        ranks: Ranks,
        device: torch.device,
        settings: UnitSettings,
    ) -> None:
        super().__init__(type(modules[0]).__name__, ranks.size, settings, ranks.replicas)
        self.modules = modules
        self.ranks = ranks
        self.device = device
        # The Root that runs this unit, from the first forward on. root.py imports this file, so the
        # type cannot be named here.
        self.root: Any = None
        self.core: _C.TorchUnit | None = None
        # Modules and the names of their attributes that were passed as ignored_params.
        self.ignored: set[tuple[nn.Module, str]] = set()
        self.flat_shard = torch.empty(0, dtype=torch.uint8, device=device)
        # Each parameter's part of it. See Note [own storages] in csrc/torch/flat_tensor.h.
        self.shard_parts: list[torch.Tensor] = []
        for param, name in params.items():
            check_parameter(name, param, device)
            check_tensor_parallel(name, param, ranks)
        sharded = [
            self._shard(param, name, shard_dims.get(param, 0)) for param, name in params.items()
        ]
        if settings.max_message_bytes is not None:
            # Reductions are checked at the first forward, since parameters may still be frozen.
            self.check_message_bytes(sharded, settings.max_message_bytes, training=False)
        self.params: list[ShardedParam] = self._replace(params, sharded)
        self.flatten()

    def change(self, **settings: Any) -> None:
        """Replace settings of this unit. :meth:`Root.apply` passes them to the schedule."""
        self.settings = dataclasses.replace(self.settings, **settings)

    def run_all_reduce_hook(self, gradients: torch.Tensor, handle: int) -> None:
        """Call the user's hook on this unit's reduced gradients. The schedule calls this."""
        hook = self.settings.all_reduce_hook
        if hook is not None:
            hook.run(gradients, handle)

    def flat(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`fsdp_ext.FSDPModule.flat_shard`."""
        dtypes = {param.dtype for param in self.params}
        frozen = [param.name for param in self.params if not param.requires_grad]
        if len(dtypes) != 1 or frozen:
            raise ValueError(
                "flat_shard needs a unit whose parameters have one dtype and are all trained, but "
                f"'{self.name}' has dtypes {sorted(map(str, dtypes))} and the frozen parameters "
                f"{frozen}. Use its parameters one by one."
            )
        if self.core is None:
            raise RuntimeError(
                f"flat_shard needs the flat gradient of unit '{self.name}', which its first "
                "forward makes, so run a forward before."
            )
        dtype = dtypes.pop()
        if any(
            place.shard_offset != place.grad_offset * dtype.itemsize
            for place in self.core.layout.placements
        ):
            _, reduce_dtype = self.grad_dtypes()
            raise ValueError(
                f"flat_shard needs gradients that lie as their parameters do, but those of unit "
                f"'{self.name}' are reduced in {reduce_dtype}, which needs more padding. Use its "
                f"parameters one by one, or MixedPrecisionPolicy(reduce_dtype={dtype})."
            )
        return self.flat_shard.view(dtype), self.core.share_flat_gradient()

    # - Sharding

    @torch.inference_mode(False)
    @torch.no_grad()
    def _shard(self, param: nn.Parameter, name: str, dim: int) -> ShardedParam:
        """Return a sharded parameter with this rank's shard, on meta if the parameter is there."""
        part = part_of_this_rank(param)
        first, count = self._range(part.shape, dim)
        local = part.narrow(dim, first, count).contiguous()
        spread = shards_of(param, self.ranks, dim)
        dtensor = spread.dtensor(local if local.is_meta else local.to(self.device))
        sharded = nn.Parameter(dtensor, requires_grad=param.requires_grad)
        return ShardedParam(name, part.shape, sharded, dim, spread, Spread.of(param, self.ranks))

    def _replace(
        self, params: dict[nn.Parameter, str], sharded: list[ShardedParam]
    ) -> list[ShardedParam]:
        """Put the sharded parameters into the modules. Return them in the layout's order."""
        by_param = dict(zip(params, sharded, strict=True))
        for module in self.modules:
            for submodule in module.modules():
                for attribute, value in submodule._parameters.items():
                    found = by_param.get(value) if value is not None else None
                    if found is not None and (submodule, attribute) not in found.attributes:
                        found.attributes.append((submodule, attribute))
        for param, found in by_param.items():
            for submodule, attribute in found.attributes:
                submodule._parameters[attribute] = found.sharded
            mark_sharded(param, found.sharded, found.name, self.name)
        return [sharded[place] for place in self._layout_order(sharded)]

    def _range(self, shape: torch.Size, dim: int) -> tuple[int, int]:
        """Return where this rank's shard begins in dimension ``dim``, and its size there."""
        chunk = -(-shape[dim] // self.world_size)
        first = min(chunk * self.ranks.rank, shape[dim])
        return first, min(chunk, shape[dim] - first)

    @torch.inference_mode(False)
    @torch.no_grad()
    def flatten(self, *, loading: bool = False) -> bool:
        """Make the sharded parameters views of one flat shard again.

        ``module.to()``, ``to_empty`` and ``load_state_dict(assign=True)`` give the modules other
        tensors or other parameters. Their rows are copied into a new flat shard, unless they all
        lie in the present one already.

        Args:
            loading: whether modules are being loaded one after another. If so, nothing is copied
                while some parameters are still on meta.

        Returns:
            Whether anything changed. If so, the C++ side has to be made anew.

        Raises:
            ValueError: if a parameter was replaced with something that is not sharded, or its shape
                changed.
            RuntimeError: if only some parameters are on meta, unless ``loading``.
        """
        replaced = [self._merge_tied(), *[self._adopt(param, loading) for param in self.params]]
        layout = self.layout_for(training=False)
        if self._is_flat(layout):
            return any(replaced)
        devices = {param.local.device.type for param in self.params}
        if loading and len(devices) > 1:
            return True
        if len(devices) > 1:
            on_meta = [param.name for param in self.params if param.local.is_meta]
            raise RuntimeError(
                f"unit '{self.name}' has parameters on {sorted(devices)}, of which {on_meta} "
                "are on meta. Materialise all of them with to_empty(device=...)."
            )
        device = torch.device(devices.pop()) if devices else self.device
        flat = zeros_for_shard(
            layout.shard_bytes, device, self.ranks.group, self.settings.transport
        )
        parts = self._parts_of(flat, layout)
        for param, part in zip(self.params, parts, strict=True):
            if not param.local.is_meta:
                part.copy_(param.local)
            param.sharded._local_tensor = part  # type: ignore[attr-defined]
        self.flat_shard, self.shard_parts = flat, parts
        return True

    def places(self) -> list[tuple[nn.Module, str]]:
        """Return the modules and names of all attributes that refer to its parameters."""
        return [place for param in self.params for place in param.attributes]

    def has_changed(self) -> bool:
        """Return whether an attribute refers to another parameter than when it was sharded."""
        for param in self.params:
            for module, name in param.attributes:
                now = module._parameters.get(name)
                if now is not param.sharded and (now is None or unsharded_name(now) is None):
                    return True
        return False

    def _merge_tied(self) -> bool:
        """Make one parameter of those that the user has tied. Return whether there were any."""
        by_sharded = {param.sharded: param for param in self.params}
        tied = False
        for param in self.params:
            for attribute in list(param.attributes):
                module, name = attribute
                now = module._parameters.get(name)
                other = None if now is None else by_sharded.get(now)
                if other is not None and other is not param:
                    param.attributes.remove(attribute)
                    other.attributes.append(attribute)
                    tied = True
        if tied:
            self.params = [param for param in self.params if param.attributes]
        return tied

    def _adopt(self, param: ShardedParam, loading: bool) -> bool:
        """Adopt the parameter that the module has now. Return whether it is another one.

        ``load_state_dict(assign=True)`` gives each attribute of a tied parameter one of its own.
        They stay tied, to the first.
        """
        now = param.registered()
        replaced = now is not param.sharded or (loading and self._is_untied(param))
        if replaced:
            if not (isinstance(now, nn.Parameter) and isinstance(now, DTensor)):
                raise ValueError(
                    f"parameter '{param.name}' was replaced by a {type(now).__name__} after "
                    "fully_shard had made a DTensor of it. Replace parameters before fully_shard."
                )
            if tuple(now.placements) != param.spread.placements:
                raise ValueError(
                    f"parameter '{param.name}' has the placements {param.spread.placements}, and "
                    f"was replaced by a DTensor with {tuple(now.placements)}. Redistribute that, "
                    "or load it without assign=True."
                )
            param.sharded = now
            for module, name in param.attributes:
                module._parameters[name] = now
        local_shape = list(param.shape)
        _, local_shape[param.shard_dim] = self._range(param.shape, param.shard_dim)
        shape = param.spread.shape
        if param.sharded.shape != shape or list(param.local.shape) != local_shape:
            raise ValueError(
                f"parameter '{param.name}' had shape {tuple(shape)}, {tuple(local_shape)} on this "
                f"rank, when it was sharded, but now has {tuple(param.sharded.shape)} with local "
                f"shape {tuple(param.local.shape)}. Change shapes before fully_shard."
            )
        return replaced

    def _is_untied(self, param: ShardedParam) -> bool:
        """Return whether an attribute has another DTensor than the first, as after loading."""
        values = [module._parameters[name] for module, name in param.attributes]
        return any(isinstance(value, DTensor) and value is not values[0] for value in values)

    def _is_flat(self, layout: _C.UnitLayout) -> bool:
        if self.flat_shard.numel() != layout.shard_bytes or len(self.shard_parts) != len(
            self.params
        ):
            return False
        return all(
            param.local.device == self.flat_shard.device
            and not param.local.is_meta
            and param.local.is_contiguous()
            and param.local.dtype == part.dtype
            and param.local.untyped_storage()._cdata == part.untyped_storage()._cdata
            and param.local.storage_offset() == 0
            and _address(part) == _address(self.flat_shard) + place.shard_offset
            for param, part, place in zip(
                self.params, self.shard_parts, layout.placements, strict=True
            )
        )

    def _parts_of(self, flat: torch.Tensor, layout: _C.UnitLayout) -> list[torch.Tensor]:
        """Return each parameter's part of a flat shard, without values on meta."""
        if flat.is_meta:
            return [torch.empty_like(param.local, device=flat.device) for param in self.params]
        return [
            _C.FlatTensor.part_of(flat, place.shard_offset, param.local.shape, param.dtype)
            for param, place in zip(self.params, layout.placements, strict=True)
        ]

    # - The C++ side

    @torch.inference_mode(False)  # training may follow a first forward in inference mode
    @torch.no_grad()
    def build(self, name: str, names: dict[nn.Parameter, str]) -> _C.TorchUnit:
        """Make the C++ unit for the parameters as they are now.

        Args:
            name: the unit's name in the root module.
            names: the names of the sharded parameters in the root module.

        Raises:
            RuntimeError: if parameters are on the meta device.
            ValueError: if dtypes or shapes do not fit.
        """
        self.name = name
        self.flatten()
        for param in self.params:
            param.name = names.get(param.sharded, param.name)
            check_grad_dtype(param.name, param.sharded)
        on_meta = [param.name for param in self.params if param.local.is_meta]
        if on_meta:
            raise RuntimeError(
                f"parameters {on_meta} are on the meta device, without memory. Call "
                "module.to_empty(device=...) and initialise them before the first forward."
            )
        layout = self.layout_for(training=True)
        grad_dtype, _ = self.grad_dtypes()
        policy = self.settings.mp_policy
        flat_gradient = torch.empty(layout.grad_numel, dtype=grad_dtype, device=self.device)
        core = _C.TorchUnit(
            layout=layout,
            shard=_C.FlatTensor(self.flat_shard, self.shard_parts),
            flat_gradient=flat_gradient,
            shapes=[list(param.shape) for param in self.params],
            param_dtypes=[self.compute_dtype(param.dtype) for param in self.params],
            cast_inputs=policy.param_dtype if policy.cast_forward_inputs else None,
            cast_outputs=policy.output_dtype,
            module_count=len(self.modules),
        )
        unsharded = [
            nn.Parameter(
                view if param.unsharded is None else param.unsharded.dtensor(view),
                requires_grad=param.requires_grad,
            )
            for view, param in zip(core.unsharded_views(), self.params, strict=True)
        ]
        for view, param in zip(unsharded, self.params, strict=True):
            mark_unsharded(view, param.name)
        core.bind(
            sharded=[param.sharded for param in self.params],
            unsharded=unsharded,
            place_gradient=[
                None if param.unsharded is None else param.unsharded.place for param in self.params
            ],
            make_gradients=gradient_maker(self._gradient_places(layout)),
            attributes=[
                (module._parameters, attribute, index)
                for index, param in enumerate(self.params)
                for module, attribute in param.attributes
            ],
        )
        self.core = core
        return core

    def _gradient_places(self, layout: _C.UnitLayout) -> list[GradientPlace]:
        """Return where the gradients of the trainable parameters lie in the flat gradient."""
        return [
            GradientPlace(place.grad_offset, param.local.shape, param.spread)
            for param, place in zip(self.params, layout.placements, strict=True)
            if param.requires_grad
        ]


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor's storage begins. ``Tensor.data_ptr`` is 0 if it has no elements."""
    return tensor.untyped_storage().data_ptr()
