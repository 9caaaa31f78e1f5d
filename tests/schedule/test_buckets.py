"""Units in one bucket train as units in buckets of their own: csrc/core/units/bucket.h."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import RanksFailed, run_ranks
from support.matrix import exhaustive
from support.random_programs import Program, assert_same_record
from torch import Tensor, nn

import fsdp_ext
from fsdp_ext import Link, MixedPrecisionPolicy, Simulated, describe_buckets, fully_shard
from fsdp_ext.optim import SGD

WIDTH = 6
LAYERS = 8
LAYER_BYTES = 2 * 3 * (6 + 2) * 4  # on two ranks: three rows of the weight and of the bias, padded
PROGRAMS = 9


class Interrupted(Exception):
    pass


class Bucketed(Program):
    """A random program with random bucket sizes and occasional exceptions."""

    def __init__(self, seed: int, largest_bucket: int, largest_message: int | None) -> None:
        self.limits = random.Random(f"{seed} limits")
        self.largest_bucket = largest_bucket
        self.largest_message = largest_message
        super().__init__(seed, "fsdp_ext")
        self.interruptions = random.Random(f"{seed} interruptions")

    def shard(self, module: nn.Module, **options: Any) -> None:
        own = self.limits.random()
        limit = None if own < 0.6 else 0 if own < 0.7 else int(own * self.largest_bucket)
        if module is self.model:
            limit = self.largest_bucket
        if self.largest_message is not None and (module is self.model or own > 0.9):
            options["max_message_bytes"] = self.largest_message
        super().shard(module, bucket_bytes=limit, **options)

    def step(self, step: int) -> None:
        if self.interruptions.random() < 0.5:
            where = self.interruptions.choice(self.units)
            in_backward = self.interruptions.random() < 0.5
            self.interrupt(where, in_backward)
        if self.interruptions.random() < 0.3:
            accumulating = self.interruptions.choice(self.units)
            accumulating.set_requires_gradient_sync(False, recurse=False)
            self.loss(torch.ones(4, WIDTH)).backward()
            for name, parameter in self.model.named_parameters():
                self.note(f"{step}: accumulating, gradient of {name}", parameter.grad)
            accumulating.set_requires_gradient_sync(True, recurse=False)
        super().step(step)

    def interrupt(self, unit: nn.Module, in_backward: bool) -> None:
        def raises(*_: Any) -> None:
            raise Interrupted

        def watch(_: nn.Module, __: Any, output: Any) -> None:
            tensors = output.values() if isinstance(output, dict) else output
            for tensor in tensors if isinstance(tensors, tuple) else [tensors]:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(raises)

        hook = unit.register_forward_hook(watch if in_backward else raises)
        with suppress(Interrupted):
            self.loss(torch.ones(4, WIDTH)).backward()
        hook.remove()
        for parameter in self.model.parameters():
            parameter.grad = None


def _same_in_buckets(seed: int) -> int:
    chosen = random.Random(seed)
    largest_row = 6 * 4 * dist.get_world_size()
    together = Bucketed(
        seed,
        largest_bucket=chosen.choice([300, 700, 2000, 10**6]),
        largest_message=chosen.choice([None, largest_row, 2 * largest_row, 5 * largest_row]),
    )
    got = together.run()
    by_themselves = Bucketed(seed, 0, None)
    expected = by_themselves.run()
    assert_same_record(expected, got)
    for unit in together.units:
        unit.reshard()  # the last step may have issued gathers ahead
    expect_memory_as_asked(together)
    alone = buckets_of(by_themselves.model)
    assert all(len(bucket) == 1 for bucket in alone)
    return len(alone) - len(buckets_of(together.model))


@pytest.mark.parametrize("ranks", [2, *exhaustive(1, 3, 4)])
@pytest.mark.parametrize("seed", [*range(5), *exhaustive(*range(5, PROGRAMS))])
def test_a_random_program_trains_the_same_in_buckets(seed: int, ranks: int) -> None:
    merged = run_ranks(_same_in_buckets, ranks, seed)
    assert len(set(merged)) == 1


def expect_memory_as_asked(program: Bucketed) -> None:
    """Unsharded memory is at most the slots of the largest bucket and what stays gathered."""
    root = program.model._fsdp_ext_unit.root
    memory, counters = root.impl.memory(), root.impl.counters()
    slot_bytes, kept = 0, 0
    for bucket in root.impl.buckets():
        limits = [root.settings.bucket_bytes[number] for number in bucket["units"]]
        assert len(limits) == 1 or bucket["gather_bytes"] <= min(limits)
        if root.settings.reshard_after_forward[bucket["units"][0]]:
            slot_bytes = max(slot_bytes, bucket["unsharded_bytes"])
        else:
            kept += bucket["unsharded_bytes"]
    if dist.get_world_size() > 1:
        assert memory["ring_slot_bytes"] == slot_bytes
        # Slots may be of several sizes.
        assert slot_bytes <= memory["ring_bytes"] <= memory["ring_slots"] * slot_bytes
    assert counters["unsharded_bytes"] <= kept


def buckets_of(model: Any) -> list[list[int]]:
    return [bucket["units"] for bucket in model._fsdp_ext_unit.root.impl.buckets()]


class Layers(nn.Module):
    def __init__(self, order: list[int] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)
        self.order = order or list(range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for i in self.order:
            x = torch.tanh(self.layers[i](x))
        return self.head(x)


def make(bucket_bytes: int | None, order: list[int] | None = None, **options: Any) -> Any:
    torch.manual_seed(3)
    model = Layers(order)
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, bucket_bytes=bucket_bytes, **options)


def step(model: Any, seed: int) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed + dist.get_rank()))
    loss = model(x).pow(2).mean()
    loss.backward()
    return loss


def _collectives() -> None:
    model = make(3 * LAYER_BYTES)
    impl = None
    for seed in range(4):
        if impl is not None:
            impl.enable_log(True)
        step(model, seed)
        impl = model._fsdp_ext_unit.root.impl
    assert impl is not None
    assert buckets_of(model) == [[0], [1, 2, 3], [4, 5, 6], [7, 8]]
    first, second, third = "layers.0 to layers.2", "layers.3 to layers.5", "layers.6 to layers.7"
    sent = [(op, phase, units) for op, phase, units, _ in impl.take_log()[-9:]]
    assert sent == [
        ("all_gather", "forward", "the root"),
        ("all_gather", "forward", first),
        ("all_gather", "forward", second),
        ("all_gather", "forward", third),
        ("reduce_scatter", "backward", third),
        ("all_gather", "backward", first),
        ("reduce_scatter", "backward", second),
        ("reduce_scatter", "backward", first),
        ("reduce_scatter", "backward", "the root"),  # it waits for the units inside it
    ]
    memory = impl.memory()
    layer = model.layers[0]._fsdp_ext_unit.layout_for(training=True).unsharded_bytes
    assert (memory["ring_slots"], memory["ring_slot_bytes"]) == (2, 3 * layer)
    counters = impl.counters()
    assert counters["overflow_slots"] == 0
    assert counters["unsharded_bytes"] == 0


def test_a_bucket_is_one_gather_one_reduction_and_one_slot() -> None:
    run_ranks(_collectives, 2)


def _slots_of_unequal_units(prefetch: int) -> None:
    model: Any = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(7)))
    for end in (0, 6):
        model[end] = nn.Sequential(nn.Linear(8, 64, bias=False), nn.Linear(64, 8, bias=False))
    reference = copy.deepcopy(model)
    for layer in model:
        fully_shard(layer, bucket_bytes=0)
    fully_shard(model, bucket_bytes=0, prefetch=prefetch)
    impl = None
    for number in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        if impl is not None:
            impl.enable_log(True)
        model(x).square().sum().backward()
        reference(x).square().sum().backward()
        impl = model._fsdp_ext_unit.root.impl
    assert impl is not None
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad)
    large, small = 2 * 8 * 64 * 4, 8 * 8 * 4
    assert impl.memory()["ring_slot_bytes"] == large
    assert impl.memory()["ring_bytes"] == large + prefetch * small
    assert impl.counters()["overflow_slots"] == 0
    # Each unit is gathered in forward, and those that still have a slot not again in backward.
    phases = [phase for op, phase, _, _ in impl.take_log() if op == "all_gather"]
    assert phases == 2 * (["forward"] * 7 + ["backward"] * (6 - prefetch))


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_the_ring_has_room_for_neighbours_and_not_for_several_large_units(prefetch: int) -> None:
    run_ranks(_slots_of_unequal_units, 2, prefetch)


class _TwoLargeFirst(nn.Module):
    """It runs its last module second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(5))
        for end in (0, 4):
            self.layers[end] = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 4, 1, 2, 3):
            x = self.layers[number](x)
        return x


def _slots_of_another_order() -> None:
    model: Any = _TwoLargeFirst()
    for layer in model.layers:
        fully_shard(layer, bucket_bytes=0)
    fully_shard(model, bucket_bytes=0)
    impl, sizes = None, []
    for _ in range(4):
        if impl is not None:
            impl.enable_log(True)
        model(torch.ones(2, 8)).sum().backward()
        impl = model._fsdp_ext_unit.root.impl
        sizes.append(impl.memory()["ring_bytes"])
    assert impl is not None
    assert impl.counters()["overflow_slots"] == 0
    large = impl.memory()["ring_slot_bytes"]
    assert large < sizes[0] < sizes[1] == sizes[2] == sizes[3] == 2 * large
    units = [unit for op, phase, unit, _ in impl.take_log()[-15:] if phase == "forward"]
    assert units == [f"layers.{number}" for number in (0, 4, 1, 2, 3)]


def test_slots_are_equal_if_units_run_in_another_order_than_that_of_registration() -> None:
    run_ranks(_slots_of_another_order, 2)


class _Nested(nn.Module):
    """A layer around another one, each of which is a unit."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(WIDTH, WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(self.linear(x))
        return result


def _slots_of_nested_units() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), _Nested(_Nested(nn.Linear(WIDTH, WIDTH))))
    units = [model[0], model[1].inner.inner, model[1].inner, model[1], model]
    for unit in units:
        fully_shard(unit, bucket_bytes=0)
    for _ in range(3):
        model(torch.ones(2, WIDTH)).sum().backward()
        impl = model._fsdp_ext_unit.root.impl
        assert impl.memory()["ring_slots"] == 3 + 1  # that enclose each other, and the prefetch
        assert impl.counters()["overflow_slots"] == 0


def test_units_that_enclose_each_other_have_a_slot_each() -> None:
    run_ranks(_slots_of_nested_units, 2)


def _follows_the_order() -> None:
    order = [7, 0, 6, 1, 5, 2, 4, 3]
    model, expected = make(2 * LAYER_BYTES, order), make(0, order)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, expected)]
    addresses = []
    for seed in range(4):
        for m, optimizer in zip((model, expected), optimizers, strict=True):
            step(m, seed)
            optimizer.step()
            optimizer.zero_grad()
        addresses.append([layer.weight.to_local().data_ptr() for layer in model.layers])
        for got, want in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(got.full_tensor(), want.full_tensor())
    assert buckets_of(model) == [[0], [5, 4], [6, 3], [7, 2], [8, 1]]
    # Shards move once for the order of registration and once for the order of forward.
    assert addresses[0] != addresses[1]
    assert addresses[1] == addresses[3]
    apart = addresses[3][7] - addresses[3][0]
    assert apart == -model.layers[7]._fsdp_ext_unit.layout_for(training=True).shard_bytes


def test_buckets_follow_the_order_that_forward_takes() -> None:
    run_ranks(_follows_the_order, 2)


def _views_follow() -> None:
    model = make(10**6, order=[1, 0, *range(2, LAYERS)])
    held = [layer.weight.to_local() for layer in model.layers]
    step(model, 0)
    flats = [layer.flat_shard() for layer in model.layers]
    step(model, 1)
    step(model, 2)
    for layer, weight, (shard, gradient) in zip(model.layers, held, flats, strict=True):
        assert weight.data_ptr() == layer.weight.to_local().data_ptr()
        assert shard.data_ptr() == weight.data_ptr()
        assert gradient.data_ptr() == layer.weight.grad.to_local().data_ptr()
        assert torch.equal(gradient[: weight.numel()], layer.weight.grad.to_local().flatten())
        with torch.no_grad():
            shard.fill_(2.0)
        assert (layer.weight.full_tensor() == 2.0).all()
    before = step(model, 3)
    assert before.isfinite()


def test_tensors_over_a_shard_follow_it_into_a_bucket() -> None:
    run_ranks(_views_follow, 2)


def _state_dicts() -> None:
    model, other = make(10**6), make(2 * LAYER_BYTES)
    step(model, 0)
    state = model.state_dict()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    step(other, 0)
    other.load_state_dict(state)
    for name, value in other.state_dict().items():
        assert torch.equal(value.full_tensor(), state[name].full_tensor())
    losses = [step(m, 5) for m in (model, other)]
    assert torch.equal(*losses)
    other.load_state_dict(state, assign=True)
    assert torch.equal(step(other, 6), step(model, 6))


def test_state_dicts_do_not_know_of_buckets() -> None:
    run_ranks(_state_dicts, 2)


def _kept_apart() -> None:
    torch.manual_seed(0)
    model = Layers()
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    for i, layer in enumerate(model.layers):
        options: dict[str, Any] = {}
        if i in (2, 3):
            options["mp_policy"] = half
        if i in (4, 5):
            options["reshard_after_forward"] = False
        if i == 7:
            options["bucket_bytes"] = 0
        fully_shard(layer, **options)
    fully_shard(model, bucket_bytes=10**6)
    for seed in range(3):
        step(model, seed)
    assert buckets_of(model) == [[0], [1, 2], [3, 4], [5, 6], [7], [8]]


def test_units_that_differ_are_kept_apart() -> None:
    run_ranks(_kept_apart, 2)


def _ranks_that_differ() -> None:
    model = make(10**6 if dist.get_rank() == 0 else 0)
    step(model, 0)


def test_ranks_that_ask_for_other_buckets_raise() -> None:
    with pytest.raises(
        RanksFailed, match=r"\(bucket_bytes=1000000, .* where rank 1 has .*\(bucket_bytes=0,"
    ):
        run_ranks(_ranks_that_differ, 2, fresh=True)


def _orders_that_differ(skip: bool) -> None:
    order = list(range(LAYERS))
    if dist.get_rank() == 1:
        order = order[:3] + order[4:] if skip else [1, 0, *order[2:]]
    model = make(10**6, order)
    step(model, 0)  # the bucket has the same units and bytes on both ranks
    step(model, 1)


@pytest.mark.parametrize("skip", [False, True])
def test_ranks_that_differ_within_a_bucket_raise(skip: bool) -> None:
    with pytest.raises(RanksFailed, match=r"into the same buckets, but rank \d has"):
        run_ranks(_orders_that_differ, 2, skip, fresh=True)


def _stays_unsharded_in_part() -> None:
    losses = []
    for bucket_bytes in (10**6, 0):
        model = make(bucket_bytes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for seed in range(3):
            step(model, seed)
            optimizer.step()
            optimizer.zero_grad()
        model.set_reshard_after_backward(False)
        step(model, 3)
        model.layers[1].reshard()
        optimizer.step()
        model.layers[1].unshard()
        losses.append(step(model, 4))
    assert torch.equal(*losses)


def test_a_unit_that_stays_unsharded_follows_its_shard() -> None:
    run_ranks(_stays_unsharded_in_part, 2)


def _gathered_elsewhere() -> None:
    gradients = []
    for bucket_bytes in (10**6, 0):
        torch.manual_seed(3)
        model: Any = Layers()
        for layer in model.layers:
            fully_shard(layer, reshard_after_forward=False)
        fully_shard(model, bucket_bytes=bucket_bytes, reshard_after_forward=False)
        model.set_reshard_after_backward(False)
        sharded = model.layers[1].weight
        for seed in range(3):
            step(model, seed)
        with torch.no_grad():
            sharded.mul_(0.5)
        for parameter in model.parameters():
            parameter.grad = None
        x = torch.ones(4, WIDTH)
        loss = model(x).pow(2).mean()
        model.layers[1].reshard()
        loss.backward()
        model.reshard()
        for layer in model.layers:
            layer.reshard()
        gradients.append([layer.weight.grad.full_tensor() for layer in model.layers])
    for in_bucket, alone in zip(*gradients, strict=True):
        assert torch.equal(in_bucket, alone)


def test_a_bucket_gathered_elsewhere_forgets_its_old_place() -> None:
    run_ranks(_gathered_elsewhere, 2)


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def _wrappers() -> None:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model: Any = nn.Sequential(Wrapper(), Wrapper(), nn.Tanh())
    for wrapper in (model[0], model[1]):
        for module in (wrapper.first, wrapper.second, wrapper):
            fully_shard(module, mp_policy=half)
    fully_shard(model, mp_policy=half, bucket_bytes=10**6, max_message_bytes=2 * 6 * 4)
    step(model, 0)
    assert buckets_of(model) == [[0], [1, 2, 3, 4, 5, 6]]  # also units without parameters
    step(model, 1)
    model[0].set_reshard_after_forward(False, recurse=False)
    step(model, 2)
    step(model, 3)
    assert buckets_of(model) == [[0], [1], [2, 3], [4, 5, 6]]


def test_units_without_parameters_are_no_obstacle() -> None:
    run_ranks(_wrappers, 2)


def _two_backwards() -> None:
    wire = []
    for bucket_bytes in (10**6, 0):
        model = make(bucket_bytes)
        step(model, 0)
        model._fsdp_ext_unit.root.impl.reset_counters()
        losses = [model(torch.ones(2, WIDTH)).sum() for _ in range(2)]
        for loss in losses:
            loss.backward()
        wire.append(model._fsdp_ext_unit.root.impl.counters())
    assert wire[0]["reduce_scatters"] == 4  # one of the root and one of the bucket in each backward
    assert wire[0]["wire_bytes"] <= wire[1]["wire_bytes"]


def test_several_backwards_reduce_a_bucket_once_each() -> None:
    run_ranks(_two_backwards, 2)


def _defaults() -> None:
    model = make(None)
    with pytest.raises(RuntimeError, match="needs a model that has run forward"):
        describe_buckets(model)
    step(model, 0)
    assert buckets_of(model) == [[0], list(range(1, LAYERS + 1))]
    lines = describe_buckets(model).splitlines()
    assert lines[0].split() == [
        "units",
        "gather",
        "messages",
        "reduce",
        "messages",
        "unsharded",
        "plan",
    ]
    assert lines[2].startswith("layers.0 to layers.7 (8)")
    assert lines[-2].startswith(f"{LAYERS + 1} units in 2 buckets (bucket_bytes=1,026,000")
    assert lines[-1].startswith("1 slot of ")
    SGD(model.layers.parameters(), lr=0.1).attach(model.layers)
    added = set(describe_buckets(model).splitlines()) - set(lines)
    assert added == {f"attached optimizers step {LAYERS} units in backward"}


def test_describe_buckets_shows_the_default_and_its_memory() -> None:
    run_ranks(_defaults, 2)


def _simulated_default() -> str:
    dist.destroy_process_group()  # Simulated makes its own
    warnings.simplefilter("ignore")
    link = Link("a wire", alpha=10e-6, beta=1e9)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    for layer in layers:
        fully_shard(layer, transport=Simulated(2, link))
    model: Any = fully_shard(layers, transport=Simulated(2, link))
    model(torch.ones(1, WIDTH)).sum().backward()
    return describe_buckets(model)


def test_a_simulated_links_default_is_four_launches_long() -> None:
    (text,) = run_ranks(_simulated_default, 1)
    assert "(bucket_bytes=40,000)" in text


def _times() -> None:
    model = make(3 * LAYER_BYTES, max_message_bytes=2 * 3 * WIDTH * 4)
    step(model, 0)
    step(model, 1)
    with fsdp_ext.profile(model) as prof:
        step(model, 2)
        step(model, 3)
    lanes = ("gather", "pack", "reduce", "finish reduction")
    for iteration in prof.iterations:
        done = iteration.of(*lanes)
        assert {span.work for span in done} == set(lanes)
        assert all(iteration.begin <= span.begin <= span.end for span in done)
        for what in ("gather", "pack", "reduce"):  # each stream runs in order
            times = [(span.begin, span.end) for span in iteration.of(what)]
            assert len(times) > 8
            assert all(before[1] <= after[0] for before, after in itertools.pairwise(times))
        named = {prof.name_of(span.units) for span in done}
        assert named >= {"layers.0 to layers.2", "the root"}
    assert len(prof.iterations) == 2


def test_a_profile_has_what_ran_and_when() -> None:
    run_ranks(_times, 2)


def _sent_in_pieces() -> None:
    rows_of_two_layers = 2 * 3 * WIDTH * 4 * 2
    torch.manual_seed(3)
    model: Any = Layers()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model, bucket_bytes=10**6, max_message_bytes=rows_of_two_layers)
    step(model, 0)
    impl = model._fsdp_ext_unit.root.impl
    impl.enable_log(True)
    losses = [step(model, seed) for seed in range(1, 3)]
    log = impl.take_log()
    assert max(nbytes for *_, nbytes in log) <= rows_of_two_layers
    assert sum(op == "reduce_scatter" for op, *_ in log) > 2 * 4
    whole = make(10**6)
    assert [step(whole, seed) for seed in range(3)][1:] == losses
    assert torch.equal(
        model.layers[0].weight.grad.full_tensor(), whole.layers[0].weight.grad.full_tensor()
    )
    # Two halves of the largest message are less than the whole unit.
    assert impl.memory()["reduce_bytes"] < whole._fsdp_ext_unit.root.impl.memory()["reduce_bytes"]


def test_a_bucket_larger_than_a_message_travels_as_several() -> None:
    run_ranks(_sent_in_pieces, 2)


def _one_huge_parameter(half: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if half else MixedPrecisionPolicy()

    def train(max_message_bytes: int | None) -> tuple[Any, list[Tensor]]:
        torch.manual_seed(0)
        model: Any = nn.Embedding(1001, 33)
        fully_shard(model, mp_policy=policy, max_message_bytes=max_message_bytes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses = []
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed + dist.get_rank())
            tokens = torch.randint(0, 1001, (64,), generator=generator)
            loss = model(tokens).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        return model, [*losses, model.weight.full_tensor()]

    model, cut = train(5000)
    _, whole = train(None)
    assert all(torch.equal(a, b) for a, b in zip(cut, whole, strict=True))
    (bucket,) = model._fsdp_ext_unit.root.impl.buckets()
    assert bucket["gather_messages"] >= 1001 * 33 * (2 if half else 4) / 5000
    assert bucket["reduce_messages"] >= bucket["gather_messages"]
    assert model._fsdp_ext_unit.root.impl.memory()["staging_bytes"] < 2 * 5000 + 1000


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("ranks", [2, *exhaustive(3)])
def test_one_huge_parameter_travels_by_rows(ranks: int, half: bool) -> None:
    run_ranks(_one_huge_parameter, ranks, half)


def _refused(name: str, value: Any) -> str:
    with pytest.raises(ValueError, match=f"{name} is .* number of bytes") as caught:
        fully_shard(nn.Linear(2, 2), **{name: value})
    return str(caught.value)


@pytest.mark.parametrize("value", [-1, 1.5, True, "many"])
@pytest.mark.parametrize("name", ["bucket_bytes", "max_message_bytes"])
def test_a_wrong_size_is_refused(name: str, value: Any) -> None:
    (message,) = run_ranks(_refused, 1, name, value)
    assert f"{name} is {value!r}. Pass a " in message


def _too_small() -> None:
    model = nn.Linear(100, 10)
    with pytest.raises(ValueError, match=r"=799 is less than one row of .*'weight' .* 800 bytes"):
        fully_shard(model, max_message_bytes=799)
    assert type(model) is nn.Linear
    assert type(model.weight) is nn.Parameter  # nothing has changed
    # Gathers fit, but reductions in fp32 do not. fully_shard accepts that, since parameters may
    # still be frozen, and are not reduced then.
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mp_policy=half, max_message_bytes=799)
    with pytest.raises(ValueError, match=r"=799 is less than one row of .*'weight' .* 800 bytes"):
        model(torch.ones(1, 100))
    model.requires_grad_(False)
    model(torch.ones(1, 100))


def test_a_message_without_room_for_a_row_is_refused() -> None:
    run_ranks(_too_small, 2)
