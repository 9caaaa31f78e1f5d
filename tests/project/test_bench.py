"""Benchmarks run, count no wrong elements, and keep their rows. No test asserts a speed."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.matrix import exhaustive
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from bench import __main__ as bench
from bench import checkpoint, host_overhead, memory, muon, optimizer, overlap, pack, predict, tune
from bench.harness import ranks, runner
from bench.harness.options import UsageError, count_of_ranks, parser_of
from bench.harness.timing import INDISTINCT, Timing
from bench.models import overlap_hosts
from bench.models.overlap_rows import exposed_at_least
from bench.models.overlap_systems import OURS, Case, Opened, Shape
from bench.models.training import OF_ONE_RANK, SMALL, run_in_turns
from fsdp_ext import _C, Link
from fsdp_ext.checkpoint.background import CopyGroup

pytestmark = pytest.mark.timeout(960)
ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    "buckets",
    "collectives",
    "faults",
    "health",
    "host_overhead",
    "memory",
    "overlap",
    "pack",
    "predict",
    "scaling",
}
NAMES |= {"checkpoint", "muon", "optimizer", "step", "tune"}


def _bench(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,  # of a busy machine
        check=False,
        env={**os.environ, **(environment or {})},
    )


def run_bench(
    name: str, json_file: Path, *options: str, device: str
) -> tuple[str, list[dict[str, Any]]]:
    """Run a benchmark quickly. Return what it printed and its rows."""
    result = _bench(name, "--quick", "--device", device, "--json", str(json_file), *options)
    assert result.returncode == 0, result.stdout + result.stderr
    document = json.loads(json_file.read_text())
    assert not document["interrupted"]
    assert {"torch", "python", "cpu", "cores", "commit"} <= document["environment"].keys()
    return result.stdout, document["rows"]


def _run(name: str, json_file: Path, *options: str) -> tuple[str, list[dict[str, Any]]]:
    return run_bench(name, json_file, *options, device="cpu")


# - What each measures


@pytest.mark.exhaustive
def test_packing_counts_no_wrong_element(tmp_path: Path) -> None:
    printed, rows = _run("pack", tmp_path / "pack.json")
    assert "#wrong" in printed
    assert {row["operation"].split()[0] for row in rows} == {"pack", "unpack", "cast"}
    assert all(row["wrong"] == 0 and row["of_copy"] > 0 for row in rows)


def test_the_peer_of_packing_does_not_divide_since_fsdp2s_collective_does() -> None:
    operators = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            operators.append(func)
            return func(*args, **(kwargs or {}))

    bf16, fp32 = torch.bfloat16, torch.float32
    operation = pack.pack_operation(
        _C.Packer(gpu=None), [(16, 8), (5,)], 8, bf16, fp32, torch.device("cpu")
    )
    with Seen():
        operation.peer()
    assert operators == [torch.ops.aten._chunk_cat.out]
    operation.ours()
    assert operation.count_wrong() == 0


@pytest.mark.exhaustive
def test_all_systems_reach_the_same_loss(tmp_path: Path) -> None:
    _, rows = _run("step", tmp_path / "step.json")
    assert [row["system"] for row in rows] == list(OF_ONE_RANK)
    assert not [row["error"] for row in rows if "error" in row]
    assert len({round(row["loss"], 5) for row in rows}) == 1


@pytest.mark.exhaustive
def test_all_systems_reach_the_same_loss_on_two_ranks(tmp_path: Path) -> None:
    _, rows = _run("step", tmp_path / "step.json", "--ranks", "2")
    kept = {"ours, kept gathered", "FSDP2, kept gathered"}
    ours = {"ours", "ours over gloo", "ours, fsdp_ext.optim"}
    peers = {"unsharded", "FSDP2", "FSDP2, defaults", "FSDP1", "DDP"}
    assert {row["system"] for row in rows} == ours | peers | kept
    assert not [row["error"] for row in rows if "error" in row]
    assert all(row["ranks"] == 2 and row["of_unsharded"] > 0 for row in rows)
    transports = {row["system"]: row["transport"] for row in rows}
    assert transports["ours"] == "shared_memory"
    assert transports["ours over gloo"] == "process_group (gloo)"
    assert transports["FSDP2"] == "gloo"
    settings = {row["system"]: row["settings"] for row in rows}
    assert all(settings.values())
    assert "asynchronous unshards" in settings["FSDP2"]
    # FSDP2's settings that this torch has are used, and listed.
    assert (", 2 reduce-scatter inputs" in settings["FSDP2"]) == hasattr(
        FSDPModule, "set_reduce_scatter_max_input_buffers"
    )
    assert settings["FSDP2, defaults"] == "defaults"
    assert len({round(row["loss"], 5) for row in rows}) == 1  # all ranks have the same tokens


@pytest.mark.exhaustive
def test_systems_that_shard_hybridly_reach_the_same_loss(tmp_path: Path) -> None:
    printed, rows = _run("step", tmp_path / "step.json", "--ranks", "4", "--replicas", "2")
    assert "4 ranks in 2 shard groups of 2" in printed
    assert not [row["error"] for row in rows if "error" in row]
    assert {"ours", "FSDP2", "FSDP1"} < {row["system"] for row in rows}
    assert all((row["ranks"], row["replicas"]) == (4, 2) for row in rows)
    assert len({round(row["loss"], 4) for row in rows}) == 1


@pytest.mark.exhaustive
def test_compiled_blocks_reach_the_same_loss_and_are_not_compiled_again(tmp_path: Path) -> None:
    printed, rows = _run("step", tmp_path / "step.json", "--compile")
    assert "eager" in printed  # narrow columns wrap their headers
    assert not [row["error"] for row in rows if "error" in row]
    compiled = [row for row in rows if row["system"].endswith(", compiled blocks")]
    assert [row["system"].split(",")[0] for row in compiled] == ["unsharded", "ours", "FSDP2"]
    assert all(row["graphs"] > 0 and row["recompiled"] == 0 for row in compiled)
    assert len({round(row["loss"], 4) for row in rows}) == 1


@pytest.mark.exhaustive
def test_offloaded_systems_reach_the_same_loss(tmp_path: Path) -> None:
    _, rows = _run("step", tmp_path / "step.json", "--ranks", "2", "--offload")
    offloaded = {row["system"] for row in rows if row["system"].endswith(", offloaded")}
    assert offloaded == {"ours, offloaded", "ours over gloo, offloaded", "FSDP2, offloaded"}
    assert not [row["error"] for row in rows if "error" in row]
    assert len({round(row["loss"], 4) for row in rows}) == 1


@pytest.mark.exhaustive
def test_checkpoints_are_timed_beside_those_of_torch(tmp_path: Path) -> None:
    printed, rows = _run("checkpoint", tmp_path / "checkpoint.json")
    calls = {(row["system"], row["action"]) for row in rows}
    assert {system for system, action in calls if action == "save"} == {
        "plain",
        "fsdp_ext",
        "DCP",
        "torch.save",
    }
    assert {system for system, action in calls if action == "async_save"} == {
        "fsdp_ext",
        "DCP, thread",
        "DCP, process",
        "DCP, async staging",
    }
    assert {("fsdp_ext", "load by more ranks"), ("DCP", "load by more ranks")} < calls
    assert all(row["blocked_us"]["median"] <= row["total_us"]["median"] for row in rows)
    assert all(row["of_plain"] == 1 for row in rows if row["system"] == "plain")
    slowed = {row["action"] for row in rows if row["slows_step_us"]}
    assert slowed == {"async_save"}
    assert "of plain" in printed


def test_the_first_round_of_checkpoints_counts_only_for_memory() -> None:
    taken = [(9.0, 9.0, 7.0), (1.0, 2.0, 3.0), (1.0, 2.0, 4.0)]
    rounds = checkpoint.Rounds(12, steps=[9.0, 3.0, 3.0])
    for action in ("load", "export", "save", "async_save"):
        rounds.taken["plain", action] = taken
    rounds.slowed["plain", "async_save"] = [9.0, 0.5, 0.5]
    *_, saved, row = checkpoint.as_rows(rounds, torch.device("cpu"))
    assert row["memory_bytes"] == 7
    medians = [row[key]["median"] for key in (*checkpoint.FIGURES, "step_us")]
    assert medians == [1e6, 0.5e6, 2e6, 3e6]
    assert saved["slows_step_us"] is None
    assert row["bytes_per_second"] == 6


def test_checkpoints_show_no_time_that_may_be_zero() -> None:
    figures = {"median": 2e3, "low": -1e3, "high": 4e3}
    assert checkpoint.in_milliseconds(figures) == f"{INDISTINCT} (-1 to 4)"
    assert checkpoint.in_milliseconds(figures | {"low": 1e3}) == "2 (1 to 4)"
    assert checkpoint.in_milliseconds(None) == ""


@pytest.mark.parametrize("has_backward", [False, True])
def test_a_saves_figures_contain_what_follows_it(has_backward: bool) -> None:
    training = mock.Mock()
    save = training.call
    save.return_value = checkpoint.Saving(training.complete, training.staging)
    with mock.patch.object(dist, "all_reduce"):
        checkpoint.timed(save, training, has_backward=has_backward)
    order = [name for name, *_ in training.mock_calls if name != "finish"]
    assert order == ["call", *["backward"] * has_backward, "staging", "step", "complete"]


def _blocked_by_slow_copies(directory: Path, delay: float) -> list[float]:
    cpu, group = torch.device("cpu"), dist.group.WORLD
    assert group is not None
    training = checkpoint.Training(SMALL, group, cpu)

    def in_threads(copy: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any, **keywords: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                time.sleep(delay)
            return copy(*arguments, **keywords)

        return slow

    blocked = []
    with (
        mock.patch.object(CopyGroup, "copy", in_threads(CopyGroup.copy)),
        mock.patch.object(DefaultStager, "_stage", in_threads(DefaultStager._stage)),
    ):
        for save in (
            checkpoint.save_ours_async,
            partial(checkpoint.save_dcp_async, {"async_stager": checkpoint.stager_for(cpu)}),
        ):
            training.backward()
            call = partial(save, training, directory / str(len(blocked)))
            blocked.append(checkpoint.timed(call, training)[0])
    return blocked


def test_a_saves_blocked_time_contains_copies_that_the_step_waits_for(tmp_path: Path) -> None:
    delay = 0.2
    [blocked] = run_ranks(_blocked_by_slow_copies, 1, tmp_path, delay)
    assert min(blocked) >= delay  # the step waits until the thread has slept and copied


@pytest.mark.exhaustive
def test_the_cost_of_checked_steps_is_measured(tmp_path: Path) -> None:
    printed, rows = _run("health", tmp_path / "health.json", "--ranks", "1")
    *steps, verify = rows
    assert [row["system"] for row in steps] == ["no checks", "not checked", "checked", "health"]
    assert [row["check_every"] for row in steps] == [None, 10**9, 1, None]
    assert all(row["step_us"]["median"] > 0 for row in steps)
    assert (verify["system"], verify["seconds"] > 0) == ("verify", True)
    assert "verify takes" in printed
    assert "one checked step and one call of health in 100 steps add" in printed


def test_systems_take_turns_in_an_order_that_changes_and_that_ranks_share() -> None:
    def order_of(seed: int) -> list[str]:
        turns: list[str] = []

        def system(name: str) -> Any:
            def timed_step() -> tuple[float, float, torch.Tensor]:
                turns.append(name)
                return 2.0, 1.0, torch.zeros(())

            return SimpleNamespace(
                timed_step=timed_step, parameters=1, sharded=SimpleNamespace(settings="")
            )

        systems = {name: system(name) for name in "abcd"}
        results = run_in_turns(systems, 6, random.Random(seed))
        assert all(result["seconds"] == [2.0] * 6 for result in results.values())
        return turns

    initialized = dist.is_initialized()
    if not initialized:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        turns = order_of(0)
        assert turns == order_of(0)
    finally:
        if not initialized:
            dist.destroy_process_group()
    rounds = [turns[begin : begin + 4] for begin in range(0, len(turns), 4)]
    assert all(sorted(each) == list("abcd") for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1


@pytest.mark.exhaustive
def test_a_peer_that_cannot_run_is_listed_with_its_error(tmp_path: Path) -> None:
    printed, rows = _run("step", tmp_path / "step.json", "--peers")
    of_peers = {row["system"]: row for row in rows[len(OF_ONE_RANK) :]}
    assert set(of_peers) == {"DeepSpeed ZeRO-3", "Megatron-FSDP", "FairScale FSDP"}
    for name, row in of_peers.items():
        module = name.lower().split()[0].replace("-", "_")
        if importlib.util.find_spec(module) is None:
            assert row["error"].startswith("ModuleNotFoundError")
        else:
            assert row.get("error") or row["loss"] == pytest.approx(rows[0]["loss"], abs=1e-4)
        assert name in printed


def _steps_beside_deepspeed() -> tuple[set[tuple[str, str]], int]:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    stepped: list[nn.Parameter] = []

    def cpu_adam(params: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        stepped.extend(params)
        return torch.optim.AdamW(params, **options)

    deepspeed: Any = SimpleNamespace(DeepSpeedCPUAdam=cpu_adam)
    with (
        mock.patch.dict(os.environ),
        mock.patch.dict(sys.modules, {"deepspeed.ops.adam": deepspeed}),
    ):
        calls = optimizer.systems(2, 8, torch.device("cpu"), peers=True)
    before = [param.detach().clone() for param in stepped]
    calls[optimizer.DEEPSPEED, "step"]()
    assert not any(map(torch.equal, before, stepped))
    return {*calls}, sum(param.numel() for param in stepped)


def test_deepspeed_steps_flat_shards_beside_the_other_optimizers() -> None:
    [(calls, elements)] = run_ranks(_steps_beside_deepspeed, 1)
    assert {(optimizer.DEEPSPEED, "step"), (optimizer.FLAT, "step")} <= calls
    assert elements == 2 * optimizer.LAYERS * (8 + 1) * 8 // 2  # of one of two ranks


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is not None, reason="DeepSpeed is installed"
)
def test_a_row_of_deepspeed_needs_deepspeed() -> None:
    result = _bench("optimizer", "--quick", "--device", "cpu", "--peers")
    assert result.returncode == 2
    assert "make bench-peers installs it" in result.stderr


def _overheads_of_steps() -> list[dict[str, Any]]:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    parts = (host_overhead.STEP, host_overhead.UNCLIPPED)
    cpu = torch.device("cpu")
    return [row for part in parts for row in host_overhead.measure_size(1, 2, 4, cpu, part)]


def test_whole_steps_have_a_host_overhead_for_each_system() -> None:
    [rows] = run_ranks(_overheads_of_steps, 1)
    assert not [row["error"] for row in rows if "error" in row]
    assert [(row["part"], row["system"]) for row in rows] == [
        ("step", "ours"),
        ("step", "FSDP2"),
        ("step, not clipped", "ours"),
        ("step, not clipped", "ours, attached"),
        ("step, not clipped", "FSDP2"),
    ]
    assert all(row["unsharded_us"]["median"] > 0 for row in rows)


# Columns of an overlap row that do not depend on the link.
REAL_OF_OVERLAP = {
    *("sweep", "system", "transport", "link", "layers", "dim", "batch", "ratio", "prefetch"),
    *("gap_us", "ahead"),
    *("bucket_bytes", "default_buckets", "buckets", "collectives", "compute_us"),
    "wires",
}
REAL_OF_LEDGER = {"ledger_compute_us", "ledger_waits_without_wire_us"}
LEDGER_OF_OVERLAP = REAL_OF_LEDGER | {
    f"ledger_simulated_{figure}"
    for figure in ("compute_us", "wire_us", "exposed_us", "hidden", "slowdown", "causes_us")
}


@pytest.mark.exhaustive
def test_every_figure_of_the_simulated_overlap_says_so(tmp_path: Path) -> None:
    picture = tmp_path / "overlap.png"
    printed, rows = _run("overlap", tmp_path / "overlap.json", "--plot", str(picture))
    links = "ours has a link for gathers and one for reductions, each of the full bandwidth"
    assert f"64 simulated ranks; {links}" in printed
    assert [(row["sweep"], row["system"]) for row in rows] == [
        ("system", "ours"),
        ("system", "FSDP2"),
    ]
    assert not [row["error"] for row in rows if "error" in row]
    ours, fsdp2 = rows
    for row in rows:
        assert row["transport"] == "simulated"
        assert "simulated" in row["link"]
        assert row["simulated_hidden_at_most"] <= 1
        ratio = row["compute_over_simulated_wire"]
        assert row["simulated_hidden_at_most_on_one_link"] == min(1, ratio)
    # Every column that depends on the link says so in its name or its value.
    assert {name for name in ours if "simulated" not in name} == REAL_OF_OVERLAP | REAL_OF_LEDGER
    assert {name for name in fsdp2 if "simulated" not in name} == REAL_OF_OVERLAP
    assert {name for name in ours if name.startswith("ledger")} == LEDGER_OF_OVERLAP
    assert ours["link"] == fsdp2["link"]
    assert ours["collectives"] == 3 * 32 - 2  # backward reuses the last two
    assert fsdp2["collectives"] == 3 * 32
    assert (ours["wires"], fsdp2["wires"]) == (2, 1)
    assert picture.stat().st_size > 0


def test_the_legend_says_who_waits_on_the_host_and_who_has_how_many_links() -> None:
    systems = {"ours": 2, "FSDP2": 1, "FSDP1": 1, "FSDP2, prefetch": 2}
    assert [overlap.legend_of(*each) for each in systems.items()] == [
        "ours: 2 links",
        "FSDP2: 1 link, waits on the host",
        "FSDP1: 1 link, waits on the host",
        "FSDP2, prefetch: 2 links, waits on the host for reductions",
    ]


@pytest.mark.exhaustive
def test_a_sweep_has_a_row_for_each_setting(tmp_path: Path) -> None:
    options = ("--sweep", "bucket", "--world-size", "8")
    _, rows = _run("overlap", tmp_path / "overlap.json", *options)
    assert {(row["sweep"], row["simulated_ranks"], row["ratio"]) for row in rows} == {
        ("bucket", 8, 1.0)
    }
    unit = 128 * 128 * 4
    assert [row["default_buckets"] for row in rows] == [False] * 5 + [True]
    known = {row["bucket_bytes"]: row for row in rows}
    buckets = {0: 128, unit // 2: 128, 2 * unit: 64, 4 * unit: 32, 16 * unit: 8}
    assert {nbytes: known[nbytes]["buckets"] for nbytes in buckets} == buckets
    for row in rows:
        assert row["collectives"] == 3 * row["buckets"] - 2


def test_two_hosts_overlap_by_the_measured_ratio_and_each_batch_once() -> None:
    assert overlap_hosts.batches_for([6.6, 3.1, 1.4, 0.6, -2.0]) == [7, 3, 1, None, None]
    row = {"rate": "4gbit", "system": "unsharded", "of_unsharded": 1.0}
    row |= {"asked_ratio": 4.0, "measured_ratio": 3.16}
    row["step_us"] = {"median": 1.0, "low": 1.0, "high": 1.0}
    assert overlap_hosts.cells(row)[0] == "3.16 (4), unsharded"
    with mock.patch.object(overlap_hosts, "picture") as picture:
        overlap_hosts.plot([row], "")
    panel = picture().__enter__()
    panel.plot.assert_called_once_with((3.16,), (1.0,), marker="o", label="unsharded")


@pytest.mark.exhaustive
def test_a_gap_may_hide_the_first_gather(tmp_path: Path) -> None:
    _, rows = _run("overlap", tmp_path / "overlap.json", "--sweep", "ahead")
    assert [(row["ahead"], row["gap_us"], row["collectives"]) for row in rows] == [
        (False, 5000, 94),
        (True, 5000, 94),
    ]


@pytest.mark.parametrize(("ahead", "exposed"), [(False, 2), (True, 1)])
def test_a_gap_hides_the_first_gather_that_is_ahead(ahead: bool, exposed: int) -> None:
    shape, nbytes = Shape(32, 1024, 64), 1 << 20
    sent = [("all_gather", nbytes)] * 62 + [("reduce_scatter", nbytes)] * 32
    system = Opened(mock.Mock(), mock.Mock(), sent, wires=2, buckets=[nbytes] * shape.layers)
    link = Link("simulated", alpha=0.0, beta=nbytes / 1e-3)
    wire = len(sent) * 1e-3
    case = Case(OURS, shape, 64, 2.0, gap=5e-3, ahead=ahead)
    assert exposed_at_least(case, link, system, 2 * wire, wire) == pytest.approx(exposed * 1e-3)


@pytest.mark.exhaustive
def test_an_overlap_that_latencies_rule_out_is_a_row_with_its_error(tmp_path: Path) -> None:
    json_file = tmp_path / "overlap.json"
    options = ("--quick", "--device", "cpu", "--sweep", "ratio", "--ratio", "1e6")
    result = _bench("overlap", *options, "--json", str(json_file))
    assert result.returncode == 0, result.stderr  # the benchmark itself works
    said = "not possible here: latencies alone (94 x 20 us) take 1/1e+06 of the compute"
    assert said in " ".join(result.stdout.split())  # wrapped in a cell
    (row,) = json.loads(json_file.read_text())["rows"]
    assert row["error"].startswith(said)
    assert row["error"].endswith("give a smaller --ratio")


@pytest.mark.exhaustive
def test_buckets_take_at_least_what_the_cost_model_says(tmp_path: Path) -> None:
    printed, rows = _run("buckets", tmp_path / "buckets.json")
    assert "64 ranks (simulated)" in printed
    stacks = [row for row in rows if "shape" in row]
    for row in stacks:
        gathers_and_reductions = row["collectives"]
        assert gathers_and_reductions == 3 * row["buckets"] - 2
        wire = row["simulated_communication_ms"] / row["predicted_communication_ms"]
        assert wire > 0.9  # a simulated link is never faster than its model
    alone, _, default = [row for row in stacks if row["shape"].startswith("200 x")]
    assert (alone["buckets"], default["buckets"]) == (200, 7)
    whole, cut = [row for row in rows if "unit_mb" in row]
    assert whole["message_mb"] is None
    assert cut["buffers_mb"] < whole["buffers_mb"]


@pytest.mark.exhaustive
def test_the_choice_of_tune_is_compared_with_a_sweep(tmp_path: Path) -> None:
    printed, (row,) = _run("tune", tmp_path / "tune.json")
    assert row["transport"] == "simulated"
    # All times and ratios are of a simulated link. Their names say so.
    times = {"chosen_ms", "predicted_ms", "best_ms", "default_ms", "worst_ms", "of_best"}
    named = {f"simulated_{name}" for name in times}
    assert row.keys() == named | {
        *("model", "transport", "ranks", "chosen", "best", "settings", "sweep", "finalists")
    }
    sweep = {each["setting"]: each["simulated_ms"] for each in row["sweep"]}
    assert len(sweep) == row["settings"]
    last = {each["setting"]: each["simulated_ms"] for each in row["finalists"]}
    assert row["simulated_chosen_ms"] == last[row["chosen"]]
    assert row["simulated_best_ms"] == last[row["best"]]
    assert row["simulated_worst_ms"] == last[max(sweep, key=lambda setting: sweep[setting])]
    fastest = sorted(sweep, key=lambda setting: sweep[setting])[:3]
    assert row["simulated_best_ms"] == min(last[setting] for setting in fastest)
    ratio = row["simulated_chosen_ms"] / row["simulated_best_ms"]
    assert row["simulated_of_best"] == pytest.approx(ratio)
    assert f"{int(ratio <= 1.03)} of 1 within 3% of the best (simulated)" in printed


@pytest.mark.exhaustive
def test_steps_are_predicted_for_both_transports(tmp_path: Path) -> None:
    printed, rows = _run("predict", tmp_path / "predict.json")
    names = [row["model"] for row in rows if row["transport"] == "shared_memory"]
    assert [row["model"] for row in rows] == 2 * names
    assert {row["transport"] for row in rows} == {"shared_memory", "process_group"}
    assert {row["model"] for row in rows if row["fitted"]} == {names[0]}
    for row in rows:
        assert row.keys() == {
            *("model", "transport", "ranks", "fitted", "parameters", "buckets", "compute_ms"),
            *("step_ms", "predicted_ms", "predicted_exposed_ms", "off", "contention", "in_steps"),
            *("copies_ns_a_byte", "link"),
        }
        assert row["ranks"] == 2
        assert row["off"] == pytest.approx(row["predicted_ms"] / row["step_ms"] - 1)
        assert 0 <= row["contention"] <= 1
        assert 0 <= row["predicted_exposed_ms"] < row["predicted_ms"]
    assert printed.count(f" of {len(names) - 1} predictions within 10%; the farthest is ") == 2


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([0.99, 1.01], "2 of 2 within 3% of the best (simulated); the farthest is b, +1.0%, 2.0 "),
        ([1.05, 1.01], "1 of 2 within 3% of the best (simulated); the farthest is a, +5.0%, 2.0 "),
    ],
)
def test_tune_says_how_far_it_is_from_its_bound(ratios: list[float], said: str) -> None:
    rows = [
        {"model": name, "transport": "simulated", "simulated_of_best": ratio}
        for name, ratio in zip("ab", ratios, strict=True)
    ]
    where = "inside" if max(ratios) <= 1.03 else "outside"
    assert tune.within(rows) == f"{said}percentage points {where}"


@pytest.mark.parametrize(
    ("offs", "said"),
    [
        ([0.02, -0.04], "2 of 2 predictions within 10%; the farthest is b, -4.0%, 6.0 "),
        ([-0.15, 0.04], "1 of 2 predictions within 10%; the farthest is a, -15.0%, 5.0 "),
    ],
)
def test_predict_says_how_far_it_is_from_its_bound(offs: list[float], said: str) -> None:
    rows: list[dict[str, Any]] = [{"model": "the fit", "fitted": True, "off": 0.5}]
    rows += [
        {"model": name, "fitted": False, "off": off} for name, off in zip("ab", offs, strict=True)
    ]
    where = "inside" if max(map(abs, offs)) <= 0.10 else "outside"
    assert predict.within(rows) == f"{said}percentage points {where}"


def _slowest() -> tuple[float, float, float]:
    step: Any = SimpleNamespace(forward=[1.0, 2.0], backward=[1.0, 4.0])
    return predict.slowest([step])


def test_the_median_of_an_even_number_of_steps_is_between_two() -> None:
    assert run_ranks(_slowest, 1) == [(1.5, 2.5, 4.0)]


@pytest.mark.exhaustive
def test_collectives_count_no_wrong_element(tmp_path: Path) -> None:
    _, rows = _run("collectives", tmp_path / "collectives.json")
    assert {row["operation"] for row in rows} == {"all_gather", "reduce_scatter"}
    ours = {"ours (shared_memory)", "ours, other inputs", "ours (process_group)"}
    systems = ours | {"torch gloo"}
    assert {row["system"] for row in rows} == systems | {"memcpy"}
    assert all(row["wrong"] == 0 for row in rows if row["system"] in systems)
    assert all(row["ranks"] == 2 for row in rows)
    copied = {(r["operation"], r["bytes"]): r["us"] for r in rows if r["system"] == "memcpy"}
    for row in rows:
        of_copy = copied[row["operation"], row["bytes"]] / row["us"]
        assert row["of_memcpy"] == pytest.approx(of_copy)


@pytest.mark.exhaustive
def test_memory_is_measured_for_each_system(tmp_path: Path) -> None:
    printed, rows = _run("memory", tmp_path / "memory.json")
    assert [row["system"] for row in rows] == ["ours", "FSDP2", "FSDP2, defaults", "FSDP1"]
    for row in rows:
        assert row["ranks"] == 2
        assert len(row["after_steps_bytes"]) == row["steps"]
        assert row["growth_bytes"] == row["after_steps_bytes"][-1] - row["after_steps_bytes"][2]
        if row["peak_since_built"]:  # where the kernel can reset a peak
            # The kernel counts pages per CPU and sums up late, so both are a little off.
            assert row["peak_bytes"] >= 0.95 * max(row["after_steps_bytes"])
        assert row["theory"]["state"] == 16 * row["parameters"] // 2
    ours, *peers = rows
    assert all(row["books"] is None for row in peers)
    # A rank holds its part of the parameters, with padding.
    shard = ours["books"]["shard_bytes"] / (4 * ours["parameters"] / 2)
    assert 1 <= shard < 1.1
    assert "ours' books, MB: " in printed


def test_memory_of_gpus_is_compared_by_the_drivers_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stats: defaultdict[str, int] = defaultdict(int, {"reserved_bytes.all.peak": 40 * memory.MB})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)

    def row(system: str, counts: list[int]) -> dict[str, Any]:
        free = iter([(1000 - count) * memory.MB for count in counts])
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 1000 * memory.MB))
        gauge = memory.Gauge(torch.device("cuda"))
        for _ in counts[1:]:
            gauge.read()
        same: dict[str, Any] = {
            "device": "cuda",
            "ranks": 2,
            "parameters": 10**6,
            "settings": "",
            "books": None,
        }
        same |= {"peak_since_built": True, "theory": {"state": 50 * memory.MB}}
        return {"system": system, **same, **gauge.summary()}

    rows = [row("ours", [100, 150, 200, 180, 190]), row("FSDP2", [100, 140, 140, 150, 150])]
    memory.add_ratios(rows)
    memory.show(rows)
    *_, ours, peer = (line.split() for line in capsys.readouterr().out.splitlines())
    # Peak, after step 3, after the last step, growth and what torch has reserved; then the ratios.
    assert ours[1:6] == ["100.0", "80.0", "90.0", "10.0", "40.0"]
    assert peer[1:6] == ["50.0", "50.0", "50.0", "0.0", "40.0"]
    assert ours[-2:] == ["2.00", "2.00"]


# - The harness


def test_without_a_name_it_lists_what_there_is() -> None:
    result = _bench()
    assert result.returncode == 0
    listed = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert listed.keys() >= NAMES | {"all"}
    assert all(listed[name].rstrip().endswith("?") for name in NAMES)  # each is a question


MISTAKES = [
    (["nothing"], "there is no benchmark 'nothing'; choose one of buckets, checkpoint, "),
]
MORE_MISTAKES = [
    (["overlap", "--world-size", "0"], "--world-size: needs at least 1 and got 0"),
    (["overlap", "--ratio", "nan"], "--ratio: needs a positive, finite number and got nan"),
    (["overlap", "--ratio", "inf"], "--ratio: needs a positive, finite number and got inf"),
    (["pack", "--json", "/nowhere/at/all.json"], "and there is no /nowhere/at; make it first"),
    (["bench/pack.py"], "there is no benchmark 'bench/pack.py'; choose one of "),
    (["pack", "--slow"], "unrecognized arguments: --slow"),
    (["step", "--ranks", "none"], "--ranks: invalid integer value: 'none'"),
    (["buckets", "--device", "cuda"], "invalid choice: 'cuda'"),
    (["pack", "--json", "/tmp"], "needs a file and got the directory /tmp"),
    (["pack", "--plot", "/nowhere/picture.png"], "and there is no /nowhere; make it first"),
    (["pack", "--plot", "picture"], "needs a name that ends in one of .png, .pdf, .svg"),
    (["all", "--json", "/nowhere"], "--json needs a directory and got /nowhere"),
]


@pytest.mark.parametrize("mistake", [*MISTAKES, *exhaustive(*MORE_MISTAKES)])
def test_a_mistake_is_refused_in_a_sentence_before_anything_is_measured(
    mistake: tuple[list[str], str],
) -> None:
    arguments, sentence = mistake
    result = _bench(*arguments)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_benchmark_that_lacks_a_package_fails_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def child(command: list[str]) -> SimpleNamespace:
        ran.append(command[3])
        return SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr(ranks, "register", lambda act: None)
    monkeypatch.setattr(ranks, "Child", child)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    monkeypatch.delitem(sys.modules, "bench.checkpoint")
    found = dict.fromkeys(("buckets", "checkpoint", "muon"), "")
    assert bench.run_all(found, ["--quick", "--device", "cpu"]) == 1
    assert ran == ["buckets", "muon"]
    assert "checkpoint: not run: import of safetensors.torch" in capfd.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(UsageError, 2), (ValueError, 1)])
def test_the_exit_code_tells_wrong_use_from_a_failure(
    error: type[Exception], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(args: Any, keep: Any) -> None:
        raise error("planted")

    monkeypatch.setattr(ranks, "register", lambda act: None)
    args = SimpleNamespace(device="cpu", json=None, plot=None)
    assert runner.Run("some", SimpleNamespace(measure=measure), args).run() == code


def test_quartiles_lie_within_what_was_measured() -> None:
    assert Timing.of([1.0, 2.0]) == Timing(median=1.5, low=1.25, high=1.75)


def test_only_a_benchmark_that_names_its_ranks_runs_on_them() -> None:
    for name, module, expected in (("memory", memory, 1), ("muon", muon, 3)):
        args = parser_of(name, module).parse_args(["--ranks", "3"])
        assert args.ranks == 3
        assert count_of_ranks(args, module) == expected


@pytest.mark.exhaustive
def test_a_missing_gpu_is_an_error() -> None:
    result = _bench("pack", "--device", "cuda", environment={"CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode == 2
    assert "--device cuda needs a GPU and torch finds none" in result.stderr


@pytest.mark.exhaustive
def test_a_picture_without_matplotlib_is_refused_before_measuring(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not installed')\n")
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    result = _bench("pack", "--plot", str(tmp_path / "p.png"), environment={"PYTHONPATH": path})
    assert result.returncode == 2
    assert "pip install matplotlib" in result.stderr
    assert "kept" not in result.stderr


@pytest.mark.exhaustive
def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _run("pack", tmp_path / "pack.json", "--plot", str(tmp_path / "pack.png"))
    assert (tmp_path / "pack.png").read_bytes().startswith(b"\x89PNG")
    assert {file.name for file in tmp_path.iterdir()} == {"pack.json", "pack.png"}


@pytest.mark.exhaustive
def test_a_full_disk_loses_no_rows_and_no_device() -> None:
    result = _bench("pack", "--quick", "--device", "cpu", "--json", "/dev/full")
    assert result.returncode == 1
    assert "#wrong" in result.stdout  # the table is printed all the same
    *_, sentence, rows = result.stderr.strip().splitlines()
    assert sentence == "cannot write /dev/full: No space left on device"
    assert len(json.loads(rows)) == 16
    assert Path("/dev/full").is_char_device()  # no file has replaced the device


@pytest.mark.exhaustive
def test_a_file_that_cannot_be_written_whole_stays_what_it_was(tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    link = tmp_path / "link.json"
    link.symlink_to(target)

    def write(size: int) -> subprocess.CompletedProcess[str]:
        program = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # as a disk with so many bytes left
from bench.harness.output import write_whole
write_whole({str(link)!r}, bytes({size}))
"""
        return subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
        )

    assert write(90).returncode == 0
    assert "File too large" in write(110).stderr
    assert link.is_symlink()
    assert target.read_bytes() == bytes(90)
    assert len(list(tmp_path.iterdir())) == 2  # no half-written file is left


def _interrupt(number: signal.Signals, json_file: Path, *arguments: str) -> tuple[int, str, str]:
    """Send a signal after the first row. Return the exit code, stdout and stderr."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench", *arguments, "--device", "cpu", "--json", str(json_file)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    before = ""
    for line in process.stderr:
        before += line
        if "kept 1 row," in line:
            process.send_signal(number)
            break
    try:
        printed, after = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, printed, before + after


@pytest.mark.parametrize("number", [signal.SIGINT, *exhaustive(signal.SIGTERM)])
def test_an_interrupt_keeps_the_rows(tmp_path: Path, number: signal.Signals) -> None:
    code, printed, said = _interrupt(number, tmp_path / "pack.json", "pack", "--quick")
    document = json.loads((tmp_path / "pack.json").read_text())
    assert code == 130, said
    assert document["interrupted"]
    assert 1 <= len(document["rows"]) < 16
    assert document["rows"][0]["operation"] == "pack bf16 to bf16"
    assert "pack bf16 to bf16" in printed
    assert said.count("interrupted; kept") == 1
    assert "Traceback" not in said


def test_an_interrupt_before_anything_is_measured_ends_the_run() -> None:
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "bench", "pack"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.rstrip().endswith("torch._C"):  # long before torch is imported
            process.send_signal(signal.SIGINT)
            break
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert "kept" not in said


@pytest.mark.exhaustive
def test_an_interrupt_of_several_ranks_keeps_the_rows_and_ends_the_ranks(tmp_path: Path) -> None:
    path = tmp_path / "collectives.json"
    code, printed, said = _interrupt(signal.SIGINT, path, "collectives")
    document = json.loads(path.read_text())
    assert code == 130, said
    assert document["interrupted"]
    assert document["rows"][0]["operation"] == "all_gather"
    assert "ours (shared_memory)" in printed
    assert said.count("interrupted; kept") == 1  # only the first rank prints it
    assert "Traceback" not in said
    ranks = [
        command
        for command in Path("/proc").glob("[0-9]*/cmdline")
        if str(path).encode() in _contents(command)
    ]
    assert not ranks


def _contents(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # the process has ended in the meantime
        return b""
