"""Predicts a transformer's training step on many GPUs, from its FLOPs and published networks.

    model FLOPs of a token = 6 * matrix elements + 12 * layers * length * dim

The formula is from PaLM (arXiv 2204.02311, appendix B). llm-foundry's MFU counts the same;
torchtitan's performance.md also counts the look-up of the embedding. Each matrix element has one
multiplication and one addition in forward, and two of each in backward. Scores, and values times
scores, are 2 * length * dim products each. MFU uses this formula. The model of the GPU computes
only half of the attention, because the mask is causal, and it also computes what activation
checkpointing recomputes.

planner.schedule computes how compute and communication overlap. All times are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from bench.models.published import (
    MEASUREMENTS,
    NODE,
    RING_START,
    RING_STEP_ACROSS,
    RING_STEP_NODE,
    TREE_PART,
    TREE_STEP_ACROSS,
    Measurement,
    Model,
    Network,
    Recompute,
    Stack,
)
from bench.models.step_memory import planned_memory
from fsdp_ext.comm.link import Link
from fsdp_ext.planner.schedule import Prediction, Stage, predict

GATHER_BYTES = 2  # of a parameter on the wire: bf16
CAUSAL = 0.5  # the part of the attention that a causal mask leaves to compute
DEPTH = 1  # units gathered ahead

ASSUMPTIONS = (
    "parameters are in bf16 on the wire; each layer is a unit, and embedding, last norm and head "
    f"are the root; {DEPTH} unit is gathered ahead",
    "a collective is an NCCL ring, with the latencies of nccl/src/graph/tuning.cc and the "
    "bandwidth of nccl-tests",
    "gathers and reductions overlap each other, but a step takes at least the sum of their times, "
    "since they share NICs",
    f"HSDP shards within a node of {NODE}; each GPU all-reduces its gradient shards through its "
    "own NIC (a ring or a tree, whichever is faster for a layer), while the next ones are reduced",
    "communication does not slow down compute, beyond what the fitted part of the peak includes",
    "the optimizer, the data and stragglers take no time",
    "a rank's memory is the peak of fsdp_ext.plan: fp32 state of AdamW, gathered units, gradients "
    "that are not yet packed, and buffers of reductions; activations are not included",
)


# - Compute


def model_flops(model: Model, length: int) -> float:
    """Return the FLOPs of forward and backward for each token, by the formula above.

    Args:
        model: its embedding is a look-up, and its head is a matrix.
        length: tokens of a sequence.
    """
    matrices = model.layers * model.layer_matrices + model.vocabulary * model.dim
    return 6 * matrices + 12 * model.layers * length * model.dim


@dataclass(frozen=True)
class Step:
    """A training step to predict.

    Args:
        model: that trains.
        network: between the ranks.
        ranks: their number.
        batch, length: sequences of a rank, and tokens of a sequence.
        recompute: what activation checkpointing recomputes.
        reduce_bytes: bytes of an element of a gradient on the wire.
        hybrid: whether it is HSDP: sharded within a node, replicated across nodes.
    """

    model: Model
    network: Network
    ranks: int
    batch: int
    length: int
    recompute: Recompute
    reduce_bytes: int = 4
    hybrid: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a rank."""
        return self.batch * self.length

    @property
    def shards(self) -> int:
        """The number of ranks that share a parameter."""
        return min(self.ranks, NODE) if self.hybrid else self.ranks

    @property
    def replicas(self) -> int:
        """The number of ranks that have the same shard."""
        return self.ranks // self.shards


def layer_seconds(step: Step, rate: float) -> tuple[float, float]:
    """Return the compute seconds of a layer's forward and backward, at `rate` FLOP/s."""
    matrices = 2 * step.model.layer_matrices
    attention = CAUSAL * 4 * step.length * step.model.dim
    again = step.recompute.matrices * matrices + step.recompute.attention * attention
    forward = matrices + attention
    return step.tokens * forward / rate, step.tokens * (2 * forward + again) / rate


# - Communication


def ring(network: Network, ranks: int) -> Link:
    """Return the link that corresponds to a ring of so many ranks."""
    nodes = math.ceil(ranks / NODE)
    steps = ranks - nodes, nodes - 1
    alpha = RING_START + steps[0] * RING_STEP_NODE + steps[1] * RING_STEP_ACROSS
    across = network.across if nodes > 1 else math.inf
    algbw_of_busbw = ranks / (ranks - 1)
    return Link(
        f"ring of {ranks} (simulated), {network.name}",
        alpha=alpha,
        beta=min(network.node_gather, across) * algbw_of_busbw,
        reduce_beta=min(network.node_reduce, across) * algbw_of_busbw,
        source=network.source,
    )


def all_reduce_bytes(step: Step, parameters: int) -> int:
    """Return the bytes of a rank that HSDP sums over replicas for a unit; 0 if there are none."""
    return step.reduce_bytes * parameters // step.shards if step.replicas > 1 else 0


def replica_link(step: Step) -> Link | None:
    """Return the link between replicas, through one NIC of each node; None if there are none.

    It is the faster one of a ring over the nodes and a tree, for the gradients of a layer.
    """
    nodes = step.replicas
    if nodes == 1:
        return None
    rate = step.network.across / NODE
    steps = 2 * (nodes - 1)
    of_ring = Link(
        f"ring over {nodes} nodes (simulated), {step.network.name}",
        alpha=RING_START + steps * RING_STEP_ACROSS,
        beta=rate * nodes / (nodes - 1),
        source=step.network.source,
    )
    of_tree = replace(
        of_ring,
        name=f"tree over {nodes} nodes (simulated), {step.network.name}",
        alpha=2 * math.log2(nodes) * TREE_STEP_ACROSS,
        beta=rate * TREE_PART,
    )
    nbytes = all_reduce_bytes(step, step.model.layer_parameters)
    return min(of_ring, of_tree, key=lambda link: link.seconds("all_reduce", nbytes))


# - A step


def stages(step: Step, rate: float) -> tuple[Stage, list[Stage]]:
    """Return the stage of the root and the stages of the layers, at `rate` FLOP/s."""
    model = step.model
    forward, backward = layer_seconds(step, rate)
    head = 2 * step.tokens * model.vocabulary * model.dim / rate

    def stage(name: str, parameters: int, ahead: float, back: float, reshards: bool) -> Stage:
        return Stage(
            name,
            ahead,
            back,
            gather_bytes=GATHER_BYTES * parameters,
            reduce_bytes=step.reduce_bytes * parameters,
            reshards=reshards,
            all_reduce_bytes=all_reduce_bytes(step, parameters),
        )

    root = stage("root", model.root_parameters, head, 2 * head, reshards=False)
    layers = [
        stage(f"layer {i}", model.layer_parameters, forward, backward, reshards=True)
        for i in range(model.layers)
    ]
    return root, layers


def step_seconds(step: Step, rate: float) -> tuple[float, Prediction]:
    """Return the seconds of a step (simulated), and the schedule's prediction.

    A step takes as long as the prediction, or as all collectives on the shared network if that is
    longer.
    """
    root, layers = stages(step, rate)
    within, between = ring(step.network, step.shards), replica_link(step)
    found = predict(root, layers, within, depth=DEPTH, replica_link=between)
    # HSDP's all-reduces use the NICs; its other collectives stay within a node.
    of_nics = sum(span.end - span.begin for span in found.spans if span.lane == "all-reduce")
    return max(found.step, found.wire - of_nics), found


def tokens_per_second(step: Step, rate: float) -> float:
    """Return the tokens/s of a GPU (simulated)."""
    return step.tokens / step_seconds(step, rate)[0]


def memory_bytes(step: Step) -> int:
    """Return the peak memory of a rank, without activations (bench/models/step_memory.py)."""
    return planned_memory(step.model, step.shards, step.replicas, step.reduce_bytes, DEPTH)


def step_of(measured: Measurement) -> Step:
    """Return the step that was measured."""
    return Step(
        measured.model,
        measured.network,
        measured.gpus,
        measured.batch,
        measured.length,
        measured.recompute,
        measured.reduce_bytes,
        measured.hybrid,
    )


def fit(measured: Measurement) -> float:
    """Return the part of the peak for which the prediction equals the measurement.

    Raises:
        ValueError: if even the whole peak predicts a slower step.
    """
    step, peak = step_of(measured), measured.stack.peak
    if tokens_per_second(step, peak) < measured.tokens:
        raise ValueError(
            f"{measured.model.name} on {measured.gpus} {measured.stack.name} can reach at most "
            f"{tokens_per_second(step, peak):.0f} tokens/s a GPU, and the measurement says "
            f"{measured.tokens:.0f}; check its batch, its length and what it recomputes"
        )
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        if tokens_per_second(step, middle * peak) < measured.tokens:
            low = middle
        else:
            high = middle
    return high


def fitted(measurements: Iterable[Measurement] = MEASUREMENTS) -> dict[Stack, float]:
    """Return the part of the peak that each GPU reaches, fitted on one measurement each."""
    return {measured.stack: fit(measured) for measured in measurements if measured.fits}
