"""Extensions that are set after `fully_shard` work as under FSDP2."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.extended_layers import Layers, assert_equal, contents, train
from support.extensions import HalfWeight
from support.launcher import run_ranks
from support.parity import load_system
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.testing._internal.two_tensor import TwoTensor

import fsdp_ext

# - Extensions that are set after fully_shard


def pre_all_gather(
    self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
) -> tuple[tuple[Tensor, ...], None]:
    rows = self.to(torch.bfloat16)
    missing = -(-outer_size[0] // mesh.size()) - rows.size(0)
    return (torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows,), None


@torch.no_grad()
def post_all_gather(
    self: Any, outputs: Any, metadata: None, param_dtype: torch.dtype, *, out: Any = None
) -> Any:
    (gathered,) = outputs
    assert gathered.dtype == torch.bfloat16
    if out is not None:
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(gathered[: out.size(0)])
        return None
    own = gathered.to(param_dtype)
    return own, (gathered, own)


def set_on_instances(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "layers" in name:
            local = parameter._local_tensor
            local.fsdp_pre_all_gather = types.MethodType(pre_all_gather, local)
            local.fsdp_post_all_gather = types.MethodType(post_all_gather, local)


def replace_by_subclass(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "layers" in name:
            parameter._local_tensor = HalfWeight(parameter._local_tensor)


class Bare(HalfWeight):
    """Gets its methods later."""

    fsdp_pre_all_gather = property()  # type: ignore[assignment]
    fsdp_post_all_gather = property()  # type: ignore[assignment]


def set_on_class(model: nn.Module) -> None:
    Bare.fsdp_pre_all_gather = HalfWeight.fsdp_pre_all_gather  # type: ignore[method-assign]
    Bare.fsdp_post_all_gather = HalfWeight.fsdp_post_all_gather  # type: ignore[method-assign]


LATE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[nn.Module], None], bool]] = {
    "methods of plain tensors": (lambda weight: weight, set_on_instances, False),
    "methods of subclasses from meta": (
        lambda weight: TwoTensor(weight, weight.clone()),
        set_on_instances,
        True,
    ),
    # FSDP2 cannot do this, so its parameters are of the class from the start.
    "other tensors": (lambda weight: weight, replace_by_subclass, False),
    "methods of the class": (Bare, set_on_class, False),
}


def _late(name: str, rows: int, options: dict[str, Any]) -> None:
    make, extend, from_meta = LATE[name]
    seen = []
    for system in ("fsdp_ext", "fsdp2"):
        fully_shard = load_system(system).fully_shard
        Bare.fsdp_pre_all_gather = Bare.fsdp_post_all_gather = property()  # type: ignore
        torch.manual_seed(0)
        starts_late = system == "fsdp_ext" or extend is not replace_by_subclass
        with torch.device("meta" if from_meta else "cpu"):
            model: Any = Layers(make if starts_late else HalfWeight, rows)
        for layer in model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        if from_meta:
            model.to_empty(device="cpu")
            torch.manual_seed(dist.get_rank())
            for parameter in model.parameters():
                nn.init.trunc_normal_(parameter)
        if starts_late:
            extend(model)
        seen.append(train(model, 2))
    assert_equal(*seen)


def _late_ones() -> None:
    for name in LATE:
        _late(name, 8, {})
    _late("methods of plain tensors", 7, {"reshard_after_forward": False})


def test_extensions_set_after_fully_shard_train_as_under_fsdp2() -> None:
    run_ranks(_late_ones, 2)


def _change_their_mind() -> None:
    """Take the methods away again, and give a class none."""
    torch.manual_seed(0)
    model: Any = Layers(lambda weight: weight)
    plain = copy.deepcopy(model)
    fsdp_ext.fully_shard(model)
    state = model.state_dict()
    values = [local.clone() for value in state.values() for local in contents(value)]
    set_on_instances(model)
    x = torch.randn(2, 8)
    assert not torch.equal(model(x), plain(x))  # gathered in bf16
    model.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)
    assert torch.equal(model(x), plain(x))
    model.reshard()
    for parameter, value in zip(model.parameters(), values, strict=True):
        assert torch.equal(parameter.to_local(), value)
    for make in (lambda weight: TwoTensor(weight, weight), Bare):
        Bare.fsdp_pre_all_gather = Bare.fsdp_post_all_gather = property()  # type: ignore
        model = fsdp_ext.fully_shard(Layers(make))
        with pytest.raises(NotImplementedError, match=r"'layers\.0\.weight' is a .*, and fully_sh"):
            model(x)
    with pytest.raises(NotImplementedError, match=r"'.*weight' is a Bare.*Use fully_shard"):
        fsdp_ext.FullyShardedDataParallel(Layers(Bare))
    with pytest.raises(NotImplementedError, match=r"is a Bare.*so plan cannot know"):
        fsdp_ext.plan(Layers(Bare), 2)
    columns = fsdp_ext.fully_shard(
        nn.Linear(4, 4, bias=False), shard_placement_fn=lambda parameter: Shard(1)
    )
    local: Any = columns.weight._local_tensor
    local.fsdp_pre_all_gather = types.MethodType(pre_all_gather, local)
    with pytest.raises(AssertionError, match="which has fsdp_pre_all_gather only"):
        columns(torch.ones(1, 4))
    local.fsdp_post_all_gather = types.MethodType(post_all_gather, local)
    with pytest.raises(NotImplementedError, match=r"returned Shard\(1\) for parameter 'weight'"):
        columns(torch.ones(1, 4))


def test_parameters_follow_the_methods_that_they_have() -> None:
    run_ranks(_change_their_mind, 2)
