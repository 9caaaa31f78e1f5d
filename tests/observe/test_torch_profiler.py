"""What torch.profiler shows of a step, beside FSDP2, and its trace joined with ours."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import fsdp_ext
from fsdp_ext import fully_shard

WIDTH, LAYERS = 8, 3
UNIT = (WIDTH * WIDTH + WIDTH) * 4  # bytes
# Ranges that FSDP2 has under the same names, for each unit and for the root.
OF_UNITS = ("pre_forward", "post_forward", "pre_backward", "all_gather", "post_backward_reduce")
OF_ROOT = ("root_pre_forward", "root_post_backward_callback")

Events = list[dict[str, Any]]


class Model(nn.Module):
    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return self.head(x)


def make(shard: Callable[..., Any] = fully_shard, recomputes: bool = False, **options: Any) -> Any:
    model = Model(recomputes)
    mesh = {"mesh": options.pop("mesh")} if "mesh" in options else {}
    for layer in model.h:
        shard(layer, **mesh)
    shard(model, **mesh, **options)
    for _ in range(2):  # the second step has the buckets and the prefetches of all later ones
        step(model)
    return model


def step(model: Any) -> None:
    model(torch.ones(1, WIDTH, requires_grad=True)).sum().backward()


def recorded(path: Path, run: Callable[[], object], **options: Any) -> Events:
    """Return the ranges of FSDP that torch.profiler shows of `run`."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, **options) as prof:
        run()
    prof.export_chrome_trace(str(path))
    events: Events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("name", "").startswith("FSDP::")]


def names_of(events: Events) -> Counter[str]:
    return Counter(event["name"].removeprefix("FSDP::") for event in events)


def bytes_of(events: Events, name: str) -> list[int]:
    return [event["args"]["bytes"] for event in events if event["name"] == f"FSDP::{name}"]


def of_each_unit(what: str) -> set[str]:
    return {what, *(f"{what} (h.{number})" for number in range(LAYERS))}


# - Ranges


def _beside_fsdp2(directory: Path) -> None:
    path = directory / f"{dist.get_rank()}.json"
    found = []
    for shard, options in ((fsdp2, {}), (fully_shard, {"bucket_bytes": 0})):
        model = make(shard, **options)
        found.append(names_of(recorded(path, lambda model=model: step(model))))
    theirs, ours = found
    for what in OF_UNITS:
        assert {name for name in ours if name.split(" ")[0] == what} == of_each_unit(what)
    assert of_each_unit("reduce_scatter") < set(ours)
    assert {f"post_backward (h.{number})" for number in range(1, LAYERS)} < set(ours)
    common = [n for n in theirs if n.split(" ")[0] in (*OF_UNITS, *OF_ROOT)]
    assert len(common) == (LAYERS + 1) * len(OF_UNITS) + len(OF_ROOT)
    for name in common:  # FSDP2 gathers the last layer again for backward
        assert ours[name] == theirs[name] or name.startswith("all_gather"), name


def test_ranges_have_the_names_that_fsdp2s_have(tmp_path: Path) -> None:
    run_ranks(_beside_fsdp2, 2, tmp_path)


def _kinds(directory: Path) -> None:
    path = directory / f"{dist.get_rank()}.json"

    buckets = make(bucket_bytes=LAYERS * UNIT)
    found = names_of(recorded(path, lambda: step(buckets)))
    assert found["all_gather (h.0 to h.2)"] == 1
    assert found["reduce_scatter (h.0 to h.2)"] == 1
    assert found["pre_forward (h.1)"] == 1

    recomputed = make(recomputes=True, bucket_bytes=0)
    found = names_of(recorded(path, lambda: step(recomputed)))
    assert found["pre_forward (h.1)"] == found["post_forward (h.1)"] == 2
    assert found["all_gather (h.0)"] == 2

    accumulated = make(bucket_bytes=0)
    accumulated.set_requires_gradient_sync(False)
    found = names_of(recorded(path, lambda: step(accumulated)))
    assert found["post_backward_accumulate (h.0)"] == 1
    assert not any(name.startswith("reduce_scatter") for name in found)

    pieces = make(bucket_bytes=0, max_message_bytes=128)
    events = recorded(path, lambda: step(pieces))
    assert bytes_of(events, "all_gather (h.0)") == [UNIT, UNIT]
    assert len(bytes_of(events, "reduce_scatter (h.0)")) > 1
    assert sum(bytes_of(events, "reduce_scatter (h.0)")) == UNIT

    replicas = make(mesh=init_device_mesh("cpu", (2, 1)), bucket_bytes=0)
    events = recorded(path, lambda: step(replicas))
    (nbytes,) = bytes_of(events, "all_reduce (h.0)")
    assert nbytes >= UNIT  # with padding


def test_ranges_tell_buckets_recomputation_accumulation_pieces_and_replicas(tmp_path: Path) -> None:
    run_ranks(_kinds, 2, tmp_path)


def _only_in_the_block(directory: Path) -> None:
    path = directory / f"{dist.get_rank()}.json"
    model = make(bucket_bytes=0)
    output = model(torch.ones(1, WIDTH, requires_grad=True)).sum()
    found = names_of(recorded(path, output.backward))
    step(model)
    assert not any(name.split(" ")[0] in ("pre_forward", "root_pre_forward") for name in found)
    assert found["pre_backward (h.0)"] == 1
    assert found["root_post_backward_callback"] == 1
    assert recorded(path, lambda: None) == []
    # A profiler of all threads.
    options = {"experimental_config": _ExperimentalConfig(profile_all_threads=True)}
    found = names_of(recorded(path, lambda: step(model), **options))
    assert found["pre_forward (h.0)"] == found["reduce_scatter (h.0)"] == 1

    def fails() -> None:
        handle = model.h[1].register_forward_pre_hook(lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            step(model)
        handle.remove()

    recorded(path, fails)
    after = names_of(recorded(path, lambda: step(model)))
    assert after["pre_forward (h.1)"] == 1


def test_a_profiler_sees_the_ranges_of_its_own_block_only(tmp_path: Path) -> None:
    run_ranks(_only_in_the_block, 2, tmp_path)


# - Joined with our trace


def _joined(directory: Path) -> None:
    rank = dist.get_rank()
    theirs, joined = directory / f"torch{rank}.json", directory / f"joined{rank}.json"
    model = make(bucket_bytes=0)
    with fsdp_ext.profile(model) as prof:
        ranges = recorded(theirs, lambda: [step(model) for _ in range(2)])
    for row in prof.rows():
        what = {"gather": "all_gather", "reduce": "reduce_scatter"}[row.operation]
        name = what if row.units == "the root" else f"{what} ({row.units})"
        assert row.nbytes in bytes_of(ranges, name)

    prof.merge().save_trace(joined, torch_trace=theirs)
    document = json.loads(joined.read_text())
    before = json.loads(theirs.read_text())
    count = len(before["traceEvents"])
    assert document["traceEvents"][:count] == before["traceEvents"]
    assert document["baseTimeNanoseconds"] == before["baseTimeNanoseconds"]
    ours: Events = document["traceEvents"][count:]
    named = {
        event["pid"]: event["args"]["name"] for event in ours if event["name"] == "process_name"
    }
    assert sorted(named.values()) == ["rank 0, shared_memory", "rank 1, shared_memory"]
    assert os.getpid() not in named
    # Both traces show each gather at about the same time. PyTorch's profiler calibrates its clock,
    # which can be some milliseconds off on a busy machine.
    tolerance = 50_000  # microseconds
    for number in range(LAYERS):
        issues = sorted(
            (event["ts"], event["ts"] + event["dur"])
            for event in ranges
            if event["name"] == f"FSDP::all_gather (h.{number})"
        )
        issued = sorted(
            event["ts"] - event["args"]["issued (us before it began)"]
            for event in ours
            if event["name"] == f"gather h.{number}" and named[event["pid"]][5] == str(rank)
        )
        for (begin, end), moment in zip(issues, issued, strict=True):
            assert begin - tolerance < moment < end + tolerance

    zipped = directory / f"torch{rank}.json.gz"
    zipped.write_bytes(gzip.compress(theirs.read_bytes()))
    prof.save_trace(directory / f"zipped{rank}.json", torch_trace=str(zipped))
    assert json.loads((directory / f"zipped{rank}.json").read_text()) == document

    recorded(theirs, lambda: step(model))
    with pytest.raises(ValueError, match="has no event of the steps that this profile recorded"):
        prof.save_trace(joined, torch_trace=theirs)
    for text, why in (("{", "it is no JSON"), ("[]", "no traceEvents")):
        theirs.write_text(text)
        with pytest.raises(ValueError, match=f"is not a trace of torch.profiler: .*{why}"):
            prof.save_trace(joined, torch_trace=theirs)
    with pytest.raises(FileNotFoundError):
        prof.save_trace(joined, torch_trace=directory / "nothing.json")


def test_save_trace_shows_lanes_beside_a_trace_of_torch(tmp_path: Path) -> None:
    run_ranks(_joined, 2, tmp_path)
