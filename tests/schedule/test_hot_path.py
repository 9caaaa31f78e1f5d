"""A step has a fixed number of Python calls, C++ calls, collectives, bytes and slots."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.matrix import exhaustive
from torch import Tensor, nn

import fsdp_ext
from fsdp_ext import fully_shard
from fsdp_ext.optim import AdamW

WIDTH = 12
LAYERS = 5  # units below the root


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def make(sharded: bool = True) -> Any:
    torch.manual_seed(0)
    model = Model()
    if sharded:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model, bucket_bytes=0)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    loss = model(torch.randn(4, WIDTH, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


class Calls:
    """Records the names of Python and C functions that are called while it is active."""

    def __init__(self) -> None:
        self.python: list[str] = []
        self.c: list[str] = []

    def __enter__(self) -> Calls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.python.append(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}")
        elif event == "c_call":
            self.c.append(getattr(argument, "__qualname__", repr(argument)))


def calls_in_a_step(sharded: bool) -> tuple[Calls, Calls]:
    """Return the calls in forward and in backward of the third step."""
    model = make(sharded)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(2):
        step(model, optimizer, seed)
    x = torch.randn(4, WIDTH)
    with Calls() as forward:
        output = model(x)
    loss = output.sum()
    with Calls() as backward:
        loss.backward()
    return forward, backward


def _compare_python_calls() -> None:
    _, plain = calls_in_a_step(sharded=False)
    _, sharded = calls_in_a_step(sharded=True)
    assert plain.python, "the profiler saw nothing"
    assert sharded.python == plain.python
    assert sharded.c == plain.c


@pytest.mark.skipif(sys.version_info < (3, 11), reason="co_qualname is of Python 3.11")
def test_no_python_runs_in_backward_that_does_not_run_unsharded() -> None:
    run_ranks(_compare_python_calls, 2)


def _compare_forward_calls() -> None:
    forward, _ = calls_in_a_step(sharded=True)
    assert not [name for name in forward.python if name.startswith("fsdp_ext")]
    ours = [name.split(".")[-1] for name in forward.c if "fsdp" in name]
    assert ours.count("fsdp_pre_forward") == LAYERS + 1
    assert ours.count("fsdp_post_forward") == LAYERS + 1
    assert len(ours) == 2 * (LAYERS + 1)
    # Python calls C++ by pybind11, so no other call from pybind11 may be added.
    plain, _ = calls_in_a_step(sharded=False)
    other = [name for name in forward.c if "pybind11" in name and "fsdp" not in name]
    assert len(other) == len([name for name in plain.c if "pybind11" in name])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="co_qualname is of Python 3.11")
def test_forward_calls_c_twice_a_unit_and_no_python_of_ours() -> None:
    run_ranks(_compare_forward_calls, 2)


def _opcodes_of_optimizer(layers: int) -> int:
    """Return how many opcodes Python runs from backward to the next forward."""
    model = fully_shard(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))))
    optimizer = AdamW(model.parameters())
    opcodes = 0

    def note(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal opcodes
        frame.f_trace_opcodes = True
        opcodes += event == "opcode"
        return note

    for _ in range(3):  # the first two find what the third finds unchanged
        model(torch.ones(2, WIDTH)).sum().backward()
        opcodes = 0
        sys.settrace(note)
        fsdp_ext.clip_grad_norm_(model, 1e-6)
        optimizer.step()
        optimizer.zero_grad()
        sys.settrace(None)
    return opcodes


def _compare_opcodes_of_optimizers() -> None:
    few, many = map(_opcodes_of_optimizer, (2, 20))
    assert few > 0, "the tracer saw nothing"
    assert many == few


def test_no_python_after_backward_loops_over_parameters() -> None:
    run_ranks(_compare_opcodes_of_optimizers, 2)


def _log_of_a_step() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, 0)
    impl = model._fsdp_ext_unit.root.impl
    layers = [f"layers.{i}" for i in range(LAYERS)]
    for seed in range(1, 4):
        impl.enable_log(True)
        impl.reset_counters()
        step(model, optimizer, seed)
        log = impl.take_log()
        gathers = [(phase, unit) for op, phase, unit, _ in log if op == "all_gather"]
        forward = [unit for phase, unit in gathers if phase == "forward"]
        backward = [unit for phase, unit in gathers if phase == "backward"]
        # L + 1 gathers in forward. In backward the last two units are still in the ring: L - 2.
        assert forward == ["the root", *layers]
        assert backward == list(reversed(layers[:-2]))
        reduced = [unit for op, _, unit, _ in log if op == "reduce_scatter"]
        assert reduced == [*reversed(layers), "the root"]
        for op, _, unit_name, size in log:
            unit = (
                model._fsdp_ext_unit
                if unit_name == "the root"
                else model.get_submodule(unit_name)._fsdp_ext_unit
            )
            # Shared memory gathers each parameter by itself. A reduction includes the padding.
            ranks = dist.get_world_size()
            rows = [-(-param.shape[0] // ranks) for param in unit.params]
            numels = zip(rows, (param.shape[1:].numel() for param in unit.params), strict=True)
            per_rank = (
                sum(count * numel for count, numel in numels)
                if op == "all_gather"
                else unit.layout_for(training=True).grad_numel
            )
            assert size == 4 * per_rank * ranks
        counters = impl.counters()
        assert counters["all_gathers"] == 2 * LAYERS - 1
        assert counters["reused_unshards"] == 2
        assert counters["overflow_slots"] == 0
        assert counters["unsharded_units"] == 0
        assert counters["unsharded_bytes"] == 0


@pytest.mark.parametrize("world_size", [2, *exhaustive(3)])
def test_collectives_of_a_step_by_number_order_and_bytes(world_size: int) -> None:
    run_ranks(_log_of_a_step, world_size)


def _memory_of_many_steps() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memories, peaks = [], []
    for seed in range(20):
        step(model, optimizer, seed)
        impl = model._fsdp_ext_unit.root.impl
        memories.append(impl.memory())
        peaks.append(
            (impl.counters()["peak_unsharded_units"], impl.counters()["peak_unsharded_bytes"])
        )
    layers = [
        layer._fsdp_ext_unit.layout_for(training=True).unsharded_bytes for layer in model.layers
    ]
    root = model._fsdp_ext_unit.layout_for(training=True).unsharded_bytes
    assert memories[2] == memories[19]
    assert memories[19]["ring_slots"] == 2
    assert memories[19]["ring_slot_bytes"] == max(layers)
    # With a prefetch depth of 1, two units and the root are unsharded at a time.
    assert peaks[19] == (3, 2 * max(layers) + root)


def test_unsharded_bytes_are_those_of_two_units_and_the_root_in_every_step() -> None:
    run_ranks(_memory_of_many_steps, 2)


def _train(delayed: str | None) -> list[Tensor]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [step(model, optimizer, 0)]
    impl = model._fsdp_ext_unit.root.impl
    if delayed is not None:
        impl.set_poison_released_slots(True)
    for seed in range(1, 5):
        if delayed is not None:
            impl.delay_stream(delayed, 0.05)
        losses.append(step(model, optimizer, seed))
    return [*losses, *(param.full_tensor().detach() for param in model.parameters())]


def _compare_delayed(delayed: str) -> None:
    want, have = _train(None), _train(delayed)
    assert all(torch.equal(a, b) for a, b in zip(want, have, strict=True))


@pytest.mark.parametrize("delayed", ["gather", "reduce"])
def test_results_do_not_depend_on_how_long_a_stream_takes(delayed: str) -> None:
    run_ranks(_compare_delayed, 2, delayed)


def _read_after_reshard() -> None:
    model = make()
    model.unshard()
    weight = model.stem.weight
    assert weight.shape == (WIDTH, WIDTH)
    assert torch.isfinite(weight).all()
    model.reshard()
    with pytest.raises(RuntimeError, match=r"read while it is freed|of size 0"):
        torch.nn.functional.linear(torch.ones(2, WIDTH), weight)
    assert model.stem.weight is not weight


def test_reading_a_parameter_after_reshard_raises() -> None:
    run_ranks(_read_after_reshard, 2)


def test_the_package_exports_what_fsdp2_code_imports() -> None:
    for name in ("fully_shard", "FSDPModule", "MixedPrecisionPolicy", "UnshardHandle"):
        assert hasattr(fsdp_ext, name)


def _gathers_of(kind: str) -> tuple[list[tuple[str, str]], int, int]:
    """Return the gathers of a step, by phase and unit, the ring's slots, and overflow slots."""
    torch.manual_seed(0)
    model: Any = Model()
    if kind == "first and last":
        fully_shard([model.layers[0], model.layers[LAYERS - 1]])
        for layer in model.layers[1 : LAYERS - 1]:
            fully_shard(layer)
    else:
        for layer in model.layers:
            fully_shard(layer)
    fully_shard(model, bucket_bytes=0, reshard_after_forward=kind == "root reshards" or None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        step(model, optimizer, seed)
    impl = model._fsdp_ext_unit.root.impl
    impl.reset_counters()
    impl.enable_log(True)
    step(model, optimizer, 3)
    gathers = [(phase, unit) for op, phase, unit, _ in impl.take_log() if op == "all_gather"]
    return gathers, impl.memory()["ring_slots"], impl.counters()["overflow_slots"]


def test_a_unit_of_the_first_and_last_layer_gathers_nothing_in_vain() -> None:
    gathers, _, overflow = run_ranks(_gathers_of, 2, "first and last")[0]
    between = [f"layers.{i}" for i in range(1, LAYERS - 1)]
    forward = ["the root", "layers.0", *between]
    # The last layer between is still in its slot, and layers 0 and 4 are one unit.
    backward = between[:-1][::-1]
    assert gathers == [*(("forward", u) for u in forward), *(("backward", u) for u in backward)]
    assert overflow == 0


def test_a_root_that_reshards_takes_no_slot_from_those_below() -> None:
    gathers, slots, overflow = run_ranks(_gathers_of, 2, "root reshards")[0]
    plain, fewer, _ = run_ranks(_gathers_of, 2, "plain")[0]
    assert (slots, fewer) == (3, 2)
    assert overflow == 0
    # The root is still in its slot when backward begins with it.
    assert gathers == plain
