"""Random trees of modules, and programs of random steps that train them."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp_ext
import fsdp_ext.optim
from fsdp_ext.verifier.comparison import difference
from support.parity import load_system

WIDTH = 6
STEPS = 5
# The first ones, which FSDP2 can run as well; of the first ninety it fails at seven (outputs that
# are views and changed in place, units it gathers too late).
PROGRAMS = 17
# The events of a step beside a forward, a backward and an optimizer step.
DEEDS = [
    "nothing else",
    "no sync",
    "evaluates",
    "unshards",
    "keeps unsharded",
    "two losses",
    "two forwards",
    "backward twice",
    "input gradient",
    "clips",
    "zeroes in place",
    "loads",
]


class Leaf(nn.Module):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.7)
        self.norm = nn.LayerNorm(WIDTH) if rng.random() < 0.3 else None
        self.second = nn.Linear(WIDTH, WIDTH) if rng.random() < 0.3 else None
        rows = rng.choice([1, WIDTH])
        self.scale = nn.Parameter(torch.rand(rows)) if rng.random() < 0.3 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.norm is not None:
            y = self.norm(y)
        if self.second is not None:
            y = self.second(torch.tanh(y))
        if self.scale is not None:
            y = y * self.scale
        return 0.5 * x + torch.tanh(y)


class Branch(nn.Module):
    """Runs each of its children zero, one or two times, as `plan` says."""

    def __init__(self, rng: random.Random, depth: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            Branch(rng, depth - 1) if depth > 0 and rng.random() < 0.6 else Leaf(rng)
            for _ in range(rng.randint(1, 3))
        )
        self.shift = nn.Parameter(torch.rand(WIDTH)) if rng.random() < 0.4 else None
        self.returns = rng.choice(["tensor", "tensor", "tuple", "dict", "view"])
        self.checkpoints = rng.random() < 0.25
        self.changes_in_place = rng.random() < 0.2
        self.plan: Callable[[Branch, int], int] = lambda branch, part: 1

    def forward(self, x: Tensor) -> Any:
        if self.shift is not None:
            x = x + self.shift
        for i, part in enumerate(self.parts):
            for _ in range(self.plan(self, i)):
                again = self.checkpoints and torch.is_grad_enabled()
                given = x.data_ptr()
                x = checkpoint(part, x, use_reentrant=False) if again else part(x)
                x = x["y"] if isinstance(x, dict) else x[0] if isinstance(x, tuple) else x
                x = x.reshape(-1, WIDTH)
                # A part whose own parts are all left out returns its input. Other operators have
                # saved that input for backward, so it may not be changed in place.
                if self.changes_in_place and isinstance(part, Branch) and x.data_ptr() != given:
                    x = x.mul_(1.1)
        if self.returns == "tuple":
            return x, x.detach()
        if self.returns == "dict":
            return {"y": x, "count": len(self.parts)}
        return x.view(-1, 2, WIDTH // 2) if self.returns == "view" else x


class Model(nn.Module):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.trunk = Branch(rng, depth=2)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(self.stem(x))
        x = x["y"] if isinstance(x, dict) else x[0] if isinstance(x, tuple) else x
        return self.head(x.reshape(-1, WIDTH))


Record = list[tuple[str, "Tensor | None"]]


def assert_same_record(expected: Record, got: Record, who: str = "") -> None:
    """Compare what two programs have noted, bit for bit. A name may come twice."""
    assert [name for name, _ in got] == [name for name, _ in expected]
    for (name, want), (_, value) in zip(expected, got, strict=True):
        assert value is None or value.isfinite().all(), name
        text = difference(want, value)
        assert not text, f"{who}{name} {text}"


class Program:
    """One run of a seed's program under one system, on a mesh of a shape, or of all ranks."""

    def __init__(self, seed: int, system_name: str, shape: tuple[int, ...] | None = None) -> None:
        shape = shape or (dist.get_world_size(),)
        self.rng = rng = random.Random(seed)
        torch.manual_seed(seed)
        self.system = load_system(system_name)
        self.model: Any = Model(rng)
        for parameter in self.model.parameters():
            parameter.requires_grad_(rng.random() < 0.9)
        self.model.head.requires_grad_(True)
        names = ("replicate", "shard")[-len(shape) :]
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        options: dict[str, Any] = {"mesh": self.mesh}
        if rng.random() < 0.3:
            options["mp_policy"] = self.system.mixed_precision_policy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
        inner = [m for m in self.model.modules() if isinstance(m, (Leaf, Branch))]
        self.units = [m for m in reversed(inner) if rng.random() < 0.5]
        for unit in self.units:
            reshard = rng.choice([None, None, True, False])
            self.shard(unit, reshard_after_forward=reshard, **options)
        self.shard(self.model, **options)
        self.units.append(self.model)
        is_adamw, foreach, is_flat = (rng.random() < 0.5 for _ in range(3))
        # fsdp_ext may use its own optimizers, and FSDP2 uses PyTorch's. Numbers have to be equal.
        optim: Any = fsdp_ext.optim if is_flat and system_name == "fsdp_ext" else torch.optim
        self.optimizer: torch.optim.Optimizer = (
            optim.AdamW(self.model.parameters(), lr=0.02, foreach=foreach)
            if is_adamw
            else optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, foreach=foreach)
        )
        self.record: Record = []

    def shard(self, module: nn.Module, **options: Any) -> None:
        self.system.fully_shard(module, **options)

    def run(self) -> Record:
        for step in range(STEPS):
            self.step(step)
        return self.record

    def note(self, name: str, value: Tensor | None) -> None:
        """Record a value. For a sharded tensor it is this rank's shard, since all ranks compare.

        ``full_tensor()`` calls gloo, where long runs crashed, most likely because of a data race in
        PyTorch: docs/reliability.md.
        """
        if isinstance(value, DTensor):
            is_partial = any(placement.is_partial() for placement in value.placements)
            value = value.full_tensor() if is_partial else value.to_local()
        self.record.append((name, None if value is None else value.detach().clone()))

    def loss(self, x: Tensor) -> Tensor:
        return self.model(x).float().pow(2).mean()

    def choose_plan(self) -> None:
        """Choose the modules that this step leaves out or runs twice, alike on all ranks."""
        salt, skips, repeats = self.rng.random(), self.rng.random(), self.rng.random()
        names = {m: name for name, m in self.model.named_modules()}

        def plan(branch: Branch, part: int) -> int:
            drawn = random.Random(f"{salt} {names[branch]} {part}").random()
            if drawn < 0.25 and skips < 0.4:
                return 0
            return 2 if drawn > 0.8 and repeats < 0.3 else 1

        for module in self.model.modules():
            if isinstance(module, Branch):
                module.plan = plan

    def step(self, step: int) -> None:
        self.choose_plan()
        does = self.rng.choice(DEEDS)
        coin = self.rng.random() < 0.5
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(4, WIDTH, generator=generator).requires_grad_(does == "input gradient")
        if does == "evaluates":
            with torch.no_grad() if coin else nullcontext():
                self.note(f"{step}: evaluated", self.loss(x))
        elif does == "unshards":
            for unit in self.units[:2]:
                unit.unshard()
            self.units[0].reshard()
        elif does == "keeps unsharded":
            self.model.set_reshard_after_backward(False)
        if self.system.name == "fsdp_ext":
            self.disturb("gather" if coin else "reduce" if self.mesh.ndim == 1 else "all-reduce")
        for last in (False, True) if does == "no sync" else (True,):
            self.model.set_requires_gradient_sync(last)
            self.note(f"{step}: loss", self.forward_and_backward(x, does))
        self.model.set_reshard_after_backward(True)
        for unit in self.units:
            unit.reshard()
        self.note(f"{step}: gradient of the input", x.grad)
        if does == "clips":
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.note(f"{step}: norm", norm)
        for name, parameter in self.model.named_parameters():
            self.note(f"{step}: gradient of {name}", parameter.grad)
        self.optimizer.step()
        if self.system.name == "fsdp_ext" and coin:
            self.model.prefetch_next_forward()
        self.optimizer.zero_grad(set_to_none=does != "zeroes in place")
        if does == "loads":
            state = {name: value.clone() for name, value in self.model.state_dict().items()}
            self.model.load_state_dict(state)
        for name, parameter in self.model.named_parameters():
            self.note(f"{step}: {name}", parameter)

    def forward_and_backward(self, x: Tensor, does: str) -> Tensor:
        if does == "two losses":
            output = self.model(x).float()
            loss = output.pow(2).mean()
            loss.backward(retain_graph=True)
            output.abs().mean().backward()
        elif does == "backward twice":
            loss = self.loss(x)
            loss.backward(retain_graph=True)
            loss.backward()
        else:
            loss = self.loss(x) + (self.loss(0.5 * x) if does == "two forwards" else 0.0)
            loss.backward()
        return loss

    def disturb(self, stream: str) -> None:
        root = self.model._fsdp_ext_unit.root
        if root is not None:  # from the first forward on
            root.impl.set_poison_released_slots(True)
            root.impl.delay_stream(stream, 0.005)
