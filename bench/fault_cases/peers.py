"""Ranks that end, wait for each other, or differ from the others' expectations."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench.fault_cases.breaks import Fragile, fail
from bench.fault_cases.case import (
    TRANSPORTS,
    Case,
    Fault,
    Stack,
    batch,
    run_all,
    train,
)

KIND = "peers"
CHILD_LIMIT_S = 12  # less than a rank's own limit, so that the rank can report it


def step(case: Case, model: Any) -> None:
    """Run forward and backward."""
    model(batch(0, case.rank)).sum().backward()


def trained(case: Case) -> Any:
    """Return a sharded model after two steps, in which ranks also compare what they do."""
    model = case.shard(Stack(), bucket_bytes=0)
    for _ in range(2):
        step(case, model)
    torch.distributed.barrier()
    case.begin()
    return model


def die_before_forward(case: Case) -> None:
    """Kill rank 1 between `fully_shard` and its first forward."""
    model = case.shard(Stack())
    case.begin()
    if case.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    step(case, model)


def die_in_training(case: Case) -> None:
    """Kill rank 1 between two steps."""
    model = trained(case)
    if case.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    step(case, model)


def take_other_branches(case: Case) -> None:
    """Let rank 0 run backward while rank 1 runs another forward."""
    model = trained(case)
    loss = model(batch(0, case.rank)).sum()
    case.begin()
    if case.rank == 0:
        loss.backward()
    else:
        model(batch(1, case.rank))


def act_alone(case: Case, act: Callable[[Any], object]) -> None:
    """Let rank 1 alone do something with the model before its step 4."""

    def run(each: nn.Module, step: int, rank: int) -> Tensor:
        if each is model and step == 3:
            case.begin()
            if rank == 1:
                act(model)
        return run_all(each, step, rank)

    reference = Fragile()
    model = case.shard(copy.deepcopy(reference))
    train(case, model, reference, run, steps=5)


def evaluate_alone(case: Case) -> None:
    """Evaluate on rank 1 alone."""

    def evaluate(model: Any) -> None:
        with torch.no_grad():
            model(batch(0, 0))

    act_alone(case, evaluate)


def skip_a_failed_step_alone(case: Case) -> None:
    """Fail a step on rank 1 alone, which catches the exception and continues."""
    act_alone(case, lambda model: fail(case, model, "forward"))


def have_another_version(case: Case) -> None:
    """Let rank 1 have another version of the library."""
    from fsdp_ext.comm import rendezvous

    if case.rank == 1:
        rendezvous.VERSION = "0.0.1"
    step(case, case.shard(Stack()))


def run_in_a_forked_child(case: Case) -> None:
    """Run forward in a forked child, as a worker of a DataLoader could."""
    model = trained(case)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(CHILD_LIMIT_S)
        said = ""
        try:
            model(batch(0, case.rank))
        except Exception as error:
            said = str(error)
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGALRM:
            signal.pause()  # the child hung, and so does its parent, which waits for it
        os.kill(os.getpid(), number)
    step(case, model)  # the parent trains on
    if said:
        raise RuntimeError(said)


FAULTS = [
    Fault("a rank is killed before its first forward", KIND, die_before_forward, TRANSPORTS,
          quick=True, lost=(1,)),
    Fault("a rank is killed in training", KIND, die_in_training, TRANSPORTS, lost=(1,)),
    Fault("one rank in backward, the other in forward", KIND, take_other_branches, TRANSPORTS),
    Fault("one rank alone evaluates", KIND, evaluate_alone, TRANSPORTS),
    Fault("one rank alone fails in forward, and goes on", KIND, skip_a_failed_step_alone,
          TRANSPORTS),
    Fault("ranks with different versions of the library", KIND, have_another_version, quick=True,
          not_fsdp2="is a part of torch, which does not compare versions"),
    Fault("forward in a forked child", KIND, run_in_a_forked_child),
]  # fmt: skip
