"""Random models in which each rank chooses its experts, trained beside one replica a rank."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp_ext
from fsdp_ext.verifier.comparison import difference
from support.parity import Tolerance

WIDTH = 4
STEPS = 4
ALLOWED = Tolerance(1e-9, 1e-11)
DEEDS = [
    "one backward",
    "one backward",
    "two forwards",
    "two backwards",
    "two backwards, last first",
    "backward twice",
    "accumulates",
    "evaluates",
    "forward raises",
    "forward raises and goes on",
    "backward raises",
]


@dataclasses.dataclass(frozen=True)
class Kind:
    """The choices that ranks may make, besides experts."""

    inputs: str  # whose batches require gradients: "all", "none" or "some" ranks'
    joins: bool  # to leave parts out with join_empty
    cuts: str  # who detaches the results of parts: "none", "all" ranks alike, or "some"
    checkpoints: tuple[str, ...]  # how leaves are recomputed, the same on all ranks

    @staticmethod
    def draw(rng: random.Random) -> Kind:
        inputs = rng.choice(["all", "none", "some"])
        joins, cuts = rng.random() < 0.5, rng.choice(["none", "none", "all", "some"])
        checkpoints = rng.choice([(), (), ("not reentrant",), ("reentrant", "not reentrant")])
        if (inputs != "all" or cuts != "none") and "reentrant" in checkpoints:
            checkpoints = ("not reentrant",)  # the other needs inputs with gradients
        return Kind(inputs, joins, cuts, checkpoints)


class Planned(Exception):
    """The error that forwards and backwards raise on purpose."""


class Route(NamedTuple):
    """Chooses at random in one forward, for this rank or for all ranks alike."""

    forward: str
    rank: int

    def of_rank(self, call: str) -> random.Random:
        return random.Random(f"{self.forward} {self.rank}{call}")

    def of_all(self, call: str) -> random.Random:
        return random.Random(f"{self.forward}{call}")


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
        self.may_leave_anchor = kind.cuts == "some" and rng.random() < 0.5
        self.sees_gradients = rng.random() < 0.8  # of its input

    def forward(self, x: Tensor, call: str, route: Route) -> Tensor:
        rng = route.of_rank(call)
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
        self.cuts = [
            kind.cuts == "some" or (kind.cuts == "all" and rng.random() < 0.4) for _ in self.parts
        ]
        self.raises_before: int | None = None  # the place of a part, or behind the last one
        self.checkpoints = [
            rng.choice(["", *kind.checkpoints]) if isinstance(part, Leaf) else ""
            for part in self.parts
        ]

    def forward(self, x: Tensor, call: str, route: Route) -> Tensor:
        rng = route.of_rank(call)
        if self.before is not None and rng.random() < 0.6:
            x = x * self.before
        y = x
        sums = []
        for i in range(len(self.parts)):
            if self.raises_before == i:
                raise Planned
            for repeat in range(self.repeats[i]):
                out = self.run_part(i, x if self.is_parallel else y, f"{call}.{i}{repeat}", route)
                sums.append(out)
                y = out
        if self.raises_before == len(self.parts):
            raise Planned
        if self.is_parallel:
            y = torch.stack(sums).mean(0)
        y = y + self.anchor
        if self.after is not None and rng.random() < 0.6:
            y = y + self.after
        return y

    def run_part(self, i: int, x: Tensor, call: str, route: Route) -> Tensor:
        part = self.parts[i]
        rng = route.of_rank(f"{call} part")
        if self.kind.joins and can_be_left_out(part) and rng.random() < 0.3:
            out = part.join_empty(x) if hasattr(part, "join_empty") else x
        elif self.checkpoints[i]:
            reentrant = self.checkpoints[i] == "reentrant"
            out = checkpoint(part, x, call, route, use_reentrant=reentrant)
        elif rng.random() < 0.1:
            try:
                raise Planned
            except Planned:
                out = part(x, call, route)
        else:
            out = part(x, call, route)
        if not self.cuts[i]:
            return out
        is_cut = (
            rng.random() < 0.15
            if self.kind.cuts == "some"
            else route.of_all(f"{call} cut").random() < 0.5
        )
        return out.detach() if is_cut else out

    def can_be_joined(self) -> bool:
        """Whether every unit inside runs once, in the order of registration, and none is cut off.

        If all ranks that run this branch cut a part of it off the loss, a rank that joins the whole
        branch still waits for that part's gradients. Ranks have to ask for that.
        """
        runs_once = all(repeats == 1 for repeats in self.repeats)
        is_whole = self.kind.cuts != "all" or not any(self.cuts)
        return (
            runs_once
            and is_whole
            and all(part.can_be_joined() for part in self.parts if isinstance(part, Branch))
        )


def can_be_left_out(part: nn.Module) -> bool:
    return part.is_unit and (not isinstance(part, Branch) or part.can_be_joined())


class Model(nn.Module):
    def __init__(self, rng: random.Random, kind: Kind) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH) if rng.random() < 0.5 else None
        self.trunk = Branch(rng, kind, 2)
        self.head = nn.Linear(WIDTH, WIDTH)

        self.catches = False  # what the trunk raises
        self.backward_raises = False

    def forward(self, x: Tensor, route: Route) -> Tensor:
        if self.stem is not None:
            x = self.stem(x)
        return self.head(self.run_trunk(x, route))

    def run_trunk(self, x: Tensor, route: Route) -> Tensor:
        try:
            y = self.trunk(x, "", route)
        except Planned:
            if not self.catches:
                raise
            return x
        if self.backward_raises:
            y.register_hook(raise_planned)
        return y


def raise_planned(gradient: Tensor) -> None:
    raise Planned


class Program:
    def __init__(self, seed: int, mesh: DeviceMesh) -> None:
        self.seed = seed
        self.mesh = mesh
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
                module.is_unit = rng.random() < 0.6
        self.reference.double()
        self.model: Any = copy.deepcopy(self.reference)
        self.settings = {
            "mesh": mesh,
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
        self.sends_zeros = self.kind.cuts == "some"
        self.model.set_reduce_scatter_unused_params(self.sends_zeros)
        self.expected: dict[str, Tensor | None] = {}

    def run(self) -> None:
        self.model_optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.5)
        optimizer = torch.optim.SGD(self.reference.parameters(), lr=0.02, momentum=0.5)
        for step in range(STEPS):
            self.step(step)
            for name, parameter in self.reference.named_parameters():
                gradient = self.expected.get(name)
                parameter.grad = None if gradient is None else gradient.clone()
            self.model_optimizer.step()
            optimizer.step()
            ends = self.rng.choice(["zero", "zero", "zero", "keep", "set to none"])
            if ends == "zero":
                self.model_optimizer.zero_grad()
                self.expected = {}
            elif ends == "set to none":
                self.model_optimizer.zero_grad(set_to_none=False)
                self.expected = {
                    n: None if g is None else torch.zeros_like(g) for n, g in self.expected.items()
                }
        for name, parameter in self.model.named_parameters():
            wanted = self.shard_of(self.reference.get_parameter(name))
            text = difference(wanted, parameter.to_local(), ALLOWED.bound(wanted))
            assert not text, f"{self}, after all steps: {name} {text}"

    def __repr__(self) -> str:
        return f"seed {self.seed} on {tuple(self.mesh.shape)}"

    def shard_of(self, whole: Tensor) -> Tensor:
        """Return this rank's rows. Each rank compares its own, so no collective is needed."""
        rows = math.ceil(whole.shape[0] / self.mesh.size(-1))
        return whole[self.mesh.get_local_rank(-1) * rows :][:rows]

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
        elif "raises" in deed:
            self.plan_exception(deed, [self.model, *replicas])
            if not self.model.catches:
                with pytest.raises(Planned):
                    self.loss(self.model, step, dist.get_rank(), "raises").backward()
                self.plan_exception("", [self.model, *replicas])
            if deed == "backward raises":
                self.model_optimizer.zero_grad()
                self.expected = {}
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
        self.plan_exception("", [self.model])
        self.compare(f"{self}, step {step}, {deed}")

    def plan_exception(self, deed: str, models: list[Any]) -> None:
        """Have the trunk of these models raise in forward or in backward; "" for neither."""
        before = self.rng.randint(0, len(self.reference.trunk.parts))
        for model in models:
            model.trunk.raises_before = before if deed.startswith("forward") else None
            model.catches = deed.endswith("goes on")
            model.backward_raises = deed.startswith("backward")

    def loss(self, model: Any, step: int, rank: int, forward: str) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + 10 * rank)
        x = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
        route = Route(f"{self.seed} {step} {forward}", rank)
        some = route.of_rank("").random() < 0.5
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
        for name, parameter in self.model.named_parameters():
            gradient, wanted = parameter.grad, self.expected.get(name)
            if self.sends_zeros and gradient is not None and wanted is None:
                assert not gradient.to_local().any(), f"{when}: {name} is used by no rank"
                self.expected[name] = torch.zeros_like(self.reference.get_parameter(name))
                continue
            local = None if gradient is None else gradient.to_local()
            wanted = None if wanted is None else self.shard_of(wanted)
            text = difference(wanted, local, ALLOWED.bound(wanted))
            assert not text, f"{when}: the gradient of {name} {text}"


def train_as_replicas(seeds: list[int], shape: tuple[int, ...]) -> None:
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for seed in seeds:
        try:
            Program(seed, mesh).run()
        except Exception as error:
            raise AssertionError(f"The program of seed {seed} failed on a {shape} mesh.") from error
