"""Modules of one unit that do not run together: a head that is called in pieces, or not at all.

Losses over large vocabularies are computed this way. The model's forward leaves its head out, and
the head runs on a part of the hidden states at a time, each with a backward of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.matrix import exhaustive
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed._composable import checkpoint
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import fsdp_ext

WORDS, WIDTH, PIECES = 12, 4, 3
FSDP2_CAN = torch.__version__ >= "2.12"  # before, such a head has DTensors in its forward
BF16, FP32 = torch.bfloat16, torch.float32


class Speaker(nn.Module):
    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.fails = False
        if is_tied:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        """Return hidden states, without the head."""
        hidden = self.body(self.words(words))
        if self.fails:
            raise ValueError("as asked")
        return self.norm(hidden)


def shard(api: Any, model: Any, policies: dict[str, Any], reshard: bool) -> Any:
    """Shard the norm and the head as one unit, with the embedding if it is tied to the head."""
    is_tied = model.head.weight is model.words.weight
    together = [model.words, model.norm, model.head] if is_tied else [model.norm, model.head]
    for module in [model.body] if is_tied else [model.body, model.words]:
        api.fully_shard(module, mp_policy=policies["root"], reshard_after_forward=reshard)
    api.fully_shard(together, mp_policy=policies["head"], reshard_after_forward=reshard)
    return api.fully_shard(model, mp_policy=policies["root"], reshard_after_forward=reshard)


def words_of(step: int, number: int = 0) -> Tensor:
    torch.manual_seed(100 * step + 10 * number + dist.get_rank())
    return torch.randint(WORDS, (2, 2 * PIECES))


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def backward_in_pieces(model: Any, words: Tensor, found: list[Any]) -> None:
    hidden = model(words)
    found.append(hidden.dtype)
    gradients = []
    for piece in hidden.detach().float().chunk(PIECES, dim=1):
        inputs = piece.clone().requires_grad_()
        scores = model.head(inputs)
        found.append(scores.dtype)
        loss = scores.float().square().mean()
        loss.backward()
        found.append(loss.detach())
        gradients.append(inputs.grad)
    hidden.backward(torch.cat(gradients, dim=1).to(hidden.dtype))


def keep_head(model: Any, keep: bool) -> None:
    model.head.set_reshard_after_forward(not keep)
    model.head.set_reshard_after_backward(not keep)
    if not keep:
        model.head.reshard()


def train(model: Any, micro_batches: int, *, keeps_head: bool, is_sharded: bool) -> list[Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    found: list[Any] = []
    for step in range(2):
        for number in range(micro_batches):
            last = number + 1 == micro_batches
            if is_sharded:
                model.set_requires_gradient_sync(last)
                model.set_is_last_backward(last)
                if keeps_head:
                    keep_head(model, True)
            backward_in_pieces(model, words_of(step, number), found)
            if is_sharded and keeps_head:
                keep_head(model, False)
        for param in model.parameters():
            if not is_sharded:
                param.grad /= dist.get_world_size()
                dist.all_reduce(param.grad)
            found.append(whole(param.grad).clone())
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)
    return found + [whole(param.detach()) for param in model.parameters()]


PLAIN = {"root": MixedPrecisionPolicy(), "head": MixedPrecisionPolicy()}
CASTS = {
    "root": MixedPrecisionPolicy(param_dtype=FP32),
    "head": MixedPrecisionPolicy(param_dtype=FP32, output_dtype=BF16),
}


def compare(
    is_tied: bool, reshard: bool, policies: dict[str, Any], changes: dict[str, Any]
) -> None:
    def results(api: Any) -> list[Any]:
        model = Speaker(is_tied)
        if changes.get("recomputes"):
            checkpoint(model.body)
        if api is not None:
            shard(api, model, policies, reshard)
        return train(
            model,
            changes.get("micro_batches", 1),
            keeps_head=changes.get("keeps_head", False),
            is_sharded=api is not None,
        )

    got = results(fsdp_ext)
    others = ([torch_fsdp] if FSDP2_CAN else []) + ([None] if policies is PLAIN else [])
    for expected in map(results, others):
        for mine, other in zip(got, expected, strict=True):
            if not isinstance(mine, Tensor):
                assert mine == other
            else:
                torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


# Which policies, and for each model whether its weights are tied, its units reshard after forward,
# and what else differs.
Setup = tuple[str, list[tuple[bool, bool, dict[str, Any]]]]


def compare_all(policies_name: str, models: list[tuple[bool, bool, dict[str, Any]]]) -> None:
    policies = PLAIN if policies_name == "plain" else CASTS
    for is_tied, reshard, changes in models:
        compare(is_tied, reshard, policies, changes)


@pytest.mark.parametrize(
    "setup",
    [
        ("plain", [(False, True, {}), (True, False, {}), (True, True, {"keeps_head": True})]),
        ("plain", [(False, True, {"micro_batches": 3}), (False, True, {"recomputes": True})]),
        ("casts", [(False, True, {}), (True, True, {})]),
        *exhaustive(
            ("plain", [(True, True, {}), (False, False, {"micro_batches": 3})]),
            ("plain", [(False, False, {"keeps_head": True}), (True, False, {"recomputes": True})]),
            ("casts", [(False, False, {}), (True, False, {})]),
        ),
    ],
    ids=str,
)
def test_a_head_that_runs_in_pieces_trains_as_unsharded_and_as_under_fsdp2(setup: Setup) -> None:
    if setup[0] == "casts" and not FSDP2_CAN:
        pytest.skip("FSDP2 of this PyTorch cannot train it, and the unsharded model casts nothing")
    run_ranks(compare_all, 2, *setup)


def _left_out() -> None:
    gradients = []
    for api in (fsdp_ext, torch_fsdp):
        model = shard(api, Speaker(), PLAIN, reshard=True)
        # Two forwards before one backward, none of which runs the head.
        (model(words_of(0)).square().sum() + model(words_of(1)).square().sum()).backward()
        assert model.head.weight.grad is None
        gradients.append([whole(p.grad) for p in model.parameters() if p.grad is not None])
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def _after_an_exception() -> None:
    model = shard(fsdp_ext, Speaker(), PLAIN, reshard=True)
    model.fails = True
    with pytest.raises(ValueError, match="as asked"):
        model(words_of(0))
    model.fails = False
    model.reset_iter_state()
    expected = shard(fsdp_ext, Speaker(), PLAIN, reshard=True)
    for each in (model, expected):
        backward_in_pieces(each, words_of(1), [])
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), whole(other.grad), rtol=0, atol=0)


def _keeps_the_head_unsharded() -> None:
    model = shard(fsdp_ext, Speaker(), PLAIN, reshard=True)
    hidden = model(words_of(0)).detach()
    keep_head(model, True)
    gathers = []
    for _ in range(3):
        model.head(hidden.clone().requires_grad_()).sum().backward()
        log = model._fsdp_ext_unit.root.impl.take_log()
        gathers.append(sum(op == "all_gather" for op, *_ in log))
        assert not isinstance(model.head.weight, DTensor)
    assert gathers[1:] == [0, 0]
    keep_head(model, False)
    assert isinstance(model.head.weight, DTensor)


@pytest.mark.parametrize(
    "worker", [_left_out, _after_an_exception, _keeps_the_head_unsharded], ids=lambda w: w.__name__
)
def test_a_head_may_be_left_out_fail_or_stay_unsharded(worker: Callable[[], None]) -> None:
    run_ranks(worker, 2)
