"""A call of FSDP1 that all ranks have to make, and that one rank does not make, says so."""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fsdp1_parity import BY_BLOCK, make
from support.launcher import run_ranks
from support.models import Stack
from torch.distributed.fsdp import FullStateDictConfig, StateDictType

from fsdp_ext import FullyShardedDataParallel as FSDP

SHORT = datetime.timedelta(seconds=1)
# Much longer than a test may take, so its end is no reason for an error.
LONG = datetime.timedelta(seconds=300)
RANK_0_ONLY = FullStateDictConfig(rank0_only=True)


def wrapped_over(timeout: datetime.timedelta) -> tuple[FSDP, torch.optim.Optimizer]:
    group = dist.new_group(timeout=timeout)
    wrapped = FSDP(make(Stack), process_group=group, auto_wrap_policy=BY_BLOCK)
    FSDP.set_state_dict_type(wrapped, StateDictType.FULL_STATE_DICT, RANK_0_ONLY)
    return wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1)


def summon(wrapped: FSDP, optimizer: torch.optim.Optimizer) -> None:
    with FSDP.summon_full_params(wrapped, writeback=False, rank0_only=True):
        pass


CALLS: dict[str, Callable[[Any, Any], object]] = {
    "state_dict": lambda wrapped, optimizer: wrapped.state_dict(),
    "optim_state_dict": FSDP.optim_state_dict,
    "summon_full_params": summon,
    "apply": lambda wrapped, optimizer: wrapped.apply(lambda module: None),
}


def called_by_rank_0() -> None:
    wrapped, optimizer = wrapped_over(SHORT)
    for name, call in CALLS.items():
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError) as caught:
                call(wrapped, optimizer)
            assert str(caught.value) == (
                f"rank 0 waited 1 s in {name} for ranks [1], which have not called it. All of the "
                f"ranks [0, 1] have to call {name}, also if only rank 0 uses the result."
            )
        dist.barrier()
    for _ in range(2):  # nothing of that is left
        for call in CALLS.values():
            call(wrapped, optimizer)
    state = wrapped.state_dict()
    assert bool(state) == (dist.get_rank() == 0)


def test_a_call_that_only_rank_0_makes_names_the_ranks_that_have_to_make_it() -> None:
    run_ranks(called_by_rank_0, 2)


def called_by_two_of_three() -> None:
    wrapped, optimizer = wrapped_over(SHORT)
    rank = dist.get_rank()
    if rank < 2:
        time.sleep(rank / 4)  # rank 0 gives up before rank 1
        with pytest.raises(RuntimeError, match=r"in state_dict for ranks \[2\], which have not"):
            CALLS["state_dict"](wrapped, optimizer)
    dist.barrier()
    CALLS["state_dict"](wrapped, optimizer)


def test_ranks_that_gave_up_are_not_named_as_missing() -> None:
    run_ranks(called_by_two_of_three, 3)


def two_calls() -> None:
    calls = ("state_dict", "summon_full_params")
    mine, other = calls if dist.get_rank() == 0 else calls[::-1]
    rank = dist.get_rank()
    wrapped, optimizer = wrapped_over(LONG)
    with pytest.raises(RuntimeError) as caught:
        CALLS[mine](wrapped, optimizer)
    assert str(caught.value) == (
        f"rank {rank} called {mine}, and rank {1 - rank} called {other}. Make the same calls with "
        "the same arguments on all ranks, in the same order."
    )
    time.sleep(rank)  # rank 0 looks at what rank 1 does before that has called anything again
    CALLS["state_dict"](wrapped, optimizer)


def test_ranks_that_make_different_calls_learn_it_long_before_the_timeout() -> None:
    run_ranks(two_calls, 2)


def on_rank_0_inside() -> None:
    wrapped, _ = wrapped_over(SHORT)
    with FSDP.summon_full_params(wrapped, writeback=False, rank0_only=True):
        if dist.get_rank() == 0:
            want = make(Stack).state_dict()
            for name, value in wrapped.state_dict().items():
                assert torch.equal(value, want[name])


def test_rank_0_alone_may_save_what_is_summoned() -> None:
    run_ranks(on_rank_0_inside, 2)


def lose_rank_1() -> str:
    wrapped, optimizer = wrapped_over(LONG)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        CALLS["state_dict"](wrapped, optimizer)
    return str(caught.value)


def test_a_rank_that_has_ended_is_named_long_before_the_timeout() -> None:
    (message,) = run_ranks(lose_rank_1, 2, timeout=60.0, lost=[1])
    assert message.startswith("rank 0 waits in state_dict for rank 1 (process "), message
    assert message.endswith("), which has ended. Its last output may say why.")


def clipped_by_rank_0() -> None:
    wrapped, _ = wrapped_over(SHORT)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as caught:
            wrapped.clip_grad_norm_(1.0)
        assert str(caught.value).startswith(
            "rank 0 could not reduce the norm in clip_grad_norm_. All of the ranks [0, 1] have to "
            "do this in the same step, for the same parameters. The backend says: "
        )


def test_the_error_of_a_rank_that_clips_alone_names_the_call() -> None:
    run_ranks(clipped_by_rank_0, 2, fresh=True)  # the group's connection is broken afterwards


def loaded_by_one_rank_after_the_other() -> None:
    wrapped, _ = wrapped_over(SHORT)
    FSDP.set_state_dict_type(wrapped, StateDictType.FULL_STATE_DICT)
    want = {name: value + 1 for name, value in wrapped.state_dict().items()}
    for rank in range(2):
        if dist.get_rank() == rank:
            wrapped.load_state_dict(want)
        dist.barrier()
    got = wrapped.state_dict()
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_a_rank_loads_whole_tensors_without_the_others() -> None:
    run_ranks(loaded_by_one_rank_after_the_other, 2)
