"""async_save writes what was there when it was called, while training goes on."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checkpoints import assert_same
from support.launcher import run_ranks
from support.matrix import exhaustive
from support.offloading import offload
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

import fsdp_ext
from fsdp_ext import checkpoint, optim
from fsdp_ext.checkpoint import background, disk
from fsdp_ext.checkpoint.background import CopyGroup
from fsdp_ext.checkpoint.snapshot import Snapshot
from fsdp_ext.optim import flat_step
from fsdp_ext.sharding.root.module_state import units_below


class Stopped:
    """Stops the disk until it is told to go on."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.error: OSError | None = None

    def __call__(self) -> None:
        assert self.go_on.wait(60)
        if self.error is not None:
            raise self.error


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stopped]:
    stop = Stopped()
    monkeypatch.setattr(disk, "before_change", stop)
    yield stop
    stop.go_on.set()
    for last in background._running:
        last.error()
    background._running.clear()


def value_of(path: Path) -> Tensor:
    model = nn.Linear(2, 2)
    checkpoint.load(path, model)
    return model.weight.detach()


def test_what_is_written_is_what_was_there(tmp_path: Path, stopped: Stopped) -> None:
    model = nn.Linear(2, 2)
    expected = model.weight.detach().clone()
    saving = checkpoint.async_save(tmp_path, model, extra={"step": torch.tensor(1)})
    with torch.no_grad():
        model.weight.zero_()
    assert not saving.done()
    with pytest.raises(TimeoutError, match=r"is still being written after 0\.01 s\."):
        saving.result(timeout=0.01)
    stopped.go_on.set()
    assert saving.result() == tmp_path / "checkpoint-000001"
    assert torch.equal(value_of(tmp_path), expected)


def test_a_second_save_waits_or_raises(tmp_path: Path, stopped: Stopped) -> None:
    model = nn.Linear(2, 2)
    checkpoint.async_save(tmp_path, model)
    with pytest.raises(RuntimeError, match="while the previous checkpoint is still being"):
        checkpoint.async_save(tmp_path, model, if_running="raise")
    with pytest.raises(ValueError, match="got if_running='never'"):
        checkpoint.async_save(tmp_path, model, if_running="never")
    with torch.no_grad():
        model.weight.fill_(7)
    threading.Timer(0.1, stopped.go_on.set).start()
    second = checkpoint.async_save(tmp_path, model)
    assert second.result().name == "checkpoint-000002"
    assert not torch.equal(value_of(tmp_path / "checkpoint-000001"), model.weight)
    assert torch.equal(value_of(tmp_path), model.weight)


def test_an_error_is_raised_by_result_or_by_the_next_call(tmp_path: Path, stopped: Stopped) -> None:
    model = nn.Linear(2, 2)
    stopped.error = OSError(28, "No space left on device")
    stopped.go_on.set()
    asked = checkpoint.async_save(tmp_path, model)
    with pytest.raises(OSError, match="No space left"):
        asked.result()
    checkpoint.async_save(tmp_path, model)
    with pytest.raises(RuntimeError, match=r"previous checkpoint was not saved: .*No space left"):
        checkpoint.save(tmp_path, model)
    stopped.error = None
    checkpoint.save(tmp_path, model)


def test_a_forked_child_gets_an_error_instead_of_waiting(tmp_path: Path, stopped: Stopped) -> None:
    saving = checkpoint.async_save(tmp_path, nn.Linear(2, 2))
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends a child that hangs
        signal.alarm(60)
        for call in (saving.result, saving.wait_for_copies):
            try:
                call()
            except RuntimeError as error:
                os.write(theirs, f"{error}\n".encode())
        os._exit(0)
    os.close(theirs)
    with open(ours) as pipe:
        messages = pipe.readlines()
    os.waitpid(child, 0)
    expected = "this process was forked while async_save's thread wrote a checkpoint, and does not"
    assert [message.startswith(expected) for message in messages] == [True, True]
    stopped.go_on.set()
    assert saving.result() == tmp_path / "checkpoint-000001"


SCRIPT = """
import torch
from fsdp_ext import checkpoint
from fsdp_ext.checkpoint import disk
def fail():
    raise OSError(28, "No space left on device")
if {fails}:
    disk.before_change = fail
checkpoint.async_save({directory!r}, torch.nn.Linear(1, 1))
print("the end")
"""


@pytest.mark.parametrize("fails", [*exhaustive(False), True])
def test_a_process_that_ends_waits_and_prints_the_error(tmp_path: Path, fails: bool) -> None:
    script = SCRIPT.format(fails=fails, directory=str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.stdout == "the end\n"
    assert (checkpoint.latest(tmp_path) is None) == fails
    expected = "fsdp_ext: the last checkpoint was not saved: [Errno 28] No space left on device\n"
    assert ended.stderr == (expected if fails else "")


def _step_while_copies_wait(place: Path, kind: str) -> None:
    copy = CopyGroup.copy
    go_on = threading.Event()
    order: list[str] = []

    def copy_late(group: CopyGroup, source: Snapshot, target: Snapshot) -> None:
        in_call = threading.current_thread() is threading.main_thread()
        assert in_call or go_on.wait(60)
        copy(group, source, target)
        order.extend(["copied"] if group._keys and not in_call else [])

    CopyGroup.copy = copy_late
    wrap = fsdp_ext.FullyShardedDataParallel if kind == "flat" else fsdp_ext.fully_shard
    model: Any = wrap(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    model = nn.Sequential(model) if kind == "flat" else model  # the error names the wrapper
    of_optimizer: Any = torch.optim if kind == "flat" else optim
    optimizer = of_optimizer.AdamW(model.parameters(), lr=1.0)
    attached = kind == "attached"
    if attached:
        optimizer.attach(model)
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    state = [whole(value).clone() for value in model.state_dict().values()]
    register_optimizer_step_pre_hook(lambda *_: go_on.set())  # runs before the hook that waits
    flat_step._update_pre_hooks.insert(0, lambda _: go_on.set())
    optimizer.register_step_post_hook(lambda *_: order.append("stepped"))
    saving = checkpoint.async_save(place, model, optimizer)
    model(torch.randn(4, 2)).sum().backward()  # changes buffers, and steps what is attached
    assert order == ["copied"] * attached
    optimizer.step()
    assert order == ["copied", "stepped"]
    saving.result()
    checkpoint.load(place, model, optimizer)
    for value, expected in zip(model.state_dict().values(), state, strict=True):
        assert torch.equal(whole(value), expected)

    name, param = next(iter(model.named_parameters()))
    name = name.replace("_fsdp_wrapped_module.", "")
    written_to = {name: param}
    if kind == "flat":
        assert name == "0._flat_param"
        written_to[f"{name}.exp_avg"] = optimizer.state[param]["exp_avg"]
    for its_name, written in written_to.items():
        go_on.clear()
        saving = checkpoint.async_save(place, model, optimizer)
        with torch.no_grad():
            written.add_(1)
        go_on.set()
        with pytest.raises(RuntimeError, match=f"'{its_name}' was written to while async_save"):
            saving.result()
        saving = checkpoint.async_save(place, model, optimizer)
        saving.wait_for_copies()
        with torch.no_grad():
            written.add_(1)
        saving.result()


def _each_unit_waits_for_its_copies(place: Path) -> None:
    copy = CopyGroup.copy
    order: list[Any] = []

    def copy_when_due(group: CopyGroup, source: Snapshot, target: Snapshot) -> None:
        if group.params is not None:
            assert is_due[group.params].wait(60)  # the units before it have stepped
            order.append(group.params)
        copy(group, source, target)

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    for unit in [*model[:3], model]:
        fsdp_ext.fully_shard(unit, bucket_bytes=0)
    optimizer = optim.AdamW(model.parameters(), lr=1.0)
    optimizer.attach(model)
    updates: list[Any] = [unit.settings.update for unit in units_below(model)]
    is_due = {update.params: threading.Event() for update in updates}
    _step(model, optimizer)
    saved = _state_of(model, optimizer)
    CopyGroup.copy = copy_when_due
    flat_step._update_pre_hooks.insert(0, lambda params: is_due[params].set())
    saving = checkpoint.async_save(place, model, optimizer)
    _step(model, optimizer)
    in_backward = [*model[2].parameters()], [*model[1].parameters()], [*model[0].parameters()]
    assert [set(params) for params in order[:3]] == [set(unit) for unit in in_backward]
    saving.result()
    checkpoint.load(place, model, optimizer)
    assert_same(_state_of(model, optimizer), saved)


def test_each_unit_of_an_attached_optimizer_waits_for_its_own_copies(tmp_path: Path) -> None:
    run_ranks(_each_unit_waits_for_its_copies, 2, tmp_path, fresh=True)


def _forward_waits_before_it_moves_shards(place: Path) -> None:
    copy = CopyGroup.copy
    order: list[str] = []

    def copy_late(group: CopyGroup, source: Snapshot, target: Snapshot) -> None:
        in_call = threading.current_thread() is threading.main_thread()
        time.sleep(0 if in_call else 0.5)
        copy(group, source, target)
        order.extend([] if in_call else ["copied"])

    CopyGroup.copy = copy_late
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for layer in [*model, model]:
        fsdp_ext.fully_shard(layer)  # one bucket, so the first forward moves shards
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.async_save(place, model, optimizer)
    model(torch.ones(1, 2))
    assert order == ["copied"]


def test_a_forward_that_moves_shards_waits_for_copies(tmp_path: Path) -> None:
    run_ranks(_forward_waits_before_it_moves_shards, 2, tmp_path, fresh=True)


def _another_optimizer_steps(place: Path) -> None:
    copy, go_on = CopyGroup.copy, threading.Event()

    def copy_late(group: CopyGroup, source: Snapshot, target: Snapshot) -> None:
        assert threading.current_thread() is threading.main_thread() or go_on.wait(60)
        copy(group, source, target)

    CopyGroup.copy = copy_late
    model = fsdp_ext.fully_shard(nn.Linear(2, 2))
    saved, other = (optim.SGD(model.parameters(), lr=1.0) for _ in range(2))
    model(torch.ones(1, 2)).sum().backward()
    expected = model.weight.full_tensor()
    saving = checkpoint.async_save(place, model, saved)
    threading.Timer(0.3, go_on.set).start()
    other.step()
    saving.result()
    checkpoint.load(place, model, saved)
    assert torch.equal(model.weight.full_tensor(), expected)


def test_the_step_of_another_optimizer_waits_for_the_copies(tmp_path: Path) -> None:
    run_ranks(_another_optimizer_steps, 1, tmp_path, fresh=True)


def test_an_interrupted_call_writes_nothing(tmp_path: Path) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.async_save(tmp_path, model, optimizer)
    optimizer.step()  # it waits for nothing
    threads = [each for each in threading.enumerate() if each.name == "fsdp_ext checkpoint"]
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert checkpoint.latest(tmp_path) is None


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.parametrize("kind", ["plain", "attached", "flat"])
def test_a_step_waits_for_the_copies_of_what_it_changes(tmp_path: Path, kind: str) -> None:
    run_ranks(_step_while_copies_wait, 1, tmp_path, kind, fresh=True)


def _train_beside_saves(place: Path, attached: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    for layer in model:
        fsdp_ext.fully_shard(layer)
    fsdp_ext.fully_shard(model)
    kind: Any = optim.AdamW if attached else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=torch.tensor(0.1))
    if attached:
        optimizer.attach(model)
    states = []
    for step in range(6):
        torch.manual_seed(step + 10 * dist.get_rank())
        model(torch.randn(3, 16)).square().sum().backward()
        optimizer.step()
        states.append([param.to_local().clone() for param in model.parameters()])
        checkpoint.async_save(place, model, optimizer, {"step": step}, keep=5)
        optimizer.param_groups[0]["lr"].mul_(0.9)  # as schedulers do
    checkpoint.save(place / "last", model)  # waits for the one before
    names = [f"checkpoint-{step + 1:06}" for step in range(1, 6)]
    assert sorted(path.name for path in place.glob("checkpoint-*")) == names
    for step, state in list(enumerate(states))[1:]:
        extra = checkpoint.load(place / f"checkpoint-{step + 1:06}", model, optimizer)
        assert extra == {"step": step}
        lr = optimizer.param_groups[0]["lr"]
        assert torch.allclose(lr, torch.tensor(0.1 * 0.9**step))
        for param, expected in zip(model.parameters(), state, strict=True):
            assert torch.equal(param.to_local(), expected)


@pytest.mark.parametrize("attached", [False, True])
def test_each_save_has_the_step_after_which_it_was_called(tmp_path: Path, attached: bool) -> None:
    run_ranks(_train_beside_saves, 2, tmp_path, attached)


def _trained(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
    for layer in [*model, model]:
        fsdp_ext.fully_shard(layer)
    make: Any = OPTIMIZERS[kind.removesuffix(", offloaded")]
    optimizer = make(model.parameters(), lr=0.1)
    if kind.endswith(", offloaded"):
        offload(optimizer, model)
    _step(model, optimizer)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.linspace(-1, 1, 16)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    values = [*model.state_dict().values()]
    # An attached optimizer lists its states in the order of backward.
    states = sorted(optimizer.state_dict()["state"].items())
    values += [value for _, state in states for _, value in sorted(state.items())]
    return [whole(value).clone() if isinstance(value, Tensor) else value for value in values]


def _goes_on(place: Path, kind: str) -> None:
    copy, go_on = CopyGroup.copy, threading.Event()

    def copy_late(group: CopyGroup, source: Snapshot, target: Snapshot) -> None:
        assert threading.current_thread() is threading.main_thread() or go_on.wait(60)
        copy(group, source, target)

    CopyGroup.copy = copy_late
    register_optimizer_step_pre_hook(lambda *_: go_on.set())  # runs before the hook that waits
    model, optimizer = _trained(kind, 0)
    go_on.clear()
    saved = _state_of(model, optimizer)
    saving = checkpoint.async_save(place, model, optimizer)
    _step(model, optimizer)
    after = _state_of(model, optimizer)
    saving.result()
    other = _trained(kind, 1)
    checkpoint.load(place, *other)
    assert_same(_state_of(*other), saved)
    _step(*other)
    assert_same(_state_of(*other), after)


OPTIMIZERS = {"AdamW": torch.optim.AdamW, "Muon": optim.Muon, "torch's Muon": torch.optim.Muon}


@pytest.mark.parametrize("kind", ["AdamW, offloaded", "Muon", "torch's Muon"])
def test_training_goes_on_from_states_of_other_kinds(tmp_path: Path, kind: str) -> None:
    run_ranks(_goes_on, 2, tmp_path, kind, fresh=True)


class Wrapper(torch.optim.Optimizer):
    """Steps another optimizer, and has no hooks of its own, as accelerate's wrapper does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def __getattr__(self, name: str) -> Any:
        if name == "param_groups":
            return self.optimizer.param_groups
        raise AttributeError(name)


def test_an_optimizer_without_hooks_is_copied_during_the_call(
    tmp_path: Path, stopped: Stopped
) -> None:
    model = nn.Linear(2, 2)
    optimizer = Wrapper(torch.optim.AdamW(model.parameters(), lr=1.0))
    expected = model.weight.detach().clone()
    saving = checkpoint.async_save(tmp_path, model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    stopped.go_on.set()
    saving.result()
    assert torch.equal(value_of(tmp_path), expected)
    with pytest.raises(TypeError, match=r"got optimizer= with a Parameter\. Pass an optimizer, or"):
        checkpoint.async_save(tmp_path, model, model.parameters())  # type: ignore[arg-type]


@pytest.mark.parametrize("is_captured", [True, False])
def test_an_optimizer_that_a_cuda_graph_has_captured_is_copied_during_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_captured: bool
) -> None:
    copy, go_on = CopyGroup.copy, threading.Event()

    def copy_late(group: CopyGroup, source: Snapshot, target: Snapshot) -> None:
        assert threading.current_thread() is threading.main_thread() or go_on.wait(60)
        copy(group, source, target)

    monkeypatch.setattr(CopyGroup, "copy", copy_late)
    model = nn.Linear(2, 2)  # plain: no fully_shard watches its optimizer
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 2)).sum().backward()
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_initialized", lambda: True)
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_captured)
        optimizer.step()
    before = model.weight.detach().clone()
    saving = checkpoint.async_save(tmp_path, model, optimizer)
    model.weight.data.add_(1)  # as a replay does, without hooks and versions
    after = model.weight.detach().clone()
    go_on.set()
    saving.result()
    assert torch.equal(value_of(tmp_path), before if is_captured else after)


def _differ(place: Path) -> None:
    """Let only rank 0 be busy, and then only rank 0 know an error."""
    rank = dist.get_rank()
    model = fsdp_ext.fully_shard(nn.Linear(4, 4))
    busy = background.Saving(partial(_wait_for, place / "go on"), None)
    if rank == 0:
        background._running.append(busy)
    with pytest.raises(RuntimeError, match="while the previous checkpoint is still being written"):
        checkpoint.async_save(place, model, if_running="raise")
    (place / "go on").touch()
    background._running.clear()
    failing = background.start(partial(_fail, place), None)
    if rank == 0:
        with pytest.raises(OSError, match="broken"):
            failing.result()
    with pytest.raises(RuntimeError, match=r"the previous checkpoint was not saved: .*broken"):
        checkpoint.async_save(place, model)
    path = checkpoint.async_save(place, model).result()
    assert path.name == "checkpoint-000001"


def _wait_for(path: Path) -> Path:
    while not path.exists():
        time.sleep(0.01)
    return path


def _fail(path: Path) -> Path:
    raise OSError(5, f"{path} is broken")


def _keeps_nothing_alive(place: Path) -> None:
    for asks, fails in itertools.product((True, False), ("", "write", "collect")):
        model = fsdp_ext.fully_shard(nn.Linear(2, 2))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        extra: Any = object() if fails == "collect" else {"step": torch.ones(1)}
        with pytest.MonkeyPatch.context() as patched:
            if fails == "write":
                patched.setattr(disk, "create", _fail)
            saving = checkpoint.async_save(place, model, optimizer, extra)
            saving._thread.join()
        if asks:
            raises = pytest.raises((OSError, TypeError)) if fails else contextlib.nullcontext()
            with raises as caught:
                saving.result()
            if fails:
                place_of_error = {"write": "in _fail", "collect": "in collect"}[fails]
                assert place_of_error in str(caught.value.__cause__)
        copies = [*background._memory.get(model, {}).values()]
        assert len(copies) == (0 if fails == "collect" else 2)
        state = optimizer.state[model.weight]["exp_avg"]
        kept = [model, optimizer, model.weight, state, *copies]
        kept += [each.untyped_storage() for each in (model.weight._local_tensor, *copies)]
        alive = [weakref.ref(each) for each in kept]
        del model, optimizer, state, copies, kept
        gc.collect()
        assert [ref() for ref in alive] == [None] * len(alive), (asks, fails)
        assert len(background._running) == (0 if asks else 1)
        background._running.clear()


def test_a_save_that_has_ended_keeps_nothing_alive(tmp_path: Path) -> None:
    run_ranks(_keeps_nothing_alive, 1, tmp_path)


def test_ranks_that_differ_about_the_previous_save_all_raise(tmp_path: Path) -> None:
    run_ranks(_differ, 2, tmp_path)
