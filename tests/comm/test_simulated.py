"""The simulated transport has any number of ranks in one process, over links by their figures."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_ext
from fsdp_ext import Link, Simulated, fully_shard
from fsdp_ext.__main__ import main
from fsdp_ext.comm import measure_link
from fsdp_ext.comm.lanes import lanes_of
from fsdp_ext.comm.link import H100_CLUSTER, H100_NODE, PRESETS, Fit, Sample, fit
from fsdp_ext.comm.measure_link import SIZES, report

# The directory of the fsdp_ext under test: `python -m` looks in the current directory first.
PACKAGE = Path(fsdp_ext.__file__).parents[1]
FAST = Link("fast", alpha=0.0, beta=1e15)


def _without_a_group() -> None:
    """Train as a user does, without torchrun and without a process group."""
    dist.destroy_process_group()


def _train(world_size: int) -> dict[str, Any]:
    _without_a_group()
    torch.manual_seed(0)
    transport = Simulated(world_size=world_size, link=FAST, rank=3)
    model: Any = nn.Sequential(nn.Linear(64, 8192), nn.ReLU(), nn.Linear(8192, 4))
    before = model[0].weight.detach().clone()
    for layer in (model[0], model[2]):
        fully_shard(layer, transport=transport)
    fully_shard(model, transport=transport)
    optimizer = torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            loss = model(torch.randn(2, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    impl = model._fsdp_ext_unit.root.impl
    unsharded = model._fsdp_ext_unit.root.units[1]
    impl.unshard(1)
    impl.wait_for_unshard(1)
    weight = model[0].weight.detach()
    rows = 8192 // world_size
    own = weight[3 * rows : 4 * rows].clone()
    local = unsharded.params[0].local
    answer = {
        "finite": math.isfinite(float(loss)),
        "local shape": tuple(local.shape),
        "own rows are the shard": bool((own == local).all()),
        "shard has changed": not torch.equal(own, before[3 * rows : 4 * rows]),
        "warnings": [
            (str(w.message), Path(w.filename).name) for w in caught if "fsdp_ext" in str(w.message)
        ],
        "transport": lanes_of(
            model._fsdp_ext_unit.ranks.shard_group, torch.device("cpu"), transport
        ).transport,
    }
    impl.reshard(1)
    dist.barrier()
    return answer


@pytest.mark.parametrize("world_size", [8, 1024])
def test_one_process_trains_as_one_of_many_ranks(world_size: int) -> None:
    (answer,) = run_ranks(_train, 1, world_size)
    assert answer["finite"]
    assert answer["local shape"] == (8192 // world_size, 64)
    assert answer["own rows are the shard"]
    assert answer["shard has changed"]
    assert answer["transport"] == "simulated"
    ((warning, file),) = answer["warnings"]
    assert file == Path(__file__).name  # the line that called the model
    assert f"{world_size} simulated ranks over fast (simulated)" in warning
    assert "losses, gradients and parameters mean nothing" in warning


def _step_over(link: Link) -> tuple[float, float]:
    _without_a_group()
    warnings.simplefilter("ignore")
    model: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    for layer in model:
        fully_shard(layer, transport=Simulated(4, link))
    fully_shard(model, transport=Simulated(4, link), bucket_bytes=0)
    model(torch.ones(1, 8)).sum().backward()
    impl = model._fsdp_ext_unit.root.impl
    impl.enable_log(True)
    start = time.monotonic()
    model(torch.ones(1, 8)).sum().backward()
    taken = time.monotonic() - start
    # Without compute to overlap, gathers one after another take the sum of their costs.
    gathers = [link.seconds(op, nbytes) for op, _, _, nbytes in impl.take_log() if "gather" in op]
    return taken, sum(gathers)


def test_a_step_takes_at_least_what_its_gathers_cost() -> None:
    ((taken, cost),) = run_ranks(_step_over, 1, Link("slow", alpha=20e-3, beta=1e12))
    assert cost >= 6 * 20e-3
    assert taken >= cost


# - Replicas


def _hybrid(transport: Simulated, *layers: nn.Module, bucket_bytes: int | None = None) -> Any:
    warnings.simplefilter("ignore")
    _without_a_group()
    transport.init_process_group()
    mesh = init_device_mesh("cpu", (transport.replicas, transport.shards))
    model: Any = nn.Sequential(*layers)
    for layer in model:
        fully_shard(layer, mesh=mesh, transport=transport)
    return fully_shard(model, mesh=mesh, transport=transport, bucket_bytes=bucket_bytes)


def _train_as_one_of_a_set() -> dict[str, Any]:
    transport = Simulated(1024, FAST, rank=1000, replicas=128, replica_link=FAST)
    layers = [nn.Linear(64, 8192, bias=False), nn.ReLU(), nn.Linear(8192, 4, bias=False)]
    model = _hybrid(transport, layers[0], layers[2], bucket_bytes=0)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        model(torch.randn(2, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            model._fsdp_ext_unit.root.impl.enable_log(True)
            model._fsdp_ext_unit.root.impl.reset_counters()
    impl = model._fsdp_ext_unit.root.impl
    return {
        "local shapes": [tuple(p.to_local().shape) for p in model.parameters()],
        "ranks": (model._fsdp_ext_unit.ranks.rank, model._fsdp_ext_unit.ranks.rank_in_mesh),
        "buckets": fsdp_ext.describe_buckets(model),
        "all-reduces": [n for op, _, _, n in impl.take_log() if op == "all_reduce"],
        "reductions": impl.counters()["reduce_scatters"],
        "planned": [bucket.all_reduce for bucket in fsdp_ext.plan(model).buckets],
    }


def test_one_process_trains_as_one_of_a_set_with_replicas() -> None:
    (answer,) = run_ranks(_train_as_one_of_a_set, 1)
    assert answer["local shapes"] == [(8192 // 8, 64), (1, 8192)]
    assert answer["ranks"] == (1000 % 8, 1000)
    assert "8 ranks communicate over simulated; gradients are summed over 128" in answer["buckets"]
    assert answer["reductions"] == len(answer["all-reduces"]) == 2 * 2
    assert sorted(answer["all-reduces"]) == sorted(2 * answer["planned"][1:])
    assert answer["planned"][1:] == [4 * 64 * 8192 // 8, 4 * 8192]


def _all_reduces_take_time(link: Link) -> tuple[float, float]:
    model = _hybrid(
        Simulated(8, FAST, replicas=2, replica_link=link), *(nn.Linear(8, 8) for _ in range(4))
    )
    model(torch.ones(1, 8)).sum().backward()
    model.zero_grad()
    impl = model._fsdp_ext_unit.root.impl
    impl.enable_log(True)
    start = time.monotonic()
    model(torch.ones(1, 8)).sum().backward()
    taken = time.monotonic() - start
    log = impl.take_log()
    return taken, sum(link.seconds(op, n) for op, _, _, n in log if op == "all_reduce")


def test_a_step_takes_at_least_what_its_all_reduces_cost() -> None:
    ((taken, cost),) = run_ranks(_all_reduces_take_time, 1, Link("slow", alpha=0.05, beta=1e12))
    assert cost >= 4 * 0.05
    assert taken >= cost


def test_replicas_have_a_link_of_their_own_or_the_one_across() -> None:
    cluster = Simulated(64, H100_CLUSTER, rank=42, replicas=8)
    assert cluster.shards == 8
    within, between = cluster.within_shard_group(), cluster.between_replicas()
    assert (within.world_size, within.rank, within.replicas) == (8, 2, 1)
    assert within.link.over(8).costs() == H100_NODE.costs()
    assert (between.world_size, between.rank) == (8, 5)
    assert between.link == H100_CLUSTER.across
    given = Simulated(64, H100_NODE, replicas=8, replica_link=FAST)
    assert given.between_replicas().link == FAST
    in_one_node = Simulated(8, H100_NODE, replicas=2)
    assert in_one_node.between_replicas().link.costs() == H100_NODE.costs()
    assert FAST.seconds("all_reduce", 10**15) == 2.0


def _meshes_that_do_not_fit() -> None:
    _without_a_group()
    transport = Simulated(8, FAST, replicas=2)
    with pytest.raises(ValueError, match=r"a mesh with 1 replicas\. Pass a mesh of .* \(2, 4\)"):
        fully_shard(nn.Linear(4, 4), transport=transport)
    mesh = init_device_mesh("cpu", (4, 2))
    with pytest.raises(ValueError, match=r"a mesh with 4 replicas\. Pass a mesh of .* \(2, 4\)"):
        fully_shard(nn.Linear(4, 4), mesh=mesh, transport=transport)
    with pytest.raises(ValueError, match="4 replicas, but its simulated transport has 8 and 2"):
        fsdp_ext.plan(nn.Linear(4, 4), transport=transport, replicas=4)
    assert fsdp_ext.plan(nn.Linear(4, 4), transport=transport).replicas == 2


def test_a_mesh_of_other_replicas_is_refused() -> None:
    run_ranks(_meshes_that_do_not_fit, 1)


# - Groups


def _groups_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"world_size=8, rank=0\) got a mesh .* rank . of 2"):
        fully_shard(nn.Linear(4, 4), transport=Simulated(8, FAST))
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fully_shard(model, mesh=mesh, transport=Simulated(2, FAST, rank=rank))  # a real group of it
        model(torch.ones(1, 4)).sum().backward()
    mixed = nn.Sequential(nn.Linear(4, 4))
    fully_shard(mixed[0], transport=Simulated(2, FAST, rank=rank))
    fully_shard(mixed)
    with pytest.raises(ValueError, match="2 transports, None and Simulated"):
        mixed(torch.ones(1, 4))


def test_a_process_group_of_other_ranks_is_refused() -> None:
    run_ranks(_groups_that_do_not_fit, 2)


# - Links


def test_presets_name_their_sources() -> None:
    for link in PRESETS.values():
        assert link.source
        assert 1e9 < link.beta < 1e12
        assert 1e-6 < link.alpha < 1e-3


def test_a_link_across_groups_adds_up() -> None:
    assert H100_CLUSTER.over(8).costs() == H100_NODE.costs()
    far = H100_CLUSTER.across
    assert far is not None
    nbytes = 1 << 30
    for operation in ("all_gather", "reduce_scatter"):
        # Within a node the whole bandwidth, across nodes each GPU's eighth.
        expected = H100_NODE.seconds(operation, nbytes) + far.seconds(operation, nbytes // 8)
        assert H100_CLUSTER.over(64).seconds(operation, nbytes) == pytest.approx(expected)
    assert "across" in H100_CLUSTER.over(64).name


def test_figures_hold_for_no_more_ranks_than_they_are_of() -> None:
    with pytest.raises(ValueError, match=r"at most 8 ranks, not for 1024\. .*across"):
        Simulated(1024, H100_NODE)
    assert Simulated(1024, H100_CLUSTER).world_size == 1024
    assert Simulated(1024, replace(H100_NODE, ranks=0)).link.over(1024).beta == H100_NODE.beta


def test_links_are_written_and_read_back(tmp_path: Path) -> None:
    for name, link in PRESETS.items():
        path = tmp_path / f"{name}.json"
        link.save(path)
        assert Link.load(path) == link
    for content in (b"12 GB/s", b"\x80\x02"):
        (tmp_path / "text").write_bytes(content)
        with pytest.raises(ValueError, match="text is not valid JSON"):
            Link.load(tmp_path / "text")
    (tmp_path / "other").write_text('{"bandwidth": 3}')
    with pytest.raises(ValueError, match="measure-link --out FILE"):
        Link.load(tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*(f"{name}.json" for name in PRESETS), "other", "text"]
    )


# - Fits


def _samples(alpha: float, beta: float, wrong_by: float = 0.0) -> list[Sample]:
    return [
        Sample("all_gather", nbytes, (alpha + nbytes / beta) * (1 + wrong_by * (-1) ** i))
        for i, nbytes in enumerate(SIZES)
    ]


def test_a_fit_finds_what_is_there() -> None:
    found = fit(_samples(12e-6, 7e9))
    assert found.alpha == pytest.approx(12e-6, rel=1e-6)
    assert found.beta == pytest.approx(7e9, rel=1e-6)
    assert found.residual < 1e-6
    assert found.predict(7_000_000) == pytest.approx(12e-6 + 1e-3)


def test_a_fit_says_how_far_off_it_is() -> None:
    # Samples are off by a tenth, in turns up and down, so the fit stays in the middle.
    found = fit(_samples(12e-6, 7e9, wrong_by=0.1))
    assert found.residual == pytest.approx(0.1, rel=0.1)
    assert found.beta == pytest.approx(7e9, rel=0.1)


def test_a_fit_of_no_latency_is_not_negative() -> None:
    samples = [Sample("all_gather", nbytes, nbytes**1.1 / 1e9) for nbytes in SIZES]
    found = fit(samples)
    assert found.alpha == 0.0
    assert found.beta > 0


def test_samples_that_cannot_be_fitted_are_refused() -> None:
    with pytest.raises(ValueError, match="at least two sizes"):
        fit([Sample("all_gather", 1024, 1e-3)] * 3)
    with pytest.raises(ValueError, match="larger collectives do not take longer"):
        fit([Sample("all_gather", nbytes, 1 / nbytes) for nbytes in SIZES])


def test_a_report_tells_sizes_that_were_left_out() -> None:
    samples = [
        sample
        for operation in ("all_gather", "reduce_scatter")
        for sample in [replace(s, operation=operation) for s in _samples(12e-6, 7e9)]
    ]
    lines = report(samples, {op: Fit(12e-6, 7e9, 0.0) for op in ("all_gather", "reduce_scatter")})
    assert sum("left out of the fit" in line for line in lines) == 2 * (len(SIZES) // 2) + 2
    assert "alpha 12.0 us, beta 7.00 GB/s" in lines[-1]
    assert "off by 0% (median), 0% at most" in lines[-1]


class _Recording:
    """Lanes that record which buffers each collective gets."""

    def __init__(self) -> None:
        self.used: set[tuple[str, str, str]] = set()
        self._buffers: dict[int, str] = {}

    def _buffer(self, name: str, nbytes: int) -> torch.Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self._buffers[buffer.untyped_storage().data_ptr()] = name
        return buffer

    def input_buffer(self, nbytes: int, lane: str) -> torch.Tensor:
        return self._buffer(f"input of {lane}", nbytes)

    def output_buffer(self, nbytes: int, lane: str) -> torch.Tensor:
        return self._buffer(f"output of {lane}", nbytes)

    def _collective(self, name: str, *tensors: torch.Tensor) -> None:
        source, output = (
            self._buffers.get(tensor.untyped_storage().data_ptr(), "another") for tensor in tensors
        )
        self.used.add((name, source, output))

    def all_gather(self, source: torch.Tensor, output: torch.Tensor) -> None:
        assert output.numel() == 2 * source.numel()
        self._collective("all_gather", source, output)

    def reduce_scatter(self, source: torch.Tensor, output: torch.Tensor) -> None:
        assert source.numel() == 2 * output.numel()
        self._collective("reduce_scatter", source, output)

    def exchange_messages(self, mine: bytes) -> bytes:
        return mine


# Over NCCL, the path of a collective depends on whether its buffers are registered.
def test_a_link_is_measured_with_buffers_as_a_model_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure_link, "SIZES", [2**10, 2**12])
    monkeypatch.setattr(measure_link.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(measure_link.dist, "all_reduce", lambda *_, **__: None)
    lanes: Any = _Recording()
    samples = measure_link.measure(lanes, torch.device("cpu"), 1)
    assert [(s.operation, s.nbytes) for s in samples] == [
        (operation, nbytes) for nbytes in (2**10, 2**12) for operation in measure_link.OPERATIONS
    ]
    assert lanes.used == {
        ("all_gather", "input of gather", "output of gather"),
        ("reduce_scatter", "input of reduce", "output of reduce"),
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_measuring_a_link_writes_one_that_can_be_simulated(tmp_path: Path, transport: str) -> None:
    path = tmp_path / "link.json"
    command = [sys.executable, "-m", "fsdp_ext", "measure-link"]
    result = subprocess.run(
        [*command, "--repeats", "3", "--out", str(path)],
        cwd=PACKAGE,
        env={**os.environ, "FSDP_EXT_TRANSPORT": transport},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{transport}, 2 ranks" in result.stdout
    assert "left out of the fit" in result.stdout
    link = Link.load(path)
    assert link.ranks == 2
    assert 1e7 < link.beta < 1e12
    measured = json.loads(path.read_text())["measured"]
    assert len(measured["samples"]) == 2 * len(SIZES)
    assert Simulated(2, link).link is link


def test_the_command_line_says_what_it_expects(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["fsdp_ext", *arguments])
        try:
            code: object = main()
        except SystemExit as end:
            code = end.code
        assert code == 2
        return capsys.readouterr().err

    assert "unknown command: measure" in fails("measure")
    assert "--ranks is 1; pass at least 2" in fails("measure-link", "--ranks", "1")
    assert "--repeats is 0; pass at least 1" in fails("measure-link", "--repeats", "0")
    assert "that does not exist: /nope/link" in fails("measure-link", "--out", "/nope/link")
    assert "got the directory /; name a file" in fails("measure-link", "--out", "/")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "nccl needs GPUs and" in fails("measure-link", "--transport", "nccl")
    monkeypatch.setenv("FSDP_EXT_TRANSPORT", "gloo")
    assert "Did you mean 'process_group'?" in fails("measure-link")


def test_names_are_the_packages() -> None:
    assert fsdp_ext.Simulated is Simulated
    assert fsdp_ext.Link is Link
