"""How fast would Llama train on 8 to 1,024 GPUs, and how well does that fit published figures?

This benchmark measures nothing: all figures except those marked "published" are simulated. Each row
is one `fsdp_ext.plan`, with a unit for each layer. Its inputs are the compute time of layers, which
is their FLOPs divided by a rate, and a link, which models NCCL's rings over published networks. It
returns the memory and the time of a step.

    model FLOPs of a token = 6 * matrix elements + 12 * layers * length * dim

The formula is from PaLM (arXiv 2204.02311, appendix B), and MFU uses it. llm-foundry's MFU counts
the same; torchtitan's performance.md also counts the look-up of the embedding. Each matrix element
has one multiplication and one addition in forward, and two of each in backward. Scores, and values
times scores, are 2 * length * dim products each. The plan computes only half of the attention,
because the mask is causal, and also the recomputation of activation checkpointing.

One figure is fitted for each GPU and its software, on one published run of a single node: the part
of the peak that the GPU reaches while it computes. With it, the plan of that run has the published
tokens/s; tests/project/test_scaling.py checks that, and says how to fit it again. The second table
compares the plans with the other runs. Figures and sources are in bench/published_runs.json. The
assumptions are printed above the tables.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fsdp_ext
from bench.harness.options import positive
from bench.harness.output import picture, print_table
from bench.harness.runner import Keep
from fsdp_ext import Link, MixedPrecisionPolicy
from fsdp_ext.comm.costs import default_reduction_bytes, link_of_buckets

TITLE = "scaling (simulated)"
PUBLISHED: dict[str, Any] = json.loads(
    (Path(__file__).parent / "published_runs.json").read_text(encoding="utf-8")
)
RUNS: list[dict[str, Any]] = [
    dict(zip(PUBLISHED["columns"], run, strict=True)) for run in PUBLISHED["runs"]
]
MEMORY_GB = 80  # of an H100
NODE = 8  # GPUs of a node, on all machines here
CAUSAL = 0.5  # the part of the attention that a causal mask leaves to compute
DEPTH = 1  # units gathered ahead
REDUCED = {2: torch.bfloat16, 4: torch.float32}  # bytes of a gradient on the wire: its dtype

# The figures by which NCCL chooses algorithms: https://github.com/NVIDIA/nccl,
# src/graph/tuning.cc (commit 5067397c), for the Simple protocol. They are the seconds of a ring's
# start and of its steps within a node and across nodes (baseLatencies, hwLatencies), the seconds of
# a tree's step across nodes, and a tree's busbw relative to a ring's.
RING_START, RING_STEP_NODE, RING_STEP_ACROSS = 8.4e-6, 3.4e-6, 14e-6
TREE_STEP_ACROSS, TREE_PART = 14e-6, 0.92

ASSUMPTIONS = (
    "parameters are in bf16 on the wire; each layer is a unit, and embedding, last norm and head "
    f"are the root; {DEPTH} unit is gathered ahead",
    "a collective is an NCCL ring, with the latencies of nccl/src/graph/tuning.cc and the "
    "bandwidth of nccl-tests; gathers and reductions share the wire",
    f"HSDP shards within a node of {NODE}; each GPU all-reduces its gradient shards through its "
    "own NIC (a ring or a tree, whichever is faster for a layer), while the next ones are reduced",
    "communication does not slow down compute, beyond what the fitted part of the peak includes",
    "the optimizer, the data and stragglers take no time",
    "a rank's memory is the peak of the plan: fp32 state of AdamW, gathered units, gradients that "
    "are not yet packed, and buffers of reductions; activations are not included",
)


# - What is planned


class Parameters(nn.Module):
    """A module with parameters of these shapes, on the meta device."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))

    def matrices(self) -> int:
        """Return the elements of the matrices."""
        return sum(param.numel() for param in self.parameters() if param.dim() == 2)


class Layer(Parameters):
    """A layer of a decoder-only transformer, which is a unit."""

    def __init__(self, style: str, dim: int, hidden: int, key_value: int) -> None:
        shapes: dict[str, tuple[int, ...]] = {"q": (dim, dim), "out": (dim, dim)}
        shapes |= {"k": (key_value, dim), "v": (key_value, dim)}
        shapes |= {"up": (hidden, dim), "down": (dim, hidden), "norm1": (dim,), "norm2": (dim,)}
        if style == "mpt":  # q, k and v are one matrix
            of_dim = ("norm1", "norm2", "out", "down")
            shapes |= {f"{name}_bias": (dim,) for name in of_dim}
            shapes |= {"qkv_bias": (3 * dim,), "up_bias": (hidden,)}
        else:
            shapes["gate"] = (hidden, dim)
        super().__init__(shapes)


class Transformer(Parameters):
    """The layers, and the embeddings, the last norm and the head, which are the root's."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        style, dim, table = sizes["style"], sizes["dim"], (sizes["vocabulary"], sizes["dim"])
        shapes: dict[str, tuple[int, ...]] = {"embedding": table, "norm": (dim,)}
        if style == "mpt":  # the embedding is also the head
            shapes |= {"positions": (2048, dim), "norm_bias": (dim,)}
        else:
            shapes["head"] = table
        super().__init__(shapes)
        key_value = dim * sizes["kv_heads"] // sizes["heads"]
        layers = range(sizes["layers"])
        self.layers = nn.ModuleList(Layer(style, dim, sizes["hidden"], key_value) for _ in layers)


@dataclass(frozen=True)
class Step:
    """A training step to plan.

    Args:
        gpu, network, model, recompute: names in published_runs.json.
        ranks: their number.
        batch, length: sequences of a rank, and tokens of a sequence.
        reduce_bytes: bytes of an element of a gradient on the wire.
        hybrid: whether it is HSDP: sharded within a node, replicated across nodes.
    """

    gpu: str
    network: str
    model: str
    ranks: int
    batch: int
    length: int
    recompute: str
    reduce_bytes: int = 4
    hybrid: bool = False


def seconds_of_units(model: Transformer, step: Step, rate: float) -> dict[str, tuple[float, float]]:
    """Return the compute seconds of each unit's forward and backward, at `rate` FLOP/s."""
    dim, (layer, *_) = model.norm.numel(), model.layers
    matrices, attention = 2 * layer.matrices(), CAUSAL * 4 * step.length * dim
    again = PUBLISHED["recompute"][step.recompute]
    backward = 2 * (matrices + attention) + again[0] * matrices + again[1] * attention
    each = step.batch * step.length / rate  # seconds of a FLOP for each token
    of_layer = (each * (matrices + attention), each * backward)
    head = each * 2 * model.embedding.numel()
    units = {f"layers.{number}": of_layer for number in range(len(model.layers))}
    return {"the root": (head, 2 * head), **units}


def model_flops(model: Transformer, length: int) -> float:
    """Return the FLOPs of forward and backward for each token, by the formula above."""
    matrices = sum(layer.matrices() for layer in model.layers) + model.embedding.numel()
    return 6 * matrices + 12 * len(model.layers) * length * model.norm.numel()


def ring(network: str, ranks: int) -> Link:
    """Return the link that corresponds to a ring of this many ranks."""
    busbw, nodes = PUBLISHED["networks"][network], math.ceil(ranks / NODE)
    across = busbw["across"] if nodes > 1 else math.inf
    algbw_of_busbw = ranks / (ranks - 1)
    return Link(
        f"ring of {ranks} (simulated), {network}",
        alpha=RING_START + (ranks - nodes) * RING_STEP_NODE + (nodes - 1) * RING_STEP_ACROSS,
        beta=min(busbw["gather"], across) * algbw_of_busbw,
        reduce_beta=min(busbw["reduce"], across) * algbw_of_busbw,
        one_wire=True,
    )


def replica_link(network: str, nodes: int, nbytes: int) -> Link:
    """Return the link between replicas, through one NIC of each node.

    It is the faster one of a ring over the nodes and a tree, for all-reduces of `nbytes`.
    """
    rate = PUBLISHED["networks"][network]["across"] / NODE
    of_ring = Link(
        f"ring over {nodes} nodes (simulated), {network}",
        alpha=RING_START + 2 * (nodes - 1) * RING_STEP_ACROSS,
        beta=rate * nodes / (nodes - 1),
    )
    of_tree = replace(
        of_ring,
        name=f"tree over {nodes} nodes (simulated), {network}",
        alpha=2 * math.log2(nodes) * TREE_STEP_ACROSS,
        beta=rate * TREE_PART,
    )
    return min(of_ring, of_tree, key=lambda link: link.seconds("all_reduce", nbytes))


def plan_of(step: Step, part: float) -> fsdp_ext.Plan:
    """Return the plan of a step on GPUs that reach this part of their peak."""
    model = Transformer(PUBLISHED["models"][step.model])
    replicas = max(1, step.ranks // NODE) if step.hybrid else 1
    shards = step.ranks // replicas
    between = None
    if replicas > 1:
        typical = link_of_buckets(("nccl", "nccl"), "nccl", shards, replicas)
        of_layer = sum(param.numel() for param in model.layers[0].parameters())
        most = default_reduction_bytes(typical, shards, replicas, median=0)
        message = min(step.reduce_bytes * of_layer, most)
        between = replica_link(step.network, replicas, message // NODE)
    return fsdp_ext.plan(
        model,
        step.ranks,
        replicas=replicas,
        units=Layer,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, REDUCED[step.reduce_bytes]),
        bucket_bytes=0,
        prefetch=DEPTH,
        transport="nccl",
        device_type="cuda",
        link=ring(step.network, shards),
        replica_link=between,
        compute=seconds_of_units(model, step, part * PUBLISHED["gpus"][step.gpu]["peak"]),
    )


# - Rows


def row_of(step: Step) -> dict[str, Any]:
    """Return the row of a step, as it is planned."""
    gpu = PUBLISHED["gpus"][step.gpu]
    plan = plan_of(step, gpu["part_of_peak"])
    assert plan.prediction is not None
    tokens = step.batch * step.length / plan.prediction.step
    flops = model_flops(Transformer(PUBLISHED["models"][step.model]), step.length)
    return {
        "model": step.model,
        "gpu": step.gpu,
        "network": step.network,
        "strategy": "HSDP" if step.hybrid else "FSDP",
        "link": plan.link.name,
        "replica_link": None if plan.replica_link is None else plan.replica_link.name,
        "ranks": step.ranks,
        "batch": step.batch,
        "length": step.length,
        "recompute": step.recompute,
        "reduce_bytes": step.reduce_bytes,
        "part_of_peak": gpu["part_of_peak"],
        "simulated_step_ms": plan.prediction.step * 1e3,
        "simulated_exposed_ms": plan.prediction.exposed * 1e3,
        "simulated_tokens": tokens,
        "simulated_mfu": tokens * flops / gpu["peak"],
        "memory_gb": plan.memory.peak / 1e9,
        "assumptions": list(ASSUMPTIONS),
    }


def check_row(run: dict[str, Any]) -> dict[str, Any]:
    """Return the row that compares a published run with its plan."""
    of_run = ("published_tokens", "source", "fitted_on_this")
    step = Step(**{name: value for name, value in run.items() if name not in of_run})
    row = row_of(step)
    published = run["published_tokens"]
    return {
        "table": "check",
        **row,
        **{name: run[name] for name in of_run},
        "published_mfu": row["simulated_mfu"] * published / row["simulated_tokens"],
        "error": row["simulated_tokens"] / published - 1,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --batch."""
    parser.add_argument("--batch", type=positive, default=1, help="sequences of a rank; default: 1")


def measure(args: argparse.Namespace, keep: Keep) -> None:
    """Predict, then check; --quick predicts for three sizes only."""
    sizes = (8, 64, 1024) if args.quick else (8, 16, 32, 64, 128, 256, 512, 1024)
    of_h100 = ("H100 SXM", "H100 nodes, 8 x 400 Gb/s")
    for model, recompute in (("Llama 3 8B", "selective, by operator"), ("Llama 3 70B", "full")):
        for length in (8192, 2048):
            for hybrid in (False, True):
                for ranks in sizes:
                    if hybrid and ranks <= NODE:
                        continue  # the same as FSDP
                    step = Step(
                        *of_h100, model, ranks, args.batch, length, recompute, hybrid=hybrid
                    )
                    keep({"table": "prediction (simulated)", **row_of(step)})
    for run in RUNS:
        keep(check_row(run))


def show(rows: list[dict[str, Any]]) -> None:
    """Print the assumptions and the tables."""
    predictions = [row for row in rows if row["table"] != "check"]
    checks = [row for row in rows if row["table"] == "check"]
    for row in rows[:1]:
        print("assumptions:", *row["assumptions"], sep="\n- ")
    if predictions:
        show_predictions(predictions)
    if checks:
        show_checks(checks)


def show_predictions(rows: list[dict[str, Any]]) -> None:
    """Print the first table."""
    first = rows[0]
    print(
        f"\npredictions (simulated): {first['gpu']}, {first['part_of_peak']:.0%} of its peak while "
        f"it computes, {first['batch']} sequence(s) a rank, fp32 reductions"
    )
    header = ["model", "length", "strategy", "ranks", "simulated step ms", "simulated exposed ms"]
    header += ["simulated tokens/s a GPU", "simulated MFU", "GB a rank"]
    print_table(
        header,
        [
            [
                row["model"],
                f"{row['length']:,}",
                row["strategy"],
                f"{row['ranks']:,}",
                f"{row['simulated_step_ms']:,.0f}",
                f"{row['simulated_exposed_ms']:,.0f}",
                f"{row['simulated_tokens']:,.0f}",
                f"{row['simulated_mfu']:.1%}",
                f"{row['memory_gb']:.1f}{'!' if row['memory_gb'] > MEMORY_GB else ' '}",
            ]
            for row in rows
        ],
    )
    if any(row["memory_gb"] > MEMORY_GB for row in rows):
        print(f"!: more than the GPU's {MEMORY_GB} GB; the row is shown for its time only")


def show_checks(rows: list[dict[str, Any]]) -> None:
    """Print the second table, and a summary of the errors."""
    print("\nchecks against published figures; *: the GPU's part of the peak is fitted to this row")
    header = ["model", "GPU", "part of peak", "strategy", "GPUs", "batch x length", "recompute"]
    header += ["published tokens/s a GPU", "simulated", "error", "source"]
    print_table(
        header,
        [
            [
                row["model"],
                row["gpu"],
                f"{row['part_of_peak']:.1%}",
                row["strategy"],
                f"{row['ranks']}",
                f"{row['batch']} x {row['length']:,}",
                row["recompute"],
                f"{row['published_tokens']:,.0f}",
                f"{row['simulated_tokens']:,.0f}",
                "*" if row["fitted_on_this"] else f"{row['error']:+.1%}",
                row["source"],
            ]
            for row in rows
        ],
    )
    fits = {row["gpu"]: row for row in rows if row["fitted_on_this"]}
    checks = [row for row in rows if not row["fitted_on_this"]]
    # A GPU reaches more of its peak with recomputation, and with larger batches.
    for same in (True, False):
        errors = [
            abs(row["error"])
            for row in checks
            if (row["recompute"] == fits[row["gpu"]]["recompute"]) == same
        ]
        if errors:
            print(
                f"{len(errors)} checks that recompute {'as' if same else 'differently from'} the "
                f"fitted run: median error {statistics.median(errors):.1%}, largest error "
                f"{max(errors):.1%}"
            )


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Draw tokens/s a GPU over the ranks, for FSDP and HSDP; each model has its own axes."""
    predictions = [row for row in rows if row["table"] != "check"]
    models = list(dict.fromkeys(row["model"] for row in predictions))
    with picture(path, f"{predictions[0]['network']} (simulated)", columns=len(models)) as all_axes:
        for axes, model in zip(all_axes, models, strict=True):
            of_model = [row for row in predictions if row["model"] == model]
            curves = dict.fromkeys((row["length"], row["strategy"]) for row in of_model)
            for length, strategy in curves:
                points = [r for r in of_model if (r["length"], r["strategy"]) == (length, strategy)]
                ranks = [row["ranks"] for row in points]
                tokens = [row["simulated_tokens"] for row in points]
                style = "o-" if strategy == "FSDP" else "s--"
                axes.plot(ranks, tokens, style, label=f"{strategy}, {length:,} tokens")
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
            axes.set(title=model, xlabel="ranks", ylabel="simulated tokens/s a GPU")
            axes.legend(fontsize="small")
