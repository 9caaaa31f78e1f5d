"""A model serves one thread at a time. A second one gets an error and changes nothing."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.launcher import run_ranks
from support.models import DIM, ROWS, Recomputed, Stack
from support.parity import SYSTEM, Case, Record, Sharded, assert_same, load_system
from torch import Tensor

from fsdp_ext.sharding.root import module_changes
from fsdp_ext.sharding.root import root as root_module

CHECKPOINTED = functools.partial(Recomputed, inside=True, around=True, use_reentrant=True)
REFUSED = "A sharded model serves one thread at a time."


def error_in_thread(call: Callable[[], Any]) -> str:
    """Run `call` in a thread of its own and return its error, or ""."""
    errors = [""]

    def run() -> None:
        try:
            call()
        except Exception as error:
            errors[0] = str(error)

    thread = threading.Thread(target=run, name="intruder")
    thread.start()
    thread.join()
    return errors[0]


def sharded(subject: Any = Stack) -> Sharded:
    return Sharded(load_system(SYSTEM), Case("", subject))


def _while_backward_runs(block: Any, call: Callable[[], None]) -> None:
    """Let the next forward of `block` call `call` when backward reaches its output."""

    def forward_hook(module: Any, args: Any, output: Tensor) -> None:
        handle.remove()

        def gradient_hook(gradient: Tensor) -> None:
            call()

        output.register_hook(gradient_hook)

    handle = block.register_forward_hook(forward_hook)


def _train(intrudes: bool) -> tuple[list[Record], dict[str, list[str]]]:
    """Train, with a second thread that tries all ways into the model at all times, or without."""
    run = sharded()
    model, block = run.model, run.model.blocks[1]
    model.blocks[0].requires_grad_(False)
    x = torch.ones(ROWS, DIM)
    errors: dict[str, list[str]] = {}

    def enter(when: str, earlier: Tensor | None = None) -> None:
        if not intrudes:
            return
        ways: list[Callable[[], Any]] = [lambda: model(x)]
        if earlier is not None:
            ways += [
                lambda: block(x),
                block.unshard,
                block.reshard,
                model.state_dict,
                model.reset_iter_state,
                lambda: block.join_empty(x),
                lambda: earlier.backward(retain_graph=True),
            ]
        errors[when] = [error_in_thread(way) for way in ways]

    def intruding(function: Any, when: str) -> Any:
        def intruded(*args: Any, **kwargs: Any) -> Any:
            enter(when)
            return function(*args, **kwargs)

        return intruded

    records = []
    with pytest.MonkeyPatch.context() as patch:
        for step in range(4):
            if step == 0:
                name = "lanes_of"
                patch.setattr(root_module, name, intruding(root_module.lanes_of, "set-up"))
            if step == 2:  # the root is made anew
                patch.setattr(module_changes, "watch", intruding(module_changes.watch, "rebuild"))
                model.blocks[0].requires_grad_(True)
            run.optimizer.zero_grad()
            earlier = run.loss(step, 1)
            patch.undo()
            _while_backward_runs(block, lambda s=step, e=earlier: enter(f"backward {s}", e))
            hook = block.register_forward_hook(
                lambda *_, s=step, e=earlier: enter(f"forward {s}", e)
            )
            loss = run.loss(step)
            hook.remove()
            loss.backward()
            run.optimizer.step()
            records.append(run.recorded([loss]))
    return records, errors


def _with_and_without_intruder() -> dict[str, list[str]]:
    expected, _ = _train(intrudes=False)
    got, errors = _train(intrudes=True)
    for step, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert_same(f"step {step}", mine, theirs)
    return errors


def test_a_second_thread_gets_an_error_and_changes_nothing() -> None:
    for errors in run_ranks(_with_and_without_intruder, 2):
        assert len(errors) == 2 + 2 * 4
        for when, found in errors.items():
            use = {
                "set-up": "is preparing it for a forward",
                "rebuild": "is in a forward",
            }.get(when, f"is in a {when.split()[0]}")
            for error in found:
                assert use in error, (when, found)
                assert (
                    "The thread 'intruder' entered this model while thread 'MainThread' " in error
                )
                assert REFUSED in error


def _legitimate() -> None:
    """Compare threads that take turns, and threads with a model each, with one thread."""

    def step(run: Sharded, number: int, anywhere: Callable[[Callable[[], Any]], Any]) -> Record:
        losses: list[Tensor] = []
        run.optimizer.zero_grad()
        anywhere(lambda: losses.append(run.loss(number)))
        anywhere(lambda: losses[0].backward())

        def evaluate() -> None:
            with torch.no_grad():
                losses.append(run.loss(number, 1))

        anywhere(evaluate)
        anywhere(run.model.state_dict)
        run.optimizer.step()
        return run.recorded(losses)

    def elsewhere(call: Callable[[], Any]) -> None:
        assert error_in_thread(call) == ""

    for subject in (Stack, CHECKPOINTED):
        alone, in_turns = sharded(subject), sharded(subject)
        for number in range(3):
            expected = step(alone, number, lambda call: call())
            assert_same(f"step {number}", step(in_turns, number, elsewhere), expected)


def test_threads_may_take_turns() -> None:
    run_ranks(_legitimate, 2)


def _left_in_forward() -> list[str]:
    """A thread ends in the middle of forward, past all hooks, and the next one trains on."""
    run = sharded()
    run.backward(run.loss(0))

    def end(*_: Any) -> None:
        raise SystemExit

    hook = run.model.blocks[1].register_forward_hook(end)
    errors = [error_in_thread(lambda: run.loss(1))]
    hook.remove()
    run.optimizer.zero_grad()
    run.backward(run.loss(0))
    return errors


def test_a_thread_that_ended_in_forward_is_no_longer_in_it() -> None:
    assert run_ranks(_left_in_forward, 2) == [[""], [""]]


def _two_models() -> list[str]:
    """Each thread trains a model of its own."""
    runs = [sharded(), sharded()]
    for run in runs:
        run.backward(run.loss(0))  # one by one: PyTorch makes one process group at a time
    errors: list[str] = []

    def train(run: Sharded) -> None:
        for number in range(3):
            run.optimizer.zero_grad()
            run.backward(run.loss(number))
            run.optimizer.step()

    threads = [
        threading.Thread(target=lambda run=run: errors.append(error_in_thread(lambda: train(run))))
        for run in runs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not any(errors):
        assert_same("the models", runs[0].recorded(), runs[1].recorded())
    return errors


def test_two_threads_may_have_a_model_each() -> None:
    assert run_ranks(_two_models, 1) == [["", ""]]
