"""`param_dtype_override_fn` keeps chosen parameters in their own dtype, beside cast ones."""

from __future__ import annotations

import dataclasses
import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.launcher import run_ranks
from support.scaled_layers import WIDTH, Scale, train
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp

import fsdp_ext
from fsdp_ext.sharding.params import param_group

HAS_OVERRIDE = any(
    field.name == "param_dtype_override_fn"
    for field in dataclasses.fields(torch_fsdp.MixedPrecisionPolicy)
)

if HAS_OVERRIDE:
    Policy = torch_fsdp.MixedPrecisionPolicy
else:

    @dataclasses.dataclass(frozen=True)
    class Policy(torch_fsdp.MixedPrecisionPolicy):  # type: ignore[no-redef]
        """The policy with the field that it has since torch 2.15."""

        param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = Scale()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.after = Scale()
        self.frozen = Scale()
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.after(torch.tanh(self.linear(self.before(x)))))


class UnshardedBlock(Block):
    """Casts what the policy casts."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x.bfloat16())
        linear = nn.functional.linear(x, self.linear.weight.bfloat16(), self.linear.bias.bfloat16())
        return self.frozen(self.after(torch.tanh(linear)))


def make(kind: type[Block]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(kind(), kind())


def scales_stay(model: nn.Module) -> Callable[[nn.Parameter], torch.dtype | None]:
    scales = {m.weight for m in model.modules() if isinstance(m, Scale)}
    return lambda param: param.dtype if param in scales else None


def shard(fully_shard: Callable[..., Any], **options: Any) -> Any:
    model = make(Block)
    policy = Policy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        param_dtype_override_fn=scales_stay(model),
    )
    for block in model:
        fully_shard(block, mp_policy=policy, **options)
    return fully_shard(model, mp_policy=policy, **options)


def compare(options: dict[str, Any]) -> None:
    ours = shard(fsdp_ext.fully_shard, **options)
    mine = train(ours, unsharded=False)
    seen = {dtype for m in ours.modules() if isinstance(m, Scale) for dtype in m.seen}
    assert seen == {torch.float32}
    references = [train(make(UnshardedBlock), unsharded=True)]
    if HAS_OVERRIDE:
        references.append(train(shard(torch_fsdp.fully_shard), unsharded=False))
    for reference in references:
        for got, expected in zip(mine, reference, strict=True):
            assert got.dtype == expected.dtype
            torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "options", [{}, {"bucket_bytes": 1 << 20}, {"max_message_bytes": 64}], ids=str
)
def test_kept_and_cast_parameters_of_a_unit_train_as_unsharded(options: dict[str, Any]) -> None:
    run_ranks(compare, 2, options)


def refuse() -> None:
    policy = Policy(param_dtype=torch.bfloat16, param_dtype_override_fn=lambda param: torch.float16)
    with pytest.raises(ValueError, match=r"override_fn returned torch\.float16 for par"):
        fsdp_ext.fully_shard(nn.Linear(4, 4), mp_policy=policy)


def test_another_dtype_than_the_two_is_refused() -> None:
    run_ranks(refuse, 1)


def test_the_policy_itself_says_what_no_reduce_dtype_means(monkeypatch: pytest.MonkeyPatch) -> None:
    # A pre-release of 2.15 already has the policy of 2.15.
    version = torch.torch_version.TorchVersion("2.15.0a0" if HAS_OVERRIDE else "2.15.0")
    monkeypatch.setattr(torch, "__version__", version)
    assert runpy.run_path(param_group.__file__)["_REDUCES_AS_COMPUTED"] == (not HAS_OVERRIDE)
