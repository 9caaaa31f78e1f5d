"""The launcher returns results by rank, names ranks that fail, and keeps calls apart."""

from __future__ import annotations

import io
import logging
import os
import random
import re
import resource
import signal
import sys
import threading
import warnings
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from support.launcher import RanksFailed, run_ranks
from support.matrix import exhaustive
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_ext.comm import lanes
from fsdp_ext.comm.lanes import lanes_of
from fsdp_ext.comm.rendezvous import Rendezvous
from fsdp_ext.sharding.params import ownership


def _sum_of_ranks(offset: int) -> tuple[int, int, int]:
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total)


def _visible_gpus() -> tuple[str | None, int]:
    return os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()


def test_neither_tests_nor_their_ranks_on_the_host_see_gpus_by_default() -> None:
    if os.environ.get("FSDP_EXT_TEST_NEEDS_GPU") != "1":
        assert _visible_gpus() == ("", 0)
    assert run_ranks(_visible_gpus, 1) == [("", 0)]


def _own_tensor() -> torch.Tensor:
    return torch.full((3,), float(dist.get_rank()))


def _process_id_and_threads() -> tuple[int, int]:
    return os.getpid(), torch.get_num_threads()


def _collective_while_rank(culprit: int, misfortune: str) -> None:
    if dist.get_rank() == culprit:
        if misfortune == "raises":
            raise ValueError("the culprit's own words")
        if misfortune == "exits":
            os._exit(3)
        if misfortune == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if misfortune == "returns what does not pickle":
            return threading.Lock()  # type: ignore[return-value]
        if misfortune == "hangs":
            _wait_for_ever()
    print(f"printed by rank {dist.get_rank()}")
    dist.all_reduce(torch.zeros(1))


def _own_rank_unless(culprit: int) -> int:
    if dist.get_rank() == culprit:
        os._exit(3)
    return dist.get_rank()


def _wait_for_ever() -> None:
    threading.Event().wait()


def _start_ranks(world_size: int) -> None:
    """Have processes that the next call need not start, so that its short timeout is enough."""
    run_ranks(_own_tensor, world_size)


def _hang_alone() -> None:
    if dist.get_rank() == 0:
        _wait_for_ever()


def _without_process_group() -> None:
    dist.destroy_process_group()  # so that the launcher's own call to it fails


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_back_by_rank(world_size: int) -> None:
    total = sum(range(world_size)) + 10 * world_size
    results = run_ranks(_sum_of_ranks, world_size, 10)
    assert results == [(rank, world_size, total) for rank in range(world_size)]


def test_tensors_come_back_as_values() -> None:
    first, second = run_ranks(_own_tensor, 2)
    assert torch.equal(first, torch.zeros(3))
    assert torch.equal(second, torch.ones(3))


def test_calls_with_as_many_ranks_share_one_process_a_rank() -> None:
    first, second = (run_ranks(_process_id_and_threads, 2) for _ in range(2))
    assert first == second
    assert len({process_id for process_id, _ in first} | {os.getpid()}) == 3
    assert {threads for _, threads in first} == {1}


def test_a_fresh_call_has_processes_that_no_other_call_has() -> None:
    calls = [run_ranks(_process_id_and_threads, 2, fresh=fresh) for fresh in (False, True, True)]
    assert len({process_id for states in calls for process_id, _ in states}) == 6


def test_a_rank_that_raises_is_named_with_its_traceback_and_its_peers_are_not() -> None:
    with pytest.raises(RanksFailed, match="the culprit's own words") as failure:
        run_ranks(_collective_while_rank, 3, 1, "raises")
    message = str(failure.value)
    assert "rank 1 raised" in message
    assert "in _collective_while_rank" in message
    assert "rank 0 raised" not in message
    assert "rank 2 raised" not in message


def test_a_rank_that_exits_is_named_first_with_its_exit_code() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(_collective_while_rank, 2, 1, "exits")
    first_account = str(failure.value).split("\n\n")[1]
    assert first_account.startswith("rank 1 ended with exit code 3 before it had a result")


def test_a_rank_that_is_killed_is_named_with_its_signal() -> None:
    with pytest.raises(RanksFailed, match="rank 0 ended by SIGKILL"):
        run_ranks(_collective_while_rank, 2, 0, "is killed")


def test_a_rank_that_is_to_end_is_no_failure() -> None:
    assert run_ranks(_own_rank_unless, 3, 1, lost=[1]) == [0, 2]


def test_a_rank_that_was_to_end_but_has_a_result_is_a_failure() -> None:
    with pytest.raises(RanksFailed, match="rank 1 was to end without a result, but has one"):
        run_ranks(_own_rank_unless, 2, 5, lost=[1])


def test_a_hang_names_the_ranks_that_had_not_finished_and_shows_where_they_are() -> None:
    _start_ranks(3)
    with pytest.raises(RanksFailed) as failure:
        run_ranks(_collective_while_rank, 3, 1, "hangs", timeout=2)
    head, *accounts = str(failure.value).split("\n\n")
    assert head == "ranks 0, 1, 2 of 3 had not finished after 2 s"
    assert "in _wait_for_ever" in accounts[1]
    assert "in all_reduce" in accounts[0]
    assert "in all_reduce" in accounts[2]
    assert "printed by rank 2" in accounts[2]


@pytest.mark.exhaustive
def test_a_hang_does_not_name_ranks_that_had_finished() -> None:
    _start_ranks(2)
    with pytest.raises(RanksFailed, match=r"^ranks 0 of 2 had not finished after 2 s"):
        run_ranks(_hang_alone, 2, timeout=2)


def test_a_result_that_does_not_pickle_is_an_error_of_its_rank() -> None:
    with pytest.raises(RanksFailed, match=r"rank 0 raised(.|\n)*pickle"):
        run_ranks(_collective_while_rank, 1, 0, "returns what does not pickle")


def test_a_rank_that_fails_while_leaving_is_named() -> None:
    with pytest.raises(RanksFailed, match="rank 0 ended with exit code 1 after its result"):
        run_ranks(_without_process_group, 1)


@pytest.mark.parametrize("misfortune", ["raises", *exhaustive("exits", "is killed", "hangs")])
def test_the_call_after_a_failed_one_has_new_processes_on_all_ranks(misfortune: str) -> None:
    before = run_ranks(_process_id_and_threads, 2)
    with pytest.raises(RanksFailed):
        run_ranks(_collective_while_rank, 2, 0, misfortune, timeout=2)
    after = run_ranks(_process_id_and_threads, 2)
    assert not {process_id for process_id, _ in before} & {process_id for process_id, _ in after}
    assert run_ranks(_sum_of_ranks, 2, 0) == [(0, 2, 1), (1, 2, 1)]


def test_a_failed_call_leaves_processes_of_other_numbers_of_ranks_alone() -> None:
    before = run_ranks(_process_id_and_threads, 1)
    with pytest.raises(RanksFailed):
        run_ranks(_collective_while_rank, 2, 0, "raises")
    assert run_ranks(_process_id_and_threads, 1) == before


def test_a_failure_shows_the_output_of_its_own_call_alone() -> None:
    run_ranks(_collective_while_rank, 1, -1, "nothing")
    with pytest.raises(RanksFailed) as failure:
        run_ranks(_collective_while_rank, 1, 0, "raises")
    assert "printed by rank 0" not in str(failure.value)


# - What a call changes


def _state() -> dict[str, Any]:
    """Return what a call finds that an earlier one may have changed."""
    return {
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "path": list(sys.path),
        "streams": (id(sys.stdout), id(sys.stderr)),
        "filters": repr(warnings.filters),
        "logging": (logging.getLogger("fsdp_ext").level, logging.getLogger("fsdp_ext").handlers),
        "threads": torch.get_num_threads(),
        "dtype": torch.ones(1).dtype,
        "device": torch.ones(1).device,
        "gradients": torch.is_grad_enabled(),
        "random numbers": (random.random(), torch.rand(1).item(), numpy.random.rand()),
        "overwritten parameters": set(ownership._overwritten),
        "meshes": init_device_mesh("cpu", (1,)).get_group().group_name,
    }


def _change_all() -> None:
    os.environ["FSDP_EXT_TRANSPORT"] = "process_group"
    os.chdir("/")
    sys.path.insert(0, "/")
    sys.stdout = io.StringIO()
    warnings.simplefilter("error")
    logging.getLogger("fsdp_ext").setLevel(logging.INFO)
    logging.getLogger("fsdp_ext").addHandler(logging.NullHandler())
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    ownership._overwritten.add(1)


def test_what_a_call_changes_is_put_back_before_the_next() -> None:
    run_ranks(_state, 1)  # the first call imports what it needs
    (before,) = run_ranks(_state, 1)
    run_ranks(_change_all, 1)
    (after,) = run_ranks(_state, 1)
    changed = {key: (value, after[key]) for key, value in before.items() if after[key] != value}
    assert not changed


def _warn() -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        _warn_once()
    return len(caught)


def _warn_once() -> None:
    warnings.warn("shown once", stacklevel=1)


def test_a_warning_that_a_call_has_shown_is_shown_in_the_next() -> None:
    assert run_ranks(_warn, 1) == run_ranks(_warn, 1) == [1]


def _sharded_over(ranks: list[int]) -> list[float]:
    """Train a step over a subgroup, whose mesh compares equal to that of another call."""
    group = dist.new_group(ranks)
    weight = distribute_tensor(torch.ones(4), DeviceMesh.from_group(group, "cpu"), [Shard(0)])
    return (weight + weight).full_tensor().tolist()


def test_tensors_of_a_call_have_the_groups_of_that_call() -> None:
    for _ in range(2):
        assert run_ranks(_sharded_over, 2, [0, 1]) == [[2.0] * 4] * 2


_held: list[Any] = []


def _leave(what: str) -> None:
    if what == "threads":
        threading.Thread(target=_wait_for_ever, daemon=True).start()
    elif what == "signal handlers":
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    elif what == "resource limits":
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    elif what == "sys.getprofile()":
        sys.setprofile(lambda *_: None)
    elif what == "fsdp_ext.comm.lanes.Rendezvous":
        lanes.Rendezvous = object  # type: ignore[assignment, misc]
    elif what == "fsdp_ext.comm.rendezvous.Rendezvous.exchange":
        Rendezvous.exchange = _state  # type: ignore[assignment, method-assign]
    else:
        group = dist.group.WORLD
        assert group is not None
        _held.append((group, lanes_of(group, torch.device("cpu"))))


@pytest.mark.parametrize(
    "what",
    [
        "threads",
        "signal handlers",
        "resource limits",
        "sys.getprofile()",
        "fsdp_ext.comm.lanes.Rendezvous",
        "fsdp_ext.comm.rendezvous.Rendezvous.exchange",
        "process groups",
    ],
)
def test_a_call_that_leaves_what_is_not_put_back_fails_by_its_name(what: str) -> None:
    with pytest.raises(RanksFailed, match=f"the call.*{re.escape(what)}"):
        run_ranks(_leave, 1, what)


def test_a_fresh_call_may_leave_anything_behind() -> None:
    run_ranks(_leave, 1, "resource limits", fresh=True)


def test_a_world_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got 0 ranks\. Pass at least 1\."):
        run_ranks(_own_tensor, 0)
