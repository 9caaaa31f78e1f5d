"""The rank launcher: results by rank, and failures that name the rank and say why."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from support.launcher import RanksFailed, run_ranks


def _sum_of_ranks(offset: int) -> tuple[int, int, int]:
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total)


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


def _wait_for_ever() -> None:
    threading.Event().wait()


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


def test_each_rank_of_each_run_is_a_process_of_its_own_with_one_thread() -> None:
    states = run_ranks(_process_id_and_threads, 2) + run_ranks(_process_id_and_threads, 2)
    assert len({process_id for process_id, _ in states} | {os.getpid()}) == 5
    assert {threads for _, threads in states} == {1}


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


def test_a_hang_names_the_ranks_that_had_not_finished_and_shows_where_they_are() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(_collective_while_rank, 3, 1, "hangs", timeout=10)
    head, *accounts = str(failure.value).split("\n\n")
    assert head == "ranks 0, 1, 2 of 3 had not finished after 10 s"
    assert "in _wait_for_ever" in accounts[1]
    assert "in all_reduce" in accounts[0]
    assert "in all_reduce" in accounts[2]
    assert "printed by rank 2" in accounts[2]


def test_a_hang_does_not_name_ranks_that_had_finished() -> None:
    with pytest.raises(RanksFailed, match=r"^ranks 0 of 2 had not finished after 10 s"):
        run_ranks(_hang_alone, 2, timeout=10)


def test_a_result_that_does_not_pickle_is_an_error_of_its_rank() -> None:
    with pytest.raises(RanksFailed, match=r"rank 0 raised(.|\n)*pickle"):
        run_ranks(_collective_while_rank, 1, 0, "returns what does not pickle")


def test_a_rank_that_fails_while_leaving_is_named() -> None:
    with pytest.raises(RanksFailed, match="rank 0 ended with exit code 1 after its result"):
        run_ranks(_without_process_group, 1)


def test_the_next_run_is_unharmed_by_a_failed_one() -> None:
    with pytest.raises(RanksFailed):
        run_ranks(_collective_while_rank, 2, 0, "raises")
    assert run_ranks(_sum_of_ranks, 2, 0) == [(0, 2, 1), (1, 2, 1)]


def test_a_world_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="expects at least one rank but got 0"):
        run_ranks(_own_tensor, 0)
