"""One CUDA graph can hold a whole step: forward, backward and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.launcher import run_ranks
from support.models import Transformer
from torch import Tensor

from fsdp_ext import MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from fsdp_ext.optim import SGD, AdamW

WARMUP = 3
STEPS = 5
MESSAGE_BYTES = 1024  # of units that are cut into messages


class _Training:
    def __init__(
        self,
        precision: dict[str, Any],
        make: Callable[..., Any] = torch.optim.AdamW,
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model: Any = Transformer().cuda()
        policy = MixedPrecisionPolicy(**precision)
        for unit in self.model.units():
            fully_shard(unit, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy, **options)
        self.optimizer = make(self.model.parameters(), lr=0.01, capturable=True)
        self.max_norm = max_norm
        (tokens,), _ = self.model.batch(torch.Generator().manual_seed(0))
        self.tokens = tokens.cuda()

    def step(self) -> Tensor:
        loss = self.forward_and_backward()
        if self.max_norm is not None:
            clip_grad_norm_(self.model, self.max_norm)
        self.optimizer.step()
        return loss

    def warm_up(self) -> None:
        """Take steps on a stream of their own, as PyTorch asks for before a capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)

    def forward_and_backward(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss: Tensor = self.model.loss(self.model(self.tokens))
        loss.backward()
        return loss.detach()

    def shards(self) -> list[Tensor]:
        return [p._local_tensor.clone() for p in self.model.parameters()]


def _captured_steps() -> None:
    _captured_step({})
    _captured_step({"param_dtype": torch.bfloat16})
    _captured_step({"param_dtype": torch.bfloat16}, max_message_bytes=MESSAGE_BYTES)


def _captured_step(precision: dict[str, Any], **options: Any) -> None:
    own = {name: options.pop(name) for name in ("make", "max_norm") if name in options}
    eager = _Training(precision, **own)
    expected = [eager.step().item() for _ in range(WARMUP + STEPS)][WARMUP:]

    training = _Training(precision, **own, **options)
    training.warm_up()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = training.step()
    got = []
    for _ in range(STEPS):
        graph.replay()
        got.append(loss.item())
    assert got == expected
    for want, have in zip(eager.shards(), training.shards(), strict=True):
        assert have.equal(want)
    # Steps without the graph continue where the graph stopped.
    assert training.step().item() == eager.step().item()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_captured_step_trains_as_an_eager_one(world_size: int) -> None:
    run_ranks(_captured_steps, world_size, timeout=100.0, device="cuda")


def _captured_steps_over_flat_memory() -> None:
    _captured_step({}, make=AdamW, max_norm=0.1)
    _captured_step({"param_dtype": torch.bfloat16}, make=AdamW, max_norm=0.1)


@pytest.mark.timeout(120)
def test_a_captured_step_may_clip_and_step_flat_memory() -> None:
    run_ranks(_captured_steps_over_flat_memory, 1, timeout=100.0, device="cuda")


def _replays_right_after_steps() -> None:
    training = _Training({})
    for _ in range(WARMUP):
        expected = training.forward_and_backward().item()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = training.forward_and_backward()
    for _ in range(4 * STEPS):
        loss = training.forward_and_backward()
        graph.replay()
        assert replayed.item() == expected
        assert loss.item() == expected


# Ranks would run collectives of a replay and those at the end of a step in different orders.
@pytest.mark.timeout(120)
def test_a_replay_comes_after_all_work_of_the_step_before_it() -> None:
    run_ranks(_replays_right_after_steps, 2, timeout=100.0, device="cuda")


def _trains_another_model_beside_replays() -> None:
    captured, other = _Training({}), _Training({}, max_norm=0.1)
    expected = captured.forward_and_backward().item()
    alone = _Training({}, max_norm=0.1)
    losses = [alone.step().item() for _ in range(4 * STEPS)]
    for _ in range(WARMUP):
        captured.forward_and_backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = captured.forward_and_backward()
    for loss in losses:
        assert other.step().item() == loss
        other.model.prefetch_next_forward()
        graph.replay()
        assert replayed.item() == expected


# The two models share lanes, so ranks run collectives of both in one order.
@pytest.mark.timeout(120)
def test_a_replay_comes_after_all_work_of_another_model() -> None:
    run_ranks(_trains_another_model_beside_replays, 2, timeout=100.0, device="cuda")


def _captured_after_units_stayed_unsharded() -> None:
    """Slots that the warm-up stream has read are released within the capture."""
    training = _Training({})
    training.model.set_reshard_after_backward(False)
    training.warm_up()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.step()
    graph.replay()


@pytest.mark.timeout(120)
def test_a_capture_may_release_what_the_warm_up_has_read() -> None:
    run_ranks(_captured_after_units_stayed_unsharded, 2, timeout=100.0, device="cuda")


def _changed_after_a_capture() -> None:
    training = _Training({"param_dtype": torch.bfloat16})
    for _ in range(WARMUP):
        training.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.step()
    training.model.set_reshard_after_forward(False)
    with pytest.raises(RuntimeError, match="its replays use the buffers"):
        training.step()


@pytest.mark.timeout(120)
def test_a_captured_step_keeps_its_buffers() -> None:
    run_ranks(_changed_after_a_capture, 1, timeout=100.0, device="cuda")


def _frozen_after_a_capture() -> None:
    training = _Training({})
    training.warm_up()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = training.step()
    first = next(training.model.parameters())
    first.requires_grad_(False)
    with pytest.raises(RuntimeError, match="its replays use the buffers"):
        training.step()
    first.requires_grad_(True)
    eager = training.step()
    graph.replay()
    assert loss.item() < eager.item()


@pytest.mark.timeout(120)
def test_parameters_cannot_be_frozen_after_a_capture() -> None:
    run_ranks(_frozen_after_a_capture, 1, timeout=100.0, device="cuda")


def _held_after_a_capture() -> None:
    training = _Training({})
    training.warm_up()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.step()
    held = [parameter.grad for parameter in training.model.parameters()]
    with pytest.raises(RuntimeError, match=r"drop gradients that are no longer in \.grad"):
        training.step()
    training.optimizer.zero_grad()
    del held
    eager = training.step()
    graph.replay()
    assert training.step().item() < eager.item()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_cannot_be_held_after_a_capture(world_size: int) -> None:
    run_ranks(_held_after_a_capture, world_size, timeout=100.0, device="cuda")


def _captured_while_attached() -> None:
    training = _Training({})
    optimizer = SGD(training.model.parameters(), lr=0.01)
    optimizer.attach(training.model)
    for _ in range(WARMUP):
        training.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match=r"Call the optimizer's detach\(\) before the capture"),
        torch.cuda.graph(graph),
    ):
        training.step()


@pytest.mark.timeout(120)
def test_a_capture_with_an_attached_optimizer_says_what_to_do() -> None:
    run_ranks(_captured_while_attached, 1, timeout=100.0, device="cuda")


def _captured_too_early() -> None:
    training = _Training({"param_dtype": torch.bfloat16})
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="a few whole steps before capturing"),
        torch.cuda.graph(graph),
    ):
        training.step()


@pytest.mark.timeout(120)
def test_a_capture_of_the_first_step_says_what_to_do() -> None:
    run_ranks(_captured_too_early, 1, timeout=100.0, device="cuda")
