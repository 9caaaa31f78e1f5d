"""One way to compare `fully_shard` with torch's own FSDP2 and with the unsharded model.

A `Case` is a fact with a model and a way to train it. `check` trains it on every rank three times
from the same start: unsharded (a replica on each rank, with averaged gradients), with FSDP2, and
with fsdp_ext. Losses and each rank's shards of gradients and parameters are compared after every
step, whole tensors (`full_tensor()`) after the last: with the unsharded model's, or with FSDP2's
where the unsharded ones only come close. They are equal bit for bit where the arithmetic is the
same, see `tolerance`.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from fsdp_ext.verifier.comparison import difference
from fsdp_ext.verifier.expected_gradients import rank_order_sum
from fsdp_ext.verifier.peers import gather
from fsdp_ext.verifier.subject import cast_floating
from support.launcher import run_ranks
from support.models import Batch, Subject, Unit

# "fsdp2" tests the tests: FSDP2 replaces fsdp_ext, and is compared with the unsharded model.
SYSTEM = os.environ.get("FSDP_EXT_TEST_SYSTEM", "fsdp_ext")
STEPS = 5  # each schedule repeats by then
LONG_STEPS = 7  # for steps that differ, and repeat every three or four steps


Record = dict[str, "Tensor | None"]
Values = Mapping[Any, "Tensor | None"] | Sequence["Tensor | None"]


class Tolerance(NamedTuple):
    """The largest allowed difference, absolute + relative * |expected|. Both 0: bit for bit."""

    relative: float
    absolute: float

    def bound(self, expected: Tensor | None) -> Tensor | None:
        """Return by how much each element may differ; None if it may not."""
        if expected is None or not any(self):
            return None
        return self.absolute + self.relative * expected.abs().double()


EXACT = Tolerance(0.0, 0.0)
# For Case.fsdp2_fails, where outputs are dataclasses.
DATACLASSES = (
    "torch 2.11's does not look for tensors in dataclasses" if torch.__version__ < "2.12" else None
)
# How much differences in the last place grow over as many steps, by the lowest precision used.
ROUNDING = {
    torch.float64: Tolerance(1e-13, 1e-14),
    torch.float32: Tolerance(5e-6, 1e-6),
    torch.float16: Tolerance(1e-2, 1e-3),
    torch.bfloat16: Tolerance(5e-2, 1e-2),
}


def tolerance(world_size: int, dtype: torch.dtype = torch.float32) -> Tolerance:
    """Return how much two systems may differ that add in different orders.

    On 1 and 2 ranks they are equal: a sum of two commutes, and the scale is a power of two, so it
    does not matter whether it is applied before the sum (fsdp_ext) or after it (gloo's AVG). On 3
    ranks it does matter. On 3 and 4 ranks gloo's ring also cuts the buffer into equal segments and
    begins the sum of each with another rank, so a layout's padding changes the order of summation
    of a few elements. Both cause errors in the last few places, which grow over as many steps.

    Args:
        world_size: number of ranks.
        dtype: the lowest precision that gradients are computed, summed or kept in.
    """
    if world_size <= 2:
        return EXACT
    return ROUNDING[dtype]


@dataclasses.dataclass(frozen=True)
class System:
    """The exports of a sharding system that tests use."""

    name: str
    fully_shard: Callable[..., Any]
    fsdp_module: type
    mixed_precision_policy: type


def device() -> torch.device:
    """Return the device that this rank trains on."""
    return torch.device(os.environ.get("FSDP_EXT_TEST_DEVICE", "cpu"))


def _moved(tensor: Tensor) -> Tensor:
    """Return a tensor of a batch on this rank's device, as a leaf, which has a gradient."""
    moved = tensor.detach()
    if device().type == "cuda" and not moved.is_cuda:
        # A copy from memory that is not pinned makes the host wait for the step before. Then a
        # missing wait between streams would not show.
        moved = moved.pin_memory()
    return moved.to(device(), non_blocking=True).requires_grad_(tensor.requires_grad)


def moved(batch: Batch) -> Batch:
    """Return a batch whose tensors are on this rank's device."""
    there: Batch = tree_map_only(Tensor, _moved, batch)
    return there


def load_system(name: str) -> System:
    """Return the system called `name`: "fsdp_ext" or "fsdp2"."""
    module = {"fsdp_ext": "fsdp_ext", "fsdp2": "torch.distributed.fsdp"}[name]
    api = importlib.import_module(module)
    return System(name, api.fully_shard, api.FSDPModule, api.MixedPrecisionPolicy)


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def gentle_sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """For a subject that `sgd` makes unstable: its rounding errors triple with each step."""
    return torch.optim.SGD(parameters, lr=0.005)


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


class Run:
    """One system that trains one case's model on this rank. Each system has a subclass."""

    sharded: bool
    under_test = False  # False for a run to compare with

    def __init__(self, case: Case) -> None:
        self.case = case
        torch.manual_seed(0)  # the same start for every system and rank
        self.model = case.subject()
        if device().type != "cpu":  # on the CPU some are on meta
            self.model.to(device())
        if case.before_sharding:
            case.before_sharding(self)
        self.ignored = {
            parameter
            for name, parameter in self.model.named_parameters()
            if name in case.ignored_params
        }
        self.shard()
        if case.after_sharding:
            case.after_sharding(self)
        self.renew_optimizer()

    def renew_optimizer(self) -> None:
        """Make the optimizer of the model's parameters, which are sharded now."""
        # Kept because after a forward without a backward the model has its unsharded parameters
        # instead, as FSDP2 documents.
        self.parameters = dict(self.model.named_parameters())
        trainable = (p for p in self.parameters.values() if p.requires_grad)
        self.optimizer = self.case.optimizer(trainable)

    @property
    def units(self) -> list[Unit]:
        return self.model.units()

    def shard(self) -> None:
        raise NotImplementedError

    def batch(self, step: int, micro_batch: int = 0) -> Batch:
        """Return this rank's own batch, another one for each step and micro-batch."""
        seed = (step * 100 + micro_batch) * 100 + dist.get_rank()
        batch = self.model.batch(torch.Generator().manual_seed(seed))
        return moved(batch)

    def forward(self, batch: Batch) -> Any:
        args, kwargs = batch
        return self.model(*args, **kwargs)

    def loss(self, step: int, micro_batch: int = 0) -> Tensor:
        return self.model.loss(self.forward(self.batch(step, micro_batch)))

    def backward(self, loss: Tensor, *, sync: bool = True) -> None:
        raise NotImplementedError

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients down to a total norm of at most `max_norm`; return the norm."""
        return whole(nn.utils.clip_grad_norm_(self.model.parameters(), max_norm))

    def reshard(self) -> None:
        """Reshard all parameters."""

    def recover(self) -> None:
        """Recover after an exception as the system asks its user to, besides `zero_grad`."""

    def recorded(
        self, values: Iterable[Tensor] = (), copy: Callable[[Tensor], Tensor] | None = None
    ) -> Record:
        """Return the values, and all gradients and parameters by name.

        Args:
            values: more tensors to compare.
            copy: makes the copy of a gradient or parameter. None: of this rank's shard.
        """
        record: Record = {f"value {i}": whole(value) for i, value in enumerate(values)}
        for name, parameter in self.parameters.items():
            take = copy or (whole if parameter in self.ignored else self.shard_of)
            gradient = parameter.grad
            record[f"gradient of {name}"] = None if gradient is None else take(gradient)
            record[name] = take(parameter)
        return record

    def shard_of(self, tensor: Tensor) -> Tensor:
        """Return a copy of this rank's chunk, of a DTensor or of a whole tensor."""
        tensor = tensor.detach()
        placement_fn = self.case.options.get("shard_placement_fn", lambda parameter: None)
        placement = placement_fn(tensor) or Shard(0)
        if isinstance(tensor, DTensor):
            expected = (Replicate(), placement) if self.case.mesh is not None else (placement,)
            assert tensor.placements == expected, f"{tensor.placements}"
            return tensor.to_local().clone()
        ranks = self.case.mesh[1] if self.case.mesh else dist.get_world_size()
        chunks = tensor.chunk(ranks, placement.dim)
        rank = dist.get_rank() % ranks
        return (chunks[rank] if rank < len(chunks) else tensor[:0]).clone()


StepFunction = Callable[[Run, int], "tuple[Tensor, ...]"]


def train_step(
    run: Run, step: int, before_step: Callable[[Run, int], None] | None = None
) -> tuple[Tensor, ...]:
    """Run the usual step: zero, forward, backward, optimizer.

    Args:
        run: the model with its optimizer.
        step: the number of the step.
        before_step: called between backward and the optimizer's step.
    """
    run.optimizer.zero_grad()
    loss = run.loss(step)
    run.backward(loss)
    if before_step is not None:
        before_step(run, step)
    run.optimizer.step()
    return (loss,)


@dataclasses.dataclass(frozen=True)
class Case:
    """A fact: this model, sharded and trained like this, ends up as it does unsharded.

    Attributes:
        fact: the fact that holds, which names the test.
        subject: makes the model. Pickle has to find this and all functions here by name.
        worlds: numbers of ranks, if not those of `each`.
        step: one training step. It returns what is compared besides gradients and parameters.
        optimizer: makes the optimizer of the parameters that require gradients.
        options: more arguments of each `fully_shard` call.
        root_options: arguments of the root's call alone.
        precision: fields of the `MixedPrecisionPolicy` of every unit.
        ignored_params: names of parameters that are not sharded.
        mesh: shape of a 2-D mesh over all ranks: replicas and shards. None: a 1-D mesh.
        before_sharding, after_sharding: change the model before and after. Both run before the
            optimizer is made.
        fsdp2: how close FSDP2 is on 1 and 2 ranks.
        unsharded: how close the unsharded model is there. None: it is not compared.
        fsdp2_fails: why FSDP2 cannot do this. Then only the unsharded model is compared.
        steps: number of training steps.
    """

    fact: str
    subject: Callable[[], Subject]
    worlds: tuple[int, ...] = ()
    step: StepFunction = train_step
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = sgd
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    root_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    precision: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ignored_params: tuple[str, ...] = ()
    mesh: tuple[int, int] | None = None
    before_sharding: Callable[[Run], None] | None = None
    after_sharding: Callable[[Run], None] | None = None
    fsdp2: Tolerance = EXACT
    unsharded: Tolerance | None = EXACT
    fsdp2_fails: str | None = None
    steps: int = STEPS


class Sharded(Run):
    """A model under `fully_shard`."""

    sharded = True

    def __init__(self, system: System, case: Case) -> None:
        self.system = system
        self._sync = True
        super().__init__(case)

    def shard(self) -> None:
        options = dict(self.case.options)
        if self.case.precision:
            options["mp_policy"] = self.system.mixed_precision_policy(**self.case.precision)
        if self.ignored:
            options["ignored_params"] = self.ignored
        if self.case.mesh:
            options["mesh"] = init_device_mesh(
                device().type, self.case.mesh, mesh_dim_names=("replicate", "shard")
            )
        for unit in self.units:
            self.system.fully_shard(unit, **options)
        self.system.fully_shard(self.model, **{**options, **self.case.root_options})

    def sync(self, value: bool) -> None:
        """Set whether backward reduces gradients."""
        if value != self._sync:
            self.model.set_requires_gradient_sync(value)
            self._sync = value

    def backward(self, loss: Tensor, *, sync: bool = True) -> None:
        self.sync(sync)
        loss.backward()

    def reshard(self) -> None:
        for module in self.model.modules():
            if isinstance(module, self.system.fsdp_module):
                module.reshard()

    def recover(self) -> None:
        if self.system.name != "fsdp2":
            return
        self.model.reset_iter_state()  # keeps gradients that were not reduced yet
        for module in self.model.modules():
            if isinstance(module, self.system.fsdp_module):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    for parameter in group.fsdp_params:
                        if hasattr(parameter, "_unsharded_param"):  # it has run already
                            parameter.unsharded_param.grad = None


class Unsharded(Run):
    """A replica on each rank. Its gradients are averaged in the order of the ranks, and its mixed
    precision is a cast of the parameters, recorded by autograd."""

    sharded = False

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        # The gradients of backwards without sync, not averaged yet.
        self._unreduced: dict[nn.Parameter, Tensor] = {}

    def shard(self) -> None:
        pass

    def forward(self, batch: Batch) -> Any:
        dtype = self.case.precision.get("param_dtype")
        if dtype is None:
            output = super().forward(batch)
        else:
            if self.case.precision.get("cast_forward_inputs", True):
                batch = cast_floating(batch, dtype)
            parameters = {name: p.to(dtype) for name, p in self.model.named_parameters()}
            output = torch.func.functional_call(self.model, parameters, *batch)
        return cast_floating(output, self.case.precision.get("output_dtype"))

    def backward(self, loss: Tensor, *, sync: bool = True) -> None:
        parameters = [p for p in self.model.parameters() if p not in self.ignored]
        reduced = {p: p.grad for p in parameters}
        for p in parameters:
            p.grad = self._unreduced.pop(p, None)
        loss.backward()
        local = {p: p.grad for p in parameters if p.grad is not None}
        for p in parameters:
            p.grad = reduced[p]
        if not sync:
            self._unreduced = local
            return
        for p, averaged in zip(local, self._average(list(local.values())), strict=True):
            p.grad = averaged if p.grad is None else p.grad + averaged

    def _average(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return the averages over ranks, by one gather, because gloo's calls are slow."""
        averages = [g.to(self._reduce_dtype(g)) for g in gradients]
        if dist.get_world_size() > 1 and gradients:
            # Scaled first, because a sum in float16 could overflow.
            own = torch.cat([g.reshape(-1) for g in averages]) / dist.get_world_size()
            parts = rank_order_sum(gather(own)).split([g.numel() for g in gradients])
            averages = [part.view_as(g) for part, g in zip(parts, gradients, strict=True)]
        return [a.to(g.dtype) for a, g in zip(averages, gradients, strict=True)]

    def _reduce_dtype(self, gradient: Tensor) -> torch.dtype:
        reduce_dtype: torch.dtype | None = self.case.precision.get("reduce_dtype")
        # Since torch 2.15, whose policy has this field, None stands for the parameters' dtype.
        if not hasattr(MixedPrecisionPolicy, "param_dtype_override_fn"):
            reduce_dtype = reduce_dtype or self.case.precision.get("param_dtype")
        return reduce_dtype or gradient.dtype


def whole(tensor: Tensor | None) -> Any:
    """Return a copy of the whole tensor, gathered from all ranks if it is sharded; None of None."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def assert_same(who: str, expected: Values, got: Values, allowed: Tolerance = EXACT) -> None:
    """Raise if tensors differ, which are by name or in order, and list the differences."""
    __tracebackhide__ = True
    wanted, had = _by_name(expected), _by_name(got)
    lines = []
    for name in dict.fromkeys([*wanted, *had]):
        if name in wanted and name in had:
            want, have = wanted[name], had[name]
            if want is not None and have is not None:
                have = have.to(want.device)  # offloaded shards of a model on a GPU are on the host
            text = difference(want, have, allowed.bound(want))
        else:
            text = "only one of them has it"
        if text:
            lines.append(f"{name}: {text}")
    if lines:
        raise AssertionError("\n".join([f"{who} (tolerance {allowed.relative:g}):", *lines]))


def _by_name(values: Values) -> Mapping[Any, Tensor | None]:
    if isinstance(values, Mapping):
        return values
    return {f"value {i}": value for i, value in enumerate(values)}


def trained(run: Run, *, wholes: bool = True) -> list[Record]:
    """Train, and return a record after each step.

    Args:
        run: the model to train.
        wholes: add a record of whole tensors at the end.
    """
    history = [run.recorded(run.case.step(run, step)) for step in range(run.case.steps)]
    run.reshard()
    assert dict(run.model.named_parameters()) == run.parameters
    return [*history, run.recorded(copy=whole)] if wholes else history


def assert_same_history(
    who: str, expected: list[Record], got: list[Record], allowed: Tolerance
) -> None:
    for step, (want, have) in enumerate(zip(expected, got, strict=True)):
        assert_same(f"{who}, step {step}", want, have, allowed)


def compare_on_rank(case: Case, system_name: str) -> None:
    """Train a case in all three ways on this rank and compare them."""
    # torch deprecates names that its own FSDP2 still uses, and that torch 2.11 needs.
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)
    system = load_system(system_name)
    run = Sharded(system, case)
    run.under_test = True
    got = trained(run)
    # Train all before comparing any: a rank that finds a difference leaves its peers alone.
    references: list[tuple[str, list[Record], Tolerance]] = []
    if case.fsdp2_fails is None:
        # Gathering every tensor takes long, and the unsharded model has the same ones.
        wholes = case.unsharded != EXACT
        expected = trained(Sharded(load_system("fsdp2"), case), wholes=wholes)
        references.append(("FSDP2", expected, case.fsdp2))
    if case.unsharded is not None:
        references.append(("unsharded", trained(Unsharded(case)), case.unsharded))
    assert_learning(got)
    allowed = tolerance(max(case.mesh or (dist.get_world_size(),)), lowest_precision(run))
    for name, expected, at_least in references:
        same_steps = got[: len(expected)]
        who = f"{system.name} against {name}"
        assert_same_history(who, expected, same_steps, max(allowed, at_least))


def lowest_precision(run: Run) -> torch.dtype:
    """Return the lowest precision that gradients are computed, summed or kept in."""
    policy = run.case.precision
    dtypes = {policy[name] for name in ("param_dtype", "reduce_dtype") if name in policy}
    dtypes |= {p.dtype for p in run.parameters.values() if p.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def assert_learning(history: list[Record]) -> None:
    """Check that there is something to compare: nonzero gradients, and only finite numbers."""
    tensors = [(name, t) for record in history for name, t in record.items() if t is not None]
    assert all(bool(t.isfinite().all()) for _, t in tensors)
    assert any(bool(t.any()) for name, t in tensors if name.startswith("gradient of "))


def check(case: Case, world_size: int) -> None:
    """Run a case on `world_size` ranks of the host."""
    __tracebackhide__ = True
    if SYSTEM == "fsdp2" and case.fsdp2_fails:
        pytest.skip(f"FSDP2 fails: {case.fsdp2_fails}")
    run_ranks(compare_on_rank, world_size, case, SYSTEM)


def each(
    cases: Iterable[Case],
    quick: tuple[int, ...] = (2,),
    more: tuple[int, ...] = (3,),
    every: int = 1,
) -> pytest.MarkDecorator:
    """Parametrize a test over cases and their numbers of ranks, named by the facts.

    Args:
        cases: the cases.
        quick: numbers of ranks that `make test` runs. The others are exhaustive.
        more: the other numbers of ranks.
        every: with 2, for example, `make test` runs every second case. The others are exhaustive.
    """
    return pytest.mark.parametrize(
        ("case", "world_size"),
        [
            pytest.param(
                case,
                world,
                id=f"{case.fact}-{world} rank{'s' if world > 1 else ''}",
                marks=[] if world in quick and not place % every else [pytest.mark.exhaustive],
            )
            for place, case in enumerate(cases)
            for world in case.worlds or (*quick, *more)
        ],
    )
