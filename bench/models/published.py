"""Published facts and their sources: models, networks, and how fast FSDP trained there.

`step_model` predicts from them, and `scaling` compares.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_ext.comm.link import H100_NODE, INFINIBAND_400G_NODES

NODE = 8  # GPUs of a node, on all machines here


# - Models


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder-only transformer.

    Args:
        name: in tables.
        layers, dim, heads, kv_heads, vocabulary: of the transformer.
        hidden: width of the feed-forward part.
        gated: whether the feed-forward part has three matrices (SwiGLU) or two.
        biases: whether linear layers and norms have biases.
        tied: whether the embedding is also the head.
        positions: number of learned positions.
    """

    name: str
    layers: int
    dim: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    gated: bool = True
    biases: bool = False
    tied: bool = False
    positions: int = 0

    @property
    def layer_matrices(self) -> int:
        """Elements of the matrices of a layer."""
        attention = 2 * self.dim * self.dim * (self.heads + self.kv_heads) // self.heads
        return attention + (3 if self.gated else 2) * self.dim * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer."""
        biases = 7 * self.dim + self.hidden if self.biases else 0  # of norms, qkv, out, up, down
        return self.layer_matrices + 2 * self.dim + biases

    @property
    def root_parameters(self) -> int:
        """Parameters outside the layers."""
        tables = (1 if self.tied else 2) * self.vocabulary + self.positions
        return tables * self.dim + (2 if self.biases else 1) * self.dim

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.layers * self.layer_parameters + self.root_parameters


# Sizes: https://huggingface.co/meta-llama/Meta-Llama-3-8B and -70B, config.json.
LLAMA3_8B = Model("Llama 3 8B", 32, 4096, 14336, 32, 8, 128256)
LLAMA3_70B = Model("Llama 3 70B", 80, 8192, 28672, 64, 8, 128256)
# Llama 2: the same, of Llama-2-7b, -13b and -70b. 34B has the sizes of CodeLlama-34b.
LLAMA2_7B = Model("Llama 2 7B", 32, 4096, 11008, 32, 32, 32000)
LLAMA2_13B = Model("Llama 2 13B", 40, 5120, 13824, 40, 40, 32000)
LLAMA2_34B = Model("Llama 2 34B", 48, 8192, 22016, 64, 8, 32000)
LLAMA2_70B = Model("Llama 2 70B", 80, 8192, 28672, 64, 8, 32000)


def _mpt(name: str, layers: int, dim: int, heads: int) -> Model:
    """MPT as in mosaicml/llm-foundry, scripts/train/yamls/pretrain, for sequences of 2,048."""
    return Model(
        name, layers, dim, 4 * dim, heads, heads, 50368,
        gated=False, biases=True, tied=True, positions=2048,
    )  # fmt: skip


MPT_1B = _mpt("MPT 1B", 24, 2048, 16)
MPT_3B = _mpt("MPT 3B", 32, 2560, 20)
MPT_7B = _mpt("MPT 7B", 32, 4096, 32)
MPT_13B = _mpt("MPT 13B", 40, 5120, 40)
MPT_30B = _mpt("MPT 30B", 48, 7168, 56)
MPT_70B = _mpt("MPT 70B", 80, 8192, 64)


# - Networks


@dataclass(frozen=True)
class Network:
    """The bandwidth between GPUs: busbw as nccl-tests defines it, bytes a second.

    Args:
        name: in tables.
        node_gather: busbw of all-gathers within a node.
        node_reduce: busbw of reduce-scatters within a node.
        across: busbw of collectives over nodes, whose ring uses all NICs of a node; the share of a
            GPU is across / NODE.
        source: of the figures.
    """

    name: str
    node_gather: float
    node_reduce: float
    across: float
    source: str


H100_400G = Network(
    "H100 nodes, 8 x 400 Gb/s",
    node_gather=H100_NODE.beta * 7 / 8,
    node_reduce=(H100_NODE.reduce_beta or H100_NODE.beta) * 7 / 8,
    across=INFINIBAND_400G_NODES.beta * 31 / 32,
    source=f"{H100_NODE.source}; {INFINIBAND_400G_NODES.source}",
)
# Two nodes of 8 A100 with four 200 Gb/s NICs: all-reduces have 232.54 GB/s within a node and
# 86 GB/s across (NVIDIA/nccl-tests#175). Gathers and reductions are assumed to be as fast, and
# other NICs to reach the same part of their rate, 86%.
A100_BUSBW = 232.5e9
OF_NICS = 0.86
A100_200G = Network(
    "A100 nodes, 8 x 200 Gb/s", A100_BUSBW, A100_BUSBW, OF_NICS * 200e9, "NVIDIA/nccl-tests#175"
)
A100_50G = Network(
    "A100 nodes, 400 Gb/s a node", A100_BUSBW, A100_BUSBW, OF_NICS * 50e9, "NVIDIA/nccl-tests#175"
)
H100_100G = Network(
    "H100 nodes, 800 Gb/s a node",
    H100_400G.node_gather,
    H100_400G.node_reduce,
    OF_NICS * 100e9,
    f"{H100_NODE.source}; NVIDIA/nccl-tests#175",
)

# The figures by which NCCL chooses algorithms: https://github.com/NVIDIA/nccl,
# src/graph/tuning.cc (commit 5067397c), for the Simple protocol. They are the seconds of a ring's
# start and of its steps within a node and across nodes (baseLatencies, hwLatencies), the seconds of
# a tree's step across nodes, and a tree's busbw relative to a ring's.
RING_START, RING_STEP_NODE, RING_STEP_ACROSS = 8.4e-6, 3.4e-6, 14e-6
TREE_STEP_ACROSS, TREE_PART = 14e-6, 0.92


# - Measurements


@dataclass(frozen=True)
class Recompute:
    """The parts of the layers' forward that activation checkpointing recomputes in backward."""

    name: str
    matrices: float
    attention: float


NONE = Recompute("none", 0.0, 0.0)
FULL = Recompute("full", 1.0, 1.0)
# pytorch/torchtitan, torchtitan/distributed/activation_checkpoint.py: it saves attention and every
# other matrix product, or it checkpoints every other layer.
SELECTIVE_OP = Recompute("selective, by operator", 0.5, 0.0)
SELECTIVE_LAYER = Recompute("selective, by layer", 0.5, 0.5)


@dataclass(frozen=True)
class Stack:
    """A GPU and its software. One figure of it is fitted: the part of the peak that it reaches.

    Args:
        name: in tables.
        peak: dense bf16 FLOP/s by NVIDIA's data sheet. For the H100 SXM it says 1,979e12 with
            sparsity, of which half is dense. For the A100 it says 312e12.
    """

    name: str
    peak: float


H100 = Stack("H100 SXM", 989.5e12)
H100_500W = Stack("H100 at 500 W, eager", 989.5e12)
H100_500W_COMPILED = Stack("H100 at 500 W, torch.compile", 989.5e12)
A100_80 = Stack("A100 80 GB", 312e12)
A100_40 = Stack("A100 40 GB", 312e12)


@dataclass(frozen=True)
class Measurement:
    """A published speed of training.

    Args:
        stack: GPU and software.
        network: between the GPUs.
        model: trained in bf16 with fp32 master weights.
        gpus: their number.
        batch: sequences a GPU in one forward and backward.
        length: tokens of a sequence.
        recompute: what activation checkpointing recomputed.
        reduce_bytes: bytes of an element of a gradient on the wire.
        tokens: tokens/s of a GPU.
        source: of the figure.
        hybrid: whether it was HSDP: sharded within a node, replicated across nodes.
        fits: whether the stack's figure is fitted to it, so that it is no check.
    """

    stack: Stack
    network: Network
    model: Model
    gpus: int
    batch: int
    length: int
    recompute: Recompute
    reduce_bytes: int
    tokens: float
    source: str
    hybrid: bool = False
    fits: bool = False


# mosaicml/llm-foundry, scripts/train/benchmarking/README.md (commit 061f2c7c), FSDP FULL_SHARD.
# "bf16, PURE" reduces in bf16. "amp_bf16, DEFAULT" reduces in fp32 (mosaicml/composer,
# composer/trainer/mosaic_fsdp_utils.py), but older versions did not, and the version is not given.
# A row with gradient accumulation counts as that many steps of a microbatch, each with its own
# communication. The A100 nodes have 1,600 Gb/s (RoCE). The network of the H100 nodes is not given;
# 8 x 400 Gb/s is assumed.
LLM_FOUNDRY = "llm-foundry"
# pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (commit 31a17bfd): FSDP2, bf16,
# reductions in fp32, 8,192 tokens, batch 2, H100 with HBM2e limited to 500 W, 400 Gb/s a GPU.
TORCHTITAN = "torchtitan 2024-12"
# pytorch/torchtitan, docs/performance.md (commit 04133643): FSDP2 on 64 A100 80 GB. The network is
# not given; 8 x 200 Gb/s is assumed.
TORCHTITAN_A100 = "torchtitan performance.md"
# foundation-model-stack/fms-fsdp, README.md (commit 5e522b4c): FSDP1 without torch.compile, 4,096
# tokens, batch 2, bf16 reductions (fms_fsdp/policies/mixed_precision.py), 400 Gb/s a node of 8 A100
# and 800 Gb/s a node of 8 H100. 13B is left out, because its recomputation is not given. Neither
# these nor torchtitan's A100 have a measurement of a single node, so they use llm-foundry's fit.
FMS_FSDP = "fms-fsdp"

MEASUREMENTS = (
    Measurement(H100, H100_400G, MPT_13B, 8, 2, 2048, NONE, 4, 4792, LLM_FOUNDRY, fits=True),
    Measurement(H100, H100_400G, MPT_13B, 16, 2, 2048, NONE, 4, 4767, LLM_FOUNDRY),
    Measurement(H100, H100_400G, MPT_13B, 32, 2, 2048, NONE, 4, 4811, LLM_FOUNDRY),
    Measurement(H100, H100_400G, MPT_13B, 64, 2, 2048, NONE, 4, 4800, LLM_FOUNDRY),
    Measurement(H100, H100_400G, MPT_1B, 16, 20, 2048, NONE, 4, 46037, LLM_FOUNDRY),
    Measurement(H100, H100_400G, MPT_1B, 32, 20, 2048, NONE, 4, 45130, LLM_FOUNDRY),
    Measurement(H100, H100_400G, MPT_1B, 64, 20, 2048, NONE, 4, 44402, LLM_FOUNDRY),
    Measurement(H100, H100_400G, MPT_3B, 32, 6, 2048, NONE, 4, 23021, LLM_FOUNDRY),
    Measurement(H100, H100_400G, MPT_3B, 64, 6, 2048, NONE, 4, 22525, LLM_FOUNDRY),
    Measurement(H100, H100_400G, MPT_7B, 8, 6, 2048, NONE, 4, 10643, LLM_FOUNDRY),
    Measurement(H100, H100_400G, MPT_30B, 32, 14, 2048, FULL, 4, 2308, LLM_FOUNDRY),
    Measurement(H100, H100_400G, MPT_70B, 32, 2, 2048, FULL, 4, 882, LLM_FOUNDRY),
    Measurement(H100, H100_400G, MPT_70B, 64, 8, 2048, FULL, 4, 1039, LLM_FOUNDRY),
    Measurement(H100, H100_100G, LLAMA2_7B, 96, 2, 4096, NONE, 2, 7500, FMS_FSDP, hybrid=True),
    Measurement(H100, H100_100G, LLAMA2_34B, 96, 2, 4096, FULL, 2, 1550, FMS_FSDP),
    Measurement(H100, H100_100G, LLAMA2_70B, 96, 2, 4096, FULL, 2, 800, FMS_FSDP),
    Measurement(
        H100_500W, H100_400G, LLAMA3_8B, 8, 2, 8192, SELECTIVE_OP, 4, 5762, TORCHTITAN, fits=True
    ),
    Measurement(H100_500W, H100_400G, LLAMA3_8B, 128, 2, 8192, SELECTIVE_OP, 4, 5605, TORCHTITAN),
    Measurement(
        H100_500W_COMPILED, H100_400G, LLAMA3_8B, 8, 2, 8192, SELECTIVE_OP, 4, 6667, TORCHTITAN,
        fits=True,
    ),
    Measurement(
        H100_500W_COMPILED, H100_400G, LLAMA3_8B, 128, 2, 8192, SELECTIVE_OP, 4, 6514, TORCHTITAN
    ),
    Measurement(A100_80, A100_200G, MPT_13B, 8, 2, 2048, NONE, 4, 2262, LLM_FOUNDRY, fits=True),
    Measurement(A100_80, A100_200G, MPT_7B, 8, 6, 2048, NONE, 4, 4641, LLM_FOUNDRY),
    Measurement(A100_80, A100_200G, MPT_70B, 32, 2, 2048, FULL, 2, 373, LLM_FOUNDRY),
    Measurement(A100_80, A100_200G, MPT_70B, 64, 8, 2048, FULL, 2, 410, LLM_FOUNDRY),
    Measurement(
        A100_80, A100_200G, LLAMA3_8B, 64, 1, 8192, SELECTIVE_LAYER, 4, 2904, TORCHTITAN_A100
    ),
    Measurement(A100_80, A100_200G, LLAMA3_8B, 64, 1, 8192, SELECTIVE_OP, 4, 2973, TORCHTITAN_A100),
    Measurement(A100_80, A100_200G, LLAMA3_70B, 64, 1, 8192, FULL, 4, 331, TORCHTITAN_A100),
    Measurement(A100_80, A100_200G, LLAMA2_13B, 64, 2, 4096, NONE, 4, 2162, TORCHTITAN_A100),
    Measurement(A100_80, A100_200G, LLAMA2_70B, 64, 2, 4096, FULL, 4, 353, TORCHTITAN_A100),
    Measurement(A100_80, A100_50G, LLAMA2_7B, 128, 2, 4096, NONE, 2, 3700, FMS_FSDP, hybrid=True),
    Measurement(A100_80, A100_50G, LLAMA2_34B, 128, 2, 4096, FULL, 2, 700, FMS_FSDP),
    Measurement(A100_80, A100_50G, LLAMA2_70B, 128, 2, 4096, FULL, 2, 370, FMS_FSDP),
    Measurement(A100_40, A100_200G, MPT_7B, 8, 12, 2048, FULL, 2, 3679, LLM_FOUNDRY, fits=True),
    Measurement(A100_40, A100_200G, MPT_7B, 32, 18, 2048, FULL, 2, 3725, LLM_FOUNDRY),
    Measurement(A100_40, A100_200G, MPT_7B, 64, 18, 2048, FULL, 2, 3665, LLM_FOUNDRY),
    Measurement(A100_40, A100_200G, MPT_7B, 128, 18, 2048, FULL, 2, 3623, LLM_FOUNDRY),
    Measurement(A100_40, A100_200G, MPT_13B, 64, 16, 2048, FULL, 2, 1976, LLM_FOUNDRY),
    Measurement(A100_40, A100_200G, MPT_13B, 128, 16, 2048, FULL, 2, 1972, LLM_FOUNDRY),
    Measurement(A100_40, A100_200G, MPT_1B, 32, 10, 2048, NONE, 2, 15555, LLM_FOUNDRY),
    Measurement(A100_40, A100_200G, MPT_1B, 64, 10, 2048, NONE, 2, 19001, LLM_FOUNDRY),
    Measurement(A100_40, A100_200G, MPT_1B, 128, 10, 2048, NONE, 2, 18647, LLM_FOUNDRY),
    Measurement(A100_40, A100_200G, MPT_3B, 32, 6, 2048, NONE, 2, 9914, LLM_FOUNDRY),
    Measurement(A100_40, A100_200G, MPT_3B, 64, 6, 2048, NONE, 2, 9736, LLM_FOUNDRY),
    Measurement(A100_40, A100_200G, MPT_3B, 128, 6, 2048, NONE, 2, 9538, LLM_FOUNDRY),
    Measurement(A100_40, A100_200G, MPT_30B, 128, 6, 2048, FULL, 2, 865, LLM_FOUNDRY),
    Measurement(A100_40, A100_200G, MPT_70B, 64, 2, 2048, FULL, 2, 276, LLM_FOUNDRY),
    Measurement(A100_40, A100_200G, MPT_70B, 128, 4, 2048, FULL, 2, 376, LLM_FOUNDRY),
)  # fmt: skip
