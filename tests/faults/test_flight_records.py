"""Flight records: PyTorch's tool reads them, and tells which rank did not send what."""

from __future__ import annotations

import datetime
import logging
import os
import pickle
import re
import tempfile
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.matrix import exhaustive
from support.parity import device
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.flight_recorder import fr_trace

from fsdp_ext import fully_shard, write_flight_record
from fsdp_ext.comm.flights import PATH, buffer_size, known_backend, path_prefix

PREFIX = "flight_rank_"
BACKEND = known_backend("gloo")  # of PyTorch's tools
TIMEOUT = datetime.timedelta(seconds=2)
LONG = datetime.timedelta(seconds=300)


def _mesh(timeout: datetime.timedelta = LONG) -> DeviceMesh:
    return DeviceMesh.from_group(dist.new_group(timeout=timeout), device().type)


class _Layers(nn.Module):
    """Layers of different sizes, one of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 16)]
        )
        self.left_out = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number == self.left_out else layer(x)
        return x


def _sharded(mesh: DeviceMesh, transport: str = "shared_memory") -> Any:
    model: Any = _Layers()
    for module in [*model.layers, model]:
        fully_shard(module, mesh=mesh, transport=transport, bucket_bytes=0)
    return model


def _step(model: Any) -> None:
    model(torch.ones(2, 8)).sum().backward()


def _load(path: str | Path) -> dict[str, Any]:
    loaded: dict[str, Any] = pickle.loads(Path(path).read_bytes())
    return loaded


def _labels(record: dict[str, Any]) -> list[str]:
    return [entry["frames"][0]["name"] for entry in record["entries"]]


def _analyse(folder: Path) -> tuple[str, Any]:
    """Return what PyTorch's tool says of the records in `folder`, and the database it makes."""
    said: list[str] = []
    logger = logging.getLogger("Flight Recorder")
    listener = logging.Handler()
    listener.emit = lambda entry: said.append(entry.getMessage())  # type: ignore[method-assign]
    logger.addHandler(listener)
    try:
        fr_trace.main([str(folder), "--prefix", PREFIX, "--output", str(folder / "database")])
    finally:
        logger.removeHandler(listener)
    return "\n".join(said), pickle.loads((folder / "database").read_bytes())[1]


# - What a record has


def _train_and_write(folder: str, transport: str, replicas: bool) -> None:
    mesh = init_device_mesh(device().type, (2, 1)) if replicas else _mesh()
    model = _sharded(mesh, transport)
    for _ in range(2):
        _step(model)
    if device().type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    path = f"{folder}/{PREFIX}{dist.get_rank()}"
    assert write_flight_record(model, path) == path


@pytest.mark.parametrize(
    ("transport", "replicas"),
    [("shared_memory", False), ("process_group", False), ("shared_memory", True)],
)
def test_the_tool_of_pytorch_matches_all_collectives_of_whole_steps(
    tmp_path: Path, transport: str, replicas: bool
) -> None:
    run_ranks(_train_and_write, 2, str(tmp_path), transport, replicas)
    said, database = _analyse(tmp_path)
    assert said == ""
    records = [_load(tmp_path / f"{PREFIX}{rank}") for rank in range(2)]
    sent = {
        (entry["process_group"], record["pg_config"][entry["process_group"][0]]["ranks"], number)
        for record in records
        for entry in record["entries"]
        for number in [entry["collective_seq_id"]]
    }
    assert len(database.collectives) == len(sent)  # each of them once, for all its ranks
    assert all(collective.pass_check for collective in database.collectives)
    names = {collective.collective_name for collective in database.collectives}
    # With one rank in each set there is nothing to gather or scatter.
    reduction = "all_reduce" if replicas else "_reduce_scatter_base"
    assert names == {f"{BACKEND}:_all_gather_base", f"{BACKEND}:{reduction}"}


def test_an_entry_has_what_pytorchs_has(tmp_path: Path) -> None:
    run_ranks(_train_and_write, 2, str(tmp_path), "shared_memory", False)
    record = _load(tmp_path / f"{PREFIX}0")
    labels = _labels(record)
    entry = record["entries"][labels.index("the all-gather of unit 'layers.0' in backward")]
    begun, ended = (entry.pop(f"time_discovered_{what}_ns") for what in ("started", "completed"))
    assert 0 < entry.pop("time_created_ns") <= begun <= ended
    assert entry.pop("duration_ms") == pytest.approx((ended - begun) / 1e6, abs=1e-3)
    sequence = entry.pop("collective_seq_id")
    assert entry.pop("op_id") == sequence
    assert entry.pop("frames")[0] == {
        "name": "the all-gather of unit 'layers.0' in backward",
        "filename": "fsdp_ext",
        "line": sequence,
    }
    (name, description) = entry.pop("process_group")
    assert record["pg_config"][name] == {"name": name, "desc": description, "ranks": "[0, 1]"}
    status = record["pg_status"][str(entry.pop("pg_id"))]
    assert len(set(status.values())) == 1  # all that were enqueued have completed
    assert entry.pop("record_id") >= 0
    assert entry.pop("timeout_ms") >= LONG.total_seconds() * 1000
    assert entry == {
        "p2p_seq_id": 0,
        "profiling_name": f"{BACKEND}:_all_gather_base",
        "input_sizes": [[(8 * 8 + 8) * 4 // 2]],
        "input_dtypes": ["Byte"],
        "output_sizes": [[(8 * 8 + 8) * 4]],
        "output_dtypes": ["Byte"],
        "state": "completed",
        "retired": True,
        "is_p2p": False,
    }
    reduction = record["entries"][labels.index("the reduce-scatter of unit 'layers.1' in backward")]
    assert reduction["input_dtypes"] == ["Float"]
    assert reduction["input_sizes"] == [[8 * 8]]
    assert reduction["output_sizes"] == [[8 * 8 // 2]]


# - Faults


def _never_comes(folder: str, transport: str) -> str | None:
    """Rank 1 ends its third step early. Rank 0 waits for it in the fourth."""
    model = _sharded(_mesh(TIMEOUT), transport)
    for _ in range(3):
        _step(model)
    rank = dist.get_rank()
    message = None
    if rank == 0:
        with pytest.raises(RuntimeError) as caught:
            _step(model)
        message = str(caught.value)
        found = re.search(r"The flight record of rank 0 is in (\S+)\.$", message)
        assert found, message
        Path(found[1]).rename(f"{folder}/{PREFIX}0")
    dist.barrier()
    if rank == 1:
        write_flight_record(model, f"{folder}/{PREFIX}1")
    return message


@pytest.mark.parametrize("transport", ["shared_memory", *exhaustive("process_group")])
def test_a_timeout_writes_a_record_that_names_the_rank_that_never_came(
    tmp_path: Path, transport: str
) -> None:
    run_ranks(_never_comes, 2, str(tmp_path), transport, timeout=60.0)
    said, _ = _analyse(tmp_path)
    assert "Not all ranks joining collective" in said
    assert "missing ranks: {1}" in said
    assert "the all-gather of unit 'layers.0' in forward" in said
    last = _load(tmp_path / f"{PREFIX}0")["entries"][-1]
    assert (last["state"], last["retired"]) == ("scheduled", False)


def _skips_a_unit(folder: str) -> str:
    model = _sharded(_mesh())
    for _ in range(2):
        _step(model)
    if dist.get_rank() == 1:
        model.left_out = 1
    with pytest.raises(RuntimeError) as caught:
        _step(model)
    write_flight_record(model, f"{folder}/{PREFIX}{dist.get_rank()}")
    return str(caught.value)


def test_a_rank_that_skips_a_unit_is_found_by_the_tool(tmp_path: Path) -> None:
    messages = run_ranks(_skips_a_unit, 2, str(tmp_path), timeout=60.0)
    for rank, message in enumerate(messages):
        assert f"The flight record of rank {rank} is in " in message
    said, _ = _analyse(tmp_path)
    # Rank 0 reduces the unit, and rank 1 reduces the next one in its place. The tool cannot know
    # which rank is wrong, so it believes the record that it has read first.
    assert "SIZE_OR_SYNTAX_MISMATCH" in said
    assert re.search(r"the reduce-scatter of unit 'layers\.[01]' in backward", said)


def _write_from_another_thread(folder: str) -> list[str]:
    """Rank 0 hangs in a step until rank 1 comes, and rank 1 comes once rank 0 has written."""
    model = _sharded(_mesh())
    for _ in range(2):
        _step(model)
    states: list[str] = []
    if dist.get_rank() == 0:
        step = threading.Thread(target=_step, args=(model,))
        step.start()
        while "started" not in states:
            entries = _load(write_flight_record(model, f"{folder}/record"))["entries"]
            states = [entry["state"] for entry in entries]
    dist.barrier()
    if dist.get_rank() == 0:
        step.join()
    else:
        _step(model)
    return states


def test_another_thread_may_write_a_record_while_a_step_hangs(tmp_path: Path) -> None:
    states = run_ranks(_write_from_another_thread, 2, str(tmp_path))[0]
    assert set(states) <= {"completed", "started", "scheduled"}
    assert states.index("started") == states.count("completed")


# - Settings


def _record_nothing() -> str:
    with mock.patch.dict(os.environ, {"TORCH_FR_BUFFER_SIZE": "0"}):
        model = _sharded(_mesh())
        _step(model)
        with pytest.raises(RuntimeError, match="TORCH_FR_BUFFER_SIZE was 0 when"):
            write_flight_record(model)
    other = _sharded(_mesh())  # since torch 2.15, new_group() reads the variable, too
    with (
        mock.patch.dict(os.environ, {"TORCH_FR_BUFFER_SIZE": "many"}),
        pytest.raises(ValueError, match="TORCH_FR_BUFFER_SIZE") as caught,
    ):
        _step(other)
    return str(caught.value)


def test_the_size_of_records_is_that_of_pytorchs() -> None:
    expected = (
        "TORCH_FR_BUFFER_SIZE is 'many'. Set it to the number of collectives that a flight record "
        "keeps, or to 0 for no record."
    )
    assert run_ranks(_record_nothing, 2) == [expected, expected]
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        with mock.patch.dict(os.environ, {name: "7"}):
            assert buffer_size() == 7
    assert buffer_size() == 2000


@pytest.mark.parametrize(
    ("variables", "prefix"),
    [
        ({"TORCH_FR_DUMP_TEMP_FILE": "/a/b_rank_"}, "/a/fsdp_ext_b_rank_"),
        ({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/a/b_"}, "/a/fsdp_ext_b_"),
        ({"TORCH_FR_DUMP_TEMP_FILE": "b_"}, "./fsdp_ext_b_"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/torch/fsdp_ext_trace_rank_"),
        ({"HOME": "/home/me"}, "/home/me/.cache/torch/fsdp_ext_trace_rank_"),
    ],
)
def test_records_are_beside_pytorchs_and_never_replace_them(
    variables: dict[str, str], prefix: str
) -> None:
    with mock.patch.dict(os.environ, variables, clear=True):
        assert path_prefix() == prefix


def test_without_a_home_directory_records_lie_among_temporary_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in (*PATH, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert path_prefix() == f"{tempfile.gettempdir()}/torch/fsdp_ext_trace_rank_"


def _misuse(folder: str) -> None:
    model = _sharded(_mesh())
    with pytest.raises(RuntimeError, match="write_flight_record needs a model that has run"):
        write_flight_record(model)
    _step(model)
    Path(f"{folder}/file").touch()
    with pytest.raises(RuntimeError, match=r"could not write .*/file/record: Not a directory"):
        write_flight_record(model, f"{folder}/file/record")


def test_misuse_is_an_error(tmp_path: Path) -> None:
    run_ranks(_misuse, 1, str(tmp_path))
