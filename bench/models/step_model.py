"""What a training step of a transformer takes on many GPUs, by its FLOPs and by published networks.

    model FLOPs of a token = 6 * matrix elements + 12 * layers * length * dim

(PaLM, arXiv 2204.02311, appendix B; llm-foundry's MFU counts the same, that of torchtitan's
performance.md the look-up of the embedding, too): each element of a matrix multiplies and adds once
forward and twice backward; scores, and values times scores, are 2 * length * dim products each. MFU
is by these. The GPU is taken to compute half of the attention, whose mask is causal, and what
activation checkpointing computes again.

How compute and communication overlap is planner.schedule's to say. All times are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

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
CAUSAL = 0.5  # of the attention is computed
DEPTH = 1  # units gathered ahead

ASSUMPTIONS = (
    "bf16 parameters on the wire; each layer a unit, embedding, last norm and head the root; "
    f"{DEPTH} unit gathered ahead",
    "a collective is a ring of NCCL's: its steps' latencies by nccl/src/graph/tuning.cc, its "
    "bandwidth by nccl-tests",
    "gathers and reductions have a lane each, but a step takes at least what all of both take one "
    "after another, since they share NICs",
    f"HSDP: shards within a node of {NODE}; a GPU all-reduces its shards of gradients through its "
    "own NIC (a ring or a tree), after their reduction and before the next",
    "communication takes nothing from compute, beyond what the fitted part of the peak has of it",
    "no time for the optimizer, the data, or stragglers",
    "a rank's memory is the peak of fsdp_ext.plan over ranks that share a parameter: fp32 state of "
    "AdamW, what is gathered, gradients until they are packed, and buffers of reductions, the "
    "root's, too; without activations",
)


# - Compute


def model_flops(model: Model, length: int) -> float:
    """Return the FLOPs of a token's forward and backward, by the formula above.

    Args:
        model: whose embedding is a look-up; its head is a matrix.
        length: of the sequence, tokens.
    """
    matrices = model.layers * model.layer_matrices + model.vocabulary * model.dim
    return 6 * matrices + 12 * model.layers * length * model.dim


@dataclass(frozen=True)
class Step:
    """A training step, by what a rank does in it.

    Args:
        model, network: of it.
        ranks: how many.
        batch, length: sequences of a rank, and their tokens.
        recompute: what backward computes again.
        reduce_bytes: of an element of a gradient on the wire.
        hybrid: HSDP, over nodes.
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
        """How many ranks share a parameter."""
        return min(self.ranks, NODE) if self.hybrid else self.ranks


def layer_seconds(step: Step, rate: float) -> tuple[float, float]:
    """Return how long a layer's forward and backward compute at `rate` FLOP/s."""
    matrices = 2 * step.model.layer_matrices
    attention = CAUSAL * 4 * step.length * step.model.dim
    again = step.recompute.matrices * matrices + step.recompute.attention * attention
    forward = matrices + attention
    return step.tokens * forward / rate, step.tokens * (2 * forward + again) / rate


# - Communication


def ring(network: Network, ranks: int) -> Link:
    """Return the link that a ring over so many ranks is."""
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


def all_reduce_seconds(step: Step, parameters: int) -> float:
    """Return what HSDP's all-reduce of a unit's gradient shards takes, 0 within a node.

    By a ring over nodes or a tree, whichever is the faster, through one NIC of each node.
    """
    nodes = step.ranks // step.shards
    if nodes == 1:
        return 0.0
    seconds = step.reduce_bytes * parameters / step.shards / (step.network.across / NODE)
    steps = 2 * (nodes - 1)
    ring_seconds = RING_START + steps * RING_STEP_ACROSS + steps / nodes * seconds
    tree_seconds = 2 * math.log2(nodes) * TREE_STEP_ACROSS + 2 * seconds / TREE_PART
    return min(ring_seconds, tree_seconds)


# - A step


def stages(step: Step, rate: float) -> tuple[Stage, list[Stage]]:
    """Return the root's stage and those of the layers, at `rate` FLOP/s."""
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
            copy_seconds_reduce=all_reduce_seconds(step, parameters),
        )

    root = stage("root", model.root_parameters, head, 2 * head, reshards=False)
    layers = [
        stage(f"layer {i}", model.layer_parameters, forward, backward, reshards=True)
        for i in range(model.layers)
    ]
    return root, layers


def step_seconds(step: Step, rate: float) -> tuple[float, Prediction]:
    """Return how long a step takes (simulated), and the schedule's prediction.

    The former is the longer of the latter and of all that goes over the shared network.
    """
    root, layers = stages(step, rate)
    found = predict(root, layers, ring(step.network, step.shards), depth=DEPTH)
    # All-reduces of HSDP go over NICs, what is within a node does not.
    of_nics = sum(stage.copy_seconds_reduce for stage in [root, *layers])
    return max(found.step, found.wire - of_nics), found


def tokens_per_second(step: Step, rate: float) -> float:
    """Return tokens a second and GPU (simulated)."""
    return step.tokens / step_seconds(step, rate)[0]


def memory_bytes(step: Step) -> int:
    """Return what a rank has at most, without activations: bench/models/step_memory.py."""
    return planned_memory(step.model, step.shards, step.reduce_bytes, DEPTH)


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
    """Return the part of the peak with which the prediction is what was measured.

    Raises:
        ValueError: if no part of it does.
    """
    step, peak = step_of(measured), measured.stack.peak
    if tokens_per_second(step, peak) < measured.tokens:
        raise ValueError(
            f"{measured.model.name} on {measured.gpus} {measured.stack.name} expects at most "
            f"{tokens_per_second(step, peak):.0f} tokens/s a GPU but {measured.tokens:.0f} were "
            "measured; look at its batch, its length and what is recomputed"
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
    """Return the part of its peak that each GPU reaches, by the one measurement that fits it."""
    return {measured.stack: fit(measured) for measured in measurements if measured.fits}
