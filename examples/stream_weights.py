"""Feed the weights of a sharded model to an inference engine in another process, between steps.

    torchrun --standalone --nproc-per-node=2 examples/stream_weights.py

The engine stands for one such as vLLM: it has a whole model of its own, and a method
`load_weights(iterator)` that takes names and tensors. All ranks iterate over `stream_weights`,
since they gather together. Rank 0 hands its tensors over through shared memory, one at a time, so
neither side ever has a second copy of the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import fsdp_ext
from fsdp_ext.checkpoint import stream_weights

WIDTH = 64
ROUNDS = 3
STEPS = 10


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def data(seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and their labels, which depend on two features."""
    x = torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :1] * x[:, 1:2]


def loss_of(model: nn.Module, seed: int) -> Tensor:
    x, y = data(seed)
    return (model(x) - y).square().mean()


# - The engine's process


class Engine:
    """A stand-in for an inference engine."""

    def __init__(self) -> None:
        self.model = make_model()

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        """Copy weights into the model; return the names that were loaded."""
        own = self.model.state_dict()
        loaded = set()
        for name, tensor in weights:
            if name not in own or own[name].shape != tensor.shape:
                raise ValueError(f"the engine has no weight '{name}' of shape {tensor.shape}")
            own[name].copy_(tensor)
            loaded.add(name)
        return loaded

    @torch.no_grad()
    def loss(self) -> float:
        return loss_of(self.model, seed=0).item()


def received(trainer: Connection, memory: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that the trainer puts into the shared memory."""
    while (message := trainer.recv()) is not None:
        name, dtype, shape = message
        yield name, memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        trainer.send("taken")


def run_engine(trainer: Connection, memory: Tensor) -> None:
    engine = Engine()
    for _ in range(ROUNDS):
        loaded = engine.load_weights(received(trainer, memory))
        trainer.send((len(loaded), engine.loss()))


# - The trainer's processes


def hand_over(weights: Iterator[tuple[str, Tensor]], engine: Connection, memory: Tensor) -> None:
    """Pass weights to the engine, each through the same memory."""
    for name, tensor in weights:
        memory[: tensor.nbytes].view(tensor.dtype).copy_(tensor.flatten())
        engine.send((name, tensor.dtype, tuple(tensor.shape)))
        engine.recv()
    engine.send(None)


def train() -> None:
    dist.init_process_group("gloo")
    model = make_model()
    largest = max(param.nbytes for param in model.parameters())
    for layer in model:
        fsdp_ext.fully_shard(layer)
    fsdp_ext.fully_shard(model)
    optimizer = fsdp_ext.optim.AdamW(model.parameters(), lr=3e-3)
    if dist.get_rank() == 0:
        memory = torch.empty(largest, dtype=torch.uint8).share_memory_()
        connection, of_engine = mp.Pipe()
        engine = mp.get_context("spawn").Process(
            target=run_engine, args=(of_engine, memory), daemon=True
        )
        engine.start()
        of_engine.close()  # so that the connection breaks if the engine fails
    for round_ in range(ROUNDS):
        for step in range(STEPS):
            loss_of(model, seed=1 + round_ * STEPS + step).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = stream_weights(model)
        if dist.get_rank() == 0:
            hand_over(weights, connection, memory)
        else:
            for _ in weights:  # rank 0 needs this rank in its gathers
                pass
        with torch.no_grad():
            own = loss_of(model, seed=0).item()
        if dist.get_rank() == 0:
            count, loss = connection.recv()
            print(f"round {round_}: the engine loaded {count} weights, loss {loss:.6f}", end="")
            print(f", and the trainer's is {own:.6f}")
    if dist.get_rank() == 0:
        engine.join()
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
