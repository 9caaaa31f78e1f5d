"""Ranks on two hosts: a cable that fails, a host whose rank dies, ranks that differ.

The hosts are namespaces of this machine (bench/harness/hosts.py), which need root.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bench import predict
from bench.harness import hosts, ranks, runner
from bench.harness.hosts import Hosts
from fsdp_ext import _C, describe_buckets, fully_shard, profile
from fsdp_ext.comm import transports
from fsdp_ext.comm.lanes import lanes_of

HOST = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
SHORT = datetime.timedelta(seconds=2)
# Much longer than a test may take, so its end is no reason for an error.
LONG = datetime.timedelta(seconds=300)
LAYERS, DIM = 4, 64

needs_hosts = pytest.mark.skipif(bool(reason := hosts.why_not()), reason=reason)
pytestmark = needs_hosts


def _sharded(timeout: datetime.timedelta, transport: str | None = None) -> Any:
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timeout), "cpu")
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(LAYERS)])
    for module in [*model, model]:
        fully_shard(module, mesh=mesh, transport=transport, bucket_bytes=0)
    return model


def _train(model: Any, steps: int = 2) -> None:
    for _ in range(steps):
        model(torch.ones(2, DIM)).sum().backward()


def _error_of(work: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as caught:
        work()
    return str(caught.value)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail_in_step(act: Callable[[], None], timeout: datetime.timedelta) -> str:
    """Train, until rank 1 acts in the middle of a forward."""
    model = _sharded(timeout)
    _train(model)
    assert profile(model).transport == "process_group"
    dist.barrier()
    if dist.get_rank() == 1:
        model[1].register_forward_pre_hook(lambda *_: act())
    return _error_of(lambda: _train(model))


def _assert_names_the_other_host(message: str, rank: int) -> None:
    other = 1 - rank
    assert re.match(
        rf"rank {rank}: the [\w-]+ of unit '\d' failed over the process group: ", message
    )
    assert re.search(rf"rank {other} \(process \d+ on host{other}\)", message), message


@pytest.mark.parametrize(
    "fault", [hosts.cut_cable, pytest.param(hosts.stall_cable, marks=pytest.mark.exhaustive)]
)
def test_a_cable_that_fails_in_a_step_is_an_error_that_names_the_peer(fault: Any) -> None:
    with Hosts() as pair:
        messages = run_ranks(_fail_in_step, 2, fault, SHORT, timeout=30.0, hosts=pair)
    for rank, message in enumerate(messages):
        _assert_names_the_other_host(message, rank)


@pytest.mark.exhaustive
def test_a_rank_that_is_killed_on_the_other_host_is_named_long_before_the_timeout() -> None:
    with Hosts() as pair:
        (message,) = run_ranks(_fail_in_step, 2, _kill, LONG, timeout=30.0, lost=[1], hosts=pair)
    _assert_names_the_other_host(message, 0)


def _lose_the_last_rank() -> str:
    model = _sharded(SHORT)
    _train(model)
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        model[1].register_forward_pre_hook(lambda *_: _kill())
    return _error_of(lambda: _train(model))


@pytest.mark.exhaustive
def test_ranks_on_the_other_host_learn_which_rank_has_ended_from_a_rank_beside_it() -> None:
    with Hosts() as pair:
        *far, near = run_ranks(_lose_the_last_rank, 4, timeout=30.0, lost=[3], hosts=pair)
    assert re.search(r"rank 3 \(process \d+\) has ended", near), near
    for message in far:
        found = r"rank 2 was in .* and found that rank 3 \(process \d+ on host1\) has ended"
        assert re.search(found, message), message


def _fail_before_first_forward(act: Callable[[], None]) -> str:
    model = _sharded(SHORT)
    dist.barrier()
    if dist.get_rank() == 1:
        act()
    return _error_of(lambda: _train(model))


@pytest.mark.exhaustive
def test_a_cable_that_goes_down_before_the_first_forward_is_an_error_that_names_the_peer() -> None:
    with Hosts() as pair:
        served, other = run_ranks(
            _fail_before_first_forward, 2, hosts.cut_cable, timeout=30.0, hosts=pair
        )
    assert served.startswith("rank 0 waited 2 s for rank 1 to begin the first forward")
    assert re.match(
        r"rank 1: the process group's store has not answered for \d+ s\. In most jobs rank 0", other
    )


# - Ranks of two hosts that differ


def _run_in_another_order() -> str:
    model = _sharded(LONG)
    _train(model)
    if dist.get_rank() == 1:
        model[1], model[2] = model[2], model[1]
    return _error_of(lambda: _train(model))


@pytest.mark.exhaustive
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_of_two_hosts_that_run_units_in_different_orders_name_each_other(
    world_size: int,
) -> None:
    with Hosts() as pair:
        messages = run_ranks(_run_in_another_order, world_size, timeout=30.0, hosts=pair)
    # Either lane may meet the other order first. The backend's own collectives have no tags, so
    # with them the exchange at the end of backward finds the difference.
    for message in messages:
        sentence = message.split("\n")[0]
        assert re.search("[Rr]anks (. and . )?issued different collectives", sentence), message
        named = re.findall("the (?:all-gather|reduce-scatter) of unit '(.)'", sentence)
        assert sorted(named) == ["1", "2"], message


def _ask_for_different_transports() -> str:
    model = _sharded(LONG, "process_group" if dist.get_rank() else None)
    return _error_of(lambda: _train(model))


@pytest.mark.exhaustive
def test_ranks_of_two_hosts_with_different_settings_name_each_other() -> None:
    with Hosts() as pair:
        messages = run_ranks(_ask_for_different_transports, 2, timeout=30.0, hosts=pair)
    assert [message.partition(". ")[0] for message in messages] == [
        "rank 0 asks for transport the default, and rank 1 for process_group",
        "rank 1 asks for transport process_group, and rank 0 for the default",
    ]


# - Which ranks share memory


def _choose() -> tuple[str, list[str]]:
    """Return the default transport of this place, and what was said about it."""
    model = _sharded(LONG)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _train(model)
    said = [str(w.message) for w in caught if str(w.message).startswith("fsdp_ext")]
    return profile(model).transport, said


@pytest.mark.exhaustive
def test_ranks_of_two_machines_use_the_process_group_without_a_warning() -> None:
    with Hosts() as pair:
        chosen = run_ranks(_choose, 2, timeout=30.0, hosts=pair)
    assert chosen == [("process_group", [])] * 2


@pytest.mark.exhaustive
def test_ranks_in_two_containers_of_a_machine_are_told_how_to_share_memory() -> None:
    with Hosts(one_machine=True) as pair:
        chosen = run_ranks(_choose, 2, timeout=30.0, hosts=pair)
    for transport, (warning,) in chosen:
        assert transport == "process_group"
        assert re.search(r"but process \d+ on host1 is in another one of this machine", warning)
        assert "in containers that share their PID namespace" in warning


def _choose_with_another_proc() -> tuple[str, list[str]]:
    # As in a PID namespace of one's own making: /proc is still that of the machine.
    subprocess.run(["umount", "/proc"], check=True)
    return _choose()


@pytest.mark.exhaustive
def test_ranks_whose_proc_shows_other_processes_are_told_so() -> None:
    with Hosts(one_machine=True) as pair:
        chosen = run_ranks(_choose_with_another_proc, 2, timeout=30.0, hosts=pair)
    for transport, (warning,) in chosen:
        assert transport == "process_group"
        assert "Shared memory needs the /proc of this PID namespace" in warning


# - Two ranks on each host


@dataclass(frozen=True)
class Spanning:
    """What one rank finds on two hosts, or on one."""

    digest: str  # of the bits of all results
    hosts: list[int]
    description: str
    gathered_bytes: int  # of one all-gather, per rank
    sent_bytes: list[int]  # by the host, in that all-gather: by default, and over gloo alone
    limited: list[str]  # how tc describes the host's end of the cable, after each of RATES


def _digest(results: list[torch.Tensor]) -> str:
    bits = [result.contiguous().view(torch.uint8).numpy().tobytes() for result in results]
    return hashlib.sha256(b"".join(bits)).hexdigest()


def _collect(lanes: _C.Lanes, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    whole = torch.randn(ranks * numel, generator=generator).to(dtype)
    total, gathered = torch.empty(numel, dtype=dtype), torch.empty_like(whole)
    lanes.reduce_scatter(whole, total)
    lanes.all_gather(total, gathered)
    return [total, gathered]


def _sent_by_gather(lanes: _C.Lanes, nbytes: int) -> int:
    part = torch.ones(nbytes, dtype=torch.uint8)
    whole = torch.zeros(nbytes * dist.get_world_size(), dtype=torch.uint8)
    dist.barrier()
    before = hosts.sent_bytes()
    dist.barrier()
    lanes.all_gather(part, whole)
    dist.barrier()
    assert whole.min() == 1
    return hosts.sent_bytes() - before


def _limited(rate: str) -> str:
    ranks.set_rate(rate)
    shown = subprocess.check_output(["tc", "qdisc", "show", "dev", hosts.INTERFACE], text=True)
    dist.barrier()
    return shown


def _span(is_on_hosts: bool) -> Spanning:
    model = _sharded(LONG)
    optimizer = torch.optim.Adam(model.parameters())
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        model(torch.randn(2, DIM)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    lanes: _C.Lanes = model._fsdp_ext_unit.root.lanes
    results = [parameter.to_local().detach() for parameter in model.parameters()]
    for dtype in (torch.float32, torch.bfloat16):
        for numel in (1, 1000, 100_003):
            results += _collect(lanes, numel, dtype)
    nbytes = 2_000_000
    sent, limited = [], []
    if is_on_hosts:
        alone = lanes_of(dist.new_group(timeout=LONG), HOST, "process_group")
        assert alone.hosts == []
        sent = [_sent_by_gather(either, nbytes) for either in (lanes, alone)]
        os.environ["LOCAL_RANK"] = str(dist.get_rank() % 2)
        limited = [_limited(rate) for rate in hosts.RATES]
    text = describe_buckets(model)
    return Spanning(_digest(results), lanes.hosts, text, nbytes, sent, limited)


@pytest.fixture(scope="module")
def spanning() -> list[Spanning]:
    with Hosts() as pair:
        return run_ranks(_span, 4, True, timeout=60.0, hosts=pair)


def test_results_over_two_hosts_equal_those_of_shared_memory(spanning: list[Spanning]) -> None:
    on_one_host = run_ranks(_span, 4, False, timeout=60.0)
    assert all("over shared_memory" in found.description for found in on_one_host)
    assert [found.digest for found in spanning] == [found.digest for found in on_one_host]


def test_ranks_agree_on_which_of_them_share_a_host_and_show_it(spanning: list[Spanning]) -> None:
    for found in spanning:
        assert found.hosts == [0, 0, 1, 1]
        shown = "process_group between 2 hosts, with shared memory on each (ranks 0-1; 2-3), which"
        assert shown in found.description


def test_a_gathered_shard_crosses_between_two_hosts_once(spanning: list[Spanning]) -> None:
    for found in spanning:
        shards = 2 * found.gathered_bytes  # those of a host
        by_default, over_gloo = found.sent_bytes
        assert shards <= by_default < 1.5 * shards
        assert over_gloo >= 2 * shards


def test_ranks_of_a_host_set_the_rate_of_its_cable_once(spanning: list[Spanning]) -> None:
    for found in spanning:
        shown = [re.search(r"tbf .* rate (\w+)", text) for text in found.limited]
        assert [each and each[1].lower() for each in shown] == ["1gbit", "4gbit", "10gbit", None]


@pytest.mark.exhaustive
def test_a_cable_that_fails_is_an_error_on_all_ranks_of_both_hosts() -> None:
    with Hosts() as pair:
        messages = run_ranks(_fail_in_step, 4, hosts.cut_cable, SHORT, timeout=30.0, hosts=pair)
    for rank, message in enumerate(messages):
        beside = f"[{rank // 2 * 2}{rank // 2 * 2 + 1}]"  # a rank passes on what it learns
        assert re.match(rf"rank {beside}: the .* failed over the process group: ", message), message


def _choose_without_memory_on_the_last_rank() -> tuple[list[int], list[str]]:
    model = _sharded(LONG)
    if dist.get_rank() < dist.get_world_size() - 1:
        endpoint = contextlib.nullcontext()
    else:
        error = RuntimeError("Shared memory is used up.")
        endpoint = mock.patch.object(transports._C, "SharedMemoryEndpoint", side_effect=error)
    with endpoint, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _train(model)
    said = [str(w.message) for w in caught if str(w.message).startswith("fsdp_ext")]
    return model._fsdp_ext_unit.root.lanes.hosts, said


@pytest.mark.exhaustive
def test_no_ranks_share_memory_if_one_cannot_and_all_are_told_why() -> None:
    with Hosts() as pair:
        chosen = run_ranks(_choose_without_memory_on_the_last_rank, 4, timeout=30.0, hosts=pair)
    for shared, (warning,) in chosen:
        assert shared == []
        assert "slower than shared memory: rank 3: Shared memory is used up." in warning


# - The hosts themselves

_HOLD = """
import sys
from bench.harness.hosts import Hosts
with Hosts() as pair:
    print(*pair.pids, flush=True)
    sys.stdin.read()
"""


def test_hosts_end_with_the_process_that_made_them_however_it_ends() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD], cwd=ROOT, stdin=-1, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        pids = [int(pid) for pid in holder.stdout.readline().split()]
        ends = [os.pidfd_open(pid) for pid in pids]  # readable when the process has ended
        holder.kill()
        waiting = set(ends)
        while waiting:
            ended, _, _ = select.select(list(waiting), [], [], 30.0)
            assert ended, "a host has outlived the process that made it"
            waiting -= set(ended)
        for end in ends:
            os.close(end)


@pytest.mark.parametrize("rate", ["0gbit", "4", "fast", "4gbit "])
def test_what_is_no_rate_is_refused(rate: str) -> None:
    with pytest.raises(ValueError, match="a rate is 'unlimited' or a number with"):
        hosts.bytes_per_second(rate)


def _bench(*options: str) -> list[str]:
    return [sys.executable, "-m", "bench", "overlap", *options]


def _has_process(mark: str) -> bool:
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark.encode() in file.read_bytes():
                return True
    return False


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_benchmark_leaves_no_process(number: int, tmp_path: Path) -> None:
    file = str(tmp_path / "rows.json")
    command = _bench("--hosts", "2", "--rate", "4gbit", "--json", file)
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as bench:
        assert bench.stdout is not None
        assert bench.stdout.readline().startswith("overlap: torch")  # rank 0 runs
        bench.send_signal(number)
        bench.stdout.read()  # until no process has it open any more
        assert bench.wait(60) == (-number if number == signal.SIGKILL else 130)
    assert not _has_process(file)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate", "4gbit"], "--rate is that of the cable between two hosts; add --hosts 2"),
        (["--hosts", "2", "--rate", "fast"], "--rate: a rate is 'unlimited' or a number with"),
        (["--hosts", "2", "--ranks", "3"], "--hosts 2 needs an even number of --ranks, not 3"),
    ],
)
def test_options_that_contradict_hosts_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        runner.run("predict", predict, options)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_without_the_right_to_make_namespaces_one_sentence_says_what_is_needed() -> None:
    with mock.patch.object(hosts, "_SEPARATE", ["--net", "--no-such-namespace"]):
        reason = hosts.why_not()
    assert "need namespaces, for which this process needs root (CAP_SYS_ADMIN" in reason
    assert "\n" not in reason


@pytest.mark.exhaustive
def test_overlap_between_two_hosts_counts_the_bytes_of_each_system(tmp_path: Path) -> None:
    file = tmp_path / "overlap.json"
    options = ["--hosts", "2", "--rate", "4gbit", "unlimited", "--quick"]
    result = subprocess.run(
        _bench(*options, "--json", str(file)),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    document = json.loads(file.read_text())
    assert document["benchmark"] == "overlap on 2 hosts"
    rows = document["rows"]
    assert [row["rate"] for row in rows] == ["4gbit"] * 5 + ["unlimited"] * 5
    for row in rows:
        assert "error" not in row
        if row["system"] == "unsharded":
            assert row["sent_bytes"] < 10_000  # what keeps the ranks together
        else:
            assert row["sent_bytes"] >= row["least_bytes"] > 1_000_000
