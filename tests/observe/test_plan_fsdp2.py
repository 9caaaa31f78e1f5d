"""``plan`` knows the peak of FSDP2: that of a real step, which PyTorch's memory tracker measures.

FSDP2 runs on the CPU over a fake process group, which sends nothing. Batches are one token and
layers are wide, so activations are less than 0.2% of the peak.
"""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.matrix import exhaustive
from support.planned import FAST, ROWS, WIDTH, Block, Net
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_ext import Simulated, fully_shard, plan

_MEMORY = Path(__file__).resolve().parents[2] / "docs" / "design" / "memory.md"
FP32 = MixedPrecisionPolicy()
HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
HALF_ON_THE_WIRE = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)

Units = list[Any]  # modules, or lists of modules that form one unit
Case = tuple[Callable[["Net"], Units], dict[str, Any]]


def the_blocks(model: Net) -> Units:
    return [*model.blocks]


def embedding_and_head_too(model: Net) -> Units:
    return [model.embedding, *model.blocks, model.head]


def norm_and_head_together(model: Net) -> Units:
    return [model.embedding, *model.blocks, [model.norm, model.head]]


def layers_in_blocks(model: Net) -> Units:
    return [*(block.up for block in model.blocks), *model.blocks]


def blocks_above_a_frozen_start(model: Net) -> Units:
    for module in (model.embedding, model.blocks[0], model.blocks[2].up):
        module.requires_grad_(False)
    return embedding_and_head_too(model)


def tied_blocks(model: Net) -> Units:
    model.head.weight = model.embedding.weight
    model.blocks[1].up = model.blocks[0].up
    return [[*model.blocks[:2]], *model.blocks[2:]]


def a_tied_root(model: Net) -> Units:
    model.head.weight = model.embedding.weight
    return []


def embedding_but_not_the_head(model: Net) -> Units:
    return [model.embedding, *model.blocks]


def blocks_in_a_container(model: Net) -> Units:
    model.embedding = nn.Embedding(3 * ROWS, WIDTH)  # its backward is the peak
    container = nn.Sequential(*model.blocks)
    model.blocks = nn.ModuleList([container])
    return [model.embedding, *container, container]


def one_row_more_than_ranks(model: Net) -> Units:
    rows = model.norm.weight.new_zeros(9, 2**18)
    model.register_parameter("rows", nn.Parameter(rows, requires_grad=False))
    return [*model.blocks]


def measured(
    units: Callable[[Net], Units],
    mesh: DeviceMesh,
    optimizer_states: int,
    *,
    steps: bool = False,
    **options: Any,
) -> int:
    """Return the peak of a step of FSDP2. With an optimizer, AdamW, it is the second step.

    ``steps`` says whether AdamW's step counts, with ``foreach`` as on GPUs.
    """
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    model: Any = Net()
    for unit in [*units(model), model]:
        torch_fully_shard(unit, mesh=mesh, **options)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=steps)
    if optimizer_states > 0:
        model(tokens).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    tracker = FSDPMemTracker(model, optimizer)
    with tracker:
        model(tokens).sum().backward()
        if steps:
            optimizer.step()
    (of_device,) = tracker.get_tracker_snapshot("peak").values()
    return int(of_device["Total"])


def planned(
    units: Callable[[Net], Units],
    mesh: DeviceMesh,
    optimizer_states: int,
    *,
    steps: bool = False,
    **options: Any,
) -> int | None:
    """Return what plan says of the same model under fsdp_ext."""
    replicas = mesh.size(0) if mesh.ndim == 2 else 1
    transport = Simulated(mesh.size(), FAST, replicas=replicas)
    with torch.device("meta"):
        model = Net()
    for unit in [*units(model), model]:
        fully_shard(unit, mesh=mesh, transport=transport, **options)
    asked = {"device_type": "cuda", "optimizer_fused": not steps}
    return plan(model, optimizer_states=optimizer_states, **asked).memory.fsdp2_peak


def _peaks(shape: tuple[int, ...], cases: list[Case]) -> list[tuple[int | None, int]]:
    warnings.simplefilter("ignore")
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=math.prod(shape), store=FakeStore())
    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    peaks = []
    for units, options in cases:
        states = options.pop("optimizer_states", 0)
        of_plan = planned(units, mesh, states, **options)
        peaks.append((of_plan, measured(units, mesh, states, **options)))
    return peaks


def expect_equal_peaks(shape: tuple[int, ...], cases: list[Case]) -> None:
    """Fail unless all that plan leaves out of the measured peaks are activations."""
    (peaks,) = run_ranks(_peaks, 1, shape, cases)
    assert len(peaks) == len(cases)
    for case, (of_plan, peak) in zip(cases, peaks, strict=True):
        assert of_plan is not None, case
        assert 0.998 * peak <= of_plan <= peak, case


@pytest.mark.parametrize("units", [the_blocks, embedding_and_head_too])
@pytest.mark.parametrize("ranks", [2, 8])
def test_the_peak_is_that_of_a_step(ranks: int, units: Callable[[Net], Units]) -> None:
    settings = itertools.product((FP32, HALF), (True, False))
    cases = [
        (units, {"mp_policy": policy, "reshard_after_forward": reshard})
        for policy, reshard in settings
    ]
    expect_equal_peaks((ranks,), cases)


def test_units_without_parameters_of_their_own_change_nothing() -> None:
    expect_equal_peaks((8,), [(blocks_in_a_container, {})])


def test_optimizer_states_are_in_the_peak() -> None:
    expect_equal_peaks((8,), [(the_blocks, {"optimizer_states": 2})])


def test_temporaries_of_the_optimizers_step_are_in_the_peak() -> None:
    expect_equal_peaks((2,), [(embedding_and_head_too, {"optimizer_states": 2, "steps": True})])


@pytest.mark.exhaustive
def test_the_peak_of_other_units_and_settings() -> None:
    cases: list[Case] = [
        (norm_and_head_together, {"mp_policy": HALF}),
        (layers_in_blocks, {"mp_policy": HALF}),
        (tied_blocks, {}),
        (a_tied_root, {}),
        (embedding_but_not_the_head, {}),
        (one_row_more_than_ranks, {}),
        (blocks_above_a_frozen_start, {"mp_policy": HALF}),
        (embedding_and_head_too, {"mp_policy": HALF_ON_THE_WIRE}),
        (embedding_and_head_too, {"mp_policy": HALF, "reshard_after_forward": 2}),
        (embedding_and_head_too, {"reshard_after_forward": 4}),
    ]
    expect_equal_peaks((8,), cases)


def test_the_peak_with_replicas() -> None:
    cases: list[Case] = [
        (units, {"mp_policy": policy})
        for units in (the_blocks, embedding_and_head_too)
        for policy in (HALF, HALF_ON_THE_WIRE)
    ]
    expect_equal_peaks((2, 4), cases)


# - How much memory fsdp_ext takes beside FSDP2


class LlamaLayer(nn.Module):
    def __init__(self, dim: int, grouped: int, hidden: int) -> None:
        super().__init__()
        sizes = [(dim, dim), (dim, grouped), (dim, grouped), (dim, dim)]
        sizes += [(dim, hidden), (dim, hidden), (hidden, dim)]
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2))
        self.linears = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)


class Llama(nn.Module):
    def __init__(self, layers: int, *sizes: int) -> None:
        super().__init__()
        dim = sizes[0]
        self.embedding = nn.Embedding(128256, dim)
        self.layers = nn.ModuleList(LlamaLayer(*sizes) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, 128256, bias=False)


LLAMA_8B = (32, 4096, 1024, 14336)
LLAMA_70B = (80, 8192, 1024, 28672)


@pytest.mark.parametrize("options", [{}, *exhaustive({"offload_policy": CPUOffloadPolicy()})])
@pytest.mark.parametrize("own_units", [False, True])
@pytest.mark.parametrize(
    ("sizes", "ranks", "replicas"),
    [(LLAMA_8B, 8, 1), (LLAMA_8B, 64, 1), (LLAMA_8B, 64, 8), (LLAMA_70B, 64, 1)],
)
def test_large_models_take_no_more_memory_than_under_fsdp2(
    sizes: tuple[int, ...], ranks: int, replicas: int, own_units: bool, options: dict[str, Any]
) -> None:
    with torch.device("meta"):
        model = Llama(*sizes)
    units: Units = [LlamaLayer, *([model.embedding, model.head] if own_units else [])]
    cells = []
    for is_fused in (True, False):
        memory = plan(
            model,
            ranks,
            replicas=replicas,
            units=units,
            mp_policy=HALF,
            optimizer_fused=is_fused,
            **options,
        ).memory
        assert memory.fsdp2_peak is not None
        assert memory.peak <= memory.fsdp2_peak or not is_fused
        cells.append(f"{memory.peak / 2**30:.2f}, {memory.fsdp2_peak / 2**30:.2f}")
    if not options:
        assert f" {' | '.join(cells)} |" in _MEMORY.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("ranks", "policy", "fused"),
    [
        (8, HALF_ON_THE_WIRE, [True, False]),
        (64, HALF_ON_THE_WIRE, [True, False]),
        (64, FP32, [True]),
        (1024, HALF, [True]),
    ],
)
def test_higher_peaks_are_documented(
    ranks: int, policy: MixedPrecisionPolicy, fused: list[bool]
) -> None:
    with torch.device("meta"):
        model = Llama(*LLAMA_8B)
    units: Units = [LlamaLayer, model.embedding, model.head]
    cells = []
    for is_fused in fused:
        memory = plan(model, ranks, units=units, mp_policy=policy, optimizer_fused=is_fused).memory
        assert memory.fsdp2_peak is not None
        cells.append(f"{memory.peak / 2**30:.2f}, {memory.fsdp2_peak / 2**30:.2f}")
    assert f" {' | '.join(cells)} |" in _MEMORY.read_text(encoding="utf-8")


# - What plan shows


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def test_the_table_and_json_have_the_peak() -> None:
    result = plan(on_meta(), 8, units=Block)
    peak = result.memory.fsdp2_peak
    assert peak is not None
    (row,) = (line for line in str(result).splitlines() if "FSDP2's peak" in line)
    assert row.endswith(f" {peak:,}")
    assert json.loads(result.to_json() or "")["memory"]["fsdp2_peak"] == peak


def test_a_peak_that_is_not_computed_is_none() -> None:
    result = plan(on_meta(), 1, units=Block)
    assert result.memory.fsdp2_peak is None
    (row,) = (line for line in str(result).splitlines() if "FSDP2's peak" in line)
    assert row.rstrip().endswith("not computed")
    assert json.loads(result.to_json() or "")["memory"]["fsdp2_peak"] is None


def _peaks_of_unusual_units() -> list[int | None]:
    dist.destroy_process_group()
    peaks = []
    for change in (
        lambda model: None,
        lambda model: model.blocks[0].set_modules_to_forward_prefetch([*model.blocks[1:3]]),
        lambda model: model.blocks[0].set_modules_to_backward_prefetch([model.blocks[1]]),
        lambda model: model.set_reshard_after_backward(False),
        lambda model: model.blocks[0].set_unshard_in_backward(False),
    ):
        model: Any = on_meta()
        for unit in [*model.blocks, model]:
            fully_shard(unit, transport=Simulated(8, FAST))
        change(model)
        peaks.append(plan(model).memory.fsdp2_peak)
    return peaks


def test_a_peak_of_other_schedules_is_not_computed() -> None:
    ((usual, *others),) = run_ranks(_peaks_of_unusual_units, 1)
    assert usual is not None
    assert others == [None] * 4
