"""Random models whose ranks use different parameters, compared with one replica a rank.

A program is a random tree of modules, a random choice of units, random settings and a few steps. In
each step, each rank chooses for itself which experts it uses, and what else its kind of program
lets ranks choose (`Kind`). The expected gradients are those of one unsharded replica a rank,
averaged, and None where no replica has one. Everything random follows from the seed, which names
the test.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_ext

WIDTH = 4
STEPS = 4
QUICK = {0, 4, 5}  # programs that have every field of Kind among them
MANY_PROGRAMS = 50
DEEDS = [
    "one backward",
    "one backward",
    "two forwards",
    "two backwards",
    "two backwards, last first",
    "backward twice",
    "accumulates",
    "evaluates",
]


@dataclasses.dataclass(frozen=True)
class Kind:
    """What ranks may choose for themselves, besides experts."""

    inputs: str  # whose batches require gradients: "all", "none" or "some" ranks'
    joins: bool  # to leave parts out with join_empty
    detaches: bool  # to cut parts off the loss; needs set_reduce_scatter_unused_params
    checkpoints: tuple[str, ...]  # how leaves are recomputed, the same on all ranks

    @staticmethod
    def draw(rng: random.Random) -> Kind:
        inputs = rng.choice(["all", "none", "some"])
        joins, detaches = rng.random() < 0.4, rng.random() < 0.4
        checkpoints = rng.choice([(), (), ("not reentrant",), ("reentrant", "not reentrant")])
        if (inputs != "all" or detaches) and "reentrant" in checkpoints:
            checkpoints = ("not reentrant",)  # the other needs inputs with gradients
        return Kind(inputs, joins, detaches, checkpoints)


class Part(nn.Module):
    """A module that may be a unit."""

    is_unit = False


class Leaf(Part):
    """Uses one of its experts, or none."""

    def __init__(self, rng: random.Random, kind: Kind) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.5) for _ in range(rng.randint(1, 3))
        )
        self.anchor = nn.Parameter(torch.rand(WIDTH))
        self.may_leave_anchor = kind.detaches and rng.random() < 0.5
        self.sees_gradients = rng.random() < 0.8  # of its input

    def forward(self, x: Tensor, call: str, route: str) -> Tensor:
        rng = random.Random(f"{route}{call}")
        seen = x if self.sees_gradients else x.detach()
        expert = rng.randrange(len(self.experts) + 1)
        y = torch.tanh(self.experts[expert](seen)) if expert < len(self.experts) else 0.5 * seen
        if not self.may_leave_anchor or rng.random() < 0.5:
            y = y + self.anchor
        return y + 0.25 * x if rng.random() < 0.5 or not self.sees_gradients else y


class Branch(Part):
    """Runs its parts one after another, or side by side."""

    def __init__(self, rng: random.Random, kind: Kind, depth: int) -> None:
        super().__init__()
        self.kind = kind
        self.parts = nn.ModuleList(
            Branch(rng, kind, depth - 1) if depth > 0 and rng.random() < 0.5 else Leaf(rng, kind)
            for _ in range(rng.randint(1, 3))
        )
        self.before = nn.Parameter(torch.rand(WIDTH)) if rng.random() < 0.3 else None
        self.anchor = nn.Parameter(torch.rand(WIDTH))
        self.after = nn.Parameter(torch.rand(WIDTH)) if rng.random() < 0.3 else None
        self.is_parallel = rng.random() < 0.3
        self.repeats = [2 if rng.random() < 0.15 else 1 for _ in self.parts]
        self.checkpoints = [
            rng.choice(["", *kind.checkpoints]) if isinstance(part, Leaf) else ""
            for part in self.parts
        ]

    def forward(self, x: Tensor, call: str, route: str) -> Tensor:
        rng = random.Random(f"{route}{call}")
        if self.before is not None and rng.random() < 0.6:
            x = x * self.before
        y = x
        sums = []
        for i in range(len(self.parts)):
            for repeat in range(self.repeats[i]):
                out = self.run_part(i, x if self.is_parallel else y, f"{call}.{i}{repeat}", route)
                sums.append(out)
                y = out
        if self.is_parallel:
            y = torch.stack(sums).sum(0)
        y = y + self.anchor
        if self.after is not None and rng.random() < 0.6:
            y = y + self.after
        return y

    def run_part(self, i: int, x: Tensor, call: str, route: str) -> Tensor:
        part = self.parts[i]
        rng = random.Random(f"{route}{call} part")
        if self.kind.joins and can_be_left_out(part) and rng.random() < 0.3:
            return part.join_empty(x) if hasattr(part, "join_empty") else x
        if self.checkpoints[i]:
            reentrant = self.checkpoints[i] == "reentrant"
            out = checkpoint(part, x, call, route, use_reentrant=reentrant)
        else:
            out = part(x, call, route)
        return out.detach() if self.kind.detaches and rng.random() < 0.15 else out

    def runs_once_each(self) -> bool:
        """Whether every unit inside runs once, in the order of registration."""
        return all(repeats == 1 for repeats in self.repeats) and all(
            part.runs_once_each() for part in self.parts if isinstance(part, Branch)
        )


def can_be_left_out(part: nn.Module) -> bool:
    return part.is_unit and (not isinstance(part, Branch) or part.runs_once_each())


class Model(nn.Module):
    def __init__(self, rng: random.Random, kind: Kind) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH) if rng.random() < 0.5 else None
        self.trunk = Branch(rng, kind, 2)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, route: str) -> Tensor:
        if self.stem is not None:
            x = self.stem(x)
        return self.head(self.trunk(x, "", route))


class Program:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        torch.manual_seed(seed)
        self.kind = Kind.draw(rng)
        self.reference = Model(rng, self.kind)
        for parameter in self.reference.parameters():
            parameter.requires_grad_(rng.random() < 0.95)
        self.reference.head.requires_grad_(True)
        for module in self.reference.modules():
            if isinstance(module, Part):
                module.anchor.requires_grad_(True)
            if isinstance(module, Part):
                module.is_unit = rng.random() < 0.6
        self.reference.double()
        self.model: Any = copy.deepcopy(self.reference)
        self.settings = {
            "transport": rng.choice(["shared_memory", "process_group"]),
            "bucket_bytes": rng.choice([None, 0, 0, 400, 1 << 20]),
            "prefetch": rng.choice([None, 0, 1, 2, 3]),
            "max_message_bytes": rng.choice([None, None, 600]),
        }
        settings = {name: value for name, value in self.settings.items() if value is not None}
        for module in reversed(list(self.model.modules())):
            if isinstance(module, Part) and module.is_unit:
                reshard = rng.choice([None, None, True, False])
                fsdp_ext.fully_shard(module, reshard_after_forward=reshard, **settings)
        fsdp_ext.fully_shard(self.model, **settings)
        self.model.set_reduce_scatter_unused_params(self.kind.detaches)
        self.expected: dict[str, Tensor | None] = {}

    def run(self) -> None:
        model_optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.5)
        optimizer = torch.optim.SGD(self.reference.parameters(), lr=0.05, momentum=0.5)
        for step in range(STEPS):
            self.step(step)
            for name, parameter in self.reference.named_parameters():
                gradient = self.expected.get(name)
                parameter.grad = None if gradient is None else gradient.clone()
            model_optimizer.step()
            optimizer.step()
            ends = self.rng.choice(["zero", "zero", "zero", "keep", "set to none"])
            if ends == "zero":
                model_optimizer.zero_grad()
                self.expected = {}
            elif ends == "set to none":
                model_optimizer.zero_grad(set_to_none=False)
                self.expected = {
                    n: None if g is None else torch.zeros_like(g) for n, g in self.expected.items()
                }
        for name, parameter in self.model.named_parameters():
            wanted = self.reference.get_parameter(name)
            assert torch.allclose(parameter.full_tensor(), wanted, 1e-9, 1e-11), (
                f"{name} after all steps"
            )

    def step(self, step: int) -> None:
        deed = self.rng.choice(DEEDS)
        replicas = [copy.deepcopy(self.reference) for _ in range(dist.get_world_size())]
        if deed == "evaluates":
            with torch.no_grad():
                self.loss(self.model, step, dist.get_rank(), "eval")
        elif deed == "accumulates":
            self.model.set_requires_gradient_sync(False)
            self.loss(self.model, step, dist.get_rank(), "0").backward()
            self.model.set_requires_gradient_sync(True)
        self.backwards(self.model, deed, step, dist.get_rank())
        if deed == "backward twice":
            for rank, replica in enumerate(replicas):
                self.loss(replica, step, rank, "1").backward()
            gradients = [[p.grad for p in r.parameters()] for r in replicas]
            self.add(replicas)
            for replica, kept in zip(replicas, gradients, strict=True):
                for parameter, gradient in zip(replica.parameters(), kept, strict=True):
                    parameter.grad = gradient
            self.add(replicas)
        else:
            for rank, replica in enumerate(replicas):
                if deed == "accumulates":
                    self.loss(replica, step, rank, "0").backward()
                self.backwards(replica, deed, step, rank)
            self.add(replicas)
        self.compare(f"seed {self.seed}, step {step}, {deed}")

    def loss(self, model: Any, step: int, rank: int, forward: str) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + 10 * rank)
        x = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
        route = f"{self.seed} {step} {rank} {forward}"
        some = random.Random(route).random() < 0.5
        x.requires_grad_(self.kind.inputs == "all" or (self.kind.inputs == "some" and some))
        return model(x, route).square().mean()

    def backwards(self, model: Any, deed: str, step: int, rank: int) -> None:
        loss = self.loss(model, step, rank, "1")
        if deed == "two forwards":
            loss = loss + self.loss(model, step, rank, "2")
        if deed.startswith("two backwards"):
            losses = [loss, self.loss(model, step, rank, "2")]
            for each in reversed(losses) if deed.endswith("last first") else losses:
                each.backward()
            return
        if deed == "backward twice":
            loss.backward(retain_graph=True)
        loss.backward()

    def add(self, replicas: list[Any]) -> None:
        """Add the replicas' average gradients to the expected ones."""
        for name, _ in self.reference.named_parameters():
            gradients = [replica.get_parameter(name).grad for replica in replicas]
            used = [gradient for gradient in gradients if gradient is not None]
            if used:
                average = sum(used) / len(replicas)
                before = self.expected.get(name)
                self.expected[name] = average if before is None else before + average
        for replica in replicas:
            for parameter in replica.parameters():
                parameter.grad = None

    def compare(self, when: str) -> None:
        # Gather all before comparing any: a rank that finds a difference leaves its peers alone.
        got = {
            name: None if parameter.grad is None else parameter.grad.full_tensor()
            for name, parameter in self.model.named_parameters()
        }
        for name, gradient in got.items():
            wanted = self.expected.get(name)
            assert (gradient is None) == (wanted is None), f"{when}: {name} {wanted}"
            if gradient is not None and wanted is not None:
                assert torch.allclose(gradient, wanted, 1e-9, 1e-11), (
                    f"{when}: {name} is off by {(gradient - wanted).abs().max()}"
                )


def _same_as_replicas(seed: int) -> None:
    Program(seed).run()


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[] if seed in QUICK else [pytest.mark.exhaustive])
        for seed in range(MANY_PROGRAMS)
    ],
)
def test_ranks_that_choose_for_themselves_train_as_replicas(seed: int) -> None:
    run_ranks(_same_as_replicas, 2, seed, timeout=60)
