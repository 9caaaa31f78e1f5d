"""Ranks that end: the others say which one, at once, and in a plain sentence."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import re
import signal
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.attempts import run_attempts
from support.launcher import run_ranks
from support.models import DIM, DeliberateFailure, Fragile
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_ext import fully_shard
from fsdp_ext.checkpoint.ranks import Ranks
from fsdp_ext.comm import rendezvous, roll_call
from fsdp_ext.comm.lanes import lanes_of
from fsdp_ext.comm.rendezvous import Rendezvous
from fsdp_ext.comm.store_calls import plain_text

# Much longer than a test may take, so its end is no reason for an error.
LONG = datetime.timedelta(seconds=300)


def _mesh(timeout: datetime.timedelta = LONG) -> DeviceMesh:
    return DeviceMesh.from_group(dist.new_group(timeout=timeout), "cpu")


def _sharded(transport: str, mesh: DeviceMesh | None = None) -> Any:
    mesh = mesh or _mesh()
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for module in [*model, model]:
        fully_shard(module, mesh=mesh, transport=transport, bucket_bytes=0)
    return model


def _error_of_step(model: Any) -> str:
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 8)).sum().backward()
    return str(caught.value)


def _without_record(message: str, rank: int) -> str:
    """Return an error without its last sentence, which says where the flight record is."""
    plain, sentence, path = message.partition(f" The flight record of rank {rank} is in ")
    assert sentence, message
    assert path.endswith(f"rank_{rank}.")
    return plain


def _end(how: str) -> None:
    if how == "exits":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


def _end_before_forward(transport: str, how: str) -> str:
    model = _sharded(transport)
    if dist.get_rank() == 1:
        _end(how)
    return _error_of_step(model)


@pytest.mark.parametrize(
    ("transport", "how"), [("shared_memory", "is killed"), ("process_group", "exits")]
)
def test_a_rank_that_ends_before_its_first_forward_is_named_at_once(
    transport: str, how: str
) -> None:
    (message,) = run_ranks(_end_before_forward, 2, transport, how, timeout=30.0, lost=[1])
    assert message.startswith("rank 0: rank 1 (process ")
    assert "has ended before or during its first forward" in message


def _end_after_connecting() -> str:
    mesh = _mesh()
    model = _sharded("shared_memory", mesh)
    if dist.get_rank() == 1:
        lanes_of(mesh.get_group(), torch.device("cpu"), "shared_memory")
        _end("is killed")
    return _error_of_step(model)


def test_a_rank_that_ends_before_the_first_comparison_is_named_at_once() -> None:
    (message,) = run_ranks(_end_after_connecting, 2, timeout=30.0, lost=[1])
    assert re.fullmatch(
        r"rank 0: rank 1 \(process \d+\) has ended before or during the comparison of "
        r"settings\. Its last output may say why\.",
        _without_record(message, 0),
    ), message


def _end_in_training(transport: str) -> str:
    model = _sharded(transport)
    for _ in range(2):  # the first iterations also compare what the ranks do
        model(torch.ones(2, 8)).sum().backward()
    dist.barrier()
    if dist.get_rank() == 1:
        _end("is killed")
    return _error_of_step(model)


def test_a_rank_that_is_killed_during_training_is_named_at_once() -> None:
    what = "the all-gather of unit '0'"
    (message,) = run_ranks(_end_in_training, 2, "shared_memory", timeout=30.0, lost=[1])
    assert message.startswith("rank 0: rank 1 (process ")
    assert _without_record(message, 0).endswith(
        f"has ended before or during {what}. Its last output may say why."
    )
    (message,) = run_ranks(_end_in_training, 2, "process_group", timeout=30.0, lost=[1])
    start = f"rank 0: {what} failed over the process group: "
    # Then comes gloo's reason, of several, without the position in its source file.
    assert re.fullmatch(
        rf"{re.escape(start)}[A-Z][\w\[\]:. ]+[^.]\. Rank 1 \(process \d+\) has ended\. "
        r"Its last output may say why\.",
        _without_record(message, 0),
    ), message


def _take_another_branch(transport: str, timeout: datetime.timedelta, waits: bool) -> str:
    """Rank 1 skips a backward and begins the next forward. Rank 0's backward gathers nothing.

    Without `waits`, rank 1 only issues the forward's first all-gather.
    """
    model: Any = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)])
    mesh = _mesh(timeout)
    settings: Any = {"bucket_bytes": 0, "reshard_after_forward": False}
    for module in [*model, model]:
        fully_shard(module, mesh=mesh, transport=transport, **settings)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
    lanes = lanes_of(mesh.get_group(), torch.device("cpu"), transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(2, 8)).sum()
    if dist.get_rank() == 1:
        optimizer.step()

    def issue_only() -> None:
        model[0].reshard()
        model[0].unshard(async_op=True)
        while True:
            lanes.check()

    go_on = [loss.backward, (lambda: model(torch.ones(2, 8))) if waits else issue_only]
    with pytest.raises(RuntimeError) as caught:
        go_on[dist.get_rank()]()
    return str(caught.value)


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_ranks_that_take_different_branches_say_so_long_before_the_timeout(transport: str) -> None:
    messages = run_ranks(_take_another_branch, 2, transport, LONG, True, timeout=30.0, fresh=True)
    for rank, message in enumerate(messages):
        plain = _without_record(message, rank)
        assert plain == (
            "ranks 0 and 1 wait for each other, so neither can go on. Now rank 0 is in the "
            "reduce-scatter of unit '4', rank 1 is in the all-gather of unit '0'. Run the same "
            "forwards and backwards in the same order on every rank."
        )


def test_ranks_whose_process_group_times_out_say_what_each_was_in() -> None:
    timeout = datetime.timedelta(seconds=2)
    messages = run_ranks(
        _take_another_branch, 2, "process_group", timeout, False, timeout=30.0, fresh=True
    )
    for rank, message in enumerate(messages):
        assert message.startswith(f"rank {rank}: the ")
        assert (
            "When they failed, rank 0 was in the reduce-scatter of unit '4', rank 1 was in the "
            "all-gather of unit '0'. A rank may hang" in message
        )


def _fragile(transport: str) -> Any:
    mesh = _mesh()
    model: Any = Fragile()
    for module in [*model.units(), model]:
        fully_shard(module, mesh=mesh, transport=transport, bucket_bytes=0)
    return model


def _go_on_after_an_early_failure(model: Any) -> None:
    """Rank 1 fails early in backward, catches that and trains on. Rank 0 does not fail itself."""
    batch = torch.ones(2, DIM)
    model(batch).sum().backward()
    fails = dist.get_rank() == 1
    model.failure = "backward" if fails else None
    loss = model(batch).sum()
    with pytest.raises(DeliberateFailure) if fails else contextlib.nullcontext():
        loss.backward()
    model.failure = None
    for _ in range(3):
        model(batch).sum().backward()


def _step_after_an_early_failure(transport: str) -> None:
    failed = _fragile(transport)
    optimizer = torch.optim.SGD(failed.parameters(), lr=0.1)
    for step in (lambda: _go_on_after_an_early_failure(failed), optimizer.step):
        with pytest.raises(RuntimeError, match=r"wait for each other|different collectives"):
            step()
    plain = nn.Linear(8, 8)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    other = _sharded(transport)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(2):
        other(torch.ones(2, 8)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_a_caught_failure_is_found_long_before_the_timeout_and_other_models_train_on(
    transport: str,
) -> None:
    run_ranks(_step_after_an_early_failure, 2, transport, timeout=60.0, fresh=True)


def _fail_in_one_shard_group(transport: str) -> None:
    rank = dist.get_rank()
    of_ranks = [dist.new_group(ranks, timeout=LONG) for ranks in ([0, 2], [1, 3], [0, 1], [2, 3])]
    groups = [of_ranks[rank % 2], of_ranks[2 + rank // 2]]
    numbers, names = torch.arange(4).view(2, 2), ("replicate", "shard")
    mesh = DeviceMesh.from_group(groups, "cpu", mesh=numbers, mesh_dim_names=names)
    model, of_same_ranks = _sharded(transport, mesh), _sharded(transport, mesh["shard"])
    for each in (model, of_same_ranks):
        each(torch.ones(2, 8)).sum().backward()

    def train() -> None:
        for _ in range(3):
            loss = model(torch.ones(2, 8)).sum()
            if rank != 3:
                loss.backward()

    for use in (train, lambda: of_same_ranks(torch.ones(2, 8)).sum().backward()):
        with pytest.raises(RuntimeError, match=r"ranks 2 and 3 wait|different collectives"):
            use()


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_a_failure_in_one_shard_group_ends_the_others_long_before_the_timeout(
    transport: str,
) -> None:
    run_ranks(_fail_in_one_shard_group, 4, transport, timeout=30.0, fresh=True)


def _delete_after_a_failure(transport: str) -> None:
    model: Any = nn.Sequential(*[nn.Linear(32, 32) for _ in range(3)])
    mesh = _mesh()
    for module in [*model, model]:
        fully_shard(module, mesh=mesh, transport=transport)
    batch = torch.ones(2, 32)
    for _ in range(2):
        model(batch).sum().backward()
    loss = model(batch).sum()
    message = ""
    try:  # pytest.raises would keep the model alive
        loss.backward() if dist.get_rank() == 0 else model(batch)
    except RuntimeError as error:
        message = str(error)
    assert "different collectives" in message
    del model, loss, module
    gc.collect()
    dist.barrier()  # an exiting rank would end the waits of the others


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_after_a_failure_the_model_is_deleted_long_before_the_timeout(transport: str) -> None:
    run_ranks(_delete_after_a_failure, 2, transport, timeout=60.0, fresh=True)


# - What the store has


def test_a_restarted_job_reads_nothing_that_its_first_forward_left_in_the_store() -> None:
    assert run_attempts("forward") == ["torch.Size([1, 8])"] * 2


def test_a_restarted_job_does_not_read_the_verdict_of_an_earlier_deadlock() -> None:
    assert run_attempts("deadlock") == ["torch.Size([1, 8])"] * 2


def test_a_restarted_job_does_not_count_calls_of_an_earlier_attempt() -> None:
    said = ["new 0", "new 1"]
    assert run_attempts("calls") == [str((said, True)), str((said, False))]


class _DeletesLate:
    """A store that deletes an offer after rank 0 has read it again, and after 0.4 s in any case."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._before = store.get("offer/0").decode()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def delete_key(self, key: str) -> bool:
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline and not self._has_next_offer():
            pass
        time.sleep(0.1)
        return self._store.delete_key(key)

    def _has_next_offer(self) -> bool:
        # Store.get would wait while there is no offer; this returns `before` then.
        now = self._store.compare_set("offer/0", self._before, self._before)
        return now.decode() != self._before


def _connect_twice() -> list[list[bytes]]:
    group = dist.new_group()
    offers = []
    for offer in (b"first", b"second"):
        meeting = Rendezvous(group, offer, datetime.timedelta(seconds=10))
        if dist.get_rank() == 1 and offer == b"first":
            meeting._store = _DeletesLate(meeting._store)  # type: ignore[assignment]
        meeting.exchange("a test", offer)
        offers.append(meeting.offers)
    return offers


def test_a_late_rank_leaves_no_offer_to_the_next_rendezvous() -> None:
    expected = [[b"first", b"first"], [b"second", b"second"]]
    assert run_ranks(_connect_twice, 2) == [expected, expected]


def _keys_after_each_rendezvous() -> list[int]:
    group = dist.new_group()
    store: Any = rendezvous.store_of(group)
    counts = []
    for _ in range(3):
        Rendezvous(group, b"", datetime.timedelta(seconds=10)).exchange("a test", b"")
        dist.barrier(group)
        counts.append(store.num_keys())
        dist.barrier(group)
    return counts


def test_a_rendezvous_leaves_no_keys_in_the_store() -> None:
    for first, *later in run_ranks(_keys_after_each_rendezvous, 3):
        assert later == [first, first]


def _asks_while_ranks_come(ranks: int) -> int:
    """Rank 0 is early, and one more rank comes between its looks. Returns the keys it asks."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        group = dist.group.WORLD
        assert group is not None
        meeting = Rendezvous(group, b"", LONG)
        meeting.ranks = list(range(ranks))
        coming: Any = _Coming(meeting._store, ranks)
        meeting._store = coming
        with mock.patch.object(rendezvous, "first_look", return_value=LONG.total_seconds()):
            meeting._exchange("values", b"a value")
        return int(coming.asked)
    finally:
        dist.destroy_process_group()


class _Coming:
    """A store to which one more rank writes whenever this one has looked."""

    def __init__(self, store: Any, ranks: int) -> None:
        self._store = store
        self._ranks = ranks
        self._next = 1
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        self.asked += len(keys)
        found: bool = self._store.check(keys)
        if self._next < self._ranks:
            self._store.set(f"values/{self._next}", b"a value".hex())
            self._next += 1
            if self._store.add("values/count", 1) == self._ranks:
                self._store.set("values/all", "")
        return found


def test_a_look_asks_for_one_key_while_ranks_come_one_by_one() -> None:
    assert _asks_while_ranks_come(20) == 20


class _Counting:
    """A store that counts its calls."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self.store, name)


def _requests_of_a_late_exchange(ranks: int) -> int:
    """Rank 0 of many ranks is the last to write its value. This process writes the others, too."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        group = dist.group.WORLD
        assert group is not None
        meeting = Rendezvous(group, b"", LONG)
        meeting.ranks = list(range(ranks))
        for index in range(1, ranks):
            meeting._store.set(f"values/{index}", b"a value".hex())
            meeting._store.add("values/count", 1)
        counting: Any = _Counting(meeting._store)
        meeting._store = counting
        assert meeting._exchange("values", b"a value") == [b"a value"] * ranks
        return int(counting.calls)
    finally:
        dist.destroy_process_group()


def test_values_of_all_ranks_are_read_by_as_many_requests_whatever_the_number_of_ranks() -> None:
    assert [_requests_of_a_late_exchange(ranks) for ranks in (2, 500)] == [6, 6]


class _Broken:
    """A store whose calls do not return before `released` is set, and then raise torch's error."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> None:
            self.released.wait()
            raise dist.DistNetworkError("Broken pipe")

        return call


def _errors_of_a_broken_store() -> list[str]:
    timeout = datetime.timedelta(seconds=0.1)
    group = dist.new_group(timeout=timeout)
    broken: Any = _Broken()
    ranks = Ranks(group, timeout)
    ranks._store, ranks._has_met = broken, True
    meeting = mock.patch.object(roll_call, "meet", return_value=broken)
    messages = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as of_ranks:
            ranks.agree("a save", "", list)
        with meeting, pytest.raises(RuntimeError) as of_roll_call:
            roll_call.call_roll({group: torch.device("cpu")}, "a call")
        messages += [str(of_ranks.value), str(of_roll_call.value)]
        broken.released.set()
    return messages


def test_a_store_that_hangs_or_has_ended_is_named_by_all_that_wait_in_it() -> None:
    for rank, said in enumerate(run_ranks(_errors_of_a_broken_store, 2, timeout=60.0)):
        for what, silent, lost in zip(("a save", "a call"), said[:2], said[2:], strict=True):
            assert f"rank {rank} in {what}: the process group's store has not answered" in silent
            assert (
                f"rank {rank} in {what} cannot reach the process group's store any more: Broken "
                "pipe. The process that served it, often rank 0, has ended." in lost
            )


def _other_version() -> str:
    if dist.get_rank() == 1:
        rendezvous.VERSION = "0.0.1"
    model = _sharded("process_group" if dist.get_rank() else "shared_memory")
    return _error_of_step(model)


def test_ranks_with_different_versions_name_both() -> None:
    messages = run_ranks(_other_version, 2, timeout=30.0, fresh=True)
    mine, ending = rendezvous.VERSION, "Install one version on all ranks."
    assert messages == [
        f"rank 0 runs fsdp_ext {mine} and rank 1 runs fsdp_ext 0.0.1. {ending}",
        f"rank 1 runs fsdp_ext 0.0.1 and rank 0 runs fsdp_ext {mine}. {ending}",
    ]


@pytest.mark.parametrize("entry", ["no hexadecimal number", "", "ab" * 20, "ab" * 300, "\u00e9"])
def test_something_else_in_the_store_is_an_error(entry: str) -> None:
    """Without another rank: the store has its offer already."""
    store = dist.HashStore()
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        group = dist.group.WORLD
        assert group is not None
        in_store = dist.distributed_c10d._get_process_group_store(group)
        in_store.set("offer/1", entry)
        in_store.add("offer/count", 1)
        with (
            mock.patch.object(dist, "get_process_group_ranks", return_value=[0, 1]),
            mock.patch.object(rendezvous, "meet", return_value=in_store),
            pytest.raises(RuntimeError, match=r"rank 1 .*(Use a store of its own|of another)"),
        ):
            Rendezvous(group, b"", LONG)
    finally:
        dist.destroy_process_group()


def test_an_error_of_torch_loses_its_stack() -> None:
    error = RuntimeError(
        "[../gloo/pair.cc:534] Connection closed [127.0.0.1]:80.\nException raised from f at a.cpp"
    )
    assert plain_text(error) == "Connection closed [127.0.0.1]:80"
    assert plain_text(RuntimeError()) == "RuntimeError"
