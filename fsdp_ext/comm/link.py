"""``Link``: how long collectives take, by published figures or by a fit to measured times."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from fsdp_ext._util.files import write_text
from fsdp_ext._util.numbers import MOST_RANKS, as_bool, is_at_least, is_real


@dataclass(frozen=True)
class Link:
    """The connection between ranks. A collective of S bytes takes alpha + S / beta seconds.

    S is the "size" of nccl-tests (doc/PERFORMANCE.md): the bytes of the whole result of an
    all-gather, or of one rank's input to a reduction. So beta is the "algbw" for large S, and the
    "busbw" is beta * (N - 1) / N on N ranks. An all-reduce takes alpha + 2 S / beta. The figures
    hold for the number of ranks that they were measured with. With fewer ranks, each one has a
    larger part of the result already, so collectives are faster than this formula says.

    Args:
        name: name of the link, for reports.
        alpha: latency of a collective, seconds.
        beta: bandwidth, bytes a second.
        reduce_alpha: latency of reductions, if it differs.
        reduce_beta: bandwidth of reductions, if it differs.
        ranks: the largest number of ranks for which the figures hold; 0 for any number.
        across: the link between groups of ``ranks`` ranks, from each rank to its peers in the
            other groups. A collective over more than ``ranks`` ranks uses both links in turn.
        one_wire: whether a gather and a reduction at the same time share the bandwidth, as messages
            between hosts do. Otherwise each has it for itself.
        source: the source of the figures.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if a figure is out of range.
    """

    name: str
    alpha: float
    beta: float
    reduce_alpha: float | None = None
    reduce_beta: float | None = None
    ranks: int = 0
    across: Link | None = None
    one_wire: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        """Check the figures."""
        for name, text in (("name", self.name), ("source", self.source)):
            if not isinstance(text, str):
                raise TypeError(f"Link got {name}={text!r}. Pass a string.")
        if self.across is not None and not isinstance(self.across, Link):
            raise TypeError(
                f"link '{self.name}' has across={self.across!r}. Pass a Link, or leave it out."
            )
        if not is_at_least(self.ranks, 0, MOST_RANKS):
            raise ValueError(
                f"link '{self.name}' has ranks={self.ranks!r}. Pass the largest number of ranks "
                "for which the figures hold, or 0 for any number."
            )
        latencies, rates = zip(*self.costs(), strict=True)
        if not all(is_real(value) and value >= 0 for value in latencies):
            raise ValueError(
                f"link '{self.name}' has alpha={self.alpha!r}, reduce_alpha={self.reduce_alpha!r}. "
                "Pass latencies in seconds, 0 or more, such as 30e-6."
            )
        if not all(is_real(value) and value > 0 for value in rates):
            raise ValueError(
                f"link '{self.name}' has beta={self.beta!r}, reduce_beta={self.reduce_beta!r}. "
                "Pass positive bandwidths in bytes a second, such as 12e9."
            )
        if self.across is not None and self.ranks < 1:
            raise ValueError(
                f"link '{self.name}' has another link across but ranks={self.ranks!r}. Pass how "
                "many ranks it connects itself, for example ranks=8."
            )
        as_bool(f"link '{self.name}'", "one_wire", self.one_wire)

    def over(self, world_size: int) -> Link:
        """Return the link that ``world_size`` ranks see: this one, or this one and ``across``.

        Between groups each rank carries its own part: of S bytes, S / ranks.

        Raises:
            ValueError: if the figures do not hold for so many ranks.
        """
        if 0 < self.ranks < world_size and self.across is None:
            raise ValueError(
                f"link '{self.name}' has figures for at most {self.ranks} ranks, not for "
                f"{world_size}. Pass across=, the link between groups, or ranks=0 if the figures "
                "hold for any number."
            )
        if self.across is None or world_size <= self.ranks:
            return replace(self, across=None)
        far = self.across.over(-(-world_size // self.ranks))

        def joined(near: tuple[float, float], beyond: tuple[float, float]) -> tuple[float, float]:
            return near[0] + beyond[0], 1 / (1 / near[1] + 1 / (self.ranks * beyond[1]))

        gather, reduce = map(joined, self.costs(), far.costs())
        return Link(
            name=f"{self.name}, {far.name} across",
            alpha=gather[0],
            beta=gather[1],
            reduce_alpha=reduce[0],
            reduce_beta=reduce[1],
            one_wire=self.one_wire or far.one_wire,
            source=self.source,
        )

    def between_replicas(self, shards: int, replicas: int) -> Link:
        """Return the link that replicas all-reduce over, if this one connects all ranks.

        That is this link if its figures hold for all ranks, and else ``across``.

        Args:
            shards: how many ranks shard the model together.
            replicas: how many ranks have the same shard.

        Raises:
            ValueError: if this link has no figures for so many ranks.
        """
        if 0 < self.ranks < shards * replicas:
            if self.across is None:
                raise ValueError(
                    f"link '{self.name}' has figures for at most {self.ranks} ranks, and "
                    f"{replicas} replicas of {shards} ranks are {shards * replicas}. Pass "
                    "replica_link=, the link between replicas."
                )
            return self.across.over(replicas)
        return replace(self, across=None)

    def costs(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return (alpha, beta) of all-gathers and of reductions: seconds and bytes a second."""
        reduce_alpha = self.alpha if self.reduce_alpha is None else self.reduce_alpha
        reduce_beta = self.beta if self.reduce_beta is None else self.reduce_beta
        return (self.alpha, self.beta), (reduce_alpha, reduce_beta)

    def seconds(self, operation: str, nbytes: int) -> float:
        """Return how many seconds a collective takes.

        Args:
            operation: "all_gather", "reduce_scatter" or "all_reduce".
            nbytes: S as above, in bytes.
        """
        gather, reduce = self.costs()
        costs = {"all_gather": gather, "reduce_scatter": reduce, "all_reduce": reduce}
        alpha, beta = costs[operation]
        return alpha + (2 * nbytes if operation == "all_reduce" else nbytes) / beta

    def save(self, path: str | Path, measured: Mapping[str, Any] | None = None) -> None:
        """Write the link as JSON, whole or not at all. ``measured`` says how it was measured."""
        document = asdict(self) | ({} if measured is None else {"measured": dict(measured)})
        write_text(path, json.dumps(document, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Link:
        """Read a file that ``save`` or ``python -m fsdp_ext measure-link`` has written.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it does not contain a link.
        """
        try:
            figures = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:  # UnicodeDecodeError, too
            raise ValueError(f"{path} is not valid JSON ({error}).") from error
        return cls._from(figures, str(path))

    @classmethod
    def _from(cls, figures: Any, path: str) -> Link:
        known = {field.name for field in fields(cls)}
        if not isinstance(figures, dict) or not {"name", "alpha", "beta"} <= figures.keys():
            raise ValueError(
                f"{path} is not a link, which has name, alpha and beta. `python -m fsdp_ext "
                "measure-link --out FILE` writes one."
            )
        values = {name: value for name, value in figures.items() if name in known}
        if values.get("across") is not None:
            values["across"] = cls._from(values["across"], path)
        return cls(**values)


# Busbw 350 GB/s of all-gathers, 360 of reduce-scatters: https://github.com/NVIDIA/nccl/issues/1281.
# Latency: 32.6 us for a small all-reduce of 8 H100 (vpbenchmarking, results/nccl/nccl_singlenode),
# about 26 us for a small all-gather of 8 H800 (SGLang's symmetric memory benchmark).
H100_NODE = Link(
    "8xH100 NVLink",
    alpha=30e-6,
    beta=350e9 * 8 / 7,
    reduce_beta=360e9 * 8 / 7,
    ranks=8,
    source="NVIDIA/nccl#1281",
)

# Busbw 361.4 and 362.9 GB/s: https://github.com/stas00/ml-engineering, network/README.md (NCCL
# 2.27.7). Latency: 30.5 us for an 8 KiB all-reduce, from its 0.47 GB/s in
# https://github.com/Azure/AI-benchmarking-guide, Azure_Results/ND_H200_v5_results.md.
H200_NODE = Link(
    "8xH200 NVLink",
    alpha=30e-6,
    beta=361.4e9 * 8 / 7,
    reduce_beta=362.9e9 * 8 / 7,
    ranks=8,
    source="stas00/ml-engineering, network/README.md",
)

# 4 nodes of 8 H100, one 400 Gb/s InfiniBand NIC a GPU: all-gather 323.53 GB/s busbw at 8 GiB and
# 49.68 us at 512 bytes (vpbenchmarking, results/nccl/nccl_multinode). No figure for reduce-scatter
# was found, so reductions have the same one.
INFINIBAND_400G_NODES = Link(
    "nodes of 8, 400G InfiniBand a GPU",
    alpha=50e-6,
    beta=323.5e9 * 32 / 31,
    source="vpbenchmarking, results/nccl/nccl_multinode",
)

# One 100 Gb/s NIC a rank, RDMA: 12 GB/s (https://github.com/NVIDIA/nccl-tests/issues/119, and
# NET_BW in NCCL's src/graph/topo.h). Latency: 46 us, a small broadcast over TCP between two nodes
# (https://github.com/NVIDIA/nccl-tests/issues/82). No latency of an all-gather was found.
ETHERNET_100G = Link(
    "100G Ethernet",
    alpha=46e-6,
    beta=12e9,
    source="NVIDIA/nccl-tests#119 and #82",
)

# For hybrid sharding: NVLink within a node; across nodes each GPU has its own 400 Gb/s NIC, which
# gives 46 to 48 GB/s (https://github.com/NVIDIA/nccl-tests/issues/290), at the latency above.
H100_CLUSTER = replace(
    H100_NODE,
    name="8xH100 NVLink",
    across=Link("400G InfiniBand", alpha=50e-6, beta=47e9, source="NVIDIA/nccl-tests#290"),
)

PRESETS = {
    "h100_node": H100_NODE,
    "h200_node": H200_NODE,
    "infiniband_400g_nodes": INFINIBAND_400G_NODES,
    "ethernet_100g": ETHERNET_100G,
    "h100_cluster": H100_CLUSTER,
}


# - A fit


@dataclass(frozen=True)
class Sample:
    """The time of one operation at one size."""

    operation: str
    nbytes: int  # summed over all ranks
    seconds: float  # on the slowest rank, the median over repeats


@dataclass(frozen=True)
class Fit:
    """alpha + S / beta for one operation."""

    alpha: float  # seconds
    beta: float  # bytes per second
    residual: float  # root mean square of the relative errors at the fitted sizes

    def predict(self, nbytes: int) -> float:
        """Return the predicted seconds of a collective of ``nbytes``."""
        return self.alpha + nbytes / self.beta


def fit(samples: Sequence[Sample]) -> Fit:
    """Fit alpha + S / beta by least squares in the relative error.

    The problem is linear in alpha and 1 / beta: each sample asks for (alpha + S / beta) / t = 1.
    Noise may lead to a negative latency, which is replaced by 0.
    """
    if len({sample.nbytes for sample in samples}) < 2:
        raise ValueError("A fit of alpha and beta needs samples of at least two sizes.")
    times = torch.tensor([sample.seconds for sample in samples], dtype=torch.float64)
    sizes = torch.tensor([sample.nbytes for sample in samples], dtype=torch.float64)
    ones = torch.ones_like(times)
    scale = float(sizes.mean())  # gives both columns the same magnitude
    columns = torch.stack([ones / times, sizes / scale / times], dim=1)
    alpha, slope = torch.linalg.lstsq(columns, ones[:, None]).solution[:, 0].tolist()
    if alpha < 0:
        alpha = 0.0
        slope = float((columns[:, 1] @ ones) / (columns[:, 1] @ columns[:, 1]))
    if slope <= 0:
        raise ValueError(
            "In these samples, larger collectives do not take longer. Measure again on a machine "
            "that is less busy."
        )
    predicted = columns @ torch.tensor([alpha, slope], dtype=torch.float64)
    return Fit(alpha, scale / slope, float((predicted - 1).square().mean().sqrt()))
