"""Random lives of a training job, sharded, compared with the unsharded model after each event.

A life is a small model in random units, and random events: steps, and what scripts do between them.
Each event is a method of `Life` that acts on both models. Everything random follows from the seed,
and each event from the seed and its number. A failure prints the seed and its events. This reruns
the life of seed 17, and `run_ranks(live, 2, 17, path, {3, 5})` leaves out its events 3 and 5:

    pytest -m "" "tests/train/test_random_lives.py::test_a_job_lives_as_unsharded[17]"
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.matrix import exhaustive
from support.models import DeliberateFailure
from support.parity import Tolerance
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_ext import checkpoint, clip_grad_norm_, fully_shard, optim
from fsdp_ext.verifier.comparison import difference

WIDTH = 5
ROWS = 2  # of each rank's batch
ALLOWED = Tolerance(1e-9, 1e-11)
OPTIMIZERS = {"AdamW": {"eps": 1e-3}, "SGD": {"momentum": 0.9}}
QUICK = [0, 1, 2, 3, 25]  # found faults in clipping (0), checkpoints (1 to 3), freezing (25)


class Block(nn.Sequential):
    """A residual block that counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + super().forward(x)


def fail(*_: Any) -> None:
    raise DeliberateFailure


def fail_in_backward(block: nn.Module, args: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(fail)


def loss_of(output: Tensor) -> Tensor:
    return (output - 0.3).square().mean()


def assert_same(what: str, expected: Tensor | None, got: Tensor | None) -> None:
    """Compare with an unsharded tensor. Each rank compares its own rows, without a collective."""
    if isinstance(got, DTensor) and expected is not None:
        rows = math.ceil(expected.shape[0] / dist.get_world_size())
        expected, got = expected[dist.get_rank() * rows :][:rows], got.to_local()
    text = difference(expected, got, ALLOWED.bound(expected))
    assert not text, f"{what} {text}"


class Side:
    """A model, sharded or not, with its optimizer and the parameters that the optimizer has."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.params: dict[str, Any] = dict(model.named_parameters())
        self.optimizer: Any = None


class Life:
    """A sharded model, the unsharded one, which trains on all ranks' batches, and the events."""

    def __init__(self, seed: int, place: Path) -> None:
        self.seed, self.place, self.log = seed, place, list[str]()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        stem, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if rng.random() < 0.3:
            head.weight = stem.weight
        blocks = [Block() for _ in range(rng.randint(1, 3))]
        self.plain = Side(nn.Sequential(stem, *blocks, head).double())
        *self.freezable, _ = self.plain.params  # the last one is always trained
        for name in self.freezable:
            self.plain.params[name].requires_grad_(rng.random() < 0.85)
        self.shard(rng)
        self.kind = rng.choice(list(OPTIMIZERS))
        self.waiting = rng.choice([[], rng.sample(self.freezable, 2)])  # for adds_group
        self.groups = [[name for name in self.plain.params if name not in self.waiting]]
        self.make_optimizers(rng)
        self.is_attached = False
        self.pending: dict[str, Tensor] = {}  # gradients of the unsharded model, not reduced yet
        self.saved: tuple[Path, Any, Any] | None = None  # with the unsharded model's state dicts

    def run(self, skips: Collection[int]) -> None:
        for number in range(40):
            rng = random.Random(f"{self.seed} {number}")
            event = rng.choice(EVENTS)
            if number not in skips:
                self.log.append(f"{number} {event.__name__}")
                event(self, rng)
                self.compare()

    def shard(self, rng: random.Random) -> None:
        """Shard a copy of the unsharded model in random units."""
        model = copy.deepcopy(self.plain.model)
        options = rng.choice([{}, *({"bucket_bytes": number} for number in (0, 300, 2000))])
        inner = [block for block in model if isinstance(block, Block) and rng.random() < 0.8]
        for module in [*inner, model]:
            fully_shard(module, reshard_after_forward=rng.choice([None, True, False]), **options)
        self.sharded = Side(model)
        self.sides = [self.sharded, self.plain]

    def make_optimizers(self, rng: random.Random) -> None:
        self.library = rng.choice([torch.optim, optim])
        for side, library in zip(self.sides, [self.library, torch.optim], strict=True):
            groups = [{"params": [side.params[name] for name in names]} for names in self.groups]
            options = {"lr": 0.02, "foreach": True, **OPTIMIZERS[self.kind]}
            side.optimizer = getattr(library, self.kind)(groups, **options)

    def compare(self) -> None:
        for name, whole in self.plain.params.items():
            param = self.sharded.params[name]
            assert_same(name, whole, param.detach())
            assert_same(f"the gradient of {name}", whole.grad, param.grad)
        for name, buffer in self.plain.model.named_buffers():
            assert_same(name, buffer, self.sharded.model.get_buffer(name))

    def forward(self, rng: random.Random) -> list[Tensor]:
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        x = torch.randn(dist.get_world_size(), ROWS, WIDTH, generator=generator).double()
        outputs = [self.sharded.model(x[dist.get_rank()]), self.plain.model(x)]
        assert_same("the output", outputs[1][dist.get_rank()], outputs[0])
        return outputs

    def backward(self, rng: random.Random, *, sync: bool) -> None:
        self.sharded.model.set_requires_gradient_sync(sync)
        output, expected = self.forward(rng)
        loss_of(output).backward()
        trained = {name: param for name, param in self.plain.params.items() if param.requires_grad}
        gradients = torch.autograd.grad(loss_of(expected), list(trained.values()))
        for name, gradient in zip(trained, gradients, strict=True):
            self.pending[name] = self.pending.get(name, 0) + gradient
        if sync:
            for name, gradient in self.pending.items():
                param = self.plain.params[name]
                param.grad = gradient if param.grad is None else param.grad + gradient
            self.pending = {}
            if self.is_attached:
                self.plain.optimizer.step()
                self.plain.optimizer.zero_grad()

    def trains(self, rng: random.Random) -> None:
        """Run a backward, and after one with synchronization perhaps the rest of a step."""
        sync = rng.random() < 0.6
        self.log[-1] += f" {sync=}"
        self.backward(rng, sync=sync)
        for event in [Life.clips, Life.steps, Life.zeroes][rng.randrange(4) if sync else 3 :]:
            self.compare()
            event(self, rng)

    def steps(self, rng: random.Random) -> None:
        for side in self.sides:
            side.optimizer.step()
        if rng.random() < 0.3:
            self.sharded.model.prefetch_next_forward()

    def zeroes(self, rng: random.Random) -> None:
        set_to_none = rng.random() < 0.7
        for side in self.sides:
            side.optimizer.zero_grad(set_to_none)

    def clips(self, rng: random.Random) -> None:
        if not self.is_attached:
            limit, order = rng.choice([1e6, 0.5, 0.05]), rng.choice([1.0, 2.0, math.inf])
            expected = nn.utils.clip_grad_norm_(self.plain.model.parameters(), limit, order)
            got = clip_grad_norm_(self.sharded.model, limit, order)
            assert_same("the norm", expected.double(), got)  # it is float32 without gradients

    def evaluates(self, rng: random.Random) -> None:
        with torch.set_grad_enabled(rng.random() < 0.2):
            self.forward(rng)

    def freezes(self, rng: random.Random) -> None:
        """Freeze or unfreeze a parameter that the optimizer has, or that an unsharded unit has."""
        name, is_unsharded = rng.choice(self.freezable), rng.random() < 0.3
        on, clears = not self.plain.params[name].requires_grad, rng.random() < 0.5
        self.log[-1] += f" {name} {on=} {clears=} {is_unsharded=}"
        if is_unsharded:
            self.sharded.model.unshard()
        for side in self.sides:
            param = side.model.get_parameter(name) if is_unsharded else side.params[name]
            param.requires_grad_(on)
            if clears or self.is_attached:
                side.params[name].grad = None

    def writes(self, rng: random.Random) -> None:
        name = rng.choice(list(self.plain.params))
        for side in self.sides:
            with torch.no_grad():
                side.params[name].mul_(0.75)

    def changes_unit(self, rng: random.Random) -> None:
        units = [each for each in self.sharded.model.modules() if hasattr(each, "unshard")]
        number, method = rng.randrange(len(units)), rng.choice(UNIT_METHODS)
        args = [] if method == "reshard" else [rng.random() < 0.5]  # unshard(True) does not wait
        self.log[-1] += f" {number}: {method} {args}"
        getattr(units[number], method)(*args)

    def attaches(self, rng: random.Random) -> None:
        """Attach the optimizer, or detach it, without gradients, since not all may be stepped."""
        for side in self.sides:
            side.optimizer.zero_grad()
        if self.is_attached or self.library is torch.optim:
            self.detach()
        else:
            skips = rng.random() < 0.5  # nothing is skipped: all gradients are finite
            self.log[-1] += f" {skips=}"
            self.sharded.optimizer.attach(self.sharded.model, skip_nonfinite=skips)
            self.is_attached = True

    def detach(self) -> None:
        if self.is_attached:
            self.sharded.optimizer.detach()
        self.is_attached = False

    def adds_group(self, rng: random.Random) -> None:
        self.detach()
        if self.waiting:
            for side in self.sides:
                params = [side.params[name] for name in self.waiting]
                side.optimizer.add_param_group({"params": params, "lr": 0.01})
            self.groups.append(self.waiting)
            self.waiting, self.saved = [], None

    def renews_optimizer(self, rng: random.Random) -> None:
        """Make an optimizer of any library, load the old one's state, or do both."""
        states = [copy.deepcopy(side.optimizer.state_dict()) for side in self.sides]
        does = rng.choice(["make", "load", "make and load"])
        self.log[-1] += f" {does}"
        if "make" in does:
            self.detach()
            self.make_optimizers(rng)
        if "load" in does:
            for side, state in zip(self.sides, states, strict=True):
                side.optimizer.load_state_dict(state)

    def saves(self, rng: random.Random) -> None:
        path = checkpoint.save(self.place, self.sharded.model, self.sharded.optimizer)
        states = [of.state_dict() for of in (self.plain.model, self.plain.optimizer)]
        self.saved = (path, *copy.deepcopy(states))

    def loads(self, rng: random.Random) -> None:
        """Go on from a checkpoint with a new model, in other units, and a new optimizer."""
        if self.saved is not None:
            path, weights, state = copy.deepcopy(self.saved)
            self.drop_gradients()
            self.detach()
            self.plain.model.load_state_dict({name: 0 * each for name, each in weights.items()})
            self.shard(rng)
            self.make_optimizers(rng)
            checkpoint.load(path, self.sharded.model, self.sharded.optimizer)
            self.plain.model.load_state_dict(weights)
            self.plain.optimizer.load_state_dict(state)

    def drop_gradients(self) -> None:
        self.pending = {}
        for side in self.sides:
            for param in side.params.values():
                param.grad = None

    def fails(self, rng: random.Random) -> None:
        """Fail, and repeat the step. A failure in backward drops all gradients, pending or not."""
        number = rng.randrange(1, len(self.plain.model) - 1)
        hook = rng.choice([fail, fail_in_backward])
        self.log[-1] += f" {hook.__name__} of block {number}"
        self.detach()
        self.sharded.model.set_requires_gradient_sync(True)
        for side in self.sides:
            with suppress(DeliberateFailure), side.model[number].register_forward_hook(hook):
                loss_of(side.model(torch.ones(ROWS, WIDTH).double())).backward()
        if hook is fail_in_backward:
            self.drop_gradients()
        self.backward(rng, sync=True)


UNIT_METHODS = ["unshard", "reshard", "set_reshard_after_forward", "set_reshard_after_backward"]
OFTEN = [Life.trains, Life.evaluates, Life.freezes, Life.changes_unit]
RARELY = [Life.steps, Life.zeroes, Life.clips, Life.writes, Life.loads, Life.fails]
OF_OPTIMIZERS = [Life.attaches, Life.adds_group, Life.renews_optimizer]
EVENTS = [Life.trains, *OFTEN * 3, *RARELY, *OF_OPTIMIZERS, Life.saves, Life.saves]


def live(seed: int, place: Path, skips: Collection[int] = ()) -> None:
    """Live the life of a seed, with checkpoints in a directory, without some events."""
    life = Life(seed, place)
    try:
        life.run(skips)
    except Exception as error:
        log = "\n".join(life.log)
        raise AssertionError(f"Seed {seed} failed in the last of these:\n{log}") from error


@pytest.mark.parametrize("seed", [*QUICK, *exhaustive(*{*range(64)}.difference(QUICK))])
def test_a_job_lives_as_unsharded(tmp_path: Path, seed: int) -> None:
    run_ranks(live, 2, seed, tmp_path, timeout=60)
