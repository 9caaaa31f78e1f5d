"""Predicted steps of Llama: sizes, FLOPs, rings, and rows that say what they are."""

from __future__ import annotations

import statistics
from argparse import Namespace
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.flop_counter import FlopCounterMode

import fsdp_ext
from bench import scaling
from bench.models import published
from bench.models.published import MEASUREMENTS, Measurement, Model
from bench.models.step_memory import Transformer
from bench.models.step_model import (
    Step,
    all_reduce_bytes,
    fit,
    fitted,
    layer_seconds,
    memory_bytes,
    model_flops,
    replica_link,
    ring,
    stages,
    step_of,
    step_seconds,
    tokens_per_second,
)

SMALL = Model("small", layers=2, dim=64, hidden=96, heads=4, kv_heads=2, vocabulary=160)
STEP = Step(
    published.LLAMA3_8B, published.H100_400G, 64, batch=1, length=2048, recompute=published.NONE
)


class _Layer(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.of_head = model.dim // model.heads
        self.repeats = model.heads // model.kv_heads
        kv = model.kv_heads * self.of_head
        self.q, self.out = (nn.Linear(model.dim, model.dim, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(model.dim, kv, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(model.dim, model.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(model.hidden, model.dim, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(model.dim) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        q, k, v = (
            linear(y).unflatten(-1, (-1, self.of_head)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        k, v = (t.repeat_interleave(self.repeats, dim=1) for t in (k, v))
        attention = (q @ k.transpose(2, 3)).softmax(-1) @ v
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class _Llama(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocabulary, model.dim)
        self.layers = nn.ModuleList(_Layer(model) for _ in range(model.layers))
        self.norm = nn.RMSNorm(model.dim)
        self.head = nn.Linear(model.dim, model.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def test_flops_of_a_token_are_those_that_torch_counts() -> None:
    batch, length = 3, 32
    with torch.device("meta"):
        llama = _Llama(SMALL)
        tokens = torch.zeros(batch, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        llama(tokens).sum().backward()
    assert counter.get_total_flops() == batch * length * model_flops(SMALL, length)
    assert sum(p.numel() for p in llama.parameters()) == SMALL.parameters


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (published.LLAMA3_8B, 8_030_261_248),
        (published.LLAMA3_70B, 70_553_706_496),
        (published.LLAMA2_7B, 6_738_415_616),
        (published.LLAMA2_13B, 13_015_864_320),
        (published.LLAMA2_70B, 68_976_648_192),
        # The column NumParams of llm-foundry's table.
        (published.MPT_1B, 1_315_950_592),
        (published.MPT_3B, 2_651_837_440),
        (published.MPT_7B, 6_658_859_008),
        (published.MPT_13B, 12_853_954_560),
        (published.MPT_30B, 29_975_214_080),
        (published.MPT_70B, 64_862_437_376),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_models_have_as_many_parameters_as_published(model: Model, parameters: int) -> None:
    assert model.parameters == parameters


@cache
def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    scaling.measure(Namespace(quick=True, batch=1), rows.append)
    return rows


def _checks() -> list[dict[str, Any]]:
    return [row for row in _rows() if row["table"] == "check"]


# MFU as the sources have it: llm-foundry's tables, and torchtitan's performance.md, which counts
# the look-up of the embedding as a matrix, too.
@pytest.mark.parametrize(
    ("model", "gpu", "tokens", "mfu", "tables"),
    [
        (published.MPT_13B, published.H100, 4792, 0.3979, 0),
        (published.MPT_70B, published.H100, 1039, 0.4257, 0),
        (published.MPT_7B, published.A100_80, 4641, 0.6423, 0),
        (published.LLAMA3_8B, published.A100_80, 2904, 0.568, 1),
        (published.LLAMA3_70B, published.A100_80, 331, 0.517, 1),
        (published.LLAMA2_13B, published.A100_80, 2162, 0.611, 1),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_mfu_is_what_the_sources_say(
    model: Model, gpu: published.Stack, tokens: float, mfu: float, tables: int
) -> None:
    (row,) = [
        row
        for row in _checks()
        if (row["model"], row["gpu"], row["published_tokens"]) == (model.name, gpu.name, tokens)
    ]
    looked_up = 6 * tables * model.vocabulary * model.dim
    expected = mfu - tokens * looked_up / gpu.peak
    assert row["published_mfu"] == pytest.approx(expected, rel=0.003)


def test_a_step_computes_its_flops_at_the_rate() -> None:
    rate = 1e12
    attention = 12 * SMALL.layers * 32 * SMALL.dim
    flops = model_flops(SMALL, 32) - attention / 2  # the causal mask leaves half of it
    again = 2 * SMALL.layers * SMALL.layer_matrices + attention / 3 / 2
    for recompute, more in ((published.NONE, 0.0), (published.FULL, again)):
        step = Step(SMALL, published.H100_400G, 8, batch=3, length=32, recompute=recompute)
        root, layers = stages(step, rate)
        seconds = sum(stage.forward + stage.backward for stage in [root, *layers])
        assert seconds == pytest.approx(step.tokens * (flops + more) / rate)


def test_a_unit_carries_its_parameters() -> None:
    root, layers = stages(STEP, 1e15)
    model = STEP.model
    assert root.gather_bytes + sum(s.gather_bytes for s in layers) == 2 * model.parameters
    assert root.reduce_bytes + sum(s.reduce_bytes for s in layers) == 4 * model.parameters
    assert len(layers) == model.layers
    assert not root.reshards


def test_a_ring_takes_longer_the_more_ranks_it_has() -> None:
    network = published.H100_400G
    alphas = [ring(network, ranks).alpha for ranks in (8, 16, 64, 1024)]
    assert alphas == sorted(alphas)
    assert alphas[0] == pytest.approx(8.4e-6 + 7 * 3.4e-6)
    assert alphas[1] == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 14e-6)
    # busbw = algbw * (N - 1) / N. Across nodes, NICs limit it.
    assert ring(network, 8).beta * 7 / 8 == pytest.approx(network.node_gather)
    assert ring(network, 64).beta * 63 / 64 == pytest.approx(network.across)


def test_hsdp_gathers_within_a_node_and_reduces_across() -> None:
    hybrid = replace(STEP, hybrid=True)
    assert hybrid.shards == 8
    assert STEP.shards == 64
    parameters = 10**9
    one_node = replace(hybrid, ranks=8)
    assert (replica_link(one_node), all_reduce_bytes(one_node, parameters)) == (None, 0)
    nbytes = all_reduce_bytes(hybrid, parameters)
    assert nbytes == 4 * parameters / 8
    link = replica_link(hybrid)
    assert link is not None
    assert link.seconds("all_reduce", nbytes) >= 2 * 7 / 8 * nbytes / (hybrid.network.across / 8)
    # Parameters, gradients and AdamW's moments are in fp32, the gathered shard is in bf16. The
    # reduce output is that of the largest unit, the root, in fp32, and HSDP has two.
    model = STEP.model
    of_root = (2 * model.vocabulary + 1) * model.dim
    assert memory_bytes(hybrid) - memory_bytes(STEP) == pytest.approx(
        (16 + 2) * model.parameters * (1 / 8 - 1 / 64) + 4 * of_root * (2 / 8 - 1 / 64), rel=1e-3
    )
    _, found = step_seconds(hybrid, 400e12)
    lanes = [span.lane for span in found.spans]
    assert lanes.count("all-reduce") == lanes.count("reduce") == model.layers + 1


def test_memory_is_what_the_plan_of_such_a_model_says() -> None:
    with torch.device("meta"):
        llama = _Llama(STEP.model)
    plan = fsdp_ext.plan(
        llama,
        STEP.shards,
        units=_Layer,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        device_type="cuda",
        transport="nccl",
    )
    assert memory_bytes(STEP) == pytest.approx(plan.memory.peak, rel=1e-4)
    row = next(
        row
        for row in _rows()
        if (row["model"], row["ranks"], row["strategy"]) == (STEP.model.name, 64, "FSDP")
    )
    assert row["memory_gb"] == memory_bytes(STEP) / 1e9
    root = STEP.model.root_parameters  # bf16 that is gathered, and fp32 that is reduced
    assert memory_bytes(STEP) > (2 + 4) * root + 18 * STEP.model.parameters / 64


@pytest.mark.parametrize(
    "model", [published.LLAMA3_8B, published.LLAMA2_7B, published.MPT_7B], ids=lambda m: m.name
)
def test_the_model_that_is_planned_has_all_parameters(model: Model) -> None:
    planned = Transformer(model)
    assert sum(p.numel() for p in planned.parameters()) == model.parameters
    (of_layer,) = {sum(p.numel() for p in layer.parameters()) for layer in planned.layers}
    assert of_layer == model.layer_parameters


def test_a_step_takes_at_least_its_compute_and_what_goes_over_the_network() -> None:
    for rate in (1e14, 1e17):
        seconds, found = step_seconds(STEP, rate)
        assert seconds >= max(found.compute, found.wire)
    forward, backward = layer_seconds(STEP, 1e14)
    assert backward == pytest.approx(2 * forward)


def test_the_fit_predicts_what_it_is_fitted_on() -> None:
    parts = fitted()
    of_stack: dict[str, list[Measurement]] = {}
    for measured in MEASUREMENTS:
        if measured.fits:
            of_stack.setdefault(measured.stack.name, []).append(measured)
    assert {measured.stack for measured in MEASUREMENTS} == set(parts)
    for name, (measured, *more) in of_stack.items():
        assert not more, f"{name} has one free figure"
        assert measured.gpus == 8  # a single node
        part = parts[measured.stack]
        assert 0 < part < 1
        predicted = tokens_per_second(step_of(measured), part * measured.stack.peak)
        assert predicted == pytest.approx(measured.tokens, rel=1e-4)


def test_no_part_of_the_peak_fits_what_is_faster_than_it() -> None:
    impossible = replace(MEASUREMENTS[0], tokens=1e6)
    with pytest.raises(ValueError, match="tokens/s a GPU, and the measurement says 1000000"):
        fit(impossible)


def test_rows_say_what_is_assumed_and_what_is_simulated() -> None:
    predictions = [row for row in _rows() if row["table"] != "check"]
    assert {row["model"] for row in predictions} == {"Llama 3 8B", "Llama 3 70B"}
    assert {row["strategy"] for row in predictions} == {"FSDP", "HSDP"}
    assert {row["ranks"] for row in predictions} == {8, 64, 1024}
    for row in predictions:
        assert row["assumptions"]
        assert "simulated" in row["table"]
        assert "simulated" in row["link"]
        results = {name for name, value in row.items() if isinstance(value, float)}
        assert {name for name in results if "simulated" not in name} == {
            "part_of_peak",
            "memory_gb",
        }


def test_errors_of_checks_are_those_of_their_figures() -> None:
    checks = _checks()
    assert len(checks) == len(MEASUREMENTS)
    assert len({row["source"] for row in checks}) >= 4
    for row in checks:
        assert row["assumptions"]
        expected = row["simulated_tokens"] / row["published_tokens"] - 1
        assert row["error"] == pytest.approx(expected)
        if row["fitted_on_this"]:
            assert row["error"] == pytest.approx(0, abs=1e-4)
    # Where only the number of GPUs differs from the fit, the prediction has to be close.
    fit_row = checks[0]
    names = ("model", "gpu", "batch", "length", "recompute")
    same = [row for row in checks[1:] if all(row[name] == fit_row[name] for name in names)]
    assert len(same) == 3
    assert statistics.median(abs(row["error"]) for row in same) < 0.02


def test_changes_compare_runs_that_differ_in_ranks_alone() -> None:
    found = scaling.changes(_checks())
    (row,) = [row for row in found if (row["model"], row["gpu"]) == ("MPT 3B", "H100 SXM")]
    assert (row["from"], row["to"]) == (32, 64)
    assert row["published"] == pytest.approx(22525 / 23021 - 1)
    assert row["simulated"] < 0


def test_tables_have_all_rows_and_the_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    scaling.show(_rows())
    printed = capsys.readouterr().out
    for assumption in _rows()[0]["assumptions"]:
        assert assumption in printed
    for line in ("predictions (simulated)", "checks against published", "with more GPUs"):
        assert line in printed
    assert printed.count(" llm-foundry") == sum(
        measured.source == "llm-foundry" for measured in MEASUREMENTS
    )


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "scaling.png"
    scaling.plot(_rows(), str(target))
    assert target.read_bytes().startswith(b"\x89PNG")
