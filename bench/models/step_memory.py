"""The memory of a rank in a training that is only predicted, by fsdp_ext.plan on the meta device.

The model is only its parameters, in the number and with the shapes that its checkpoint has.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

import fsdp_ext
from bench.models.published import Model
from fsdp_ext import MixedPrecisionPolicy

REDUCED = {2: torch.bfloat16, 4: torch.float32}  # bytes of a gradient on the wire: its dtype


class Parameters(nn.Module):
    """A module with parameters of these shapes, on the meta device."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))


class Layer(Parameters):
    """A layer of the transformer, which is a unit."""

    def __init__(self, model: Model) -> None:
        dim, hidden = model.dim, model.hidden
        key_value = dim * model.kv_heads // model.heads
        shapes: dict[str, tuple[int, ...]] = {"norm1": (dim,), "q": (dim, dim)}
        shapes |= {"k": (key_value, dim), "v": (key_value, dim), "out": (dim, dim)}
        shapes |= {"norm2": (dim,), "up": (hidden, dim), "down": (dim, hidden)}
        if model.gated:
            shapes["gate"] = (hidden, dim)
        if model.biases:  # as MPT: two norms, q, k and v as one matrix, out, up and down
            of_dim = ("norm1", "norm2", "out", "down")
            shapes |= {f"{name}_bias": (dim,) for name in of_dim}
            shapes |= {"qkv_bias": (3 * dim,), "up_bias": (hidden,)}
        super().__init__(shapes)


class Transformer(Parameters):
    """The layers, and the embeddings, the last norm and the head, which are the root's."""

    def __init__(self, model: Model) -> None:
        table = (model.vocabulary, model.dim)
        shapes: dict[str, tuple[int, ...]] = {"embedding": table}
        if model.positions:
            shapes["positions"] = (model.positions, model.dim)
        shapes["norm"] = (model.dim,)
        if model.biases:
            shapes["norm_bias"] = (model.dim,)
        if not model.tied:
            shapes["head"] = table
        super().__init__(shapes)
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.layers))


@cache
def planned_memory(model: Model, shards: int, replicas: int, reduce_bytes: int, depth: int) -> int:
    """Return the peak bytes of a rank by fsdp_ext.plan, without activations.

    Parameters, gradients and AdamW's two moments are in fp32, and gathers in bf16. Each layer is a
    unit and a bucket by itself. The transport is NCCL.

    Args:
        model: the model to train.
        shards: the number of ranks that share a parameter.
        replicas: the number of ranks that have the same shard.
        reduce_bytes: bytes of an element of a gradient on the wire, 2 or 4.
        depth: units gathered ahead.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=REDUCED[reduce_bytes])
    plan = fsdp_ext.plan(
        Transformer(model),
        shards * replicas,
        replicas=replicas,
        units=Layer,
        mp_policy=policy,
        bucket_bytes=0,
        prefetch=depth,
        transport="nccl",
        device_type="cuda",
    )
    return plan.memory.peak
