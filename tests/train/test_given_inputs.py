"""Forward never changes what its caller passed, and FSDP1's wrapper passes on the same objects."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from support.fsdp1_parity import (
    BF16,
    BY_BLOCK,
    FSDP,
    assert_equal,
    make,
    torch_fsdp,
    train,
)
from support.launcher import run_ranks
from support.models import DIM, Mlp, Stack
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from fsdp_ext import fully_shard

# - Mappings of a class of their own

Wrap = Callable[[nn.Module], nn.Module]


class Record(MutableMapping[str, Tensor]):
    """Has a dict, which a shallow copy would share."""

    def __init__(self, items: Mapping[str, Tensor]) -> None:
        self.items_ = dict(items)

    def __getitem__(self, key: str) -> Tensor:
        return self.items_[key]

    def __setitem__(self, key: str, value: Tensor) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


class Frozen(dict[str, Tensor]):
    def __setitem__(self, key: str, value: Tensor) -> NoReturn:
        raise TypeError("it cannot be written")


class Reads(nn.Linear):
    """Records which objects and dtypes arrive."""

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        self.arrived = batch
        self.dtype = batch["x"].dtype
        return super().forward(batch["x"].to(self.weight.dtype))


# FSDP2 and FSDP1 cast dicts only. Ours also casts a UserDict, such as transformers' BatchEncoding.
CAST: dict[Callable[[Any], Any], bool] = {
    dict: True,
    OrderedDict: True,
    UserDict: True,
    Frozen: True,
    Record: False,
    MappingProxyType: False,
}


def _wraps(casts: bool) -> list[tuple[Wrap, Wrap]]:
    """Return pairs of ours and PyTorch's."""
    dtype = BF16 if casts else None
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    # The wrapper of the root casts by itself.
    precision = MixedPrecision(dtype, cast_forward_inputs=casts)
    return [
        (
            lambda module: fully_shard(module, mp_policy=policy),
            lambda module: torch_fully_shard(module, mp_policy=policy),
        ),
        (
            lambda module: FSDP(module, mixed_precision=precision),
            lambda module: torch_fsdp(module, mixed_precision=precision),
        ),
    ]


def _given(kind: Callable[[Any], Any], casts: bool, wrap: Wrap) -> tuple[Reads, list[Tensor]]:
    """Train a step on a mapping, and return the module and the gradients."""
    torch.manual_seed(0)
    module = Reads(DIM, DIM)
    wrapped = wrap(module)
    x = torch.randn(3, DIM, requires_grad=True)
    given = kind({"x": x, "count": torch.arange(2)})
    wrapped(given).float().square().sum().backward()
    assert given["x"] is x
    assert list(given) == ["x", "count"]
    if not (casts and CAST[kind]) and kind is not Frozen:
        assert type(module.arrived) is type(given)
    assert x.grad is not None
    grads = [param.grad for param in wrapped.parameters() if param.grad is not None]
    whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
    return module, [x.grad, torch.cat([grad.flatten() for grad in whole])]


def _mappings() -> None:
    for casts in (False, True):
        for ours, torchs in _wraps(casts):
            for kind, is_cast in CAST.items():
                module, grads = _given(kind, casts, ours)
                reference, expected = _given(kind, casts, torchs)
                assert module.dtype == (BF16 if casts and is_cast else torch.float32)
                assert module.dtype == reference.dtype or kind is UserDict
                for grad, want in zip(grads, expected, strict=True):
                    assert torch.equal(grad, want)


def test_mappings_of_the_caller_are_cast_in_a_copy_or_not_at_all() -> None:
    run_ranks(_mappings, 1)


# - FSDP1's wrapper


class Writes(Mlp):
    """Writes into the containers that it gets, and reads an attribute of a tensor."""

    def forward(self, x: Tensor, cache: list[Tensor], *, state: dict[str, Any]) -> Tensor:
        state["count"] += x.weight_of_loss  # type: ignore[attr-defined]
        state["last"] = super().forward(x)
        cache.append(state["last"] / 2)
        return super().forward(cache[-1])


class Caching(Stack):
    """Its loss depends on what the units have written."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Writes() for _ in range(3))

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        x = self.stem(x)
        cache = [] if cache is None else cache
        cache.append(x.detach())
        state: dict[str, Any] = {"count": 0.0, "last": x}
        for block in self.blocks:
            x.weight_of_loss = 0.5  # type: ignore[attr-defined]
            x = block(x, cache, state=state)
        assert len(cache) == 1 + len(self.blocks)
        return state["count"] * self.head((x + state["last"] + sum(cache)) / 20)


def _same_objects() -> None:
    model = make(Caching)
    wrapped = FSDP(model, auto_wrap_policy=BY_BLOCK)
    got = train(wrapped, model)
    model = make(Caching)
    assert_equal(got, train(torch_fsdp(model, auto_wrap_policy=BY_BLOCK), model))
    model = make(Caching)
    assert_equal(got, train(model, model, average=True))
    # FSDP1's root gets copies. Ours gets the caller's objects, as the unsharded model does.
    cache: list[Tensor] = []
    wrapped(torch.randn(3, DIM), cache).sum().backward()
    assert len(cache) == 1 + len(model.blocks)


def test_what_units_write_into_their_inputs_reaches_the_caller_as_under_fsdp1() -> None:
    run_ranks(_same_objects, 2)
